"""Packed storage, bit for bit against ml_dtypes; sizes; unbiased stochastic rounding; what cannot be represented."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from replayssm.formats import E2M1, E4M3, magnitude_codes, random_words
from replayssm.layout import FORMATS
from replayssm.packed import NARROW, empty, pack, unpack

SCALED = tuple(name for name, f in FORMATS.items() if f.block > 1)
ELEMENT: dict[str, Any] = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3_b32": ml_dtypes.float8_e4m3fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
    "nvfp4_t16": ml_dtypes.float4_e2m1fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
TINY = np.float32(2.0**-126)


def states(size: int = 128) -> Tensor:
    """Rows of many magnitudes; a row of zeros, a block of zeros, ties, and a block far smaller than its row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, size, generator=generator) * 2.0 ** torch.randint(-40, 40, (64, 1), generator=generator)
    x[:32] *= torch.randn(32, size, generator=generator).exp()
    x[40], x[41, :32], x[42, :16] = 0.0, 0.0, x[42, :16] * 1e-7
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # all of E2M1: with an amax of 6 scales are ones
    x[43] = torch.cat([ties, -ties]).repeat(-(-size // 16))[:size]
    x[44] = 2.0**-140
    return x


def by_blocks(x: np.ndarray, block: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(len(x), -1, block)


def expected(x: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Elements as ml_dtypes rounds them, the scales' bytes or values, and the numbers that they stand for."""
    if format in ("bf16", "fp16"):
        codes = x.clip(-float(ml_dtypes.finfo(ELEMENT[format]).max), float(ml_dtypes.finfo(ELEMENT[format]).max))
        codes = codes.astype(ELEMENT[format])
        return codes, None, codes.astype(np.float32)
    blocks = by_blocks(x, FORMATS[format].block)
    amax = np.abs(blocks).max(-1)
    if format.startswith("nvfp4"):
        largest = amax.max(-1)
        if format == "nvfp4_t16":
            largest = largest.reshape(-1, 16).max(-1).repeat(16)
        row = np.maximum(largest / np.float32(2688), TINY)
        stored = (amax / np.float32(6) / row[:, None]).clip(0, 448).astype(ml_dtypes.float8_e4m3fn)
        scale = stored.astype(np.float32) * row[:, None]
    elif format == "mxfp4":
        exponent = np.where(amax > 0, np.frexp(amax)[1] - 1 - 2, -126).clip(-126)
        stored = np.ldexp(np.float32(1), exponent).astype(ml_dtypes.float8_e8m0fnu)
        scale = stored.astype(np.float32)
    else:
        scale = stored = np.maximum(amax / np.float32(127 if format == "int8" else 448), TINY)
    quotient = np.divide(blocks, scale[..., None], out=np.zeros_like(blocks), where=scale[..., None] != 0)
    if format == "int8":
        codes = np.rint(quotient).astype(np.int8)
    else:
        largest = float(ml_dtypes.finfo(ELEMENT[format]).max)
        codes = quotient.clip(-largest, largest).astype(ELEMENT[format])
    numbers = (codes.astype(np.float32) * scale[..., None]).reshape(len(x), -1)[:, : x.shape[1]]
    return codes.reshape(len(x), -1)[:, : x.shape[1]], stored, numbers


@pytest.mark.parametrize("size", [128, 80])
@pytest.mark.parametrize("format", NARROW)
def test_packing_is_bit_for_bit_that_of_ml_dtypes(format: str, size: int) -> None:
    x = states(size)
    packed = pack(x, format)
    codes, scales, numbers = expected(x.numpy(), format)
    if FORMATS[format].bits == 4:
        four = codes.view(np.uint8) & 0xF
        assert np.array_equal(packed.parts["codes"].numpy(), four[:, ::2] | four[:, 1::2] << 4)
    else:
        stored = packed.parts["codes"]
        same = stored if format not in ("bf16", "fp16") else stored.view(torch.int16)
        assert np.array_equal(same.numpy(), codes.view(same.numpy().dtype))
    if scales is not None:
        assert np.array_equal(packed.parts["scales"].numpy(), scales.view(packed.parts["scales"].numpy().dtype))
    assert np.array_equal(unpack(packed).numpy().view(np.uint32) << 1, numbers.view(np.uint32) << 1)  # zeros' sign


def test_elements_are_those_of_torch_and_ml_dtypes() -> None:
    """Every code of E4M3 and E2M1 means what ml_dtypes and torch's own type say."""
    codes = torch.arange(256, dtype=torch.uint8)
    one = torch.full((256, 1), 1.0)
    packed = empty((256, 1), "fp8_e4m3")
    packed.parts["codes"][:, 0], packed.parts["scales"][:] = codes, one
    told = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(unpack(packed)[:, 0].nan_to_num(999.0), told.nan_to_num(999.0))
    told = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert torch.equal(unpack(packed)[:, 0].nan_to_num(999.0), told.nan_to_num(999.0))
    four = empty((256, 2), "mxfp4")
    four.parts["codes"][:, 0], four.parts["scales"][:] = codes, 127
    halves = np.stack([codes.numpy() & 0xF, codes.numpy() >> 4], -1).view(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(unpack(four).numpy(), halves.astype(np.float32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [128, 80, 1])
def test_storage_takes_the_bytes_that_the_layout_says(format: str, size: int) -> None:
    room = empty((3, 5, size), format)
    packed = pack(torch.randn(3, 5, size), format)
    assert packed.nbytes == room.nbytes == 3 * FORMATS[format].matrix_bytes(5, size)
    assert packed.bytes_per_element == FORMATS[format].matrix_bytes(5, size) / 5 / size
    assert unpack(room).isnan().all()
    room[1] = packed[1]
    assert torch.equal(unpack(room)[1], unpack(packed)[1])
    assert unpack(room)[[0, 2]].isnan().all()


@pytest.mark.parametrize("format", SCALED)
def test_representable_numbers_come_back_under_any_word(format: str) -> None:
    held = torch.randint(-7, 8, (8, 128)).float()
    held[:, ::32] = {"int8": 127.0}.get(format, 448.0)
    if FORMATS[format].bits == 4:
        held = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, -6])[torch.randint(8, (8, 128))]
        held[:, ::16] = 6.0
        held[:, :32] *= 448.0 if format.startswith("nvfp4") else 4.0
    for word in (0, 2**31, 2**32 - 1):
        assert torch.equal(unpack(pack(held, format, torch.full(held.shape, word))), held)


@pytest.mark.parametrize("format", NARROW)
def test_stochastic_rounding_is_unbiased_between_two_neighbours(format: str) -> None:
    """Means over draws within Bernstein's bound of a chance of 1e-12, and never beyond the neighbours."""
    draws, size = 4096, 128
    x = torch.randn(size, generator=torch.Generator().manual_seed(1))
    x[::16] *= 4
    words = random_words((draws, 1, size), seed=7, request=torch.arange(draws), layer=0, flush=3)[:, 0]
    came = unpack(pack(x.expand(draws, size), format, words)).double()
    below, above, exact = came.amin(0), came.amax(0), x.double()
    gap, slack = above - below, exact.abs() * 2.0**-20
    inside = (exact >= below - slack) & (exact <= above + slack)
    if FORMATS[format].bits == 4:  # a scale that is below amax / 6 cuts off the largest
        assert (gap[~inside] == 0).all()
        assert inside.sum() > 0.9 * size
    else:
        assert inside.all()
    variance = ((above - exact) * (exact - below)).clamp_min(0)
    surely = math.log(2 * size / 1e-12)
    bound = (2 * variance * surely / draws).sqrt() + 2 * gap * surely / (3 * draws)
    assert ((came.mean(0) - exact).abs() <= bound + slack)[inside].all()
    assert (gap > 0).sum() > size // 2


def test_counts_of_words_that_round_up_are_the_fraction() -> None:
    """Over evenly spaced words |x| goes up exactly as often as it lies behind its lower neighbour, subnormals too."""
    words = torch.arange(2**16) << 16
    for code, below, gap in ((E4M3, 0x38, 2.0**-3), (E4M3, 0x01, 2.0**-9), (E2M1, 0x2, 0.5), (E2M1, 0x0, 0.5)):
        low = {0x38: 1.0, 0x01: 2.0**-9, 0x2: 1.0, 0x0: 0.0}[below]
        x = torch.full(words.shape, low + 0.3125 * gap)
        codes = magnitude_codes(x, code, words)
        assert codes.unique().tolist() == [below, below + 1]
        assert int((codes == below + 1).sum()) == 0.3125 * 2**16


@pytest.mark.parametrize("format", NARROW)
def test_nan_stays_and_infinity_saturates(format: str) -> None:
    x = torch.ones(2, FORMATS[format].rows, 256)
    x[0, 0, 3], x[1, 0, 3] = torch.nan, torch.inf
    for words in (None, torch.full(x.shape, 2**32 - 1)):
        came = unpack(pack(x, format, words))[:, 0]
        assert came[0, 3].isnan()
        assert came[1].isfinite().all()
        assert came[1, 3] > 2.0**15 if format == "fp16" else came[1, 3] > 2.0**126


def test_bad_arguments_get_one_line() -> None:
    with pytest.raises(ValueError, match=r"^format='fp4' is unknown; accepted: fp32, bf16, .*$"):
        pack(torch.ones(1, 4), "fp4")
    with pytest.raises(ValueError, match=r"^x has dtype torch.float64; accepted: torch.float32$"):
        pack(torch.ones(1, 4).double(), "nvfp4")
    with pytest.raises(ValueError, match=r"^x has shape \[4\]; accepted for nvfp4_t16: \[..., P, N\]$"):
        pack(torch.ones(4), "nvfp4_t16")
