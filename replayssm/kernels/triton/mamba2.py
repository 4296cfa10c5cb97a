"""Mamba-2 in Triton: the stored-state step and the replay step, one launch each.

Program ``(row, head, part)`` owns some rows of one head's state. All heads of a group need B_j . C over the ring; each
program computes these itself, from a ring that the group's programs find in L2: cheaper than a launch of its own.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005 (Triton has no unpacking into tuples)

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
    shifted,
    store_state,
    sum_later,
)
from replayssm.recurrence.mamba2 import Inputs


class _Ring(NamedTuple):
    """Tensors of a `CacheLayer` that a replay step needs besides the state."""

    x: Any
    B: Any
    dt: Any
    cursor: Any
    origin: Any
    flushes: Any


class _Strides(NamedTuple):
    """Strides of all axes but the last, which is contiguous; of ``dt [B,H]`` all."""

    state: Any
    out: Any
    x: Any
    B: Any
    C: Any
    dt: Any
    z: Any


class _RingStrides(NamedTuple):
    x: Any
    B: Any
    dt: Any


def stored_step(out: Tensor, state: Tensor, inputs: Inputs, slots: Tensor, launch: Launch | None = None) -> None:
    """The recurrence for one token a row, in place; see `replayssm.kernels.triton` for dtypes and strides.

    ``state [S,H,P,N]``, ``out [B,H,P]``, ``slots [B]`` int64, -1 for padding. Mutates ``out`` and ``state``; raises
    ``ValueError``, one line, on tensors it does not take.
    """
    strides, geometry = _check(out, state, inputs, slots)
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
            **asdict(cut),
            ROW=state.stride(2),
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )


def replay_step(out: Tensor, layer: CacheLayer, inputs: Inputs, slots: Tensor, launch: Launch | None = None) -> None:
    """One token a row in standard decoding; arguments as `stored_step`, with a `replayssm.cache.CacheLayer`.

    Rows with a full ring fold ring and token into the checkpoint and count the flush; the others append the token.
    Mutates ``out``, the checkpoint and ``flushes`` or the ring; raises ``ValueError`` on what it does not take.
    """
    check_layer(layer, "mamba2")
    strides, geometry = _check(out, layer.state, inputs, slots)
    ring_strides = _check_ring(layer, geometry, inputs)
    rows, size = len(slots), layer.state.element_size()
    launch = launch or replay_launch(geometry, rows, size, layer.interval_length)
    cut = Cut.of(geometry, launch, size)
    ring = _Ring(**layer.ring, cursor=layer.cursor, origin=layer.origin, flushes=layer.flushes)
    if rows:
        _replay_kernel[(cut.PARTS * cut.H * rows,)](
            out,
            layer.state,
            ring,
            inputs,
            slots,
            strides,
            ring_strides,
            **asdict(cut),
            ROW=layer.state.stride(2),
            L=layer.interval_length,
            CAPACITY=layer.capacity,
            RING=max(16, power_of_two(layer.capacity)),
            EAGER=launch.eager,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )


def _check(out: Tensor, state: Tensor, inputs: Inputs, slots: Tensor) -> tuple[_Strides, Geometry]:
    _, H, P, N = state.shape
    rows, G = inputs.B.shape[:2]
    kind = (inputs.x.dtype,)
    strides = _Strides(
        state=check("state", state, tuple(state.shape), STATES),
        out=check("out", out, (rows, H, P), INPUTS),
        x=check("x", inputs.x, (rows, H, P), INPUTS),
        B=check("B", inputs.B, (rows, G, N), kind),
        C=check("C", inputs.C, (rows, G, N), kind),
        dt=(*check("dt", inputs.dt, (rows, H), WIDE), 1),
        z=None if inputs.z is None else check("z", inputs.z, (rows, H, P), kind),
    )
    check("A", inputs.A, (H,), WIDE)
    if inputs.D is not None:
        check("D", inputs.D, (H,), WIDE)
    check_slots(slots, rows)
    check_place({"out": out, "slots": slots, **inputs._asdict()}, state.device)
    return strides, Geometry("mamba2", H, G, P, N)


def _check_ring(layer: CacheLayer, g: Geometry, inputs: Inputs) -> _RingStrides:
    slots, R = len(layer.state), layer.capacity
    kind = (inputs.x.dtype,)
    return _RingStrides(
        x=check("ring x", layer.ring["x"], (slots, g.heads, R, g.head_dim), kind),
        B=check("ring B", layer.ring["B"], (slots, g.groups, R, g.state_dim), kind),
        dt=check("ring dt", layer.ring["dt"], (slots, g.heads, R), WIDE),
    )


@triton.jit
def _load_token(inputs, strides, row, head, m, end):
    """``(x,)`` or ``(x, z)`` of the rows ``m``, in their dtype."""
    token = (tl.load(inputs.x + row * strides.x[0] + head * strides.x[1] + m, mask=m < end, other=0.0),)
    if inputs.z is not None:
        token = token + (tl.load(inputs.z + row * strides.z[0] + head * strides.z[1] + m, mask=m < end, other=0.0),)
    return token


@triton.jit
def _finish(y, x, queue, Z: tl.constexpr, D, inputs, out, m, end):
    """Skip connection, gate ``queue[Z]`` if there is one, and the one rounding of some rows of an output."""
    y += D * x
    if inputs.z is not None:
        gate = queue[Z].to(tl.float32)
        y *= gate / (1.0 + tl.exp(-gate))
    tl.store(out + m, y.to(out.dtype.element_ty), mask=m < end)


@triton.jit
def _stored_kernel(
    out,
    state,
    inputs,
    slots,
    strides,
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
):
    program = tl.program_id(0)
    part, head, row = program % PARTS, program // PARTS % H, (program // (PARTS * H)).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    CHUNKS: tl.constexpr = PADDED // WIDTH
    SIZE: tl.constexpr = CHUNKS + 1 if inputs.z is None else CHUNKS + 2
    first = part * TILES * M + tl.arange(0, M)
    end = tl.minimum(P, (part + 1) * TILES * M)
    states = state + slot * strides.state[0] + head * strides.state[1]
    states = states + first[:, None] * ROW + tl.arange(0, WIDTH)[None, :]
    queue = ()
    for t in tl.static_range(AHEAD):
        m = first + t * M
        queue = queue + load_state(states + t * M * ROW, m, end, N, CHUNKS, WIDTH)
        queue = queue + _load_token(inputs, strides, row, head, m, end)
    group = head // SHARE
    Bs = load_chunks(inputs.B + row * strides.B[0] + group * strides.B[1], N, PADDED, WIDTH)
    Cs = load_chunks(inputs.C + row * strides.C[0] + group * strides.C[1], N, PADDED, WIDTH)
    dt = tl.load(inputs.dt + row * strides.dt[0] + head)
    decay = exp(tl.load(inputs.A + head) * dt)
    D = 0.0 if inputs.D is None else tl.load(inputs.D + head)
    outs = out + row * strides.out[0] + head * strides.out[1]
    for t in tl.range(TILES):
        m = first + t * M
        if AHEAD < TILES:
            far = m + AHEAD * M
            new = load_state(states + (t + AHEAD) * M * ROW, far, end, N, CHUNKS, WIDTH)
            new = new + _load_token(inputs, strides, row, head, far, end)
        x = queue[CHUNKS].to(tl.float32)
        product = tl.zeros((M, WIDTH), tl.float32)
        moved = ()
        for c in tl.static_range(CHUNKS):
            chunk = queue[c].to(tl.float32) * decay + (dt * x)[:, None] * Bs[c][None, :]
            product += chunk * Cs[c][None, :]
            moved = moved + (chunk,)
        store_state(states + t * M * ROW, m, end, moved, N, CHUNKS, WIDTH)
        _finish(tl.sum(product, axis=1), x, queue, CHUNKS + 1, D, inputs, outs, m, end)
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
    SIZE: tl.constexpr = CHUNKS + 2 if inputs.z is None else CHUNKS + 3
    first = part * TILES * M + tl.arange(0, M)
    end = tl.minimum(P, (part + 1) * TILES * M)
    states = state + slot * strides.state[0] + head * strides.state[1]
    states = states + first[:, None] * ROW + tl.arange(0, WIDTH)[None, :]
    tiles = ()
    for t in tl.static_range(AHEAD):
        tiles = tiles + (load_state(states + t * M * ROW, first + t * M, end, N, CHUNKS, WIDTH),)

    # The token, then the ring, all asked for before anything is used.
    B_token = inputs.B + row * strides.B[0] + group * strides.B[1]
    C_token = inputs.C + row * strides.C[0] + group * strides.C[1]
    Cs = load_chunks(C_token, N, PADDED, WIDTH)
    n = tl.arange(0, PADDED)
    C = load_vector(C_token, n, N, PADDED)
    B = load_vector(B_token, n, N, PADDED)
    A = tl.load(inputs.A + head)
    dt = tl.load(inputs.dt + row * strides.dt[0] + head)
    D = 0.0 if inputs.D is None else tl.load(inputs.D + head)
    ring_x = ring.x + slot * ring_strides.x[0] + head * ring_strides.x[1]
    ring_B = ring.B + slot * ring_strides.B[0] + group * ring_strides.B[1]
    ring_dt = ring.dt + slot * ring_strides.dt[0] + head * ring_strides.dt[1]
    entry, age, valid = ring_order(length, oldest, RING, CAPACITY, EAGER)
    dts = load_ring(ring_dt + entry, valid, EAGER)
    B_valid = valid[:, None] if PADDED == N else valid[:, None] & (n < N)[None, :]
    Bs = load_ring(ring_B + entry[:, None] * ring_strides.B[2] + n[None, :], B_valid, EAGER and PADDED == N)
    x_entries = ring_x + entry[:, None] * ring_strides.x[2] + first[None, :]
    queue = ()
    for t in tl.static_range(AHEAD):
        m = first + t * M
        old = load_ring(x_entries + t * M, valid[:, None] & (m < end)[None, :], False)
        queue = queue + tiles[t] + (old,) + _load_token(inputs, strides, row, head, m, end)

    weight = dts * exp(A * (sum_later(dts, age) + dt))
    decay = exp(A * (tl.sum(dts, axis=0) + dt))
    weight_BC = weight * tl.sum(Bs.to(tl.float32) * C[None, :], axis=1)
    BC_token = dt * tl.sum(B * C, axis=0)
    outs = out + row * strides.out[0] + head * strides.out[1]
    flush = length == L - 1
    last = (oldest + length) % CAPACITY
    for t in tl.range(TILES):
        m = first + t * M
        if AHEAD < TILES:
            far = m + AHEAD * M
            new = load_state(states + (t + AHEAD) * M * ROW, far, end, N, CHUNKS, WIDTH)
            new = new + (load_ring(x_entries + (t + AHEAD) * M, valid[:, None] & (far < end)[None, :], False),)
            new = new + _load_token(inputs, strides, row, head, far, end)
        x = queue[CHUNKS + 1].to(tl.float32)
        product = tl.zeros((M, WIDTH), tl.float32)
        for c in tl.static_range(CHUNKS):
            product += queue[c].to(tl.float32) * Cs[c][None, :]
        y = decay * tl.sum(product, axis=1) + tl.sum(weight_BC[:, None] * queue[CHUNKS].to(tl.float32), axis=0)
        _finish(y + BC_token * x, x, queue, CHUNKS + 2, D, inputs, outs, m, end)
        if flush:
            moved = ()
            for c in tl.static_range(CHUNKS):
                now = load_vector(B_token, c * WIDTH + tl.arange(0, WIDTH), N, PADDED)
                moved = moved + (queue[c].to(tl.float32) * decay + (dt * x)[:, None] * now[None, :],)
            since = dt
            for i in tl.range(0, L - 1, loop_unroll_factor=UNROLL):
                # Newest first, so that the time that passed since is a running sum.
                at = (oldest + (L - 2 - i)) % CAPACITY
                dt_old = tl.load(ring_dt + at)
                x_old = tl.load(ring_x + at * ring_strides.x[2] + m, mask=m < end, other=0.0).to(tl.float32)
                weighted = dt_old * exp(A * since) * x_old
                added = ()
                for c in tl.static_range(CHUNKS):
                    B_old = load_vector(ring_B + at * ring_strides.B[2], c * WIDTH + tl.arange(0, WIDTH), N, PADDED)
                    added = added + (moved[c] + weighted[:, None] * B_old[None, :],)
                moved = added
                since += dt_old
            store_state(states + t * M * ROW, m, end, moved, N, CHUNKS, WIDTH)
        else:
            tl.store(ring_x + last * ring_strides.x[2] + m, queue[CHUNKS + 1], mask=m < end)
        if AHEAD < TILES:
            queue = shifted(queue, new, SIZE, AHEAD)
    if part == 0:
        if flush:
            if head == 0:
                tl.store(ring.flushes + slot, tl.load(ring.flushes + slot) + 1)
        else:
            tl.store(ring_dt + last, dt)
            if head % SHARE == 0:
                B_raw = tl.load(B_token + n, mask=n < N, other=0.0)
                tl.store(ring_B + last * ring_strides.B[2] + n, B_raw, mask=n < N)
