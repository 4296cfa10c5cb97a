"""What an arm of a case with a window is timed on: `experiments.measure.layers`, whose pass verifies a window of T
tokens in every copy and then commits the first ``accepted`` of them.

At the start of a cycle a row's ring holds the accepted tokens of its last pass, with staggered phases of its last 1 to
F. Snapshots take the same windows. Tokens that were rejected are never seen again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.case import WindowCase
from experiments.measure.layers import Layers, ReplayLayers, Step, StoredLayers

Commit = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, int], None]


class WindowLayers(Layers):
    """What the arms of windows have otherwise."""

    case: WindowCase
    folds_current = False
    """A flush folds the ring only, and appends its own tokens to it."""

    def held(self, offsets: Tensor) -> Tensor:
        """``[B]`` tokens that each row's ring holds at the start of the next cycle, by its phase."""
        return self._taken(offsets) * self.case.accepted * self.flushes_per_cycle

    def _taken(self, offsets: Tensor) -> Tensor:
        return offsets + 1


class SteppedLayers(WindowLayers, StoredLayers):
    """What the arms share that step through a window from ``_states(copy) [B,T or 1,H,P,N]``, which they write too."""

    @functools.cached_property
    def _accepted(self) -> Tensor:
        return torch.full((self.case.batch_size,), self.case.accepted, dtype=torch.int32, device=self.device)

    def _states(self, copy: int) -> Tensor:
        raise NotImplementedError

    def _steps(self, passes: int, slots: Tensor) -> None:
        out = self.out_of(passes)
        for copy in range(self.copies):
            window = self.tokens.at(passes, copy)
            self._step(self.case.geometry.family, out[copy], self._states(copy), window, slots, self._accepted)


class SnapshotsLayers(SteppedLayers):
    """Copies of a layer that keeps a state behind every token of a window: ``states [copies,B,T,H,P,N]``. ``placed``
    puts them where the step wants them.
    """

    def _start(self, state: Tensor, placed: Callable[[Tensor], Tensor]) -> None:
        shape = (self.copies, self.case.batch_size, self.case.window, *state.shape[2:])
        self.states = placed(torch.zeros(shape, dtype=state.dtype, device=state.device))
        self.state.copy_(state)

    @property
    def state(self) -> Tensor:
        """``[copies,B,H,P,N]`` behind the last accepted token."""
        return self.states[:, :, self.case.accepted - 1]

    def _states(self, copy: int) -> Tensor:
        return self.states[copy]


class OracleLayers(SteppedLayers):
    """As `SnapshotsLayers`, of a step that is told how many tokens will be accepted: ``state [copies,B,H,P,N]``."""

    def _states(self, copy: int) -> Tensor:
        return self.state[copy, :, None]


class VerifyLayers(WindowLayers, ReplayLayers):
    """Copies of a replay layer, as the layers of one `ReplayCache` with a window. ``commit`` moves cursor and origin on
    the device, as `replayssm.kernels.triton.verify_commit.commit_window` does; without one the cache does.
    """

    def __init__(self, case: WindowCase, copies: int, step: Step, commit: Commit | None = None) -> None:
        super().__init__(case, copies, step, commit)
        self.positions = case.interval_length + 1

    @functools.cached_property
    def _accepted(self) -> Tensor:
        return torch.full((self.case.batch_size,), self.case.accepted, dtype=torch.int64, device=self.device)

    def _pass(self, passes: int, batch: Any) -> None:
        slots, cache = self.cache.index(batch), self.cache
        self._steps(passes, slots)
        if self._commit is None:
            cache.commit(batch, self._accepted)
        else:
            sizes = (cache.interval_length, self.case.window, cache.capacity)
            self._commit(cache.cursor, cache.origin, slots, self._accepted, *sizes)
