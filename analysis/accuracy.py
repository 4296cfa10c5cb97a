"""Accuracy by arm: every arm against the first one of its case, item by item.

Both arms answered the same items, so they are compared by what changed: items lost and gained, an exact test of those,
and an interval of the difference by bootstrap. The item is the observation, however often it was answered: its repeats
depend on each other, and only its share of right answers counts. It is lost where that share is lower than with the
first arm, and gained where it is higher. If the arms were alike either would be as likely, which the exact sign test
asks; with one answer an item it is McNemar's. Items of one passage share a state, so the bootstrap resamples
passages; the sign test takes items as independent, which makes its p somewhat too small where they are not. Where no
item changed a bootstrap knows no spread: the bound of a verdict therefore counts three more lost items, as many as may
be missed with a chance of 5 %.

A task says something about states only if the arm without a state loses it: the control. Where it does not, or was not
run, no arm's row has another verdict than that.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr

from experiments.measure.accuracy_record import AccuracyRecord, Answers

REFERENCE, CONTROL = "shared_fp32", "damaged"
POINTS = 2.0
"""Percentage points that the paper calls a small loss."""
CONTROL_P = 1e-3
"""McNemar's p below which the control counts as having lost."""
UNSEEN = 3
"""Rule of three: events that may still be expected, at 95 %, where none was seen."""
RESAMPLES, CONFIDENCE = 2000, 0.95
MIN_ITEMS = 2000
"""Items below which a claim may not rest on a task."""
WITHIN, LOSES, OPEN = f"within {POINTS:g} points", "loses", "open"
NO_CONTROL, NOTHING, IS_REFERENCE, IS_CONTROL = (
    "no control run",
    "proves nothing: the control did not lose",
    "-",
    "control",
)

CASE = ["device", "model", "task", "prompt", "interval_length"]
COLUMNS = [
    *CASE,
    "arm",
    "update",
    "read",
    "stochastic",
    "items",
    "repeats",
    "passages",
    "accuracy",
    "low",
    "high",
    "chance",
    "lost",
]
COLUMNS += ["gained", "difference", "difference_low", "difference_high", "mcnemar_p", "verdict", "message"]
BY_DISTANCE = [*CASE, "arm", "from_interval", "to_interval", "items", "accuracy", "low", "high"]

Array = npt.NDArray[np.float64]


def newest(records: Iterable[AccuracyRecord]) -> dict[tuple[str, str], dict[str, AccuracyRecord]]:
    """By case and device, the newest record of each arm; one that was run to its end comes before one that was not."""
    found: dict[tuple[str, str], dict[str, AccuracyRecord]] = defaultdict(dict)
    for record in sorted(records, key=lambda r: (r.status == "ok", r.ended_utc, r.to_json())):
        found[record.case_hash, str(record.device["name"])][record.arm] = record
    return dict(sorted(found.items()))


