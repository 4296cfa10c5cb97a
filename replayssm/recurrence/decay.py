"""Sums of log decays between tokens, formed without subtracting.

G_p - G_j of two cumulative sums loses as many digits as G has before the point: with log decays of -20 a step the
weight of the newest tokens, which is near one, would be wrong by 1e-4 in float32 after 64 tokens. Summing only the
terms between two tokens keeps every weight as exact as the recurrence keeps it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def after(g: Tensor, dim: int) -> Tensor:
    """For each token j along ``dim`` the sum of the tokens behind it, g_{j+1} + ... + g_last; same shape as ``g``."""
    nothing = list(g.shape)
    nothing[dim] = 1
    later = torch.cat([g, g.new_zeros(nothing)], dim).narrow(dim, 1, g.shape[dim])
    return later.flip(dim).cumsum(dim).flip(dim)


def between(g: Tensor, dim: int) -> Tensor:
    """g_{r+1} + ... + g_s for tokens s >= r, -inf for s < r, so that its exp is zero there: ``dim`` of T becomes the
    two axes s, r of T each.
    """
    count, dim = g.shape[dim], dim % g.dim()
    token = torch.arange(count, device=g.device)
    order = (token[:, None] - token).view(count, count, *[1] * (g.dim() - dim - 1))
    terms = g.unsqueeze(dim + 1).expand(*g.shape[: dim + 1], count, *g.shape[dim + 1 :])
    return terms.masked_fill(order <= 0, 0.0).cumsum(dim).masked_fill(order < 0, -torch.inf)
