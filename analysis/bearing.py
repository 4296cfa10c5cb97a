"""Which records and table rows bear on a claim, and how their setting differs from the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pandas as pd

from analysis.cells import CASE, device_label, strongest
from analysis.load import Evidence, describe
from experiments.measure.record import Record

PAPER_CARDS = {
    "nemotron_3_nano_4b": "H100",
    "qwen3_5_4b": "H100",
    "nemotron_3_super_120b": "B300",
    "qwen3_5_122b": "B300",
}
"""The evaluated models and the card that the first summary names for them."""
PAPER_STATE, PAPER_INPUTS = "fp32", "bf16"
PROFILES = ("default", "decode", "gpu", "reproduce")
"""Timings of ``configs/timing`` that were made for evidence, as they are; with an overridden field a timing's name is
another one, as ``gpu+rounds=3``, and no claim rests on it.
"""
PAPER_CONTEXT = 1024
"""Tokens that the authors' script reaches at most."""


@dataclass(frozen=True)
class Question:
    """What a rule looks at: its parameters, the tables, the records, and what an analogue would need."""

    parameters: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    evidence: Evidence
    analogue: str


def replay_rows(question: Question) -> list[Any]:
    """Speedup rows of replay arms at the paper's state format and interval length, on the device nearest the paper."""
    length = question.parameters["interval_length"]
    rows = rows_of(question, speedup_table(question), "replay", lambda r: r.interval_length == length)
    return nearest_device([r for r in rows if not pd.isna(r.speedup) and _short_and_whole(r)])


def speedup_table(question: Question) -> str:
    """The table that a claim is about: kernels', or that of whole models."""
    return question.parameters.get("table", "kernel_speedups")


def _short_and_whole(row: Any) -> bool:
    """Of whole models only those of full depth, at contexts no longer than the paper's."""
    return not hasattr(row, "context") or (row.context <= PAPER_CONTEXT and pd.isna(row.blocks))


def rows_of(question: Question, table: str, kind: str, wanted: Callable[[Any], bool]) -> list[Any]:
    """Rows of a table for one kind of arm, the paper's models and its state format, timed by one of `PROFILES`."""
    found = question.tables[table]
    rows = strongest(found[found["timing"].isin(PROFILES)]).itertuples()
    return [r for r in rows if r.kind == kind and r.state == PAPER_STATE and r.model in PAPER_CARDS and wanted(r)]


def other_timings(question: Question) -> list[str]:
    """Names of the timings of rows that no claim rests on."""
    rows = question.tables[speedup_table(question)]
    rows = rows[rows["model"].isin(PAPER_CARDS) & ~rows["timing"].isin(PROFILES)]
    return sorted(set(rows["timing"].dropna()))


def best_replay(question: Question, wanted: Callable[[Any], bool]) -> list[Any]:
    """By model and batch, the fastest replay arm; of its flush phases the slower counts. Where a baseline computes its
    gates, an arm that does so too goes before those that get theirs ready.
    """
    worst: dict[tuple[Any, ...], Any] = {}
    for row in filter(wanted, replay_rows(question)):
        key = (row.model, row.batch_size, row.inputs, str(row.threads), row.arm)
        worst[key] = min(worst.get(key, row), row, key=lambda r: r.speedup)
    best: dict[tuple[Any, ...], Any] = {}
    for row in worst.values():
        key = (row.model, row.batch_size)
        best[key] = max(best.get(key, row), row, key=_rank)
    return list(best.values())


def best_stored(question: Question) -> list[Any]:
    """By model, the roof row of the fastest stored arm at the largest batch; of its flush phases the worse counts."""
    length, batch = question.parameters["interval_length"], question.parameters["min_batch"]
    rows = rows_of(question, "roofs", "stored", lambda r: r.interval_length == length and r.batch_size >= batch)
    found = []
    for same in by_model(nearest_device(rows)):
        setting = max(map(_setting, same))
        fastest: dict[str, Any] = {}
        for row in same:
            if _setting(row) == setting:
                fastest[row.phase] = max(fastest.get(row.phase, row), row, key=lambda r: r.share)
        found.append(min(fastest.values(), key=lambda r: r.share))
    return found


