"""What no table shows, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exclusion:
    """One line, record or group that no table of times shows; ``arm`` is empty where it stands for a whole line."""

    gate: str
    detail: str
    group: str
    arm: str
    where: str


def one_line(message: object) -> str:
    """At most 200 characters of a message, without line breaks."""
    return " ".join(str(message).split())[:200] or type(message).__name__
