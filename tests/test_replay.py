"""Decoding with a cache and the torch kernels against the plain recurrence, which never drafts, buffers or flushes.

What is checked after every step is in `decoding.Run`: outputs, state, ring, cursor, and that nothing else changed.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from decoding import EXACT, SENTINEL, Run, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequences import geometries, make_sequence, relative_error

from experiments.inputs import make_inputs, make_state
from replayssm.cache import ReplayCache, Slot, SlotError
from replayssm.geometry import Geometry
from replayssm.kernels.torch import replay_step, stored_step, verify_step
from replayssm.recurrence import FAMILIES, kda

VARIANTS = [("mamba2", False), ("gdn", False), ("gdn", True), ("kda", False), ("kda", True)]
"""Family, and whether the fold is the one from raw inputs."""
WINDOWS = [(1, 1), (2, 3), (3, 3), (5, 2), (9, 4), (4, 6), (3, 7), (8, 8), (16, 5)]
"""Interval length and window: shorter than, as long as and longer than the window."""
every_variant = pytest.mark.parametrize(("family", "raw_fold"), VARIANTS)


def small_geometry(family: str) -> Geometry:
    return Geometry(family, *((2, 2) if family == "kda" else (4, 2)), 3, 4)


@every_variant
@pytest.mark.parametrize("interval_length", [1, 2, 3, 16, 64])
def test_standard_decoding(family: str, raw_fold: bool, interval_length: int) -> None:
    """Two flushes of every row, each row at a phase of its own."""
    steps = 2 * interval_length + 3
    run = Run(
        small_geometry(family), 3, slots=4, interval_length=interval_length, window=None, steps=steps, raw_fold=raw_fold
    )
    rows: list[Slot | None] = [None, None, None]
    for step in range(steps):
        if step < 3:
            rows[step] = run.admit(1, seed=step)[0]
        run.step(rows, [1, 1, 1])
    assert min(run.flushes[slot.index] for slot in rows if slot) >= 2


@every_variant
@pytest.mark.parametrize(("interval_length", "window"), WINDOWS)
def test_every_accepted_count_at_every_flush_phase(
    family: str, raw_fold: bool, interval_length: int, window: int
) -> None:
    run = Run(
        small_geometry(family),
        8,
        slots=8,
        interval_length=interval_length,
        window=window,
        steps=150,
        raw_fold=raw_fold,
        flavour="mixed",
    )
    rows = run.admit(8, seed=3)
    wanted = {(p, n) for p, n in product(reachable(interval_length, window), range(window + 1))}
    generator = torch.Generator().manual_seed(interval_length)
    for _ in range(150):
        accepted = []
        for slot in rows:
            missing = [n for p, n in wanted if p == run.cursor[slot.index]] or list(range(window + 1))
            accepted.append(missing[int(torch.randint(len(missing), (), generator=generator))])
            wanted.discard((run.cursor[slot.index], accepted[-1]))
        run.step(list(rows), accepted)
        if not wanted:
            break
    assert not wanted, f"cursor and accepted count never seen together: {sorted(wanted)}"


def reachable(interval_length: int, window: int) -> set[int]:
    """Every number of committed tokens that a step can start with."""
    seen, new = set(), {0}
    while new:
        seen |= new
        new = {
            n if interval_length < window or p + window > interval_length else p + n
            for p in seen
            for n in range(window + 1)
        } - seen
    return seen


@every_variant
@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_requests_come_and_go(family: str, raw_fold: bool, data: st.DataObject) -> None:
    """Rows in any order on any slots, padding, several layers, release and reallocation in the middle."""
    draw = data.draw
    window = draw(st.one_of(st.none(), st.integers(1, 8)), label="T")
    length, rows, slots = draw(st.integers(1, 9), label="L"), draw(st.integers(1, 4), label="rows"), 5
    steps = 12
    run = Run(
        draw(geometries(family), label="geometry"),
        rows,
        slots=slots,
        interval_length=length,
        window=window,
        steps=steps,
        layers=draw(st.integers(1, 2), label="layers"),
        raw_fold=raw_fold,
        seed=draw(st.integers(0, 2**16), label="seed"),
        flavour=draw(st.sampled_from(("model", "mixed")), label="flavour"),
    )
    tenants: list[Slot] = []
    for step in range(steps):
        event = draw(st.sampled_from(("none", "none", "admit", "load", "release")), label="event")
        if not tenants or (event in ("admit", "load") and len(tenants) < slots):
            tenants += run.admit(1, seed=step if event == "load" else None)
        elif event == "release":
            gone = tenants.pop(draw(st.integers(0, len(tenants) - 1), label="gone"))
            stale = run.cache.batch([gone])
            run.cache.release([gone])
            run.states[:, gone.index] = torch.nan
            with pytest.raises(SlotError):
                run.cache.index(stale)
        order = draw(st.permutations([*tenants, None, None, None, None]), label="rows")[:rows]
        accepted = draw(st.lists(st.integers(0, run.tokens), min_size=rows, max_size=rows), label="accepted")
        run.step(order, accepted)


@every_variant
@pytest.mark.parametrize("window", [None, 3])
def test_a_reused_slot_starts_anew(family: str, raw_fold: bool, window: int | None) -> None:
    """The second tenant of a slot, in the middle of the first one's ring, gets nothing of it."""
    run = Run(small_geometry(family), 1, slots=1, interval_length=4, window=window, steps=14, raw_fold=raw_fold)
    for _ in range(2):
        (slot,) = run.admit(1)
        for _ in range(6):
            run.step([slot], [2])
        assert run.cursor[slot.index] > 0
        run.cache.release([slot])
        assert run.cache.state.isnan().all()
        assert all(ring.isnan().all() for ring in run.cache.ring.values())


