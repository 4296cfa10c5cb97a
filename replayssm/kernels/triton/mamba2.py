"""Mamba-2 in Triton: the stored-state step and the replay step, one launch each.

Program ``(row, head, part)`` owns some rows of one head's state. All heads of a group need B_j . C over the ring; each
program computes these itself, from a ring that the group's programs find in L2: cheaper than a launch of its own.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005, SIM102 (Triton has no unpacking into tuples; a condition is known to the compiler, or is not)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.formats import Rounding, check_rounding
from replayssm.geometry import Geometry
from replayssm.kernels.triton.arguments import (
    INPUTS,
    STATES,
    WIDE,
    check,
    check_layer,
    check_parameter,
    check_place,
    check_slots,
)
from replayssm.kernels.triton.gates import Gates, discretize
from replayssm.kernels.triton.launch import Cut, Launch
from replayssm.kernels.triton.launch_table import launch_for
from replayssm.kernels.triton.rounding import INTERPRETED, arrive, draws_of, rounded
from replayssm.kernels.triton.tiles import (
    element,
    exp,
    first_tile,
    load_chunks,
    load_ring,
    load_ring_vectors,
    load_state,
    load_vector,
    place,
    product,
    ring_order,
    rows_of,
    span,
    store_state,
    sum_later,
    zeros,
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
    """As `_Strides`; of ``dt [S,H,R]`` all."""

    x: Any
    B: Any
    dt: Any


def stored_step(
    out: Tensor,
    state: Tensor,
    inputs: Inputs,
    slots: Tensor,
    launch: Launch | None = None,
    *,
    rounding: Rounding | None = None,
    gates: Gates | None = None,
) -> None:
    """The recurrence for one token a row, in place; see `replayssm.kernels.triton` for dtypes and strides.

    ``state [S,H,P,N]``, ``out [B,H,P]``, ``slots [B]`` int64, -1 for padding. Mutates ``out`` and ``state``; raises
    ``ValueError``, one line, on tensors it does not take.
    """
    check_rounding(rounding, state, stored=True)
    strides, geometry = _check(out, state, inputs, slots, gates)
    rows = len(slots)
    launch = launch or launch_for(geometry, rows, state)
    cut = Cut.of(geometry, launch, state)
    if rows:
        grid = (cut.PARTS * cut.H * rows,)
        _stored_kernel[grid](
            out,
            state,
            inputs,
            slots,
            strides,
            rounding,
            gates,
            cut,
            DRAWN=rounding is not None,
            GATED=gates is not None,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )


def replay_step(
    out: Tensor,
    layer: CacheLayer,
    inputs: Inputs,
    slots: Tensor,
    launch: Launch | None = None,
    *,
    rounding: Rounding | None = None,
    gates: Gates | None = None,
) -> None:
    """One token a row in standard decoding; arguments as `stored_step`, with a `replayssm.cache.CacheLayer`.

    Rows with a full ring fold ring and token into the checkpoint and count the flush; the others append the token.
    Mutates ``out``, the checkpoint and ``flushes`` or the ring; raises ``ValueError`` on what it does not take.
    """
    check_layer(layer, "mamba2")
    check_rounding(rounding, layer.state, stored=False)
    strides, geometry = _check(out, layer.state, inputs, slots, gates)
    ring_strides = _check_ring(layer, geometry, inputs)
    rows = len(slots)
    launch = launch or launch_for(geometry, rows, layer.state, layer.interval_length)
    if launch.ahead:
        raise ValueError("launch.ahead=True is for GDN and KDA; accepted for Mamba-2: False")
    cut = Cut.of(geometry, launch, layer.state, layer)
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
            rounding,
            gates,
            cut,
            DRAWN=rounding is not None,
            GATED=gates is not None,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )


def _check(out: Tensor, state: Tensor, inputs: Inputs, slots: Tensor, gates: Gates | None) -> tuple[_Strides, Geometry]:
    _, H, P, N = state.shape
    rows, G = inputs.B.shape[:2]
    kind = (inputs.x.dtype,)
    strides = _Strides(
        state=check("state", state, tuple(state.shape), STATES),
        out=check("out", out, (rows, H, P), INPUTS),
        x=check("x", inputs.x, (rows, H, P), INPUTS),
        B=check("B", inputs.B, (rows, G, N), kind),
        C=check("C", inputs.C, (rows, G, N), kind),
        dt=check("dt", inputs.dt, (rows, H), INPUTS if gates else WIDE, scalars=True),
        z=None if inputs.z is None else check("z", inputs.z, (rows, H, P), kind),
    )
    if gates and gates.dt_bias is not None:
        check_parameter("gates.dt_bias", gates.dt_bias, (H,), state.device)
    if gates and (gates.A_log is not None or gates.lower_bound is not None):
        raise ValueError("gates.A_log and gates.lower_bound are for GDN and KDA; accepted: None, with A in the inputs")
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
        dt=check("ring dt", layer.ring["dt"], (slots, g.heads, R), WIDE, scalars=True),
    )


@triton.jit
def _step_size(dt, gates, head, GATED: tl.constexpr):
    """dt as it is, or, GATED, what the recurrence takes for it."""
    if GATED:
        bias = 0.0
        if gates.dt_bias is not None:
            bias = tl.load(gates.dt_bias + head).to(tl.float32)
        dt = discretize(dt, bias)
    return dt


@triton.jit
def _load_token(inputs, gates, strides, row, head, p, mine, cut: tl.constexpr, GATED: tl.constexpr):
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
        dt=_step_size(tl.load(inputs.dt + row * strides.dt[0] + head * strides.dt[1]), gates, head, GATED),
        A=tl.load(inputs.A + head),
        D=D,
        z=z,
    )


@triton.jit
def _store(out, y, token, t, m, end, cut: tl.constexpr):
    """Gate, and the one rounding of rows ``m``, which begin ``t`` rows into the program's."""
    if len(token.z.shape) == 1:
        z = rows_of(token.z, t, m, cut)
        y *= z / (1.0 + tl.exp(-z))
    tl.store(out + m, y.to(out.dtype.element_ty), mask=m < end)


