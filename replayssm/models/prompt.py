"""The past of a prompt: a chunk of tokens at a time, exact, and then handed over to a cache.

Rows have their own lengths and are padded on the right: what lies behind a row's length is computed and never used, for
attention is causal and states stop there. The recurrence of a chunk is the chunkwise form of
`replayssm.recurrence`: outputs by ``verify`` behind an empty ring, then a ``fold`` over the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.models.cache import ModelCache
from replayssm.recurrence import gdn, mamba2

TOKENS_AT_A_TIME = 64
"""Tokens of one chunkwise computation: its cost a token grows with them, the number of computations falls."""


class Prompt:
    """Requests of ``lengths`` tokens that will live in ``slots`` of the cache, from an empty past.

    ``positions [1,T]`` of the chunk that `begin` announced. Keys and values go to the cache at once, the other states
    with `hand_over`.
    """

    is_prompt, takes_raw = True, False

    def __init__(self, cache: ModelCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
        states, device = cache.states, cache.length.device
        rows, g = len(slots), states.geometry
        self.cache, self.slots = cache, list(slots)
        self.lengths = torch.tensor(list(lengths), dtype=torch.int64, device=device)
        self.conv = [cache.conv.new_zeros(rows, *cache.prompt_conv.shape[2:]) for _ in range(states.layers)]
        wide = torch.float64 if cache.conv.dtype == torch.float64 else torch.float32
        state = torch.zeros(rows, g.heads, g.head_dim, g.state_dim, dtype=wide, device=device)
        self.state = [state] * states.layers
        self.begin(0, 0)

    def fork(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """From the only row, which lives in the first of ``slots``, one for each slot, of ``lengths`` tokens."""
        end, rows, first, others = self.end, len(slots), slots[0], list(slots[1:])
        for memory in (self.cache.keys, self.cache.values):
            memory[:, others, :, :end] = memory[:, [first], :, :end]
        self.conv = [conv.expand(rows, -1, -1) for conv in self.conv]
        self.state = [state.expand(rows, -1, -1, -1) for state in self.state]
        self.slots = list(slots)
        self.lengths = torch.tensor(list(lengths), dtype=torch.int64, device=self.lengths.device)

    def begin(self, first: int, tokens: int) -> None:
        """Announce a chunk of ``tokens`` tokens, the first of them at position ``first``."""
        self.first, self.end = first, first + tokens
        self.count = (self.lengths - first).clamp(0, tokens)
        self.positions = torch.arange(first, self.end, device=self.lengths.device)[None]

    def over(self, cache: ModelCache) -> Prompt:
        """The same chunk of the same rows over another cache, of attention alone."""
        other = copy(self)
        other.cache = cache
        return other

    def convolve(self, number: int, channels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Causal depthwise convolution and SiLU over ``channels [B,T,C]``; ``weight [C,1,K]``."""
        inputs = torch.cat([self.conv[number], channels], dim=1)
        last = self.count[:, None] + torch.arange(weight.shape[-1] - 1, device=self.count.device)
        self.conv[number] = inputs.gather(1, last[..., None].expand(-1, -1, inputs.shape[2]))
        return F.silu(F.conv1d(inputs.transpose(1, 2), weight, bias, groups=len(weight))).transpose(1, 2)

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention ``[B,T,Hq,D]`` of ``q`` to all positions so far; ``k, v [B,T,Hkv,D]``."""
        keys, values = self.cache.keys[number], self.cache.values[number]
        keys[self.slots, :, self.first : self.end] = k.transpose(1, 2)
        values[self.slots, :, self.first : self.end] = v.transpose(1, 2)
        keys, values = keys[self.slots, :, : self.end], values[self.slots, :, : self.end]
        seen = torch.arange(self.end, device=q.device) <= self.positions[0, :, None]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2)

    def rates(self, number: int, A_log: Tensor) -> Tensor:
        """Mamba-2's A of a layer."""
        return -torch.exp(A_log)

    def recur(self, number: int, inputs: Any, **gates: Tensor) -> Tensor:
        """Outputs ``[B,T,H,P]`` of the recurrence for a family's inputs with a T axis behind the rows."""
        dtype, outputs = inputs[0].dtype, []
        for first in range(0, inputs[0].shape[1], TOKENS_AT_A_TIME):
            part = _tokens(inputs, first, first + TOKENS_AT_A_TIME)
            length = (self.count - first).clamp(0, part[0].shape[1])
            y, self.state[number] = advance(self.state[number], part, length)
            outputs.append(y.to(dtype))
        return torch.cat(outputs, dim=1)

    def hand_over(self) -> None:
        """Give convolution and recurrent states to the cache's slots, whose requests then stand behind their prompt."""
        self.cache.prompt_conv[:, self.slots] = torch.stack(self.conv)
        self.cache.states.load(self.slots, torch.stack(self.state))
        self.cache.length[self.slots] = self.lengths


def advance(state: Tensor, inputs: Any, length: Tensor) -> tuple[Tensor, Tensor]:
    """``(outputs [B,T,H,P], state)`` of a few tokens behind ``state [B,H,P,N]``, which is not changed; the new state
    has seen ``length [B]`` of them. Computed in the state's dtype."""
    nothing = torch.zeros_like(length)
    if isinstance(inputs, mamba2.Inputs):
        ring = mamba2.Ring(*(t.transpose(1, 2) for t in (inputs.x, inputs.B, inputs.dt)))
        empty = mamba2.Ring(*(t[:, :, :0] for t in ring))
        return mamba2.verify(state, empty, nothing, inputs), mamba2.fold(state, ring, length, inputs.A)
    k = inputs.k.transpose(1, 2)
    g, v = inputs.g.transpose(1, 2), inputs.v.transpose(1, 2)
    k_rnorm = gdn.rnorm(k.to(state.dtype))
    o, d = gdn.verify(state, gdn.Ring(*(t[:, :, :0] for t in (k, k_rnorm, v, g))), nothing, inputs)
    return o, gdn.fold(state, gdn.Ring(k, k_rnorm, d.transpose(1, 2), g), length)


def common_beginning(tokens: Tensor) -> int:
    """How many tokens at the beginning are the same in all rows of ``tokens [B,T]``."""
    differs = (tokens != tokens[:1]).any(0)
    return int(differs.long().argmax()) if differs.any() else tokens.shape[1]


def _tokens(inputs: Any, first: int, end: int) -> Any:
    """Some tokens of a family's inputs; A and D of Mamba-2 belong to the layer."""
    whole = ("A", "D")
    return type(inputs)(
        *(t if t is None or f in whole else t[:, first:end] for f, t in zip(inputs._fields, inputs, strict=True))
    )
