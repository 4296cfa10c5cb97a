"""Mamba-2 in Triton, speculative decoding: a window of T tokens a row is verified in one launch.

A program takes tiles of one row's state, of one head or of several of a group. Each tile is read once for all T tokens,
and multiplied by their C on tensor cores; what ring and window add are products of the scalars B_j . C_t, which the
heads of a group share. Rows whose ring has no room for another window also fold it into the checkpoint: the program
writes the tile that it has read.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: SIM102 (a condition is known to the compiler, or is not)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.geometry import Geometry
from replayssm.kernels.triton.arguments import WIDE, check
from replayssm.kernels.triton.gates import Gates, discretize
from replayssm.kernels.triton.tiles import exp, load_ring, load_ring_vectors, product, ring_order, sum_later
from replayssm.kernels.triton.verify_arguments import check_counts, check_mamba2, check_window_layer
from replayssm.kernels.triton.verify_launch import WindowCut, WindowLaunch
from replayssm.kernels.triton.verify_launch_table import verify_launch_for
from replayssm.kernels.triton.verify_tiles import (
    TOKENS,
    column_chunks,
    input_products,
    load_columns,
    load_tile,
    place,
    ring_chunks,
    rows_of,
    state_products,
    store_tile,
    store_vectors,
    sums,
    vector_chunks,
    weighted,
)
from replayssm.recurrence.mamba2 import Inputs


class _Ring(NamedTuple):
    x: Any
    B: Any
    dt: Any
    cursor: Any
    origin: Any
    flushes: Any


class _Strides(NamedTuple):
    """Strides of all axes but the last, which is contiguous; of ``dt [B,T,H]`` all."""

    state: Any
    out: Any
    x: Any
    B: Any
    C: Any
    dt: Any
    z: Any


class _RingStrides(NamedTuple):
    """As `_Strides`; of ``dt [S,H,R]`` all."""

    x: Any
    B: Any
    dt: Any


def verify_step(
    out: Tensor,
    layer: CacheLayer,
    inputs: Inputs,
    slots: Tensor,
    launch: WindowLaunch | None = None,
    *,
    lengths: Tensor | None = None,
    gates: Gates | None = None,
) -> None:
    """A window of T tokens a row: outputs of each, and all of them appended behind the committed ones of the ring.

    ``out [B,T,H,P]``, ``inputs`` with a T axis behind the rows, ``slots [B]`` int64, -1 for padding. ``lengths [B]``
    are the tokens that each row's window holds, 0 to T, all T without it; what lies behind is neither read nor written.
    A row whose committed ring could not take another window, p > L - T, folds it into the checkpoint, rounded to the
    nearest, and counts the flush. Mutates ``out``, the ring, and checkpoint and ``flushes`` of those rows; cursors are
    moved by `verify_commit.commit_window`. With ``gates`` the inputs' dt is raw. Raises ``ValueError``, one line, on
    what it does not take.
    """
    check_window_layer(layer, "mamba2", inputs.x.shape[1])
    strides = _Strides(**check_mamba2(out, layer.state, inputs, slots, gates))
    rows, (slots_of_state, H, P, N), G = len(slots), layer.state.shape, inputs.B.shape[2]
    check_counts("lengths", lengths, rows, layer.state.device)
    geometry, kind, R = Geometry("mamba2", H, G, P, N), (inputs.x.dtype,), layer.capacity
    ring_strides = _RingStrides(
        x=check("ring x", layer.ring["x"], (slots_of_state, H, R, P), kind),
        B=check("ring B", layer.ring["B"], (slots_of_state, G, R, N), kind),
        dt=check("ring dt", layer.ring["dt"], (slots_of_state, H, R), WIDE, scalars=True),
    )
    launch = launch or verify_launch_for(geometry, rows, layer)
    cut = WindowCut.of(geometry, launch, layer)
    if rows:
        _verify_kernel[(cut.PROGRAMS * rows,)](
            out,
            layer.state,
            _Ring(**layer.ring, cursor=layer.cursor, origin=layer.origin, flushes=layer.flushes),
            inputs,
            slots,
            lengths,
            gates,
            strides,
            ring_strides,
            cut,
            GATED=gates is not None,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )


@triton.jit
def _verify_kernel(
    out, state, ring, inputs, slots, lengths, gates, strides, ring_strides, cut: tl.constexpr, GATED: tl.constexpr
):
    part, first_head, row = place(cut)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    state += slot * strides.state[0]
    S = ()
    if cut.PIECES == 1:
        S = load_tile(state + first_head * strides.state[1], rows_of(0, part, cut), cut)
    length, oldest = tl.load(ring.cursor + slot), tl.load(ring.origin + slot)
    count = cut.T
    if lengths is not None:
        count = tl.load(lengths + row).to(tl.int32)
    due = (length > cut.L - cut.T) | (cut.L < cut.T)

    # Tokens: w of the window as a summand, c of the window as what asks.
    w, c = tl.arange(0, TOKENS), tl.arange(0, cut.COLUMNS)
    live, asked = w < count, c < count
    entry, _, held = ring_order(length, oldest, cut)
    last = (oldest + length + w) % cut.CAPACITY
    group = first_head // cut.SHARE
    ring_B = ring.B + slot * ring_strides.B[0] + group * ring_strides.B[1]
    B_old = ring_chunks(ring_B + entry * ring_strides.B[2], held, cut)
    window_B = inputs.B + row * strides.B[0] + group * strides.B[2]
    B_new = vector_chunks(window_B, w * strides.B[1], live, cut)
    C = column_chunks(inputs.C + row * strides.C[0] + group * strides.C[2], c * strides.C[1], asked, cut)
    BC_old, BC_new = input_products(B_old, C, cut), input_products(B_new, C, cut)
    if part == 0:
        if first_head % cut.SHARE == 0:
            store_vectors(ring_B, last * ring_strides.B[2], live, B_new, cut)
        if first_head == 0:
            if due:
                tl.store(ring.flushes + slot, tl.load(ring.flushes + slot) + 1)

    if due:
        _walk(
            out, state, ring, inputs, gates, strides, ring_strides, part, first_head, row, slot, length, oldest, count,
            S, C, B_old, BC_old, BC_new, cut, GATED, FOLDED=True,
        )  # fmt: skip
    else:
        _walk(
            out, state, ring, inputs, gates, strides, ring_strides, part, first_head, row, slot, length, oldest, count,
            S, C, B_old, BC_old, BC_new, cut, GATED, FOLDED=False,
        )  # fmt: skip


@triton.jit
def _walk(
    out, state, ring, inputs, gates, strides, ring_strides, part, first_head, row, slot, length, oldest, count, S, C,
    B_old, BC_old, BC_new, cut: tl.constexpr, GATED: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Outputs of a program's heads, tile by tile, and the window's x and dt appended; ``FOLDED``, a tile that has been
    read also takes in the ring and is written. ``S`` is the only tile if there is one.
    """
    w, c = tl.arange(0, TOKENS), tl.arange(0, cut.COLUMNS)
    live, asked = w < count, c < count
    entry, age, held = ring_order(length, oldest, cut)
    last = (oldest + length + w) % cut.CAPACITY
    # One tile less is on its way where tiles are written: shared memory is kept for them too.
    STAGES: tl.constexpr = min(2, cut.STAGES) if FOLDED else cut.STAGES
    for h in tl.range(cut.HEADS, num_stages=STAGES):
        head = first_head + h
        ring_x = ring.x + slot * ring_strides.x[0] + head * ring_strides.x[1]
        ring_dt = ring.dt + slot * ring_strides.dt[0] + head * ring_strides.dt[1]
        dt_old = load_ring(ring_dt + entry * ring_strides.dt[2], held, cut)
        window_dt = inputs.dt + row * strides.dt[0] + head * strides.dt[2]
        dt_new = tl.load(window_dt + w * strides.dt[1], mask=live, other=0.0)
        if GATED:
            bias = 0.0
            if gates.dt_bias is not None:
                bias = tl.load(gates.dt_bias + head).to(tl.float32)
            dt_new = tl.where(live, discretize(dt_new, bias), 0.0)
        A = tl.load(inputs.A + head)
        if part == 0:
            tl.store(ring_dt + last * ring_strides.dt[2], dt_new, mask=live)
        W_old, W_new, decay = _weights(dt_old, dt_new, A, inputs.D, head, BC_old, BC_new, age, w, c)
        for i in tl.range(cut.TILES, num_stages=STAGES):
            m = rows_of(i, part, cut)
            tile = S if cut.PIECES == 1 else load_tile(state + head * strides.state[1], m, cut)
            x_old = load_ring_vectors(ring_x + entry * ring_strides.x[2], held, m, cut.P, cut).T
            x_new = load_columns(inputs.x + row * strides.x[0] + head * strides.x[2], w * strides.x[1], live, m, cut.P)
            y = state_products(tile, C, cut) * decay[None, :] + weighted(x_old, W_old) + weighted(x_new, W_new)
            if inputs.z is not None:
                z_window = inputs.z + row * strides.z[0] + head * strides.z[2]
                z = load_columns(z_window, c * strides.z[1], asked, m, cut.P).to(tl.float32)
                y *= z / (1.0 + tl.exp(-z))
            y_window = out + row * strides.out[0] + head * strides.out[2] + c[None, :] * strides.out[1]
            mine = (m < cut.P)[:, None]
            tl.store(y_window + m[:, None], y.to(out.dtype.element_ty), mask=mine & asked[None, :])
            tl.store(ring_x + (last * ring_strides.x[2])[None, :] + m[:, None], x_new, mask=mine & live[None, :])
            if FOLDED:
                weight, kept = dt_old * exp(A * sum_later(dt_old, age)), exp(A * tl.sum(dt_old, axis=0))
                for part_of_n in tl.static_range(tl.constexpr(cut.CHUNKS)):
                    moved = product(x_old.to(tl.float32) * weight[None, :], B_old[part_of_n])
                    moved += tile[part_of_n].to(tl.float32) * kept
                    store_tile(state + head * strides.state[1], m, part_of_n, moved, cut)


@triton.jit
def _weights(dt_old, dt_new, A, D_of_heads, head, BC_old, BC_new, age, w, c):
    """Of one head, what ring and window weigh in each output, ``[RING,C]`` and ``[TOKENS,C]``, D included, and what is
    left of the checkpoint ``[C]``.
    """
    D = 0.0
    if D_of_heads is not None:
        D = tl.load(D_of_heads + head)
    through, between = sums(dt_new, w, c)
    since = sum_later(dt_old, age)[:, None] + through[None, :]
    seen = tl.where(w[:, None] <= c[None, :], dt_new[:, None] * tl.exp(A * between) * BC_new, 0.0)
    own = tl.where(w[:, None] == c[None, :], D, 0.0)
    return dt_old[:, None] * tl.exp(A * since) * BC_old, seen + own, exp(A * (tl.sum(dt_old, axis=0) + through))
