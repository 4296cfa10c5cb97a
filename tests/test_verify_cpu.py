"""The CPU kernels of a window against the float64 recurrence, which never drafts: outputs, all memory, refusals.

Rows start at different steps in scattered slots with rings that start anywhere, bring windows of different lengths and
have any number of their tokens accepted; what is padding, free, not yet written or behind a short window holds NaN.
Budgets are twice the error of the plain recurrence in float32 with one rounding of the output.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from decoding import SENTINEL, corrected, same_bits
from sequences import relative_error
from torch import Tensor

from experiments.arms import snapshots_cpu, verify_cpu
from experiments.case import Precision, Timing, WindowCase
from experiments.inputs import make_inputs, make_state
from experiments.measure import gates
from experiments.measure.layers import forget, stacked
from experiments.measure.window_gates import WindowCheck, token_of
from replayssm.cache import ReplayCache
from replayssm.geometry import Geometry
from replayssm.kernels.cpu.snapshots import snapshots_step
from replayssm.kernels.cpu.verify import verify_step
from replayssm.kernels.cpu.window import FAMILIES as WITH_WINDOWS
from replayssm.recurrence import FAMILIES

GEOMETRIES = {
    "mamba2": (Geometry("mamba2", 4, 2, 17, 128), Geometry("mamba2", 6, 3, 13, 19)),
    "gdn": (Geometry("gdn", 4, 2, 17, 128), Geometry("gdn", 6, 2, 5, 35)),
}
ROWS, SLOTS, STEPS = 4, 6, 12
every_family = pytest.mark.parametrize("family", GEOMETRIES)


class Truth:
    """Windows of a case, and the recurrence in float64 and float32: ``states`` by arithmetic ``[B,H,P,N]``."""

    def __init__(self, geometry: Geometry, window: int, dtype: torch.dtype, seed: int) -> None:
        self.geometry, self.window, self.dtype = geometry, window, dtype
        self.generator = torch.Generator().manual_seed(seed)
        tokens = make_inputs(geometry, ROWS, STEPS * window, dtype=dtype, seed=seed)
        if geometry.family == "mamba2" and window % 2:
            z = torch.randn(tokens[0].x.shape, generator=self.generator).to(dtype)
            tokens = [token._replace(z=z, D=None) for token in tokens]
        if geometry.family == "gdn":  # nothing has no direction: 1 / norm is that of epsilon
            tokens[1].k[:, 0], tokens[2].q[:, 1] = 0, 0
        self.windows = [stacked(tokens[i : i + window]) for i in range(0, len(tokens), window)]
        start = make_state(geometry, ROWS, dtype=torch.float32, seed=seed + 1)
        self.start, self.states = start, [start.double(), start]
        self.errors: dict[str, tuple[list[float], list[float]]] = {}

    def draw(self, lowest: int, highest: Tensor | int) -> Tensor:
        """``[B]`` integers from lowest to highest."""
        drawn = torch.rand(ROWS, generator=self.generator)
        return lowest + (drawn * (torch.as_tensor(highest) + 1 - lowest)).long()

    def run(self, step: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """By arithmetic, outputs of each token ``[B,H,P]``, and states, the first being that in front."""
        outputs: list[list[Tensor]] = [[], []]
        states = [[state] for state in self.states]
        for t in range(self.window):
            for number in range(2):
                token = token_of(self.windows[step], t)
                y, state = FAMILIES[self.geometry.family].step(states[number][-1], token)
                outputs[number].append(y)
                states[number].append(state)
        return outputs, states

    def add(self, name: str, kernel: Tensor, both: list[Tensor]) -> None:
        """Errors of the kernel and of float32, both rounded as the kernel's is."""
        found = self.errors.setdefault(name, ([], []))
        for into, of in zip(found, (kernel, both[1].to(kernel.dtype)), strict=True):
            into.append(relative_error(of[None], both[0][None]))

    @property
    def over(self) -> dict[str, tuple[float, float]]:
        """What is outside of its budget."""
        largest = {name: (max(kernel), max(honest)) for name, (kernel, honest) in self.errors.items()}
        return {name: pair for name, pair in largest.items() if not pair[0] <= 2 * pair[1] + 1e-7}

    def poisoned(self, step: int, lengths: Tensor, live: list[bool]) -> Any:
        """The window's inputs with NaN in padding rows and behind short windows."""
        inputs = self.windows[step]
        nothing = (torch.arange(self.window) >= lengths[:, None]) | ~torch.tensor(live)[:, None]

        def of(name: str, tensor: Tensor | None) -> Tensor | None:
            if tensor is None or name in ("A", "D"):
                return tensor
            return tensor.masked_fill(nothing.view(*nothing.shape, *[1] * (tensor.dim() - 2)), torch.nan)

        return type(inputs)(*(of(name, tensor) for name, tensor in zip(inputs._fields, inputs, strict=True)))


