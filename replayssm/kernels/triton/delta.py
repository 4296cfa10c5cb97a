"""GDN and KDA in Triton: the stored-state step and the replay step, one launch each.

The two differ in the decay: a scalar a value head, or, ``CHANNELS``, one a key channel, which then belongs to the key
side of every product. Program ``(row, head, part)`` owns some rows of one head's state. S.q and S.k come from one pass
over them, with q and k as they arrived; norms and decays are scalars applied afterwards, so that nothing waits for them.
The products of the ring's keys with q and k are computed by every program of a head anew.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.geometry import Geometry
from replayssm.kernels.triton.arguments import INPUTS, STATES, WIDE, check, check_layer, check_place, check_slots
from replayssm.kernels.triton.launch import Cut, Launch, power_of_two, replay_launch, stored_launch
from replayssm.kernels.triton.tiles import (
    as_tile,
    columns,
    dot_rows,
    exp,
    load_columns,
    load_ring,
    load_tile,
    ring_order,
    rnorm,
    store_tile,
    sum_later,
)
from replayssm.recurrence.gdn import Inputs


class _Ring(NamedTuple):
    """Tensors of a `CacheLayer` that a replay step needs besides the state."""

    k: Any
    k_rnorm: Any
    d: Any
    g: Any
    cursor: Any
    origin: Any
    flushes: Any


class _Strides(NamedTuple):
    """Strides of all axes but the last, which is contiguous; of ``beta [B,H]``, and of GDN's ``g [B,H]``, all."""

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


def stored_step(family: str, out: Tensor, state: Tensor, inputs: Inputs, slots: Tensor, launch: Launch | None) -> None:
    """The recurrence for one token a row, in place, of ``family`` gdn or kda; see `replayssm.kernels.triton.gdn`."""
    strides, geometry = _check(family, out, state, inputs, slots)
    rows, size = len(slots), state.element_size()
    launch = launch or stored_launch(geometry, rows, size)
    cut = Cut.of(geometry, launch, size)
    if rows:
        _stored_kernel[(cut.PARTS * cut.H * rows,)](
            out,
            state,
            inputs,
            slots,
            strides,
            geometry.state_dim**-0.5,
            **asdict(cut),
            CHANNELS=family == "kda",
            num_warps=launch.warps,
        )


def replay_step(
    family: str, out: Tensor, layer: CacheLayer, inputs: Inputs, slots: Tensor, launch: Launch | None
) -> None:
    """Standard decoding for one token a row of ``family`` gdn or kda; see `replayssm.kernels.triton.gdn`."""
    check_layer(layer, family)
    strides, geometry = _check(family, out, layer.state, inputs, slots)
    ring_strides = _check_ring(layer, geometry, inputs)
    rows, size = len(slots), layer.state.element_size()
    launch = launch or replay_launch(geometry, rows, size, layer.interval_length)
    cut = Cut.of(geometry, launch, size)
    if rows:
        _replay_kernel[(cut.PARTS * cut.H * rows,)](
            out,
            layer.state,
            _Ring(**layer.ring, cursor=layer.cursor, origin=layer.origin, flushes=layer.flushes),
            inputs,
            slots,
            strides,
            ring_strides,
            geometry.state_dim**-0.5,
            **asdict(cut),
            CHANNELS=family == "kda",
            L=layer.interval_length,
            CAPACITY=layer.capacity,
            RING=max(16, power_of_two(layer.capacity)),
            EAGER=launch.eager and family == "gdn",
            num_warps=launch.warps,
        )


def _check(
    family: str, out: Tensor, state: Tensor, inputs: Inputs, slots: Tensor
) -> tuple[_Strides, Geometry]:
    _, H, V, K = state.shape
    rows, HK = inputs.k.shape[:2]
    kind = (inputs.v.dtype,)
    g = check("g", inputs.g, (rows, H, K) if family == "kda" else (rows, H), WIDE)
    strides = _Strides(
        state=check("state", state, tuple(state.shape), STATES),
        out=check("out", out, (rows, H, V), INPUTS),
        q=check("q", inputs.q, (rows, HK, K), kind),
        k=check("k", inputs.k, (rows, HK, K), kind),
        v=check("v", inputs.v, (rows, H, V), INPUTS),
        g=g if family == "kda" else (*g, 1),
        beta=(*check("beta", inputs.beta, (rows, H), WIDE), 1),
    )
    check_slots(slots, rows)
    check_place({"out": out, "slots": slots, **inputs._asdict()}, state.device)
    return strides, Geometry(family, H, HK, V, K)


