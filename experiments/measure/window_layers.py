"""What an arm of a case with a window is timed on: rotated copies of one layer, as in `experiments.measure.layers`.

A pass verifies a window of T tokens in every copy and then commits the first ``accepted`` of them. A cycle is as many
passes as lie between two flushes of a row; at its start a row's ring holds the accepted tokens of its last pass, with
staggered phases of its last 1 to F, put there by the arm's own steps at passes before 0. Snapshots take the same
windows. Copy c takes window (t + c) mod F at pass t; tokens that were rejected are never seen again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.case import WindowCase
from experiments.inputs import DTYPES, make_inputs
from experiments.measure import devices
from experiments.measure.layers import initial_state
from replayssm.cache import ReplayCache
from replayssm.kernels.torch.replay import ordered_ring

Step = Callable[..., None]
Commit = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, int], None]


class WindowTokens:
    """The inputs of a case: F windows for the whole batch, used in turn; the same for all arms."""

    def __init__(self, case: WindowCase) -> None:
        self.windows = _drawn_windows(case)

    def at(self, passes: int, copy: int) -> Any:
        """The window ``[B,T,...]`` of ``copy`` at pass ``passes``, which may be negative."""
        return self.windows[(passes + copy) % len(self.windows)]


@functools.lru_cache(maxsize=1)
def _drawn_windows(case: WindowCase) -> list[Any]:
    dtype, device = DTYPES[case.precision.inputs], devices.of(case).tensors
    count = case.steps_per_cycle * case.window
    tokens = make_inputs(case.geometry, case.batch_size, count, dtype=dtype, seed=case.seed, device=device)
    return [stacked(tokens[first : first + case.window]) for first in range(0, count, case.window)]


def stacked(tokens: list[Any]) -> Any:
    """Tokens one after the other as a window ``[B,T,...]``; A and D belong to the layer."""
    columns = zip(tokens[0]._fields, zip(*tokens, strict=True), strict=True)
    return type(tokens[0])(*(t[0] if n in ("A", "D") or t[0] is None else torch.stack(t, dim=1) for n, t in columns))


def phase_offsets(case: WindowCase) -> Tensor:
    """``[B]`` passes by which each row is ahead in its cycle."""
    rows = torch.arange(case.batch_size)
    return rows % case.steps_per_cycle if case.phase == "staggered" else torch.zeros_like(rows)


class WindowLayers:
    """What all arms have: ``out [K,copies,B,T,H,P]`` keeps the outputs of K passes, one on a CPU, F on a GPU."""

    flushes_per_cycle: int
    folds_current = False
    """A flush folds the ring only, and appends its own tokens to it."""

    def __init__(self, case: WindowCase, copies: int) -> None:
        self.case, self.copies, self.tokens = case, copies, WindowTokens(case)
        self.device = devices.of(case).tensors
        kept = case.steps_per_cycle if self.device != "cpu" else 1
        shape = (kept, copies, case.batch_size, case.window, case.geometry.heads, case.geometry.head_dim)
        self.out = torch.full(shape, torch.nan, dtype=DTYPES[case.precision.inputs], device=self.device)
        self.passes = 0

    def cycle(self) -> None:
        """Passes over all copies, flushes and commits included: what one sample times."""
        for passes in range(self.case.steps_per_cycle):
            self.run_pass(passes)

    def run_pass(self, passes: int) -> None:
        """One window for every copy, then one commit. Counted in ``passes``."""
        raise NotImplementedError

    def held(self, offsets: Tensor) -> Tensor:
        """``[B]`` tokens that each row's ring holds at the start of the next cycle, by its phase."""
        return (offsets + 1) * self.case.accepted * self.flushes_per_cycle

    def flushing_pass(self, offsets: Tensor) -> Tensor:
        """``[B]`` pass of a cycle at which each row writes its checkpoint, by its phase."""
        return self.case.steps_per_cycle - 1 - offsets

    def as_rounded(self, inputs: Any) -> Any:
        """As in `experiments.measure.layers.Layers`."""
        return inputs

    def out_of(self, passes: int) -> Tensor:
        """``[copies,B,T,H,P]``, where pass ``passes`` writes its outputs."""
        return self.out[passes % len(self.out)]

    def _ahead(self) -> list[tuple[int, Tensor]]:
        """The passes before 0, each with the slots ``[B]`` that take part, -1 for the others."""
        offsets, slots = phase_offsets(self.case), torch.arange(self.case.batch_size)
        first = -int(offsets.max()) - 1
        return [(t, torch.where(offsets + 1 >= -t, slots, -1).to(self.device)) for t in range(first, 0)]


