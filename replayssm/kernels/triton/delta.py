"""GDN and KDA in Triton: stored-state and replay step, one launch each; `delta_ahead` has the latter in two.

The two differ in the decay: a scalar a value head, or, ``CHANNELS``, one a key channel, which then belongs to the key
side of every product. Program ``(row, head, part)`` owns some rows of one head's state. S.q and S.k come from one pass
over them, with q and k as they arrived; norms and scalar decays are applied afterwards. The products of the ring's
keys with q and k are computed by every program of a head anew.

A ring with v and beta is folded from these: the system that gives d, of the ring's tokens, is formed once a program and
solved by substitution for each tile of the checkpoint.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005, SIM108 (no unpacking into tuples, no condition both of compiler and device)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
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
from replayssm.kernels.triton.delta_ahead import launch_both
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
    tokens_of,
    walk,
)
from replayssm.kernels.triton.gates import Gates
from replayssm.kernels.triton.launch import Cut, Launch
from replayssm.kernels.triton.launch_table import launch_for
from replayssm.kernels.triton.rounding import draws_of
from replayssm.kernels.triton.tiles import (
    exp,
    first_tile,
    load_chunks,
    load_ring_vectors,
    load_state,
    part_of,
    place,
    ring_order,
    rnorm,
    rows_of,
    span,
    store_state,
    zeros,
)
from replayssm.recurrence.gdn import Inputs

DECAYS = (torch.float32, torch.bfloat16)
"""Of KDA's ring; all sums of them are float32."""


class _Ring(NamedTuple):
    """Tensors of a `CacheLayer` that a replay step needs besides the state; v and beta for folds from raw inputs."""

    k: Any
    k_rnorm: Any
    d: Any
    g: Any
    cursor: Any
    origin: Any
    flushes: Any
    v: Any = None
    beta: Any = None


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
    v: Any = ()
    beta: Any = ()


@dataclass(frozen=True)
class _Form:
    """What a kernel is compiled for, besides a `Cut`."""

    CHANNELS: bool
    """One decay a key channel."""
    DRAWN: bool
    """Rounded stochastically."""
    GATED: bool
    """Gates from raw inputs; KDA's with a LOWER_BOUND or without."""
    LOWER_BOUND: float | None

    @classmethod
    def of(cls, family: str, rounding: Rounding | None, gates: Gates | None) -> _Form:
        bound = None if gates is None or gates.lower_bound is None else float(gates.lower_bound)
        return cls(family == "kda", rounding is not None, gates is not None, bound)


def stored_step(
    family: str,
    out: Tensor,
    state: Tensor,
    inputs: Inputs,
    slots: Tensor,
    launch: Launch | None,
    rounding: Rounding | None,
    gates: Gates | None,
) -> None:
    """The recurrence for one token a row, in place, of ``family`` gdn or kda; see `replayssm.kernels.triton.gdn`."""
    check_rounding(rounding, state, stored=True)
    strides, geometry = _check(family, out, state, inputs, slots, gates)
    form = _Form.of(family, rounding, gates)
    rows = len(slots)
    launch = launch or launch_for(geometry, rows, state)
    cut = Cut.of(geometry, launch, state)
    if rows:
        _stored_kernel[(cut.PARTS * cut.H * rows,)](
            out,
            state,
            inputs,
            slots,
            strides,
            geometry.state_dim**-0.5,
            rounding,
            gates,
            cut,
            form,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )


def replay_step(
    family: str,
    out: Tensor,
    layer: CacheLayer,
    inputs: Inputs,
    slots: Tensor,
    launch: Launch | None,
    rounding: Rounding | None,
    gates: Gates | None,
) -> None:
    """Standard decoding for one token a row of ``family`` gdn or kda; see `replayssm.kernels.triton.gdn`."""
    check_layer(layer, family)
    check_rounding(rounding, layer.state, stored=False)
    strides, geometry = _check(family, out, layer.state, inputs, slots, gates)
    form = _Form.of(family, rounding, gates)
    ring_strides = _check_ring(layer, geometry, inputs)
    rows = len(slots)
    launch = launch or launch_for(geometry, rows, layer.state, layer.interval_length)
    ring = _Ring(**layer.ring, cursor=layer.cursor, origin=layer.origin, flushes=layer.flushes)
    if rows and launch.ahead:
        launch_both(
            out, layer, ring, inputs, slots, strides, ring_strides, rounding, gates, geometry, launch, form
        )  # fmt: skip
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
            geometry.state_dim**-0.5,
            rounding,
            gates,
            cut,
            form,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )


