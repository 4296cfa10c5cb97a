"""Where drafts come from: a model's MTP head, an independent small model, the text so far, or a given stream of tokens.

A drafter foretells T - 1 tokens of every slot behind the slot's last token, which the model has not seen yet. Row i is
slot i, padding where ``slots`` holds -1: what is kept of its slot stays. Tensors have fixed shapes and nothing is asked
of the device, so that a step with its drafts can be captured in a CUDA graph. Where a request samples, drafts of a
model are drawn as it samples; the text's are certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.engine.arms import new_cache, new_window
from replayssm.models import Decoder, ModelCache, ModelError
from replayssm.models.prompt import Prompt

Choose = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""``choose(logits [S,vocabulary], ahead)``: drafts ``[S]`` and, where drawn, the probabilities that they had."""


def likeliest(logits: Tensor, ahead: int) -> tuple[Tensor, Tensor | None]:
    """Of greedy requests."""
    return logits.argmax(-1), None


@dataclass(frozen=True)
class Drafts:
    """``tokens [S,T-1]`` int64; ``probability [S,T-1,vocabulary]`` that each was drawn with, None if certain."""

    tokens: Tensor
    probability: Tensor | None = None

    @classmethod
    def of(cls, found: Sequence[tuple[Tensor, Tensor | None]], like: Tensor) -> Drafts:
        """From a draft of each row at a time; ``like [S]`` has the shape of one."""
        if not found:
            return cls(like[:, None][:, :0])
        drawn = [q for _, q in found if q is not None]
        return cls(torch.stack([t for t, _ in found], 1), torch.stack(drawn, 1) if drawn else None)


class Drafter:
    """Base of the drafters: of a ``model`` whose requests are in ``cache``, whose states take windows of T tokens."""

    def __init__(self, cache: ModelCache) -> None:
        if cache.window is None:
            raise ModelError("a drafter needs an arm of windows; accepted: snapshots or verify, with window=T")
        self.cache, self.window = cache, cache.window
        self.slots_of = cache.all_slots

    def follow(self, tokens: Tensor) -> Callable[[Tensor, Prompt], None] | None:
        """What `Decoder.prefill` is to show of prompts ``tokens [B,P]``; None for nothing."""
        return None

    def start(self, slots: Sequence[int], tokens: Tensor, lengths: Sequence[int], first: Tensor) -> None:
        """New requests in ``slots``, their prompts ``tokens [B,P]`` int64 of ``lengths`` having been read, and
        ``first [B]`` being the token that followed each."""

    def kept(self) -> list[Tensor]:
        """What it remembers behind prompts, all of it: with these as they were it begins again."""
        return []

    def draft(self, last: Tensor, slots: Tensor, span: int, choose: Choose) -> Drafts:
        """Behind the token ``last [S]`` of each slot; ``span`` is beyond all positions of the window."""
        raise NotImplementedError

    def verified(self, hidden: Tensor, chosen: Tensor, accepted: Tensor, slots: Tensor) -> None:
        """The model's ``hidden [S,T,H]`` at the window's tokens, ``chosen [S,T]`` behind each of them, of which the
        first ``accepted [S]`` count; called when the model's cache has moved on by these."""


class NoDrafts(Drafter):
    """Of a window of one token."""

    def draft(self, last: Tensor, slots: Tensor, span: int, choose: Choose) -> Drafts:
        return Drafts.of([], last)


