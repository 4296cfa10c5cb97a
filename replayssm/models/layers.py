"""Layers that both architectures have."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis in float32, scaled by ``weight + offset`` there, then rounded."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return (rms(x, self.eps) * (self.weight.float() + self.offset)).to(x.dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    """``x`` over its root mean square along the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SquaredReluMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = linear(hidden, intermediate, bias)
        self.down_proj = linear(intermediate, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


def route(x: Tensor, index: Tensor, weights: Tensor, experts: int, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Weighted sum over each token's experts: ``x [N,H]``, ``index, weights [N,k]``; ``expert(e, rows)`` maps
    ``[n,H]`` to ``[n,H]``. Summed in float32. Asks the device how many tokens each expert got.
    """
    chosen = index.flatten()
    order = chosen.argsort(stable=True)
    token, weights = order // index.shape[1], weights.flatten()[order, None].float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    first = 0
    for number, count in enumerate(torch.bincount(chosen, minlength=experts).tolist()):
        if count:
            own = slice(first, first + count)
            out.index_add_(0, token[own], expert(number, x[token[own]]).float() * weights[own])
            first += count
    return out.to(x.dtype)
