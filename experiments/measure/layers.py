"""What an arm is timed on: rotated copies of one layer's state, stepped like the layers of a model.

The copies act as layers. A pass steps every copy once and then commits once; a cycle is L passes, after which every
row has flushed exactly once, whatever its phase. Copy c takes token (t + c) mod L at pass t, so that a wrong copy or a
wrong token shows in the outputs. Together the copies exceed the last-level cache by the case's cold factor, which makes
each pass find its state in memory, not in cache.

On a GPU a cycle is captured in a CUDA graph, and the outputs of all its passes are kept, to be looked at afterwards.

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
from experiments.measure import devices
from replayssm.cache import ReplayCache
from replayssm.kernels.torch.replay import ordered_ring

Step = Callable[..., None]
Commit = Callable[[Tensor, Tensor, Tensor, int, int], None]
DRAWN_ROWS = 64
"""Rows of a state that are drawn; those of larger batches repeat them with their heads moved on."""


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
    rows = min(case.batch_size, DRAWN_ROWS)
    drawn = make_state(case.geometry, rows, dtype=torch.float32, seed=case.seed + 1)
    drawn = drawn.to(devices.of(case).tensors, DTYPES[case.precision.state])
    blocks = [drawn.roll(block, dims=1) for block in range(-(-case.batch_size // rows))]
    drawn = torch.cat(blocks)[: case.batch_size]
    return torch.stack([drawn.roll(copy, dims=0) for copy in range(copies)])


def share(case: Case, copies: int) -> None:
    """Draw what the layers of all arms share, unless it is there, so that no arm is charged for its memory."""
    initial_state(case, copies)
    _drawn_tokens(case)


def forget() -> None:
    """Free the tensors of the last case, which the next one does not use."""
    initial_state.cache_clear()
    _drawn_tokens.cache_clear()


def phase_offsets(case: Case) -> Tensor:
    """``[B]`` tokens in each row's ring at the start of a cycle."""
    rows = torch.arange(case.batch_size)
    return rows % case.interval_length if case.phase == "staggered" else torch.zeros_like(rows)


class Layers:
    """What all arms have: ``out [K,copies,B,H,P]`` keeps the outputs of K passes, one on a CPU, L on a GPU."""

    flushes_per_cycle: int
    folds_current = True
    """Whether a flush folds its own token too, or the ring only and appends that token to it."""
    positions: int
    """Ring lengths at which a step is another one."""

    def __init__(self, case: Case, copies: int) -> None:
        self.case, self.copies, self.tokens = case, copies, Tokens(case)
        self.device = devices.of(case).tensors
        self.out = self._outputs()
        self.passes = 0

    def cycle(self) -> None:
        """L passes over all copies, flushes and commits included: what one sample times."""
        for passes in range(self.case.interval_length):
            self.run_pass(passes)

    def run_pass(self, passes: int) -> None:
        """One token for every copy, then one commit, of which a stored layer has none. Counted in ``passes``."""
        raise NotImplementedError

    def held(self, offsets: Tensor) -> Tensor:
        """``[B]`` tokens of the stream that each row's ring holds at the start of the next cycle, by its phase."""
        return offsets * self.flushes_per_cycle

    def flushing_pass(self, offsets: Tensor) -> Tensor:
        """``[B]`` pass of a cycle at which each row writes its checkpoint, by its phase."""
        return self.case.interval_length - 1 - offsets

    def as_rounded(self, inputs: Any) -> Any:
        """``inputs`` of the recurrence as an honest version of this arm has them: for a kernel that rounds on the way,
        and whose record says so. The truth is that of the inputs as they are.
        """
        return inputs

    def out_of(self, passes: int) -> Tensor:
        """``[copies,B,H,P]``, where pass ``passes`` writes its outputs."""
        return self.out[passes % len(self.out)]

    def _outputs(self) -> Tensor:
        g, kept = self.case.geometry, self.case.interval_length if self.device != "cpu" else 1
        shape = (kept, self.copies, self.case.batch_size, g.heads, g.head_dim)
        return torch.full(shape, torch.nan, dtype=DTYPES[self.case.precision.inputs], device=self.device)


