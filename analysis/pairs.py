"""Rows of pairs: every replay arm against each other arm of its rounds, baselines as shipped and peers' replay too."""

from __future__ import annotations

import math
from typing import Any

from analysis.cells import (
    CASE,
    LOUD_AA,
    Cell,
    aa_noise,
    bounds,
    case_columns,
    digits,
    join,
    joined_remarks,
    weaknesses,
)
from analysis.load import describe, like_for_like
from analysis.stats import AMBIGUOUS, bootstrap, paired_log_speedup, verdict

COLUMNS = [
    *CASE,
    "arm",
    "kind",
    "against",
    "speedup",
    "low",
    "high",
    "verdict",
    "like_for_like",
    "processes",
    "rounds",
    "remarks",
]


def pair_rows(cell: Cell, labels: dict[str, str]) -> list[dict[str, Any]]:
    """Where a cell holds one other arm only there is nothing to add to its speedup."""
    names = sorted({arm for arms in cell.values() for arm in arms})
    if len(names) < 3:
        return []
    rows, noise = [], aa_noise(cell)
    loud = digits(math.expm1(noise))
    for arm in (name for name in names if name.startswith("replay/")):
        for other in (name for name in names if name != arm):
            pairs = [(arms[other], arms[arm]) for arms in cell.values() if {arm, other} <= set(arms)]
            pairs = [(a, b) for a, b in pairs if describe(a)["state"] == describe(b)["state"]]
            if not pairs:
                continue
            first = pairs[0][1]
            seed = f"{first.case_hash} {first.device['name']} {arm} against {other}"
            interval = bootstrap([paired_log_speedup(*pair) for pair in pairs], seed)
            notes = weaknesses(interval.processes, interval.rounds, loud)
            alike = all(like_for_like(b, a) for a, b in pairs)
            notes += [] if alike else ["the other computes its gates, this arm gets them ready"]
            row = case_columns(first, labels) | bounds(interval, "speedup") | {"against": other}
            row |= {"like_for_like": "yes" if alike else "no"}
            row |= {"verdict": AMBIGUOUS if loud > LOUD_AA else verdict(interval, noise)}
            rows.append(row | {"remarks": join(joined_remarks([b for _, b in pairs]), *notes)})
    return rows
