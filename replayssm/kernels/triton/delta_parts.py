"""What the kernels of GDN and KDA consist of: a token's gates, the ring's keys and weights, append, read, fold.

``mine`` is a row's and head's ring, a `Tokens`; ``form`` a `delta.Form`. Where ``CHANNELS``, a decay belongs to a key
channel and so to the key side of every product.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: SIM102 (no condition both of compiler and device)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from replayssm.kernels.triton.gates import log_decay, sigmoid
from replayssm.kernels.triton.rounding import INTERPRETED, arrive, draws_of, rounded
from replayssm.kernels.triton.tiles import (
    element,
    exp,
    first_tile,
    load_ring,
    load_ring_vectors,
    load_state,
    load_vector,
    product,
    rows_of,
    sum_later,
    zeros,
)
from replayssm.recurrence.gdn import Inputs


class Tokens(NamedTuple):
    """One row's and head's ring: pointers to each tensor's first entry, strides of the rings, cursor and origin."""

    k: Any
    k_rnorm: Any
    d: Any
    g: Any
    strides: Any
    oldest: Any
    length: Any


class Raw(NamedTuple):
    """What the fold from raw inputs takes to find the ring's d again, see `_corrected`."""

    v: Any
    """Pointers ``[RING]`` to the tokens' values."""
    beta: Any
    keys: Any
    """``[PADDED,RING]``, by which the checkpoint is multiplied, and ``seen [RING]``, by which that is."""
    seen: Any
    system: Any
    """``[r,s]``: what of token r's d token s sees, times its beta; zero unless r < s."""


@triton.jit
def tokens_of(ring, strides, slot, head, length, oldest, cut: tl.constexpr):
    """The ring of a slot and a head."""
    group = head // cut.SHARE
    return Tokens(
        k=ring.k + slot * strides.k[0] + group * strides.k[1],
        k_rnorm=ring.k_rnorm + slot * strides.k_rnorm[0] + group * strides.k_rnorm[1],
        d=ring.d + slot * strides.d[0] + head * strides.d[1],
        g=ring.g + slot * strides.g[0] + head * strides.g[1],
        strides=strides,
        oldest=oldest,
        length=length,
    )


@triton.jit
def log_decays(inputs, gates, strides, row, head, n, cut: tl.constexpr, form: tl.constexpr):
    """A token's g in float32: of the channels ``n``, or the head's own."""
    g_token = inputs.g + row * strides.g[0] + head * strides.g[1]
    if form.CHANNELS:
        g = load_vector(g_token, n, cut)
        if form.GATED:
            bias = load_vector(gates.dt_bias + head * cut.N, n, cut)
            g = log_decay(g, tl.load(gates.A_log + head), bias, form.LOWER_BOUND)
    else:
        g = tl.load(g_token)
        if form.GATED:
            g = log_decay(g, tl.load(gates.A_log + head), tl.load(gates.dt_bias + head).to(tl.float32))
    return g


@triton.jit
def strength(inputs, strides, row, head, form: tl.constexpr):
    """A token's beta."""
    beta = tl.load(inputs.beta + row * strides.beta[0] + head * strides.beta[1])
    if form.GATED:
        beta = sigmoid(beta)
    return beta


@triton.jit
def load_token(inputs, gates, strides, row, head, p, mine, cut: tl.constexpr, form: tl.constexpr):
    """One row's and head's inputs in float32, v of the rows ``p`` and zero where not ``mine``; k as it arrived."""
    group, n = head // cut.SHARE, tl.arange(0, cut.PADDED)
    g = log_decays(inputs, gates, strides, row, head, n, cut, form)
    return Inputs(
        q=load_vector(inputs.q + row * strides.q[0] + group * strides.q[1], n, cut),
        k=tl.load(inputs.k + row * strides.k[0] + group * strides.k[1] + n, mask=n < cut.N, other=0.0),
        v=tl.load(inputs.v + row * strides.v[0] + head * strides.v[1] + p, mask=mine, other=0.0).to(tl.float32),
        g=g,
        beta=strength(inputs, strides, row, head, form),
    )


@triton.jit
def load_keys(mine, g_now, entry, valid, cut: tl.constexpr, form: tl.constexpr):
    """The ring's keys: ``[RING,PADDED]`` as they arrived, or KDA's ``[PADDED,RING]`` times their decay since then."""
    n = tl.arange(0, cut.PADDED)
    if form.CHANNELS:
        pointers = mine.k + entry[None, :] * mine.strides.k[2] + n[:, None]
        keys = tl.load(pointers, mask=valid[None, :] & (n < cut.N)[:, None], other=0.0).to(tl.float32)
        keys *= tl.exp(_later(mine, g_now, n, cut))
    else:
        keys = load_ring_vectors(mine.k + entry * mine.strides.k[2], valid, n, cut.N, cut)
    return keys


