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
CHANNELS = 256


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """``x [...,W]`` over its root mean square, scaled by ``weight [W] + offset``."""
    return _norm(x, None, weight, eps, offset, groups=1, gate_first=False)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Norm by groups of ``y silu(gate)``, each ``[...,W]``, scaled by ``weight [W]``: Mamba-2's."""
    return _norm(y, gate, weight, eps, 0.0, groups, gate_first=True)


def norm_then_gate(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each head of ``y [...,H,V]``, scaled by ``weight [V]``, times silu of ``gate [...,H,V]``: GDN's."""
    return _norm(y, gate, weight, eps, 0.0, groups=1, gate_first=False)


def squared_relu(x: Tensor) -> Tensor:
    """``relu(x)^2``, of ``x``'s shape."""
    return _activation(x, None)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) up``; both contiguous."""
    return _activation(gate, up)


def convolve(past: Tensor, channels: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor) -> Tensor:
    """One token of the causal depthwise convolution and SiLU: ``[B,C]`` from ``channels [B,C]`` and ``past [S,C,K-1]``,
    which moves on. ``weight [C,1,K]``; row i is slot i, or padding where ``slots [B]`` holds -1.
    """
    rows, width = channels.shape
    out = torch.empty(rows, width, dtype=channels.dtype, device=channels.device)
    grid = (rows, triton.cdiv(width, CHANNELS))
    _convolve_kernel[grid](
        out, past, channels, weight, bias, slots, channels.stride(0), width, K=weight.shape[-1], CHANNELS=CHANNELS
    )
    return out


def _norm(x, gate, weight, eps, offset, groups, gate_first):
    width = x.shape[-1] // groups
    rows = x.reshape(-1, x.shape[-1])
    gates = None if gate is None else gate.reshape(rows.shape)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(width)
    _norm_kernel[(len(rows), groups)](
        out,
        rows,
        gates,
        weight,
        rows.stride(0),
        0 if gates is None else gates.stride(0),
        width,
        eps,
        offset,
        GATE_FIRST=gate_first,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )
    return out.view(x.shape)


def _activation(x, up):
    x = x.contiguous()
    out = torch.empty_like(x)
    _activation_kernel[(triton.cdiv(x.numel(), BLOCK),)](out, x, up, x.numel(), BLOCK=BLOCK)
    return out


@triton.jit
def _norm_kernel(
    out, x, gate, weight, x_row, gate_row, width, eps, offset, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    column += group * width
    dtype = out.dtype.element_ty
    v = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
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
    tl.store(out + row * tl.num_programs(1) * width + column, v.to(dtype), mask=inside)


@triton.jit
def _activation_kernel(out, x, up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    v = tl.load(x + at, mask=inside).to(tl.float32)
    if up is None:
        v = tl.maximum(v, 0.0)
        v = v * v
    else:
        v = (v * sigmoid(v)).to(out.dtype.element_ty).to(tl.float32) * tl.load(up + at, mask=inside).to(tl.float32)
    tl.store(out + at, v.to(out.dtype.element_ty), mask=inside)


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
        old = past + (row * width + c) * (K - 1)
        later = ()
        for j in tl.static_range(K - 1):
            value = tl.load(old + j, mask=inside)
            total += value.to(tl.float32) * tl.load(weight + c * K + j, mask=inside).to(tl.float32)
            if j > 0:
                later = later + (value,)
        later = later + (new,)
        for j in tl.static_range(K - 1):
            tl.store(old + j, later[j], mask=inside)
        total = total.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row * width + c, (total * sigmoid(total)).to(out.dtype.element_ty), mask=inside)
