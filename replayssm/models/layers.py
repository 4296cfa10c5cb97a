"""Layers that both architectures have.

What lies between the matrix products is written in plain PyTorch, and runs as one Triton kernel each on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fused(x: Tensor) -> bool:
    """Whether ``x`` goes through the Triton kernels between the products."""
    return x.is_cuda and x.dtype != torch.float64


def project(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Products of ``x`` with several matrices: one product where they lie side by side in one piece of memory."""
    weights, sizes = [linear.weight for linear in linears], [linear.out_features for linear in linears]
    start, side_by_side = weights[0].data_ptr(), not weights[0].requires_grad
    memory = weights[0].untyped_storage().data_ptr()
    for linear in linears:
        side_by_side &= linear.weight.untyped_storage().data_ptr() == memory
        side_by_side &= linear.weight.data_ptr() == start and linear.bias is None
        start += linear.weight.nbytes
    if not side_by_side:
        return tuple(linear(x) for linear in linears)
    whole = weights[0].as_strided((sum(sizes), x.shape[-1]), (x.shape[-1], 1))
    return F.linear(x, whole).split(sizes, dim=-1)


def join(module: nn.Module, *names: str) -> None:
    """Put the matrices of a module's layers side by side in memory, for `project`; their values are lost."""
    weights: list[Tensor] = [getattr(module, name).weight for name in names]
    whole = torch.empty(sum(map(len, weights)), weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
    for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        weight.data = part


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype in which norms and gates are computed: float32, or float64 where it is of that."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis in float32, scaled by ``weight + offset`` there, then rounded; a float64
    ``x`` stays one."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if fused(x):
            from replayssm.kernels.triton.pointwise import rms_norm

            return rms_norm(x, self.weight, self.eps, self.offset)
        return (rms(x, self.eps) * (wide(self.weight) + self.offset)).to(x.dtype)

    def add(self, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
        """``x + more`` and its norm; with None of ``x``."""
        if more is None:
            return x, self(x)
        if fused(x):
            from replayssm.kernels.triton.pointwise import add_norm

            return add_norm(x, more, self.weight, self.eps, self.offset)
        return x + more, self(x + more)


def rms(x: Tensor, eps: float) -> Tensor:
    """``x`` over its root mean square along the last axis, in float32, or float64 as `wide`."""
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Norm by groups of ``y silu(gate)``, each ``[...,W]``, scaled by ``weight [W]``; in ``gate``'s dtype."""
    if fused(y):
        from replayssm.kernels.triton import pointwise

        return pointwise.gated_norm(y, gate, weight, eps, groups)
    gated = (wide(y) * F.silu(wide(gate))).unflatten(-1, (groups, -1))
    return rms(gated, eps).flatten(-2).to(gate.dtype) * weight


def norm_then_gate(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each head of ``y [...,H,V]``, scaled by ``weight [V]``, times silu of ``gate [...,H,V]``."""
    if fused(y):
        from replayssm.kernels.triton import pointwise

        return pointwise.norm_then_gate(y, gate, weight, eps)
    normed = rms(y, eps).to(gate.dtype) * weight
    return (normed * F.silu(wide(gate))).to(gate.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """``relu(x)^2``."""
    if fused(x):
        from replayssm.kernels.triton import pointwise

        return pointwise.squared_relu(x)
    return F.relu(x).square()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) up``."""
    if fused(gate):
        from replayssm.kernels.triton import pointwise

        return pointwise.swiglu(gate, up)
    return F.silu(gate) * up


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """``sigmoid(gate) x``."""
    if fused(x):
        from replayssm.kernels.triton import pointwise

        return pointwise.sigmoid_gated(x, gate)
    return x * torch.sigmoid(gate)


class GatedMLP(nn.Module):
    """SwiGLU."""

    joined = (("gate_proj", "up_proj"),)

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(*project(x, self.gate_proj, self.up_proj)))


class SquaredReluMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = linear(hidden, intermediate, bias)
        self.down_proj = linear(intermediate, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(squared_relu(self.up_proj(x)))


class Experts(nn.Module):
    """MLPs of which each row takes its own: a subclass says what two matrices an expert has and what lies between."""

    def matrices(self) -> tuple[Tensor, Tensor]:
        """``[E,I,H]`` and ``[E,H,J]``, applied in this order as in `linear`."""
        raise NotImplementedError

    def between(self, x: Tensor) -> Tensor:
        """``[n,I]`` to ``[n,J]``."""
        raise NotImplementedError

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum over each row's experts: ``x [N,H]``, ``index, weights [N,k]``. Summed in float32.

        On a GPU nothing is asked of the device.
        """
        first, second = self.matrices()
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        rows = x[order // index.shape[1]]
        numbers = torch.arange(len(first), device=x.device)
        end = torch.searchsorted(chosen[order], numbers, right=True)
        rows = products(self.between(products(rows, first, end)), second, end)
        ordered = torch.empty_like(rows).index_copy_(0, order, rows).view(*index.shape, -1)
        return (ordered.float() * weights[..., None].float()).sum(1).to(x.dtype)


def products(rows: Tensor, matrices: Tensor, end: Tensor) -> Tensor:
    """``rows [n,H]`` sorted by their matrix, of ``matrices [E,I,H]``, times it: ``[n,I]``; ``end [E]`` int64 is where
    the rows of each end. On a GPU in bf16 one launch."""
    if rows.is_cuda:
        if rows.dtype != torch.bfloat16:  # for which grouped products ask the device
            return masked_products(rows, matrices, end)
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=end.int())
    parts = torch.tensor_split(rows, end[:-1])
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])


def masked_products(rows: Tensor, matrices: Tensor, end: Tensor) -> Tensor:
    """As `products`, every row taking every matrix, so that nothing depends on ``end`` but the choice."""
    own = torch.searchsorted(end, torch.arange(len(rows), device=rows.device), right=True)[:, None]
    out = rows.new_zeros(len(rows), matrices.shape[1])
    for number, matrix in enumerate(matrices):
        out = torch.where(own == number, F.linear(rows, matrix), out)
    return out