@triton.jit
def walk(mine, weight, token, k, p, end, cut: tl.constexpr, form: tl.constexpr):
    """The sums of w (k_j . q) d_j and of w (k_j . k) d_j over the ring, and the checkpoint's log decays if they are of
    channels: token by token, since a program that walks many tiles has registers for one token; the newest first, so
    that the decay since then is a running sum.
    """
    n = tl.arange(0, cut.PADDED)
    SPAN: tl.constexpr = cut.SPAN
    added_q, added_k, since = tl.zeros((SPAN,), tl.float32), tl.zeros((SPAN,), tl.float32), token.g
    for i in tl.range(cut.L - 1 if INTERPRETED else mine.length, num_stages=cut.STAGES):
        age = tl.maximum(mine.length - 1 - i, 0)
        live = i < mine.length
        entry = mine.oldest + age
        entry = tl.where(entry >= cut.CAPACITY, entry - cut.CAPACITY, entry)
        key = tl.load(mine.k + entry * mine.strides.k[2] + n, mask=live & (n < cut.N), other=0.0).to(tl.float32)
        d = tl.load(mine.d + entry * mine.strides.d[2] + p, mask=live & (p < end), other=0.0)
        if form.CHANNELS:
            key *= tl.exp(since)
            g = tl.load(mine.g + entry * mine.strides.g[2] + n, mask=live & (n < cut.N), other=0.0)
            since += g.to(tl.float32)
        w = element(weight, entry if cut.EAGER else age, cut)
        added_q += (w * tl.sum(key * token.q, axis=0)) * d
        added_k += (w * tl.sum(key * k, axis=0)) * d
    return added_q, added_k, since


@triton.jit
def ring_weights(mine, g_now, entry, age, valid, cut: tl.constexpr, form: tl.constexpr):
    """``(rnorms, gs, weight, decay)``: of the ring's tokens 1 / norm, log decay, and what each still weighs,
    ``[RING]``; and what is left of the checkpoint. Decays of channels go into the keys: of these ``gs`` is () and
    ``decay`` 1.
    """
    rnorms = load_ring(mine.k_rnorm + entry * mine.strides.k_rnorm[2], valid, cut)
    gs, weight, decay = (), rnorms, 1.0
    if not form.CHANNELS:
        gs = load_ring(mine.g + entry * mine.strides.g[2], valid, cut)
        weight = tl.where(valid, rnorms * exp(sum_later(gs, age) + g_now), 0.0)
        decay = exp(tl.sum(gs, axis=0) + g_now)
    return rnorms, gs, weight, decay


@triton.jit
def products_with(keys, q, k, form: tl.constexpr):
    """Of the ring's ``keys``, as `load_keys` gives them, with q and k: two of ``[RING]``."""
    if form.CHANNELS:
        return tl.sum(keys * q[:, None], axis=0), tl.sum(keys * k[:, None], axis=0)
    else:
        wide = keys.to(tl.float32)
        return tl.sum(wide * q[None, :], axis=1), tl.sum(wide * k[None, :], axis=1)


@triton.jit
def append_keys(
    ring, mine, k, g, beta, k_rnorm, slot, entry, head, cut: tl.constexpr, form: tl.constexpr
):  # fmt: skip
    """The token becomes the ring's newest: what belongs to its head and to its key head, ``k`` as it arrived."""
    n = tl.arange(0, cut.PADDED)
    if ring.beta is not None:
        place = ring.beta + slot * mine.strides.beta[0] + head * mine.strides.beta[1]
        tl.store(place + entry * mine.strides.beta[2], beta)
    if form.CHANNELS:
        tl.store(mine.g + entry * mine.strides.g[2] + n, g.to(mine.g.dtype.element_ty), mask=n < cut.N)
    else:
        tl.store(mine.g + entry * mine.strides.g[2], g)
    if head % cut.SHARE == 0:
        tl.store(mine.k + entry * mine.strides.k[2] + n, k, mask=n < cut.N)
        tl.store(mine.k_rnorm + entry * mine.strides.k_rnorm[2], k_rnorm)


@triton.jit
def append_values(ring, mine, v, slot, entry, head, p, end):
    """The values of rows ``p``, for a fold from raw inputs; the token's d is stored where it is found."""
    if ring.v is not None:
        place = ring.v + slot * mine.strides.v[0] + head * mine.strides.v[1] + entry * mine.strides.v[2]
        tl.store(place + p, v.to(ring.v.dtype.element_ty), mask=p < end)