@pytest.mark.parametrize("raw_fold", [False, True])
@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("window", [None, 2])
def test_only_the_fold_from_raw_inputs_is_free_of_d(family: str, window: int | None, raw_fold: bool) -> None:
    """An error in the buffered corrected values reaches the checkpoint by the other fold, and not by this one."""
    run = Run(small_geometry(family), 1, slots=1, interval_length=4, window=window, steps=8, raw_fold=raw_fold)
    (slot,) = run.admit(1, seed=1)
    while not run.due(slot.index):
        run.step([slot], [2])
    run.cache.ring["d"] += 1.0
    if raw_fold:
        run.step([slot], [2])
    else:
        with pytest.raises(AssertionError):
            run.step([slot], [2])


@every_variant
@pytest.mark.parametrize("window", [None, 2])
def test_a_batch_of_padding_changes_nothing(family: str, raw_fold: bool, window: int | None) -> None:
    run = Run(small_geometry(family), 2, slots=2, interval_length=2, window=window, steps=3, raw_fold=raw_fold)
    run.admit(1)
    for _ in range(3):
        run.step([None, None], [0, 0])


@every_variant
@pytest.mark.parametrize("window", [None, 4])
def test_float32_is_as_good_as_the_recurrence_in_float32(family: str, raw_fold: bool, window: int | None) -> None:
    """bfloat16 inputs, float32 state, four flush intervals: at most twice the error of `step` in float32."""
    geometry, rows, steps = Geometry(family, *((2, 2) if family == "kda" else (4, 2)), 16, 16), 3, 64
    cache = ReplayCache(geometry, slots=rows, interval_length=16, window=window, raw_fold=raw_fold)
    batch, module = cache.batch(cache.allocate(rows)), FAMILIES[family]
    inputs = make_inputs(geometry, rows, steps, dtype=torch.bfloat16, seed=1)
    start = make_state(geometry, rows, dtype=torch.float32, seed=2)
    cache.load_state(batch, start[None])
    truth, honest = start.double(), start
    expected, honest_outputs, outputs = [], [], torch.full((steps, rows, *output_shape(geometry)), torch.nan)
    for token in inputs:
        output, truth = module.step(truth, token)
        expected.append(output)
        output, honest = module.step(honest, token)
        honest_outputs.append(output)
    for first in range(0, steps, window or 1):
        if window is None:
            replay_step(outputs[first], cache.layer(0), inputs[first], cache.index(batch))
        else:
            out = torch.full((rows, window, *output_shape(geometry)), torch.nan)
            verify_step(out, cache.layer(0), stack_window(inputs[first : first + window]), cache.index(batch))
            outputs[first : first + window] = out.transpose(0, 1)
        cache.commit(batch, window or 1)
    assert cache.flushes.min() >= 3
    reference = torch.stack(expected)
    error, budget = ((o.double() - reference).norm() for o in (outputs, torch.stack(honest_outputs)))
    assert error <= 2 * budget
    assert error > 0
    if window is None:
        # 64 steps of an interval of 16 end with a flush, so the checkpoint is the state.
        assert (cache.state[0].double() - truth).norm() <= 2 * (honest.double() - truth).norm()


