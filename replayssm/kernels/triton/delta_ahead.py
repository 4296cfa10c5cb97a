"""The replay step of GDN and KDA in two launches: flushes, and what the ring's keys give, once a head; then the reads.

In one launch every program of a head forms the products of the ring's keys anew, token by token, and has the registers
that a fold takes. Here `products_ahead`, a program a row and head, folds the rows that flush; of the others it forms
the products and appends the token but for its values, once for all heads of a key unless decays are of channels.
`apply_products` does nothing for rows that flush, and needs of the others' rings only the sums over their values with
two weights a token, which it takes at once beside the state, and of KDA q and k times the checkpoint's decay. From
compute capability 9.0 on it starts beside the first launch and waits for it where the first's results are read, states
of one tile being on their way by then; every program waits, so that whatever comes behind the second launch comes
behind both.
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
from replayssm.kernels.triton.delta_parts import (
    append_keys,
    append_values,
    decay_since,
    fold_row,
    load_keys,
    load_token,
    log_decays,
    products_with,
    read,
    ring_weights,
    strength,
    tokens_of,
)
from replayssm.kernels.triton.launch import Cut, Launch
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
    entry, age, valid = ring_order(length, oldest, cut)
    if length == cut.L - 1 or (form.CHANNELS or head % cut.SHARE == 0):
        token = load_token(inputs, gates, strides, row, head, p, p < end, cut, form)
        keys = load_keys(mine, token.g, entry, valid, cut, form)
        k = token.k.to(tl.float32)
        k_rnorm, q_scale = rnorm(tl.sum(k * k, axis=0)), rnorm(tl.sum(token.q * token.q, axis=0)) * scale
        if length == cut.L - 1:
            rnorms, gs, weight, decay = ring_weights(mine, token.g, entry, age, valid, cut, form)
            fold_row(
                out + row * strides.out[0] + head * strides.out[1],
                state + slot * strides.state[0] + head * strides.state[1],
                ring, mine, token, rnorms, gs, weight, decay, keys, entry, valid, q_scale, k_rnorm, rounding, slot,
                head, part, end, cut, form,
            )  # fmt: skip
        else:
            kq, kk = products_with(keys, token.q, k, form)
            kq, kk, qk = kq * q_scale, kk * k_rnorm, tl.sum(token.q * k, axis=0) * (k_rnorm * q_scale)
            last = (oldest + length) % cut.CAPACITY
            j, n = tl.arange(0, cut.RING), tl.arange(0, cut.PADDED)
            for each in tl.range(head, head + (1 if form.CHANNELS else cut.SHARE)):
                its = tokens_of(ring, ring_strides, slot, each, length, oldest, cut)
                g = token.g
                if not form.CHANNELS:
                    g = log_decays(inputs, gates, strides, row, each, n, cut, form)
                _, _, weight, decay = ring_weights(its, g, entry, age, valid, cut, form)
                weights, scalars, vectors = _place_of(products, row, each, cut, form)
                tl.store(weights + j, weight * kq)
                tl.store(weights + cut.RING + j, weight * kk)
                tl.store(scalars, decay * q_scale)
                tl.store(scalars + 1, decay * k_rnorm)
                tl.store(scalars + 2, qk)
                if form.CHANNELS:
                    kept = exp(decay_since(its, g, n, cut))
                    tl.store(vectors + n, token.q * kept)
                    tl.store(vectors + cut.PADDED + n, k * kept)
                beta = strength(inputs, strides, row, each, form)
                append_keys(ring, its, token.k, g, beta, k_rnorm, slot, last, each, cut, form)


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
    beside = overlap()
    products = workspace(layer, rows, cut, 2 * cut.RING + (2 * cut.PADDED if form.CHANNELS else 0))
    given = out, layer.state, ring, products, inputs, slots, strides, ring_strides
    of_folds = geometry.state_dim**-0.5, rounding, gates, folds, form, bool(beside)
    products_ahead[(folds.PARTS * cut.H * rows,)](*given, *of_folds, num_warps=WARPS)
    apply_products[(cut.PARTS * cut.H * rows,)](
        *given, cut, form, bool(beside), num_warps=launch.warps, maxnreg=launch.registers, **beside
    )
