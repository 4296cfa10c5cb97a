"""Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024): one scalar decay a head, B and C shared by a group of heads.

Recurrence, per head, state S in R^{P x N}:

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T
    y_t = S_t C_t + D x_t,   then y_t <- y_t silu(z_t) where the layer has a gate here

Unrolling it over a ring of p tokens behind the checkpoint S_0, with c_j = dt_1 + ... + dt_j (the replay identity of
ReplaySSM):

    S_p = exp(A c_p) S_0 + sum_j w_j x_j B_j^T,   w_j = dt_j exp(A (c_p - c_j))

so that an output needs one product with the checkpoint and the scalars B_j . C, which depend on the group only:

    S_p C = exp(A c_p) (S_0 C) + sum_j w_j (B_j . C) x_j

All exponents are of non-positive numbers, since A < 0. No ring entry depends on the state: an error in a copy that is
only read never reaches the next checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.recurrence.decay import after, between


class Inputs(NamedTuple):
    """One token a row, after the convolution: ``x [B,H,P]``, ``B, C [B,G,N]``, ``dt [B,H]`` as `discretize` gives it,
    ``A [H]`` (negative), ``D [H]`` or None, ``z [B,H,P]`` or None. Head h uses group h // (H / G).

    A window of T tokens has a T axis behind the rows: ``x [B,T,H,P]`` and so on.
    """

    x: Tensor
    B: Tensor
    C: Tensor
    dt: Tensor
    A: Tensor
    D: Tensor | None = None
    z: Tensor | None = None

    def rows(self, index: Tensor) -> Inputs:
        """The chosen rows; A and D belong to the layer and stay whole."""
        z = None if self.z is None else self.z[index]
        return Inputs(self.x[index], self.B[index], self.C[index], self.dt[index], self.A, self.D, z)


class Ring(NamedTuple):
    """Tokens behind the checkpoint, oldest first: ``x [B,H,J,P]``, ``B [B,G,J,N]``, ``dt [B,H,J]``."""

    x: Tensor
    B: Tensor
    dt: Tensor


def discretize(dt: Tensor, dt_bias: Tensor | None = None, limits: tuple[float, float] = (0.0, float("inf"))) -> Tensor:
    """Step size ``[B,H]`` from the raw projection: softplus(dt + bias), linear above 20, clamped to ``limits``.

    Layers that have limits apply them to a prompt only: in transformers ``time_step_limit`` of the configuration, but
    ``(time_step_min, inf)`` in Nemotron-H. One-token decoding is unlimited there and in the kernels of mamba_ssm.
    float64 stays float64, everything else becomes float32.
    """
    raw = dt if dt.dtype == torch.float64 else dt.float()
    if dt_bias is not None:
        raw = raw + dt_bias.to(raw.dtype)
    return F.softplus(raw, threshold=20.0).clamp(*limits)


def step(state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The plain recurrence: ``(y [B,H,P], new state [B,H,P,N])`` from ``state [B,H,P,N]``, which is not changed."""
    x, B, C, dt, A = (t.to(state.dtype) for t in inputs[:5])
    share = state.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(share, dim=1), C.repeat_interleave(share, dim=1)
    state = state * torch.exp(A * dt)[..., None, None] + (dt[..., None] * x)[..., None] * B[..., None, :]
    y = (state * C[..., None, :]).sum(-1)
    if inputs.D is not None:
        y = y + inputs.D.to(y.dtype)[:, None] * x
    if inputs.z is not None:
        y = y * F.silu(inputs.z.to(y.dtype))
    return y, state


