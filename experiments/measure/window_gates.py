"""Correctness gates of a case with a window: `experiments.measure.gates`, with a truth that never drafts.

Every output of a window is compared, those of tokens that are rejected too: each is that of the plain recurrence which
has taken the accepted tokens of all passes before and then this window's, one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.case import WindowCase
from experiments.measure.gates import Check
from replayssm.recurrence import FAMILIES


class WindowCheck(Check):
    """Outputs are ``[F,C,R,T,H,P]``."""

    case: WindowCase

    def _steps(self, layers: Any, copy: int, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """One copy's rows in ``dtype``: first through the accepted tokens that its ring holds behind the checkpoint,
        then through the cycle. In float32 the state is rounded to its own format at every token.
        """
        recurrence, case = FAMILIES[self.case.geometry.family].step, self.case
        held = layers.held(self.offsets)[self.rows] // case.accepted
        last_folded = layers.flushing_pass(self.offsets[self.rows]) - 1
        exact = dtype == torch.float64
        stored = dtype if exact else state.dtype

        def window(state: Tensor, passes: int, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
            inputs, outputs, states = layers.tokens.at(passes, copy).rows(self.rows), [], []
            for t in range(tokens):
                token = token_of(inputs, t)
                y, state = recurrence(state, token if exact else layers.as_rounded(token))
                state = state.to(stored).to(dtype)
                outputs.append(y)
                states.append(state)
            return outputs, states

        state = state.to(dtype)
        for passes in range(-int(held.max()), 0):
            _, states = window(state, passes, case.accepted)
            state = torch.where((held >= -passes).view(-1, 1, 1, 1), states[-1], state)
        outputs, middle, flushed = [], state, state
        for passes in range(case.steps_per_cycle):
            seen, states = window(state, passes, case.window)
            state = states[case.accepted - 1]
            outputs.append(torch.stack(seen, dim=1))
            middle = state if passes == case.steps_per_cycle // 2 else middle
            flushed = torch.where((last_folded == passes).view(-1, 1, 1, 1), state, flushed)
        return torch.stack(outputs), middle, flushed, state


def token_of(window: Any, t: int) -> Any:
    """Token ``t`` of a window ``[B,T,...]``."""
    names = zip(window._fields, window, strict=True)
    return type(window)(*(x if x is None or name in ("A", "D") else x[:, t] for name, x in names))