class Mtp(Drafter):
    """The model's own head (`replayssm.models.mtp`): first over the tokens of the last window, whose keys and values it
    then has as a head that never drafted has them, then on from its own outputs.

    ``hidden [S,T,H]`` and ``following [S,T]`` are those of the last window; they are rolled back by the model's cursor.
    """

    def __init__(self, model: Decoder, cache: ModelCache, arm: str) -> None:
        super().__init__(cache)
        if model.mtp is None:
            raise ModelError("the model was loaded without its draft head; accepted: load_model(..., head=True)")
        self.model, self.head, self.arm = model, model.mtp, arm
        slots, width = cache.slots, model.embedding.shape[1]
        self.past = model.new_head_cache(slots=slots, capacity=cache.capacity, window=self.window)
        self.hidden = torch.zeros(slots, self.window, width, dtype=model.embedding.dtype, device=model.embedding.device)
        self.following = torch.zeros(slots, self.window, dtype=torch.int64, device=model.embedding.device)

    def follow(self, tokens: Tensor) -> Callable[[Tensor, Prompt], None]:
        after = F.pad(tokens[:, 1:], (0, 1)).to(self.following.device)

        def seen(hidden: Tensor, past: Prompt) -> None:
            self.head(hidden, self._embedded(after[:, past.first : past.end]), past.over(self.past))
            last = past.lengths - 1
            here = ((last >= past.first) & (last < past.end)).nonzero()[:, 0]
            self.hidden[torch.tensor(past.slots, device=here.device)[here], 0] = hidden[here, last[here] - past.first]

        return seen

    def start(self, slots: Sequence[int], tokens: Tensor, lengths: Sequence[int], first: Tensor) -> None:
        self.following[list(slots), 0] = first

    def kept(self) -> list[Tensor]:
        return [self.hidden, self.following]

    def draft(self, last: Tensor, slots: Tensor, span: int, choose: Choose) -> Drafts:
        accepted, length = self.cache.accepted, self.cache.length
        assert accepted is not None
        past = new_window(self.arm, self.past, slots, span, (length - accepted).clamp_min(0))
        ahead = self.head(self.hidden, self._embedded(self.following), past)
        ahead = ahead.gather(1, (accepted - 1).clamp_min(0)[:, None, None].expand(-1, 1, ahead.shape[2]))
        found: list[tuple[Tensor, Tensor | None]] = []
        for number in range(self.window - 1):
            if number:
                past = new_window(self.arm, self.past, slots, span, length + number - 1, 1)
                ahead = self.head(ahead, self._embedded(found[-1][0][:, None]), past)
            found.append(choose(self.model.scores(ahead)[:, 0], number))
        return Drafts.of(found, last)

    def verified(self, hidden: Tensor, chosen: Tensor, accepted: Tensor, slots: Tensor) -> None:
        live = (slots >= 0)[:, None]
        self.hidden.copy_(torch.where(live[..., None], hidden, self.hidden))
        self.following.copy_(torch.where(live, chosen, self.following))

    def _embedded(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.model.embedding)


class DraftModel(Drafter):
    """An independent small ``model`` of the same vocabulary, with states of its own that verify windows.

    A window of it is read T times, each time with a draft more and without being finished; the last time all drafts are
    in it, so that as many can be committed as are accepted.
    """

    def __init__(self, model: Decoder, cache: ModelCache, arm: str, interval_length: int) -> None:
        super().__init__(cache)
        self.model, self.arm = model, f"verify/{arm.partition('/')[2]}"
        state_dtype = torch.float64 if model.embedding.dtype == torch.float64 else torch.float32
        self.own = new_cache(
            model,
            self.arm,
            slots=cache.slots,
            capacity=cache.capacity,
            interval_length=interval_length,
            state_dtype=state_dtype,
            window=self.window,
        )
        self.none = torch.zeros(cache.slots, dtype=torch.int64, device=model.embedding.device)

    def start(self, slots: Sequence[int], tokens: Tensor, lengths: Sequence[int], first: Tensor) -> None:
        self.model.prefill(tokens, self.own, slots, lengths)

    def kept(self) -> list[Tensor]:
        """A ring whose cursor is at 0 holds nothing."""
        states: Any = self.own.states
        return [states.cache.state, states.cache.cursor, states.accepted, self.own.conv, self.own.length]

    def draft(self, last: Tensor, slots: Tensor, span: int, choose: Choose) -> Drafts:
        found: list[tuple[Tensor, Tensor | None]] = []
        for number in range(self.window):
            known = torch.stack([last, *(token for token, _ in found)], dim=1)
            self._past = new_window(self.arm, self.own, slots, span)
            hidden = self.model.hidden(F.pad(known, (0, self.window - known.shape[1])), self._past)
            if number < self.window - 1:
                found.append(choose(self.model.scores(hidden[:, number]), number))
                self._past.finish(self.none)
        return Drafts.of(found, last)

    def verified(self, hidden: Tensor, chosen: Tensor, accepted: Tensor, slots: Tensor) -> None:
        self._past.finish(accepted)