class SnapshotsLayers(WindowLayers):
    """Copies of a layer that keeps a state behind every token of a window: ``states [copies,B,T,H,P,N]``. ``placed``
    puts them where the step wants them.
    """

    flushes_per_cycle = 0
    positions = 1

    def __init__(
        self, case: WindowCase, copies: int, step: Step, placed: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(case, copies)
        start = initial_state(case, copies)
        shape = (copies, case.batch_size, case.window, *start.shape[2:])
        states = torch.zeros(shape, dtype=start.dtype, device=start.device)
        self.states = placed(states) if placed else states
        self.states[:, :, case.accepted - 1] = start
        self._slots = torch.arange(case.batch_size, device=self.device)
        self._accepted = torch.full((case.batch_size,), case.accepted, dtype=torch.int32, device=self.device)
        self._step = step
        for passes, slots in self._ahead():
            self._steps(passes, slots)

    @property
    def state(self) -> Tensor:
        """``[copies,B,H,P,N]`` behind the last accepted token."""
        return self.states[:, :, self.case.accepted - 1]

    @property
    def cursor(self) -> Tensor:
        return torch.zeros(self.case.batch_size, dtype=torch.int32, device=self.device)

    @property
    def flushes(self) -> Tensor:
        return torch.zeros(self.copies, self.case.batch_size, dtype=torch.int64, device=self.device)

    def run_pass(self, passes: int) -> None:
        self.passes += 1
        self._steps(passes, self._slots)

    def place(self, position: int) -> None:
        """A step is the same at every position."""

    def run_steps(self) -> None:
        """The steps of a pass, for timing alone."""
        self._steps(0, self._slots)

    def _steps(self, passes: int, slots: Tensor) -> None:
        out = self.out_of(passes)
        for copy in range(self.copies):
            window = self.tokens.at(passes, copy)
            self._step(self.case.geometry.family, out[copy], self.states[copy], window, slots, self._accepted)


class VerifyLayers(WindowLayers):
    """Copies of a replay layer, as the layers of one `ReplayCache` with a window. ``commit`` moves cursor and origin on
    the device, as `replayssm.kernels.triton.verify_commit.commit_window` does; without one the cache does.
    """

    flushes_per_cycle = 1

    def __init__(self, case: WindowCase, copies: int, step: Step, commit: Commit | None = None) -> None:
        super().__init__(case, copies)
        self.positions = case.interval_length + 1
        self.cache = ReplayCache(
            case.geometry,
            slots=case.batch_size,
            layers=copies,
            interval_length=case.interval_length,
            window=case.window,
            state_dtype=DTYPES[case.precision.state],
            input_dtype=DTYPES[case.precision.inputs],
            device=self.device,
        )
        self._step, self._commit = step, commit
        self._layers = [self.cache.layer(copy) for copy in range(copies)]
        self._handles = sorted(self.cache.allocate(case.batch_size), key=lambda slot: slot.index)
        self._batch = self.cache.batch(self._handles)
        self._accepted = torch.full((case.batch_size,), case.accepted, dtype=torch.int64, device=self.device)
        self.cache.load_state(self._batch, initial_state(case, copies))
        for passes, slots in self._ahead():
            active = [self._handles[slot] if slot >= 0 else None for slot in slots.tolist()]
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
        slots, cache = self.cache.index(batch), self.cache
        self._steps(passes, slots)
        if self._commit is None:
            cache.commit(batch, self._accepted)
        else:
            sizes = (cache.interval_length, self.case.window, cache.capacity)
            self._commit(cache.cursor, cache.origin, slots, self._accepted, *sizes)
