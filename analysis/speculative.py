"""Rows of speculative decoding with whole models: tokens a second of every arm, over those of the arm that keeps
snapshots and over those of replay without drafts, timed in the same rounds.

Arms that do not fit beside each other are run in pairs, processes of their own: a ratio is one of rounds that both arms
share, and only what two such ratios give with an arm that is in both is put together.
"""

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
from analysis.stats import AMBIGUOUS, Array, Interval, bootstrap, median_step_ns, paired_log_speedup, verdict
from experiments.measure.record import Record

COLUMNS = [*CASE, *MODELS_CASE, "window", *DRAFTS_CASE, "arm", "kind", "step_ms", "tokens_per_step", "tokens_per_s"]
COLUMNS += ["over_snapshots", "low", "high", "verdict", "over_plain", "plain_low", "plain_high", "aa_noise"]
COLUMNS += ["state_share", "request_mib", "conv_mib", "requests_in_100_gb", "rows_unmatched", "rows_that_differ"]
COLUMNS += ["peak_gib", "processes", "rounds", "interval_over", "remarks"]
SNAPSHOTS, PLAIN, DRAFTED = "snapshots", "replay", "verify"
"""Kinds of the arms that others are compared with, and that of replay with drafts."""
COMPARED = {SNAPSHOTS: ("over_snapshots", "low", "high"), PLAIN: ("over_plain", "plain_low", "plain_high")}


def joined(cells: list[Cell]) -> list[Cell]:
    """Cells of one case and device, whatever arms were run together, as one."""
    found: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        first = next(iter(next(iter(cell.values())).values()))
        found.setdefault((first.case_hash, str(first.device["name"])), {}).update(cell)
    return list(found.values())


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
        interval, way = _compared(cell, arm, kind), ""
        if interval is None and kind == PLAIN and row["kind"] == SNAPSHOTS:
            interval, way = _by_way_of_replay(cell, arm)
        if interval is None:
            continue
        found = bounds(interval, names[0])
        row |= {names[0]: found[names[0]], names[1]: found["low"], names[2]: found["high"]}
        for name, count in (("processes", interval.processes), ("rounds", interval.rounds)):
            row[name] = min(count, row.get(name, count))
        row["interval_over"] = "rounds only" if row["processes"] == 1 else "processes and rounds"
        weak = [*weaknesses(interval.processes, interval.rounds, row["aa_noise"]), *([way] if way else [])]
        remarks = join(remarks, *(note for note in weak if note not in remarks))
        if kind == SNAPSHOTS:
            row["verdict"] = AMBIGUOUS if row["aa_noise"] > LOUD_AA else verdict(interval, noise)
    return row | {"remarks": remarks}


def _compared(cell: Cell, arm: str, kind: str) -> Interval | None:
    """An arm over the fastest one of a kind in the same process: of several sets of arms that were run together the one
    with most processes, then arms. None where there is none, or it is the arm itself."""
    found: dict[tuple[str, ...], list[tuple[Record, Record]]] = {}
    for group in cell.values():
        if arm in group and (baseline := _of_kind(group, kind)):
            found.setdefault(tuple(sorted(baseline.arms)), []).append((baseline, group[arm]))
    if not found:
        return None
    pairs = found[max(found, key=lambda names: (len(found[names]), len(names), names))]
    if all(baseline is record for baseline, record in pairs):
        return None
    record = pairs[0][1]
    return bootstrap([_log_gain(*pair) for pair in pairs], f"{record.case_hash} {record.device['name']} {arm} {kind}")


def _by_way_of_replay(cell: Cell, arm: str) -> tuple[Interval | None, str]:
    """An arm that keeps snapshots over replay without drafts, which did not run beside it, and how: what replay with
    drafts gains on the one, in its processes, over what it gains on the other, in its own."""
    for other in sorted({name for group in cell.values() for name in group if name.startswith(f"{DRAFTED}/")}):
        over_plain, over_arm = (_compared(cell, other, kind) for kind in (PLAIN, SNAPSHOTS))
        together = [group for group in cell.values() if {arm, other} <= set(group)]
        if over_plain and over_arm and all(_of_kind(group, SNAPSHOTS) is group[arm] for group in together):
            return over_plain.over(over_arm), f"over plain by way of {other}, from two runs"
    return None, ""


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
        "prompts": prompts.rsplit("/", 1)[-1] if prompts.startswith(("/", ".../")) else prompts or None,
    }


def _mib(sizes: Any, *names: str) -> float | None:
    parts = [number(sizes, name) for name in names]
    return None if any(p is None for p in parts) else digits(sum(p for p in parts if p is not None) / 2**20)