def test_decays_in_bfloat16_are_rounded_in_the_ring_alone() -> None:
    """Outputs take a token's decay as it arrived, the tokens behind it take it rounded, and a flush rounds none."""
    geometry, wide, length = small_geometry("kda"), torch.float64, 3
    options = {"state_dtype": wide, "input_dtype": wide, "decay_dtype": torch.bfloat16}
    cache = ReplayCache(geometry, slots=2, interval_length=length, **options)
    batch, state = cache.batch(cache.allocate(2)), make_state(geometry, 2, dtype=wide, seed=2)
    cache.load_state(batch, state[None])
    for t, token in enumerate(make_inputs(geometry, 2, 3 * length, dtype=wide, seed=1)):
        expected, moved = kda.step(state, token)
        if t % length < length - 1:
            rounded = token.g.bfloat16().to(wide)
            assert not torch.equal(rounded, token.g)
            moved += state * (rounded.exp() - token.g.exp())[..., None, :]
        out, state = torch.full((2, *output_shape(geometry)), torch.nan, dtype=wide), moved
        replay_step(out, cache.layer(0), token, cache.index(batch))
        cache.commit(batch)
        assert relative_error(out, expected) <= EXACT
    assert cache.flushes.tolist() == [[3, 3]]
    assert relative_error(cache.state[0], state) <= EXACT


def output_shape(geometry: Geometry) -> tuple[int, int]:
    return geometry.heads, geometry.head_dim


def stack_window(tokens: list[Any]) -> Any:
    """Tokens one after the other as a window ``[B,T,...]``."""
    columns = zip(tokens[0]._fields, zip(*tokens, strict=True), strict=True)
    return type(tokens[0])(*(t[0] if n in ("A", "D") or t[0] is None else torch.stack(t, dim=1) for n, t in columns))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", ["stored", "replay", "flush", "verify"])
