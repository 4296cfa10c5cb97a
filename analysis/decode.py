"""Rows of whole models: a decode step of every arm against the fastest stored arm that was timed in the same rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis import speedups
from analysis.cells import CASE, MODELS_CASE, Cell, digits
from analysis.gates import number, value
from analysis.load import Evidence
from experiments.measure.record import Record

RENAMED = {"step_us": "step_ms", "baseline_us": "baseline_ms"}
LEFT_OUT = ("kind", "ideal_bytes", "ideal_roof", "interval_over", "remarks")
COLUMNS = [*CASE, *MODELS_CASE, "arm", "kind"]
COLUMNS += [RENAMED.get(c, c) for c in speedups.COLUMNS if c not in (*CASE, "arm", *LEFT_OUT)]
COLUMNS += ["tokens_per_s", "state_share", "baseline_state_share", "rest_ms", "products_ms", "rest_floor_ms"]
COLUMNS += ["peak_gib", "rows_that_differ", "agreement_length", "logprob_drift", "ideal_roof", "interval_over"]
COLUMNS += ["remarks"]


def decode_rows(cell: Cell, evidence: Evidence, labels: dict[str, str]) -> list[dict[str, Any]]:
    """As `speedups.speedup_rows`, in milliseconds of a model step, with what a whole model has beside its kernels."""
    return [row | _whole(cell, row) for row in speedups.speedup_rows(cell, evidence, labels)]


def _whole(cell: Cell, row: dict[str, Any]) -> dict[str, Any]:
    records = [arms[row["arm"]] for arms in cell.values() if row["arm"] in arms]
    baselines = [
        arms[name] for arms in cell.values() for name in str(row.get("baseline")).split(" or ") if name in arms
    ]
    everyone = [record for arms in cell.values() for record in arms.values()]
    step_ms, found = row["step_us"] / 1e3, whole(records)
    share = found["state_share"]
    products = [ns for r in everyone for ns in r.decode.get("products_ns", []) if isinstance(ns, int)]
    floors = [floor for r in everyone if (floor := _rest_floor_ms(r)) is not None]
    return found | {
        "step_ms": digits(step_ms),
        "baseline_ms": digits(row["baseline_us"] / 1e3) if row.get("baseline_us") else None,
        "tokens_per_s": digits(row["batch_size"] / step_ms * 1e3),
        "baseline_state_share": _mean(baselines, "state_share"),
        "rest_ms": None if share is None else digits(step_ms * (1 - share)),
        "products_ms": digits(float(np.median(products)) / 1e6) if products else None,
        "rest_floor_ms": digits(float(np.mean(floors))) if floors else None,
    }


def whole(records: list[Record]) -> dict[str, Any]:
    """What the records of one arm tell of the model, and of its tokens against another arm's."""
    agreements = [r.decode["agreement"] for r in records if isinstance(r.decode.get("agreement"), dict)]
    drifts = [number(found.get("logprob_drift"), "max") for found in agreements]
    peaks = [r.group_peak_memory_bytes for r in records if r.group_peak_memory_bytes]
    return {
        "weights": "random" if value(records[0], "weights") == "random" else "checkpoint",
        "context": value(records[0], "context"),
        "blocks": value(records[0], "blocks") or None,
        "state_share": _mean(records, "state_share"),
        "peak_gib": digits(max(peaks) / 2**30) if peaks else None,
        "rows_that_differ": _worst(max, [number(found, "rows_that_differ") for found in agreements]),
        "agreement_length": _worst(min, [number(found.get("agreement_length"), "min") for found in agreements]),
        "logprob_drift": _worst(max, drifts),
    }


def _rest_floor_ms(record: Record) -> float | None:
    """Products alone, and what a step moves beside them and its states at the read bandwidth of the same run."""
    products, between = record.decode.get("products_ns"), number(record.decode, "bytes_between")
    rate = number(record.bandwidth.get("read"), "bytes_per_s")
    if not products or between is None or not rate:
        return None
    return float(np.median(products)) / 1e6 + 1e3 * between / rate


def _mean(records: list[Record], name: str) -> float | None:
    found = [share for r in records if (share := number(r.decode, name)) is not None]
    return digits(float(np.mean(found))) if found else None


def _worst(choose: Any, found: list[float | None]) -> float | None:
    known = [number for number in found if number is not None]
    return digits(choose(known)) if known else None
