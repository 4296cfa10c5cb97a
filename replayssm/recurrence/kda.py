"""Kimi Delta Attention (Kimi Team, "Kimi Linear", 2025): the gated delta rule with one decay a key channel.

Recurrence, per head, state S in R^{V x K}, q and k L2-normalised, q scaled by K^{-1/2}, g_t in R^K:

    S'_t = S_{t-1} Diag(exp(g_t))
    d_t  = beta_t (v_t - S'_t k_t)
    S_t  = S'_t + d_t k_t^T
    o_t  = S_t q_t

The decay acts on the key side, so the replay identity of ReplaySSM becomes, with the vector G_j = g_1 + ... + g_j,

    S_p   = S_0 Diag(exp(G_p)) + sum_j d_j (k_j * exp(G_p - G_j))^T
    S_p a = S_0 (exp(G_p) * a) + sum_j d_j sum_c k_j[c] a[c] exp(G_p[c] - G_j[c])

Windows and folds follow `replayssm.recurrence.gdn` with exp(G_s - G_r) inside the dot product. exp(-G) is never formed:
with a decay of -5 a step it overflows float32 after 18 tokens, while every exponent used here is at most zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.recurrence.decay import after, between
from replayssm.recurrence.gdn import EPS, Inputs, Ring, corrected_values, rnorm, substituted, valid_ring

__all__ = ["EPS", "Inputs", "Ring", "fold", "fold_raw", "gates", "read", "rnorm", "step", "verify"]
# The tuples are those of GDN with as many key heads as value heads and g of shape [B,H,K], in the ring [B,H,J,K].


def gates(
    f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """``(g [B,H,K], beta [B,H])``: g = -exp(A_log) softplus(f + dt_bias), ``A_log [H]``, ``dt_bias [H,K]``, as in Kimi
    Linear; with ``lower_bound`` g = lower_bound sigmoid(exp(A_log) (f + dt_bias)), the bounded ("safe") gate of Kimi-K3
    and GLM-5.3-Flash, where it is -5.

    float64 stays float64, everything else becomes float32.
    """
    wide = torch.float64 if f.dtype == torch.float64 else torch.float32
    rate = torch.exp(A_log.to(wide))[:, None]
    raw = f.to(wide) + dt_bias.to(wide)
    g = -rate * F.softplus(raw, threshold=20.0) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    return g, torch.sigmoid(b.to(wide))


def step(state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The plain recurrence: ``(o [B,H,V], new state [B,H,V,K])`` from ``state [B,H,V,K]``, which is not changed."""
    q, k, v, g, beta = (t.to(state.dtype) for t in inputs)
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + EPS) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + EPS)
    state = state * torch.exp(g)[..., None, :]
    d = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    state = state + d[..., None] * k[..., None, :]
    return (state * q[..., None, :]).sum(-1), state


def read(state: Tensor, ring: Ring, length: Tensor | None, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, d)``, each ``[B,H,V]``, of the next token from checkpoint and ring; the state is never formed."""
    q, k, v, g, beta = (t.to(state.dtype) for t in inputs)
    ring = valid_ring(ring, length, state.dtype)
    q, k = q * rnorm(q)[..., None] * q.shape[-1] ** -0.5, k * rnorm(k)[..., None]

    total = ring.g.sum(2) + g
    decayed_k = ring.k * ring.k_rnorm[..., None] * torch.exp(after(ring.g, 2) + g[:, :, None])
    qk = torch.stack([q, k], dim=-1)
    Sqk = torch.einsum("bhvk,bhkc->bhvc", state, torch.exp(total)[..., None] * qk)
    Sqk = Sqk + torch.einsum("bhjv,bhjc->bhvc", ring.d, torch.einsum("bhjk,bhkc->bhjc", decayed_k, qk))
    d = beta[..., None] * (v - Sqk[..., 1])
    return Sqk[..., 0] + d * (k * q).sum(-1)[..., None], d


def fold(state: Tensor, ring: Ring, length: Tensor | None) -> Tensor:
    """The checkpoint ``[B,H,V,K]`` moved forward over the ring's ``length [B]`` tokens, from the buffered ``d``."""
    ring = valid_ring(ring, length, state.dtype)
    decayed_k = ring.k * ring.k_rnorm[..., None] * torch.exp(after(ring.g, 2))
    return torch.exp(ring.g.sum(2))[:, :, None] * state + torch.einsum("bhjv,bhjk->bhvk", ring.d, decayed_k)


def fold_raw(state: Tensor, ring: Ring, length: Tensor | None) -> Tensor:
    """As `fold`, with ``d`` solved again from ``v``, ``k``, ``beta`` and ``g`` against the checkpoint; ``ring.d`` is
    not used. Raises ``ValueError`` if the ring holds no raw inputs.
    """
    ring = valid_ring(ring, length, state.dtype)
    if ring.v is None or ring.beta is None:
        raise ValueError("fold_raw needs a ring with v and beta; this one holds d only")
    k = ring.k * ring.k_rnorm[..., None]
    Hk = torch.einsum("bhvk,bhjk->bhjv", state, torch.exp(ring.g.cumsum(2)) * k)
    d = substituted(_products(k, k, between(ring.g, 2)), ring.v - Hk, ring.beta)
    return fold(state, ring._replace(d=d), length)


def verify(state: Tensor, ring: Ring, length: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(o, d)``, each ``[B,T,H,V]``, of a window of T tokens behind the ring, chunkwise; writes nothing."""
    q, k, v, g, beta = (t.to(state.dtype).transpose(1, 2) for t in inputs)
    ring = valid_ring(ring, length, state.dtype)
    q, k = q * rnorm(q)[..., None] * q.shape[-1] ** -0.5, k * rnorm(k)[..., None]
    old_k = ring.k * ring.k_rnorm[..., None]
    G = g.cumsum(2)
    since_checkpoint = torch.exp(G + ring.g.sum(2)[:, :, None])
    since_ring = G[:, :, :, None] + after(ring.g, 2)[:, :, None]
    in_window = between(g, 2)

    def history(a: Tensor) -> Tensor:
        """S'_s a_s without the window's own tokens, ``[B,H,T,V]``, for ``a [B,H,T,K]``."""
        from_checkpoint = torch.einsum("bhvk,bhtk->bhtv", state, since_checkpoint * a)
        return from_checkpoint + torch.einsum("bhtj,bhjv->bhtv", _products(a, old_k, since_ring), ring.d)

    d = corrected_values(_products(k, k, in_window), v - history(k), beta)
    o = history(q) + torch.einsum("bhsr,bhrv->bhsv", _products(q, k, in_window), d)
    return o.transpose(1, 2), d.transpose(1, 2)


def _products(a: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """sum_c a_s[c] k_r[c] exp(log_decay_sr[c]), ``[B,H,S,R]`` from ``[B,H,S,K]``, ``[B,H,R,K]``, ``[B,H,S,R,K]``."""
    return torch.einsum("bhsk,bhrk,bhsrk->bhsr", a, k, torch.exp(log_decay))
