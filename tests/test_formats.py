"""Number formats: Philox against published answers, and what rounding may and may not do."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replayssm.formats import (
    CODES,
    DTYPES,
    GROUP,
    nearest_round,
    philox4x32_10,
    random_words,
    round_with,
    stochastic_round,
)
from replayssm.layout import FORMATS, PLAIN

NARROW = ("bf16", "fp16")
COUNTER: dict[str, Any] = {"request": 0, "layer": 0, "flush": 0}
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1
"""
"""Counter, key, answer: the "philox4x32 10" lines of tests/kat_vectors in github.com/DEShawResearch/random123."""

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
property_test = settings(max_examples=200, deadline=None, derandomize=True, database=None)
every_narrow_format = pytest.mark.parametrize("format", NARROW)


@functools.cache
def every_number(format: str) -> Tensor:
    """All finite numbers of a format of 16 bits, in order, -0 and +0 once each."""
    codes = torch.arange(CODES[DTYPES[format]].largest + 1)
    return torch.cat([(codes - 0x8000).flip(0), codes]).to(torch.int16).view(DTYPES[format])


def neighbours(x: float, format: str) -> tuple[float, float]:
    """The largest number of the format that is not above x and the smallest that is not below, ends included."""
    numbers = every_number(format).double()
    x = min(max(x, numbers[0].item()), numbers[-1].item())
    return numbers[numbers <= x].max().item(), numbers[numbers >= x].min().item()


def test_philox_gives_the_published_answers() -> None:
    for line in KNOWN_ANSWERS.strip().splitlines():
        words = torch.tensor([int(word, 16) for word in line.split()])
        assert philox4x32_10(words[4:6], words[:4]).tolist() == words[6:].tolist()


def test_codes_and_sizes_are_those_of_the_dtypes() -> None:
    assert tuple(DTYPES) == PLAIN
    for name, dtype in DTYPES.items():
        assert FORMATS[name].bits == torch.finfo(dtype).bits
        assert FORMATS[name].row_bytes(1) == dtype.itemsize
    for dtype, code in CODES.items():
        info = torch.finfo(dtype)
        assert info.eps == 2.0**-code.mantissa_bits
        assert info.tiny == 2.0 ** (code.lowest - 127)
        assert torch.tensor(info.max, dtype=dtype).view(torch.int16) == code.largest
        assert torch.tensor(math.nan, dtype=dtype).view(torch.int16) == code.nan


@every_narrow_format
def test_representable_numbers_stay_whatever_the_word(format: str) -> None:
    numbers = every_number(format)
    for word in (0, 1, 2**31, 2**32 - 1):
        kept = round_with(numbers.float(), format, torch.full(numbers.shape, word))
        assert torch.equal(kept.view(torch.int16), numbers.view(torch.int16))
    assert torch.equal(nearest_round(numbers.float(), format).view(torch.int16), numbers.view(torch.int16))


@every_narrow_format
@property_test
@given(x=floats, word=st.integers(0, 2**32 - 1))
def test_only_the_two_neighbours_come_out(format: str, x: float, word: int) -> None:
    rounded = round_with(torch.tensor([x]), format, torch.tensor([word]))
    assert rounded.item() in neighbours(x, format)
    assert math.copysign(1.0, rounded.item()) == math.copysign(1.0, x)
    mirrored = round_with(torch.tensor([-x]), format, torch.tensor([word]))
    assert torch.equal(mirrored, -rounded)


@every_narrow_format
@property_test
@given(x=floats)
def test_a_number_goes_up_for_as_many_words_as_lies_behind_its_neighbour(format: str, x: float) -> None:
    """|x| rounds up from the word 2^32 (1 - fraction) on, so the mean over all words is x: no bias at all."""
    below, above = (abs(n) for n in sorted(neighbours(x, format), key=abs))
    if not below < abs(x) < above:
        return
    fraction = (abs(x) - below) / (above - below)
    first = 2**32 - math.floor(fraction * 2**32)
    words = torch.tensor([w for w in (0, first - 1, first, 2**32 - 1) if w < 2**32])
    came = round_with(torch.full(words.shape, x), format, words).double().abs()
    assert came.tolist() == [above if w >= first else below for w in words.tolist()]
    assert fraction * 2**32 % 1 == 0 or fraction < 2.0**-9


@every_narrow_format
@property_test
@given(x=st.floats(-1.0, 1.0, width=32) | floats, seed=st.integers(0, 2**64 - 1))
def test_the_mean_is_the_number(format: str, x: float, seed: int) -> None:
    """Within Bernstein's bound for a chance of 1e-12 a draw, which subnormals far below an ulp meet as well."""
    rows, columns = 64, 512
    came = stochastic_round(torch.full((1, rows, columns), x), format, seed=seed, **COUNTER).double()
    below, above = neighbours(x, format)
    count, surely = rows * columns, math.log(2 / 1e-12)
    inside = min(max(x, below), above)
    variance = (above - inside) * (inside - below)
    bound = math.sqrt(2 * variance * surely / count) + 2 * (above - below) * surely / (3 * count)
    assert abs((came - inside).mean().item()) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("quanta", [2.0**-30, 2.0**-9, 0.3, 1.5, 1000.7])
def test_subnormals_are_unbiased(quanta: float) -> None:
    """The number of words that round up, counted over evenly spaced ones, is the fraction of them."""
    x = torch.tensor(quanta * 2.0**-24)
    words = torch.arange(2**16) << 16
    for sign in (1, -1):
        came = round_with((sign * x).expand(words.shape), "fp16", words).double() * 2**24 * sign
        fraction = x.double().item() * 2**24 - math.floor(quanta)
        assert (came > math.floor(quanta)).sum() == math.floor(fraction * 2**16)
    last = round_with(x[None], "fp16", torch.tensor([2**32 - 1])).double() * 2**24
    assert last == math.floor(quanta) + 1


