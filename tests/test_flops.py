"""FLOP counts against algorithms that count their own arithmetic and give the right answer."""

from __future__ import annotations

import numpy as np
import pytest

from replayssm import flops
from replayssm.geometry import Geometry


class Tally:
    """Linear algebra that counts its additions and multiplications, an accumulation from zero as two a term."""

    def __init__(self) -> None:
        self.count = 0

    def scale(self, a: float | np.ndarray, x: np.ndarray) -> np.ndarray:
        self.count += x.size
        return a * x

    def matvec(self, m: np.ndarray, x: np.ndarray) -> np.ndarray:
        self.count += 2 * m.size
        return m @ x

    def dot(self, x: np.ndarray, y: np.ndarray) -> float:
        self.count += 2 * x.size
        return float(x @ y)

    def add_scaled(self, y: np.ndarray, a: float, x: np.ndarray) -> np.ndarray:
        self.count += 2 * x.size
        return y + a * x

    def add_outer(self, m: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        self.count += 2 * m.size
        return m + np.outer(x, y)

    def corrected(self, beta: float, v: np.ndarray, p: np.ndarray) -> np.ndarray:
        self.count += 2 * v.size
        return beta * (v - p)


TINY = [Geometry("mamba2", 4, 2, 3, 5), Geometry("gdn", 4, 2, 3, 5), Geometry("kda", 4, 4, 3, 5)]


class Layer:
    """One row of a tiny layer with random inputs: the plain recurrence, and replay's three ways, all counted.

    A decay is a scalar a head, or for KDA a vector over the key channels; both broadcast over the state.
    """

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        g, rng = geometry, np.random.default_rng(0)
        self.g, self.vector = g, g.family == "kda"
        self.decay = np.exp(-rng.random((tokens, g.heads, g.state_dim if self.vector else 1)))
        self.x, self.beta = rng.normal(size=(tokens, g.heads, g.head_dim)), rng.random((tokens, g.heads))
        self.k, self.q = rng.normal(size=(2, tokens, g.groups, g.state_dim)) / 3
        self.state = rng.normal(size=(g.heads, g.head_dim, g.state_dim))

    def step(self, t: Tally, states: np.ndarray, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Outputs, states and what the ring calls x (weighted by dt) or d."""
        new, out, added = [], [], []
        for h in range(self.g.heads):
            j = h // self.g.heads_per_group
            s = t.scale(self.decay[i, h], states[h])
            if self.g.family == "mamba2":
                value = t.scale(self.beta[i, h], self.x[i, h])
            else:
                value = t.corrected(self.beta[i, h], self.x[i, h], t.matvec(s, self.k[i, j]))
            s = t.add_outer(s, value, self.k[i, j])
            out.append(t.matvec(s, self.q[i, j]))
            new.append(s)
            added.append(value)
        return np.array(out), np.array(new), np.array(added)

    def since(self, i: int, to: int) -> np.ndarray:
        """Decay of token i's contribution up to token ``to``; scalar arithmetic or exponentials, so not counted."""
        return np.prod(self.decay[i + 1 : to + 1], axis=0)

    def read(self, t: Tally, held: np.ndarray, window: int) -> np.ndarray:
        """Outputs of ``window`` tokens behind the ring tokens ``held`` [p, H, P], the state not materialised."""
        p, g, outs = len(held), self.g, []
        dots: dict[tuple[str, int, int, int], float] = {}
        decayed_keys: dict[tuple[int, int, int], np.ndarray] = {}

        def keyed(name: str, h: int, i: int, to: int) -> float:
            """k_i . a_to, decayed from i to ``to``: once a key head, and KDA's decayed key once for q and k."""
            j, a = h // g.heads_per_group, {"q": self.q, "k": self.k}[name]
            if (j, i, to) not in decayed_keys:
                key = self.k[i, j]
                decayed_keys[j, i, to] = t.scale(self.since(i, to)[h], key) if self.vector and i != to else key
            if (name, j, i, to) not in dots:
                dots[name, j, i, to] = t.dot(decayed_keys[j, i, to], a[to, j])
            return dots[name, j, i, to] * (1.0 if self.vector else float(self.since(i, to)[h, 0]))

        def from_state(a: np.ndarray, h: int, to: int) -> np.ndarray:
            decay = np.prod(self.decay[: to + 1, h], axis=0)
            if self.vector:
                return t.matvec(self.state[h], t.scale(decay, a))
            return t.scale(decay, t.matvec(self.state[h], a))

        corrected: list[np.ndarray] = []
        for s in range(p, p + window):
            out, values = [], []
            for h in range(g.heads):
                j = h // g.heads_per_group
                o = from_state(self.q[s, j], h, s)
                for i in range(p):
                    o = t.add_scaled(o, keyed("q", h, i, s) * self.weight(i, h), held[i][h])
                if g.family == "mamba2":
                    for i in range(p, s + 1):
                        o = t.add_scaled(o, keyed("q", h, i, s) * self.weight(i, h), self.x[i, h])
                else:
                    e = from_state(self.k[s, j], h, s)
                    for i in range(p):
                        e = t.add_scaled(e, keyed("k", h, i, s), held[i][h])
                    for i in range(p, s):
                        e = t.add_scaled(e, keyed("k", h, i, s), corrected[i - p][h])
                    values.append(t.corrected(self.beta[s, h], self.x[s, h], e))
                    for i in range(p, s):
                        o = t.add_scaled(o, keyed("q", h, i, s), corrected[i - p][h])
                    o = t.add_scaled(o, keyed("q", h, s, s), values[-1])
                out.append(o)
            corrected.append(np.array(values))
            outs.append(np.array(out))
        return np.array(outs)

    def solve(self, t: Tally, tokens: int) -> np.ndarray:
        """GDN and KDA: d of the first tokens from their raw inputs and the state before them."""
        g, solved = self.g, np.zeros((tokens, self.g.heads, self.g.head_dim))
        for s in range(tokens):
            for j in range(g.groups):
                decays = [self.since(i, s)[j * g.heads_per_group] if self.vector else 1.0 for i in range(s)]
                keys = [t.scale(c, self.k[i, j]) if self.vector else self.k[i, j] for i, c in enumerate(decays)]
                dots = [t.dot(key, self.k[s, j]) for key in keys]
                for h in range(j * g.heads_per_group, (j + 1) * g.heads_per_group):
                    decay = np.prod(self.decay[: s + 1, h], axis=0)
                    if self.vector:
                        e = t.matvec(self.state[h], t.scale(decay, self.k[s, j]))
                    else:
                        e = t.scale(decay, t.matvec(self.state[h], self.k[s, j]))
                    for i, dot in enumerate(dots):
                        e = t.add_scaled(e, dot * (1.0 if self.vector else self.since(i, s)[h, 0]), solved[i, h])
                    solved[s, h] = t.corrected(self.beta[s, h], self.x[s, h], e)
        return solved

    def weight(self, i: int, h: int) -> float:
        return float(self.beta[i, h]) if self.g.family == "mamba2" else 1.0

    def fold(self, t: Tally, held: np.ndarray) -> np.ndarray:
        """The state with the ring folded in, and not yet decayed over the ring: see ``flush``."""
        new = self.state.copy()
        for i, values in enumerate(held):
            for h in range(self.g.heads):
                key, since = self.k[i, h // self.g.heads_per_group], self.since(i, len(held) - 1)[h]
                if self.vector:
                    new[h] = t.add_outer(new[h] if i else self.decayed(h, len(held)), values[h], t.scale(since, key))
                else:
                    value = t.scale(since * self.weight(i, h), values[h])
                    new[h] = t.add_outer(new[h] if i else self.decayed(h, len(held)), value, key)
        return new

    def decayed(self, h: int, p: int) -> np.ndarray:
        return np.prod(self.decay[:p, h], axis=0) * self.state[h]


def run_plain(layer: Layer, tokens: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Outputs, final state and ring values of the plain recurrence; Mamba-2's ring holds x, not dt x."""
    states, outs, ring = layer.state, [], []
    for i in range(tokens):
        out, states, value = layer.step(Tally(), states, i)
        outs.append(out)
        ring.append(layer.x[i] if layer.g.family == "mamba2" else value)
    return outs, states, np.array(ring).reshape(tokens, layer.g.heads, layer.g.head_dim)


@pytest.mark.parametrize("geometry", TINY, ids=lambda g: g.family)
def test_stored_flops_are_those_of_the_recurrence(geometry: Geometry) -> None:
    tally, layer = Tally(), Layer(geometry, 1)
    layer.step(tally, layer.state, 0)
    assert flops.stored(geometry) == tally.count


@pytest.mark.parametrize("geometry", TINY, ids=lambda g: g.family)
@pytest.mark.parametrize(("held", "window"), [(0, 1), (3, 1), (0, 3), (4, 3)])
def test_read_flops_are_those_of_a_read_that_gives_the_right_outputs(
    geometry: Geometry, held: int, window: int
) -> None:
    tally, layer = Tally(), Layer(geometry, held + window)
    outs, _, _ = run_plain(layer, held + window)
    _, _, ring = run_plain(layer, held)
    np.testing.assert_allclose(layer.read(tally, ring, window), outs[held:], rtol=1e-12, atol=1e-12)
    assert flops.read(geometry, held, window) == tally.count


@pytest.mark.parametrize("geometry", TINY, ids=lambda g: g.family)
def test_fold_flops_are_those_of_a_fold_that_gives_the_right_state(geometry: Geometry) -> None:
    tally, layer = Tally(), Layer(geometry, 4)
    _, states, ring = run_plain(layer, 4)
    np.testing.assert_allclose(layer.fold(tally, ring), states, rtol=1e-12, atol=1e-12)
    assert flops.fold(geometry, 4, raw=False) == tally.count
    assert flops.flush(geometry, 4, None, raw=False) == tally.count + flops.stored(geometry)
    assert flops.flush(geometry, 4, 2, raw=False) == tally.count + geometry.state_elements + flops.read(geometry, 0, 2)


@pytest.mark.parametrize("geometry", TINY, ids=lambda g: g.family)
def test_raw_fold_adds_the_solve_for_d(geometry: Geometry) -> None:
    tally, layer = Tally(), Layer(geometry, 5)
    if geometry.family != "mamba2":  # whose ring holds raw inputs anyway
        _, _, ring = run_plain(layer, 5)
        np.testing.assert_allclose(layer.solve(tally, 5), ring, rtol=1e-12, atol=1e-12)
    assert flops.fold(geometry, 5, raw=True) - flops.fold(geometry, 5, raw=False) == tally.count
