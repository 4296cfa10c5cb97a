"""Rows of speculative decoding with whole models: tokens a second of every arm, over those of the arm that keeps
snapshots and over those of replay without drafts, timed in the same rounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis import decode
from analysis.cells import (
    CASE,
    DRAFTS_CASE,
    LOUD_AA,
    MODELS_CASE,
    Cell,
    aa_noise,
    bounds,
    case_columns,
    digits,
    join,
    joined_remarks,
    median_us,
    weaknesses,
)
from analysis.gates import number, value
from analysis.stats import AMBIGUOUS, Array, bootstrap, median_step_ns, paired_log_speedup, verdict
from experiments.measure.record import Record

COLUMNS = [*CASE, *MODELS_CASE, "window", *DRAFTS_CASE, "arm", "kind", "step_ms", "tokens_per_step", "tokens_per_s"]
COLUMNS += ["over_snapshots", "low", "high", "verdict", "over_plain", "plain_low", "plain_high", "aa_noise"]
COLUMNS += ["state_share", "request_mib", "conv_mib", "requests_in_100_gb", "rows_unmatched", "rows_that_differ"]
COLUMNS += ["peak_gib", "processes", "rounds", "interval_over", "remarks"]
SNAPSHOTS, PLAIN = "snapshots", "replay"
"""Kinds of the arms that others are compared with."""
COMPARED = {SNAPSHOTS: ("over_snapshots", "low", "high"), PLAIN: ("over_plain", "plain_low", "plain_high")}


def rows(cell: Cell, labels: dict[str, str]) -> list[dict[str, Any]]:
    """One an arm; comparisons are of tokens a second, with how many tokens a step took of each."""
    noise = aa_noise(cell)
    arms = sorted({arm for group in cell.values() for arm in group})
    return [_row(cell, arm, noise, labels) for arm in arms]


def _row(cell: Cell, arm: str, noise: float, labels: dict[str, str]) -> dict[str, Any]:
    records = [group[arm] for group in cell.values() if arm in group]
    first = records[0]
    tokens = float(np.mean([_tokens(r) for r in records]))
    step_ms, sizes = median_us(records) / 1e3, first.decode.get("request_bytes", {})
    row = case_columns(first, labels) | decode.whole(records) | _drafts(first)
    row |= {
        "step_ms": digits(step_ms),
        "tokens_per_step": round(tokens, 3),
        "tokens_per_s": digits(row["batch_size"] * tokens / step_ms * 1e3),
        "aa_noise": digits(math.expm1(noise)),
        "request_mib": _mib(sizes, "states", "conv"),
        "conv_mib": _mib(sizes, "conv"),
        "requests_in_100_gb": number(first.decode, "requests_in_100_gb_of_state"),
        "rows_unmatched": max((int(number(r.decode, "rows_unmatched") or 0) for r in records), default=0),
    }
    remarks = joined_remarks(records)
    for kind, names in COMPARED.items():
        pairs = [(b, group[arm]) for group in cell.values() if arm in group and (b := _of_kind(group, kind))]
        if not pairs or all(baseline is record for baseline, record in pairs):
            continue
        seed = f"{first.case_hash} {first.device['name']} {arm} {kind}"
        interval = bootstrap([_log_gain(*pair) for pair in pairs], seed)
        found = bounds(interval, names[0])
        row |= {names[0]: found[names[0]], names[1]: found["low"], names[2]: found["high"]}
        row |= {"processes": interval.processes, "rounds": interval.rounds}
        row["interval_over"] = "rounds only" if interval.processes == 1 else "processes and rounds"
        weak = weaknesses(interval.processes, interval.rounds, row["aa_noise"])
        remarks = join(remarks, *(note for note in weak if note not in remarks))
        if kind == SNAPSHOTS:
            row["verdict"] = AMBIGUOUS if row["aa_noise"] > LOUD_AA else verdict(interval, noise)
    return row | {"remarks": remarks}


def _log_gain(baseline: Record, record: Record) -> Array:
    """``log(tokens a second / those of the baseline)`` by round."""
    return paired_log_speedup(baseline, record) + math.log(_tokens(record) / _tokens(baseline))


def _of_kind(group: dict[str, Record], kind: str) -> Record | None:
    """The fastest of that kind."""
    found = [record for arm, record in group.items() if arm.split("/")[0] == kind]
    return min(found, key=lambda r: (median_step_ns(r) / _tokens(r), r.arm), default=None)


def _tokens(record: Record) -> float:
    return number(record.decode, "tokens_per_step") or 1.0


def _drafts(record: Record) -> dict[str, Any]:
    prompts = str(value(record, "prompts") or "")
    chance = number(record.case, "acceptance")
    return {
        "window": value(record, "window"),
        "drafter": value(record, "drafter"),
        "acceptance": chance or None,
        "prompts": prompts.rsplit("/", 1)[-1] if prompts.startswith("/") else prompts or None,
    }


def _mib(sizes: Any, *names: str) -> float | None:
    parts = [number(sizes, name) for name in names]
    return None if any(p is None for p in parts) else digits(sum(p for p in parts if p is not None) / 2**20)
