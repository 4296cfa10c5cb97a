"""Stochastic rounding in Triton against the definition in torch, bit for bit: on a GPU, or else interpreted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from replayssm.formats import DTYPES, random_words, stochastic_round
from replayssm.kernels.triton import rounding

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"
NARROW = ("bf16", "fp16")
EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 65504.0, 65519.9, 65520.0, 3.4e38, 2.0**-14, 2.0**-24, 2.0**-25]
EDGES += [2.0**-33, 2.0**-57, 2.0**-126, 2.0**-133, 2.0**-149, -1e-40, 1 - 2.0**-24, 2 - 2.0**-23, 6.1e-5, -6.09e-5]


@triton.jit
def _round(
    out,
    words,
    x,
    requests,
    flushes,
    seed,
    layer,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
):
    program = tl.program_id(0)
    tiles: tl.constexpr = (ROWS + M - 1) // M
    DTYPE: tl.constexpr = out.dtype.element_ty
    rows = program % tiles * M + tl.arange(0, M)
    batch_row = program // tiles
    request, flush = tl.load(requests + batch_row), tl.load(flushes + batch_row)
    for c in tl.static_range((N + W - 1) // W):
        columns = c * W + tl.arange(0, W)
        at = (batch_row * ROWS + rows)[:, None] * N + columns[None, :]
        mask = (rows < ROWS)[:, None] & (columns < N)[None, :]
        tile = tl.load(x + at, mask=mask, other=0.0)
        drawn = rounding.random_words(rows, c * W, W, N, seed, request, layer, flush)
        tl.store(words + at, drawn.to(tl.int64), mask=mask)
        rounded = rounding.stochastic(tile, rows, c * W, N, seed, request, layer, flush, DTYPE)
        tl.store(out + at, rounded, mask=mask)


def check(x: Tensor, format: str, tile: tuple[int, int], counter: dict[str, Any]) -> None:
    """Every bit of words and results is that of `replayssm.formats`."""
    rows, columns = x[0].numel() // x.shape[-1], x.shape[-1]
    M, W = tile
    out = torch.full(x.shape, -7.5, dtype=DTYPES[format], device=DEVICE)
    words = torch.full(x.shape, -1, dtype=torch.int64, device=DEVICE)
    request, flush = (counter[name].to(DEVICE) for name in ("request", "flush"))
    grid = (-(-rows // M) * len(x),)
    seed, layer = counter["seed"], counter["layer"]
    _round[grid](out, words, x.to(DEVICE), request, flush, seed, layer, rows, columns, M, W)
    assert torch.equal(words.cpu(), random_words(x.shape, **counter))
    expected = stochastic_round(x, format, **counter)
    assert torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Of every size that float32 has, with edge cases among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32).flatten()
    tame = torch.randn(x.shape, generator=generator) * torch.exp(6 * torch.randn(x.shape, generator=generator))
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, x, tame)
    chosen = torch.randperm(len(x), generator=generator)[: len(EDGES)]
    x[chosen] = torch.tensor(EDGES)[: len(chosen)]
    return x.view(shape)


def counter(rows: int, *, seed: int = 3, layer: int = 5) -> dict[str, Any]:
    request = torch.tensor([2**32 - 1, 8, 2**33 + 9])[:rows]
    return {"seed": seed, "request": request, "layer": layer, "flush": torch.tensor([0, 2**32 + 1, 2**31])[:rows]}


@pytest.mark.parametrize("format", NARROW)
@pytest.mark.parametrize("tile", [(4, 8), (2, 32), (16, 128), (8, 4), (16, 2)])
def test_bits_are_those_of_the_definition(format: str, tile: tuple[int, int]) -> None:
    check(numbers((2, 3, 5, 24), seed=1), format, tile, counter(2))


@pytest.mark.parametrize("format", NARROW)
@pytest.mark.parametrize("state_dim", [1, 7, 24, 128])
def test_rows_that_fill_no_group(format: str, state_dim: int) -> None:
    width = min(16, 1 << (state_dim - 1).bit_length())
    check(numbers((3, 2, 3, state_dim), seed=2), format, (4, width), counter(3))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40 + 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("layer", [0, 1, 2**31 + 1])
def test_all_bits_of_seed_and_layer_count(seed: int, layer: int) -> None:
    check(numbers((1, 1, 2, 16), seed=3), "fp16", (2, 16), counter(1, seed=seed, layer=layer))
