"""Teacher forcing: how probable a model finds given continuations, every token of them behind a decode step of an arm.

The tokens before the last of a prompt may be read at once, exactly; from there on each token is one decode step, so
that what is scored has passed through the arm's state. Prompts that begin alike share work: a sequence that is the
beginning of another costs nothing of its own, and what all prompts of a batch have in common is read once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from replayssm.engine import Step
from replayssm.models import Decoder, ModelCache
from replayssm.models.prompt import Prompt, common_beginning

PROMPT_ROWS = 16
"""Prompts read at once: attention's scores of more would not stay in a cache."""


@dataclass(frozen=True)
class Asked:
    """``tokens [n]`` of which those from ``first`` on, at least 1, are to be scored."""

    tokens: Sequence[int]
    first: int


@dataclass(frozen=True)
class Score:
    """Sum of the log-probabilities in nats, and whether each token was the likeliest."""

    logprob: float
    greedy: bool


@dataclass
class Row:
    """Tokens to be fed; ``wanted``: position of one of them -> (request, the token behind it) to be scored."""

    tokens: np.ndarray
    wanted: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def first(self) -> int:
        """Position of the last token of the first prompt."""
        return min(self.wanted)


@dataclass
class Work:
    """Tokens read at once, and decoded one by one."""

    prefilled: int = 0
    decoded: int = 0


class Scores:
    """Sums over the scored tokens of ``count`` requests."""

    def __init__(self, count: int) -> None:
        self.logprobs, self.greedy = np.zeros(count), np.ones(count, bool)

    def add(self, logits: Tensor, wanted: Sequence[tuple[int, int, int]]) -> None:
        """``wanted``: row of ``logits [rows,vocabulary]``, request, and the token that followed."""
        rows, requests, tokens = (np.array(part) for part in zip(*wanted, strict=True))
        unique, place = np.unique(rows, return_inverse=True)
        found = logits[torch.from_numpy(unique).to(logits.device)].float().log_softmax(-1).cpu()
        np.add.at(self.logprobs, requests, found.numpy()[place, tokens].astype(np.float64))
        np.logical_and.at(self.greedy, requests, found.argmax(-1).numpy()[place] == tokens)

    def list(self) -> list[Score]:
        return [Score(float(p), bool(g)) for p, g in zip(self.logprobs, self.greedy, strict=True)]


def merged(asked: Sequence[Asked]) -> list[Row]:
    """The rows to be fed, none of which is the beginning of another; the longest first."""
    fed = [np.asarray(a.tokens[:-1], dtype=">i4") for a in asked]
    order = sorted(range(len(fed)), key=lambda i: fed[i].tobytes())
    found: list[Row] = []
    for i in reversed(order):  # of those that begin alike the longest comes first
        if not found or not found[-1].tokens.tobytes().startswith(fed[i].tobytes()):
            found.append(Row(fed[i]))
        for position in range(asked[i].first, len(asked[i].tokens)):
            found[-1].wanted[position - 1].append((i, asked[i].tokens[position]))
    return sorted(found, key=lambda row: (len(row.tokens), row.tokens.tobytes()), reverse=True)


def score(
    model: Decoder,
    arm: str,
    asked: Sequence[Asked],
    new_cache: Callable[[int, int], ModelCache],
    *,
    rows: int,
    work: Work,
    prefill: int | None = None,
    damaged: bool = False,
) -> list[Score]:
    """A `Score` for each of ``asked`` by the engine's ``arm``, ``rows`` sequences at a time.

    ``new_cache(slots, capacity)`` makes the cache. At most ``prefill`` tokens of a row are read at once, None for all
    up to the one before the last of its prompt. ``damaged`` forgets the recurrent states at the end of the first prompt
    of each row: the control that has to lose.
    """
    every, found = merged(asked), Scores(len(asked))
    slots = min(rows, len(every))
    batch = _Batch(model, arm, new_cache(slots, len(every[0].tokens)), damaged, work)
    for start in range(0, len(every), slots):
        batch.run(every[start : start + slots], prefill, found)
    return found.list()


class _Batch:
    """Decodes some rows side by side, each from where its prompt was read to."""

    def __init__(self, model: Decoder, arm: str, cache: ModelCache, damaged: bool, work: Work) -> None:
        device = model.embedding.device
        self.model, self.cache, self.damaged, self.work = model, cache, damaged, work
        self.tokens = torch.zeros(cache.slots, dtype=torch.int64, device=device)
        self.live = torch.full((cache.slots,), -1, dtype=torch.int64, device=device)
        self.step = Step(model, cache, arm, self.tokens, self.live, lambda logits: logits.argmax(-1))

    @torch.no_grad()
    def run(self, rows: list[Row], prefill: int | None, found: Scores) -> None:
        first, length = np.array([row.first for row in rows]), np.array([len(row.tokens) for row in rows])
        start = first if prefill is None else np.minimum(first, prefill)
        self._read(rows, start)
        slots = np.arange(len(rows))
        for number in range(int((length - start).max())):
            at = start + number
            live = at < length
            if self.damaged and (due := slots[live & (at == first)]).size:
                self._forget(due.tolist())
            self.tokens[: len(rows)] = torch.tensor(fed(rows, at))
            self.live[: len(rows)] = torch.from_numpy(np.where(live, slots, -1))
            self.step(span=1 + int(at[live].max()))
            self.work.decoded += int(live.sum())
            if wanted := wanted_at(rows, at):
                assert self.step.logits is not None
                found.add(self.step.logits, wanted)
        self.live.fill_(-1)

    def _read(self, rows: list[Row], start: np.ndarray) -> None:
        """The beginnings, all at once; a row of which nothing is read starts from an empty past."""
        empty = [slot for slot, count in enumerate(start) if not count]
        if empty:
            Prompt(self.cache, empty, [0] * len(empty)).hand_over()
        slots = [slot for slot, count in enumerate(start) if count]
        for begin in range(0, len(slots), PROMPT_ROWS):
            part = slots[begin : begin + PROMPT_ROWS]
            lengths = start[part].tolist()
            tokens = torch.zeros(len(part), max(lengths), dtype=torch.int64)
            for row, slot in zip(tokens, part, strict=True):
                row[: start[slot]] = torch.from_numpy(rows[slot].tokens[: start[slot]].astype(np.int64))
            shared = min(common_beginning(tokens), min(lengths) - 1) if len(part) > 1 else 0
            self.model.prefill(tokens, self.cache, part, lengths, shared=shared)
            self.work.prefilled += sum(lengths) - (len(part) - 1) * shared

    def _forget(self, slots: list[int]) -> None:
        states, g = self.cache.states, self.cache.states.geometry
        shape = (states.layers, len(slots), g.heads, g.head_dim, g.state_dim)
        states.load(slots, torch.zeros(shape, device=self.tokens.device))


def fed(rows: list[Row], at: np.ndarray) -> list[int]:
    """The token of each row at its position; 0 behind its end."""
    return [int(row.tokens[i]) if i < len(row.tokens) else 0 for row, i in zip(rows, at, strict=True)]


def wanted_at(rows: list[Row], at: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, request, token) of what is scored behind these positions."""
    return [(number, *pair) for number, row in enumerate(rows) for pair in row.wanted.get(int(at[number]), ())]
