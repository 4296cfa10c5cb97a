"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024): scalar decay, delta-rule correction.

Recurrence, per value head, state S in R^{V x K}, q and k L2-normalised, q scaled by K^{-1/2}:

    S'_t = exp(g_t) S_{t-1}
    d_t  = beta_t (v_t - S'_t k_t)
    S_t  = S'_t + d_t k_t^T
    o_t  = S_t q_t = S'_t q_t + d_t (k_t . q_t)

Keeping the corrected value d_t makes the state a weighted sum of outer products over a ring of p tokens behind the
checkpoint S_0, with G_j = g_1 + ... + g_j (the replay identity of ReplaySSM):

    S_p = exp(G_p) S_0 + sum_j exp(G_p - G_j) d_j k_j^T

so S_p a, for a = q and a = k, needs one pass over S_0 and the scalars k_j . a, shared by the value heads of a key head.

A window of T tokens is the same with the window's own corrections unknown. Writing H = S_p and G_s for the window's own
cumulative decay (the chunkwise form of the delta rule, Yang et al., "Parallelizing Linear Transformers with the Delta
Rule", 2024):

    d_s + sum_{r<s} beta_s exp(G_s - G_r) (k_s . k_r) d_r = beta_s (v_s - exp(G_s) H k_s)

a unit lower triangular system, solved by substitution.

Two folds. From d: the identity above, as it stands. d was computed from the copy of the state that was *read*; an
error of that copy reaches the next checkpoint through it. From raw inputs: d is solved again from v, k, beta and g
against the checkpoint itself with the triangular system, so nothing that was read enters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.recurrence.decay import after, between

EPS = 1e-6
"""Added to the squared norm inside the root, as the published models' layers do."""


class Inputs(NamedTuple):
    """One token a row, after the convolution: ``q, k [B,HK,K]`` before their norm, ``v [B,HV,V]``, ``g [B,HV]`` the log
    decay (not positive), ``beta [B,HV]``. Value head h uses key head h // (HV / HK).

    A window of T tokens has a T axis behind the rows: ``q [B,T,HK,K]`` and so on.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def rows(self, index: Tensor) -> Inputs:
        """The chosen rows."""
        return Inputs(*(tensor[index] for tensor in self))


class Ring(NamedTuple):
    """Tokens behind the checkpoint, oldest first: ``k [B,HK,J,K]`` before its norm and ``k_rnorm [B,HK,J]``, its
    reciprocal norm; ``d [B,HV,J,V]``, ``g [B,HV,J]``; ``v [B,HV,J,V]`` and ``beta [B,HV,J]`` for the raw fold only.
    """

    k: Tensor
    k_rnorm: Tensor
    d: Tensor
    g: Tensor
    v: Tensor | None = None
    beta: Tensor | None = None


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """``(g, beta)``, each ``[B,HV]``: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b) of the projections.

    float64 stays float64, everything else becomes float32.
    """
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    g = -torch.exp(A_log.to(wide)) * F.softplus(a.to(wide) + dt_bias.to(wide), threshold=20.0)
    return g, torch.sigmoid(b.to(wide))


def rnorm(k: Tensor) -> Tensor:
    """Reciprocal L2 norm over the last axis, ``[..., K] -> [...]``, eps inside the root."""
    return torch.rsqrt(k.square().sum(-1) + EPS)


def step(state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The plain recurrence: ``(o [B,HV,V], new state [B,HV,V,K])`` from ``state [B,HV,V,K]``, which is not changed."""
    q, k, v, g, beta = (t.to(state.dtype) for t in inputs)
    share = state.shape[1] // k.shape[1]
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + EPS) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + EPS)
    q, k = q.repeat_interleave(share, dim=1), k.repeat_interleave(share, dim=1)
    state = torch.exp(g)[..., None, None] * state
    d = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    state = state + d[..., None] * k[..., None, :]
    return (state * q[..., None, :]).sum(-1), state


