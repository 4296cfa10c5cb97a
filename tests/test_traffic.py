"""The traffic model against the published table, and a step-by-step simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import flops, traffic
from replayssm.cache import ReplayCache
from replayssm.geometry import Geometry
from replayssm.layout import FORMATS, PUBLISHED_RING, Format, Ring

NANO_4B = Geometry("mamba2", 96, 8, 80, 128)
SUPER_120B = Geometry("mamba2", 128, 8, 64, 128)
QWEN_4B = Geometry("gdn", 32, 16, 128, 128)
QWEN_122B = Geometry("gdn", 64, 16, 128, 128)
KIMI_48B = Geometry("kda", 32, 32, 128, 128)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    family = draw(st.sampled_from(["mamba2", "gdn", "kda"]))
    groups = draw(st.integers(1, 4))
    heads = groups * (1 if family == "kda" else draw(st.integers(1, 4)))
    return Geometry(family, heads, groups, draw(st.integers(1, 130)), draw(st.integers(1, 130)))


rings = st.builds(
    Ring, st.sampled_from(["bf16", "fp32"]), st.sampled_from(["bf16", "fp32"]), st.booleans(), st.booleans()
)
formats = st.sampled_from(list(FORMATS))


# The published table was rounded to two decimals from a mean ring of L/2 tokens; the exact mean differs by up to 0.006.
@pytest.mark.parametrize(
    ("geometry", "state", "speedups", "best"),
    [
        (NANO_4B, "fp32", (1.75, 1.82, 1.81), 21),
        (SUPER_120B, "fp32", (1.75, 1.82, 1.81), 21),
        (NANO_4B, "fp16", (1.72, 1.76, 1.70), 15),
        (SUPER_120B, "fp16", (1.72, 1.76, 1.70), 15),
        (QWEN_4B, "fp32", (1.74, 1.80, 1.77), 18),
        (QWEN_4B, "fp16", (1.70, 1.72, 1.63), 13),
        (QWEN_122B, "fp32", (1.74, 1.81, 1.80), 20),
        (QWEN_122B, "fp16", (1.71, 1.75, 1.68), 14),
    ],
)
def test_published_table(geometry: Geometry, state: str, speedups: tuple[float, ...], best: int) -> None:
    ours = [traffic.ideal_speedup(geometry, length, state, ring=PUBLISHED_RING) for length in (8, 16, 32)]
    assert ours == pytest.approx(speedups, abs=0.006)
    assert traffic.best_interval_length(geometry, state, ring=PUBLISHED_RING) == best
    assert traffic.closed_form_interval_length(geometry, state, ring=PUBLISHED_RING) == pytest.approx(best, abs=0.6)


@pytest.mark.parametrize(
    ("geometry", "token"), [(NANO_4B, 17792), (SUPER_120B, 18944), (QWEN_4B, 12416), (QWEN_122B, 20736)]
)
def test_published_ring_bytes(geometry: Geometry, token: int) -> None:
    assert PUBLISHED_RING.token_bytes(geometry) == (token, token, token)


@pytest.mark.parametrize(
    ("update", "bytes_an_element", "over_fp32", "over_fp16"),
    [("fp32", 1.21, 6.6, 3.3), ("fp16", 0.97, 8.3, 4.1), (Format("plain8", 8), 0.84, 9.5, 4.8)],
)
def test_published_two_copies(
    update: str | Format, bytes_an_element: float, over_fp32: float, over_fp16: float
) -> None:
    read = replace(FORMATS["nvfp4"], row_scale_bytes=0)  # the published 0.5625 bytes have no second scale
    mean = traffic.replay(SUPER_120B, 16, update, read).per_step()
    assert mean.total_bytes / SUPER_120B.state_elements == pytest.approx(bytes_an_element, abs=0.006)
    for baseline, expected in (("fp32", over_fp32), ("fp16", over_fp16)):
        assert traffic.ideal_speedup(SUPER_120B, 16, update, read, baseline=baseline) == pytest.approx(
            expected, abs=0.05
        )


def test_state_bytes_of_each_format() -> None:
    shape = Geometry("mamba2", 2, 1, 3, 130)  # 6 rows of 130: two blocks of 128, nine of 16
    expected = {"fp32": 520, "bf16": 260, "fp16": 260, "fp8_e4m3": 130 + 8, "int8": 130 + 8, "nvfp4": 65 + 9 + 4}
    expected |= {"fp8_e4m3_b32": 130 + 20, "mxfp4": 65 + 5}
    of_tiles = {"nvfp4_t16": 6 * (65 + 9) + 2 * 4}  # one scale for a head's three rows
    wanted = {name: 6 * row for name, row in expected.items()} | of_tiles
    assert {name: f.state_bytes(shape) for name, f in FORMATS.items()} == wanted


def test_ring_bytes_of_each_family() -> None:
    assert Ring("fp32").token_bytes(Geometry("mamba2", 4, 2, 3, 5)) == (4 * (12 + 10) + 16,) * 3
    assert Ring().token_bytes(Geometry("gdn", 4, 2, 3, 5)) == (2 * 10 + 8 + 4 * 12 + 16,) * 3
    assert Ring(d="bf16").token_bytes(Geometry("kda", 4, 4, 3, 5)) == (2 * 20 + 16 + 2 * 12 + 4 * 20,) * 3
    # With raw inputs a token also stores v and beta, outputs read d, and the fold reads v and beta instead.
    assert Ring(raw=True).token_bytes(Geometry("gdn", 4, 2, 3, 5)) == (92 + 24 + 16, 92, 92 - 48 + 24 + 16)


@pytest.mark.parametrize("decay", ["fp32", "bf16"])
def test_decays_in_bfloat16_take_half_of_their_bytes(decay: str) -> None:
    geometry, dtype = Geometry("kda", 4, 4, 3, 5), {"fp32": torch.float32, "bf16": torch.bfloat16}[decay]
    token = 2 * 20 + 16 + 4 * 12 + (80 if decay == "fp32" else 40)
    assert Ring(decay=decay).token_bytes(geometry) == (token,) * 3
    cache = ReplayCache(geometry, slots=1, interval_length=3, decay_dtype=dtype)
    assert sum(tensor.nbytes for tensor in cache.ring.values()) == 2 * token
    cycle = traffic.replay(geometry, 3, ring=Ring(decay=decay))
    assert (cycle.ring_bytes_written, cycle.ring_bytes_read) == (2 * token, 3 * token)


def test_only_kda_has_decays_in_another_format() -> None:
    with pytest.raises(ValueError, match=r"^decay='fp16' is no format of decays; accepted: fp32, bf16$"):
        Ring(decay="fp16")
    with pytest.raises(ValueError, match=r"^decay=bf16 is for KDA; accepted for gdn: fp32$"):
        Ring(decay="bf16").token_bytes(QWEN_4B)


def simulate(geometry: Geometry, length: int, update: int, copy: int, ring: Ring) -> dict[str, int]:
    """Standard decoding, one step after another, from the rules alone."""
    append, to_read, to_fold = ring.token_bytes(geometry)
    sums = dict.fromkeys(
        ("state_bytes_read", "state_bytes_written", "ring_bytes_read", "ring_bytes_written", "rmw_bytes"), 0
    )
    held = 0
    for _ in range(length):
        if held == length - 1:
            sums["state_bytes_read"] += update
            sums["state_bytes_written"] += update + copy
            sums["ring_bytes_read"] += held * to_fold
            sums["rmw_bytes"] += 2 * update + copy + held * to_fold
            held = 0
        else:
            sums["state_bytes_read"] += copy or update
            sums["ring_bytes_read"] += held * to_read
            sums["ring_bytes_written"] += append
            held += 1
    assert held == 0
    return sums


@given(geometries(), st.integers(1, 64), formats, st.none() | formats, rings, st.integers(1, 300))
def test_standard_decoding_step_by_step(
    geometry: Geometry, length: int, state: str, read_copy: str | None, ring: Ring, rows: int
) -> None:
    cycle = traffic.replay(geometry, length, state, read_copy, ring, rows)
    update = FORMATS[state].state_bytes(geometry)
    copy = FORMATS[read_copy].state_bytes(geometry) if read_copy else 0
    expected = simulate(geometry, length, update, copy, ring)
    assert {name: getattr(cycle, name) for name in expected} == {name: rows * v for name, v in expected.items()}
    assert (cycle.steps, cycle.tokens) == (length, length)
    assert cycle.read_bytes == pytest.approx(cycle.total_bytes - cycle.rmw_bytes)


@given(geometries(), formats, st.integers(1, 9))
def test_interval_of_one_is_the_stored_recurrence(geometry: Geometry, state: str, rows: int) -> None:
    assert traffic.replay(geometry, 1, state, rows=rows) == traffic.stored(geometry, state, rows)


def expected_visits(length: int, window: int, accepted: Fraction) -> dict[int, Fraction]:
    """Visits of each position in a cycle, by walking every sequence of accepted tokens."""
    low = math.floor(accepted)
    visits: dict[int, Fraction] = {}

    def walk(position: int, chance: Fraction) -> None:
        visits[position] = visits.get(position, Fraction(0)) + chance
        if position <= length - window:
            draw(position, chance)

    def draw(position: int, chance: Fraction) -> None:
        for tokens, share in ((low, low + 1 - accepted), (low + 1, accepted - low)):
            if share:
                walk(position + tokens, chance * share)

    draw(0, Fraction(1))
    return visits


@settings(max_examples=40, deadline=None)
@given(geometries(), st.integers(1, 20), st.integers(1, 8), st.fractions(0, 1, max_denominator=4), formats, rings)
def test_speculative_decoding_step_by_step(
    geometry: Geometry, length: int, window: int, share: Fraction, state: str, ring: Ring
) -> None:
    accepted = 1 + share * (window - 1)
    update = FORMATS[state].state_bytes(geometry)
    append, to_read, to_fold = ring.token_bytes(geometry)
    read = written = steps = rmw = Fraction(0)
    for position, chance in expected_visits(length, window, accepted).items():
        flush = position > length - window
        steps += chance
        read += chance * (update + position * (to_fold if flush else to_read))
        written += chance * (window * append + (update if flush else 0))
        rmw += chance * flush * (2 * update + position * to_fold + window * append)
    cycle = traffic.replay(geometry, length, state, ring=ring, window=window, accepted=float(accepted))
    assert cycle.steps == pytest.approx(float(steps))
    assert cycle.tokens == pytest.approx(float(steps * accepted))
    assert cycle.state_bytes_read + cycle.ring_bytes_read == pytest.approx(float(read))
    assert cycle.state_bytes_written + cycle.ring_bytes_written == pytest.approx(float(written))
    assert cycle.rmw_bytes == pytest.approx(float(rmw))


def test_speculative_flush_interval() -> None:
    # Ring 16, window 4, 3 accepted: positions 3, 6, 9, 12 read, 15 flushes.
    assert traffic.replay(SUPER_120B, 16, window=4, accepted=3).steps == 5
    assert traffic.replay(SUPER_120B, 3, window=4, accepted=2).steps == 1  # L < T: every step flushes
    stored = traffic.stored(SUPER_120B, window=4, accepted=3)
    assert (stored.state_bytes_read, stored.state_bytes_written) == (4 * 2**20, 4 * 4 * 2**20)


@settings(max_examples=15, deadline=None)
@given(geometries(), formats, st.none() | formats, rings)
def test_best_interval_length_is_best(geometry: Geometry, state: str, read_copy: str | None, ring: Ring) -> None:
    def bytes_a_step(length: int) -> float:
        return traffic.replay(geometry, length, state, read_copy, ring).per_step().total_bytes

    best = traffic.best_interval_length(geometry, state, read_copy, ring)
    assert bytes_a_step(best) == min(bytes_a_step(length) for length in range(1, 65))


def test_floor() -> None:
    step = traffic.replay(NANO_4B, 16, rows=64).per_step()
    assert step.floor_ns(1e9, 1e9) == pytest.approx(step.total_bytes)
    assert step.floor_ns(2e9, 1e9) == pytest.approx(step.total_bytes / 2 + step.rmw_bytes / 2)
    in_place = traffic.stored(NANO_4B).floor_ns(math.inf, 1e9)
    assert in_place == pytest.approx(2 * 4 * NANO_4B.state_elements)
    record = step.record(2e9, 1e9)
    assert record["floor_ns"] == step.floor_ns(2e9, 1e9)
    assert record["read_bytes"] + record["rmw_bytes"] == pytest.approx(step.total_bytes)


@pytest.mark.parametrize(
    "call",
    [
        lambda: traffic.replay(NANO_4B, 0),
        lambda: traffic.replay(NANO_4B, 4, "fp7"),
        lambda: traffic.replay(NANO_4B, 4, accepted=2),
        lambda: traffic.replay(NANO_4B, 4, window=0),
        lambda: traffic.replay(NANO_4B, 4, window=4, accepted=5),
        lambda: traffic.stored(NANO_4B, window=2, accepted=0.5),
        lambda: Ring(d="nvfp4"),
    ],
)
def test_impossible_requests(call) -> None:
    with pytest.raises(ValueError, match="accepted:"):
        call()


@given(geometries(), st.integers(1, 64))
def test_flops_of_a_cycle_are_the_sum_of_its_steps(geometry: Geometry, length: int) -> None:
    reads = sum(flops.read(geometry, p, 1) for p in range(length - 1))
    expected = reads + flops.flush(geometry, length - 1, None, raw=False)
    assert traffic.replay(geometry, length, rows=3).flops == 3 * expected