@pytest.mark.parametrize(("window", "interval_length", "odd_sizes", "dtype"), [
    (1, 3, False, torch.float32), (2, 2, True, torch.bfloat16), (3, 7, True, torch.float32),
    (4, 9, False, torch.bfloat16), (5, 3, False, torch.float32), (8, 9, False, torch.float32),
])  # fmt: skip
@every_family
def test_verify(family: str, window: int, interval_length: int, odd_sizes: bool, dtype: torch.dtype) -> None:
    T, L, truth = window, interval_length, Truth(GEOMETRIES[family][odd_sizes], window, dtype, seed=window)
    cache = ReplayCache(truth.geometry, slots=SLOTS, interval_length=L, window=T, input_dtype=dtype)
    every = cache.allocate(SLOTS)
    handles = [every[i] for i in (4, 0, 2, 5)]
    cache.release([every[1], every[3]])
    cache.load_state(cache.batch(handles), truth.start[None])
    cache.origin[:] = torch.arange(SLOTS, dtype=torch.int32) * 5 % cache.capacity
    layer, flushes = cache.layer(0), [0] * SLOTS
    for step in range(STEPS):
        live = [step >= row and (step + row) % 5 != 4 for row in range(ROWS)]
        batch = cache.batch([handle if here else None for handle, here in zip(handles, live, strict=True)])
        index, due = cache.index(batch), cache.flush_due(batch)
        lengths = truth.draw(0, T) if step % 2 else torch.full((ROWS,), T)
        out = torch.full((ROWS, T, truth.geometry.heads, truth.geometry.head_dim), SENTINEL).to(dtype)
        expected, state, ring = out.clone(), layer.state.clone(), {name: t.clone() for name, t in layer.ring.items()}
        cursor, origin = cache.cursor.clone(), cache.origin.clone()

        verify_step(out, layer, truth.poisoned(step, lengths, live), index, lengths=lengths if step % 2 else None)

        outputs, states = truth.run(step)
        for row in [row for row in range(ROWS) if live[row]]:
            slot, count = int(index[row]), int(lengths[row])
            for t in range(count):
                truth.add("out", out[row, t], [y[t][row] for y in outputs])
                check_appended(truth, layer, ring, token_of(truth.windows[step], t), row, slot, t, states)
            expected[row, :count] = out[row, :count]
            if due[row]:
                truth.add("state", layer.state[slot], [s[0][row] for s in states])
                state[slot] = layer.state[slot]
                flushes[slot] += 1
        assert same_bits(out, expected)
        assert same_bits(layer.state, state)
        assert all(same_bits(layer.ring[name], ring[name]) for name in ring)
        assert layer.flushes.tolist() == flushes
        assert torch.equal(cache.cursor, cursor)
        assert torch.equal(cache.origin, origin)
        accepted = truth.draw(0, lengths) if step % 3 == 2 else lengths * (step % 3)
        accepted = torch.where(torch.tensor(live), accepted, 0)
        truth.states = [torch.stack([each[int(accepted[row])][row] for row in range(ROWS)]) for each in states]
        cache.commit(batch, accepted)
    assert not truth.over
    assert sum(flushes) >= 1
    assert bool(truth.errors.get("d")) == (family == "gdn")


def check_appended(
    truth: Truth, layer: Any, ring: dict[str, Tensor], token: Any, row: int, slot: int, t: int, states: list[Any]
) -> None:
    """Token t lies behind the committed ones; it is copied into ``ring``, what was there before the step."""
    place = (int(layer.origin[slot]) + int(layer.cursor[slot]) + t) % layer.capacity
    for name, tensor in layer.ring.items():
        entry = tensor[slot, :, place]
        if name == "k_rnorm":
            expected = 1 / (token.k[row].double().square().sum(-1) + 1e-6).sqrt()
            torch.testing.assert_close(entry.double(), expected, rtol=1e-6, atol=0)
        elif name == "d":
            wide = [type(token)(*(x.to(each[t].dtype) for x in token)) for each in states]
            truth.add("d", entry, [corrected(of, row, each[t][row]) for of, each in zip(wide, states, strict=True)])
        else:
            assert torch.equal(entry, getattr(token, name)[row]), name
        ring[name][slot, :, place] = entry


