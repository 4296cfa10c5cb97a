"""The journal of a process: a JSONL file that only grows, and what earlier journals hold already.

A process creates its file exclusively and appends one line a record with one ``os.write`` each. The records of a group
(the arms of one case that were timed together) are written back to back when all of them are done, so a process that is
killed leaves whole groups; a group cut short all the same is incomplete, and is measured again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from experiments.measure.record import Record, read_lines

FINAL = ("ok", "unsupported", "incorrect")
"""Statuses that running again would not change; ``oom``, ``error`` and ``timeout`` are tried again."""


class Line(Protocol):
    """A record of any schema."""

    def to_json(self) -> str: ...


class Journal:
    """An append-only record file of this process in ``folder``; created with the first record."""

    def __init__(self, folder: Path, experiment: str) -> None:
        self.folder, self.experiment = folder, experiment
        self._file: int | None = None
        self.path: Path | None = None

    def append(self, records: Iterable[Line]) -> None:
        """Append a group. Raises ``OSError`` if a line could not be written whole."""
        lines = [(record.to_json() + "\n").encode() for record in records]
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            self.path = self.folder / f"{self.experiment}-{stamp}-{secrets.token_hex(4)}.jsonl"
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        for line in lines:
            if os.write(self._file, line) != len(line):
                raise OSError(f"{self.path}: a record was cut short; is the disk full?")
        os.fsync(self._file)


@contextlib.contextmanager
def alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a folder's lock for this machine: two runs at once would time each other, and record everything twice. The
    second waits, and says so. The system drops the lock with the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{platform.node()}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is timing into {folder}; waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def finished(folder: Path) -> list[set[tuple[str, str, str, str, str, int]]]:
    """For each complete group under ``folder`` the resume keys of its records of final status. Arms are compared within
    a group, so a case is done when one group, not several together, holds all its arms.
    """
    groups: dict[str, list[Record]] = {}
    for _, _, text in read_lines(folder):
        try:
            record = Record.from_json(text or "")
        except ValueError:
            continue
        groups.setdefault(record.group, []).append(record)
    complete = (group for group in groups.values() if {r.arm for r in group} == set(group[0].arms))
    return [{record.key for record in group if record.status in FINAL} for group in complete]