@triton.jit
def read(
    out, new_d, state, S, qs, ks, decay_q, decay_k, qk, added_q, error, beta, part, end, cut: tl.constexpr
):  # fmt: skip
    """Outputs and corrected values from the checkpoint and what the ring has ``added``; ``S`` if it has been loaded."""
    first, tiles = part * cut.ROWS + tl.arange(0, cut.M), first_tile(state, part, cut)
    for t in tl.range(cut.TILES, num_stages=cut.STAGES):
        m = first + t * cut.M
        tile = S if cut.TILES == 1 else load_state(tiles + t * cut.M * cut.ROW, m, end, cut)
        Sk, Sq = zeros(cut), zeros(cut)
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            chunk = tile[c].to(tl.float32)
            Sk += chunk * ks[c][None, :]
            Sq += chunk * qs[c][None, :]
        d = beta * (rows_of(error, t * cut.M, m, cut) - decay_k * tl.sum(Sk, axis=1))
        o = decay_q * tl.sum(Sq, axis=1) + rows_of(added_q, t * cut.M, m, cut) + d * qk
        tl.store(out + m, o.to(out.dtype.element_ty), mask=m < end)
        tl.store(new_d + m, d, mask=m < end)


@triton.jit
def fold(
    out, state, ring_d, valid, weight, keys, decay, token, q_scale, k_rnorm, raw, head, draws, part, end,
    cut: tl.constexpr,
):  # fmt: skip
    """Fold ring and token into the checkpoint, from d or, where there is a ``raw``, from that; outputs on the way."""
    first, n = part * cut.ROWS + tl.arange(0, cut.FOLD), tl.arange(0, cut.PADDED)
    tiles = state + first[:, None] * cut.ROW + n[None, :]
    q, k = token.q * q_scale, token.k.to(tl.float32) * k_rnorm
    qk = tl.sum(q * k, axis=0)
    for t in tl.range(cut.FOLDS, num_stages=2):
        m = first + t * cut.FOLD
        mask = (m < end)[:, None] & (n < cut.N)[None, :]
        S = tl.load(tiles + t * cut.FOLD * cut.ROW, mask=mask, other=0.0)
        owned = valid[None, :] & (m < end)[:, None]
        if raw is None:
            d_old = tl.load(ring_d[None, :] + m[:, None], mask=owned, other=0.0)
        else:
            v = tl.load(raw.v[None, :] + m[:, None], mask=owned, other=0.0)
            d_old = _corrected(S.to(tl.float32), v.to(tl.float32), raw, cut)
        moved = S.to(tl.float32) * decay + product(d_old * weight[None, :], keys)
        d = token.beta * (rows_of(token.v, t * cut.FOLD, m, cut) - tl.sum(moved * k[None, :], axis=1))
        o = tl.sum(moved * q[None, :], axis=1) + d * qk
        moved += d[:, None] * k[None, :]
        tl.store(out + m, o.to(out.dtype.element_ty), mask=m < end)
        narrow = rounded(moved, head * cut.P + m, 0, cut.N, draws, state.dtype.element_ty)
        tl.store(tiles + t * cut.FOLD * cut.ROW, narrow, mask=mask)


