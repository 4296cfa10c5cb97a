"""Step sizes, log decays and betas from what a layer's projections give, in float32, for use inside the kernels.

The functions are those of `replayssm.recurrence`: ``discretize`` of Mamba-2, ``gates`` of GDN and KDA. The sum 1 + e^x
is never formed for a logarithm: a dt of 1e-3 would lose up to 6e-5 of itself in it, of 1e-4 ten times that. NaN stays
NaN.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from replayssm.kernels.triton.tiles import exp


class Gates(NamedTuple):
    """A layer's parameters of its gates; given to a step, what its inputs hold is raw, as the projections give it.

    Mamba-2: ``dt`` of the inputs is raw; ``dt_bias [H]`` or None. GDN: ``g`` and ``beta`` of the inputs are a and b;
    ``dt_bias, A_log [HV]``. KDA: they are f and b; ``dt_bias [H,K]``, ``A_log [H]``, and ``lower_bound`` where the gate
    is bounded. Raw inputs and parameters are float32, bfloat16 or float16; parameters are contiguous.
    """

    dt_bias: Any
    A_log: Any = None
    lower_bound: float | None = None


@triton.jit
def discretize(dt, bias, lowest=0.0, highest=float("inf")):
    """Mamba-2's step size: softplus(dt + bias), clamped; ``bias`` 0.0 where a layer has none."""
    steps = softplus(dt.to(tl.float32) + bias)
    return tl.where(steps == steps, tl.minimum(tl.maximum(steps, lowest), highest), steps)


@triton.jit
def log_decay(raw, A_log, bias, LOWER_BOUND: tl.constexpr = None):
    """GDN's and KDA's g: -exp(A_log) softplus(raw + bias), or, with ``LOWER_BOUND``, the bounded gate of KDA,
    LOWER_BOUND sigmoid(exp(A_log) (raw + bias)). ``A_log`` at most 80."""
    rate = exp(A_log.to(tl.float32))
    shifted = raw.to(tl.float32) + bias
    if LOWER_BOUND is None:
        return -rate * softplus(shifted)
    else:
        return LOWER_BOUND * sigmoid(rate * shifted)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x): beta of GDN and KDA from its projection."""
    x = x.to(tl.float32)
    small = exp(-tl.abs(x))
    return tl.where(x == x, tl.where(x < 0, small, 1.0) / (1.0 + small), x)


@triton.jit
def softplus(x):
    """log(1 + e^x), which in float32 is x itself above 20."""
    small = exp(-tl.abs(x))
    # log(1 + u) = 2 atanh(s) with s = u / (2 + u), at most 1/3.
    s = small / (2.0 + small)
    square = s * s
    p = 1.0 / 15
    p = p * square + 1.0 / 13
    p = p * square + 1.0 / 11
    p = p * square + 1.0 / 9
    p = p * square + 1.0 / 7
    p = p * square + 1.0 / 5
    p = p * square + 1.0 / 3
    p = p * square + 1.0
    return tl.where(x == x, tl.where(x > 0, x, 0.0) + 2.0 * s * p, x)
