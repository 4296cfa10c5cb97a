"""Gates in Triton against those of the recurrences in float64: on a GPU, or else interpreted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from replayssm.kernels.triton import gates
from replayssm.recurrence import gdn, kda, mamba2

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"
ULPS = 6
"""Accepted relative error, in units of 2^-23, of a function of an exact argument: 2 of them are the GPU's division."""
SMALLEST = 2.0**-125
"""Below this an exponential counts as zero."""


@triton.jit
def _discretize(out, dt, bias, lowest, highest, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, gates.discretize(tl.load(dt + n), tl.load(bias + n), lowest, highest))


@triton.jit
def _log_decay(out, raw, A_log, bias, N: tl.constexpr, LOWER_BOUND: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, gates.log_decay(tl.load(raw + n), tl.load(A_log + n), tl.load(bias + n), LOWER_BOUND))


@triton.jit
def _sigmoid(out, x, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, gates.sigmoid(tl.load(x + n)))


COUNT = 4096


def run(kernel: Any, *arguments: Any, **constants: Any) -> Tensor:
    out = torch.full((COUNT,), -7.5, device=DEVICE)
    placed = [a.to(DEVICE) if isinstance(a, Tensor) else a for a in arguments]
    kernel[(1,)](out, *placed, N=COUNT, **constants)
    return out.cpu().double()


def uniform(low: float, high: float, seed: int) -> Tensor:
    return low + (high - low) * torch.rand(COUNT, generator=torch.Generator().manual_seed(seed))


def worst(actual: Tensor, expected: Tensor) -> float:
    """Largest relative error, in units of 2^-23; where the truth is almost zero the result must be as well."""
    tiny = expected.abs() < SMALLEST
    assert (actual[tiny].abs() <= SMALLEST).all()
    return ((actual - expected)[~tiny] / expected[~tiny]).abs().max().item() * 2**23


ARGUMENTS = [*torch.linspace(-90, 90, COUNT - 8).tolist(), 0.0, -0.0, 20.0, 20.5, 1e-30, -0.001, -9.2, 88.0]
NONE = torch.zeros(COUNT)


def test_each_function_is_accurate_over_its_range() -> None:
    x = torch.tensor(ARGUMENTS)
    assert worst(run(_sigmoid, x), torch.sigmoid(x.double())) <= ULPS
    assert worst(run(_discretize, x, NONE, 0.0, math.inf), mamba2.discretize(x.double())) <= ULPS
    g, _ = gdn.gates(x.double(), NONE.double(), NONE.double(), NONE.double())
    assert worst(run(_log_decay, x, NONE, NONE, LOWER_BOUND=None), g) <= ULPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_as_good_as_those_of_torch_in_float32(dtype: torch.dtype) -> None:
    """Twice its largest error, in the ranges that layers have: the sum with the bias is rounded in both."""
    raw, logits = uniform(-4, 4, 1).to(dtype), uniform(-8, 8, 2).to(dtype)
    bias, A_log = uniform(math.log(1e-4), 0.0, 3), uniform(-1.0, math.log(16), 4)

    def check(name: str, found: Tensor, torch_result: Any) -> None:
        narrow, truth = torch_result(lambda t: t), torch_result(lambda t: t.double())
        assert narrow.dtype == torch.float32
        accepted = 2 * worst(narrow.double(), truth)
        assert worst(found, truth) <= accepted, name

    def of_gdn(to: Any) -> Tensor:
        return gdn.gates(to(raw), to(logits), to(A_log), to(bias))[0]

    def of_kda(to: Any) -> Tensor:
        given = to(raw)[None, None], to(logits)[None], to(A_log[:1]), to(bias)[None]
        return kda.gates(*given, lower_bound=-5.0)[0][0, 0]

    check("discretize", run(_discretize, raw, bias, 0.0, math.inf), lambda to: mamba2.discretize(to(raw), to(bias)))
    check("log_decay", run(_log_decay, raw, A_log, bias, LOWER_BOUND=None), of_gdn)
    check("bounded", run(_log_decay, raw, A_log[:1].expand(COUNT).clone(), bias, LOWER_BOUND=-5.0), of_kda)
    check("sigmoid", run(_sigmoid, logits), lambda to: gdn.gates(to(raw), to(logits), to(A_log), to(bias))[1])


def test_step_sizes_are_clamped() -> None:
    x = uniform(-9, 9, 5)
    found = run(_discretize, x, NONE, 0.001, 0.1)
    assert worst(found, mamba2.discretize(x.double(), limits=(0.001, 0.1))) <= ULPS
    assert found.min() == torch.tensor(0.001).double()
    assert found.max() == torch.tensor(0.1).double()


def test_nan_and_infinities() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf]).repeat(COUNT)[:COUNT]
    for found, expected in (
        (run(_sigmoid, x), [1.0, 0.0]),
        (run(_discretize, x, NONE, 0.0, math.inf), [math.inf, 0.0]),
        (run(_log_decay, x, NONE, NONE, LOWER_BOUND=None), [-math.inf, 0.0]),
        (run(_log_decay, x, NONE, NONE, LOWER_BOUND=-5.0), [-5.0, 0.0]),
    ):
        assert torch.equal(found[:3].isnan(), torch.tensor([True, False, False]))
        assert found[1:3].tolist() == expected
