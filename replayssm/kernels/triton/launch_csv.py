"""Files of launch tables: one CSV a device in ``launches/``, lines of ``#`` first, then its columns, then the rows.

`launch_table` and `verify_launch_table` say what a row is, and which one answers.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from replayssm.formats import DTYPES
from replayssm.geometry import MAX_INTERVAL_LENGTH, Geometry

TABLES = Path(__file__).parent / "launches"
REACH = 3.0
"""A row answers for as many heads in the batch, times or divided by this: one of batch 8 for 3 to 24."""
LAYER = ("family", "heads", "groups", "head_dim", "state_dim")


class Choice(NamedTuple):
    launch: Any
    """A `launch.Launch`, of a verify step a `verify_launch.WindowLaunch`."""
    how: str
    """For the record: the table and the row's measurement, or the heuristic and the reason for it."""


class _Keyed(Protocol):
    @property
    def key(self) -> tuple[Any, ...]: ...


E = TypeVar("E", bound=_Keyed)


class Fields:
    """A row as text. Each method raises ``ValueError``, one line, on text that is not what it returns."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self._row = row

    def text(self, name: str) -> str:
        if not self._row[name]:
            raise ValueError(f"{name} is empty; accepted: a value")
        return self._row[name]

    def whole(self, name: str) -> int:
        if not self.text(name).isdecimal():
            raise ValueError(f"{name}={self._row[name]!r} is impossible; accepted: a whole number")
        return int(self._row[name])

    def microseconds(self, name: str) -> float:
        if not re.fullmatch(r"\d+(\.\d+)?", self.text(name)):
            raise ValueError(f"{name}={self._row[name]!r} is impossible; accepted: microseconds, such as 12.3")
        return float(self._row[name])

    def flag(self, name: str) -> bool:
        if self.text(name) not in ("true", "false"):
            raise ValueError(f"{name}={self._row[name]!r} is unknown; accepted: true, false")
        return self._row[name] == "true"

    def geometry(self) -> Geometry:
        return Geometry(self.text("family"), *(self.whole(name) for name in LAYER[1:]))

    def given(self, name: str) -> bool:
        """Whether there is a value."""
        return bool(self._row[name])


@functools.cache
def device_name(device: torch.device) -> str:
    """As the driver tells it, ``NVIDIA H200``; what is no GPU has its type for a name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def path_of(name: str, ending: str = "") -> Path:
    """The table of the device of that name, ``nvidia_h200.csv``; it need not exist."""
    return TABLES / (re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + f"{ending}.csv")


def read(path: Path, columns: Sequence[str], entry: Callable[[Fields], E]) -> list[E]:
    """The rows of a table. Raises ``ValueError``, one line with the number of the line, on what is none."""
    entries: dict[tuple[Any, ...], E] = {}
    head: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        fields = next(csv.reader([line]))
        try:
            if head is None:
                head = fields
                if tuple(head) != tuple(columns):
                    raise ValueError(f"the columns are {','.join(head)}; accepted: {','.join(columns)}")
                continue
            if len(fields) != len(columns):
                raise ValueError(f"{len(fields)} fields; accepted: {len(columns)}, as the line of columns says")
            found = entry(Fields(dict(zip(columns, fields, strict=True))))
            if found.key in entries:
                raise ValueError("the same was measured above; accepted: one row a measurement")
        except ValueError as error:
            raise ValueError(f"launch table {path.name}, line {number}: {error}") from None
        entries[found.key] = found
    return list(entries.values())


def write(path: Path, header: str, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Replace a table by these rows; nobody ever sees half of it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _in_words(value) for name, value in row.items()} for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(header + text.getvalue(), encoding="utf-8")
    part.replace(path)


def check_measured(state: str, batch_size: int, interval_length: int | None, rounds: int) -> None:
    """Raises ``ValueError``, one line, on what nobody can have measured."""
    if state not in DTYPES:
        raise ValueError(f"state={state!r} is unknown; accepted: {', '.join(DTYPES)}")
    if batch_size < 1 or rounds < 1:
        raise ValueError(f"batch_size={batch_size} or rounds={rounds} is below 1; accepted: at least 1")
    if interval_length is not None and not 1 <= interval_length <= MAX_INTERVAL_LENGTH:
        raise ValueError(f"interval_length={interval_length} is impossible; accepted: 1 to {MAX_INTERVAL_LENGTH}")


def ratio(one: int, other: int) -> float:
    """How far two counts are from each other."""
    return max(one, other) / min(one, other)


def nearest(entries: Iterable[E], distance: Callable[[E], tuple[Any, ...]]) -> E | None:
    """The row of least distance, whose first part is a ratio of heads; None if that is beyond `REACH` or there is no
    row."""
    found = min(entries, key=distance, default=None)
    return found if found is not None and distance(found)[0] <= REACH else None


def _in_words(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
