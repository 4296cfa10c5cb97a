"""`SpeculativeEngine`: as `Engine`, with several tokens a step where drafts of them are right.

    model = load_model(folder, head=True)
    engine = SpeculativeEngine(model, "verify/torch", slots=8, capacity=4096, window=4, drafter="mtp")

Greedy requests get the tokens that `Engine` gives them; sampled ones others of the same probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from replayssm.engine.drafters import Drafter, DraftModel, Drafts, Mtp, Ngram, NoDrafts, likeliest
from replayssm.engine.engine import Engine, Token
from replayssm.engine.sampling import greedy
from replayssm.engine.step import Step
from replayssm.engine.windows import WindowStep
from replayssm.models import Decoder, ModelCache, ModelError

DRAFTERS = ("mtp", "ngram", "draft_model")


def new_drafter(
    name: str,
    model: Decoder,
    cache: ModelCache,
    arm: str,
    draft_model: Decoder | None = None,
    interval_length: int = 16,
) -> Drafter:
    """The drafter of that name. ``draft_model`` is the independent one, where it is of that. Raises `ModelError` on a
    name that is unknown, a model without a head, and a draft model that is missing or has another vocabulary."""
    if cache.window == 1:
        return NoDrafts(cache)
    if name == "mtp":
        return Mtp(model, cache, arm)
    if name == "ngram":
        return Ngram(cache)
    if name != "draft_model":
        raise ModelError(f"drafter={name} is unknown; accepted: {', '.join(DRAFTERS)}")
    if draft_model is None or len(draft_model.embedding) != len(model.embedding):
        has = "none" if draft_model is None else f"one of {len(draft_model.embedding)} tokens"
        raise ModelError(f"drafter=draft_model has {has}; accepted: a model of {len(model.embedding)} tokens")
    return DraftModel(draft_model, cache, arm, interval_length)


@dataclass
class SpeculativeEngine(Engine):
    """``arm`` is one of `replayssm.arms.WINDOW_ARMS`; ``window`` counts the last token and its drafts, 1 to 16;
    ``drafter`` is one of `DRAFTERS`. Raises as `Engine` and `new_drafter`.
    """

    window: int = 4
    drafter: str = "mtp"
    draft_model: Decoder | None = None

    def __post_init__(self) -> None:
        if self.precision is not None and not self.precision.plain:
            raise ModelError(f"{self.precision} is not held by arm={self.arm}; accepted: an update of fp32, bf16, fp16")
        super().__post_init__()

    @cached_property
    def drafts(self) -> Drafter:
        return new_drafter(self.drafter, self.model, self.cache, self.arm, self.draft_model, self.interval_length)

    def _new_cache(self, ahead: int = 0, window: int | None = None) -> ModelCache:
        return super()._new_cache(self.window, self.window)

    def _read(self, slots: list[int], tokens: Tensor, lengths: list[int]) -> Tensor:
        follow = self.drafts.follow(tokens)
        if follow is None:
            return super()._read(slots, tokens, lengths)
        return self.model.prefill(tokens, self.cache, slots, lengths, chunk=self.chunk, follow=follow)

    def _begin(self, slots: list[int], tokens: Tensor, lengths: list[int]) -> None:
        self.drafts.start(slots, tokens, lengths, self._tokens[slots])

    def _advance(self) -> Iterator[Token]:
        """One step of all live slots; yields the tokens that each took."""
        cold = all(row.request.sampling.temperature == 0 for row in self._rows.values())
        step = self._steps[cold]
        assert isinstance(step, WindowStep)
        step(span=self.window + max(row.length for row in self._rows.values()))
        counts, chosen = step.counted.tolist(), step.chosen.tolist()
        for slot, row in self._rows.items():
            row.length += counts[slot]
        yield from self._emit({slot: chosen[slot][: counts[slot]] for slot in sorted(self._rows)})

    def _step(self, cold: bool) -> Step:
        sampler, live = self.sampler, self._live

        def verify(logits: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
            return sampler.verify(logits, drafts.tokens, drafts.probability, live)

        def draft(logits: Tensor, ahead: int) -> tuple[Tensor, Tensor | None]:
            return sampler.draft(logits, live, ahead)

        accept, choose = (_greedy, likeliest) if cold else (verify, draft)
        return WindowStep(self.model, self.cache, self.arm, self._tokens, live, self.drafts, accept, choose)


def _greedy(logits: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    return greedy(logits, drafts.tokens)
