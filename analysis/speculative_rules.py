"""What records of speculative decoding with whole models say about the claims; `rules` gives the verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from analysis.bearing import Question, as_rows, by_model, is_direct, nearest_device, rows_of

AGAINST_LOG = "states behind rejected tokens against float64, cursors and flushes against the log of accepted tokens"
SIZES = "state, ring and convolution of a request, from the tensors' sizes; keys and values left out"
TABLE = "speculative_throughput"


def throughput(question: Question, words: tuple[str, str, str]) -> tuple[list[Any], list[str], str, list[str]]:
    """``(rows, answers, ours, notes)`` of replay with drafts over snapshots, a row a model: at the paper's batch, else
    at the largest one measured; of several windows the worse counts. ``words``: yes, no, open."""
    yes, no, still_open = words
    low, high, batch = (question.parameters[name] for name in ("low", "high", "batch"))
    windows, least = question.parameters["windows"], question.parameters["min_batch"]

    def wanted(row: Any) -> bool:
        return row.window in windows and row.batch_size >= least and pd.isna(row.blocks)

    table = question.tables[TABLE]
    compared = question.tables | {TABLE: table[table["low"].notna()]}  # arms may have been run in pairs
    rows = nearest_device(rows_of(replace(question, tables=compared), TABLE, "verify", wanted))
    rows = [min(_of_largest(same, batch), key=lambda r: r.over_snapshots) for same in by_model(rows)]
    answers = []
    for row in rows:
        missed = no if row.high < low and is_direct(row) and row.batch_size == batch else still_open
        answers.append(yes if low <= row.low <= high else missed)
    ours = "; ".join(
        f"{row.over_snapshots:.2f} [{row.low:.2f}, {row.high:.2f}] ({row.model}, batch {row.batch_size}, "
        f"T = {row.window}, {row.drafter} drafts, {row.tokens_per_step:.3g} tokens a step)"
        for row in rows
    )
    return rows, answers, ours, [f"{r.model}: above the range: check the baseline" for r in rows if r.low > high]


def rolled_back(question: Question) -> tuple[list[Any], int, int, str]:
    """``(rows, tokens taken back, records found wrong, ours)`` of replay arms with drafts."""
    everything = [*question.evidence.records, *question.evidence.failures]
    mine = [r for r in everything if r.experiment == "speculative" and r.arm.startswith("verify/")]
    right = [r for r in mine if r.status == "ok" and isinstance(r.decode.get("steps_by_tokens"), list)]
    wrong = [r for r in mine if r.status == "incorrect"]
    taken_back = 0
    for record in right:
        steps = record.decode["steps_by_tokens"]
        taken_back += sum(count * (len(steps) - counted) for counted, count in enumerate(steps, start=1))
    rows = as_rows([*right, *wrong])
    families = ", ".join(sorted({str(row.family) for row in rows}))
    ours = f"{taken_back:,} tokens taken back in {len(right)} records ({families})"
    return rows, taken_back, len(wrong), ours + (f"; {len(wrong)} records found wrong" if wrong else "")


def requests(question: Question) -> tuple[list[Any], list[float]]:
    """Rows of replay, a setting each, and how many times as many of its requests fit as with snapshots."""
    table = question.tables[TABLE]
    table = table[table["window"].isin(question.parameters["windows"]) & table["requests_in_100_gb"].notna()]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in table.itertuples():
        setting = (row.device, row.model, row.state, row.inputs, row.window, row.interval_length)
        found.setdefault(setting, {})[row.kind] = row
    pairs = [(arms["verify"], arms["snapshots"]) for arms in found.values() if {"verify", "snapshots"} <= set(arms)]
    rows = nearest_device([verify for verify, _ in pairs])
    of = {id(verify): verify.requests_in_100_gb / snapshots.requests_in_100_gb for verify, snapshots in pairs}
    return rows, [of[id(row)] for row in rows]


def _of_largest(rows: list[Any], batch: int) -> list[Any]:
    chosen = max(rows, key=lambda r: (r.batch_size == batch, r.batch_size)).batch_size
    return [r for r in rows if r.batch_size == chosen]
