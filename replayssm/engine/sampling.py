"""The next token from logits: the likeliest, or one drawn at a temperature from the likeliest that make up ``top_p``.

What a row draws depends on its logits, its request's seed and how many tokens that has drawn: not on the batch, the
slot or the device's generator. Philox4x32-10 with key = seed and counter = (number, use, 0, 0) gives it, where use is 0
for a token, 1 for whether a draft is accepted and 2 for a draft.

Drafts are accepted by rejection sampling (Leviathan, Kalman and Matias, "Fast Inference from Transformers via
Speculative Decoding", 2023): a draft that its drafter drew with probability q is taken with probability min(1, p / q),
and in place of the first that is not, a token is drawn from max(0, p - q). Tokens then have the model's probabilities
p, whatever q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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

    def draft(self, logits: Tensor, slots: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """A draft a row, ``[B]``, of the token ``ahead`` of the next one, from ``logits [B,vocabulary]``, and the
        probabilities ``[B,vocabulary]`` that it was drawn with. Nothing counts as drawn."""
        slots = slots.clamp_min(0)
        q = probabilities(logits, self.temperature[slots], self.top_p[slots])
        return pick(q, uniform(self.seed[slots], self.drawn[slots] + ahead, use=2)), q

    def verify(self, logits: Tensor, drafts: Tensor, q: Tensor | None, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B,T]`` int64 and ``[B]`` how many of them count, 1 to T, for ``drafts [B,T-1]`` with which the
        model gave ``logits [B,T,vocabulary]``; slots have then drawn so many more. ``q [B,T-1,vocabulary]`` are the
        probabilities that the drafts were drawn with; without, each was certain."""
        live, slots = slots >= 0, slots.clamp_min(0)
        B, T = logits.shape[:2]
        seed, number = (t[slots, None].expand(B, T) for t in (self.seed, self.drawn))
        number = number + torch.arange(T, device=logits.device)
        p = probabilities(logits, self.temperature[slots, None], self.top_p[slots, None])
        q = F.one_hot(drafts, p.shape[-1]).to(p) if q is None else q
        asked = uniform(seed[:, 1:].flatten(), number[:, : T - 1].flatten(), use=1).view(B, T - 1)
        p_draft, q_draft = (t.gather(-1, drafts[..., None])[..., 0] for t in (p[:, : T - 1], q))
        accepted = 1 + (asked * q_draft < p_draft).long().cumprod(1).sum(1)
        left = torch.cat([(p[:, : T - 1] - q).clamp_min(0), p[:, T - 1 :]], dim=1)
        last = accepted[:, None] - 1
        left = left.gather(1, last[..., None].expand(-1, -1, p.shape[-1]))[:, 0]
        drawn = pick(left, uniform(seed[:, 0], number.gather(1, last)[:, 0]))
        self.drawn.index_add_(0, slots, torch.where(live, accepted, 0))
        padded = F.pad(drafts, (0, 1))
        return torch.where(torch.arange(T, device=last.device) == last, drawn[:, None], padded), accepted


def greedy(logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """As `Sampler.verify` at temperature 0: the likeliest tokens, as far as the drafts before them were those."""
    likeliest = logits.argmax(-1)
    return likeliest, 1 + (likeliest[:, :-1] == drafts).long().cumprod(1).sum(1)


def probabilities(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """``[...,vocabulary]`` float32 of the fewest of the likeliest tokens that reach ``top_p [...]``; at temperature 0
    all of it is the likeliest's."""
    one = F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    kept, token = likeliest_of(logits, temperature, top_p)
    kept = torch.zeros_like(kept).scatter(-1, token, kept / kept.sum(-1, keepdim=True))
    return torch.where(temperature[..., None] > 0, kept, one)


def likeliest_of(logits: Tensor, temperature: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """``(probability, token)``, each ``[...,vocabulary]``, likeliest first, the lowest token of equals; zero behind the
    fewest that reach ``top_p [...]``."""
    scaled = logits.float() / temperature.clamp_min(1e-6)[..., None]
    probability, token = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = probability.cumsum(-1) - probability
    return torch.where(before < top_p[..., None], probability, 0.0), token


def pick(weights: Tensor, at: Tensor) -> Tensor:
    """``[B]`` the token at ``at [B]``, in [0, 1), of the running sum of ``weights [B,vocabulary]``, not all zero."""
    below = weights.cumsum(-1)
    place = (below <= at[:, None] * below[:, -1:]).sum(-1)
    return torch.minimum(place, (weights > 0).cumsum(-1).argmax(-1))  # rounding: never behind the last of weight


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, seed: Tensor, number: Tensor) -> Tensor:
    """One token a row, ``[B]``, from the fewest of the likeliest tokens whose probabilities reach ``top_p [B]``."""
    probability, token = likeliest_of(logits, temperature, top_p)
    below = probability.cumsum(-1)
    place = (below <= uniform(seed, number)[:, None] * below[:, -1:]).sum(-1, keepdim=True)
    last = (probability > 0).sum(-1, keepdim=True) - 1
    return token.gather(1, torch.minimum(place, last).clamp_min(0))[:, 0]  # a padding row may hold NaN


def uniform(seed: Tensor, number: Tensor, use: int = 0) -> Tensor:
    """``[B]`` float32 in [0, 1), of 24 bits, for draw ``number [B]`` of ``seed [B]``, both int64, and its ``use``."""
    zero = torch.zeros_like(seed)
    key = torch.stack([seed & LOW, seed >> 32], dim=-1)
    words = philox4x32_10(key, torch.stack([number & LOW, zero + use, zero, zero], dim=-1))
    return (words[:, 0] >> 8).float() * 2.0**-24
