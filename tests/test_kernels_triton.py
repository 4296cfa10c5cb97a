"""The Triton kernels against the plain recurrence in float64: on a GPU where there is one, else interpreted.

A case puts every row at another point of its flush cycle, on scattered slots, in rings that start at different entries;
whatever a step has no business with holds NaN, in inputs of padding rows too, and must be the same bits afterwards.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from decoding import SENTINEL, corrected, same_bits
from sequences import Sequence, make_sequence
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU:
    # Read when Triton defines its own functions, so before its first import.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed")

from replayssm.cache import CacheLayer  # noqa: E402
from replayssm.geometry import Geometry  # noqa: E402
from replayssm.kernels.triton import gdn, kda, mamba2  # noqa: E402
from replayssm.kernels.triton.launch import Launch  # noqa: E402
from replayssm.recurrence import FAMILIES  # noqa: E402

pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"
KERNELS: dict[str, Any] = {"mamba2": mamba2, "gdn": gdn, "kda": kda}
SLOTS = 7
ROUNDING = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative error of one rounding."""
FLOAT32 = 4e-6
"""Relative error by norm of sums of a few dozen float32 numbers."""


def geometry(family: str, head_dim: int = 80, state_dim: int = 16) -> Geometry:
    return Geometry(family, 2, 2 if family == "kda" else 1, head_dim, state_dim)


