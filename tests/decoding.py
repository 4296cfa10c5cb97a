"""Requests decoded with a cache and the torch kernels, and beside them the plain recurrence, which never drafts.

A `Run` steps both and checks after every step not only outputs but all memory: what a step may change must hold the
right numbers, and everything else must be what it was, bit for bit, NaN included. Cursor, origin and flushes are
compared with a model of a few lines of plain Python.
"""

from __future__ import annotations

from typing import Any

import torch
from sequences import Sequence, make_sequence, relative_error
from torch import Tensor

from experiments.inputs import make_state
from replayssm.cache import ReplayCache, Slot
from replayssm.geometry import Geometry
from replayssm.kernels.torch import replay_step, verify_step

EXACT = 1e-12
"""Relative error by norm in float64."""
SENTINEL = -7.5
"""What the output rows of padding hold before and must hold after."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, with NaN equal to NaN."""
    return torch.equal(a.nan_to_num(SENTINEL), b.nan_to_num(SENTINEL)) and torch.equal(a.isnan(), b.isnan())


class Run:
    """Requests in a float64 cache, and beside it the truth: ``states [layers,S,H,P,N]`` of the plain recurrence."""

    def __init__(
        self,
        geometry: Geometry,
        rows: int,
        *,
        slots: int,
        interval_length: int,
        window: int | None,
        steps: int,
        layers: int = 1,
        raw_fold: bool = False,
        seed: int = 0,
        flavour: str = "model",
    ) -> None:
        self.cache = ReplayCache(
            geometry,
            slots=slots,
            layers=layers,
            interval_length=interval_length,
            window=window,
            raw_fold=raw_fold,
            state_dtype=torch.float64,
            input_dtype=torch.float64,
        )
        self.geometry, self.length, self.window = geometry, interval_length, window
        self.tokens = 1 if window is None else window
        self.capacity = max(1, interval_length - 1) if window is None else max(interval_length, window) + window
        self.sequences = [
            make_sequence(geometry, rows, steps * self.tokens, seed=seed + 7 * n, flavour=flavour)
            for n in range(layers)
        ]
        self.rows, self.taken = rows, 0
        self.states = torch.full_like(self.cache.state, torch.nan)
        self.cursor, self.origin, self.flushes = [0] * slots, [0] * slots, [0] * slots

    def admit(self, count: int, seed: int | None = None) -> list[Slot]:
        """``count`` new requests, from a zero state or, with a seed, from a state as a prefill leaves it."""
        handles = self.cache.allocate(count)
        index = [slot.index for slot in handles]
        assert (self.cache.state[:, index] == 0).all()
        self.states[:, index] = 0.0
        if seed is not None:
            layers = range(self.cache.layers)
            loaded = torch.stack([make_state(self.geometry, count, dtype=torch.float64, seed=seed + n) for n in layers])
            self.cache.load_state(self.cache.batch(handles), loaded)
            self.states[:, index] = loaded
        assert (self.cache.cursor[index] == 0).all()
        assert (self.cache.origin[index] == 0).all()
        for i in index:
            # An empty ring may start anywhere; in standard decoding no commit would ever move it from entry 0.
            self.cursor[i], self.origin[i] = 0, (3 + 5 * i) % self.capacity
            self.cache.origin[i] = self.origin[i]
        assert all(ring[:, index].isnan().all() for ring in self.cache.ring.values())
        return handles

    def due(self, slot: int) -> bool:
        """The rule in plain words: a full ring in standard decoding; a window that would not fit below L."""
        if self.window is None:
            return self.cursor[slot] == self.length - 1
        return self.length < self.window or self.cursor[slot] + self.window > self.length

    def step(self, slots: list[Slot | None], accepted: list[int]) -> None:
        """One model step of all layers for ``rows`` rows, then the commit; everything is checked on the way."""
        cache, batch = self.cache, self.cache.batch(slots)
        live = [(row, slot.index) for row, slot in enumerate(slots) if slot is not None]
        due = [slot is not None and self.due(slot.index) for slot in slots]
        assert cache.flush_due(batch).tolist() == due
        cursor, origin = cache.cursor.clone(), cache.origin.clone()
        for number in range(cache.layers):
            self._step_layer(number, batch, live, accepted)
            assert torch.equal(cache.cursor, cursor)
            assert torch.equal(cache.origin, origin)
        self.taken += self.tokens
        cache.commit(batch, torch.tensor(accepted) if self.window else 1)
        for row, slot in live:
            if due[row]:
                self.flushes[slot] += 1
                self.origin[slot] = (self.origin[slot] + self.cursor[slot]) % self.capacity
                self.cursor[slot] = accepted[row] if self.window else 0
            else:
                self.cursor[slot] += accepted[row] if self.window else 1
        assert cache.cursor.tolist() == self.cursor
        assert cache.origin.tolist() == self.origin
        assert cache.flushes.tolist() == [self.flushes] * cache.layers

    def _step_layer(self, number: int, batch: Any, live: list[tuple[int, int]], accepted: list[int]) -> None:
        layer, sequence = self.cache.layer(number), self.sequences[number]
        first = torch.full((self.rows,), self.taken)
        inputs = sequence.at(self.taken) if self.window is None else sequence.window(first, self.tokens)
        inputs = inputs.rows(torch.arange(self.rows))
        padding = [row for row in range(self.rows) if row not in dict(live)]
        for name, tensor in zip(inputs._fields, inputs, strict=True):
            if name not in ("A", "D") and tensor is not None:
                tensor[padding] = torch.nan
        shape = (self.rows, *(() if self.window is None else (self.tokens,)))
        out = torch.full((*shape, self.geometry.heads, self.geometry.head_dim), SENTINEL, dtype=torch.float64)
        state, ring = layer.state.clone(), {name: tensor.clone() for name, tensor in layer.ring.items()}

        (replay_step if self.window is None else verify_step)(out, layer, inputs, self.cache.index(batch))

        assert (out[padding] == SENTINEL).all()
        for row, slot in live:
            truth = [self.states[number, slot : slot + 1]]
            outputs = []
            for t in range(self.tokens):
                token = sequence.at(self.taken + t).rows(torch.tensor([row]))
                output, after = sequence.family.step(truth[-1], token)
                outputs.append(output[0])
                truth.append(after)
            expected = outputs[0] if self.window is None else torch.stack(outputs)
            assert relative_error(out[row][None], expected[None]) <= EXACT
            if self.due(slot):
                folded = truth[1] if self.window is None else truth[0]
                assert relative_error(layer.state[slot][None], folded) <= EXACT
                state[slot] = layer.state[slot]
            if self.window or not self.due(slot):
                self._check_appended(layer.ring, ring, sequence, row, slot, truth)
            self.states[number, slot] = truth[accepted[row] if self.window else 1][0]
        assert same_bits(layer.state, state)
        assert all(same_bits(layer.ring[name], ring[name]) for name in ring)

    def _check_appended(
        self,
        ring: dict[str, Tensor],
        before: dict[str, Tensor],
        sequence: Sequence,
        row: int,
        slot: int,
        truth: list[Tensor],
    ) -> None:
        """The step's tokens lie behind the committed ones, and on none of them; they are copied into ``before``."""
        assert self.cursor[slot] + self.tokens <= self.capacity
        for t in range(self.tokens):
            token = sequence.at(self.taken + t)
            place = (self.origin[slot] + self.cursor[slot] + t) % self.capacity
            for name, tensor in ring.items():
                entry = tensor[slot, :, place]
                if name == "k_rnorm":
                    assert relative_error(entry[None], 1 / (token.k[row].square().sum(-1) + 1e-6).sqrt()[None]) <= EXACT
                elif name == "d":
                    assert relative_error(entry[None], corrected(token, row, truth[t][0])[None]) <= EXACT
                else:
                    assert torch.equal(entry, getattr(token, name)[row]), name
                before[name][slot, :, place] = entry


def corrected(token: Any, row: int, state: Tensor) -> Tensor:
    """beta (v - S' k), ``[HV,V]``, of one row from the state before the token."""
    k = token.k[row] / (token.k[row].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    k = k.repeat_interleave(len(state) // len(k), dim=0)
    g = token.g[row] if token.g.dim() == 3 else token.g[row][:, None]
    return token.beta[row][:, None] * (token.v[row] - (state * g.exp()[:, None] * k[:, None]).sum(-1))
