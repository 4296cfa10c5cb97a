"""One step of speculative decoding of all slots: draft, verify, accept, commit; on a GPU a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from replayssm.engine.arms import new_window
from replayssm.engine.drafters import Choose, Drafter, Drafts, likeliest
from replayssm.engine.step import Step
from replayssm.models import Decoder, ModelCache

Accept = Callable[[Tensor, Drafts], tuple[Tensor, Tensor]]
"""``accept(logits [S,T,vocabulary], drafts)``: tokens ``[S,T]`` behind each of the window's, and ``[S]`` how many
count, 1 to T."""


class WindowStep(Step):
    """As `Step`, of a window: ``chosen [S,T]`` are the tokens that a call gave and ``counted [S]`` how many of them
    each slot took, 0 where it is padding; ``tokens [S]`` is the last of those. ``logits`` are ``[S,T,vocabulary]``.
    """

    def __init__(
        self,
        model: Decoder,
        cache: ModelCache,
        arm: str,
        tokens: Tensor,
        slots: Tensor,
        drafter: Drafter,
        accept: Accept,
        choose: Choose = likeliest,
    ) -> None:
        super().__init__(model, cache, arm, tokens, slots, lambda logits: logits.argmax(-1))
        self.drafter, self.accept, self.choose_draft = drafter, accept, choose
        self.chosen = torch.zeros(len(tokens), drafter.window, dtype=torch.int64, device=tokens.device)
        self.counted = torch.zeros_like(tokens)

    @torch.no_grad()
    def run(self, span: int) -> None:
        drafts = self.drafter.draft(self.tokens, self.slots, span, self.choose_draft)
        past = new_window(self.arm, self.cache, self.slots, span)
        hidden = self.model.hidden(torch.cat([self.tokens[:, None], drafts.tokens], dim=1), past)
        self.logits = self.model.scores(hidden)
        chosen, accepted = self.accept(self.logits, drafts)
        past.finish(accepted)
        self.drafter.verified(hidden, chosen, accepted, self.slots)
        self.chosen.copy_(torch.where(past.live[:, None], chosen, self.chosen))
        self.counted.copy_(torch.where(past.live, accepted, 0))
        last = chosen.gather(1, accepted[:, None] - 1)[:, 0]
        self.tokens.copy_(torch.where(past.live, last, self.tokens))