@every_narrow_format
def test_large_numbers_saturate_and_nan_stays(format: str) -> None:
    largest = torch.finfo(DTYPES[format]).max
    above = torch.tensor([largest, largest * (1 + 2.0**-20), 3.4028234e38, math.inf])
    for word in (0, 2**32 - 1):
        for sign in (1, -1):
            rounded = round_with(sign * above, format, torch.full(above.shape, word))
            assert (rounded == sign * largest).all()
        nan = torch.tensor([0x7F800001, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
        assert round_with(nan, format, torch.full(nan.shape, word)).isnan().all()
    assert (nearest_round(above, format) == largest).all()
    assert nearest_round(torch.tensor([math.nan]), format).isnan().all()


@every_narrow_format
@property_test
@given(x=floats)
def test_nearest_is_nearest(format: str, x: float) -> None:
    below, above = neighbours(x, format)
    inside = min(max(x, below), above)
    rounded = nearest_round(torch.tensor([x]), format).item()
    assert rounded in (below, above)
    assert abs(rounded - inside) == min(above - inside, inside - below)


def test_fp32_is_left_alone() -> None:
    x = torch.tensor([[1 + 2.0**-23, math.inf, math.nan]])
    assert nearest_round(x, "fp32") is x
    assert stochastic_round(x, "fp32", seed=0, **COUNTER) is x


def test_a_word_depends_on_its_own_place_only() -> None:
    """Not on the batch around its row, nor on how many rows or layers are rounded at once."""
    shape, seed = (3, 4, 5, 12), 2**63 + 7
    request, flush = torch.tensor([9, 2**32 - 1, 4]), torch.tensor([0, 7, 2])
    words = random_words(shape, seed=seed, request=request, layer=3, flush=flush)
    assert ((words >= 0) & (words < 2**32)).all()
    for row in (2, 0):
        alone = random_words((1, *shape[1:]), seed=seed, request=int(request[row]), layer=3, flush=int(flush[row]))
        assert torch.equal(alone[0], words[row])
    order = torch.tensor([1, 2, 0])
    moved = random_words(shape, seed=seed, request=request[order], layer=3, flush=flush[order])
    assert torch.equal(moved, words[order])
    first_heads = random_words((3, 2, 5, 12), seed=seed, request=request, layer=3, flush=flush)
    assert torch.equal(first_heads, words[:, :2])


def test_words_follow_the_counter() -> None:
    """Element 13 of a row is the 6th of its second group: word 2, halves exchanged."""
    words = random_words((1, 2, 20), seed=(5 << 32) + 6, request=11, layer=12, flush=13)
    answer = philox4x32_10(torch.tensor([6, 5]), torch.tensor([11, 12, 13, 3 + 1]))
    assert words[0, 1, 8 + 4] == answer[2]
    assert words[0, 1, 8 + 5] == (answer[2] % 2**16) * 2**16 + answer[2] // 2**16
    assert GROUP == 8


def test_words_are_uniform_and_independent() -> None:
    """Within 6 standard deviations: each of 32 bits is set half of the time, and pairs, which share a word, differ."""
    words = random_words((1, 4096, 128), seed=1, **COUNTER)
    count = words.numel()
    bits = torch.stack([(words >> n & 1).double().mean() for n in range(32)])
    assert ((bits - 0.5).abs() <= 6 * 0.5 / math.sqrt(count)).all()
    top = (words >> 19).double() / 2**13 - 0.5
    product = (top[..., ::2] * top[..., 1::2]).mean().item()
    assert abs(product) <= 6 / 12 / math.sqrt(count / 2)
    assert len(words.unique()) > count - count**2 / 2**33 - 6 * count / 2**16


@pytest.mark.parametrize("name", ["seed", "request", "layer", "flush"])
def test_every_part_of_the_counter_matters(name: str) -> None:
    x = torch.full((1, 8, 64), 1 + 2.0**-9)
    counter = {"seed": 1, "request": 1, "layer": 1, "flush": 1}
    first = stochastic_round(x, "bf16", **counter)
    assert torch.equal(first, stochastic_round(x, "bf16", **counter))
    assert not torch.equal(first, stochastic_round(x, "bf16", **counter | {name: 2}))


def test_bad_arguments_get_one_line() -> None:
    x, counter = torch.ones(2, 3, 4), COUNTER | {"seed": 0}
    with pytest.raises(ValueError, match=r"^format='nvfp4' has no rounding; accepted: fp32, bf16, fp16$"):
        stochastic_round(x, "nvfp4", **counter)
    with pytest.raises(ValueError, match=r"^x has dtype torch.float64; accepted: torch.float32$"):
        nearest_round(x.double(), "fp16")
    with pytest.raises(ValueError, match=r"^seed=-1 is impossible; accepted: an integer from 0 to 2\^64 - 1$"):
        stochastic_round(x, "fp16", **counter | {"seed": -1})
    with pytest.raises(ValueError, match=r"^layer=-1 is impossible; accepted: an integer from 0 to 2\^32 - 1$"):
        stochastic_round(x, "fp16", **counter | {"layer": -1})
    with pytest.raises(ValueError, match=r"^flush has shape \[3\] of torch.int64; accepted: \[2\] integers$"):
        stochastic_round(x, "fp16", **counter | {"flush": torch.zeros(3, dtype=torch.int64)})
