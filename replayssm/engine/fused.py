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
from replayssm.models.windows import WindowDecoding

_rates: weakref.WeakKeyDictionary[ModelCache, dict[int, Tensor]] = weakref.WeakKeyDictionary()


class Fused(Decoding):
    """What the Triton arms have otherwise, one token a row or several: their steps compute the gates."""

    takes_raw = True

    def rates(self, number: int, A_log: Tensor) -> Tensor:
        """Computed at the first step of the cache, since weights do not change while it is decoded with."""
        kept = _rates.setdefault(self.cache, {})
        if number not in kept:
            kept[number] = -torch.exp(A_log)
        return kept[number]

    def step(self, number: int, out: Tensor, token: Any, gates: dict[str, Any]) -> None:
        self.cache.states.step(number, out, token, self.slots, gates=Gates(**gates))


class FusedDecoding(Fused):
    """As `Decoding`, for the Triton arms. Attention reads as many positions as a slot has, whatever the span."""

    def convolve(self, number: int, channels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        past = self.cache.conv[number]
        return pointwise.convolve(past, channels[:, 0], weight, bias, self.slots)[:, None]

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[number], self.cache.values[number]
        return attention.attend(q, k, v, keys, values, self.length, self.slots)


class FusedWindow(Fused, WindowDecoding):
    """As `WindowDecoding`, for the Triton arms."""

    def convolve(self, number: int, channels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return pointwise.convolve_window(self.cache.conv[number], channels, weight, bias, self.slots, self.accepted)

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[number], self.cache.values[number]
        return attention.attend(q, k, v, keys, values, self.length, self.slots)
