"""What lies between a model's products, one launch each: norms with their gates, activations, a convolution's step.

Every function has its plain form in `replayssm.models`. Computed in float32 and rounded where that form rounds a value
that it keeps. Nothing waits for the device, so that all of it can be captured in a CUDA graph.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005 (Triton has no unpacking into tuples)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels.triton.gates import sigmoid
from replayssm.kernels.triton.launch import power_of_two

BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """``x [...,W]`` over its root mean square, scaled by ``weight [W] + offset``."""
    return _norm(x, None, weight, eps, offset)


def add_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """``(x + more, rms_norm(x + more))``, each ``[...,W]``."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, _norm(x, None, weight, eps, offset, more=more, total=total)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Norm by groups of ``y silu(gate)``, each ``[...,W]``, scaled by ``weight [W]``: Mamba-2's."""
    return _norm(y, gate, weight, eps, 0.0, groups, gate_first=True)


def norm_then_gate(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each head of ``y [...,H,V]``, scaled by ``weight [V]``, times silu of ``gate [...,H,V]``: GDN's."""
    return _norm(y.flatten(-2), gate.flatten(-2), weight, eps, 0.0, groups=y.shape[-2]).view(y.shape)


def norm_rotate(x: Tensor, weight: Tensor, rotary: tuple[Tensor, Tensor], eps: float, offset: float) -> Tensor:
    """`rms_norm` of each head of ``x [B,T,H,D]``, its first R elements then turned, element i with element i + R/2, by
    ``rotary``: cosines and sines ``[B,T,1,R/2]``, contiguous. Tokens of all rows lie at one distance in ``x``.
    """
    cos, sin = rotary
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens = x.flatten(0, 1)
    rows, heads, size = tokens.shape
    _rotate_kernel[(rows, heads)](
        out,
        tokens,
        weight,
        cos,
        sin,
        tokens.stride(0),
        tokens.stride(1),
        size,
        eps,
        offset,
        HALF=cos.shape[-1],
        BLOCK=power_of_two(size),
        num_warps=1,
    )
    return out


def squared_relu(x: Tensor) -> Tensor:
    """``relu(x)^2``, of ``x``'s shape."""
    return _activation(x, None, "squared_relu")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) up``."""
    return _activation(gate, up, "swiglu")


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """``sigmoid(gate) x``."""
    return _activation(gate, x, "sigmoid")


def convolve(past: Tensor, channels: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor) -> Tensor:
    """One token of the causal depthwise convolution and SiLU: ``[B,C]`` from ``channels [B,C]`` and ``past [S,K-1,C]``,
    which moves on. ``weight [C,1,K]``; row i is slot i, or padding where ``slots [B]`` holds -1.
    """
    rows, width = channels.shape
    out = torch.empty(rows, width, dtype=channels.dtype, device=channels.device)
    grid = (rows, triton.cdiv(width, BLOCK))
    _convolve_kernel[grid](
        out, past, channels, weight, bias, slots, channels.stride(0), width, K=weight.shape[-1], CHANNELS=BLOCK
    )
    return out


def convolve_window(
    past: Tensor, channels: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, accepted: Tensor
) -> Tensor:
    """`convolve` of a window: ``[B,T,C]`` from ``channels [B,T,C]`` behind the K - 1 inputs from ``accepted [B]`` int64
    on in ``past [S,K-1+T,C]``, which then holds these and the window's.
    """
    rows, tokens, width = channels.shape
    out = torch.empty(rows, tokens, width, dtype=channels.dtype, device=channels.device)
    _convolve_window_kernel[(rows, triton.cdiv(width, BLOCK))](
        out,
        past,
        channels,
        weight,
        bias,
        slots,
        accepted,
        channels.stride(0),
        channels.stride(1),
        width,
        K=weight.shape[-1],
        T=tokens,
        CHANNELS=BLOCK,
    )
    return out


def _norm(x, gate, weight, eps, offset, groups=1, gate_first=False, more=None, total=None):
    """Groups share a weight that is as wide as one of them."""
    width = x.shape[-1] // groups
    rows = x.reshape(-1, x.shape[-1])
    gates, addends = (None if t is None else t.reshape(rows.shape) for t in (gate, more))
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(width)
    _norm_kernel[(len(rows), groups)](
        out,
        rows,
        gates,
        addends,
        total,
        weight,
        rows.stride(0),
        0 if gates is None else gates.stride(0),
        0 if addends is None else addends.stride(0),
        width,
        eps,
        offset,
        GATE_FIRST=gate_first,
        SHARED=weight.shape[-1] == width,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )
    return out.view(x.shape)


def _activation(x, other, kind):
    width = x.shape[-1]
    rows, others = x.reshape(-1, width), None if other is None else other.reshape(-1, width)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _activation_kernel[(len(rows), triton.cdiv(width, BLOCK))](
        out, rows, others, rows.stride(0), 0 if others is None else others.stride(0), width, KIND=kind, BLOCK=BLOCK
    )
    return out.view(x.shape)


@triton.jit
def _norm_kernel(
    out,
    x,
    gate,
    more,
    total,
    weight,
    x_row,
    gate_row,
    more_row,
    width,
    eps,
    offset,
    GATE_FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    inside = place < width
    column = place + group * width
    own = row * tl.num_programs(1) * width + column
    dtype = out.dtype.element_ty
    v = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + (place if SHARED else column), mask=inside, other=0.0).to(tl.float32)
    if more is not None:
        v = v + tl.load(more + row * more_row + column, mask=inside, other=0.0).to(tl.float32)
        v = v.to(dtype).to(tl.float32)
        tl.store(total + own, v.to(dtype), mask=inside)
    if gate is not None:
        z = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
        z = z * sigmoid(z)
        if GATE_FIRST:
            v = v * z
    v = v * tl.rsqrt(tl.sum(v * v, 0) / width + eps)
    if gate is None:
        v = v * (w + offset)
    else:
        v = (v.to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        if not GATE_FIRST:
            v = v * z
    tl.store(out + own, v.to(dtype), mask=inside)


@triton.jit
def _rotate_kernel(out, x, weight, cos, sin, x_row, x_head, size, eps, offset, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < size
    dtype = out.dtype.element_ty
    base = x + row * x_row + head * x_head
    v = tl.load(base + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / size + eps)
    v = (v * scale * (tl.load(weight + d, mask=inside, other=0.0).to(tl.float32) + offset)).to(dtype).to(tl.float32)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    turned = d < 2 * HALF
    u = tl.load(base + partner, mask=turned, other=0.0).to(tl.float32)
    u = (u * scale * (tl.load(weight + partner, mask=turned, other=0.0).to(tl.float32) + offset)).to(dtype)
    angle = row * HALF + tl.where(d < HALF, d, d - HALF)
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    v = v * c + tl.where(d < HALF, -s, s) * u.to(tl.float32)
    tl.store(out + (row * tl.num_programs(1) + head) * size + d, v.to(dtype), mask=inside)


@triton.jit
def _activation_kernel(out, x, other, x_row, other_row, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    dtype = out.dtype.element_ty
    v = tl.load(x + row * x_row + at, mask=inside).to(tl.float32)
    if KIND == "squared_relu":
        v = tl.maximum(v, 0.0)
        v = v * v
    else:
        v = (v * sigmoid(v) if KIND == "swiglu" else sigmoid(v)).to(dtype).to(tl.float32)
        v = v * tl.load(other + row * other_row + at, mask=inside).to(tl.float32)
    tl.store(out + row * width + at, v.to(dtype), mask=inside)


@triton.jit
def _convolve_kernel(
    out, past, channels, weight, bias, slots, channels_row, width, K: tl.constexpr, CHANNELS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) >= 0:
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = c < width
        new = tl.load(channels + row * channels_row + c, mask=inside)
        total = new.to(tl.float32) * tl.load(weight + c * K + K - 1, mask=inside).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + c, mask=inside).to(tl.float32)
        old = past + row * width * (K - 1) + c
        later = ()
        for j in tl.static_range(K - 1):
            value = tl.load(old + j * width, mask=inside)
            total += value.to(tl.float32) * tl.load(weight + c * K + j, mask=inside).to(tl.float32)
            if j > 0:
                later = later + (value,)
        later = later + (new,)
        for j in tl.static_range(K - 1):
            tl.store(old + j * width, later[j], mask=inside)
        total = total.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row * width + c, (total * sigmoid(total)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _convolve_window_kernel(
    out,
    past,
    channels,
    weight,
    bias,
    slots,
    accepted,
    channels_row,
    channels_token,
    width,
    K: tl.constexpr,
    T: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row) >= 0:
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = c < width
        old = past + row * width * (K - 1 + T) + c
        first = tl.load(accepted + row)
        held, taps = (), ()
        for j in tl.static_range(K):
            taps = taps + (tl.load(weight + c * K + j, mask=inside).to(tl.float32),)
        for j in tl.static_range(K - 1):
            held = held + (tl.load(old + (first + j) * width, mask=inside),)
        for t in tl.static_range(T):
            held = held + (tl.load(channels + row * channels_row + t * channels_token + c, mask=inside),)
        offset = tl.zeros([CHANNELS], tl.float32)
        if bias is not None:
            offset = tl.load(bias + c, mask=inside).to(tl.float32)
        for t in tl.static_range(T):
            total = offset
            for j in tl.static_range(K):
                total += held[t + j].to(tl.float32) * taps[j]
            total = total.to(out.dtype.element_ty).to(tl.float32)
            place = (row * T + t) * width + c
            tl.store(out + place, (total * sigmoid(total)).to(out.dtype.element_ty), mask=inside)
        for j in tl.static_range(K - 1 + T):
            tl.store(old + j * width, held[j], mask=inside)
