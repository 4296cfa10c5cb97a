"""The stored-state step in torch, in place: as few passes over the state as torch's own kernels allow.

Mamba-2 takes three (decay, outer product, output), GDN and KDA four (also the product with k). States of 16 bits are
computed in float32 and rounded once, as `replayssm.formats` says.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.formats import DTYPES, Rounding, check_rounding, nearest_round, random_words, round_with
from replayssm.recurrence import gdn, mamba2

FORMATS = {DTYPES[name]: name for name in ("bf16", "fp16")}
"""Dtypes of states in which nothing is computed."""


def stored_step(out: Tensor, state: Tensor, inputs: Any, slots: Tensor, *, rounding: Rounding | None = None) -> None:
    """One token of the plain recurrence, in place on ``state [S,H,P,N]``; see `replayssm.kernels` for the call."""
    check_rounding(rounding, state, stored=True)
    rows = (slots >= 0).nonzero()[:, 0]
    live = slots[rows]
    if len(rows) == 0:
        return
    view = None if state.dtype in FORMATS else consecutive(state, live)
    current = widened(state[live]) if view is None else view
    result = step(current, inputs.rows(rows))
    if view is None:
        state[live] = rounded(current, state.dtype, live, rounding, None if rounding is None else rounding.steps)
    out[rows] = result.to(out.dtype)


def widened(state: Tensor) -> Tensor:
    """The state in the dtype in which it is computed."""
    return state.float() if state.dtype in FORMATS else state


def rounded(x: Tensor, dtype: torch.dtype, live: Tensor, rounding: Rounding | None, number: Tensor | None) -> Tensor:
    """The states ``x [B,H,P,N]`` of the slots ``live`` in ``dtype``; ``number [S]`` are those of their rounding."""
    if dtype not in FORMATS:
        return x
    if rounding is None or number is None:
        return nearest_round(x, FORMATS[dtype])
    return round_with(x, FORMATS[dtype], words(x.shape, live, rounding, number))


def words(shape: torch.Size, live: Tensor, rounding: Rounding, number: Tensor) -> Tensor:
    """The random words of the slots' states ``[B,H,P,N]``; ``number [S]`` are those of their rounding."""
    request = live if rounding.requests is None else rounding.requests[live]
    return random_words(shape, seed=rounding.seed, request=request, layer=rounding.layer, flush=number[live])


def step(state: Tensor, inputs: Any) -> Tensor:
    """Output ``[B,H,P]`` of one token a row, from ``state [B,H,P,N]``, which is moved on in place."""
    return (_mamba2 if isinstance(inputs, mamba2.Inputs) else _delta)(state, inputs)


def consecutive(tensor: Tensor, live: Tensor) -> Tensor | None:
    """A view of the slots ``live`` where they follow one another, so that nothing is copied; otherwise None."""
    first, last = int(live[0]), int(live[-1])
    if last - first + 1 == len(live) and bool((live.diff() == 1).all()):
        return tensor[first : last + 1]
    return None


def _mamba2(state: Tensor, inputs: mamba2.Inputs) -> Tensor:
    x, B, C, dt, A = (t.to(state.dtype) for t in inputs[:5])
    share = state.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(share, dim=1), C.repeat_interleave(share, dim=1)
    state.mul_(torch.exp(A * dt)[..., None, None])
    state.addcmul_((dt[..., None] * x)[..., None], B[..., None, :])
    y = (state @ C[..., None])[..., 0]
    if inputs.D is not None:
        y += inputs.D.to(y.dtype)[:, None] * x
    return y if inputs.z is None else y * F.silu(inputs.z.to(y.dtype))


def _delta(state: Tensor, inputs: gdn.Inputs) -> Tensor:
    """GDN and KDA: they differ in the shape of g only, ``[B,H]`` or ``[B,H,K]``."""
    q, k, v, g, beta = (t.to(state.dtype) for t in inputs)
    share = state.shape[1] // k.shape[1]
    q = (q * gdn.rnorm(q)[..., None] * q.shape[-1] ** -0.5).repeat_interleave(share, dim=1)
    k = (k * gdn.rnorm(k)[..., None]).repeat_interleave(share, dim=1)
    decay = torch.exp(g)
    state.mul_(decay[..., None, None] if g.dim() == 2 else decay[..., None, :])
    d = beta[..., None] * (v - (state @ k[..., None])[..., 0])
    state.addcmul_(d[..., None], k[..., None, :])
    return (state @ q[..., None])[..., 0]