def read(state: Tensor, ring: Ring, length: Tensor | None, inputs: Inputs) -> Tensor:
    """Output ``y [B,H,P]`` of the next token from checkpoint and ring; the state at that token is never formed."""
    x, B, C, dt, A = (t.to(state.dtype) for t in inputs[:5])
    ring = _valid(ring, length, state.dtype)
    xs = torch.cat([ring.x, x[:, :, None]], dim=2)
    Bs = torch.cat([ring.B, B[:, :, None]], dim=2)
    dts = torch.cat([ring.dt, dt[:, :, None]], dim=2)
    share = state.shape[1] // B.shape[1]

    BC = torch.einsum("bgjn,bgn->bgj", Bs, C).repeat_interleave(share, dim=1)
    w = dts * torch.exp(after(A[:, None] * dts, -1))
    SC = torch.einsum("bhpn,bhn->bhp", state, C.repeat_interleave(share, dim=1))
    y = torch.exp(A * dts.sum(-1))[..., None] * SC + torch.einsum("bhj,bhjp->bhp", w * BC, xs)
    return _finish(y, inputs)


def fold(state: Tensor, ring: Ring, length: Tensor | None, A: Tensor) -> Tensor:
    """The checkpoint ``[B,H,P,N]`` moved forward over the ring's ``length [B]`` tokens; ``state`` is not changed."""
    ring = _valid(ring, length, state.dtype)
    A = A.to(state.dtype)
    w = ring.dt * torch.exp(after(A[:, None] * ring.dt, -1))
    B = ring.B.repeat_interleave(state.shape[1] // ring.B.shape[1], dim=1)
    return torch.exp(A * ring.dt.sum(-1))[..., None, None] * state + torch.einsum(
        "bhjp,bhjn->bhpn", w[..., None] * ring.x, B
    )


def verify(state: Tensor, ring: Ring, length: Tensor, inputs: Inputs) -> Tensor:
    """Outputs ``y [B,T,H,P]`` of a window of T tokens behind the ring, in one chunkwise computation; writes nothing.

    Token t sees the checkpoint, the ring and the window's tokens up to itself, so a rejected tail never matters.
    """
    x, B, C, dt, A = (t.to(state.dtype) for t in inputs[:5])
    ring = _valid(ring, length, state.dtype)
    x, B, C, dt = (t.transpose(1, 2) for t in (x, B, C, dt))
    xs, Bs, dts = (torch.cat(pair, dim=2) for pair in ((ring.x, x), (ring.B, B), (ring.dt, dt)))
    share = state.shape[1] // B.shape[1]

    g, old_g = A[:, None] * dt, A[:, None] * ring.dt
    c = g.cumsum(-1)[..., None]
    decay = torch.exp(torch.cat([c + after(old_g, -1)[..., None, :], between(g, -1)], dim=-1))
    BC = torch.einsum("bgtn,bgjn->bgtj", C, Bs).repeat_interleave(share, dim=1)
    SC = torch.einsum("bhpn,bhtn->bhtp", state, C.repeat_interleave(share, dim=1))
    y = torch.exp(c + old_g.sum(-1)[..., None, None]) * SC
    y = y + torch.einsum("bhtj,bhjp->bhtp", decay * BC * dts[..., None, :], xs)
    return _finish(y.transpose(1, 2), inputs)


def _finish(y: Tensor, inputs: Inputs) -> Tensor:
    """Skip connection and gate, ``[..., H, P]``."""
    if inputs.D is not None:
        y = y + inputs.D.to(y.dtype)[:, None] * inputs.x.to(y.dtype)
    return y if inputs.z is None else y * F.silu(inputs.z.to(y.dtype))


def _valid(ring: Ring, length: Tensor | None, dtype: torch.dtype) -> Ring:
    """The ring in ``dtype`` with what lies behind ``length`` replaced by zeros: dt = 0 neither decays nor adds.
    A length of None: all of it is valid."""
    if length is None:
        return Ring(*(t.to(dtype) for t in ring))
    free = torch.arange(ring.dt.shape[-1], device=length.device) >= length[:, None]
    x = ring.x.to(dtype).masked_fill(free[:, None, :, None], 0.0)
    B = ring.B.to(dtype).masked_fill(free[:, None, :, None], 0.0)
    return Ring(x, B, ring.dt.to(dtype).masked_fill(free[:, None], 0.0))
