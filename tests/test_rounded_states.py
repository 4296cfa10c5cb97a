"""How the back ends round a state of 16 bits: as `replayssm.formats` says, to nearest or stochastically.

The same step runs on a state in float32 and on one in the format, from equal numbers; the second must be the first,
rounded. On a GPU the two may add in another order, so that there a few elements may differ; in the interpreter none.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from experiments.inputs import make_inputs, make_state
from replayssm.cache import ReplayCache
from replayssm.formats import DTYPES, Rounding, nearest_round, stochastic_round
from replayssm.geometry import Geometry
from replayssm.kernels import torch as torch_kernels
from replayssm.kernels.triton import gdn, kda, mamba2
from replayssm.kernels.triton.launch import Launch
from replayssm.recurrence import FAMILIES

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"
KERNELS: dict[str, Any] = {"mamba2": mamba2, "gdn": gdn, "kda": kda}
SLOTS, LENGTH, ROWS = 5, 3, 2
FORMAT_OF = {dtype: name for name, dtype in DTYPES.items()}
SEED, LAYER = 2**40 + 7, 3
HALVES = Launch(rows=16, tiles=1, warps=1, lanes=4)
"""Two programs a head; a float32 state takes half as many lanes' numbers at once as one of 16 bits."""
WHOLE = Launch(rows=16, tiles=2, warps=2, lanes=8)
AHEAD = Launch(rows=16, tiles=1, warps=2, lanes=8, ahead=True)
every_family = pytest.mark.parametrize("family", FAMILIES)
every_format = pytest.mark.parametrize("format", ["fp16", "bf16"])


def geometry(family: str) -> Geometry:
    return Geometry(family, 2, 2 if family == "kda" else 1, 20, 24)


def number(slots: int = SLOTS) -> Tensor:
    """How often each slot has been flushed, or stepped, before."""
    return (torch.arange(slots, device=DEVICE) * 3 + 2**31).long()


