"""Rules of the claims about long documents, from the tables of drift. No text here is the paper's."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.bearing import Question, by_model, nearest_device
from analysis.findings import NO, OPEN, YES, Finding, not_run, verdict_of


def drift_ratio(question: Question) -> Finding:
    """Mean KL of an arm over that of another over the same documents. Yes: the whole interval is at least ``at_least``;
    no: the whole of it is below one, the other arm is further off."""
    arm, over, bound = (question.parameters[name] for name in ("arm", "over", "at_least"))
    table = question.tables["drift_ratios"]
    rows = _documents(table[(table["arm"] == arm) & (table["over"] == over)])
    kl = {(r.device, r.model, r.inputs, r.tokens, r.arm): r.kl for r in question.tables["drift_kl"].itertuples()}
    answers, told = [], []
    for row in rows:
        above, below = (kl[(row.device, row.model, row.inputs, row.tokens, name)] for name in (arm, over))
        answers.append(_sure(question, row, yes=(bound, row.low), no=(row.high, 1)))
        told.append(f"{_interval(row, row.ratio, row.low, row.high)}: {above:.2g} to {below:.2g} nats ({row.model})")
    return _drift(question, rows, answers, told)


def drift_slope(question: Question) -> Finding:
    """Slope of an arm's log KL over log position in the last decade of positions: at most ``at_most``, or more."""
    arm, bound = question.parameters["arm"], question.parameters["at_most"]
    table = question.tables["drift_kl"]
    rows = _documents(table[(table["arm"] == arm) & table["slope"].notna()])
    answers = [_sure(question, r, yes=(r.slope_high, bound), no=(bound, r.slope_low)) for r in rows]
    told = [f"slope {_interval(r, r.slope, r.slope_low, r.slope_high)} ({r.model}, {r.tokens} tokens)" for r in rows]
    return _drift(question, rows, answers, told)


def _documents(table: pd.DataFrame) -> list[Any]:
    """Rows on the nearest device, of each model those of most tokens and documents."""
    rows = nearest_device(list(table.itertuples()))
    return [max(same, key=lambda r: (r.tokens, r.documents)) for same in by_model(rows)]


def _sure(question: Question, row: Any, yes: tuple[float, float], no: tuple[float, float]) -> str:
    """Yes or no where the first of its two numbers is at most the second; open for too few or too short documents."""
    if row.tokens < question.parameters["min_tokens"] or row.documents < question.parameters["min_documents"]:
        return OPEN
    return YES if yes[0] <= yes[1] else NO if no[0] <= no[1] else OPEN


def _drift(question: Question, rows: list[Any], answers: list[str], told: list[str]) -> Finding:
    if not rows:
        return not_run(question)
    needs = (question.parameters["min_documents"], question.parameters["min_tokens"])
    short = [r.model for r in rows if r.documents < needs[0] or r.tokens < needs[1]]
    notes = [f"{', '.join(short)}: fewer than {needs[0]} documents of {needs[1]} tokens"] if short else []
    models, texts = (", ".join(sorted({str(getattr(r, name)) for r in rows})) for name in ("model", "source"))
    cards = ", ".join(sorted({str(r.device) for r in rows}))
    difference = f"model: {models}; text: {texts}, not PG-19; card: {cards}"
    return Finding("; ".join(told), verdict_of(answers, rows), difference, "; ".join(notes), rows)


def _interval(row: Any, estimate: float, low: float | None, high: float | None) -> str:
    known = "" if pd.isna(low) else f" [{low:.3g}, {high:.3g}]"
    return f"{estimate:.3g}{known}"
