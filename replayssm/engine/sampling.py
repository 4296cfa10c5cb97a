"""The next token from logits: the likeliest, or one drawn at a temperature from the likeliest that make up ``top_p``.

What a row draws depends on its logits, its request's seed and how many tokens that has drawn: not on the batch, the
slot or the device's generator. Philox4x32-10 with key = seed and counter = (number, 0, 0, 0) gives it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.formats import LOW, philox4x32_10
from replayssm.models import ModelError


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 takes the likeliest token, the lowest of equals. Raises `ModelError` on what is impossible."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ModelError(f"temperature={self.temperature} is impossible; accepted: 0 or a positive number")
        if not 0 < self.top_p <= 1:
            raise ModelError(f"top_p={self.top_p} is impossible; accepted: above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise ModelError(f"seed={self.seed} is impossible; accepted: an integer from 0 to 2^63 - 1")


class Sampler:
    """How each of S slots samples: ``temperature, top_p [S]`` float32, ``seed, drawn [S]`` int64; on the device."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.temperature = torch.zeros(slots, device=device)
        self.top_p = torch.ones(slots, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(slots, dtype=torch.int64, device=device)

    def start(self, slot: int, sampling: Sampling) -> None:
        """A new request in ``slot``."""
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.seed[slot], self.drawn[slot] = sampling.seed, 0

    def choose(self, logits: Tensor, slots: Tensor, greedy: bool) -> Tensor:
        """Tokens ``[B]`` int64 from ``logits [B,vocabulary]`` for the slots ``[B]``, which have then drawn one
        more; a row whose slot is -1 is padding, and its token means nothing. ``greedy`` where all of them are, which
        spares the sort."""
        likeliest = logits.argmax(-1)
        if greedy:
            return likeliest
        live, slots = slots >= 0, slots.clamp_min(0)
        temperature = self.temperature[slots]
        token = draw(logits, temperature, self.top_p[slots], self.seed[slots], self.drawn[slots])
        self.drawn.index_add_(0, slots, live.long())
        return torch.where(temperature > 0, token, likeliest)


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, seed: Tensor, number: Tensor) -> Tensor:
    """One token a row, ``[B]``, from the fewest of the likeliest tokens whose probabilities reach ``top_p [B]``."""
    scaled = logits.float() / temperature.clamp_min(1e-6)[:, None]
    probability, token = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = probability.cumsum(-1) - probability
    probability = torch.where(before < top_p[:, None], probability, 0.0)
    below = probability.cumsum(-1)
    place = (below <= uniform(seed, number)[:, None] * below[:, -1:]).sum(-1, keepdim=True)
    last = (probability > 0).sum(-1, keepdim=True) - 1
    return token.gather(1, torch.minimum(place, last).clamp_min(0))[:, 0]  # a padding row may hold NaN


def uniform(seed: Tensor, number: Tensor) -> Tensor:
    """``[B]`` float32 in [0, 1), of 24 bits, for draw ``number [B]`` of ``seed [B]``, both int64."""
    zero = torch.zeros_like(seed)
    key = torch.stack([seed & LOW, seed >> 32], dim=-1)
    words = philox4x32_10(key, torch.stack([number & LOW, zero, zero, zero], dim=-1))
    return (words[:, 0] >> 8).float() * 2.0**-24
