"""What the kernels of Mamba-2 consist of: a token and its step size, weights of the ring, read, fold."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: SIM102 (no condition both of compiler and device)

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.kernels.triton.gates import discretize
from replayssm.kernels.triton.rounding import INTERPRETED, arrive, draws_of, rounded
from replayssm.kernels.triton.tiles import (
    element,
    exp,
    first_tile,
    load_state,
    load_vector,
    product,
    rows_of,
    sum_later,
    zeros,
)
from replayssm.recurrence.mamba2 import Inputs


@triton.jit
def step_size(dt, gates, head, GATED: tl.constexpr):
    """dt as it is, or, GATED, what the recurrence takes for it."""
    if GATED:
        bias = 0.0
        if gates.dt_bias is not None:
            bias = tl.load(gates.dt_bias + head).to(tl.float32)
        dt = discretize(dt, bias)
    return dt


@triton.jit
def load_token(inputs, gates, strides, row, head, p, mine, cut: tl.constexpr, GATED: tl.constexpr):
    """One row's and head's inputs in float32, x and z of the rows ``p`` and zero where not ``mine``; B and x as they
    arrived. A D or z that the layer lacks is 0.
    """
    group, n = head // cut.SHARE, tl.arange(0, cut.PADDED)
    D, z = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if inputs.D is not None:
        D = tl.load(inputs.D + head)
    if inputs.z is not None:
        z = tl.load(inputs.z + row * strides.z[0] + head * strides.z[1] + p, mask=mine, other=0.0).to(tl.float32)
    return Inputs(
        x=tl.load(inputs.x + row * strides.x[0] + head * strides.x[1] + p, mask=mine, other=0.0),
        B=tl.load(inputs.B + row * strides.B[0] + group * strides.B[1] + n, mask=n < cut.N, other=0.0),
        C=load_vector(inputs.C + row * strides.C[0] + group * strides.C[1], n, cut),
        dt=step_size(tl.load(inputs.dt + row * strides.dt[0] + head * strides.dt[1]), gates, head, GATED),
        A=tl.load(inputs.A + head),
        D=D,
        z=z,
    )


@triton.jit
def store(out, y, z, t, m, end, cut: tl.constexpr):
    """Gate, and the one rounding of rows ``m``, which begin ``t`` rows into the program's."""
    if len(z.shape) == 1:
        z = rows_of(z, t, m, cut)
        y *= z / (1.0 + tl.exp(-z))
    tl.store(out + m, y.to(out.dtype.element_ty), mask=m < end)


@triton.jit
def weights_of(dts, age, dt, A):
    """What is left of the checkpoint, and of each ring token times its dt, once the current token has been applied."""
    decay = exp(A * (tl.sum(dts, axis=0) + dt))
    return decay, dts * exp(A * (sum_later(dts, age) + dt))


@triton.jit
def walk(ring_x, ring_B, strides, weight, C, oldest, length, p, end, cut: tl.constexpr):
    """The ring's part of the outputs ``p``, the sum of w (B_j . C) x_j: token by token, since a program that walks many
    tiles has registers for one token.
    """
    n = tl.arange(0, cut.PADDED)
    SPAN: tl.constexpr = cut.SPAN
    added = tl.zeros((SPAN,), tl.float32)
    for i in tl.range(cut.L - 1 if INTERPRETED else length, num_stages=cut.STAGES):
        entry = oldest + i
        entry = tl.where(entry >= cut.CAPACITY, entry - cut.CAPACITY, entry)
        live = i < length
        B = tl.load(ring_B + entry * strides.B[2] + n, mask=live & (n < cut.N), other=0.0).to(tl.float32)
        x = tl.load(ring_x + entry * strides.x[2] + p, mask=live & (p < end), other=0.0).to(tl.float32)
        w = element(weight, entry if cut.EAGER else i, cut)
        added += (w * tl.sum(B * C, axis=0)) * x
    return added


@triton.jit
def read(out, state, S, Cs, decay, added, z, part, end, cut: tl.constexpr):
    """Outputs from the checkpoint and what the ring has ``added``; ``S`` if it has been loaded."""
    first, tiles = part * cut.ROWS + tl.arange(0, cut.M), first_tile(state, part, cut)
    for t in tl.range(cut.TILES, num_stages=cut.STAGES):
        m = first + t * cut.M
        tile = S if cut.TILES == 1 else load_state(tiles + t * cut.M * cut.ROW, m, end, cut)
        SC = zeros(cut)
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            SC += tile[c].to(tl.float32) * Cs[c][None, :]
        y = decay * tl.sum(SC, axis=1) + rows_of(added, t * cut.M, m, cut)
        store(out, y, z, t * cut.M, m, end, cut)


@triton.jit
def fold(
    out, state, ring_x, Bs, dts, age, valid, token, head, draws, part, end, cut: tl.constexpr
):  # fmt: skip
    """Fold ring and token into the checkpoint, a product on tensor cores a tile; outputs from what it becomes.

    ``ring_x [RING]`` points to the ring's tokens, ``Bs [RING,PADDED]`` has been loaded.
    """
    first, n = part * cut.ROWS + tl.arange(0, cut.FOLD), tl.arange(0, cut.PADDED)
    now = tl.arange(0, cut.RING) == cut.L - 1  # the token takes a row that no ring token has
    dts = tl.where(now, token.dt, dts)
    Bs = tl.where(now[:, None], token.B[None, :], Bs)
    weight = dts * exp(token.A * sum_later(dts, tl.where(now, cut.L - 1, age)))
    decay = exp(token.A * tl.sum(dts, axis=0))
    tiles = state + first[:, None] * cut.ROW + n[None, :]
    for t in tl.range(cut.FOLDS, num_stages=2):
        m = first + t * cut.FOLD
        mask = (m < end)[:, None] & (n < cut.N)[None, :]
        S = tl.load(tiles + t * cut.FOLD * cut.ROW, mask=mask, other=0.0)
        xs = tl.load(ring_x[None, :] + m[:, None], mask=valid[None, :] & (m < end)[:, None], other=0.0)
        x = rows_of(token.x, t * cut.FOLD, m, cut)
        xs = tl.where(now[None, :], x[:, None], xs).to(tl.float32)
        moved = S.to(tl.float32) * decay + product(xs * weight[None, :], Bs)
        y = tl.sum(moved * token.C[None, :], axis=1) + token.D * x.to(tl.float32)
        store(out, y, token.z, t * cut.FOLD, m, end, cut)
        narrow = rounded(moved, head * cut.P + m, 0, cut.N, draws, state.dtype.element_ty)
        tl.store(tiles + t * cut.FOLD * cut.ROW, narrow, mask=mask)


@triton.jit
def fold_row(
    out, state, ring, ring_x, Bs, dts, age, valid, token, rounding, slot, head, part, end, cut: tl.constexpr,
    DRAWN: tl.constexpr,
):  # fmt: skip
    """The flush of a part, see `fold`, which is counted."""
    draws = None
    if DRAWN:
        draws = draws_of(rounding, slot, arrive(ring.flushes + slot, cut.H * cut.PARTS))
    elif part == 0:
        if head == 0:
            tl.store(ring.flushes + slot, tl.load(ring.flushes + slot) + 1)
    fold(out, state, ring_x, Bs, dts, age, valid, token, head, draws, part, end, cut)
