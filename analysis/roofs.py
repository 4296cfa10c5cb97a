"""Rows of roofs: how near each arm comes to the time that its bytes take at the bandwidths of the same run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis.cells import CASE, Cell, aa_noise, bounds, case_columns, digits, joined_remarks, median_us
from analysis.gates import number
from analysis.load import moved_bytes
from analysis.stats import bootstrap, step_log_ns
from experiments.measure.record import Record

COLUMNS = [*CASE, "arm", "kind", "step_us", "floor_us", "share", "low", "high", "bytes", "gb_per_s", "roof_gb_per_s"]
COLUMNS += ["flops_per_byte", "read_gb_per_s", "read_kernel", "rmw_gb_per_s", "rmw_kernel", "processes", "rounds"]
COLUMNS += ["aa_noise", "remarks"]


def roof_rows(cell: Cell, labels: dict[str, str]) -> list[dict[str, Any]]:
    rows, noise = [], digits(math.expm1(aa_noise(cell)))
    for arm in sorted({a for arms in cell.values() for a in arms}):
        records = [arms[arm] for arms in cell.values() if arm in arms]
        floors = [number(r.traffic, "floor_ns") for r in records]
        moved = [moved_bytes(r) for r in records]
        if any(not f or f < 0 for f in floors) or any(m is None for m in moved):
            continue
        interval = bootstrap(
            [math.log(f) - step_log_ns(r) for f, r in zip(floors, records, strict=True) if f],
            f"roof {records[0].case_hash} {records[0].device['name']} {arm}",
        )
        floor_ns, size = float(np.mean([f for f in floors if f])), float(np.mean([m for m in moved if m is not None]))
        row = case_columns(records[0], labels) | bounds(interval, "share") | _bandwidths(records)
        row |= {"step_us": median_us(records), "floor_us": digits(floor_ns / 1e3), "bytes": round(size)}
        row |= {"roof_gb_per_s": digits(size / floor_ns), "gb_per_s": digits(row["share"] * size / floor_ns)}
        flops = number(records[0].traffic, "flops")
        row |= {"flops_per_byte": digits(flops / size) if flops is not None and size else None}
        rows.append(row | {"aa_noise": noise, "remarks": joined_remarks(records)})
    return rows


def _bandwidths(records: list[Record]) -> dict[str, Any]:
    """Harmonic means over processes, as floors are: what only updates then has its roof at the bandwidth of updates."""
    row: dict[str, Any] = {}
    for short, name in (("read", "read"), ("rmw", "read_modify_write")):
        blocks = [r.bandwidth.get(name) for r in records]
        rates = [rate for b in blocks if (rate := number(b, "bytes_per_s"))]
        kernels = {str(b.get("kernel")) for b in blocks if isinstance(b, dict)}
        row |= {f"{short}_gb_per_s": digits(len(rates) / sum(1 / rate for rate in rates) / 1e9) if rates else None}
        row |= {f"{short}_kernel": " or ".join(sorted(kernels))}
    return row