@pytest.mark.parametrize(("window", "odd_sizes", "dtype"), [
    (1, True, torch.float32), (3, False, torch.bfloat16), (8, False, torch.float32),
])  # fmt: skip
@every_family
def test_snapshots(family: str, window: int, odd_sizes: bool, dtype: torch.dtype) -> None:
    """From whichever state was accepted; slots of no row and rows of padding stay as they are."""
    T, truth, slots = (
        window,
        Truth(GEOMETRIES[family][odd_sizes], window, dtype, seed=window),
        torch.tensor([4, 0, 2, 5]),
    )
    states = torch.full((SLOTS, T, *truth.start.shape[1:]), torch.nan)
    accepted = truth.draw(1, T)
    states[slots, accepted - 1] = truth.start
    for step in range(4):
        live = [step != row for row in range(ROWS)]
        index = torch.where(torch.tensor(live), slots, -1)
        out = torch.full((ROWS, T, truth.geometry.heads, truth.geometry.head_dim), SENTINEL).to(dtype)
        expected, kept = out.clone(), states.clone()
        inputs = truth.poisoned(step, torch.full((ROWS,), T), live)
        snapshots_step(family, out, states, inputs, index, torch.where(torch.tensor(live), accepted, 0))
        outputs, after = truth.run(step)
        for row in [row for row in range(ROWS) if live[row]]:
            for t in range(T):
                truth.add("out", out[row, t], [y[t][row] for y in outputs])
                truth.add("state", states[slots[row], t], [s[t + 1][row] for s in after])
            expected[row], kept[slots[row]] = out[row], states[slots[row]]
        assert same_bits(out, expected)
        assert same_bits(states, kept)
        accepted = torch.where(torch.tensor(live), truth.draw(1, T), accepted)
        truth.states = [
            torch.stack([each[int(accepted[row]) if live[row] else 0][row] for row in range(ROWS)]) for each in after
        ]
    assert not truth.over


@every_family
def test_arms_pass_the_gates(family: str) -> None:
    """Of `experiments.kernel`, before a cycle and after one; a family without a kernel is said."""
    timing = Timing("test", 2, 1, 5.0, 0.01, 1.0, 1, 60.0)
    shared = ("window", "test", Geometry(family, 2, 1, 16, 16), 3, 7, "staggered", Precision("fp32", "bf16"), "cpu", 1)
    case = WindowCase(*shared, 3, timing, window=3, accepted=2)
    for arm in (verify_cpu, snapshots_cpu):
        assert arm.FAMILIES == WITH_WINDOWS
        assert arm.unsupported(case) is None
        layers = arm.prepare(case, 2)
        for cycles, moment in ((0, "before"), (2, "after")):
            correctness, _ = WindowCheck(case, 2, moment).run(layers, cycles, None)
            assert not correctness.faults()
            gates.mark_copies(layers)
            layers.cycle()
        kda = dataclasses.replace(case, geometry=Geometry("kda", 2, 2, 16, 16))
        assert arm.unsupported(kda) == "no CPU kernel of windows of kda; accepted: mamba2, gdn"
    forget()


def test_refuses_before_anything_changes() -> None:
    geometry = GEOMETRIES["gdn"][1]
    cache = ReplayCache(geometry, slots=2, interval_length=4, window=2, input_dtype=torch.float32)
    slots, layer = cache.index(cache.batch(cache.allocate(2))), cache.layer(0)
    inputs = stacked(make_inputs(geometry, 2, 2, dtype=torch.float32, seed=1))
    out = torch.full((2, 2, geometry.heads, geometry.head_dim), SENTINEL)
    states = torch.zeros(2, 2, *layer.state.shape[1:])
    kda = ReplayCache(Geometry("kda", 6, 6, 5, 35), slots=2, window=2).layer(0)
    raw = ReplayCache(geometry, slots=2, window=2, raw_fold=True).layer(0)
    three = stacked(make_inputs(geometry, 2, 3, dtype=torch.float32, seed=1))
    standard, past = ReplayCache(geometry, slots=2).layer(0), torch.tensor([0, 2])
    counts, one = torch.tensor([1, 3]), torch.ones(2, dtype=torch.int64)
    for message, call in {
        "verify_step needs a cache made with a window": lambda: verify_step(out, standard, inputs, slots),
        "a window of family kda; accepted by the CPU kernels: mamba2, gdn": lambda: verify_step(
            out, kda, inputs, slots
        ),
        "raw_fold=True keeps v and beta": lambda: verify_step(out, raw, inputs, slots),
        r"inputs have shape .*; accepted: \[B, T, ...\] with window=2": lambda: verify_step(out, layer, three, slots),
        r"out has shape \[1, 2, 6, 5\]; accepted: \[2, 2, 6, 5\]": lambda: verify_step(out[:1], layer, inputs, slots),
        r"slots\[1\]=2 is impossible": lambda: verify_step(out, layer, inputs, past),
        r"slots\[1\]=\d is impossible; .* length of 0 to": lambda: verify_step(
            out, layer, inputs, slots, lengths=counts
        ),
        r"slots\[1\]=1 is impossible; .* 1 to 2 accepted": lambda: snapshots_step(
            "gdn", out, states, inputs, torch.arange(2), counts
        ),
        r"state has shape \[2, 2, 6, 5, 35\]; accepted: \[2, 3, ": lambda: snapshots_step(
            "gdn", torch.zeros(2, 3, 6, 5), states, three, slots, one
        ),
        r"states has shape \[2, 6, 5, 35\]": lambda: snapshots_step("gdn", out, layer.state, inputs, slots, one),
    }.items():
        with pytest.raises(ValueError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert (out == SENTINEL).all()
    assert not states.any()
    assert not layer.state.any()
