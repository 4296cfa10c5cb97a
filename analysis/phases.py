"""Rows of phases: the time of a step with all rows at one ring length, for records that hold it."""

from __future__ import annotations

from statistics import median
from typing import Any

from analysis.cells import CASE, Cell, case_columns, digits
from analysis.gates import number

COLUMNS = [*CASE, "arm", "kind", "ring_length", "step_us", "processes", "rounds"]


def phase_rows(cell: Cell, labels: dict[str, str]) -> list[dict[str, Any]]:
    """Medians over the rounds of all processes; a stored arm has a step of one kind, at ring length 0."""
    rows = []
    for arm in sorted({a for arms in cell.values() for a in arms}):
        records = [arms[arm] for arms in cell.values() if arm in arms and arms[arm].phase_samples_ns]
        copies = [number(r.timing_used, "copies") for r in records]
        for position in range(min((len(r.phase_samples_ns) for r in records), default=0)):
            samples = [ns / n for r, n in zip(records, copies, strict=True) if n for ns in r.phase_samples_ns[position]]
            row = case_columns(records[0], labels) | {"ring_length": position}
            row |= {"step_us": digits(median(samples) / 1e3), "processes": len(records), "rounds": len(samples)}
            rows.append(row)
    return rows
