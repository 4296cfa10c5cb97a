"""GDN and KDA in Triton, speculative decoding: a window of T tokens a row is verified in one launch.

The two differ in the decay: a scalar a value head, or, ``form.CHANNELS``, one a key channel, which then belongs to the
key side of every product. A program takes tiles of one row's state, of one head or of several of one key head. Each
tile is read once and multiplied by the q and k of all T tokens, two columns a token, on tensor cores; the products of
keys with q and k are shared by the heads. The window's own corrections follow by substitution, token by token. Rows
whose ring has no room for another window also fold it into the checkpoint: the program writes the tile it has read.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: SIM102, RUF005 (a condition is known to the compiler, or is not; Triton has no unpacking into tuples)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.geometry import Geometry
from replayssm.kernels.triton.arguments import WIDE, check
from replayssm.kernels.triton.gates import Gates, log_decay, sigmoid
from replayssm.kernels.triton.tiles import (
    exp,
    load_ring,
    load_ring_vectors,
    product,
    ring_order,
    rnorm,
    sum_later,
)
from replayssm.kernels.triton.verify_arguments import Form, check_counts, check_delta, check_window_layer
from replayssm.kernels.triton.verify_launch import WindowCut, WindowLaunch
from replayssm.kernels.triton.verify_launch_table import verify_launch_for
from replayssm.kernels.triton.verify_tiles import (
    TOKENS,
    column_chunks,
    columns_of,
    input_products,
    load_columns,
    load_tile,
    load_vectors,
    place,
    ring_chunks,
    rows_of,
    squares,
    state_products,
    store_tile,
    store_vectors,
    sums,
    vector_chunks,
    weighted,
)
from replayssm.recurrence.gdn import Inputs


class _Ring(NamedTuple):
    k: Any
    k_rnorm: Any
    d: Any
    g: Any
    cursor: Any
    origin: Any
    flushes: Any


class _Strides(NamedTuple):
    """Strides of all axes but the last, which is contiguous; of ``beta [B,T,H]``, and of GDN's ``g [B,T,H]``, all."""

    state: Any
    out: Any
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


class _RingStrides(NamedTuple):
    k: Any
    k_rnorm: Any
    d: Any
    g: Any


class _Keys(NamedTuple):
    """What the key side gives, for columns of which each token has two, q and k. Of GDN, still without decays."""

    asked: Any
    """Chunks ``[WIDTH,2C]`` by which the checkpoint is multiplied, ``norm [2C]`` by which that is."""
    norm: Any
    old: Any
    """``[RING,2C]`` products with the ring's keys, ``new [C,2C]`` with the window's."""
    new: Any
    folded: Any
    """Chunks ``[RING,WIDTH]`` of the ring's keys, as the fold takes them, ``weight [RING]`` to multiply them with, and
    ``decay``, chunks ``[WIDTH]`` of what is left of the checkpoint's columns, KDA's only."""
    weight: Any
    decay: Any