def rows(records: Iterable[AccuracyRecord], labels: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each case, task of lm-eval and arm; accuracies in percent, differences in points."""
    found = []
    for arms in newest(records).values():
        done = {name: record for name, record in arms.items() if record.status == "ok"}
        for record in arms.values():
            about = _about(record, labels) | {"arm": record.arm, "message": record.message}
            if record.status != "ok":
                found.append(about | {"verdict": record.status})
            for answers in record.answers:
                found.append(about | {"task": _name(record, answers)} | _compared(answers, record.arm, done))
    return sorted(found, key=lambda row: ([str(row[c]) for c in CASE], row["arm"] != REFERENCE, row["arm"] == CONTROL))


def distance_rows(records: Iterable[AccuracyRecord], labels: dict[str, str]) -> list[dict[str, Any]]:
    """Accuracy by the intervals between a fact and its question, in doublings."""
    found = []
    for arms in newest(records).values():
        for record in arms.values():
            for answers in record.answers:
                if not answers.distance:
                    continue
                length = int(record.case["interval_length"])
                octave = np.floor(np.log2(np.maximum(np.array(answers.distance) / length, 1))).astype(int)
                for number in np.unique(octave):
                    at = octave == number
                    about = _about(record, labels) | {"task": _name(record, answers), "arm": record.arm}
                    share = _percent(
                        marks(answers)[at], np.array(answers.group)[at], _seed(answers, record.arm, str(number))
                    )
                    span = {"from_interval": 2 ** int(number), "to_interval": 2 ** (int(number) + 1)}
                    found.append(
                        about
                        | span
                        | {"items": int(at.sum())}
                        | dict(zip(("accuracy", "low", "high"), share, strict=True))
                    )
    return sorted(found, key=lambda r: ([str(r[c]) for c in CASE], r["arm"] != REFERENCE, r["arm"], r["from_interval"]))


def marks(answers: Answers) -> Array:
    """Share of its repeats in which each item was right, ``[items]``."""
    return np.array([[int(mark) for mark in repeat] for repeat in answers.correct], dtype=np.float64).mean(0)


def changed(before: Answers, after: Answers) -> tuple[int, int]:
    """Items lost and gained: right in fewer of their repeats than before, and in more."""
    difference = marks(after) - marks(before)
    return int((difference < 0).sum()), int((difference > 0).sum())


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p of as uneven a split of the items that changed, if either way were as likely."""
    return min(1.0, 2 * float(bdtr(min(lost, gained), lost + gained, 0.5))) if lost + gained else 1.0


def interval(values: Array, groups: npt.NDArray[Any], seed: int) -> tuple[float, float]:
    """Bootstrap interval of the mean of ``values [items]``, whole groups of items being drawn."""
    number = np.unique(groups, return_inverse=True)[1]
    sums, counts = np.bincount(number, values), np.bincount(number)
    drawn = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), RESAMPLES)
    means = (drawn @ sums) / (drawn @ counts)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _compared(answers: Answers, arm: str, arms: dict[str, AccuracyRecord]) -> dict[str, Any]:
    accuracy, low, high = _percent(marks(answers), np.array(answers.group), _seed(answers, arm))
    row: dict[str, Any] = {
        "items": len(answers.group),
        "repeats": len(answers.correct),
        "passages": len(set(answers.group)),
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "chance": None if answers.chance is None else round(100 * answers.chance, 1),
    }
    reference = _same(arms.get(REFERENCE), answers)
    if arm == REFERENCE or reference is None:
        return row | {"verdict": IS_REFERENCE if arm == REFERENCE else f"no {REFERENCE} of the same items"}
    lost, gained = changed(reference, answers)
    difference = _percent(marks(answers) - marks(reference), np.array(answers.group), _seed(answers, arm, "difference"))
    row |= {"lost": lost, "gained": gained, "mcnemar_p": float(f"{mcnemar(lost, gained):.3g}")}
    row |= dict(zip(("difference", "difference_low", "difference_high"), difference, strict=True))
    return row | {"verdict": _verdict(arm, row, reference, _same(arms.get(CONTROL), answers))}


def _verdict(arm: str, row: dict[str, Any], reference: Answers, control: Answers | None) -> str:
    if control is None:
        return NO_CONTROL
    lost, gained = changed(reference, control)
    if lost <= gained or mcnemar(lost, gained) > CONTROL_P:
        return NOTHING
    if arm == CONTROL:
        return IS_CONTROL
    if row["difference_low"] - 100 * UNSEEN / row["items"] >= -POINTS:
        return WITHIN
    return LOSES if row["difference_high"] < 0 else OPEN


def _same(record: AccuracyRecord | None, answers: Answers) -> Answers | None:
    """The other arm's answers to the same items."""
    found = [] if record is None else record.answers
    return next((a for a in found if (a.task, a.metric, a.filter, a.digest) == _identity(answers)), None)


def _identity(answers: Answers) -> tuple[str, str, str, str]:
    return (answers.task, answers.metric, answers.filter, answers.digest)


def _percent(values: Array, groups: npt.NDArray[Any], seed: int) -> tuple[float, float, float]:
    low, high = interval(values, groups, seed)
    mean, low, high = (round(100 * number, 2) for number in (float(values.mean()), low, high))
    return mean, low, high


def _seed(answers: Answers, *names: str) -> int:
    told = " ".join([answers.digest, answers.task, *names])
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big")


def _about(record: AccuracyRecord, labels: dict[str, str]) -> dict[str, Any]:
    case, arm = record.case, record.arm_config
    task = case.get("task") if isinstance(case.get("task"), dict) else {}
    prefill = task.get("prefill")
    name = str(record.device["name"])
    return {
        "groups": record.case_hash,
        "device": labels.get(name, name),
        "model": case.get("model"),
        "task": task.get("name"),
        "prompt": "read at once" if prefill is None else f"decoded from token {prefill} on",
        "interval_length": arm.get("interval_length", case.get("interval_length")),
        "update": arm.get("update"),
        "read": arm.get("read"),
        "stochastic": {True: "yes", False: "no"}.get(arm.get("stochastic")),
    }


def _name(record: AccuracyRecord, answers: Answers) -> str:
    """The case's name of the task, with lm-eval's where a group of tasks was asked."""
    name = str(record.case["task"]["name"])
    return name if len(record.answers) == 1 and name != "lm_eval" else answers.task