class Flush:
    """Rows in ``slots`` with a full ring; the one state in float32 and in ``format`` holds the same numbers."""

    def __init__(self, family: str, format: str, slots: tuple[int, ...] = (3, 0), size: float = 1.0) -> None:
        self.family, shape = family, geometry(family)
        self.slots = torch.tensor([*slots, -1], device=DEVICE)
        tokens = make_inputs(shape, ROWS + 1, LENGTH, dtype=torch.float32, seed=5, device=DEVICE)
        start = size * make_state(shape, ROWS, dtype=torch.float32, seed=6, device=DEVICE)
        start = nearest_round(start, format).float()
        sizes: dict[str, Any] = {"slots": SLOTS, "interval_length": LENGTH, "input_dtype": torch.float32}
        self.caches = [
            ReplayCache(shape, **sizes, state_dtype=dtype, device=DEVICE) for dtype in (torch.float32, DTYPES[format])
        ]
        for cache in self.caches:
            cache.state[0, list(slots)] = start.to(cache.state.dtype)
            cache.flushes[0] = number()
        wide = self.caches[0]
        for token in tokens[:-1]:
            torch_kernels.replay_step(self.out(), wide.layer(0), token, self.slots)
            wide.cursor[list(slots)] += 1
        self.caches[1].cursor.copy_(wide.cursor)
        for name, tensor in wide.ring.items():
            self.caches[1].ring[name].copy_(tensor)
        self.token = tokens[-1]

    def out(self) -> Tensor:
        shape = geometry(self.family)
        return torch.zeros(ROWS + 1, shape.heads, shape.head_dim, device=DEVICE)

    def replay(self, kernels: Any, rounding: Rounding | None, **launch: Any) -> tuple[Tensor, Tensor]:
        """The rows' states ``[B,H,P,N]`` after a flush in float32 and in the format."""
        kernels.replay_step(self.out(), self.caches[0].layer(0), self.token, self.slots, **launch)
        kernels.replay_step(self.out(), self.caches[1].layer(0), self.token, self.slots, rounding=rounding, **launch)
        for cache in self.caches:
            counted = number()
            counted[self.slots[:-1]] += 1
            assert torch.equal(cache.flushes[0], counted)
        return self.states()

    def stored(self, kernels: Any, rounding: Rounding | None, launches: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        for cache, launch, given in zip(self.caches, launches, (None, rounding), strict=True):
            kernels.stored_step(self.out(), cache.state[0], self.token, self.slots, rounding=given, **launch)
        return self.states()

    def states(self) -> tuple[Tensor, Tensor]:
        wide, narrow = (cache.state[0, self.slots[:-1]].clone() for cache in self.caches)
        return wide, narrow


def check_same(found: Tensor, expected: Tensor, differing: float = 0.005 if GPU else 0.0) -> None:
    """Bit for bit, but for the share ``differing`` of the elements; other random words would change every second."""
    assert found.dtype == expected.dtype
    share = (found.view(torch.int16) != expected.view(torch.int16)).double().mean().item()
    assert share <= differing


def definition(wide: Tensor, format: str, request: Tensor, flush: Tensor) -> Tensor:
    counter = {"request": request.cpu(), "flush": flush.cpu()}
    return stochastic_round(wide.cpu(), format, seed=SEED, layer=LAYER, **counter).to(DEVICE)


REQUESTS = torch.tensor([17, 2**33 + 5, 4, 2**32 - 1, 6])


@every_family
@every_format
@pytest.mark.parametrize("launch", [HALVES, WHOLE, AHEAD])
def test_a_flush_rounds_as_defined(family: str, format: str, launch: Launch) -> None:
    requests = REQUESTS.to(DEVICE)
    flush = Flush(family, format)
    live = flush.slots[:-1]
    wide, narrow = flush.replay(KERNELS[family], Rounding(SEED, LAYER, requests), launch=launch)
    check_same(narrow, definition(wide, format, requests[live], number()[live]))


@every_family
@every_format
def test_a_stored_step_rounds_as_defined(family: str, format: str) -> None:
    """Launches that hold as many columns at once in both widths, so that both add in the same order."""
    flush = Flush(family, format)
    live, steps = flush.slots[:-1], number()
    launches = {"launch": Launch(16, 1, 1, lanes=4)}, {"launch": Launch(16, 1, 1, lanes=2)}
    wide, narrow = flush.stored(KERNELS[family], Rounding(SEED, LAYER, None, steps), launches)
    check_same(narrow, definition(wide, format, live, steps[live]))


@every_family
@every_format
def test_the_torch_back_end_rounds_as_defined(family: str, format: str) -> None:
    steps = number()
    for step, rounding in (("replay", Rounding(SEED, LAYER)), ("stored", Rounding(SEED, LAYER, None, steps))):
        flush = Flush(family, format)
        live = flush.slots[:-1]
        if step == "replay":
            wide, narrow = flush.replay(torch_kernels, rounding)
        else:
            wide, narrow = flush.stored(torch_kernels, rounding, ({}, {}))
        check_same(narrow, definition(wide, format, live, number()[live]))


@every_family
def test_both_back_ends_draw_the_same(family: str) -> None:
    """They add in another order, which changes few elements; other random words change nearly half of them."""
    states = [Flush(family, "fp16").replay(k, Rounding(SEED, LAYER))[1] for k in (KERNELS[family], torch_kernels)]
    check_same(*states, differing=0.01)
    other = Flush(family, "fp16").replay(torch_kernels, Rounding(SEED + 1, LAYER))[1]
    with pytest.raises(AssertionError):
        check_same(states[0], other, differing=0.1)


@every_family
def test_draws_depend_on_the_request_and_not_on_slot_or_launch(family: str) -> None:
    requests = REQUESTS.to(DEVICE)
    elsewhere = requests[[3, 1, 4, 2, 0]]
    first = Flush(family, "fp16").replay(KERNELS[family], Rounding(SEED, LAYER, requests), launch=HALVES)[1]
    again = Flush(family, "fp16").replay(KERNELS[family], Rounding(SEED, LAYER, requests), launch=HALVES)[1]
    assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    moved = Flush(family, "fp16", slots=(0, 4))
    for cache in moved.caches:
        cache.flushes[0, [0, 4]] = number()[[3, 0]]
    moved.caches[0].flushes.copy_(moved.caches[1].flushes)
    KERNELS[family].replay_step(
        moved.out(),
        moved.caches[1].layer(0),
        moved.token,
        moved.slots,
        WHOLE,
        rounding=Rounding(SEED, LAYER, elsewhere),
    )
    check_same(moved.states()[1], first)


@every_family
@pytest.mark.parametrize("drawn", [False, True])
def test_states_saturate_and_keep_nan(family: str, drawn: bool) -> None:
    """In fp16, of which the interpreter's nearest numbers are right too."""
    for kernels in (KERNELS[family], torch_kernels):
        for step in ("replay", "stored"):
            flush = Flush(family, "fp16")
            first = flush.slots[0]
            for cache in flush.caches:
                cache.state[0, first, 0] = 60000.0
                cache.state[0, first, 1, 0, 0] = math.nan
                for name in ("g", "dt"):
                    if name in cache.ring:
                        cache.ring[name].zero_()
            token = flush.token._asdict()
            # Twice what was there, whatever the decay: keys and values that are as large as the state.
            large = {"mamba2": {"x": 3000.0, "B": 3000.0}, "gdn": {"v": 3e6}, "kda": {"v": 3e6}}[family]
            flush.token = type(flush.token)(**token | {n: torch.full_like(token[n], v) for n, v in large.items()})
            rounding = Rounding(SEED, LAYER, None, None if step == "replay" else number()) if drawn else None
            if step == "replay":
                wide, narrow = flush.replay(kernels, rounding)
            else:
                same = kernels is torch_kernels
                wide, narrow = flush.stored(
                    kernels,
                    rounding,
                    ({}, {}) if same else tuple({"launch": Launch(16, 1, 1, lanes=n)} for n in (4, 2)),
                )
            assert (wide.abs() > 65520).double().mean() > 0.1
            assert wide.isnan().any()
            assert not narrow.isinf().any()
            assert torch.equal(narrow.isnan(), wide.isnan())
            if not drawn:
                check_same(narrow.nan_to_num(), nearest_round(wide, "fp16").nan_to_num())


@pytest.mark.parametrize("kernels", [gdn, torch_kernels])
def test_bad_roundings_are_refused(kernels: Any) -> None:
    flush = Flush("gdn", "fp16")
    wide, narrow = (cache.layer(0) for cache in flush.caches)

    def replay(rounding: Rounding, layer: Any = narrow) -> None:
        kernels.replay_step(flush.out(), layer, flush.token, flush.slots, rounding=rounding)

    with pytest.raises(ValueError, match=r"^state has dtype torch.float32; accepted with rounding: torch.bfloat16, "):
        replay(Rounding(1), wide)
    with pytest.raises(ValueError, match=r"^seed=-1 is impossible; accepted: an integer from 0 to 2\^64 - 1$"):
        replay(Rounding(-1))
    with pytest.raises(ValueError, match=r"^rounding.steps is given; accepted: None for a replay step"):
        replay(Rounding(1, steps=number()))
    with pytest.raises(ValueError, match=r"^rounding.requests has shape \[4\] of torch.int64; accepted: \[5\] contig"):
        replay(Rounding(1, requests=number(4)))
    with pytest.raises(ValueError, match=r"^rounding.steps is None; accepted: \[S\] int64 for a stored step$"):
        kernels.stored_step(flush.out(), narrow.state, flush.token, flush.slots, rounding=Rounding(1))
    assert torch.equal(narrow.flushes, number())
