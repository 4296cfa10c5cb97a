"""What an arm is timed on: rotated copies of one layer's state, stepped like the layers of a model.

The copies act as layers. A pass steps every copy once and then commits once; a cycle is F passes, after which every row
has flushed exactly once, whatever its phase: F is L in standard decoding. Copy c takes token (t + c) mod F at pass t,
so that a wrong copy or a wrong token shows in the outputs. Together the copies exceed the last-level cache by the
case's cold factor, which makes each pass find its state in memory, not in cache.

On a GPU a cycle is captured in a CUDA graph, and the outputs of all its passes are kept, to be looked at afterwards.

With staggered phases row r starts r mod F passes ahead, which the arm's own steps took at passes before 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.case import Case, WindowCase
from experiments.inputs import DTYPES, make_inputs, make_state
from experiments.measure import devices
from replayssm.cache import ReplayCache
from replayssm.kernels.torch.replay import ordered_ring

Step = Callable[..., None]
Commit = Callable[[Tensor, Tensor, Tensor, int, int], None]
DRAWN_ROWS = 64
"""Rows of a state that are drawn; those of larger batches repeat them with their heads moved on."""


class Tokens:
    """The inputs of a case: F tokens, or windows, for the whole batch, used in turn; the same for all arms."""

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
    """``[B]`` passes by which each row is ahead in its cycle."""
    rows = torch.arange(case.batch_size)
    return rows % case.steps_per_cycle if case.phase == "staggered" else torch.zeros_like(rows)


class Layers:
    """What all arms have: ``out [K,copies,B,H,P]``, with a window ``[K,copies,B,T,H,P]``, keeps the outputs of K
    passes, one on a CPU, F on a GPU.
    """

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
        """F passes over all copies, flushes and commits included: what one sample times."""
        for passes in range(self.case.steps_per_cycle):
            self.run_pass(passes)

    def run_pass(self, passes: int) -> None:
        """One token for every copy, then one commit, of which a stored layer has none. Counted in ``passes``."""
        raise NotImplementedError

    def held(self, offsets: Tensor) -> Tensor:
        """``[B]`` tokens of the stream that each row's ring holds at the start of the next cycle, by its phase."""
        return offsets * self.flushes_per_cycle

    def flushing_pass(self, offsets: Tensor) -> Tensor:
        """``[B]`` pass of a cycle at which each row writes its checkpoint, by its phase."""
        return self.case.steps_per_cycle - 1 - offsets

    def as_rounded(self, inputs: Any) -> Any:
        """``inputs`` of the recurrence as an honest version of this arm has them: for a kernel that rounds on the way,
        and whose record says so. The truth is that of the inputs as they are.
        """
        return inputs

    def honest_step(self, step: Any, state: Tensor, inputs: Any, appended: Tensor) -> tuple[Tensor, Tensor]:
        """Output and new state of an honest version of this arm, from the recurrence's ``step``; ``appended [R]`` are
        the rows whose token goes into the ring, not into the checkpoint.
        """
        return step(state, self.as_rounded(inputs))

    def out_of(self, passes: int) -> Tensor:
        """``[copies,B,H,P]`` or ``[copies,B,T,H,P]``, where pass ``passes`` writes its outputs."""
        return self.out[passes % len(self.out)]

    def _outputs(self) -> Tensor:
        g, kept = self.case.geometry, self.case.steps_per_cycle if self.device != "cpu" else 1
        window = (self.case.window,) if isinstance(self.case, WindowCase) else ()
        shape = (kept, self.copies, self.case.batch_size, *window, g.heads, g.head_dim)
        return torch.full(shape, torch.nan, dtype=DTYPES[self.case.precision.inputs], device=self.device)

    def _taken(self, offsets: Tensor) -> Tensor:
        """``[B]`` passes that each row takes before 0, by its phase."""
        return offsets

    def _ahead(self) -> list[tuple[int, Tensor]]:
        """The passes before 0, each with the slots ``[B]`` that take part, -1 for the others."""
        taken, slots = self._taken(phase_offsets(self.case)), torch.arange(self.case.batch_size)
        return [(t, torch.where(taken >= -t, slots, -1).to(self.device)) for t in range(-int(taken.max()), 0)]


class StoredLayers(Layers):
    """Copies of a stored-state layer; ``state [copies,B,H,P,N]``. ``placed`` copies the initial state to where the step
    wants it.
    """

    flushes_per_cycle = 0
    positions = 1

    def __init__(self, case: Case, copies: int, step: Step, placed: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__(case, copies)
        self._start(initial_state(case, copies), placed)
        self._slots = torch.arange(case.batch_size, device=self.device)
        self._step = step
        for passes, slots in self._ahead():
            self._steps(passes, slots)

    def _start(self, state: Tensor, placed: Callable[[Tensor], Tensor]) -> None:
        self.state = placed(state)

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
    Of ``ring``, options of the cache: ``raw_fold`` keeps v and beta in the rings, from which flushes then fold.
    """

    flushes_per_cycle = 1

    def __init__(self, case: Case, copies: int, step: Step, commit: Commit | None = None, **ring: Any) -> None:
        super().__init__(case, copies)
        self.positions = case.interval_length
        self.cache = ReplayCache(
            case.geometry,
            slots=case.batch_size,
            layers=copies,
            interval_length=case.interval_length,
            window=case.window if isinstance(case, WindowCase) else None,
            state_dtype=DTYPES[case.precision.state],
            input_dtype=DTYPES[case.precision.inputs],
            device=self.device,
            **ring,
        )
        self._step, self._commit = step, commit
        self._layers = [self.cache.layer(copy) for copy in range(copies)]
        handles = sorted(self.cache.allocate(case.batch_size), key=lambda slot: slot.index)
        self._batch = self.cache.batch(handles)
        self.cache.load_state(self._batch, initial_state(case, copies))
        for passes, slots in self._ahead():
            active = [handles[slot] if slot >= 0 else None for slot in slots.tolist()]
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


def stacked(tokens: list[Any]) -> Any:
    """Tokens one after the other as a window ``[B,T,...]``; A and D belong to the layer."""
    columns = zip(tokens[0]._fields, zip(*tokens, strict=True), strict=True)
    return type(tokens[0])(*(t[0] if n in ("A", "D") or t[0] is None else torch.stack(t, dim=1) for n, t in columns))


@functools.lru_cache(maxsize=1)
def _drawn_tokens(case: Case) -> list[Any]:
    dtype, device = DTYPES[case.precision.inputs], devices.of(case).tensors
    window = case.window if isinstance(case, WindowCase) else 1
    count = case.steps_per_cycle * window
    tokens = make_inputs(case.geometry, case.batch_size, count, dtype=dtype, seed=case.seed, device=device)
    if not isinstance(case, WindowCase):
        return tokens
    return [stacked(tokens[first : first + window]) for first in range(0, count, window)]
