"""Correctness gates: one whole flush cycle of an arm against the plain recurrence in float64, from the arm's own state.

Before and after timing, the state is taken as the arm left it, one more cycle runs pass by pass through the calls that
are timed, and outputs, state, ring, cursor and flush counts are compared with what protocol and recurrence give. Where
timing replays a graph of those calls, the same graph runs another cycle, judged by its outputs and the state it leaves.
Between flushes a checkpoint must not change at all: an arm that steps its state instead of replaying gives the right
numbers too, at another price. The passes since the start must be those of whole cycles, for stored arms as well, whose
state would not show a cycle of another length. The reference knows nothing of replay: it starts from the checkpoint and
steps through the tokens that the row's ring should hold, then through the cycle. Only to judge the ring itself, in the
middle and at the end of the cycle, is it folded into the checkpoint, in float64.

Budgets come from data: twice the error that an honest float32 version of the stored recurrence makes on the same rows,
with the same input dtype, a state rounded to its format at every step and one rounding of the output. A few rows of a
few copies are compared in float64, drawn anew at each check; all rows of all copies must be written (outputs are
poisoned with NaN before each pass) and, before timing, those of the other arms agree with the first arm's at every
pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.case import Case
from experiments.measure import devices
from experiments.measure.layers import phase_offsets
from experiments.measure.record import Comparison, Correctness
from replayssm.recurrence import FAMILIES

CHECKED_ROWS = 2
CHECKED_COPIES = 2
SLACK = 2.0
"""Budget over the error of the honest version."""
MARK = 1.0
"""Written into every copy's state before timing; a copy that still holds it afterwards was never stepped."""


@dataclass
class Cycle:
    """What one cycle gives for the checked rows: ``outputs [L,C,R,H,P]``; the state in the middle of the cycle, when
    the row last flushed, and at the end of the cycle, ``[C,R,H,P,N]`` each (C copies, R rows).
    """

    outputs: Tensor
    middle: Tensor
    flushed: Tensor
    final: Tensor


