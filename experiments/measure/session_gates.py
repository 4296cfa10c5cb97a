"""What a decode case's arm must show before and after it is timed, and how its tokens compare with another arm's.

The very step that is timed runs another flush cycle, on a GPU as the same graph. Of a few rows of a few state-space
layers, its inputs at each step are put through the plain recurrence in float64 from the state as the arm left it, and
outputs and last state are compared. Budgets are twice the error of an honest version: the recurrence in float32, the
state rounded to its format at every step and the output once. Every layer must have changed every row's memory, which
is moved first, since a text that says one word again and again leaves a short memory as it is. The kernels must have
counted one flush a row, layer and L steps, of all that ran since the session began; with drafts, as many as follow from
how many of them were accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.case import Case
from experiments.measure.gates import CHECKED_COPIES, CHECKED_ROWS, SLACK, compare, draw, exact
from experiments.measure.record import Comparison, Correctness
from experiments.measure.session import Session

ROUNDING = 2.0**-24
"""Of one float32 operation, relative."""


@dataclass
class Chosen:
    """Rows and layers of one check, drawn from the case's seed and the moment."""

    rows: Tensor
    layers: list[int]

    @classmethod
    def of(cls, case: Case, layers: int, moment: str) -> Chosen:
        generator = torch.Generator().manual_seed(case.seed + (11 if moment == "before" else 13))
        rows = draw(case.batch_size, CHECKED_ROWS, generator)
        return cls(rows, draw(layers, CHECKED_COPIES, generator).tolist())


def check(session: Session, moment: str, chosen: Chosen) -> Correctness:
    """Judge one flush cycle of a session that stands at the end of whole cycles. Mutates it."""
    case, rows = session.case, chosen.rows.to(session.rows.device)
    if not session.watched.seen:
        session.run(case.interval_length)
    unsettle(session.stored)
    marks, state_dim = session.marks(), session.states.geometry.state_dim
    starts = {number: session.state(number, rows) for number in chosen.layers}
    tokens: list[dict[int, tuple[Any, Any]]] = []
    outputs: list[dict[int, Tensor]] = []
    unwritten, changed = 0, torch.zeros(marks.shape[:2], dtype=torch.bool, device=marks.device)
    for _ in range(case.interval_length):
        session.run(1)
        tokens.append({number: session.inputs(number, rows) for number in chosen.layers})
        outputs.append({number: session.watched.seen[number].out[rows].clone() for number in chosen.layers})
        marks, before = session.marks(), marks
        changed |= (marks != before).any(-1)
        unwritten += sum(int((~session.watched.seen[n].out.isfinite()).sum()) for n in chosen.layers)
    comparisons = [exact("output elements not finite", unwritten)]
    for number in chosen.layers:
        exact_inputs, honest_inputs = zip(*(at[number] for at in tokens), strict=True)
        made = torch.stack([at[number] for at in outputs])
        truth, last = _stepped(session, starts[number], exact_inputs, None)
        honest, rounded = _stepped(session, starts[number], honest_inputs, session.state_dtype)
        comparisons += [
            _compared(f"output of layer {number}", made, truth, honest.to(made.dtype), 2, state_dim),
            _compared(f"state of layer {number}", session.state(number, rows), last, rounded, 3, state_dim),
        ]
    flushes, touched = session.flushes, changed.all(-1)
    comparisons.append(exact("flush counts that differ between rows or layers", session.uneven_flushes))
    return Correctness(
        moment=moment,
        comparisons=tuple(comparisons),
        rows=tuple(chosen.rows.tolist()),
        copies=tuple(chosen.layers),
        cursor_equal=bool((session.cursor == session.held).all()),
        flushes_counted=int(flushes.sum()),
        flushes_expected=session.flushes_expected,
        copies_touched=int(touched.sum()),
        copies_expected=len(touched),
    )


def unsettle(states: Tensor) -> None:
    """Add to the first element of each ``[P,N]`` state, a mark, the largest of that state, so that it is not where a
    step would put it; with no more, the state's size and what errors are measured by stay what they were."""
    states[..., 0, 0] += torch.linalg.vector_norm(states, torch.inf, (-2, -1))


def _compared(
    quantity: str, actual: Tensor, truth: Tensor, honest: Tensor, vector_dims: int, state_dim: int
) -> Comparison:
    """As `compare`, the honest version being off by what a sum over the state's N in float32 is off by, a random walk
    of N roundings: in another order of summation it may err less."""
    found = compare(quantity, actual, truth, honest, vector_dims)
    return replace(found, budget=max(found.budget, SLACK * math.sqrt(state_dim) * ROUNDING))


def _stepped(
    session: Session, start: Tensor, tokens: Sequence[Any], stored: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Outputs ``[L,R,...,H,P]`` and last state of the plain recurrence: in float64, or with states of ``stored``."""
    state, outputs = start if stored is None else start.to(stored).float(), []
    for inputs in tokens:
        y, state = session.through(state, inputs, stored)
        outputs.append(y)
    return torch.stack(outputs), state


@dataclass
class Trace:
    """Of the first steps behind the prompt, ``[T,B]`` each: the likeliest token, its lead over the next one in logits,
    and the log-probability of the token that followed."""

    likeliest: Tensor
    lead: Tensor
    logprob: Tensor

    def first(self, steps: int) -> Trace:
        return Trace(self.likeliest[:steps], self.lead[:steps], self.logprob[:steps])


def trace(session: Session, steps: int) -> Trace:
    """Restarts the session and runs ``steps`` steps, whole cycles; the logits are those of the step that is timed."""
    session.restart()
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(steps):
        session.run(1)
        assert session.step.logits is not None
        logits = session.step.logits.float()
        best = logits.topk(2, dim=-1)
        chosen = logits.gather(1, session.tokens[:, None])[:, 0]
        logprob = chosen - logits.logsumexp(-1)
        found.append((best.indices[:, 0].cpu(), (best.values[:, 0] - best.values[:, 1]).cpu(), logprob.cpu()))
    made = Trace(*(torch.stack(part) for part in zip(*found, strict=True)))
    if not made.logprob.isfinite().all():
        raise RuntimeError("logits are not finite")
    return made


def agreement(own: Trace, other: Trace, forced: bool) -> dict[str, Any]:
    """How an arm's tokens compare with another arm's: rows that differ somewhere, the tokens before a row's first
    difference, the lead that the other arm's token had there, and the difference of log-probabilities as long as both
    arms had read the same tokens: everywhere where these are ``forced``.
    """
    steps, rows = own.likeliest.shape
    differs = own.likeliest != other.likeliest
    first = torch.where(differs.any(0), differs.int().argmax(0), steps)
    there = first[first < steps]
    lead = other.lead[there, (first < steps).nonzero()[:, 0]]
    same = torch.ones_like(differs) if forced else torch.arange(steps)[:, None] < first
    drift = (own.logprob - other.logprob).abs()[same]
    return {
        "steps": steps,
        "rows": rows,
        "rows_that_differ": len(there),
        "tokens_equal": round(1 - float(differs[same].float().mean()) if same.any() else 1.0, 6),
        "agreement_length": {"min": int(first.min()), "median": float(first.float().median())},
        "largest_lead_at_first_difference": float(lead.max()) if len(lead) else 0.0,
        "logprob_drift": {"mean": float(drift.mean()), "max": float(drift.max())} if drift.numel() else {},
    }
