"""Models too large for a device: steps at two depths or more, and the line through them carried to the whole model.

A depth is a number of first blocks, in which every kind of block has its share. What is said of the whole model is an
extrapolation, and stands beside its measured step where that exists, to check the method.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.cells import CASE, Cell, case_columns, digits
from analysis.gates import number, value
from analysis.stats import median_step_ns
from experiments.measure.record import Record

COLUMNS = [
    *(c for c in CASE if c not in ("arms", "timing")),
    "context",
    "arm",
    "kind",
    "depths",
    "block_ms",
    "fixed_ms",
]
COLUMNS += ["blocks", "extrapolated_ms", "measured_ms", "error"]


def depth_rows(cells: Sequence[Cell], labels: dict[str, str]) -> list[dict[str, Any]]:
    """One row an arm, of cases that differ in their depth only: milliseconds of a block and of what is not blocks."""
    found: dict[tuple[Any, ...], dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in (record for cell in cells for arms in cell.values() for record in arms.values()):
        total = _total(record)
        if total:
            row = case_columns(record, labels) | {"context": value(record, "context")}
            same = tuple(row[c] for c in COLUMNS if c in row)
            found[same][value(record, "blocks") or total].append(record)
    return [_row(by_depth, labels) for by_depth in found.values() if len(_parts(by_depth)) > 1]


def _row(by_depth: dict[int, list[Record]], labels: dict[str, str]) -> dict[str, Any]:
    steps = {depth: float(np.mean([median_step_ns(r) for r in records])) / 1e6 for depth, records in by_depth.items()}
    parts, first = _parts(by_depth), next(iter(by_depth.values()))[0]
    total = _total(first) or 0
    slope, fixed = np.polyfit(parts, [steps[depth] for depth in parts], 1)
    whole, measured = slope * total + fixed, steps.get(total)
    return case_columns(first, labels) | {
        "groups": " ".join(sorted({r.group for records in by_depth.values() for r in records})),
        "context": value(first, "context"),
        "depths": ", ".join(map(str, parts)),
        "block_ms": digits(slope),
        "fixed_ms": digits(fixed),
        "blocks": total,
        "extrapolated_ms": digits(whole),
        "measured_ms": None if measured is None else digits(measured),
        "error": None if measured is None else digits(whole / measured - 1, 2),
    }


def _parts(by_depth: dict[int, list[Record]]) -> list[int]:
    """Depths below the whole."""
    return sorted(depth for depth in by_depth if depth < (_total(next(iter(by_depth.values()))[0]) or 0))


def _total(record: Record) -> int | None:
    """Blocks of the whole model."""
    architecture = value(record, "architecture")
    counts = [number(architecture, name) for name in ("num_blocks", "num_layers")]
    return next((int(count) for count in counts if count), None)
