"""The past of one decoded token a row: row i of a step is slot i of the cache, so nothing is gathered or copied."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.models.cache import ModelCache


class Decoding:
    """Row i decodes slot i where ``slots [B]`` int64 holds i, and is padding where it holds -1: its memory is left as
    it is and its outputs mean nothing. Attention looks at the first ``span`` positions.

    Reads no tensor on the host, so that it can be captured in a CUDA graph.
    """

    is_prompt = False
    takes_raw = False
    """Whether the recurrence's step computes the gates, from what the projections give and the layer's parameters."""

    def __init__(self, cache: ModelCache, slots: Tensor, span: int) -> None:
        self.cache, self.slots, self.span = cache, slots, span
        self.rows = cache.all_slots[: len(slots)]
        self.live = slots >= 0
        self.length = torch.where(self.live, cache.length[: len(slots)], 0)
        self.positions = self.length[:, None]

    def convolve(self, number: int, channels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Causal depthwise convolution and SiLU of ``channels [B,1,C]``; ``weight [C,1,K]``."""
        past = self.cache.conv[number, : len(self.slots)]
        inputs = torch.cat([past, channels], dim=1)
        past.copy_(torch.where(self.live[:, None, None], inputs[:, 1:], past))
        out = (inputs * weight[:, 0].T).sum(1)
        return F.silu(out if bias is None else out + bias)[:, None]

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention ``[B,1,Hq,D]`` of ``q`` to its slot's positions and itself; ``k, v [B,1,Hkv,D]``."""
        rows, live = len(self.slots), self.live[:, None, None]
        keys, values = self.cache.keys[number, :rows], self.cache.values[number, :rows]
        for memory, new in ((keys, k), (values, v)):
            memory[self.rows, :, self.length] = torch.where(live, new[:, 0], memory[self.rows, :, self.length])
        keys, values = keys[:, :, : self.span], values[:, :, : self.span]
        seen = (torch.arange(self.span, device=q.device) <= self.positions)[:, None, None]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2)

    def rates(self, number: int, A_log: Tensor) -> Tensor:
        """Mamba-2's A of a layer."""
        return -torch.exp(A_log)

    def recur(self, number: int, inputs: Any, **gates: Tensor) -> Tensor:
        """Output ``[B,1,H,P]`` of the recurrence for a family's inputs with a T axis of one; ``gates`` are the layer's
        parameters of its gates, of use only where the step takes raw inputs."""
        whole = ("A", "D")
        fields = zip(inputs._fields, inputs, strict=True)
        token = type(inputs)(*(t if t is None or f in whole else t[:, 0] for f, t in fields))
        g = self.cache.states.geometry
        out = token[0].new_empty(len(self.slots), g.heads, g.head_dim)
        self.step(number, out, token, gates)
        return out[:, None]

    def step(self, number: int, out: Tensor, token: Any, gates: dict[str, Any]) -> None:
        """The recurrent states' step of one layer."""
        self.cache.states.step(number, out, token, self.slots)

    def finish(self, accepted: Tensor | None = None) -> None:
        """End the token after all layers: cursors and lengths move. ``accepted`` is for windows."""
        self.cache.states.commit(self.slots)
        self.cache.length[: len(self.slots)] += self.live
