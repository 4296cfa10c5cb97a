"""Speculative decoding with snapshots in Triton, what replay is compared with: a state is stored behind every token.

``states [S,T,H,P,N]`` holds of each slot a state for every token of its last window. The next window starts from that
of the last accepted token, so that rejecting tokens is reading another one; nothing else is committed. Program
``(row, head, part)`` owns some rows of one head's states, reads them once and writes them T times.

With KNOWN it is told beforehand how many tokens of this window will be accepted, which no engine can be, and writes
one state, behind the last of them: what is left when nothing but the other T - 1 writes is left out.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005, SIM108 (no unpacking into tuples, no name that only one branch defines)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.geometry import Geometry
from replayssm.kernels.triton.gates import Gates, discretize, log_decay, sigmoid
from replayssm.kernels.triton.launch import Cut, Launch
from replayssm.kernels.triton.tiles import (
    exp,
    first_tile,
    load_chunks,
    load_state,
    load_vector,
    place,
    rnorm,
    store_state,
    zeros,
)
from replayssm.kernels.triton.verify_arguments import Form, check_counts, check_delta, check_mamba2
from replayssm.kernels.triton.verify_launch import MAX_WINDOW
from replayssm.kernels.triton.verify_launch_table import snapshots_launch_for


class _Mamba2Strides(NamedTuple):
    """Strides of all axes but the last, which is contiguous; of ``dt [B,T,H]`` all; ``state [S,H,P,N]`` of a token."""

    state: Any
    out: Any
    x: Any
    B: Any
    C: Any
    dt: Any
    z: Any


class _DeltaStrides(NamedTuple):
    """As `_Mamba2Strides`; of ``beta [B,T,H]``, and of GDN's ``g [B,T,H]``, all."""

    state: Any
    out: Any
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


def snapshots_step(
    family: str,
    out: Tensor,
    states: Tensor,
    inputs: Any,
    slots: Tensor,
    accepted: Tensor,
    launch: Launch | None = None,
    *,
    gates: Gates | None = None,
    known: bool = False,
) -> None:
    """The recurrence for a window of T tokens a row, from the state behind token ``accepted`` of the last window.

    ``out [B,T,H,P]``, ``states [S,T,H,P,N]``, ``inputs`` with a T axis behind the rows, ``slots [B]`` int64, -1 for
    padding; ``accepted [B]`` int32 or int64, 1 to T, the count of the last window's tokens that were. Mutates ``out``
    and ``states``, each state rounded to its nearest number and computed on as it was before. Raises ``ValueError``,
    one line, on tensors it does not take; the counts are not checked.
    With ``gates`` dt, or g and beta, of the inputs are raw. ``known``: ``accepted`` are those of this window, and
    ``states [S,1,H,P,N]`` goes from before the window to behind the last of them.
    """
    if states.dim() != 5 or not 1 <= states.shape[1] <= MAX_WINDOW:
        raise ValueError(f"states has shape {list(states.shape)}; accepted: [S,T,H,P,N] with T from 1 to {MAX_WINDOW}")
    state, T = states[:, 0], inputs[0].shape[1]
    if known and not (states.shape[1] == 1 <= T <= MAX_WINDOW):
        told = f"{states.shape[1]} states a slot and {T} tokens a row"
        raise ValueError(f"known got {told}; accepted: 1 state, and 1 to {MAX_WINDOW} tokens")
    if not known and states.shape[1] != T:
        raise ValueError(f"inputs hold {T} tokens a row; accepted: {states.shape[1]}, the states of a slot")
    rows, (_, H, P, N), groups = len(slots), state.shape, inputs[1].shape[2]
    check_counts("accepted", accepted, rows, states.device)
    geometry = Geometry(family, H, groups, P, N)
    launch = launch or snapshots_launch_for(geometry, rows, states)
    cut = Cut.of(geometry, launch, state)
    strides: _Mamba2Strides | _DeltaStrides
    common = {"T": T, "KNOWN": known, "num_warps": launch.warps, "maxnreg": launch.registers}
    if family == "mamba2":
        strides = _Mamba2Strides(**check_mamba2(out, state, inputs, slots, gates))
        if rows:
            _mamba2_kernel[(cut.PARTS * H * rows,)](
                out,
                states,
                inputs,
                slots,
                accepted,
                gates,
                strides,
                states.stride(1),
                cut,
                GATED=gates is not None,
                **common,
            )
        return
    strides = _DeltaStrides(**check_delta(family, out, state, inputs, slots, gates))
    if rows:
        _delta_kernel[(cut.PARTS * H * rows,)](
            out,
            states,
            inputs,
            slots,
            accepted,
            gates,
            strides,
            states.stride(1),
            N**-0.5,
            cut,
            Form.of(family, gates),
            **common,
        )