def test_an_output_is_rounded_once(family: str, kernel: str) -> None:
    geometry = small_geometry(family)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = ReplayCache(
            geometry, slots=2, interval_length=1 if kernel == "flush" else 4, window=3 if kernel == "verify" else None
        )
        batch = cache.batch(cache.allocate(2))
        cache.load_state(batch, make_state(geometry, 2, dtype=torch.float32, seed=2)[None])
        tokens = make_inputs(geometry, 2, 3, dtype=torch.bfloat16, seed=1)
        out = torch.zeros(2, *((3,) if kernel == "verify" else ()), *output_shape(geometry), dtype=dtype)
        if kernel == "stored":
            stored_step(out, cache.state[0], tokens[0], cache.index(batch))
        elif kernel == "verify":
            verify_step(out, cache.layer(0), stack_window(tokens), cache.index(batch))
        else:
            replay_step(out, cache.layer(0), tokens[0], cache.index(batch))
        results.append(out)
    assert torch.equal(results[0].bfloat16(), results[1])
    assert not torch.equal(results[0], results[1].float())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "slots", [[0, 1, 2], [1, 2, 3], [3, 0, 2], [2, 1, 0], [0, 2, 1, 3], [-1, 1, 2], [3, -1, 0], [-1, -1, -1]]
)
def test_stored_step(family: str, slots: list[int]) -> None:
    sequence = make_sequence(small_geometry(family), len(slots), 1, seed=1)
    state = make_state(sequence.geometry, 5, dtype=torch.float64, seed=2)
    inputs, index = sequence.at(0), torch.tensor(slots)
    live = index >= 0
    outputs, states = sequence.family.step(state[index[live]], inputs.rows(live))
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if name not in ("A", "D"):
            tensor[~live] = torch.nan
    expected, out = (
        state.clone(),
        torch.full((len(slots), *output_shape(sequence.geometry)), SENTINEL, dtype=torch.float64),
    )
    stored_step(out, state, inputs, index)
    assert (out[~live] == SENTINEL).all()
    if live.any():
        assert relative_error(out[live], outputs) <= EXACT
        assert relative_error(state[index[live]], states) <= EXACT
    state[index[live]] = expected[index[live]]
    assert torch.equal(state, expected)


def test_kernels_refuse_what_the_cache_is_not_made_for() -> None:
    geometry = small_geometry("gdn")
    standard, speculative = (ReplayCache(geometry, slots=1, interval_length=4, window=w) for w in (None, 3))
    tokens = make_inputs(geometry, 1, 3, dtype=torch.bfloat16, seed=1)
    slots = torch.tensor([0])
    out = torch.zeros(1, 3, *output_shape(geometry))
    with pytest.raises(ValueError, match=r"^replay_step got a cache with window=3; accepted: None"):
        replay_step(out[:, 0], speculative.layer(0), tokens[0], slots)
    with pytest.raises(ValueError, match=r"^verify_step needs a cache made with a window"):
        verify_step(out, standard.layer(0), stack_window(tokens), slots)
    with pytest.raises(ValueError, match=r"^inputs hold 2 tokens a row; accepted: window=3"):
        verify_step(out, speculative.layer(0), stack_window(tokens[:2]), slots)


@pytest.mark.parametrize(
    ("family", "name", "raw_fold"),
    [("mamba2", "x", False), ("mamba2", "dt", False), ("gdn", "k", False), ("gdn", "v", True), ("kda", "g", False)],
)
@pytest.mark.parametrize("window", [None, 2])
def test_inputs_of_another_dtype_than_the_ring_are_refused(
    family: str, name: str, raw_fold: bool, window: int | None
) -> None:
    geometry, slots = small_geometry(family), torch.tensor([0])
    cache = ReplayCache(geometry, slots=1, interval_length=4, window=window, raw_fold=raw_fold)
    cache.load_state(cache.batch(cache.allocate(1)), torch.zeros(1, 1, *cache.state.shape[2:]))
    tokens = make_inputs(geometry, 1, 2, dtype=torch.bfloat16, seed=1)
    step, inputs = (replay_step, tokens[0]) if window is None else (verify_step, stack_window(tokens))
    held = getattr(inputs, name).dtype
    other = torch.float32 if held is torch.bfloat16 else torch.bfloat16
    wrong = inputs._replace(**{name: getattr(inputs, name).to(other)})
    out = torch.full((1, *(() if window is None else (2,)), *output_shape(geometry)), SENTINEL)
    before = {key: tensor.clone() for key, tensor in cache.layer(0).ring.items()}
    with pytest.raises(ValueError, match=rf"^{name} has dtype {other}; accepted: {held}, the dtype of the ring$"):
        step(out, cache.layer(0), wrong, slots)
    assert (out == SENTINEL).all()
    assert all(same_bits(tensor, before[key]) for key, tensor in cache.layer(0).ring.items())
    step(out, cache.layer(0), inputs, slots)
    assert not (out == SENTINEL).any()