def verify_step(
    family: str,
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

    ``family`` is gdn or kda, ``out [B,T,H,V]``, ``inputs`` with a T axis behind the rows, g and beta in float32,
    ``slots [B]`` int64, -1 for padding. ``lengths [B]`` are the tokens that each row's window holds, 0 to T, all T
    without it; what lies behind is neither read nor written. A row whose committed ring could not take another window,
    p > L - T, folds it into the checkpoint from d, rounded to the nearest, and counts the flush. Mutates ``out``, the
    ring, and checkpoint and ``flushes`` of those rows; cursors are moved by `verify_commit.commit_window`. With
    ``gates`` the inputs' g and beta are raw. Raises
    ``ValueError``, one line, on what it does not take.
    """
    check_window_layer(layer, family, inputs.q.shape[1])
    strides = _Strides(**check_delta(family, out, layer.state, inputs, slots, gates))
    rows, (slots_of_state, H, V, K), HK = len(slots), layer.state.shape, inputs.k.shape[2]
    check_counts("lengths", lengths, rows, layer.state.device)
    geometry, ring, R = Geometry(family, H, HK, V, K), layer.ring, layer.capacity
    channels = (K,) if family == "kda" else ()
    ring_strides = _RingStrides(
        k=check("ring k", ring["k"], (slots_of_state, HK, R, K), (inputs.k.dtype,)),
        k_rnorm=check("ring k_rnorm", ring["k_rnorm"], (slots_of_state, HK, R), WIDE, scalars=True),
        d=check("ring d", ring["d"], (slots_of_state, H, R, V), WIDE),
        g=check("ring g", ring["g"], (slots_of_state, H, R, *channels), WIDE, scalars=not channels),
    )
    launch = launch or verify_launch_for(geometry, rows, layer)
    cut = WindowCut.of(geometry, launch, layer)
    if rows:
        _verify_kernel[(cut.PROGRAMS * rows,)](
            out,
            layer.state,
            _Ring(**ring, cursor=layer.cursor, origin=layer.origin, flushes=layer.flushes),
            inputs,
            slots,
            lengths,
            gates,
            strides,
            ring_strides,
            K**-0.5,
            cut,
            Form.of(family, gates),
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )


@triton.jit
def _verify_kernel(
    out, state, ring, inputs, slots, lengths, gates, strides, ring_strides, scale, cut: tl.constexpr, form: tl.constexpr
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

    # c is a token of the window, a is a column.
    c, a = tl.arange(0, cut.COLUMNS), tl.arange(0, 2 * cut.COLUMNS)
    live = c < count
    entry, _, held = ring_order(length, oldest, cut)
    last = (oldest + length + c) % cut.CAPACITY
    group = first_head // cut.SHARE
    ring_k = ring.k + slot * ring_strides.k[0] + group * ring_strides.k[1]
    ring_rnorm = ring.k_rnorm + slot * ring_strides.k_rnorm[0] + group * ring_strides.k_rnorm[1]
    q_window = inputs.q + row * strides.q[0] + group * strides.q[2]
    k_window = inputs.k + row * strides.k[0] + group * strides.k[2]
    k_old = ring_chunks(ring_k + entry * ring_strides.k[2], held, cut)
    k_new = vector_chunks(k_window, c * strides.k[1], live, cut)
    rnorm_old = load_ring(ring_rnorm + entry * ring_strides.k_rnorm[2], held, cut)
    rnorm_new = rnorm(squares(k_new, 1, cut))
    t, of_q, both = a // 2, a % 2 == 0, a // 2 < count
    q_columns = column_chunks(q_window, t * strides.q[1], both & of_q, cut)
    k_columns = column_chunks(k_window, t * strides.k[1], both & (a % 2 == 1), cut)
    qk = ()
    for p in tl.static_range(tl.constexpr(cut.CHUNKS)):
        qk = qk + (tl.where(of_q[None, :], q_columns[p], k_columns[p]),)
    norm = rnorm(squares(qk, 0, cut)) * tl.where(of_q, scale, 1.0)
    if part == 0:
        if first_head % cut.SHARE == 0:
            store_vectors(ring_k, last * ring_strides.k[2], live, k_new, cut)
            tl.store(ring_rnorm + last * ring_strides.k_rnorm[2], rnorm_new, mask=live)
        if first_head == 0:
            if due:
                tl.store(ring.flushes + slot, tl.load(ring.flushes + slot) + 1)
    if form.CHANNELS:
        ring_g = ring.g + slot * ring_strides.g[0] + first_head * ring_strides.g[1]
        g_window = inputs.g + row * strides.g[0] + first_head * strides.g[2]
        if part == 0:
            for p in tl.static_range(tl.constexpr(cut.CHUNKS)):
                n = columns_of(p, cut)
                g_new = load_vectors(g_window, c * strides.g[1], live, n, cut.N)
                if form.GATED:
                    bias = tl.load(gates.dt_bias + first_head * cut.N + n, mask=n < cut.N, other=0.0).to(tl.float32)
                    g_new = log_decay(g_new, tl.load(gates.A_log + first_head), bias[None, :], form.LOWER_BOUND)
                places = ring_g + (last * ring_strides.g[2])[:, None] + n[None, :]
                tl.store(places, g_new, mask=live[:, None] & (n < cut.N)[None, :])
        keys = _channel_keys(
            ring_g, ring_strides.g[2], oldest, length, g_window, strides.g[1], gates, first_head, k_old,
            k_new, rnorm_old, rnorm_new, q_window, k_window, strides.q[1], strides.k[1], qk, norm, count, cut, form,
        )  # fmt: skip
    else:
        old = input_products(k_old, qk, cut) * rnorm_old[:, None] * norm[None, :]
        new = input_products(k_new, qk, cut) * rnorm_new[:, None] * norm[None, :]
        keys = _Keys(asked=qk, norm=norm, old=old, new=new, folded=k_old, weight=rnorm_old, decay=None)

    if due:
        _walk(
            out, state, ring, inputs, gates, strides, ring_strides, part, first_head, row, slot, length, oldest, count,
            S, keys, cut, form, FOLDED=True,
        )  # fmt: skip
    else:
        _walk(
            out, state, ring, inputs, gates, strides, ring_strides, part, first_head, row, slot, length, oldest, count,
            S, keys, cut, form, FOLDED=False,
        )  # fmt: skip


@triton.jit
def _walk(
    out, state, ring, inputs, gates, strides, ring_strides, part, first_head, row, slot, length, oldest, count, S, keys,
    cut: tl.constexpr, form: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Outputs of a program's heads, tile by tile, and the window's d and GDN's g appended; ``FOLDED``, a tile that has
    been read also takes in the ring and is written. ``S`` is the only tile if there is one.
    """
    c, u = tl.arange(0, cut.COLUMNS), tl.arange(0, TOKENS)
    live = c < count
    entry, age, held = ring_order(length, oldest, cut)
    last = (oldest + length + c) % cut.CAPACITY
    # One tile less is on its way where tiles are written: shared memory is kept for them too.
    STAGES: tl.constexpr = min(2, cut.STAGES) if FOLDED else cut.STAGES
    for h in tl.range(cut.HEADS, num_stages=STAGES):
        head = first_head + h
        ring_d = ring.d + slot * ring_strides.d[0] + head * ring_strides.d[1]
        v_window = inputs.v + row * strides.v[0] + head * strides.v[2]
        beta_window = inputs.beta + row * strides.beta[0] + head * strides.beta[2]
        beta = tl.load(beta_window + c * strides.beta[1], mask=live, other=0.0)
        if form.GATED:
            beta = sigmoid(beta)
        if form.CHANNELS:
            W_old, W_new, decay = keys.old, keys.new, keys.norm
            weight = keys.weight
        else:
            ring_g = ring.g + slot * ring_strides.g[0] + head * ring_strides.g[1]
            g_window = inputs.g + row * strides.g[0] + head * strides.g[2]
            g_old = load_ring(ring_g + entry * ring_strides.g[2], held, cut)
            g_new = tl.load(g_window + u * strides.g[1], mask=u < count, other=0.0)
            if form.GATED:
                bias = tl.load(gates.dt_bias + head).to(tl.float32)
                g_new = tl.where(u < count, log_decay(g_new, tl.load(gates.A_log + head), bias), 0.0)
            if part == 0:
                tl.store(ring_g + (oldest + length + u) % cut.CAPACITY * ring_strides.g[2], g_new, mask=u < count)
            through, between = sums(g_new, c, tl.arange(0, 2 * cut.COLUMNS) // 2)
            since, ended = sum_later(g_old, age), tl.sum(g_old, axis=0)
            W_old = keys.old * tl.exp(since[:, None] + through[None, :])
            W_new = keys.new * tl.exp(between)
            decay = keys.norm * exp(ended + through)
            weight = keys.weight * exp(since)
        for i in tl.range(cut.TILES, num_stages=STAGES):
            m = rows_of(i, part, cut)
            tile = S if cut.PIECES == 1 else load_tile(state + head * strides.state[1], m, cut)
            d_old = load_ring_vectors(ring_d + entry * ring_strides.d[2], held, m, cut.P, cut).T
            v = load_columns(v_window, c * strides.v[1], live, m, cut.P).to(tl.float32)
            history = state_products(tile, keys.asked, cut) * decay[None, :] + weighted(d_old, W_old)
            o, d = _corrected(history, v, W_new, beta, c, cut)
            mine = (m < cut.P)[:, None] & live[None, :]
            o_window = out + row * strides.out[0] + head * strides.out[2] + c[None, :] * strides.out[1]
            tl.store(o_window + m[:, None], o.to(out.dtype.element_ty), mask=mine)
            tl.store(ring_d + (last * ring_strides.d[2])[None, :] + m[:, None], d, mask=mine)
            if FOLDED:
                for p in tl.static_range(tl.constexpr(cut.CHUNKS)):
                    if form.CHANNELS:
                        kept = tile[p].to(tl.float32) * keys.decay[p][None, :]
                    else:
                        kept = tile[p].to(tl.float32) * exp(ended)
                    moved = kept + product(d_old * weight[None, :], keys.folded[p])
                    store_tile(state + head * strides.state[1], m, p, moved, cut)


@triton.jit
def _corrected(history, v, W, beta, c, cut: tl.constexpr):
    """Outputs and corrected values ``[M,C]`` from ``history [M,2C]``, what state and ring give for each token's q and
    k, and ``W [C,2C]``, what of a token's d each column sees: the unit lower triangular system, by substitution.
    """
    o, seen = tl.split(tl.reshape(history, (cut.M, cut.COLUMNS, 2)))
    W_q, W_k = tl.split(tl.reshape(W, (cut.COLUMNS, cut.COLUMNS, 2)))
    later = c[:, None] < c[None, :]
    W_k = tl.where(later, W_k * beta[None, :], 0.0)
    W_q = tl.where(later | (c[:, None] == c[None, :]), W_q, 0.0)
    d = beta[None, :] * (v - seen)
    for r in tl.static_range(tl.constexpr(cut.T)):
        # Token r's d is final by now; every later one sees it, and so do its own output and theirs.
        found = tl.sum(tl.where((c == r)[None, :], d, 0.0), axis=1)[:, None]
        o += found * tl.sum(tl.where((c == r)[:, None], W_q, 0.0), axis=0)[None, :]
        d -= found * tl.sum(tl.where((c == r)[:, None], W_k, 0.0), axis=0)[None, :]
    return o, d


@triton.jit
def _channel_keys(
    ring_g, ring_stride, oldest, length, g_window, g_stride, gates, head, k_old, k_new, rnorm_old, rnorm_new, q_window,
    k_window, q_stride, k_stride, qk, norm, count, cut: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The `_Keys` of KDA, all decays in them. Log decays are summed, by products with triangles of ones or one after
    the other, and never subtracted.
    """
    j, c, a, u = tl.arange(0, cut.RING), tl.arange(0, cut.COLUMNS), tl.arange(0, 2 * cut.COLUMNS), tl.arange(0, TOKENS)
    later, nearer = ((oldest + j + 1) % cut.CAPACITY) * ring_stride, tl.where(j[:, None] >= j[None, :], 1.0, 0.0)
    earlier = tl.where(u[:, None] <= (a // 2)[None, :], 1.0, 0.0)
    old = tl.zeros((tl.constexpr(cut.RING), tl.constexpr(2 * cut.COLUMNS)), tl.float32)
    new = tl.zeros((tl.constexpr(cut.COLUMNS), tl.constexpr(2 * cut.COLUMNS)), tl.float32)
    asked, folded, decays = (), (), ()
    if form.GATED:
        A_log = tl.load(gates.A_log + head)
    for p in tl.static_range(tl.constexpr(cut.CHUNKS)):
        n = columns_of(p, cut)
        # The ring: each key with its decay up to the ring's end, and the checkpoint's.
        g_later = load_columns(ring_g, later, j + 1 < length, n, cut.N)
        since = product(g_later, nearer.to(tl.bfloat16))
        g_first = tl.load(ring_g + oldest * ring_stride + n, mask=(n < cut.N) & (length > 0), other=0.0)
        decay = exp(tl.sum(g_later, axis=1) + g_first)
        key = (k_old[p].T.to(tl.float32) * exp(since)).T

        # The window: q and k with their decay since the ring's end.
        g_new = load_columns(g_window, u * g_stride, u < count, n, cut.N)
        if form.GATED:
            bias = tl.load(gates.dt_bias + head * cut.N + n, mask=n < cut.N, other=0.0).to(tl.float32)
            g_new = tl.where((u < count)[None, :], log_decay(g_new, A_log, bias[:, None], form.LOWER_BOUND), 0.0)
        faded = qk[p].to(tl.float32) * exp(product(g_new, earlier.to(tl.bfloat16)))
        old += tl.dot(key, faded, input_precision="tf32x3")

        # Between two tokens of the window.
        behind = tl.zeros((tl.constexpr(cut.COLUMNS), tl.constexpr(cut.WIDTH)), tl.float32)
        for s in tl.static_range(tl.constexpr(cut.T)):
            here = (n < cut.N) & (s < count)
            g = tl.load(g_window + s * g_stride + n, mask=here, other=0.0)
            if form.GATED:
                g = log_decay(g, A_log, bias, form.LOWER_BOUND)
            q = tl.load(q_window + s * q_stride + n, mask=here, other=0.0).to(tl.float32)
            k = tl.load(k_window + s * k_stride + n, mask=here, other=0.0).to(tl.float32)
            behind += tl.where((c < s)[:, None], g[None, :], 0.0)
            decayed = k_new[p].to(tl.float32) * tl.where((c <= s)[:, None], tl.exp(behind), 0.0)
            new += tl.where((a == 2 * s)[None, :], tl.sum(decayed * q[None, :], axis=1)[:, None], 0.0)
            new += tl.where((a == 2 * s + 1)[None, :], tl.sum(decayed * k[None, :], axis=1)[:, None], 0.0)
        asked, folded, decays = asked + (faded * decay[:, None],), folded + (key,), decays + (decay,)
    old *= rnorm_old[:, None] * norm[None, :]
    new *= rnorm_new[:, None] * norm[None, :]
    return _Keys(asked, norm, old, new, folded, rnorm_old, decays)