@triton.jit
def _mamba2_kernel(
    out,
    states,
    inputs,
    slots,
    accepted,
    gates,
    strides,
    snapshot,
    cut: tl.constexpr,
    GATED: tl.constexpr,
    T: tl.constexpr,
    KNOWN: tl.constexpr,
):
    part, head, row = place(cut)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    group, end = head // cut.SHARE, tl.minimum(cut.P, (part + 1) * cut.ROWS)
    states += slot * strides.state[0] + head * strides.state[1]
    last = tl.load(accepted + row).to(tl.int64) - 1
    tiles = first_tile(states, part, cut)
    A, D = tl.load(inputs.A + head), 0.0
    if inputs.D is not None:
        D = tl.load(inputs.D + head)
    for i in tl.range(cut.TILES, num_stages=cut.STAGES):
        m, tile = part * cut.ROWS + i * cut.M + tl.arange(0, cut.M), tiles + i * cut.M * cut.ROW
        first = tile
        if not KNOWN:
            first += last * snapshot
        S, state = load_state(first, m, end, cut), ()
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            state = state + (S[c].to(tl.float32),)
        for t in tl.static_range(T):
            Bs = load_chunks(inputs.B + row * strides.B[0] + t * strides.B[1] + group * strides.B[2], cut)
            Cs = load_chunks(inputs.C + row * strides.C[0] + t * strides.C[1] + group * strides.C[2], cut)
            x_token = inputs.x + row * strides.x[0] + t * strides.x[1] + head * strides.x[2]
            x = tl.load(x_token + m, mask=m < end, other=0.0).to(tl.float32)
            dt = tl.load(inputs.dt + row * strides.dt[0] + t * strides.dt[1] + head * strides.dt[2])
            if GATED:
                bias = 0.0
                if gates.dt_bias is not None:
                    bias = tl.load(gates.dt_bias + head).to(tl.float32)
                dt = discretize(dt, bias)
            decay, y, moved = exp(A * dt), zeros(cut), ()
            for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
                chunk = state[c] * decay + (dt * x)[:, None] * Bs[c][None, :]
                y += chunk * Cs[c][None, :]
                moved = moved + (chunk,)
            state = moved
            if KNOWN:
                store_state(tile, m, tl.where(t == last, end, 0), state, head, None, cut)
            else:
                store_state(tile + t * snapshot, m, end, state, head, None, cut)
            total = tl.sum(y, axis=1) + D * x
            if inputs.z is not None:
                z_token = inputs.z + row * strides.z[0] + t * strides.z[1] + head * strides.z[2]
                z = tl.load(z_token + m, mask=m < end, other=0.0).to(tl.float32)
                total *= z / (1.0 + tl.exp(-z))
            y_token = out + row * strides.out[0] + t * strides.out[1] + head * strides.out[2]
            tl.store(y_token + m, total.to(out.dtype.element_ty), mask=m < end)


@triton.jit
def _delta_kernel(
    out,
    states,
    inputs,
    slots,
    accepted,
    gates,
    strides,
    snapshot,
    scale,
    cut: tl.constexpr,
    form: tl.constexpr,
    T: tl.constexpr,
    KNOWN: tl.constexpr,
):
    part, head, row = place(cut)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    group, end, n = head // cut.SHARE, tl.minimum(cut.P, (part + 1) * cut.ROWS), tl.arange(0, cut.PADDED)
    states += slot * strides.state[0] + head * strides.state[1]
    last = tl.load(accepted + row).to(tl.int64) - 1
    tiles = first_tile(states, part, cut)
    for i in tl.range(cut.TILES, num_stages=cut.STAGES):
        m, tile = part * cut.ROWS + i * cut.M + tl.arange(0, cut.M), tiles + i * cut.M * cut.ROW
        first = tile
        if not KNOWN:
            first += last * snapshot
        S, state = load_state(first, m, end, cut), ()
        for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
            state = state + (S[c].to(tl.float32),)
        for t in tl.static_range(T):
            q_token = inputs.q + row * strides.q[0] + t * strides.q[1] + group * strides.q[2]
            k_token = inputs.k + row * strides.k[0] + t * strides.k[1] + group * strides.k[2]
            g_token = inputs.g + row * strides.g[0] + t * strides.g[1] + head * strides.g[2]
            qs, ks = load_chunks(q_token, cut), load_chunks(k_token, cut)
            if form.CHANNELS:
                gs = load_chunks(g_token, cut)
                if form.GATED:
                    biases, raw, gs = load_chunks(gates.dt_bias + head * cut.N, cut), gs, ()
                    for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
                        g = log_decay(raw[c], tl.load(gates.A_log + head), biases[c], form.LOWER_BOUND)
                        gs = gs + (g,)
            else:
                g = tl.load(g_token)
                if form.GATED:
                    g = log_decay(g, tl.load(gates.A_log + head), tl.load(gates.dt_bias + head).to(tl.float32))
                decay = exp(g)
            q, k = load_vector(q_token, n, cut), load_vector(k_token, n, cut)
            q_scale, k_rnorm = rnorm(tl.sum(q * q, axis=0)) * scale, rnorm(tl.sum(k * k, axis=0))
            qk = tl.sum(q * k, axis=0) * (k_rnorm * q_scale)
            v_token = inputs.v + row * strides.v[0] + t * strides.v[1] + head * strides.v[2]
            v = tl.load(v_token + m, mask=m < end, other=0.0).to(tl.float32)
            beta = tl.load(inputs.beta + row * strides.beta[0] + t * strides.beta[1] + head * strides.beta[2])
            if form.GATED:
                beta = sigmoid(beta)
            Sk, Sq, decayed, moved = zeros(cut), zeros(cut), (), ()
            for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
                if form.CHANNELS:
                    chunk = state[c] * exp(gs[c])[None, :]
                else:
                    chunk = state[c] * decay
                Sk += chunk * ks[c][None, :]
                Sq += chunk * qs[c][None, :]
                decayed = decayed + (chunk,)
            d = beta * (v - tl.sum(Sk, axis=1) * k_rnorm)
            for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
                moved = moved + (decayed[c] + (d * k_rnorm)[:, None] * ks[c][None, :],)
            state = moved
            if KNOWN:
                store_state(tile, m, tl.where(t == last, end, 0), state, head, None, cut)
            else:
                store_state(tile + t * snapshot, m, end, state, head, None, cut)
            o = tl.sum(Sq, axis=1) * q_scale + d * qk
            o_token = out + row * strides.out[0] + t * strides.out[1] + head * strides.out[2]
            tl.store(o_token + m, o.to(out.dtype.element_ty), mask=m < end)
