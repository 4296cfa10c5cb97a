"""The replay step of GDN and KDA in two launches: flushes, and what the ring's keys give, once a head; then the reads.

In one launch every program of a head forms the products of the ring's keys anew, token by token, and has the registers
that a fold takes. Here `products_ahead`, a program a row and head, folds the rows that flush; of the others it forms
the products and appends the token but for its values. `apply_products` does nothing for rows that flush, and needs of
the others' rings only the sums over their values with two weights a token, which it takes at once beside the state, and
of KDA q and k times the checkpoint's decay. From compute capability 9.0 on it starts beside the first launch and waits
for it where the first's results are read, states of one tile being on their way by then; every program waits, so that
whatever comes behind the second launch comes behind both.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from replayssm.cache import CacheLayer
from replayssm.geometry import Geometry
from replayssm.kernels.triton.delta_parts import (
    append_keys,
    append_values,
    decay_since,
    fold_row,
    load_keys,
    load_token,
    products_with,
    read,
    ring_weights,
    strength,
    tokens_of,
)
from replayssm.kernels.triton.launch import Cut, Launch
from replayssm.kernels.triton.rounding import INTERPRETED
from replayssm.kernels.triton.tiles import (
    exp,
    first_tile,
    load_chunks,
    load_ring_vectors,
    load_state,
    place,
    ring_order,
    rnorm,
    span,
)

WARPS = 4
"""Of the first launch."""
OVERLAPS = 90
"""Compute capability, times ten, from which on a launch may start beside the one before it."""
SCALARS = tl.constexpr(4)
"""Numbers of a row and head behind the two weights a token: decay and norm of q and of k, their product."""


def workspace(layer: CacheLayer, rows: int, cut: Cut, channels: bool) -> Tensor:
    """``[rows,H,words]`` float32 between the launches: two weights a token of the ring, `SCALARS` numbers, and with
    ``channels`` q and k of all columns. The layers of a cache share it; made when a size is first asked for.
    """
    words = 2 * cut.RING + SCALARS.value + (2 * cut.PADDED if channels else 0)
    shape = (rows, cut.H, words)
    if shape not in layer.workspace:
        layer.workspace[shape] = torch.empty(shape, dtype=torch.float32, device=layer.state.device)
    return layer.workspace[shape]


@triton.jit
def _place_of(products, row, head, cut: tl.constexpr, form: tl.constexpr):
    """Where a row's and head's products lie: weights, scalars, vectors."""
    words: tl.constexpr = 2 * cut.RING + SCALARS + (2 * cut.PADDED if form.CHANNELS else 0)
    weights = products + (row * cut.H + head) * words
    return weights, weights + 2 * cut.RING, weights + 2 * cut.RING + SCALARS


@triton.jit
def products_ahead(
    out, state, ring, products, inputs, slots, strides, ring_strides, scale, rounding, gates, cut: tl.constexpr,
    form: tl.constexpr, OVERLAP: tl.constexpr,
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
    mine = tokens_of(ring, ring_strides, slot, head, length, oldest, cut)
    token = load_token(inputs, gates, strides, row, head, p, p < end, cut, form)
    entry, age, valid = ring_order(length, oldest, cut)
    rnorms, gs, weight, decay = ring_weights(mine, token.g, entry, age, valid, cut, form)
    keys = load_keys(mine, token.g, entry, valid, cut, form)
    k = token.k.to(tl.float32)
    k_rnorm, q_scale = rnorm(tl.sum(k * k, axis=0)), rnorm(tl.sum(token.q * token.q, axis=0)) * scale
    if length == cut.L - 1:
        fold_row(
            out + row * strides.out[0] + head * strides.out[1],
            state + slot * strides.state[0] + head * strides.state[1],
            ring, mine, token, rnorms, gs, weight, decay, keys, entry, valid, q_scale, k_rnorm, rounding, slot, head,
            part, end, cut, form,
        )  # fmt: skip
    else:
        kq, kk = products_with(keys, token.q, k, form)
        weights, scalars, vectors = _place_of(products, row, head, cut, form)
        j, n = tl.arange(0, cut.RING), tl.arange(0, cut.PADDED)
        tl.store(weights + j, weight * kq * q_scale)
        tl.store(weights + cut.RING + j, weight * kk * k_rnorm)
        tl.store(scalars, decay * q_scale)
        tl.store(scalars + 1, decay * k_rnorm)
        tl.store(scalars + 2, tl.sum(token.q * k, axis=0) * (k_rnorm * q_scale))
        if form.CHANNELS:
            kept = exp(decay_since(mine, token.g, n, cut))
            tl.store(vectors + n, token.q * kept)
            tl.store(vectors + cut.PADDED + n, k * kept)
        last = (oldest + length) % cut.CAPACITY
        append_keys(ring, mine, token.k, token.g, token.beta, k_rnorm, slot, last, head, cut, form)


@triton.jit
def apply_products(
    out, state, ring, products, inputs, slots, strides, ring_strides, cut: tl.constexpr, form: tl.constexpr,
    OVERLAP: tl.constexpr,
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
    group = head // cut.SHARE
    state += slot * strides.state[0] + head * strides.state[1]
    mine = tokens_of(ring, ring_strides, slot, head, length, oldest, cut)
    S = ()
    if cut.TILES == 1:
        S = load_state(first_tile(state, part, cut), part * cut.ROWS + tl.arange(0, cut.M), end, cut)
    entry, _, valid = ring_order(length, oldest, cut)
    d_old = load_ring_vectors(mine.d + entry * ring_strides.d[2], valid, p, end, cut)
    v = tl.load(inputs.v + row * strides.v[0] + head * strides.v[1] + p, mask=p < end, other=0.0)
    beta = strength(inputs, strides, row, head, form)
    weights, scalars, vectors = _place_of(products, row, head, cut, form)
    j = tl.arange(0, cut.RING)
    if OVERLAP:
        gdc_wait()
    of_q, of_k = tl.load(weights + j), tl.load(weights + cut.RING + j)
    if form.CHANNELS:
        qs, ks = load_chunks(vectors, cut), load_chunks(vectors + cut.PADDED, cut)
    else:
        qs = load_chunks(inputs.q + row * strides.q[0] + group * strides.q[1], cut)
        ks = load_chunks(inputs.k + row * strides.k[0] + group * strides.k[1], cut)
    added_q = tl.sum(of_q[:, None] * d_old, axis=0)
    error = v.to(tl.float32) - tl.sum(of_k[:, None] * d_old, axis=0)
    last = (oldest + length) % cut.CAPACITY
    append_values(ring, mine, v, slot, last, head, p, end)
    read(
        out + row * strides.out[0] + head * strides.out[1], mine.d + last * ring_strides.d[2], state, S, qs, ks,
        tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), added_q, error, beta, part, end, cut,
    )  # fmt: skip


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
    form: Any,
) -> None:
    """Arguments as of the kernels; ``launch`` is that of the reads."""
    rows, whole = len(slots), replace(launch, rows=16, tiles=-(-geometry.head_dim // 16))
    cut, folds = (Cut.of(geometry, each, layer.state, layer) for each in (launch, whole))
    products = workspace(layer, rows, cut, form.CHANNELS)
    given = out, layer.state, ring, products, inputs, slots, strides, ring_strides
    scale = geometry.state_dim**-0.5
    overlap = not INTERPRETED and driver.active.get_current_target().arch >= OVERLAPS
    how: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    products_ahead[(folds.PARTS * cut.H * rows,)](
        *given, scale, rounding, gates, folds, form, overlap, num_warps=WARPS
    )  # fmt: skip
    apply_products[(cut.PARTS * cut.H * rows,)](
        *given, cut, form, overlap, num_warps=launch.warps, maxnreg=launch.registers, **how
    )