def read(state: Tensor, ring: Ring, length: Tensor | None, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, d)``, each ``[B,HV,V]``, of the next token from checkpoint and ring; the state is never formed."""
    q, k, v, g, beta = (t.to(state.dtype) for t in inputs)
    ring = valid_ring(ring, length, state.dtype)
    share = state.shape[1] // k.shape[1]
    q, k = q * rnorm(q)[..., None] * q.shape[-1] ** -0.5, k * rnorm(k)[..., None]

    total = ring.g.sum(-1) + g
    qk = torch.stack([q, k], dim=-1)
    kqk = torch.einsum("bgjk,bgkc->bgjc", ring.k * ring.k_rnorm[..., None], qk).repeat_interleave(share, dim=1)
    Sqk = torch.einsum("bhvk,bhkc->bhvc", state, qk.repeat_interleave(share, dim=1))
    weight = torch.exp(after(ring.g, -1) + g[..., None])[..., None] * kqk
    Sqk = torch.exp(total)[..., None, None] * Sqk + torch.einsum("bhjc,bhjv->bhvc", weight, ring.d)
    d = beta[..., None] * (v - Sqk[..., 1])
    return Sqk[..., 0] + d * (k * q).sum(-1).repeat_interleave(share, dim=1)[..., None], d


def fold(state: Tensor, ring: Ring, length: Tensor | None) -> Tensor:
    """The checkpoint ``[B,HV,V,K]`` moved forward over the ring's ``length [B]`` tokens, from the buffered ``d``."""
    ring = valid_ring(ring, length, state.dtype)
    k = (ring.k * ring.k_rnorm[..., None]).repeat_interleave(state.shape[1] // ring.k.shape[1], dim=1)
    weight = torch.exp(after(ring.g, -1))
    return torch.exp(ring.g.sum(-1))[..., None, None] * state + torch.einsum(
        "bhjv,bhjk->bhvk", weight[..., None] * ring.d, k
    )


def fold_raw(state: Tensor, ring: Ring, length: Tensor | None) -> Tensor:
    """As `fold`, with ``d`` solved again from ``v``, ``k``, ``beta`` and ``g`` against the checkpoint; ``ring.d`` is
    not used. Raises ``ValueError`` if the ring holds no raw inputs.
    """
    ring = valid_ring(ring, length, state.dtype)
    if ring.v is None or ring.beta is None:
        raise ValueError("fold_raw needs a ring with v and beta; this one holds d only")
    k = (ring.k * ring.k_rnorm[..., None]).repeat_interleave(state.shape[1] // ring.k.shape[1], dim=1)
    Hk = torch.exp(ring.g.cumsum(-1))[..., None] * torch.einsum("bhvk,bhjk->bhjv", state, k)
    kk = torch.einsum("bhsk,bhrk->bhsr", k, k)
    d = substituted(kk * torch.exp(between(ring.g, -1)), ring.v - Hk, ring.beta)
    return fold(state, ring._replace(d=d), length)


def verify(state: Tensor, ring: Ring, length: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, d)``, each ``[B,T,HV,V]``, of a window of T tokens behind the ring, chunkwise; writes nothing."""
    q, k, v, g, beta = (t.to(state.dtype).transpose(1, 2) for t in inputs)
    ring = valid_ring(ring, length, state.dtype)
    share = state.shape[1] // k.shape[1]
    q, k = q * rnorm(q)[..., None] * q.shape[-1] ** -0.5, k * rnorm(k)[..., None]
    old_k = ring.k * ring.k_rnorm[..., None]

    Gs = g.cumsum(-1)
    since_ring = torch.exp(Gs[..., :, None] + after(ring.g, -1)[..., None, :])
    since_checkpoint = torch.exp(Gs + ring.g.sum(-1)[..., None])[..., None]

    def history(a: Tensor) -> Tensor:
        """exp(G_s) H a_s, ``[B,HV,T,V]``, for ``a [B,HK,T,K]``."""
        products = torch.einsum("bgtk,bgjk->bgtj", a, old_k).repeat_interleave(share, dim=1)
        from_checkpoint = torch.einsum("bhvk,bhtk->bhtv", state, a.repeat_interleave(share, dim=1))
        return since_checkpoint * from_checkpoint + torch.einsum("bhtj,bhjv->bhtv", since_ring * products, ring.d)

    kk = torch.einsum("bgsk,bgrk->bgsr", k, k).repeat_interleave(share, dim=1)
    qk = torch.einsum("bgsk,bgrk->bgsr", q, k).repeat_interleave(share, dim=1)
    decay = torch.exp(between(g, -1))
    d = corrected_values(kk * decay, v - history(k), beta)
    o = history(q) + torch.einsum("bhsr,bhrv->bhsv", qk * decay, d)
    return o.transpose(1, 2), d.transpose(1, 2)


def corrected_values(products: Tensor, error: Tensor, beta: Tensor) -> Tensor:
    """d ``[B,H,T,V]`` from d_s + beta_s sum_{r<s} products_sr d_r = beta_s error_s, by forward substitution."""
    system = (beta[..., None] * products).tril(-1)
    return torch.linalg.solve_triangular(system, beta[..., None] * error, upper=False, unitriangular=True)


def substituted(products: Tensor, error: Tensor, beta: Tensor) -> Tensor:
    """As `corrected_values`, token by token for the few tokens of a ring: a CUDA graph may hold this."""
    d: list[Tensor] = []
    for s in range(error.shape[2]):
        own = error[:, :, s]
        if d:
            own = own - torch.einsum("bhr,bhrv->bhv", products[:, :, s, :s], torch.stack(d, dim=2))
        d.append(beta[:, :, s, None] * own)
    return torch.stack(d, dim=2) if d else error


def valid_ring(ring: Ring, length: Tensor | None, dtype: torch.dtype) -> Ring:
    """The ring in ``dtype`` with what lies behind ``length`` replaced by zeros: g = 0, d = 0, beta = 0 add nothing.
    A length of None: all of it is valid."""
    if length is None:
        return Ring(*(None if t is None else t.to(dtype) for t in ring))  # type: ignore[arg-type]
    free = torch.arange(ring.g.shape[2], device=length.device) >= length[:, None]

    def keep(t: Tensor) -> Tensor:
        return t.to(dtype).masked_fill(free.view(len(free), 1, ring.g.shape[2], *[1] * (t.dim() - 3)), 0.0)

    raw = {name: keep(t) for name in ("v", "beta") if (t := getattr(ring, name)) is not None}
    return Ring(keep(ring.k), keep(ring.k_rnorm), keep(ring.d), keep(ring.g), **raw)
