"""GDN and KDA in Triton: the stored-state step and the replay step, one launch each.

The two differ in the decay: a scalar a value head, or, ``CHANNELS``, one a key channel, which then belongs to the key
side of every product. Program ``(row, head, part)`` owns some rows of one head's state. S.q and S.k come from one pass
over them, with q and k as they arrived; norms and scalar decays are applied afterwards. The products of the ring's
keys with q and k are computed by every program of a head anew.

A ring with v and beta is folded from these: the system that gives d, of the ring's tokens, is formed once a program and
solved by substitution for each tile of the checkpoint.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005, SIM102, SIM108 (no unpacking into tuples, no condition both of compiler and device)

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
from replayssm.kernels.triton.gates import Gates, log_decay, sigmoid
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
    part_of,
    place,
    product,
    ring_order,
    rnorm,
    rows_of,
    span,
    store_state,
    sum_later,
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
    v: Any = None
    beta: Any = None


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


class _Tokens(NamedTuple):
    """One row's and head's ring: pointers to each tensor's first entry, strides of the rings, cursor and origin."""

    k: Any
    k_rnorm: Any
    d: Any
    g: Any
    strides: Any
    oldest: Any
    length: Any


class _Raw(NamedTuple):
    """What the fold from raw inputs takes to find the ring's d again, see `_corrected`."""

    v: Any
    """Pointers ``[RING]`` to the tokens' values."""
    beta: Any
    keys: Any
    """``[PADDED,RING]``, by which the checkpoint is multiplied, and ``seen [RING]``, by which that is."""
    seen: Any
    system: Any
    """``[r,s]``: what of token r's d token s sees, times its beta; zero unless r < s."""


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
    cut = Cut.of(geometry, launch, layer.state, layer)
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
def _log_decays(inputs, gates, strides, row, head, n, cut: tl.constexpr, form: tl.constexpr):
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
def _strength(inputs, strides, row, head, form: tl.constexpr):
    """A token's beta."""
    beta = tl.load(inputs.beta + row * strides.beta[0] + head * strides.beta[1])
    if form.GATED:
        beta = sigmoid(beta)
    return beta