@triton.jit
def fold_row(
    out, state, ring, mine, token, rnorms, gs, weight, decay, keys, entry, valid, q_scale, k_rnorm, rounding, slot,
    head, part, end, cut: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The flush of a part: ring and token go into the checkpoint, from d or from raw inputs, and it is counted."""
    n = tl.arange(0, cut.PADDED)
    if form.CHANNELS:
        ring_keys, decays = tl.trans(keys), exp(decay_since(mine, token.g, n, cut))[None, :]
    else:
        ring_keys, decays = keys, decay
    raw = None
    if ring.v is not None:
        ring_v = ring.v + slot * mine.strides.v[0] + head * mine.strides.v[1] + entry * mine.strides.v[2]
        ring_beta = ring.beta + slot * mine.strides.beta[0] + head * mine.strides.beta[1]
        beta = load_ring(ring_beta + entry * mine.strides.beta[2], valid, cut)
        if form.CHANNELS:
            raw_keys, system = channel_system(mine, rnorms, cut)
            seen = rnorms
        else:
            raw_keys, system = tl.trans(keys), scalar_system(keys, gs, rnorms, cut)
            seen = rnorms * exp(sum_earlier(gs, cut))
        raw = Raw(ring_v, beta, raw_keys, seen, system * beta[None, :])
    draws = None
    if form.DRAWN:
        draws = draws_of(rounding, slot, arrive(ring.flushes + slot, cut.H * cut.PARTS))
    elif part == 0:
        if head == 0:
            tl.store(ring.flushes + slot, tl.load(ring.flushes + slot) + 1)
    fold(
        out, state, mine.d + entry * mine.strides.d[2], valid, weight, ring_keys, decays, token, q_scale, k_rnorm,
        raw, head, draws, part, end, cut,
    )  # fmt: skip


@triton.jit
def _corrected(S, v, raw, cut: tl.constexpr):
    """d ``[FOLD,RING]`` of the ring's tokens, solved by substitution against rows ``S`` of the checkpoint."""
    j = tl.arange(0, cut.RING)
    d = raw.beta[None, :] * (v - product(S, raw.keys) * raw.seen[None, :])
    for r in tl.range(cut.L - 2):
        # Token r's d is final by now; every later one sees it.
        found = tl.sum(tl.where((j == r)[None, :], d, 0.0), axis=1)
        d -= found[:, None] * tl.sum(tl.where((j == r)[:, None], raw.system, 0.0), axis=0)[None, :]
    return d


@triton.jit
def channel_system(mine, rnorms, cut: tl.constexpr):
    """KDA's keys ``[PADDED,RING]`` times their decay since the checkpoint; and ``[r,s]``, for r < s, the product of
    normalised keys r and s times the decays between them, zero elsewhere.
    """
    j, n = tl.arange(0, cut.RING), tl.arange(0, cut.PADDED)
    mask = (j < cut.L - 1)[:, None] & (n < cut.N)[None, :]
    entries = ((mine.oldest + j) % cut.CAPACITY)[:, None]
    keys = tl.load(mine.k + entries * mine.strides.k[2] + n[None, :], mask=mask, other=0.0).to(tl.float32)
    since, decayed = tl.zeros_like(keys), tl.zeros_like(keys)
    total, system = tl.sum(since, axis=0), tl.zeros((tl.constexpr(cut.RING), tl.constexpr(cut.RING)), tl.float32)
    for s in tl.range(cut.L - 1):
        entry = (mine.oldest + s) % cut.CAPACITY
        k = tl.load(mine.k + entry * mine.strides.k[2] + n, mask=n < cut.N, other=0.0).to(tl.float32)
        g = tl.load(mine.g + entry * mine.strides.g[2] + n, mask=n < cut.N, other=0.0).to(tl.float32)
        since += g[None, :]
        total += g
        products = rnorms * tl.sum(keys * tl.exp(since) * k[None, :], axis=1)
        system = tl.where((j == s)[None, :] & (j < s)[:, None], products[:, None], system)
        since = tl.where((j < s)[:, None], since, 0.0)
        decayed = tl.where((j == s)[:, None], (k * exp(total))[None, :], decayed)
    return tl.trans(decayed), system * rnorms[None, :]


@triton.jit
def scalar_system(keys, g, rnorms, cut: tl.constexpr):
    """GDN's ``[r,s]`` of `channel_system`, for ``keys [RING,PADDED]``; sums of log decays by a product, as in
    `_later`."""
    j = tl.arange(0, cut.RING)
    behind = tl.where(j[None, :] > j[:, None], g[None, :], 0.0)
    between = product(behind, tl.where(j[:, None] <= j[None, :], 1.0, 0.0).to(tl.bfloat16))
    products = product(keys.to(tl.float32), tl.trans(keys)) * exp(between)
    return tl.where(j[:, None] < j[None, :], products * rnorms[:, None] * rnorms[None, :], 0.0)


@triton.jit
def sum_earlier(g, cut: tl.constexpr):
    """For each token of ``g [RING]`` the sum up to and with it."""
    j = tl.arange(0, cut.RING)
    return tl.sum(tl.where(j[:, None] <= j[None, :], g[:, None], 0.0), axis=0)


@triton.jit
def _later(mine, g_now, n, cut: tl.constexpr):
    """``[n,RING]``: for ring token j, in time order, the log decay of all tokens behind it, up to the current one.

    A product with a triangle of ones: it adds what is not positive, and subtracts nothing.
    """
    j = tl.arange(0, cut.RING)
    pointers = mine.g + ((mine.oldest + j + 1) % cut.CAPACITY)[None, :] * mine.strides.g[2] + n[:, None]
    mask = (j + 1 < mine.length)[None, :] & (n < cut.N)[:, None]
    after = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    after = tl.where((j + 1 == mine.length)[None, :], g_now[:, None], after)
    return product(after, tl.where(j[:, None] >= j[None, :], 1.0, 0.0).to(tl.bfloat16))


@triton.jit
def decay_since(mine, g_now, n, cut: tl.constexpr):
    """``[n]``: the checkpoint's log decay up to and with the current token."""
    j = tl.arange(0, cut.RING)
    pointers = mine.g + ((mine.oldest + j) % cut.CAPACITY)[:, None] * mine.strides.g[2] + n[None, :]
    gs = tl.load(pointers, mask=(j < mine.length)[:, None] & (n < cut.N)[None, :], other=0.0)
    return tl.sum(gs.to(tl.float32), axis=0) + g_now
