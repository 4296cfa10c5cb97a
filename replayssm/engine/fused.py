"""The past of a decoded token on a GPU: the convolution, attention and recurrence are a kernel or two each."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from replayssm.kernels.triton import attention, pointwise
from replayssm.kernels.triton.gates import Gates
from replayssm.models.cache import ModelCache
from replayssm.models.decoding import Decoding

_rates: weakref.WeakKeyDictionary[ModelCache, dict[int, Tensor]] = weakref.WeakKeyDictionary()


class FusedDecoding(Decoding):
    """As `Decoding`, for the Triton arms. Attention reads as many positions as a slot has, whatever the span."""

    takes_raw = True

    def convolve(self, number: int, channels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        past = self.cache.conv[number]
        return pointwise.convolve(past, channels[:, 0], weight, bias, self.slots)[:, None]

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[number], self.cache.values[number]
        return attention.attend(q[:, 0], k[:, 0], v[:, 0], keys, values, self.length, self.slots)[:, None]

    def rates(self, number: int, A_log: Tensor) -> Tensor:
        """Computed at the first step of the cache, since weights do not change while it is decoded with."""
        kept = _rates.setdefault(self.cache, {})
        if number not in kept:
            kept[number] = -torch.exp(A_log)
        return kept[number]

    def step(self, number: int, out: Tensor, token: Any, gates: dict[str, Any]) -> None:
        self.cache.states.step(number, out, token, self.slots, gates=Gates(**gates))
