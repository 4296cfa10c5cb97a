"""Mamba-2 in Triton: the stored-state step and the replay step, one launch each; `mamba2_ahead` has it in two.

Program ``(row, head, part)`` owns some rows of one head's state. All heads of a group need B_j . C over the ring; each
program computes these itself, from a ring that the group's programs find in L2.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005 (Triton has no unpacking into tuples; a condition is known to the compiler, or is not)

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
from replayssm.kernels.triton.gates import Gates
from replayssm.kernels.triton.launch import Cut, Launch
from replayssm.kernels.triton.launch_table import launch_for
from replayssm.kernels.triton.mamba2_ahead import launch_both
from replayssm.kernels.triton.mamba2_parts import fold_row, load_token, read, store, walk, weights_of
from replayssm.kernels.triton.rounding import draws_of
from replayssm.kernels.triton.tiles import (
    exp,
    first_tile,
    load_chunks,
    load_ring,
    load_ring_vectors,
    load_state,
    place,
    ring_order,
    rows_of,
    span,
    store_state,
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
    ring = _Ring(**layer.ring, cursor=layer.cursor, origin=layer.origin, flushes=layer.flushes)
    if rows and launch.ahead:
        launch_both(out, layer, ring, inputs, slots, strides, ring_strides, rounding, gates, geometry, launch)
    elif rows:
        cut = Cut.of(geometry, launch, layer.state, layer)
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
    token = load_token(inputs, gates, strides, row, head, p, p < end, cut, GATED)
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
        store(out, tl.sum(y, axis=1) + token.D * xs, token.z, t * cut.M, m, end, cut)


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
    S = ()
    if cut.TILES == 1:
        S = load_state(first_tile(state, part, cut), part * cut.ROWS + tl.arange(0, cut.M), end, cut)
    token = load_token(inputs, gates, strides, row, head, p, p < end, cut, GATED)
    Cs = load_chunks(inputs.C + row * strides.C[0] + group * strides.C[1], cut)
    entry, age, valid = ring_order(length, oldest, cut)
    dts = load_ring(ring_dt + entry * ring_strides.dt[2], valid, cut)
    if not cut.WALK:
        xs = load_ring_vectors(ring_x + entry * ring_strides.x[2], valid, p, end, cut)
        Bs = load_ring_vectors(ring_B + entry * ring_strides.B[2], valid, n, cut.N, cut)
    if length == cut.L - 1:
        if cut.WALK:
            Bs = load_ring_vectors(ring_B + entry * ring_strides.B[2], valid, n, cut.N, cut)
        fold_row(
            out, state, ring, ring_x + entry * ring_strides.x[2], Bs, dts, age, valid, token, rounding, slot, head,
            part, end, cut, DRAWN,
        )  # fmt: skip
    else:
        decay, weight = weights_of(dts, age, token.dt, token.A)
        if not cut.WALK:
            weight *= tl.sum(Bs.to(tl.float32) * token.C[None, :], axis=1)
            added = tl.sum(weight[:, None] * xs.to(tl.float32), axis=0)
        else:
            added = walk(ring_x, ring_B, ring_strides, weight, token.C, oldest, length, p, end, cut)
        added += (token.dt * tl.sum(token.B.to(tl.float32) * token.C, axis=0) + token.D) * token.x.to(tl.float32)
        last = (oldest + length) % cut.CAPACITY
        tl.store(ring_x + last * ring_strides.x[2] + p, token.x, mask=p < end)
        if part == 0:
            tl.store(ring_dt + last * ring_strides.dt[2], token.dt)
            if head % cut.SHARE == 0:
                tl.store(ring_B + last * ring_strides.B[2] + n, token.B, mask=n < cut.N)
        read(out, state, S, Cs, decay, added, token.z, part, end, cut)