@triton.jit
def _load_token(inputs, gates, strides, row, head, p, mine, cut: tl.constexpr, form: tl.constexpr):
    """One row's and head's inputs in float32, v of the rows ``p`` and zero where not ``mine``; k as it arrived."""
    group, n = head // cut.SHARE, tl.arange(0, cut.PADDED)
    g = _log_decays(inputs, gates, strides, row, head, n, cut, form)
    return Inputs(
        q=load_vector(inputs.q + row * strides.q[0] + group * strides.q[1], n, cut),
        k=tl.load(inputs.k + row * strides.k[0] + group * strides.k[1] + n, mask=n < cut.N, other=0.0),
        v=tl.load(inputs.v + row * strides.v[0] + head * strides.v[1] + p, mask=mine, other=0.0).to(tl.float32),
        g=g,
        beta=_strength(inputs, strides, row, head, form),
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
    token = _load_token(inputs, gates, strides, row, head, p, p < end, cut, form)
    group = head // cut.SHARE
    qs = load_chunks(inputs.q + row * strides.q[0] + group * strides.q[1], cut)
    ks = load_chunks(inputs.k + row * strides.k[0] + group * strides.k[1], cut)
    if form.CHANNELS:
        gs = ()
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            columns = c * cut.WIDTH + tl.arange(0, cut.WIDTH)
            gs = gs + (_log_decays(inputs, gates, strides, row, head, columns, cut, form),)
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
    group, n = head // cut.SHARE, tl.arange(0, cut.PADDED)
    state += slot * strides.state[0] + head * strides.state[1]
    mine = _Tokens(
        k=ring.k + slot * ring_strides.k[0] + group * ring_strides.k[1],
        k_rnorm=ring.k_rnorm + slot * ring_strides.k_rnorm[0] + group * ring_strides.k_rnorm[1],
        d=ring.d + slot * ring_strides.d[0] + head * ring_strides.d[1],
        g=ring.g + slot * ring_strides.g[0] + head * ring_strides.g[1],
        strides=ring_strides,
        oldest=oldest,
        length=length,
    )
    out += row * strides.out[0] + head * strides.out[1]

    # Asked for before anything is used: what needs no cursor comes first, and whether to flush is decided last.
    S = ()
    if cut.TILES == 1:
        S = load_state(first_tile(state, part, cut), part * cut.ROWS + tl.arange(0, cut.M), end, cut)
    token = _load_token(inputs, gates, strides, row, head, p, p < end, cut, form)
    q_token = inputs.q + row * strides.q[0] + group * strides.q[1]
    k_token = inputs.k + row * strides.k[0] + group * strides.k[1]
    qs, ks = load_chunks(q_token, cut), load_chunks(k_token, cut)
    entry, age, valid = ring_order(length, oldest, cut)
    rnorms = load_ring(mine.k_rnorm + entry * ring_strides.k_rnorm[2], valid, cut)
    k = token.k.to(tl.float32)
    k_rnorm = rnorm(tl.sum(k * k, axis=0))
    q_scale = rnorm(tl.sum(token.q * token.q, axis=0)) * scale

    # What each ring token still weighs, and the checkpoint; decays of channels go into the keys.
    if form.CHANNELS:
        weight, decay = rnorms, 1.0
    else:
        gs = load_ring(mine.g + entry * ring_strides.g[2], valid, cut)
        weight = tl.where(valid, rnorms * exp(sum_later(gs, age) + token.g), 0.0)
        decay = exp(tl.sum(gs, axis=0) + token.g)
    if not cut.WALK:
        d_old = load_ring_vectors(mine.d + entry * ring_strides.d[2], valid, p, end, cut)
        keys = _keys(mine, token, entry, valid, cut, form)
    if length == cut.L - 1:
        if cut.WALK:
            keys = _keys(mine, token, entry, valid, cut, form)
        if form.CHANNELS:
            ring_keys, decays = tl.trans(keys), exp(_since(mine, token.g, n, cut))[None, :]
        else:
            ring_keys, decays = keys, decay
        raw = None
        if ring.v is not None:
            ring_v = ring.v + slot * ring_strides.v[0] + head * ring_strides.v[1] + entry * ring_strides.v[2]
            ring_beta = ring.beta + slot * ring_strides.beta[0] + head * ring_strides.beta[1]
            beta = load_ring(ring_beta + entry * ring_strides.beta[2], valid, cut)
            if form.CHANNELS:
                raw_keys, system = _channel_system(mine, rnorms, cut)
                seen = rnorms
            else:
                raw_keys, system = tl.trans(keys), _scalar_system(keys, gs, rnorms, cut)
                seen = rnorms * exp(_sum_earlier(gs, cut))
            raw = _Raw(ring_v, beta, raw_keys, seen, system * beta[None, :])
        draws = None
        if form.DRAWN:
            draws = draws_of(rounding, slot, arrive(ring.flushes + slot, cut.H * cut.PARTS))
        elif part == 0:
            if head == 0:
                tl.store(ring.flushes + slot, tl.load(ring.flushes + slot) + 1)
        _flush(
            out, state, mine.d + entry * ring_strides.d[2], valid, weight, ring_keys, decays, token, q_scale, k_rnorm,
            raw, head, draws, part, end, cut,
        )  # fmt: skip
    else:
        q_now, k_now = (), ()
        if not cut.WALK:
            if form.CHANNELS:
                kq, kk = tl.sum(keys * token.q[:, None], axis=0), tl.sum(keys * k[:, None], axis=0)
            else:
                wide = keys.to(tl.float32)
                kq, kk = tl.sum(wide * token.q[None, :], axis=1), tl.sum(wide * k[None, :], axis=1)
            added_q = tl.sum((weight * kq)[:, None] * d_old, axis=0)
            added_k = tl.sum((weight * kk)[:, None] * d_old, axis=0)
        else:
            added_q, added_k, since = _walk(mine, weight, token, k, p, end, cut, form)
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            if form.CHANNELS:
                columns = c * cut.WIDTH + tl.arange(0, cut.WIDTH)
                if not cut.WALK:
                    g_now = _log_decays(inputs, gates, strides, row, head, columns, cut, form)
                    kept = exp(_since(mine, g_now, columns, cut))
                else:
                    kept = exp(part_of(since, columns, cut))
                q_now, k_now = q_now + (qs[c] * kept,), k_now + (ks[c] * kept,)
            else:
                q_now, k_now = q_now + (qs[c],), k_now + (ks[c],)
        last = (oldest + length) % cut.CAPACITY
        _append(ring, mine, token, k_rnorm, slot, last, head, part, p, end, cut, form)
        qk = tl.sum(token.q * k, axis=0) * (k_rnorm * q_scale)
        _read(
            out, mine.d + last * ring_strides.d[2], state, S, q_now, k_now, decay * q_scale, decay * k_rnorm, qk,
            added_q * q_scale, token.v - added_k * k_rnorm, token.beta, part, end, cut,
        )  # fmt: skip


@triton.jit
def _keys(mine, token, entry, valid, cut: tl.constexpr, form: tl.constexpr):
    """The ring's keys: ``[RING,PADDED]`` as they arrived, or KDA's ``[PADDED,RING]`` times their decay since then."""
    n = tl.arange(0, cut.PADDED)
    if form.CHANNELS:
        pointers = mine.k + entry[None, :] * mine.strides.k[2] + n[:, None]
        keys = tl.load(pointers, mask=valid[None, :] & (n < cut.N)[:, None], other=0.0).to(tl.float32)
        keys *= tl.exp(_later(mine, token.g, n, cut))
    else:
        keys = load_ring_vectors(mine.k + entry * mine.strides.k[2], valid, n, cut.N, cut)
    return keys


@triton.jit
def _walk(mine, weight, token, k, p, end, cut: tl.constexpr, form: tl.constexpr):
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
def _append(ring, mine, token, k_rnorm, slot, entry, head, part, p, end, cut: tl.constexpr, form: tl.constexpr):
    """The token becomes the ring's newest; its d is stored where it is found."""
    n = tl.arange(0, cut.PADDED)
    if ring.v is not None:
        v = ring.v + slot * mine.strides.v[0] + head * mine.strides.v[1] + entry * mine.strides.v[2]
        tl.store(v + p, token.v.to(ring.v.dtype.element_ty), mask=p < end)
    if part == 0:
        if ring.v is not None:
            beta = ring.beta + slot * mine.strides.beta[0] + head * mine.strides.beta[1]
            tl.store(beta + entry * mine.strides.beta[2], token.beta)
        if form.CHANNELS:
            g = token.g.to(mine.g.dtype.element_ty)
            tl.store(mine.g + entry * mine.strides.g[2] + n, g, mask=n < cut.N)
        else:
            tl.store(mine.g + entry * mine.strides.g[2], token.g)
        if head % cut.SHARE == 0:
            tl.store(mine.k + entry * mine.strides.k[2] + n, token.k, mask=n < cut.N)
            tl.store(mine.k_rnorm + entry * mine.strides.k_rnorm[2], k_rnorm)


@triton.jit
def _read(
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
def _flush(
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
def _channel_system(mine, rnorms, cut: tl.constexpr):
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
def _scalar_system(keys, g, rnorms, cut: tl.constexpr):
    """GDN's ``[r,s]`` of `_channel_system`, for ``keys [RING,PADDED]``; sums of log decays by a product, as in
    `_later`."""
    j = tl.arange(0, cut.RING)
    behind = tl.where(j[None, :] > j[:, None], g[None, :], 0.0)
    between = product(behind, tl.where(j[:, None] <= j[None, :], 1.0, 0.0).to(tl.bfloat16))
    products = product(keys.to(tl.float32), tl.trans(keys)) * exp(between)
    return tl.where(j[:, None] < j[None, :], products * rnorms[:, None] * rnorms[None, :], 0.0)


@triton.jit
def _sum_earlier(g, cut: tl.constexpr):
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
def _since(mine, g_now, n, cut: tl.constexpr):
    """``[n]``: the checkpoint's log decay up to and with the current token."""
    j = tl.arange(0, cut.RING)
    pointers = mine.g + ((mine.oldest + j) % cut.CAPACITY)[:, None] * mine.strides.g[2] + n[None, :]
    gs = tl.load(pointers, mask=(j < mine.length)[:, None] & (n < cut.N)[None, :], other=0.0)
    return tl.sum(gs.to(tl.float32), axis=0) + g_now