def _check(
    family: str, out: Tensor, state: Tensor, inputs: Inputs, slots: Tensor, gates: Gates | None
) -> tuple[_Strides, Geometry]:
    _, H, V, K = state.shape
    rows, HK = inputs.k.shape[:2]
    kind = (inputs.v.dtype,)
    decays = (rows, H, K) if family == "kda" else (rows, H)
    strides = _Strides(
        state=check("state", state, tuple(state.shape), STATES),
        out=check("out", out, (rows, H, V), INPUTS),
        q=check("q", inputs.q, (rows, HK, K), kind),
        k=check("k", inputs.k, (rows, HK, K), kind),
        v=check("v", inputs.v, (rows, H, V), INPUTS),
        g=(
            *check("g", inputs.g, decays, INPUTS if gates else WIDE, scalars=len(decays) == 2),
            *[1] * (len(decays) - 2),
        ),
        beta=check("beta", inputs.beta, (rows, H), INPUTS if gates else WIDE, scalars=True),
    )
    if gates:
        check_parameter("gates.dt_bias", gates.dt_bias, decays[1:], state.device)
        check_parameter("gates.A_log", gates.A_log, (H,), state.device)
        if family == "gdn" and gates.lower_bound is not None:
            raise ValueError(f"gates.lower_bound={gates.lower_bound} is for KDA; accepted for GDN: None")
    check_slots(slots, rows)
    check_place({"out": out, "slots": slots, **inputs._asdict()}, state.device)
    return strides, Geometry(family, H, HK, V, K)


def _check_ring(layer: CacheLayer, geometry: Geometry, inputs: Inputs) -> _RingStrides:
    slots, R, ring, g = len(layer.state), layer.capacity, layer.ring, geometry
    channels = (g.state_dim,) if g.family == "kda" else ()
    raw: dict[str, Any] = {}
    if "v" in ring:
        raw["v"] = check("ring v", ring["v"], (slots, g.heads, R, g.head_dim), (inputs.v.dtype,))
        raw["beta"] = check("ring beta", ring["beta"], (slots, g.heads, R), WIDE, scalars=True)
    return _RingStrides(
        k=check("ring k", ring["k"], (slots, g.groups, R, g.state_dim), (inputs.k.dtype,)),
        k_rnorm=check("ring k_rnorm", ring["k_rnorm"], (slots, g.groups, R), WIDE, scalars=True),
        d=check("ring d", ring["d"], (slots, g.heads, R, g.head_dim), WIDE),
        g=check("ring g", ring["g"], (slots, g.heads, R, *channels), DECAYS if channels else WIDE, not channels),
        **raw,
    )


