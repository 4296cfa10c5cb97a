"""Cells, the unit of every table: one case on one device, with all its processes and arms; and what rows share.

Numbers are rounded when a row is built, once: figures, claims and report show these rounded values, so that the last
bits of a logarithm, which differ between machines, reach no output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from analysis.gates import remarks
from analysis.load import Evidence, describe
from analysis.stats import MIN_ROUNDS, Interval, aa_log_ratio, bootstrap, median_step_ns, too_few
from experiments.measure.accuracy_record import AccuracyRecord
from experiments.measure.record import Record

Cell = dict[str, dict[str, Record]]
"""The accepted records of one case on one device: group -> arm -> record; a group is one process."""

CASE = ["experiment", "device", "device_kind", "model", "family", "state", "inputs", "batch_size", "interval_length"]
CASE += ["phase", "threads", "timing", "arms"]
"""Columns that say what was run; every table of cells begins with them."""

MODELS_CASE = ["weights", "context", "blocks"]
"""More such columns where whole models were run."""

WINDOW_CASE = ["window", "accepted"]
"""More such columns where windows of speculative decoding were verified."""

DRAFTS_CASE = ["drafter", "acceptance", "prompts"]
"""More such columns where whole models verified drafts."""

BASELINES = ("stored", "snapshots")
"""Kinds of arms that others are compared with."""

LOUD_AA = 0.25
"""A/A noise above which no comparison of a cell is trusted: the machine did other work while it ran."""


def cells(records: Iterable[Record]) -> list[Cell]:
    """Accepted records by case, device and set of arms; within, by process in the order of replicates."""
    found: dict[tuple[str, ...], Cell] = defaultdict(lambda: defaultdict(dict))
    for r in records:
        found[(r.case_hash, str(r.device["name"]), *sorted(r.arms))][r.group][r.arm] = r
    ordered = []
    for cell in found.values():
        groups = sorted(cell, key=lambda g: (next(iter(cell[g].values())).replicate, g))
        ordered.append({g: dict(sorted(cell[g].items())) for g in groups})
    return ordered


def strongest(frame: pd.DataFrame) -> pd.DataFrame:
    """Of rows that measured the same with another timing or another set of arms, the one with most rounds and arms."""
    every = [*CASE, *MODELS_CASE, *WINDOW_CASE, *DRAFTS_CASE, "arm"]
    same = [c for c in every if c not in ("timing", "arms") and c in frame.columns]
    ranked = frame.sort_values(["rounds", "arms"], ascending=False, kind="stable")
    return ranked.drop_duplicates(same).sort_index()


def stored_tuned(arms: dict[str, Record], state: str) -> Record | None:
    """The fastest stored arm of one group at a state format, with a window the fastest that keeps snapshots: the
    baseline of every verdict."""
    stored = [r for r in arms.values() if describe(r)["kind"] in BASELINES and describe(r)["state"] == state]
    return min(stored, key=lambda r: (median_step_ns(r), r.arm), default=None)


def aa_noise(cell: Cell) -> float:
    """What two timings of one arm of the cell cannot tell from zero, as a log ratio."""
    first = next(iter(next(iter(cell.values())).values()))
    logs = [aa_log_ratio(r) for arms in cell.values() for r in arms.values() if r.again_samples_ns]
    return bootstrap(logs, f"aa {first.case_hash} {first.device['name']}").noise


def weaknesses(processes: int, rounds: int, noise: float) -> list[str]:
    """Why a row of speedups or roofs is shown but proves nothing; empty when it may. ``rounds`` are those in all."""
    few = f"of fewer than {MIN_ROUNDS} rounds" if too_few(processes, rounds) else ""
    found = [f"one process {few}".strip()] if processes < 2 else []
    found += [f"fewer than {MIN_ROUNDS} processes {few}"] if few and not found else []
    return found + ([f"A/A noise of {100 * noise:.0f} %"] if noise > LOUD_AA else [])


def device_label(record: Record | AccuracyRecord) -> str:
    """A CPU by its number of cores, any other device by its name."""
    cores = record.device.get("cores")
    return f"{cores}-core CPU" if record.device.get("kind") == "cpu" and cores else str(record.device.get("name"))


def device_labels(evidence: Evidence) -> dict[str, str]:
    """Name in a record -> name in a table: CPUs by their number of cores, told apart by a letter if need be."""
    plain: dict[str, list[str]] = defaultdict(list)
    for r in [*evidence.records, *evidence.failures, *evidence.drift, *evidence.accuracy]:
        name, label = str(r.device.get("name")), device_label(r)
        if name not in plain[label]:
            plain[label].append(name)
    labels = {}
    for label, names in plain.items():
        for index, name in enumerate(sorted(names)):
            labels[name] = label if len(names) == 1 else f"{label} {chr(ord('A') + index)}"
    return labels


def case_columns(record: Record, labels: dict[str, str]) -> dict[str, Any]:
    return describe(record) | {"device": labels[str(record.device.get("name"))]}


def bounds(interval: Interval, name: str) -> dict[str, Any]:
    return {
        name: round(interval.estimate, 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "processes": interval.processes,
        "rounds": interval.rounds,
    }


def median_us(records: list[Record]) -> float:
    return digits(float(np.mean([median_step_ns(r) for r in records])) / 1e3)


def joined_remarks(records: list[Record]) -> str:
    return "; ".join(sorted({remark for r in records for remark in remarks(r)}))


def join(*parts: str) -> str:
    return "; ".join(p for p in parts if p)


def digits(value: float, count: int = 4) -> float:
    """Rounded to significant digits."""
    return float(f"{value:.{count}g}")
