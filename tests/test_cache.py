"""`ReplayCache` alone: who may use a slot, what a commit may be told, which sizes exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm.cache import MAX_INTERVAL_LENGTH, ReplayCache, SlotError
from replayssm.geometry import Geometry

GEOMETRY = Geometry("gdn", 4, 2, 3, 5)


def cache(**options: Any) -> ReplayCache:
    return ReplayCache(GEOMETRY, **{"slots": 3, "interval_length": 4} | options)


def test_slots_are_handed_out_once() -> None:
    c = cache()
    first = c.allocate(2)
    assert len({slot.index for slot in [*first, *c.allocate(1)]}) == 3
    with pytest.raises(SlotError, match=r"^1 slots wanted, 0 of 3 are free$"):
        c.allocate()
    c.release(first[:1])
    with pytest.raises(SlotError, match=r"^2 slots wanted, 1 of 3 are free$"):
        c.allocate(2)
    assert c.allocate()[0].index == first[0].index
    with pytest.raises(SlotError, match="wanted"):
        c.allocate(-1)
    assert c.allocate(0) == []


def test_a_released_slot_is_refused_everywhere() -> None:
    c = cache()
    kept, gone = c.allocate(2)
    batch = c.batch([kept, gone, None])
    c.release([gone])
    state = torch.zeros(1, 3, 4, 3, 5)
    for use in (
        lambda: c.index(batch),
        lambda: c.flush_due(batch),
        lambda: c.commit(batch),
        lambda: c.reset(batch),
        lambda: c.load_state(batch, state),
        lambda: c.batch([gone]),
        lambda: c.release([gone]),
    ):
        with pytest.raises(SlotError, match=rf"^slot {gone.index} was released; the batch is stale$"):
            use()
    assert c.index(c.batch([kept])).tolist() == [kept.index]


def test_a_slot_of_an_earlier_tenancy_is_refused() -> None:
    c = cache()
    (old,) = c.allocate()
    batch = c.batch([old])
    c.index(batch)
    c.release([old])
    (new,) = c.allocate()
    assert (new.index, new == old) == (old.index, False)
    for use in (lambda: c.index(batch), lambda: c.batch([old]), lambda: c.release([old])):
        with pytest.raises(SlotError, match="was released"):
            use()
    assert c.index(c.batch([new])).tolist() == [new.index]


def test_a_slot_of_another_cache_is_refused() -> None:
    c, other = cache(), cache()
    (foreign,), (own,) = other.allocate(), c.allocate()
    assert foreign.index == own.index
    for use in (
        lambda: c.batch([foreign]),
        lambda: c.release([foreign]),
        lambda: c.index(other.batch([foreign])),
        lambda: c.commit(other.batch([foreign])),
        lambda: c.reset(other.batch([None, foreign])),
    ):
        with pytest.raises(SlotError, match=rf"^slot {foreign.index} belongs to another cache$"):
            use()
    assert c.cursor.tolist() == other.cursor.tolist() == [0, 0, 0]


def test_a_slot_stands_in_a_batch_once() -> None:
    c = cache()
    (slot,) = c.allocate()
    for use in (lambda: c.batch([slot, None, slot]), lambda: c.release([slot, slot])):
        with pytest.raises(SlotError, match=r"^a slot stands in the batch twice$"):
            use()
    assert c.batch([None, slot, None]).index.tolist() == [-1, slot.index, -1]


def test_free_memory_holds_nan() -> None:
    c = cache(layers=2, raw_fold=True)
    kept, gone = c.allocate(2)
    for tensor in (c.state, *c.ring.values()):
        tensor[:, [kept.index, gone.index]] = 1.0
    c.release([gone])
    for tensor in (c.state, *c.ring.values()):
        free = [i for i in range(3) if i != kept.index]
        assert tensor[:, free].isnan().all()
        assert (tensor[:, kept.index] == 1).all()


@pytest.mark.parametrize("loaded", [None, torch.rand(2, 2, 4, 3, 5)])
def test_a_row_starts_anew_alone(loaded: torch.Tensor | None) -> None:
    """By reset, or by load_state: zero or given state, empty ring, cursor and origin 0; other slots as they were."""
    c = cache(layers=2, window=2)
    slots = c.allocate(3)
    for tensor in (c.state, *c.ring.values()):
        tensor.fill_(1.0)
    for _ in range(3):
        c.commit(c.batch(slots), 2)
    assert (c.cursor.tolist(), c.origin.tolist()) == ([2] * 3, [4] * 3)
    batch, started = c.batch([None, slots[1]]), slots[1].index
    others = [i for i in range(3) if i != started]
    if loaded is None:
        c.reset(batch)
        assert (c.state[:, started] == 0).all()
    else:
        c.load_state(batch, loaded)
        assert torch.equal(c.state[:, started], loaded[:, 1])
    assert (c.cursor[started], c.origin[started]) == (0, 0)
    assert (c.cursor[others].tolist(), c.origin[others].tolist()) == ([2] * 2, [4] * 2)
    assert (c.state[:, others] == 1).all()
    assert all(ring[:, started].isnan().all() and (ring[:, others] == 1).all() for ring in c.ring.values())


def test_load_state_refuses_another_shape() -> None:
    c = cache(layers=2)
    batch = c.batch([None, *c.allocate()])
    with pytest.raises(ValueError, match=r"^state has shape \(2, 1, 4, 3, 5\); accepted: \(2, 2, 4, 3, 5\)$"):
        c.load_state(batch, torch.zeros(2, 1, 4, 3, 5))


@pytest.mark.parametrize("accepted", [0, 2, -1, 1.0, "1", None, [1, 1]])
def test_standard_decoding_commits_one_token(accepted: Any) -> None:
    _refused(cache(), accepted)


@pytest.mark.parametrize("accepted", [-1, 4, 2.0, [4, 0], [0, -1], [1.0, 1.0], [1], [1, 1, 1], [[1, 1]]])
def test_a_window_commits_none_to_all_of_its_tokens(accepted: Any) -> None:
    _refused(cache(window=3), torch.tensor(accepted) if isinstance(accepted, list) else accepted)


def _refused(c: ReplayCache, accepted: Any) -> None:
    batch = c.batch(c.allocate(2))
    with pytest.raises(ValueError, match=r"^accepted[= ].*; accepted: ") as caught:
        c.commit(batch, accepted)
    assert "\n" not in str(caught.value)
    assert c.cursor.tolist() == [0, 0, 0]


def test_what_a_padding_row_accepted_is_ignored() -> None:
    c = cache(window=3)
    (slot,) = c.allocate()
    c.commit(c.batch([None, slot, None]), torch.tensor([99, 2, -5]))
    assert [c.cursor[i].item() for i in range(3)] == [2 if i == slot.index else 0 for i in range(3)]


def test_flush_due_of_padding_is_false() -> None:
    c = cache(interval_length=1)
    (slot,) = c.allocate()
    assert c.flush_due(c.batch([None, slot])).tolist() == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots=0 is impossible; accepted: an integer of at least 1"),
        ({"slots": 1.5}, "slots=1.5 is impossible; accepted: an integer of at least 1"),
        ({"layers": -1}, "layers=-1 is impossible; accepted: an integer of at least 1"),
        ({"window": 0}, "window=0 is impossible; accepted: an integer of at least 1"),
        ({"interval_length": 0}, "interval_length=0 is impossible; accepted: an integer from 1 to 64"),
        ({"interval_length": MAX_INTERVAL_LENGTH + 1}, "interval_length=65 is impossible; accepted: an integer from 1"),
        ({"interval_length": 4.0}, "interval_length=4.0 is impossible; accepted: an integer from 1 to 64"),
    ],
)
def test_impossible_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        cache(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gdn", {}, "torch.bfloat16 is impossible for gdn; accepted: torch.float32"),
        ("kda", {"window": 2}, "torch.bfloat16 is impossible with window=2; accepted: torch.float32"),
        ("kda", {"decay_dtype": torch.float16}, "torch.float16 is impossible for kda; accepted: torch.float32, "),
    ],
)
def test_decays_in_bfloat16_are_those_of_kda(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^decay_dtype={message}"):
        ReplayCache(Geometry(family, 4, 4, 3, 5), slots=1, **({"decay_dtype": torch.bfloat16} | options))


def test_mamba2_has_no_second_fold() -> None:
    with pytest.raises(ValueError, match=r"^raw_fold=True is for GDN and KDA"):
        ReplayCache(Geometry("mamba2", 4, 2, 3, 5), slots=1, raw_fold=True)


@pytest.mark.parametrize(
    ("family", "raw_fold", "names"),
    [
        ("mamba2", False, {"x": (4, 7, 3), "B": (4, 7, 5), "dt": (4, 7)}),
        ("gdn", False, {"k": (4, 7, 5), "k_rnorm": (4, 7), "d": (4, 7, 3), "g": (4, 7)}),
        ("kda", False, {"k": (4, 7, 5), "k_rnorm": (4, 7), "d": (4, 7, 3), "g": (4, 7, 5)}),
        (
            "kda",
            True,
            {"k": (4, 7, 5), "k_rnorm": (4, 7), "d": (4, 7, 3), "g": (4, 7, 5), "v": (4, 7, 3), "beta": (4, 7)},
        ),
    ],
)
def test_ring_layout(family: str, raw_fold: bool, names: dict[str, tuple[int, ...]]) -> None:
    """Shapes behind ``[layers, slots]``; what arrives in the activation dtype stays in it, the rest is float32."""
    c = ReplayCache(Geometry(family, 4, 4, 3, 5), slots=2, layers=2, interval_length=8, raw_fold=raw_fold)
    assert {name: tuple(ring.shape[2:]) for name, ring in c.ring.items()} == names
    for name, ring in c.ring.items():
        assert ring.dtype == (torch.bfloat16 if name in ("x", "B", "k", "v") else torch.float32), name
    held = (c.state, *c.ring.values())
    assert c.bytes_per_slot == sum(t.numel() * t.element_size() for t in held) // 2
    layer = c.layer(1)
    assert layer.state.data_ptr() == c.state[1].data_ptr()
    assert all(layer.ring[name].data_ptr() == c.ring[name][1].data_ptr() for name in names)
    assert layer.cursor is c.cursor
    assert layer.origin is c.origin


@pytest.mark.parametrize(
    ("interval_length", "window", "capacity"),
    [(1, None, 1), (2, None, 1), (16, None, 15), (16, 4, 20), (1, 1, 2), (3, 8, 16), (8, 8, 16)],
)
def test_ring_capacity(interval_length: int, window: int | None, capacity: int) -> None:
    c = cache(interval_length=interval_length, window=window)
    assert c.capacity == c.layer(0).capacity == c.ring["d"].shape[3] == capacity