class Check:
    """The rows and copies of one check, drawn from the case's seed and the moment, and the results for them."""

    def __init__(self, case: Case, copies: int, moment: str) -> None:
        self.case, self.moment = case, moment
        generator = torch.Generator().manual_seed(case.seed + (11 if moment == "before" else 13))
        device = devices.of(case).tensors
        self.rows = draw(case.batch_size, CHECKED_ROWS, generator).to(device)
        self.copies = draw(copies, CHECKED_COPIES, generator).to(device)
        self.offsets = phase_offsets(case).to(device)
        self._start: dict[torch.dtype, Tensor] = {}
        self._made: dict[torch.dtype, Any] = {}
        self._references: dict[torch.dtype, Cycle] = {}
        self._first_honest: float | None = None

    def run(self, layers: Any, cycles_before: int, graph: Callable[[], object] | None) -> tuple[Correctness, Tensor]:
        """Judge one cycle of ``layers``, and one of ``graph``, which timing replays; also the outputs of the latter,
        else of the former, ``[L,copies,B,H,P]``.

        ``cycles_before`` is how many cycles have run since the layers were made. Mutates the layers.
        """
        # Before the cycles, which step every copy themselves.
        untouched = int((layers.state[:, 0, 0, 0, 0] == MARK).sum()) if self.moment == "after" else 0
        comparisons, outputs = [], {}
        parts = ("calls", "graph") if graph else ("calls",)
        for part in parts if self.moment == "before" else reversed(parts):
            by_part = self._calls(layers) if part == "calls" else self._graph(layers, graph)
            comparisons += by_part[0]
            outputs[part] = by_part[1]
        cycles = cycles_before + len(parts)
        flushes = layers.flushes
        comparisons += [
            exact("passes more or less than whole cycles", abs(layers.passes - cycles * self.case.steps_per_cycle)),
            exact("flush counts that differ between rows or copies", int(flushes.max() - flushes.min())),
        ]
        correctness = Correctness(
            moment=self.moment,
            comparisons=tuple(comparisons),
            rows=tuple(self.rows.tolist()),
            copies=tuple(self.copies.tolist()),
            cursor_equal=bool((layers.cursor == layers.held(self.offsets)).all()),
            flushes_counted=int(flushes.sum()),
            flushes_expected=cycles * layers.flushes_per_cycle * flushes.numel(),
            copies_touched=layers.copies - untouched,
            copies_expected=layers.copies,
        )
        if self._first_honest is None and not correctness.faults():
            self._first_honest = self._honest_output(layers.out.dtype)
        return correctness, outputs[parts[-1]]

    def _calls(self, layers: Any) -> tuple[list[Comparison], Tensor]:
        """One cycle pass by pass."""
        truth, honest = self._references_from(layers)
        passed, unwritten, rewritten = [], 0, 0
        for passes in range(self.case.steps_per_cycle):
            before, out = self._rows_of(layers.state), layers.out_of(passes)
            out.fill_(torch.nan)
            layers.run_pass(passes)
            passed.append(out.clone())
            unwritten += int((~out.isfinite()).sum())
            rewritten += self._rewritten(layers, passes, before)
            if passes == self.case.steps_per_cycle // 2:
                middle = self._folded(layers)
        outputs = torch.stack(passed)
        comparisons = [
            *self._outputs(outputs, unwritten, truth, honest),
            compare("state, and ring in the middle of the cycle", middle, truth.middle, honest.middle, 3),
            *self._states(layers, truth, honest),
            exact("state elements written between flushes", rewritten),
        ]
        return comparisons, outputs

    def _graph(self, layers: Any, graph: Callable[[], object]) -> tuple[list[Comparison], Tensor]:
        """One cycle of the graph that is timed."""
        truth, honest = self._references_from(layers)
        layers.out.fill_(torch.nan)
        graph()
        outputs = layers.out.clone()
        comparisons = self._outputs(outputs, int((~outputs.isfinite()).sum()), truth, honest)
        comparisons += self._states(layers, truth, honest)
        return [dataclasses.replace(c, quantity=f"graph: {c.quantity}") for c in comparisons], outputs

    def _references_from(self, layers: Any) -> tuple[Cycle, Cycle]:
        checkpoint = self._rows_of(layers.state)
        return self._reference(layers, checkpoint, torch.float64), self._reference(layers, checkpoint, torch.float32)

    def _outputs(self, outputs: Tensor, unwritten: int, truth: Cycle, honest: Cycle) -> list[Comparison]:
        checked = outputs[:, self.copies[:, None], self.rows]
        return [
            compare("output", checked, truth.outputs, honest.outputs.to(outputs.dtype), 2),
            exact("output elements not written or not finite", unwritten),
        ]

    def agreement(self, outputs: Tensor, first: Tensor) -> Comparison:
        """All rows of all copies at all passes, ``[L,copies,B,H,P]``, against the first arm's, both from the same
        start: the worst relative difference of a row. Both may differ from the truth by the budget, so the budget here
        is twice the larger one.
        """
        worst = max(self._honest_output(first.dtype), self._first_honest or 0.0)
        # Pass by pass, since all of them in float64 would take as much memory as the state.
        errors = [_relative(*pair, 2).nan_to_num(torch.inf).max() for pair in zip(outputs, first, strict=True)]
        error = float(torch.stack(errors).max())
        return Comparison("output of all rows against the first arm", error, 2 * SLACK * worst)

    def _honest_output(self, dtype: torch.dtype) -> float:
        """The worst error of the honest version of the arm judged last, with outputs in ``dtype``."""
        honest, truth = self._references[torch.float32], self._references[torch.float64]
        return float(_relative(honest.outputs.to(dtype), truth.outputs, 2).max())

    def _rewritten(self, layers: Any, passes: int, before: Tensor) -> int:
        """Elements of checkpoints ``[C,R,H,P,N]`` of which a pass changed a bit in rows that do not flush at it."""
        if not layers.flushes_per_cycle:
            return 0
        kept = layers.flushing_pass(self.offsets[self.rows]) != passes
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[before.element_size()]
        return int((self._rows_of(layers.state).view(bits) != before.view(bits))[:, kept].sum())

    def _states(self, layers: Any, truth: Cycle, honest: Cycle) -> list[Comparison]:
        """The checkpoint as it was when the row last flushed, and checkpoint plus ring at the end of the cycle."""
        checkpoint = self._rows_of(layers.state)
        if not layers.flushes_per_cycle:
            return [compare("state", checkpoint, truth.final, honest.final, 3)]
        return [
            compare("state", checkpoint, truth.flushed, honest.flushed, 3),
            compare("state and ring", self._folded(layers), truth.final, honest.final, 3),
        ]

    def _folded(self, layers: Any) -> Tensor:
        """What the checkpoint and the ring stand for, ``[C,R,H,P,N]`` in float64; a stored arm's state as it is."""
        checkpoint = self._rows_of(layers.state).double()
        if not layers.flushes_per_cycle:
            return checkpoint
        family, folded = FAMILIES[self.case.geometry.family], []
        for copy, state in zip(self.copies.tolist(), checkpoint, strict=True):
            ring = layers.ring(copy, self.rows)
            weights = (layers.tokens.at(0, copy).A,) if self.case.geometry.family == "mamba2" else ()
            folded.append(family.fold(state, ring, layers.cursor[self.rows], *weights))
        return torch.stack(folded)

    def _rows_of(self, tensor: Tensor) -> Tensor:
        return tensor[self.copies[:, None], self.rows].clone()

    def _reference(self, layers: Any, checkpoint: Tensor, dtype: torch.dtype) -> Cycle:
        """The plain recurrence from ``checkpoint [C,R,H,P,N]``. Before timing all arms start from the same state, so
        the first arm's reference serves the others.
        """
        of = type(layers)
        made = layers.folds_current, None if dtype == torch.float64 else (of.as_rounded, of.honest_step)
        if dtype in self._references and self._made[dtype] == made and torch.equal(self._start[dtype], checkpoint):
            return self._references[dtype]
        results = [
            self._steps(layers, copy, state, dtype)
            for copy, state in zip(self.copies.tolist(), checkpoint, strict=True)
        ]
        outputs, *states = zip(*results, strict=True)
        self._start[dtype], self._made[dtype] = checkpoint, made
        self._references[dtype] = Cycle(torch.stack(outputs, dim=1), *(torch.stack(state) for state in states))
        return self._references[dtype]

    def _steps(self, layers: Any, copy: int, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """One copy's rows in ``dtype``: first through the tokens that its ring holds behind the checkpoint, then
        through the cycle. In float32 the state is rounded to its own format at every step, as an honest kernel does.
        """
        recurrence, length = FAMILIES[self.case.geometry.family].step, self.case.interval_length
        in_ring = layers.held(self.offsets)[self.rows]
        flushing = layers.flushing_pass(self.offsets[self.rows])
        last_folded = flushing - int(not layers.folds_current)
        exact = dtype == torch.float64
        stored = dtype if exact else state.dtype

        def step(state: Tensor, passes: int) -> tuple[Tensor, Tensor]:
            inputs = layers.tokens.at(passes, copy).rows(self.rows)
            if exact:
                y, state = recurrence(state, inputs)
            else:
                y, state = layers.honest_step(recurrence, state, inputs, flushing != passes)
            return y, state.to(stored).to(dtype)

        state = state.to(dtype)
        for passes in range(-int(in_ring.max()), 0):
            _, stepped = step(state, passes)
            state = torch.where((in_ring >= -passes).view(-1, 1, 1, 1), stepped, state)
        outputs, middle, flushed = [], state, state
        for passes in range(length):
            y, state = step(state, passes)
            outputs.append(y)
            middle = state if passes == length // 2 else middle
            flushed = torch.where((last_folded == passes).view(-1, 1, 1, 1), state, flushed)
        return torch.stack(outputs), middle, flushed, state


def mark_copies(layers: Any) -> None:
    """Put the mark into every copy's state, to be looked for after timing."""
    layers.state[:, 0, 0, 0, 0] = MARK


def draw(count: int, wanted: int, generator: torch.Generator) -> Tensor:
    """Up to ``wanted`` of ``count``, the last always among them, in ascending order."""
    others = torch.randperm(count - 1, generator=generator)[: wanted - 1]
    return torch.cat([others, torch.tensor([count - 1])]).sort().values


def _relative(actual: Tensor, expected: Tensor, vector_dims: int) -> Tensor:
    """Relative error by norm of each vector, which spans the last ``vector_dims`` axes."""
    dims = tuple(range(-vector_dims, 0))
    expected = expected.double()
    squared_error = (actual.double() - expected).square().sum(dims)
    return (squared_error / expected.square().sum(dims)).sqrt()


def compare(quantity: str, actual: Tensor, truth: Tensor, honest: Tensor, vector_dims: int) -> Comparison:
    """The worst row's error, and twice the honest version's worst."""
    error = _relative(actual, truth, vector_dims).nan_to_num(torch.inf).max()
    budget = SLACK * _relative(honest, truth, vector_dims).max()
    return Comparison(quantity, float(error), float(budget))


def exact(quantity: str, count: int) -> Comparison:
    return Comparison(quantity, float(count), 0.0)