@triton.jit
def _stored_kernel(out, state, inputs, slots, strides, scale, rounding, gates, cut: tl.constexpr, form: tl.constexpr):
    part, head, row = place(cut)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    p, end = span(part, cut)
    first = part * cut.ROWS + tl.arange(0, cut.M)
    tiles = first_tile(state + slot * strides.state[0] + head * strides.state[1], part, cut)
    if cut.TILES == 1:
        S = load_state(tiles, first, end, cut)
    token = load_token(inputs, gates, strides, row, head, p, p < end, cut, form)
    group = head // cut.SHARE
    qs = load_chunks(inputs.q + row * strides.q[0] + group * strides.q[1], cut)
    ks = load_chunks(inputs.k + row * strides.k[0] + group * strides.k[1], cut)
    if form.CHANNELS:
        gs = ()
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            columns = c * cut.WIDTH + tl.arange(0, cut.WIDTH)
            gs = gs + (log_decays(inputs, gates, strides, row, head, columns, cut, form),)
    else:
        decay = exp(token.g)
    k = token.k.to(tl.float32)
    q_scale, k_rnorm = rnorm(tl.sum(token.q * token.q, axis=0)) * scale, rnorm(tl.sum(k * k, axis=0))
    qk = tl.sum(token.q * k, axis=0) * (k_rnorm * q_scale)
    draws = None
    if form.DRAWN:
        draws = draws_of(rounding, slot, tl.load(rounding.steps + slot))
    out += row * strides.out[0] + head * strides.out[1]
    for t in tl.range(cut.TILES, num_stages=cut.STAGES):
        m, tile = first + t * cut.M, tiles + t * cut.M * cut.ROW
        if cut.TILES > 1:
            S = load_state(tile, m, end, cut)
        Sk, Sq, decayed, moved = zeros(cut), zeros(cut), (), ()
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            if form.CHANNELS:
                chunk = S[c].to(tl.float32) * exp(gs[c])[None, :]
            else:
                chunk = S[c].to(tl.float32) * decay
            Sk += chunk * ks[c][None, :]
            Sq += chunk * qs[c][None, :]
            decayed = decayed + (chunk,)
        d = token.beta * (rows_of(token.v, t * cut.M, m, cut) - tl.sum(Sk, axis=1) * k_rnorm)
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            moved = moved + (decayed[c] + (d * k_rnorm)[:, None] * ks[c][None, :],)
        store_state(tile, m, end, moved, head, draws, cut)
        o = tl.sum(Sq, axis=1) * q_scale + d * qk
        tl.store(out + m, o.to(out.dtype.element_ty), mask=m < end)


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
    rounding,
    gates,
    cut: tl.constexpr,
    form: tl.constexpr,
):
    part, head, row = place(cut)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    length, oldest = tl.load(ring.cursor + slot), tl.load(ring.origin + slot)
    p, end = span(part, cut)
    group = head // cut.SHARE
    state += slot * strides.state[0] + head * strides.state[1]
    mine = tokens_of(ring, ring_strides, slot, head, length, oldest, cut)
    out += row * strides.out[0] + head * strides.out[1]

    # Asked for before anything is used: what needs no cursor comes first, and whether to flush is decided last.
    S = ()
    if cut.TILES == 1:
        S = load_state(first_tile(state, part, cut), part * cut.ROWS + tl.arange(0, cut.M), end, cut)
    token = load_token(inputs, gates, strides, row, head, p, p < end, cut, form)
    q_token = inputs.q + row * strides.q[0] + group * strides.q[1]
    k_token = inputs.k + row * strides.k[0] + group * strides.k[1]
    qs, ks = load_chunks(q_token, cut), load_chunks(k_token, cut)
    entry, age, valid = ring_order(length, oldest, cut)
    rnorms, gs, weight, decay = ring_weights(mine, token.g, entry, age, valid, cut, form)
    k = token.k.to(tl.float32)
    k_rnorm = rnorm(tl.sum(k * k, axis=0))
    q_scale = rnorm(tl.sum(token.q * token.q, axis=0)) * scale

    if not cut.WALK:
        d_old = load_ring_vectors(mine.d + entry * ring_strides.d[2], valid, p, end, cut)
        keys = load_keys(mine, token.g, entry, valid, cut, form)
    if length == cut.L - 1:
        if cut.WALK:
            keys = load_keys(mine, token.g, entry, valid, cut, form)
        fold_row(
            out, state, ring, mine, token, rnorms, gs, weight, decay, keys, entry, valid, q_scale, k_rnorm, rounding,
            slot, head, part, end, cut, form,
        )  # fmt: skip
    else:
        q_now, k_now = (), ()
        if not cut.WALK:
            kq, kk = products_with(keys, token.q, k, form)
            added_q = tl.sum((weight * kq)[:, None] * d_old, axis=0)
            added_k = tl.sum((weight * kk)[:, None] * d_old, axis=0)
        else:
            added_q, added_k, since = walk(mine, weight, token, k, p, end, cut, form)
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            if form.CHANNELS:
                columns = c * cut.WIDTH + tl.arange(0, cut.WIDTH)
                if not cut.WALK:
                    g_now = log_decays(inputs, gates, strides, row, head, columns, cut, form)
                    kept = exp(decay_since(mine, g_now, columns, cut))
                else:
                    kept = exp(part_of(since, columns, cut))
                q_now, k_now = q_now + (qs[c] * kept,), k_now + (ks[c] * kept,)
            else:
                q_now, k_now = q_now + (qs[c],), k_now + (ks[c],)
        last = (oldest + length) % cut.CAPACITY
        append_values(ring, mine, token.v, slot, last, head, p, end)
        if part == 0:
            append_keys(ring, mine, token.k, token.g, token.beta, k_rnorm, slot, last, head, cut, form)
        qk = tl.sum(token.q * k, axis=0) * (k_rnorm * q_scale)
        read(
            out, mine.d + last * ring_strides.d[2], state, S, q_now, k_now, decay * q_scale, decay * k_rnorm, qk,
            added_q * q_scale, token.v - added_k * k_rnorm, token.beta, part, end, cut,
        )  # fmt: skip