def replay_records(question: Question) -> tuple[list[Record], list[Record]]:
    """Replay records that passed, and replay records found incorrect, at fp32 and the claim's interval length."""
    wanted = ("replay", PAPER_STATE, question.parameters["interval_length"])

    def bears(record: Record) -> bool:
        what = describe(record)
        return record.experiment == "kernel" and (what["kind"], what["state"], what["interval_length"]) == wanted

    failures = [r for r in question.evidence.failures if r.status == "incorrect" and bears(r)]
    return [r for r in question.evidence.records if bears(r)], failures


def as_rows(records: Iterable[Record]) -> list[Any]:
    """Records with the attributes of table rows that this module reads."""
    return [SimpleNamespace(**describe(r) | {"device": device_label(r), "groups": r.group}) for r in records]


def nearest_device(rows: list[Any]) -> list[Any]:
    """Rows of the devices nearest the paper's: its own cards, else any GPU, else CPUs."""
    nearest = min(map(_distance, rows), default=0)
    return [row for row in rows if _distance(row) == nearest]


def is_direct(row: Any) -> bool:
    """Whether a row was measured on the card on which the paper ran its model, with its weights."""
    weights = getattr(row, "weights", "checkpoint")
    return row.model in PAPER_CARDS and PAPER_CARDS[row.model] in str(row.device) and weights == "checkpoint"


def by_model(rows: Iterable[Any]) -> list[list[Any]]:
    """Rows grouped by model, in the order in which the models appear."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(row.model, []).append(row)
    return list(found.values())


def missing_models(rows: Iterable[Any]) -> list[str]:
    """The paper's models that no row covers."""
    return sorted(set(PAPER_CARDS) - {r.model for r in rows})


def differed(rows: list[Any], batch: int | None = None) -> str:
    """Card, batch and missing models, where they differ from the paper's."""
    found = []
    if cards := sorted({str(r.device) for r in rows if not is_direct(r)}):
        found.append(f"card: {', '.join(cards)}")
    if any(getattr(r, "weights", "checkpoint") != "checkpoint" for r in rows):
        found.append("weights: random, tokens forced")
    if batch is not None and (others := sorted({r.batch_size for r in rows} - {batch})):
        found.append(f"batch: {', '.join(map(str, others))}")
    if missing := missing_models(rows):
        found.append(f"models not run: {', '.join(missing)}")
    return "; ".join(found)


def single_phases(question: Question, rows: list[Any]) -> list[str]:
    """A remark when only one flush phase was run, since the slower of two has to count."""
    length = question.parameters["interval_length"]
    tables = [question.tables[name].itertuples() for name in (speedup_table(question), "roofs")]
    run = {(r.device, r.model, r.batch_size, r.phase) for r in chain(*tables) if r.interval_length == length}
    alone = [r for r in rows if len({s for s in run if s[:3] == (r.device, r.model, r.batch_size)}) == 1]
    return [f"only {', '.join(sorted({r.phase for r in alone}))} flush phases"] if alone else []


def roof_share(question: Question, row: Any) -> float:
    """Share of its own roof that the arm of a speedup row reaches; 0 where no roof was recorded."""
    columns = [*CASE, "arm"]
    wanted = [str(getattr(row, c)) for c in columns]
    roofs = question.tables["roofs"].itertuples()
    return max((r.share for r in roofs if [str(getattr(r, c)) for c in columns] == wanted), default=0.0)


def _setting(row: Any) -> tuple[int, bool, float]:
    """Ranks what may differ within a model besides arm and phase: batch, input format, threads."""
    return (row.batch_size, row.inputs == PAPER_INPUTS, 0.0 if pd.isna(row.threads) else row.threads)


def _rank(row: Any) -> tuple[bool, float, bool, float]:
    threads = 0.0 if pd.isna(row.threads) else row.threads
    return (row.inputs == PAPER_INPUTS, threads, row.like_for_like == "yes", row.speedup)


def _distance(row: Any) -> int:
    return 0 if is_direct(row) else 2 if row.device_kind == "cpu" else 1
