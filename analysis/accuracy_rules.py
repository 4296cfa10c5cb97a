"""Verdicts of the claims about accuracy, from the table `accuracy`. All that can be run here are analogues: other
models, and tasks of our own."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.accuracy import CONTROL, LOSES, MIN_ITEMS, OPEN, POINTS, REFERENCE, WITHIN
from analysis.bearing import PAPER_CARDS, Question

YES, NO, UNKNOWN = "yes", "no", "open"


def small_loss(question: Question) -> tuple[str, list[Any], list[str]]:
    """Whether arms with a read copy stay within the points of float32: (ours, rows, an answer a row)."""
    rows = _rows(question)
    limit = question.parameters.get("points", POINTS)
    answers = [YES if r.difference_low >= -limit else NO if r.difference_high < -limit else UNKNOWN for r in rows]
    return _told(rows), rows, answers


def visible_loss(question: Question) -> tuple[str, list[Any], list[str]]:
    """Whether an arm loses more than the points. That a small model on a short task does not is no contradiction."""
    rows = _rows(question)
    limit = question.parameters.get("points", 0.0)
    return _told(rows), rows, [YES if r.difference_high < -limit else UNKNOWN for r in rows]


def what_differed(rows: list[Any]) -> str:
    models, tasks = sorted({r.model for r in rows}), sorted({r.task for r in rows})
    others = [model for model in models if model not in PAPER_CARDS]
    parts = [f"model: {', '.join(others)}"] if others else []
    parts += [f"task: {', '.join(tasks)}"] if tasks != ["gpqa_diamond"] else []
    return "; ".join([*parts, f"hardware: {', '.join(sorted({r.device for r in rows}))}"])


def _rows(question: Question) -> list[Any]:
    """Rows of the claim's arms that a control and enough items stand behind."""
    table, family = question.tables["accuracy"], question.parameters.get("model_like", "")
    shown = table[table["arm"].isin(question.parameters["arms"]) & table["verdict"].isin((WITHIN, LOSES, OPEN))]
    shown = shown[(shown["items"] >= MIN_ITEMS) & shown["model"].str.contains(family, regex=False)]
    assert not shown["arm"].isin((REFERENCE, CONTROL)).any()
    return list(shown.itertuples())


def _told(rows: list[Any]) -> str:
    told = [
        f"{r.difference:+.1f} [{r.difference_low:+.1f}, {r.difference_high:+.1f}] points ({r.model}, {r.task}, {r.arm})"
        for r in rows
        if not pd.isna(r.difference)
    ]
    return "; ".join(told)
