"""The replay step of Mamba-2 in two launches: flushes, and what the ring's B give, once a group; then the reads.

As of `delta_ahead`: `products_ahead`, a program a row and head, folds the rows that flush; of the others the first head
of a group forms the products of B with C for all of its heads, and appends the token but for its x. `apply_products`
needs of a ring only the sum over its x with one weight a token.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.cache import CacheLayer
from replayssm.geometry import Geometry
from replayssm.kernels.triton.ahead import SCALARS, WARPS, overlap, workspace
from replayssm.kernels.triton.launch import Cut, Launch
from replayssm.kernels.triton.mamba2_parts import fold_row, load_token, read, step_size, weights_of
from replayssm.kernels.triton.tiles import (
    first_tile,
    load_chunks,
    load_ring,
    load_ring_vectors,
    load_state,
    place,
    ring_order,
    span,
)


@triton.jit
def products_ahead(
    out, state, ring, products, inputs, slots, strides, ring_strides, rounding, gates, cut: tl.constexpr,
    DRAWN: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program ``(row, head)``; see the module."""
    if OVERLAP:
        gdc_launch_dependents()
    part, head, row = place(cut)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    length, oldest = tl.load(ring.cursor + slot), tl.load(ring.origin + slot)
    p, end = span(part, cut)
    group, n = head // cut.SHARE, tl.arange(0, cut.PADDED)
    ring_B = ring.B + slot * ring_strides.B[0] + group * ring_strides.B[1]
    ring_dt = ring.dt + slot * ring_strides.dt[0]
    entry, age, valid = ring_order(length, oldest, cut)
    if length == cut.L - 1:
        token = load_token(inputs, gates, strides, row, head, p, p < end, cut, GATED)
        dts = load_ring(ring_dt + head * ring_strides.dt[1] + entry * ring_strides.dt[2], valid, cut)
        Bs = load_ring_vectors(ring_B + entry * ring_strides.B[2], valid, n, cut.N, cut)
        ring_x = ring.x + slot * ring_strides.x[0] + head * ring_strides.x[1] + entry * ring_strides.x[2]
        fold_row(
            out + row * strides.out[0] + head * strides.out[1],
            state + slot * strides.state[0] + head * strides.state[1],
            ring, ring_x, Bs, dts, age, valid, token, rounding, slot, head, part, end, cut, DRAWN,
        )  # fmt: skip
    elif head % cut.SHARE == 0:
        token = load_token(inputs, gates, strides, row, head, p, p < end, cut, GATED)
        Bs = load_ring_vectors(ring_B + entry * ring_strides.B[2], valid, n, cut.N, cut)
        BC, own = tl.sum(Bs.to(tl.float32) * token.C[None, :], axis=1), tl.sum(token.B.to(tl.float32) * token.C, axis=0)
        last, j = (oldest + length) % cut.CAPACITY, tl.arange(0, cut.RING)
        tl.store(ring_B + last * ring_strides.B[2] + n, token.B, mask=n < cut.N)
        for each in tl.range(head, head + cut.SHARE):
            dt = step_size(tl.load(inputs.dt + row * strides.dt[0] + each * strides.dt[1]), gates, each, GATED)
            dts = load_ring(ring_dt + each * ring_strides.dt[1] + entry * ring_strides.dt[2], valid, cut)
            decay, weight = weights_of(dts, age, dt, tl.load(inputs.A + each))
            to = products + (row * cut.H + each) * (cut.RING + SCALARS)
            tl.store(to + j, weight * BC)
            tl.store(to + cut.RING, decay)
            tl.store(to + cut.RING + 1, dt * own)
            tl.store(ring_dt + each * ring_strides.dt[1] + last * ring_strides.dt[2], dt)


@triton.jit
def apply_products(
    out, state, ring, products, inputs, slots, strides, ring_strides, cut: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Program ``(row, head, part)``; see the module."""
    part, head, row = place(cut)
    slot = tl.load(slots + row)
    if slot < 0:
        if OVERLAP:
            gdc_wait()
        return
    length, oldest = tl.load(ring.cursor + slot), tl.load(ring.origin + slot)
    if length == cut.L - 1:
        if OVERLAP:
            gdc_wait()
        return
    p, end = span(part, cut)
    state += slot * strides.state[0] + head * strides.state[1]
    ring_x = ring.x + slot * ring_strides.x[0] + head * ring_strides.x[1]
    S = ()
    if cut.TILES == 1:
        S = load_state(first_tile(state, part, cut), part * cut.ROWS + tl.arange(0, cut.M), end, cut)
    entry, _, valid = ring_order(length, oldest, cut)
    xs = load_ring_vectors(ring_x + entry * ring_strides.x[2], valid, p, end, cut)
    Cs = load_chunks(inputs.C + row * strides.C[0] + head // cut.SHARE * strides.C[1], cut)
    x = tl.load(inputs.x + row * strides.x[0] + head * strides.x[1] + p, mask=p < end, other=0.0)
    D, z = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if inputs.D is not None:
        D = tl.load(inputs.D + head)
    if inputs.z is not None:
        z = tl.load(inputs.z + row * strides.z[0] + head * strides.z[1] + p, mask=p < end, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    at = products + (row * cut.H + head) * (cut.RING + SCALARS)
    weight = tl.load(at + tl.arange(0, cut.RING))
    added = tl.sum(weight[:, None] * xs.to(tl.float32), axis=0) + (tl.load(at + cut.RING + 1) + D) * x.to(tl.float32)
    tl.store(ring_x + (oldest + length) % cut.CAPACITY * ring_strides.x[2] + p, x, mask=p < end)
    out += row * strides.out[0] + head * strides.out[1]
    read(out, state, S, Cs, tl.load(at + cut.RING), added, z, part, end, cut)


def launch_both(
    out: Tensor,
    layer: CacheLayer,
    ring: Any,
    inputs: Any,
    slots: Tensor,
    strides: Any,
    ring_strides: Any,
    rounding: Any,
    gates: Any,
    geometry: Geometry,
    launch: Launch,
) -> None:
    """Arguments as of the kernels; ``launch`` is that of the reads."""
    rows, whole = len(slots), replace(launch, rows=16, tiles=-(-geometry.head_dim // 16))
    cut, folds = (Cut.of(geometry, each, layer.state, layer) for each in (launch, whole))
    beside = overlap()
    given = out, layer.state, ring, workspace(layer, rows, cut, cut.RING), inputs, slots, strides, ring_strides
    of_folds = rounding, gates, folds, rounding is not None, gates is not None, bool(beside)
    products_ahead[(folds.PARTS * cut.H * rows,)](*given, *of_folds, num_warps=WARPS)
    apply_products[(cut.PARTS * cut.H * rows,)](
        *given, cut, bool(beside), num_warps=launch.warps, maxnreg=launch.registers, **beside
    )
