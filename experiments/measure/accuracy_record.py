"""The record of an accuracy run: one case x arm with the correctness of every item, one JSON object a line.

Standard library only. As with `experiments.measure.record`, a record is evidence: appended once, never changed,
failures included. A record of status ``ok`` cannot be constructed without items. Arms of one case answered the same
items in the same order, which ``digest`` proves, so that they can be compared item by item.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

SCHEMA = "replayssm.accuracy/1"
STATUSES = ("ok", "oom", "unsupported", "error")
FINAL = ("ok", "unsupported")
"""Statuses that running again would not change."""


@dataclass(frozen=True)
class Answers:
    """The answers to one task of lm-eval under one of its filters.

    ``correct``: one text a repeat, with a 0 or 1 an item. ``group``: for each item the number of the passage that it is
    about; items of one passage share a state, so an interval resamples passages. ``distance``: for each item the tokens
    between a fact and its question, empty where a task has none. ``chance``: share right by guessing, None if unknown.
    ``digest``: of all items, their order included.
    """

    task: str
    metric: str
    filter: str
    version: str
    digest: str
    correct: tuple[str, ...]
    group: tuple[int, ...]
    distance: tuple[int, ...] = ()
    chance: float | None = None

    def __post_init__(self) -> None:
        if not self.group or not self.correct:
            raise ValueError("answers without items")
        if any(len(repeat) != len(self.group) or not re.fullmatch("[01]+", repeat) for repeat in self.correct):
            raise ValueError("correct must hold a 0 or 1 an item")
        if self.distance and len(self.distance) != len(self.group):
            raise ValueError("distance must hold a number an item")


@dataclass(frozen=True)
class AccuracyRecord:
    """One case x arm. ``arm_config`` says how the arm was run, ``metrics`` what lm-eval made of it by task, ``work``
    counts tokens and seconds."""

    case_hash: str
    arm: str
    arm_hash: str
    status: str
    message: str
    case: dict[str, Any]
    arm_config: dict[str, Any]
    code: dict[str, Any]
    packages: dict[str, str]
    device: dict[str, Any]
    environment: dict[str, str]
    argv: tuple[str, ...]
    seeds: dict[str, int]
    started_utc: str
    ended_utc: str
    answers: tuple[Answers, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    experiment: str = "accuracy"
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema={self.schema!r} is not {SCHEMA}")
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} is unknown; accepted: {', '.join(STATUSES)}")
        if (self.status == "ok") != bool(self.answers):
            raise ValueError("answers go with status 'ok', and only with it")
        if self.status != "ok" and not self.message:
            raise ValueError(f"status {self.status!r} needs a message")

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        """Resume key: schema, case, arm, the arm's sources, device, replicate, of which there is one."""
        return (self.schema, self.case_hash, self.arm, self.arm_hash, str(self.device["name"]), 0)

    def to_json(self) -> str:
        """One line without a newline. Raises ``ValueError`` on a NaN or infinity, which JSON cannot hold."""
        return json.dumps({"schema": self.schema} | dataclasses.asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> AccuracyRecord:
        """Parse and validate one line; raises ``ValueError``, one line, that says what is wrong with it."""
        try:
            data = json.loads(line)
            if not isinstance(data["device"].get("name"), str) or not isinstance(data["case"], dict):
                raise ValueError("device.name or case is of another type")
            answers = [{k: tuple(v) if isinstance(v, list) else v for k, v in a.items()} for a in data.pop("answers")]
            return cls(**data | {"argv": tuple(data["argv"]), "answers": tuple(Answers(**a) for a in answers)})
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a {SCHEMA} object: {error}") from None


def is_accuracy(line: str) -> bool:
    """Whether a line of a record file is of this kind, whatever else is wrong with it."""
    return line.startswith('{"schema":"replayssm.accuracy/')