@triton.jit
def _stored_kernel(
    out, state, inputs, slots, strides, rounding, gates, cut: tl.constexpr, DRAWN: tl.constexpr, GATED: tl.constexpr
):
    part, head, row = place(cut)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    p, end = span(part, cut)
    first = part * cut.ROWS + tl.arange(0, cut.M)
    tiles = first_tile(state + slot * strides.state[0] + head * strides.state[1], part, cut)
    if cut.TILES == 1:
        S = load_state(tiles, first, end, cut)
    token = _load_token(inputs, gates, strides, row, head, p, p < end, cut, GATED)
    group = head // cut.SHARE
    Bs = load_chunks(inputs.B + row * strides.B[0] + group * strides.B[1], cut)
    Cs = load_chunks(inputs.C + row * strides.C[0] + group * strides.C[1], cut)
    draws = None
    if DRAWN:
        draws = draws_of(rounding, slot, tl.load(rounding.steps + slot))
    decay = exp(token.A * token.dt)
    x = token.x.to(tl.float32)
    out += row * strides.out[0] + head * strides.out[1]
    for t in tl.range(cut.TILES, num_stages=cut.STAGES):
        m, tile = first + t * cut.M, tiles + t * cut.M * cut.ROW
        if cut.TILES > 1:
            S = load_state(tile, m, end, cut)
        xs = rows_of(x, t * cut.M, m, cut)
        y, moved = zeros(cut), ()
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            chunk = S[c].to(tl.float32) * decay + (token.dt * xs)[:, None] * Bs[c][None, :]
            y += chunk * Cs[c][None, :]
            moved = moved + (chunk,)
        store_state(tile, m, end, moved, head, draws, cut)
        _store(out, tl.sum(y, axis=1) + token.D * xs, token, t * cut.M, m, end, cut)


