"""What a rule finds out about a claim, and how answers become a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.bearing import Question, is_direct, missing_models, other_timings
from analysis.cells import weaknesses

REPRODUCED, CONTRADICTED, PARTLY = "reproduced", "contradicted", "partly"
SUPPORTED, AGAINST = "supported on an analogue", "contradicted on an analogue"
UNCLEAR, NOT_RUN, CANNOT_RUN = "unclear on an analogue", "not run", "cannot run here"
VERDICTS = (REPRODUCED, CONTRADICTED, PARTLY, SUPPORTED, AGAINST, UNCLEAR, NOT_RUN, CANNOT_RUN)

OWN_KERNELS = "kernels: this project's"
COUNTED = "computed from bytes, not measured: from shapes and counted flushes, not from hardware counters"
YES, NO, OPEN = "yes", "no", "open"


@dataclass(frozen=True)
class Finding:
    """Our value with its interval, the verdict, what differed from the paper, a remark, and the evidence."""

    ours: str = ""
    verdict: str = NOT_RUN
    differed: str = ""
    note: str = ""
    rows: Sequence[Any] = ()
    """What the verdict rests on: rows of tables, or of records."""


def not_run(question: Question) -> Finding:
    """No record bears on the claim: says what is missing, or what a run would need."""
    missing = question.parameters.get("missing")
    if missing:
        return Finding(note=f"{missing} are not part of this version yet")
    left_out = other_timings(question)
    told = f"; left out, timed by no profile for evidence: {', '.join(left_out)}" if left_out else ""
    return Finding(note=f"needs {question.analogue}{told}")


def doubted(answers: list[str], rows: list[Any], estimates: list[float], bound: float) -> tuple[list[str], list[str]]:
    """The answers, open where a row proves nothing or lies no further from the bound than its A/A noise; and why."""
    sure, notes = [], []
    for answer, row, estimate in zip(answers, rows, estimates, strict=True):
        doubt = ", ".join(weak(row))
        if not doubt and answer != OPEN and math.log1p(row.aa_noise) >= abs(math.log(estimate / bound)):
            doubt = f"A/A noise of {100 * row.aa_noise:.1f} %, too much to tell {estimate:.2f} from {bound:g}"
        sure.append(OPEN if doubt else answer)
        notes += [f"{row.model}: {doubt}"] if doubt else []
    return sure, notes


def weak(row: Any) -> list[str]:
    return weaknesses(row.processes, row.rounds, row.aa_noise)


def verdict_of(answers: list[str], rows: list[Any], batch: int | None = None) -> str:
    """The verdict of all answers together; a reproduction needs the paper's card and batch and all of its models."""
    direct = all(is_direct(r) and batch in (None, r.batch_size) for r in rows)
    if all(a == YES for a in answers):
        return SUPPORTED if not direct else PARTLY if missing_models(rows) else REPRODUCED
    if all(a == NO for a in answers):
        return CONTRADICTED if direct else AGAINST
    return PARTLY if direct else UNCLEAR


def families(rows: list[Any]) -> str:
    return ", ".join(sorted({str(r.family) for r in rows}))


def with_bounds(row: Any, estimate: float) -> str:
    return f"{estimate:.2f} [{row.low:.2f}, {row.high:.2f}]"


def span(values: list[float], form: str = ".2f") -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
