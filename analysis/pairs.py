"""Rows of pairs: every replay arm against each other arm of its rounds, baselines as shipped and peers' replay too.

Of windows the arm that is told beforehand what will be accepted as well, which parts the gain of replay.
"""

from __future__ import annotations

import math
from typing import Any

from analysis.cells import (
    CASE,
    LOUD_AA,
    WINDOW_CASE,
    Cell,
    aa_noise,
    bounds,
    case_columns,
    digits,
    join,
    joined_remarks,
    weaknesses,
)
from analysis.load import describe, like_for_like, moved_bytes
from analysis.speedups import floor_ns, mean_ratio
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
WINDOW_COLUMNS = [*COLUMNS[: len(CASE)], *WINDOW_CASE, *COLUMNS[len(CASE) :]]
WINDOW_COLUMNS[-3:-3] = ["aa_noise", "ideal_bytes", "ideal_roof"]
KINDS, WINDOW_KINDS = ("replay",), ("verify", "oracle")


def pair_rows(cell: Cell, labels: dict[str, str], kinds: tuple[str, ...] = KINDS) -> list[dict[str, Any]]:
    """Where a cell holds one other arm only there is nothing to add to its speedup."""
    names = sorted({arm for arms in cell.values() for arm in arms})
    if len(names) < 3:
        return []
    rows, noise = [], aa_noise(cell)
    loud = digits(math.expm1(noise))
    for arm in (name for name in names if name.split("/")[0] in kinds):
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
            row |= {"like_for_like": "yes" if alike else "no", "aa_noise": loud}
            row["ideal_bytes"] = mean_ratio([(moved_bytes(a), moved_bytes(b)) for a, b in pairs])
            row["ideal_roof"] = mean_ratio([(floor_ns(a), floor_ns(b)) for a, b in pairs])
            row |= {"verdict": AMBIGUOUS if loud > LOUD_AA else verdict(interval, noise)}
            rows.append(row | {"remarks": join(joined_remarks([b for _, b in pairs]), *notes)})
    return rows
