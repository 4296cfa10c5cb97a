"""Rows of speedups: every arm of a cell against the fastest stored arm that was timed in the same rounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis.cells import (
    BASELINES,
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
    median_us,
    stored_tuned,
    weaknesses,
)
from analysis.gates import number
from analysis.load import Evidence, describe, like_for_like, moved_bytes
from analysis.stats import AMBIGUOUS, FASTER, bootstrap, median_step_ns, paired_log_speedup, verdict
from experiments.measure.record import Record

COLUMNS = [*CASE, "arm", "kind", "baseline", "step_us", "baseline_us", "speedup", "low", "high", "verdict"]
COLUMNS += ["like_for_like", "aa_noise", "ideal_bytes", "ideal_roof", "processes", "rounds", "interval_over", "remarks"]
WINDOW_COLUMNS = [*COLUMNS[: len(CASE)], *WINDOW_CASE, *COLUMNS[len(CASE) :]]
WINDOW_COLUMNS.insert(WINDOW_COLUMNS.index("aa_noise"), "roof_share")


def speedup_rows(cell: Cell, evidence: Evidence, labels: dict[str, str]) -> list[dict[str, Any]]:
    noise = aa_noise(cell)
    rows = []
    for arm in sorted({a for arms in cell.values() for a in arms}):
        pairs = []
        for arms in cell.values():
            if arm in arms and (baseline := stored_tuned(arms, describe(arms[arm])["state"])):
                pairs.append((baseline, arms[arm]))
        if all(baseline is record for baseline, record in pairs) and pairs:
            continue
        rows.append(_speedup_row(cell, arm, pairs, noise, evidence, labels))
    return rows


def _speedup_row(
    cell: Cell,
    arm: str,
    pairs: list[tuple[Record, Record]],
    noise: float,
    evidence: Evidence,
    labels: dict[str, str],
) -> dict[str, Any]:
    records = [arms[arm] for arms in cell.values() if arm in arms]
    row = case_columns(records[0], labels) | {"step_us": median_us(records), "remarks": joined_remarks(records)}
    floors = [floor / median_step_ns(r) for r in records if (floor := floor_ns(r))]
    row["roof_share"] = round(float(np.mean(floors)), 4) if floors else None
    if not pairs:
        return row | {"verdict": AMBIGUOUS, "remarks": join(row["remarks"], "no stored arm at this state format")}
    interval = bootstrap(
        [paired_log_speedup(*pair) for pair in pairs], f"{records[0].case_hash} {records[0].device['name']} {arm}"
    )
    found, missing = verdict(interval, noise), _missing_baselines(cell, evidence)
    loud = digits(math.expm1(noise))
    if loud > LOUD_AA or (missing and found == FASTER):  # or against a weaker baseline than the run meant to have
        found = AMBIGUOUS
    notes = [f"{m} missing from the baseline" for m in missing]
    notes += weaknesses(interval.processes, interval.rounds, loud)
    baselines = [baseline for baseline, _ in pairs]
    alike = all(like_for_like(record, baseline) for baseline, record in pairs)
    notes += [] if alike else ["the baseline computes its gates, this arm gets them ready"]
    return (
        row
        | bounds(interval, "speedup")
        | {
            "baseline": " or ".join(sorted({b.arm for b in baselines})),
            "baseline_us": median_us(baselines),
            "verdict": found,
            "like_for_like": "yes" if alike else "no",
            "aa_noise": loud,
            "ideal_bytes": mean_ratio([(moved_bytes(b), moved_bytes(r)) for b, r in pairs]),
            "ideal_roof": mean_ratio([(floor_ns(b), floor_ns(r)) for b, r in pairs]),
            "interval_over": "rounds only" if interval.processes == 1 else "processes and rounds",
            "remarks": join(row["remarks"], *notes),
        }
    )


def _missing_baselines(cell: Cell, evidence: Evidence) -> list[str]:
    """Stored arms that a group of the cell meant to time and did not, unless the device cannot run them at all."""
    missing = set()
    for group, arms in cell.items():
        unsupported = {r.arm for r in evidence.failures if r.group == group and r.status == "unsupported"}
        meant = {a for a in next(iter(arms.values())).arms if a.split("/")[0] in BASELINES}
        missing |= meant - set(arms) - unsupported
    return sorted(missing)


def floor_ns(record: Record) -> float | None:
    """Time that the arm's bytes take at the bandwidths of the same run."""
    return number(record.traffic, "floor_ns")


def mean_ratio(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """Of the pairs that are whole; None without any."""
    ratios = [top / bottom for top, bottom in pairs if top and bottom and bottom > 0]
    return round(float(np.mean(ratios)), 4) if ratios else None
