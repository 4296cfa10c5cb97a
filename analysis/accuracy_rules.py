"""Verdicts of the claims about accuracy, from the table `accuracy`. All that can be run here are analogues: other
models, and tasks of our own."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.accuracy import CONTROL, LOSES, MIN_ITEMS, OPEN, POINTS, REFERENCE, WITHIN
from analysis.bearing import PAPER_CARDS, Question

YES, NO, UNKNOWN = "yes", "no", "open"


def small_loss(question: Question) -> tuple[str, list[Any], list[str], str]:
    """Whether arms with a read copy stay within the points of float32: ours, rows, an answer a row, and a note.

    Only a task that one coarse copy of the state loses, the arm ``sensitive_to``, tells that two copies keep it.
    """
    limit, rows = question.parameters.get("points", POINTS), _rows(question, question.parameters["arms"])
    losing = _rows(question, [question.parameters["sensitive_to"]])
    telling = {_task(r) for r in losing if r.difference_high < 0}
    shown = [r for r in rows if _task(r) in telling]
    if not shown:
        note = f"{question.parameters['sensitive_to']} loses no task, so that none tells precisions apart"
        return _told(rows), rows, [UNKNOWN] * len(rows), note
    answers = [YES if r.difference_low >= -limit else NO if r.difference_high < -limit else UNKNOWN for r in shown]
    left_out = sorted({f"{r.model}, {r.task}" for r in rows if _task(r) not in telling})
    note = f"left out, as {question.parameters['sensitive_to']} does not lose either: {'; '.join(left_out)}"
    return _told(shown), shown, answers, note if left_out else ""


def visible_loss(question: Question) -> tuple[str, list[Any], list[str], str]:
    """Whether an arm loses more than the points anywhere. That a small model on a short task does not is no
    contradiction."""
    rows = _rows(question, question.parameters["arms"])
    limit = question.parameters.get("points", 0.0)
    losing = [r for r in rows if r.difference_high < -limit]
    shown = losing or rows
    left_out = sorted({f"{r.model}, {r.task}" for r in rows if r not in losing}) if losing else []
    note = f"not so: {'; '.join(left_out)}" if left_out else ""
    return _told(shown), shown, [YES if losing else UNKNOWN] * len(shown), note


def what_differed(rows: list[Any]) -> str:
    models, tasks = sorted({r.model for r in rows}), sorted({r.task for r in rows})
    others = [model for model in models if model not in PAPER_CARDS]
    parts = [f"model: {', '.join(others)}"] if others else []
    parts += [f"task: {', '.join(tasks)}"] if tasks != ["gpqa_diamond"] else []
    return "; ".join([*parts, f"hardware: {', '.join(sorted({r.device for r in rows}))}"])


def _rows(question: Question, arms: list[str]) -> list[Any]:
    """Rows of these arms that a control and enough items stand behind."""
    table, family = question.tables["accuracy"], question.parameters.get("model_like", "")
    shown = table[table["arm"].isin(arms) & table["verdict"].isin((WITHIN, LOSES, OPEN))]
    shown = shown[(shown["items"] >= MIN_ITEMS) & shown["model"].str.contains(family, regex=False)]
    assert not shown["arm"].isin((REFERENCE, CONTROL)).any()
    return list(shown.itertuples())


def _task(row: Any) -> tuple[str, ...]:
    return (row.device, row.model, row.task, row.prompt)


def _told(rows: list[Any]) -> str:
    told = [
        f"{r.difference:+.1f} [{r.difference_low:+.1f}, {r.difference_high:+.1f}] points ({r.model}, {r.task}, {r.arm})"
        for r in rows
        if not pd.isna(r.difference)
    ]
    return "; ".join(told)
