"""One decode step of all slots, from each slot's last token to its next; on a GPU a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from replayssm.engine.arms import new_decoding
from replayssm.graphs import capture
from replayssm.models import Decoder, ModelCache


class Step:
    """Call it to decode one token a slot: ``tokens [S]`` int64 are read as the last ones and replaced by what
    ``choose(logits [S,vocabulary])`` gives; ``logits`` holds those of the last call, in the model's dtype. Row i is
    slot i where ``slots [S]`` holds i, padding where it holds -1.

    On a GPU the first call compiles, with all rows as padding so that nothing changes, and captures a graph; from then
    on a call launches the graph and returns. ``choose`` must be fit for that: device memory only, no look at values.
    """

    def __init__(
        self,
        model: Decoder,
        cache: ModelCache,
        arm: str,
        tokens: Tensor,
        slots: Tensor,
        choose: Callable[[Tensor], Tensor],
    ) -> None:
        self.model, self.cache, self.arm = model, cache, arm
        self.tokens, self.slots, self.choose = tokens, slots, choose
        self.logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, span: int | None = None) -> None:
        """``span`` bounds the positions that attention looks at; a graph reads as many as there are."""
        span = self.cache.capacity if span is None else span
        if not self.tokens.is_cuda:
            self.run(span)
            return
        if self._graph is None:
            self._graph = self._captured(span)
        self._graph.replay()

    @torch.no_grad()
    def run(self, span: int) -> None:
        """The same without a graph, launch by launch."""
        past = new_decoding(self.arm, self.cache, self.slots, span)
        self.logits = self.model.scores(self.model.hidden(self.tokens[:, None], past))[:, 0]
        past.finish()
        self.tokens.copy_(torch.where(past.live, self.choose(self.logits), self.tokens))

    def _captured(self, span: int) -> torch.cuda.CUDAGraph:
        live = self.slots.clone()
        self.slots.fill_(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.run(span)
        torch.cuda.current_stream().wait_stream(side)
        self.slots.copy_(live)
        return capture(lambda: self.run(span))
