"""What an arm is timed on: rotated copies of one layer's state, stepped like the layers of a model.

The copies act as layers. A pass steps every copy once and then commits once; a cycle is L passes, after which every
row has flushed exactly once, whatever its phase. Copy c takes token (t + c) mod L at pass t, so that a wrong copy or a
wrong token shows in the outputs. Together the copies exceed the last-level cache by the case's cold factor, which makes
each pass find its state in memory, not in cache.

With staggered phases row r starts with r mod L tokens in its ring, put there by the arm's own steps at passes before 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.case import Case
from experiments.inputs import DTYPES, make_inputs, make_state
from replayssm.cache import ReplayCache

Step = Callable[..., None]


class Tokens:
    """The inputs of a case: L tokens for the whole batch, used in turn; the same for all arms."""

    def __init__(self, case: Case) -> None:
        self.tokens = _drawn_tokens(case)

    def at(self, passes: int, copy: int) -> Any:
        """What ``copy`` gets at pass ``passes``, which may be negative (before the first cycle)."""
        return self.tokens[(passes + copy) % len(self.tokens)]


@functools.lru_cache(maxsize=1)
def initial_state(case: Case, copies: int) -> Tensor:
    """``[copies,B,H,P,N]``: rows of one drawn state, shifted by one a copy. Shared by the arms: not to be changed."""
    drawn = make_state(case.geometry, case.batch_size, dtype=DTYPES[case.precision.state], seed=case.seed + 1)
    return torch.stack([drawn.roll(copy, dims=0) for copy in range(copies)])


def phase_offsets(case: Case) -> Tensor:
    """``[B]`` tokens in each row's ring at the start of a cycle."""
    rows = torch.arange(case.batch_size)
    return rows % case.interval_length if case.phase == "staggered" else torch.zeros_like(rows)


class StoredLayers:
    """Copies of a stored-state layer; ``state [copies,B,H,P,N]``, ``out [copies,B,H,P]``."""

    flushes_per_cycle = 0

    def __init__(self, case: Case, copies: int, step: Step) -> None:
        self.case, self.copies, self.tokens = case, copies, Tokens(case)
        self.state = initial_state(case, copies).clone()
        self.out = _outputs(case, copies)
        self.passes = 0
        self._slots = torch.arange(case.batch_size)
        self._step = step
        offsets = phase_offsets(case)
        for passes in range(1 - case.interval_length, 0):
            slots = torch.where(offsets >= -passes, self._slots, -1)
            for copy in range(copies):
                step(self.out[copy], self.state[copy], self.tokens.at(passes, copy), slots)

    def cycle(self) -> None:
        """L passes over all copies: what one sample times."""
        for passes in range(self.case.interval_length):
            self.run_pass(passes)

    def run_pass(self, passes: int) -> None:
        """One token for every copy, then one commit, of which a stored layer has none. Counted in ``passes``."""
        self.passes += 1
        for copy in range(self.copies):
            self._step(self.out[copy], self.state[copy], self.tokens.at(passes, copy), self._slots)

    @property
    def cursor(self) -> Tensor:
        return torch.zeros(self.case.batch_size, dtype=torch.int32)

    @property
    def flushes(self) -> Tensor:
        """``[copies,B]`` folds the kernels counted since the start."""
        return torch.zeros(self.copies, self.case.batch_size, dtype=torch.int64)


class ReplayLayers:
    """Copies of a replay layer, as the layers of one `ReplayCache`; otherwise like `StoredLayers`."""

    flushes_per_cycle = 1

    def __init__(self, case: Case, copies: int, step: Step) -> None:
        self.case, self.copies, self.tokens = case, copies, Tokens(case)
        self.cache = ReplayCache(
            case.geometry,
            slots=case.batch_size,
            layers=copies,
            interval_length=case.interval_length,
            state_dtype=DTYPES[case.precision.state],
            input_dtype=DTYPES[case.precision.inputs],
        )
        self.out = _outputs(case, copies)
        self.passes = 0
        self._step = step
        self._layers = [self.cache.layer(copy) for copy in range(copies)]
        handles = sorted(self.cache.allocate(case.batch_size), key=lambda slot: slot.index)
        self._batch = self.cache.batch(handles)
        self.cache.load_state(self._batch, initial_state(case, copies))
        offsets = phase_offsets(case)
        for passes in range(1 - case.interval_length, 0):
            active = [slot if offset >= -passes else None for slot, offset in zip(handles, offsets, strict=True)]
            self._pass(passes, self.cache.batch(active))

    @property
    def state(self) -> Tensor:
        return self.cache.state

    @property
    def cursor(self) -> Tensor:
        return self.cache.cursor

    @property
    def flushes(self) -> Tensor:
        return self.cache.flushes

    def cycle(self) -> None:
        """L passes over all copies, flushes and commits included: what one sample times."""
        for passes in range(self.case.interval_length):
            self.run_pass(passes)

    def run_pass(self, passes: int) -> None:
        """One token for every copy, then one commit. Counted in ``passes``."""
        self.passes += 1
        self._pass(passes, self._batch)

    def _pass(self, passes: int, batch: Any) -> None:
        slots = self.cache.index(batch)
        for copy, layer in enumerate(self._layers):
            self._step(self.out[copy], layer, self.tokens.at(passes, copy), slots)
        self.cache.commit(batch)


@functools.lru_cache(maxsize=1)
def _drawn_tokens(case: Case) -> list[Any]:
    dtype = DTYPES[case.precision.inputs]
    return make_inputs(case.geometry, case.batch_size, case.interval_length, dtype=dtype, seed=case.seed)


def _outputs(case: Case, copies: int) -> Tensor:
    g = case.geometry
    shape = (copies, case.batch_size, g.heads, g.head_dim)
    return torch.full(shape, torch.nan, dtype=DTYPES[case.precision.inputs])
