"""One factory for the inputs of a layer, shared by tests and experiments: seeded, in ranges that models produce.

x, B, C, q, k and v follow a convolution and a SiLU. Mamba-2 draws A in [-16, -1] and step sizes around 1e-3 to 1e-1, as
its initialisation does. GDN and KDA draw per-token decays exp(g) from almost none to strong, and beta in (0, 1).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.geometry import Geometry
from replayssm.recurrence import gdn, kda, mamba2

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def make_inputs(
    geometry: Geometry, batch_size: int, tokens: int, *, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> list[mamba2.Inputs] | list[gdn.Inputs]:
    """``tokens`` consecutive tokens for ``batch_size`` rows. dt, g and beta are float32 (float64 with float64 inputs);
    A and D of Mamba-2 are drawn once and shared by all tokens.
    """
    draw = _Draw(seed, torch.float64 if dtype == torch.float64 else torch.float32, device)
    g, rows = geometry, (tokens, batch_size)
    if g.family == "mamba2":
        A = -(1 + 15 * draw.uniform(g.heads))
        D = 1 + 0.1 * draw.normal(g.heads)
        steps = torch.exp(math.log(1e-3) + draw.uniform(g.heads) * math.log(100.0))
        bias = steps + torch.log(-torch.expm1(-steps))
        dt = mamba2.discretize(draw.normal(*rows, g.heads), bias)
        x = draw.activation(*rows, g.heads, g.head_dim).to(dtype)
        B, C = (draw.activation(*rows, g.groups, g.state_dim).to(dtype) for _ in range(2))
        return [mamba2.Inputs(x[t], B[t], C[t], dt[t], A, D) for t in range(tokens)]
    q, k = (draw.activation(*rows, g.groups, g.state_dim).to(dtype) for _ in range(2))
    v = draw.activation(*rows, g.heads, g.head_dim).to(dtype)
    A_log = torch.log(1 + 15 * draw.uniform(g.heads))
    channels = (g.heads, g.state_dim) if g.family == "kda" else (g.heads,)
    bias = math.log(1e-4) + draw.uniform(*channels) * math.log(1e4)
    gates = kda.gates if g.family == "kda" else gdn.gates
    log_decay, beta = gates(draw.normal(*rows, *channels), draw.normal(*rows, g.heads), A_log, bias)
    return [gdn.Inputs(q[t], k[t], v[t], log_decay[t], beta[t]) for t in range(tokens)]


def make_state(geometry: Geometry, batch_size: int, *, dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    """A state ``[B,H,P,N]`` of the size trained models hold: entries around 0.1, never zero."""
    g = geometry
    draw = _Draw(seed, dtype, device)
    return 0.1 * draw.normal(batch_size, g.heads, g.head_dim, g.state_dim)


class _Draw:
    """Seeded draws on the CPU, so that every device gets the same numbers."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=self.dtype).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=self.dtype).to(self.device)

    def activation(self, *shape: int) -> Tensor:
        return F.silu(1.5 * self.normal(*shape))