class Ngram(Drafter):
    """The text so far: what followed the last place where its last tokens, three at most, stand before (prompt lookup).
    Where they stand nowhere, the last token again and again.

    ``text [S,capacity]`` int64: prompt and all tokens since, of which those behind the last one mean nothing.
    """

    LONGEST = 3

    def __init__(self, cache: ModelCache) -> None:
        super().__init__(cache)
        device = cache.length.device
        self.text = torch.zeros(cache.slots, cache.capacity + 1, dtype=torch.int64, device=device)
        self.places = torch.arange(cache.capacity + 1, device=device)

    def start(self, slots: Sequence[int], tokens: Tensor, lengths: Sequence[int], first: Tensor) -> None:
        where = list(slots)
        self.text[where, : tokens.shape[1]] = tokens.to(self.text.device)
        self.text[where, torch.tensor(list(lengths), device=self.text.device)] = first

    def kept(self) -> list[Tensor]:
        return [self.text]

    def draft(self, last: Tensor, slots: Tensor, span: int, choose: Choose) -> Drafts:
        length, text = self.cache.length[:, None], self.text
        equal, level = self.places < length, torch.zeros_like(text)
        for back in range(self.LONGEST):
            own = text.gather(1, (length - back).clamp_min(0))
            equal = equal & (F.pad(text, (back, 0))[:, : text.shape[1]] == own) & (self.places >= back)
            level += equal
        best = torch.where(level > 0, level * text.shape[1] + self.places, -1)
        found, at = best.max(1, keepdim=True)
        at = torch.where(found < 0, length, at)
        ahead = at + torch.arange(1, self.window, device=text.device)
        return Drafts(text.gather(1, torch.minimum(ahead, length)))

    def verified(self, hidden: Tensor, chosen: Tensor, accepted: Tensor, slots: Tensor) -> None:
        rows = self.slots_of[:, None]
        places = (self.cache.length - accepted)[:, None] + torch.arange(1, self.window + 1, device=chosen.device)
        places = torch.where((slots >= 0)[:, None], places, 0)
        self.text[rows, places] = torch.where((slots >= 0)[:, None], chosen, self.text[rows, places])


class Controlled(Drafter):
    """Drafts that are accepted as a table says, whatever the model thinks of them: for models of random weights, and
    for comparisons at the same acceptance.

    ``stream [N,S]`` int64 are the tokens of each slot, the first of them its first one; ``pattern [M,S]`` int64, 1 to
    T, how many count in its m-th step, from the beginning again after M. `verify` takes the place of the sampler's.
    """

    def __init__(self, cache: ModelCache, stream: Tensor, pattern: Tensor) -> None:
        super().__init__(cache)
        self.stream, self.pattern = stream, pattern
        self.taken = torch.zeros(cache.slots, dtype=torch.int64, device=stream.device)
        self.steps = torch.zeros_like(self.taken)

    def start(self, slots: Sequence[int], tokens: Tensor, lengths: Sequence[int], first: Tensor) -> None:
        self.taken[list(slots)] = 0
        self.steps[list(slots)] = 0

    def kept(self) -> list[Tensor]:
        return [self.taken, self.steps]

    def draft(self, last: Tensor, slots: Tensor, span: int, choose: Choose) -> Drafts:
        return Drafts(self._next(self.window - 1))

    def verify(self, logits: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        """The stream's next tokens, and how many count; the likeliest of ``logits [S,T,vocabulary]`` are sought, since
        a step that decodes does so."""
        logits.argmax(-1)
        return self._next(self.window), self.pattern.gather(0, (self.steps % len(self.pattern))[None])[0]

    def verified(self, hidden: Tensor, chosen: Tensor, accepted: Tensor, slots: Tensor) -> None:
        self.taken += torch.where(slots >= 0, accepted, 0)
        self.steps += slots >= 0

    def _next(self, count: int) -> Tensor:
        """``[S,count]`` tokens behind the last one taken."""
        ahead = self.taken + torch.arange(1, count + 1, device=self.taken.device)[:, None]
        return self.stream.gather(0, ahead.clamp_max(len(self.stream) - 1)).T


def acceptances(steps: int, rows: int, window: int, chance: float, seed: int) -> Tensor:
    """``[steps,rows]`` int64, 1 to ``window``: tokens that count where each draft is accepted with ``chance``, if those
    before it were. Drawn by strata, so that the mean is the distribution's to a few parts of their number."""
    generator = torch.Generator().manual_seed(seed)
    count = steps * rows
    drawn = (torch.arange(count, dtype=torch.float64) + torch.rand(count, generator=generator)) / count
    below = chance ** torch.arange(1, window, dtype=torch.float64)
    found = 1 + (drawn[:, None] < below).sum(1)
    return found[torch.randperm(count, generator=generator)].view(steps, rows)


def mean_accepted(window: int, chance: float) -> float:
    """Tokens that count a step, the model's own included: 1 + c + c^2 + ... of T terms."""
    return sum(chance**drafts for drafts in range(window))