class StoredLayers(Layers):
    """Copies of a stored-state layer; ``state [copies,B,H,P,N]``. ``placed`` copies the initial state to where the step
    wants it.
    """

    flushes_per_cycle = 0
    positions = 1

    def __init__(self, case: Case, copies: int, step: Step, placed: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__(case, copies)
        self.state = placed(initial_state(case, copies))
        self._slots = torch.arange(case.batch_size, device=self.device)
        self._step = step
        offsets = phase_offsets(case).to(self.device)
        for passes in range(-int(offsets.max()), 0):
            self._steps(passes, torch.where(offsets >= -passes, self._slots, -1))

    def run_pass(self, passes: int) -> None:
        self.passes += 1
        self._steps(passes, self._slots)

    def place(self, position: int) -> None:
        """A stored step is the same at every position."""

    def run_steps(self) -> None:
        """The steps of a pass, for timing alone."""
        self._steps(0, self._slots)

    def _steps(self, passes: int, slots: Tensor) -> None:
        out = self.out_of(passes)
        for copy in range(self.copies):
            self._step(out[copy], self.state[copy], self.tokens.at(passes, copy), slots)

    @property
    def cursor(self) -> Tensor:
        return torch.zeros(self.case.batch_size, dtype=torch.int32, device=self.device)

    @property
    def flushes(self) -> Tensor:
        """``[copies,B]`` folds the kernels counted since the start."""
        return torch.zeros(self.copies, self.case.batch_size, dtype=torch.int64, device=self.device)


class ReplayLayers(Layers):
    """Copies of a replay layer, as the layers of one `ReplayCache`. ``commit`` moves cursor and origin on the device,
    as `replayssm.kernels.triton.commit.commit` does; without one the cache does, which no CUDA graph can capture.
    ``raw_fold`` keeps v and beta in the rings, from which flushes then fold.
    """

    flushes_per_cycle = 1

    def __init__(
        self, case: Case, copies: int, step: Step, commit: Commit | None = None, raw_fold: bool = False
    ) -> None:
        super().__init__(case, copies)
        self.positions = case.interval_length
        self.cache = ReplayCache(
            case.geometry,
            slots=case.batch_size,
            layers=copies,
            interval_length=case.interval_length,
            state_dtype=DTYPES[case.precision.state],
            input_dtype=DTYPES[case.precision.inputs],
            raw_fold=raw_fold,
            device=self.device,
        )
        self._step, self._commit = step, commit
        self._layers = [self.cache.layer(copy) for copy in range(copies)]
        handles = sorted(self.cache.allocate(case.batch_size), key=lambda slot: slot.index)
        self._batch = self.cache.batch(handles)
        self.cache.load_state(self._batch, initial_state(case, copies))
        offsets = phase_offsets(case).tolist()
        for passes in range(-max(offsets), 0):
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

    def ring(self, copy: int, rows: Tensor) -> Any:
        """The rings of a copy's ``rows`` in time order, as the family's ``Ring`` tuple; free entries included."""
        return ordered_ring(self._layers[copy], rows)

    def run_pass(self, passes: int) -> None:
        self.passes += 1
        self._pass(passes, self._batch)

    def place(self, position: int) -> None:
        """Let every ring hold ``position`` tokens, whatever they are: for timing alone."""
        self.cache.cursor.fill_(position)

    def run_steps(self) -> None:
        """The steps of a pass with the rings as they are, and no commit: for timing alone."""
        self._steps(0, self.cache.index(self._batch))

    def _steps(self, passes: int, slots: Tensor) -> None:
        out = self.out_of(passes)
        for copy, layer in enumerate(self._layers):
            self._step(out[copy], layer, self.tokens.at(passes, copy), slots)

    def _pass(self, passes: int, batch: Any) -> None:
        slots = self.cache.index(batch)
        self._steps(passes, slots)
        if self._commit is None:
            self.cache.commit(batch)
        else:
            cache = self.cache
            self._commit(cache.cursor, cache.origin, slots, cache.interval_length, cache.capacity)


@functools.lru_cache(maxsize=1)
def _drawn_tokens(case: Case) -> list[Any]:
    dtype, device = DTYPES[case.precision.inputs], devices.of(case).tensors
    return make_inputs(case.geometry, case.batch_size, case.interval_length, dtype=dtype, seed=case.seed, device=device)