class Step:
    """One step of rows at different points of their cycle, with its truth.

    ``cursors`` gives each row's ring length, None makes the row padding. Tensors are cut out of larger ones where
    ``strided``, so that no axis but the last is contiguous.
    """

    def __init__(
        self,
        family: str,
        cursors: list[int | None],
        interval_length: int,
        *,
        head_dim: int = 80,
        state_dim: int = 16,
        state_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        flavour: str = "mixed",
        strided: bool = False,
        raw: bool = False,
        decay: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.cursors, self.length, self.strided, self.raw, self.decay = cursors, interval_length, strided, raw, decay
        self.lengths = torch.tensor([cursor or 0 for cursor in cursors])
        shape = geometry(family, head_dim, state_dim)
        drawn = make_sequence(shape, len(cursors), interval_length, seed=seed, flavour=flavour)
        narrow = drawn.to(dtype)
        wide = narrow.inputs._replace(**{n: getattr(drawn.inputs, n).float() for n in WIDE if hasattr(drawn.inputs, n)})
        if decay is not torch.float32:
            in_ring = (torch.arange(interval_length)[:, None] < self.lengths)[..., None, None]
            wide = wide._replace(g=torch.where(in_ring, wide.g.to(decay).float(), wide.g))
        self.sequence = Sequence(shape, drawn.state.to(state_dtype), wide)
        self.truth = Sequence(shape, self.sequence.state.double(), _double(wide))
        self.outputs, self.states = self.truth.run()
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[: len(cursors)]
        live = torch.tensor([cursor is not None for cursor in cursors])
        self.slots = torch.where(live, order, -1)
        self.live = live
        self.capacity = max(1, interval_length - 1)
        self.origin = torch.arange(SLOTS, dtype=torch.int32) * 5 % self.capacity
        self.inputs = self._place_inputs()
        self.layer = self._place_layer(dtype, state_dtype)
        self.out = self._place(torch.full((len(cursors), 2, head_dim), SENTINEL, dtype=dtype))

    def _place(self, tensor: Tensor) -> Tensor:
        if not self.strided or tensor.dim() == 1:
            return tensor.to(DEVICE)
        room = [size + 1 if axis < tensor.dim() - 1 else size for axis, size in enumerate(tensor.shape)]
        larger = torch.full(room, torch.nan, dtype=tensor.dtype, device=DEVICE)
        view = larger[tuple(slice(0, size) for size in tensor.shape)]
        view.copy_(tensor)
        return view

    def _place_inputs(self) -> Any:
        token = self.sequence.at(self.lengths)
        placed = {}
        for name, tensor in zip(token._fields, token, strict=True):
            if tensor is not None and name not in ("A", "D"):
                tensor[~self.live] = torch.nan
            placed[name] = None if tensor is None else self._place(tensor)
        return type(token)(**placed)

    def _place_layer(self, dtype: torch.dtype, state_dtype: torch.dtype) -> CacheLayer:
        d = None if self.truth.geometry.family == "mamba2" else self.truth.corrected(self.states)
        filled = self.truth.ring(self.lengths, self.capacity, d, self.raw)
        if self.raw:
            # Whoever folds from raw inputs has no business with the d of rows that flush.
            filled.d[self.lengths == self.length - 1] = torch.nan
        ring = {}
        for name, tensor in zip(filled._fields, filled, strict=True):
            if tensor is None:
                continue
            wide = self.decay if name == "g" else torch.float32
            held = wide if name in ("dt", "k_rnorm", "d", "g", "beta") else dtype
            entries = torch.full((SLOTS, *tensor.shape[1:]), torch.nan, dtype=held)
            for row, slot in self.rows():
                entries[slot] = tensor[row].roll(int(self.origin[slot]), dims=1)
            ring[name] = self._place(entries)
        state = torch.full((SLOTS, *self.sequence.state.shape[1:]), torch.nan, dtype=state_dtype)
        cursor = torch.zeros(SLOTS, dtype=torch.int32)
        for row, slot in self.rows():
            state[slot] = self.sequence.state[row]
            cursor[slot] = self.lengths[row]
        return CacheLayer(
            family=self.truth.geometry.family,
            interval_length=self.length,
            window=None,
            capacity=self.capacity,
            state=self._place(state),
            ring=ring,
            cursor=cursor.to(DEVICE),
            origin=self.origin.to(DEVICE),
            flushes=torch.arange(SLOTS, device=DEVICE),
        )

    def rows(self) -> list[tuple[int, int]]:
        return [(row, int(slot)) for row, slot in enumerate(self.slots) if slot >= 0]

    def replay(self, launch: Launch | None = None) -> None:
        """Run the step and check all of the memory."""
        layer = self.layer
        state, out = layer.state.clone(), self.out.clone()
        ring = {name: tensor.clone() for name, tensor in layer.ring.items()}
        flushes = layer.flushes.clone()
        KERNELS[layer.family].replay_step(self.out, layer, self.inputs, self.slots.to(DEVICE), launch)
        rounding = ROUNDING[self.out.dtype]
        for row, slot in self.rows():
            j = int(self.lengths[row])
            assert distance(self.out[row], self.outputs[j][row]) <= FLOAT32 + rounding
            out[row] = self.out[row]
            if j == self.length - 1:
                assert distance(layer.state[slot], self.states[j + 1][row]) <= FLOAT32 + ROUNDING[state.dtype]
                state[slot] = layer.state[slot]
                flushes[slot] += 1
            else:
                self._check_appended(ring, row, slot, j)
        assert same_bits(self.out, out)
        assert same_bits(layer.state, state)
        assert all(same_bits(layer.ring[name], ring[name]) for name in ring)
        assert torch.equal(layer.flushes, flushes)
        assert torch.equal(layer.origin.cpu(), self.origin)

    def _check_appended(self, ring: dict[str, Tensor], row: int, slot: int, j: int) -> None:
        place = (int(self.origin[slot]) + j) % self.capacity
        token = self.truth.at(j)
        for name, tensor in self.layer.ring.items():
            entry = tensor[slot, :, place]
            if name == "k_rnorm":
                assert distance(entry, 1 / (token.k[row].square().sum(-1) + 1e-6).sqrt()) <= 4e-7
            elif name == "d":
                assert distance(entry, corrected(token, row, self.states[j][row])) <= FLOAT32
            else:
                assert torch.equal(entry.cpu(), getattr(token, name)[row].to(entry.dtype)), name
            ring[name][slot, :, place] = entry

    def stored(self, launch: Launch | None = None) -> None:
        """The stored step from the rows' first states; check all of the memory."""
        state, out = self.layer.state.clone(), self.out.clone()
        token = self.sequence.at(0)
        placed = type(token)(*(None if t is None else self._place(t) for t in token))
        KERNELS[self.layer.family].stored_step(self.out, self.layer.state, placed, self.slots.to(DEVICE), launch)
        for row, slot in self.rows():
            assert distance(self.out[row], self.outputs[0][row]) <= FLOAT32 + ROUNDING[out.dtype]
            assert distance(self.layer.state[slot], self.states[1][row]) <= FLOAT32 + ROUNDING[state.dtype]
            out[row], state[slot] = self.out[row], self.layer.state[slot]
        assert same_bits(self.out, out)
        assert same_bits(self.layer.state, state)


WIDE = ("dt", "A", "D", "g", "beta")
"""Inputs that are float32 whatever the activations are."""


def _double(inputs: Any) -> Any:
    return type(inputs)(*(None if t is None else t.double() for t in inputs))


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative error by norm; infinite where a NaN is."""
    actual, expected = actual.cpu().double(), expected.double()
    error = (actual - expected).norm() / expected.norm().clamp_min(1e-30)
    return torch.nan_to_num(error, nan=torch.inf).item()


AHEAD = {"ahead": Launch(16, 1, 1, 8, ahead=True), "ahead, two tiles": Launch(16, 2, 2, 8, eager=True, ahead=True)}
every_family = pytest.mark.parametrize("family", FAMILIES)
LAUNCHES = {
    "whole head": Launch(rows=16, tiles=5, warps=4),
    "one tile": Launch(rows=32, tiles=1, warps=1, lanes=4, at_once=True),
    "one tile, walked": Launch(rows=16, tiles=1, warps=1, lanes=8),
    "eager": Launch(rows=16, tiles=1, warps=2, lanes=2, eager=True, at_once=True),
    "two tiles": Launch(rows=16, tiles=2, warps=2, lanes=8, at_once=True),
}


@every_family
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("interval_length", [1, 3, 16, 33])
def test_replay_at_every_phase(family: str, interval_length: int, launch: str) -> None:
    L = interval_length
    cursors = [L - 1, None, 0, L // 2, max(0, L - 2), None]
    Step(family, cursors, L, seed=L).replay(LAUNCHES[launch])


@every_family
@pytest.mark.parametrize(("head_dim", "state_dim"), [(1, 1), (3, 7), (80, 24), (64, 128)])
def test_shapes_that_fit_no_tile(family: str, head_dim: int, state_dim: int) -> None:
    Step(family, [3, 1], 4, head_dim=head_dim, state_dim=state_dim).replay()
    Step(family, [0, 0], 4, head_dim=head_dim, state_dim=state_dim).stored()


@every_family
@pytest.mark.parametrize("eager", [False, True])
def test_strided_tensors(family: str, eager: bool) -> None:
    Step(family, [2, None, 1], 3, strided=True).replay(Launch(16, 2, 2, eager=eager))
    Step(family, [0, None, 0], 3, strided=True).stored()


delta_families = pytest.mark.parametrize("family", ["gdn", "kda"])


@delta_families
@pytest.mark.parametrize("launch", ["one tile", "eager", "two tiles"])
@pytest.mark.parametrize("interval_length", [1, 2, 3, 16, 33])
def test_folds_from_raw_inputs_at_every_phase(family: str, interval_length: int, launch: str) -> None:
    """Without d: NaN takes its place wherever a row flushes."""
    L = interval_length
    Step(family, [L - 1, None, max(0, L - 2)], L, raw=True, seed=L).replay(LAUNCHES[launch])


@delta_families
@pytest.mark.parametrize("flavour", ["strong decay", "weak decay", "beta two", "identical keys", "zero keys"])
def test_folds_from_raw_inputs_of_extreme_size(family: str, flavour: str) -> None:
    Step(family, [7, 4], 8, flavour=flavour, head_dim=16, raw=True).replay()


@delta_families
def test_folds_from_raw_inputs_in_other_shapes_and_formats(family: str) -> None:
    Step(family, [3, 1], 4, head_dim=3, state_dim=7, raw=True).replay()
    Step(family, [2, None, 1], 3, head_dim=20, strided=True, raw=True).replay()
    for state_dtype in (torch.float32, torch.bfloat16):
        Step(family, [3, 2], 4, head_dim=32, dtype=torch.bfloat16, state_dtype=state_dtype, raw=True).replay()


@every_family
@pytest.mark.parametrize("launch", AHEAD)
@pytest.mark.parametrize("interval_length", [1, 2, 16, 33])
def test_two_launches_at_every_phase(family: str, interval_length: int, launch: str) -> None:
    L = interval_length
    cursors = [L - 1, None, 0, L // 2, max(0, L - 2), None]
    Step(family, cursors, L, seed=L).replay(AHEAD[launch])


@every_family
def test_two_launches_in_other_shapes_and_formats(family: str) -> None:
    raw = {} if family == "mamba2" else {"raw": True}
    Step(family, [2, None, 1], 3, head_dim=20, strided=True, **raw).replay(AHEAD["ahead"])
    Step(family, [3, 1], 4, head_dim=3, state_dim=7, **raw).replay(AHEAD["ahead, two tiles"])
    for dtype in (torch.bfloat16, torch.float16):
        Step(family, [3, 2, None], 4, head_dim=32, dtype=dtype, state_dtype=dtype).replay(AHEAD["ahead"])


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("interval_length", [1, 3, 16])
def test_decays_in_bfloat16_are_rounded_in_the_ring_alone(interval_length: int, raw: bool) -> None:
    """A row's own token decays by what arrived, at a flush too; by each launch that reads rings its own way."""
    L = interval_length
    for launch in (*(LAUNCHES[name] for name in ("whole head", "eager", "two tiles")), AHEAD["ahead"]):
        step = Step("kda", [L - 1, None, 0, max(0, L - 2)], L, raw=raw, decay=torch.bfloat16, strided=True, seed=L)
        step.replay(launch)


@every_family
@pytest.mark.parametrize("flavour", ["strong decay", "weak decay", "identical keys", "zero keys"])
def test_extreme_inputs(family: str, flavour: str) -> None:
    Step(family, [7, 4], 8, flavour=flavour, head_dim=16).replay(LAUNCHES["one tile"])


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_formats(family: str, dtype: torch.dtype) -> None:
    """Activations and ring in the format, with a state in float32, then with the state in it as well."""
    for state_dtype in (torch.float32, dtype):
        Step(family, [3, 2, None], 4, head_dim=32, dtype=dtype, state_dtype=state_dtype).replay()
        Step(family, [0, 0, None], 4, head_dim=32, dtype=dtype, state_dtype=state_dtype).stored()


@every_family
def test_a_batch_of_padding_changes_nothing(family: str) -> None:
    step = Step(family, [None, None], 3)
    step.replay()
    assert (step.out == SENTINEL).all()


@every_family
@pytest.mark.parametrize("launch", LAUNCHES)
def test_stored_step(family: str, launch: str) -> None:
    Step(family, [0, None, 0], 2).stored(LAUNCHES[launch])


@every_family
def test_bad_arguments_are_refused_before_anything_changes(family: str) -> None:
    step = Step(family, [0], 3, head_dim=4)
    kernel, before = KERNELS[family], step.layer.state.clone()
    slots = step.slots.to(DEVICE)
    with pytest.raises(ValueError, match=r"^out has shape \[1, 2, 3\]; accepted: \[1, 2, 4\]$"):
        kernel.replay_step(step.out[..., :3], step.layer, step.inputs, slots)
    with pytest.raises(ValueError, match=r"^slots has shape \[1\] of torch.int32; accepted: \[1\] contiguous int64$"):
        kernel.stored_step(step.out, step.layer.state, step.inputs, slots.int())
    with pytest.raises(ValueError, match=r"^state has dtype torch.float64; accepted: torch.float32, "):
        kernel.stored_step(step.out, step.layer.state.double(), step.inputs, slots)
    with pytest.raises(ValueError, match=r"contiguous last axis$"):
        kernel.stored_step(step.out, step.layer.state.transpose(2, 3).contiguous().transpose(2, 3), step.inputs, slots)
    assert same_bits(step.layer.state, before)


def test_decays_of_the_ring_are_float32_or_bfloat16() -> None:
    step = Step("kda", [0], 3, head_dim=4, decay=torch.float16)
    with pytest.raises(ValueError, match=r"^ring g has dtype torch.float16; accepted: torch.float32, torch.bfloat16$"):
        kda.replay_step(step.out, step.layer, step.inputs, step.slots.to(DEVICE))


def test_channel_decays_lie_side_by_side() -> None:
    step = Step("kda", [0], 3, head_dim=4)
    apart = step.inputs._replace(g=step.inputs.g.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match=r"^g has strides .*; accepted: a contiguous last axis$"):
        kda.replay_step(step.out, step.layer, apart, step.slots.to(DEVICE))


@pytest.mark.parametrize("field", ["rows", "warps", "lanes"])
def test_impossible_launches_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}=3 is impossible; accepted: a power of two$"):
        Launch(**{"rows": 16, "tiles": 1, "warps": 2} | {field: 3})