@triton.jit
def _replay_kernel(
    out,
    state,
    ring,
    inputs,
    slots,
    strides,
    ring_strides,
    rounding,
    gates,
    cut: tl.constexpr,
    DRAWN: tl.constexpr,
    GATED: tl.constexpr,
):
    part, head, row = place(cut)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    length, oldest = tl.load(ring.cursor + slot), tl.load(ring.origin + slot)
    p, end = span(part, cut)
    group, n = head // cut.SHARE, tl.arange(0, cut.PADDED)
    state += slot * strides.state[0] + head * strides.state[1]
    ring_x = ring.x + slot * ring_strides.x[0] + head * ring_strides.x[1]
    ring_B = ring.B + slot * ring_strides.B[0] + group * ring_strides.B[1]
    ring_dt = ring.dt + slot * ring_strides.dt[0] + head * ring_strides.dt[1]
    out += row * strides.out[0] + head * strides.out[1]

    # Asked for before anything is used: what needs no cursor comes first, and whether to flush is decided last.
    first = part * cut.ROWS + tl.arange(0, cut.M)
    tiles = first_tile(state, part, cut)
    S = ()
    if cut.TILES == 1:
        S = load_state(tiles, first, end, cut)
    token = _load_token(inputs, gates, strides, row, head, p, p < end, cut, GATED)
    Cs = load_chunks(inputs.C + row * strides.C[0] + group * strides.C[1], cut)
    entry, age, valid = ring_order(length, oldest, cut)
    dts = load_ring(ring_dt + entry * ring_strides.dt[2], valid, cut)
    if not cut.WALK:
        xs = load_ring_vectors(ring_x + entry * ring_strides.x[2], valid, p, end, cut)
        Bs = load_ring_vectors(ring_B + entry * ring_strides.B[2], valid, n, cut.N, cut)
    if length == cut.L - 1:
        draws = None
        if DRAWN:
            draws = draws_of(rounding, slot, arrive(ring.flushes + slot, cut.H * cut.PARTS))
        elif part == 0:
            if head == 0:
                tl.store(ring.flushes + slot, tl.load(ring.flushes + slot) + 1)
        if cut.WALK:
            Bs = load_ring_vectors(ring_B + entry * ring_strides.B[2], valid, n, cut.N, cut)
        _flush(
            out, state, ring_x + entry * ring_strides.x[2], Bs, dts, age, valid, token, head, draws, part, end, cut
        )  # fmt: skip
    else:
        decay, weight = _weights(dts, age, token)
        if not cut.WALK:
            weight *= tl.sum(Bs.to(tl.float32) * token.C[None, :], axis=1)
            added = tl.sum(weight[:, None] * xs.to(tl.float32), axis=0)
        else:
            added = _walk(ring_x, ring_B, ring_strides, weight, token.C, oldest, length, p, end, cut)
        added += (token.dt * tl.sum(token.B.to(tl.float32) * token.C, axis=0) + token.D) * token.x.to(tl.float32)
        last = (oldest + length) % cut.CAPACITY
        tl.store(ring_x + last * ring_strides.x[2] + p, token.x, mask=p < end)
        if part == 0:
            tl.store(ring_dt + last * ring_strides.dt[2], token.dt)
            if head % cut.SHARE == 0:
                tl.store(ring_B + last * ring_strides.B[2] + n, token.B, mask=n < cut.N)
        for t in tl.range(cut.TILES, num_stages=cut.STAGES):
            m = first + t * cut.M
            tile = S if cut.TILES == 1 else load_state(tiles + t * cut.M * cut.ROW, m, end, cut)
            SC = zeros(cut)
            for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
                SC += tile[c].to(tl.float32) * Cs[c][None, :]
            y = decay * tl.sum(SC, axis=1) + rows_of(added, t * cut.M, m, cut)
            _store(out, y, token, t * cut.M, m, end, cut)


@triton.jit
def _weights(dts, age, token):
    """What is left of the checkpoint, and of each ring token times its dt, once the current token has been applied."""
    decay = exp(token.A * (tl.sum(dts, axis=0) + token.dt))
    return decay, dts * exp(token.A * (sum_later(dts, age) + token.dt))


@triton.jit
def _walk(ring_x, ring_B, strides, weight, C, oldest, length, p, end, cut: tl.constexpr):
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
def _flush(
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
        _store(out, y, token, t * cut.FOLD, m, end, cut)
        narrow = rounded(moved, head * cut.P + m, 0, cut.N, draws, state.dtype.element_ty)
        tl.store(tiles + t * cut.FOLD * cut.ROW, narrow, mask=mask)
