"""GDN and KDA in Triton: the stored-state step and the replay step, one launch each.

The two differ in the decay: a scalar a value head, or, ``CHANNELS``, one a key channel, which then belongs to the key
side of every product. Program ``(row, head, part)`` owns some rows of one head's state. S.q and S.k come from one pass
over them, with q and k as they arrived; norms and decays are scalars applied afterwards, so nothing waits for them.
The products of the ring's keys with q and k are computed by every program of a head anew.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005, SIM108 (Triton has neither unpacking into tuples nor conditional expressions over tensors)

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
    UNROLL,
    exp,
    load_chunks,
    load_ring,
    load_state,
    load_vector,
    ring_order,
    rnorm,
    shifted,
    store_state,
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
            ROW=state.stride(2),
            CHANNELS=family == "kda",
            num_warps=launch.warps,
            maxnreg=launch.registers,
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
            ROW=layer.state.stride(2),
            CHANNELS=family == "kda",
            L=layer.interval_length,
            CAPACITY=layer.capacity,
            RING=max(16, power_of_two(layer.capacity)),
            EAGER=launch.eager and family == "gdn",
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )


def _check(family: str, out: Tensor, state: Tensor, inputs: Inputs, slots: Tensor) -> tuple[_Strides, Geometry]:
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
    M: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    program = tl.program_id(0)
    part, head, row = program % PARTS, program // PARTS % H, (program // (PARTS * H)).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    CHUNKS: tl.constexpr = PADDED // WIDTH
    SIZE: tl.constexpr = CHUNKS + 1
    first = part * TILES * M + tl.arange(0, M)
    end = tl.minimum(P, (part + 1) * TILES * M)
    states = state + slot * strides.state[0] + head * strides.state[1]
    states = states + first[:, None] * ROW + tl.arange(0, WIDTH)[None, :]
    v_token = inputs.v + row * strides.v[0] + head * strides.v[1]
    queue = ()
    for t in tl.static_range(AHEAD):
        m = first + t * M
        queue = queue + load_state(states + t * M * ROW, m, end, N, CHUNKS, WIDTH)
        queue = queue + (tl.load(v_token + m, mask=m < end, other=0.0),)
    group = head // SHARE
    q_token = inputs.q + row * strides.q[0] + group * strides.q[1]
    k_token = inputs.k + row * strides.k[0] + group * strides.k[1]
    g_token = inputs.g + row * strides.g[0] + head * strides.g[1]
    qs, ks = load_chunks(q_token, N, PADDED, WIDTH), load_chunks(k_token, N, PADDED, WIDTH)
    n = tl.arange(0, PADDED)
    q, k = load_vector(q_token, n, N, PADDED), load_vector(k_token, n, N, PADDED)
    beta = tl.load(inputs.beta + row * strides.beta[0] + head)
    if CHANNELS:
        gs = load_chunks(g_token, N, PADDED, WIDTH)
    else:
        decay = exp(tl.load(g_token))
    q_scale = rnorm(tl.sum(q * q, axis=0)) * scale
    k_rnorm = rnorm(tl.sum(k * k, axis=0))
    qk = tl.sum(q * k, axis=0) * (k_rnorm * q_scale)
    outs = out + row * strides.out[0] + head * strides.out[1]
    for t in tl.range(TILES):
        m = first + t * M
        if AHEAD < TILES:
            far = m + AHEAD * M
            new = load_state(states + (t + AHEAD) * M * ROW, far, end, N, CHUNKS, WIDTH)
            new = new + (tl.load(v_token + far, mask=far < end, other=0.0),)
        with_k, with_q = tl.zeros((M, WIDTH), tl.float32), tl.zeros((M, WIDTH), tl.float32)
        decayed = ()
        for c in tl.static_range(CHUNKS):
            if CHANNELS:
                chunk = queue[c].to(tl.float32) * exp(gs[c])[None, :]
            else:
                chunk = queue[c].to(tl.float32) * decay
            with_k += chunk * ks[c][None, :]
            with_q += chunk * qs[c][None, :]
            decayed = decayed + (chunk,)
        d = beta * (queue[CHUNKS].to(tl.float32) - tl.sum(with_k, axis=1) * k_rnorm)
        o = tl.sum(with_q, axis=1) * q_scale + d * qk
        moved = ()
        for c in tl.static_range(CHUNKS):
            moved = moved + (decayed[c] + (d * k_rnorm)[:, None] * ks[c][None, :],)
        store_state(states + t * M * ROW, m, end, moved, N, CHUNKS, WIDTH)
        tl.store(outs + m, o.to(out.dtype.element_ty), mask=m < end)
        if AHEAD < TILES:
            queue = shifted(queue, new, SIZE, AHEAD)


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
    M: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
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
    CHUNKS: tl.constexpr = PADDED // WIDTH
    SIZE: tl.constexpr = CHUNKS + 2
    first = part * TILES * M + tl.arange(0, M)
    end = tl.minimum(P, (part + 1) * TILES * M)
    states = state + slot * strides.state[0] + head * strides.state[1]
    states = states + first[:, None] * ROW + tl.arange(0, WIDTH)[None, :]
    tiles = ()
    for t in tl.static_range(AHEAD):
        tiles = tiles + (load_state(states + t * M * ROW, first + t * M, end, N, CHUNKS, WIDTH),)

    # The token, then the ring, all asked for before anything is used.
    q_token = inputs.q + row * strides.q[0] + group * strides.q[1]
    k_token = inputs.k + row * strides.k[0] + group * strides.k[1]
    g_token = inputs.g + row * strides.g[0] + head * strides.g[1]
    v_token = inputs.v + row * strides.v[0] + head * strides.v[1]
    qs, ks = load_chunks(q_token, N, PADDED, WIDTH), load_chunks(k_token, N, PADDED, WIDTH)
    n = tl.arange(0, PADDED)
    q, k = load_vector(q_token, n, N, PADDED), load_vector(k_token, n, N, PADDED)
    beta = tl.load(inputs.beta + row * strides.beta[0] + head)
    ring_k = ring.k + slot * ring_strides.k[0] + group * ring_strides.k[1]
    ring_rnorm = ring.k_rnorm + slot * ring_strides.k_rnorm[0] + group * ring_strides.k_rnorm[1]
    ring_d = ring.d + slot * ring_strides.d[0] + head * ring_strides.d[1]
    ring_g = ring.g + slot * ring_strides.g[0] + head * ring_strides.g[1]
    entry, age, valid = ring_order(length, oldest, RING, CAPACITY, EAGER)
    k_entries = ring_k + entry[:, None] * ring_strides.k[2]
    if not CHANNELS:
        k_valid = valid[:, None] if PADDED == N else valid[:, None] & (n < N)[None, :]
        k_old = load_ring(k_entries + n[None, :], k_valid, EAGER and PADDED == N)
    d_entries = ring_d + entry[:, None] * ring_strides.d[2] + first[None, :]
    queue = ()
    for t in tl.static_range(AHEAD):
        m = first + t * M
        old = load_ring(d_entries + t * M, valid[:, None] & (m < end)[None, :], False)
        queue = queue + tiles[t] + (old, tl.load(v_token + m, mask=m < end, other=0.0))
    rnorms = load_ring(ring_rnorm + entry, valid, EAGER)

    # What each ring token still weighs, and the checkpoint; decays of channels go into the keys.
    if CHANNELS:
        weight = rnorms
        decay = 1.0
        kq, kk = tl.zeros((RING,), tl.float32), tl.zeros((RING,), tl.float32)
        q_decayed, k_decayed, ring_keys, decays = (), (), (), ()
        for c in tl.static_range(CHUNKS):
            columns = c * WIDTH + tl.arange(0, WIDTH)
            k_old = load_ring(k_entries + columns[None, :], valid[:, None] & (columns < N)[None, :], False)
            k_old = k_old.to(tl.float32) * exp(
                _later(ring_g, ring_strides.g[2], g_token, entry, age, length, columns, N, CAPACITY)
            )
            kq += tl.sum(k_old * load_vector(q_token, columns, N, PADDED)[None, :], axis=1)
            kk += tl.sum(k_old * load_vector(k_token, columns, N, PADDED)[None, :], axis=1)
            decays = decays + (_decay(ring_g, ring_strides.g[2], g_token, entry, valid, columns, N),)
            q_decayed = q_decayed + (qs[c] * decays[c],)
            k_decayed = k_decayed + (ks[c] * decays[c],)
            ring_keys = ring_keys + (k_old,)
    else:
        g_now = tl.load(g_token)
        gs = load_ring(ring_g + entry, valid, EAGER)
        weight = tl.where(valid, rnorms * exp(sum_later(gs, age) + g_now), 0.0)
        decay = exp(tl.sum(gs, axis=0) + g_now)
        k_wide = k_old.to(tl.float32)
        kq, kk = tl.sum(k_wide * q[None, :], axis=1), tl.sum(k_wide * k[None, :], axis=1)
        q_decayed, k_decayed = qs, ks
    q_scale = rnorm(tl.sum(q * q, axis=0)) * scale
    k_rnorm = rnorm(tl.sum(k * k, axis=0))
    qk = tl.sum(q * k, axis=0) * (k_rnorm * q_scale)
    weight_q, weight_k = weight * kq * q_scale, weight * kk * k_rnorm
    outs = out + row * strides.out[0] + head * strides.out[1]
    flush = length == L - 1
    last = (oldest + length) % CAPACITY
    for t in tl.range(TILES):
        m = first + t * M
        if AHEAD < TILES:
            far = m + AHEAD * M
            new = load_state(states + (t + AHEAD) * M * ROW, far, end, N, CHUNKS, WIDTH)
            new_old = load_ring(d_entries + (t + AHEAD) * M, valid[:, None] & (far < end)[None, :], False)
            new = new + (new_old, tl.load(v_token + far, mask=far < end, other=0.0))
        with_k, with_q = tl.zeros((M, WIDTH), tl.float32), tl.zeros((M, WIDTH), tl.float32)
        for c in tl.static_range(CHUNKS):
            chunk = queue[c].to(tl.float32)
            with_k += chunk * k_decayed[c][None, :]
            with_q += chunk * q_decayed[c][None, :]
        Sk = tl.sum(with_k, axis=1) * (decay * k_rnorm) + tl.sum(weight_k[:, None] * queue[CHUNKS], axis=0)
        Sq = tl.sum(with_q, axis=1) * (decay * q_scale) + tl.sum(weight_q[:, None] * queue[CHUNKS], axis=0)
        d = beta * (queue[CHUNKS + 1].to(tl.float32) - Sk)
        tl.store(outs + m, (Sq + d * qk).to(out.dtype.element_ty), mask=m < end)
        if flush:
            moved = ()
            if CHANNELS:
                # The decayed keys are at hand: tensor cores, three tf32 products for one in float32.
                weighted = tl.trans(weight[:, None] * queue[CHUNKS])
                for c in tl.static_range(CHUNKS):
                    k_now = load_vector(k_token, c * WIDTH + tl.arange(0, WIDTH), N, PADDED) * k_rnorm
                    chunk = queue[c].to(tl.float32) * decays[c][None, :] + d[:, None] * k_now[None, :]
                    if L > 1:
                        chunk += tl.dot(weighted, ring_keys[c], input_precision="tf32x3")
                    moved = moved + (chunk,)
            else:
                for c in tl.static_range(CHUNKS):
                    k_now = load_vector(k_token, c * WIDTH + tl.arange(0, WIDTH), N, PADDED) * k_rnorm
                    moved = moved + (queue[c].to(tl.float32) * decay + d[:, None] * k_now[None, :],)
                since = g_now
                for i in tl.range(0, L - 1, loop_unroll_factor=UNROLL):
                    # Newest first, so that the decay since then is a running sum.
                    at = (oldest + (L - 2 - i)) % CAPACITY
                    d_old = tl.load(ring_d + at * ring_strides.d[2] + m, mask=m < end, other=0.0)
                    d_old *= tl.load(ring_rnorm + at) * exp(since)
                    since += tl.load(ring_g + at)
                    added = ()
                    for c in tl.static_range(CHUNKS):
                        columns = c * WIDTH + tl.arange(0, WIDTH)
                        k_one = load_vector(ring_k + at * ring_strides.k[2], columns, N, PADDED)
                        added = added + (moved[c] + d_old[:, None] * k_one[None, :],)
                    moved = added
            store_state(states + t * M * ROW, m, end, moved, N, CHUNKS, WIDTH)
        else:
            tl.store(ring_d + last * ring_strides.d[2] + m, d, mask=m < end)
        if AHEAD < TILES:
            queue = shifted(queue, new, SIZE, AHEAD)
    if part == 0:
        if flush:
            if head == 0:
                tl.store(ring.flushes + slot, tl.load(ring.flushes + slot) + 1)
        else:
            if CHANNELS:
                g_vector = tl.load(g_token + n, mask=n < N, other=0.0)
                tl.store(ring_g + last * ring_strides.g[2] + n, g_vector, mask=n < N)
            else:
                tl.store(ring_g + last, g_now)
            if head % SHARE == 0:
                k_raw = tl.load(k_token + n, mask=n < N, other=0.0)
                tl.store(ring_k + last * ring_strides.k[2] + n, k_raw, mask=n < N)
                tl.store(ring_rnorm + last, k_rnorm)


@triton.jit
def _later(ring_g, stride, g_token, entry, age, length, n, N: tl.constexpr, CAPACITY: tl.constexpr):
    """``[RING,n]``: for ring token j, in time order, the log decay of all tokens behind it, up to the current one."""
    pointers = ring_g + ((entry + 1) % CAPACITY)[:, None] * stride + n[None, :]
    after = tl.load(pointers, mask=(age + 1 < length)[:, None] & (n < N)[None, :], other=0.0)
    g_now = tl.load(g_token + n, mask=n < N, other=0.0)
    return tl.cumsum(tl.where((age + 1 == length)[:, None], g_now[None, :], after), axis=0, reverse=True)


@triton.jit
def _decay(ring_g, stride, g_token, entry, valid, n, N: tl.constexpr):
    """``[n]``: the checkpoint's decay up to and with the current token."""
    gs = load_ring(ring_g + entry[:, None] * stride + n[None, :], valid[:, None] & (n < N)[None, :], False)
    return exp(tl.sum(gs, axis=0) + tl.load(g_token + n, mask=n < N, other=0.0))