def _check_ring(layer: CacheLayer, geometry: Geometry, inputs: Inputs) -> _RingStrides:
    slots, R, ring, g = len(layer.state), layer.capacity, layer.ring, geometry
    channels = (g.state_dim,) if g.family == "kda" else ()
    decay = check("ring g", ring["g"], (slots, g.heads, R, *channels), WIDE)
    return _RingStrides(
        k=check("ring k", ring["k"], (slots, g.groups, R, g.state_dim), (inputs.k.dtype,)),
        k_rnorm=(*check("ring k_rnorm", ring["k_rnorm"], (slots, g.groups, R), WIDE), 1),
        d=check("ring d", ring["d"], (slots, g.heads, R, g.head_dim), WIDE),
        g=decay if channels else (*decay, 1),
    )


@triton.jit
def _stored_kernel(
    out,
    state,
    inputs,
    slots,
    strides,
    scale,
    H: tl.constexpr,
    SHARE: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    M: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    program = tl.program_id(0)
    part, head, row = program % PARTS, program // PARTS % H, (program // (PARTS * H)).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    n = columns(N, WIDTH, CHUNKS)
    state += slot * strides.state[0] + head * strides.state[1]
    tiles = ()
    for t in tl.static_range(TILES):
        m = (part * TILES + t) * M + tl.arange(0, M)
        tiles = tiles + (load_tile(state, strides.state[2], m, n, P, N, PADDED, P % (M * TILES) == 0),)
    group = head // SHARE
    q = load_columns(inputs.q + row * strides.q[0] + group * strides.q[1], n, N, PADDED)
    k = load_columns(inputs.k + row * strides.k[0] + group * strides.k[1], n, N, PADDED)
    beta = tl.load(inputs.beta + row * strides.beta[0] + head)
    g = inputs.g + row * strides.g[0] + head * strides.g[1]
    if CHANNELS:
        decay = exp(load_columns(g, n, N, PADDED))[:, None, :]
    else:
        decay = exp(tl.load(g))
    q_scale = rnorm(tl.sum(tl.sum(q * q, axis=0), axis=0)) * scale
    k *= rnorm(tl.sum(tl.sum(k * k, axis=0), axis=0))
    qk = tl.sum(tl.sum(q * k, axis=0), axis=0)
    for t in tl.static_range(TILES):
        m = (part * TILES + t) * M + tl.arange(0, M)
        v = tl.load(inputs.v + row * strides.v[0] + head * strides.v[1] + m, mask=m < P, other=0.0).to(tl.float32)
        tile = tiles[t].to(tl.float32) * decay
        d = beta * (v - dot_rows(tile, k))
        o = (dot_rows(tile, q) + d * qk) * q_scale
        store_tile(state, strides.state[2], m, n, tile + d[None, :, None] * k[:, None, :], P, N)
        pointers = out + row * strides.out[0] + head * strides.out[1] + m
        tl.store(pointers, o.to(out.dtype.element_ty), mask=m < P)


@triton.jit
def _replay_kernel(
    out,
    state,
    ring,
    inputs,
    slots,
    strides,
    ring_strides,
    scale,
    H: tl.constexpr,
    SHARE: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    M: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    L: tl.constexpr,
    CAPACITY: tl.constexpr,
    RING: tl.constexpr,
    EAGER: tl.constexpr,
):
    program = tl.program_id(0)
    part, head, row = program % PARTS, program // PARTS % H, (program // (PARTS * H)).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    group = head // SHARE
    length = tl.load(ring.cursor + slot)
    oldest = tl.load(ring.origin + slot)
    n = columns(N, WIDTH, CHUNKS)
    state += slot * strides.state[0] + head * strides.state[1]
    tiles = ()
    for t in tl.static_range(TILES):
        m = (part * TILES + t) * M + tl.arange(0, M)
        tiles = tiles + (load_tile(state, strides.state[2], m, n, P, N, PADDED, P % (M * TILES) == 0),)

    # The token, then the ring, all asked for before anything is used.
    q_token = inputs.q + row * strides.q[0] + group * strides.q[1]
    k_token = inputs.k + row * strides.k[0] + group * strides.k[1]
    g_token = inputs.g + row * strides.g[0] + head * strides.g[1]
    flat = tl.arange(0, PADDED)
    q, k = load_columns(q_token, n, N, PADDED), load_columns(k_token, n, N, PADDED)
    q_flat, k_flat = load_columns(q_token, flat, N, PADDED), load_columns(k_token, flat, N, PADDED)
    beta = tl.load(inputs.beta + row * strides.beta[0] + head)
    ring_k = ring.k + slot * ring_strides.k[0] + group * ring_strides.k[1]
    ring_rnorm = ring.k_rnorm + slot * ring_strides.k_rnorm[0] + group * ring_strides.k_rnorm[1]
    ring_d = ring.d + slot * ring_strides.d[0] + head * ring_strides.d[1]
    ring_g = ring.g + slot * ring_strides.g[0] + head * ring_strides.g[1]
    entry, age, valid = ring_order(length, oldest, RING, CAPACITY, EAGER)
    some = valid[:, None] if PADDED == N else valid[:, None] & (flat < N)[None, :]
    ks = load_ring(ring_k + entry[:, None] * ring_strides.k[2] + flat[None, :], some, EAGER and PADDED == N)
    ds = ()
    for t in tl.static_range(TILES):
        m = (part * TILES + t) * M + tl.arange(0, M)
        some = valid[:, None] & (m < P)[None, :]
        pointers = ring_d + entry[:, None] * ring_strides.d[2] + m[None, :]
        ds = ds + (load_ring(pointers, some, EAGER and P % (M * TILES) == 0),)
    rnorms = load_ring(ring_rnorm + entry, valid, EAGER)

    # Decays of checkpoint and ring up to the token; those of channels go into the keys.
    if CHANNELS:
        channels = (flat < N)[None, :]
        g_now = load_columns(g_token, flat, N, PADDED)
        after = tl.load(
            ring_g + ((entry + 1) % CAPACITY)[:, None] * ring_strides.g[2] + flat[None, :],
            mask=(age + 1 < length)[:, None] & channels,
            other=0.0,
        )
        after = tl.where((age + 1 == length)[:, None], g_now[None, :], after)
        oldest_g = tl.load(ring_g + oldest * ring_strides.g[2] + flat, mask=(flat < N) & (length > 0), other=0.0)
        total = tl.where(length > 0, tl.sum(after, axis=0) + oldest_g, g_now)
        ks *= rnorms[:, None] * exp(tl.cumsum(after, axis=0, reverse=True))
        decay_flat = exp(total)
        decay = tl.reshape(decay_flat, (CHUNKS, WIDTH))
        q_decayed, k_decayed = q * decay, k * decay
        weight = tl.where(valid, 1.0, 0.0)
        decay_rows = 1.0
        decay_tile = decay[:, None, :]
    else:
        g_now = tl.load(g_token)
        gs = load_ring(ring_g + entry, valid, EAGER)
        weight = tl.where(valid, rnorms * exp(sum_later(gs, age) + g_now), 0.0)
        decay_rows = exp(tl.sum(gs, axis=0) + g_now)
        q_decayed, k_decayed = q, k
        decay_tile = decay_rows
    q_scale = rnorm(tl.sum(q_flat * q_flat, axis=0)) * scale
    k_rnorm = rnorm(tl.sum(k_flat * k_flat, axis=0))
    qk = tl.sum(q_flat * k_flat, axis=0) * (k_rnorm * q_scale)
    weight_q = weight * tl.sum(ks * q_flat[None, :], axis=1) * q_scale
    weight_k = weight * tl.sum(ks * k_flat[None, :], axis=1) * k_rnorm

    flush = length == L - 1
    last = (oldest + length) % CAPACITY
    for t in tl.static_range(TILES):
        m = (part * TILES + t) * M + tl.arange(0, M)
        tile = tiles[t].to(tl.float32)
        v = tl.load(inputs.v + row * strides.v[0] + head * strides.v[1] + m, mask=m < P, other=0.0).to(tl.float32)
        Sk = dot_rows(tile, k_decayed) * (decay_rows * k_rnorm) + tl.sum(weight_k[:, None] * ds[t], axis=0)
        Sq = dot_rows(tile, q_decayed) * (decay_rows * q_scale) + tl.sum(weight_q[:, None] * ds[t], axis=0)
        d = beta * (v - Sk)
        pointers = out + row * strides.out[0] + head * strides.out[1] + m
        tl.store(pointers, (Sq + d * qk).to(out.dtype.element_ty), mask=m < P)
        if flush:
            moved = d[:, None] * (k_flat * k_rnorm)[None, :]
            if L > 1:
                moved += tl.dot(tl.trans(weight[:, None] * ds[t]), ks, input_precision="tf32x3")
            store_tile(
                state, strides.state[2], m, n, tile * decay_tile + as_tile(moved, M, WIDTH, CHUNKS), P, N
            )
        else:
            tl.store(ring_d + last * ring_strides.d[2] + m, d, mask=m < P)
    if part == 0:
        if flush:
            if head == 0:
                tl.store(ring.flushes + slot, tl.load(ring.flushes + slot) + 1)
        else:
            if CHANNELS:
                tl.store(ring_g + last * ring_strides.g[2] + flat, g_now, mask=flat < N)
            else:
                tl.store(ring_g + last, g_now)
            if head % SHARE == 0:
                k_raw = tl.load(k_token + flat, mask=flat < N, other=0.0)
                tl.store(ring_k + last * ring_strides.k[2] + flat, k_raw, mask=flat < N)
                tl.store(ring_rnorm + last, k_rnorm)
