"""Launch tables: which launches were fastest on a device. One file a device in ``launches/``, of `experiments.tune`.

A row of a table is a measurement: operation, layer, state format, interval length (replay) and batch; the fastest
launch; microseconds of a layer step with aligned and, for replay, with staggered rows. `choose` takes the nearest row.
It answers for the same operation, family, ``head_dim``, ``state_dim``, bytes a state element, and, for replay, ring
length in the kernels (intervals up to 16, to 32, to 64); the nearest has the most similar number of heads in the batch,
by ratio (of two as near the one with fewer, since what fills a device with less to do is rarely slow with more), then
the most similar interval and the same heads a group. Where no row is within a factor of `REACH` of the heads asked for,
or the device has no table, the heuristics of `replayssm.kernels.triton.launch` choose. What was chosen, and why, is for
the record.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.formats import DTYPES
from replayssm.geometry import MAX_INTERVAL_LENGTH, Geometry
from replayssm.kernels.triton.launch import Launch, power_of_two, replay_launch, stored_launch

TABLES = Path(__file__).parent / "launches"
OPERATIONS = ("stored", "replay")
REACH = 3.0
"""Rows measured at batch 1, 8, 64, ... then answer for every batch between."""
LAYER = ("family", "heads", "groups", "head_dim", "state_dim")
FLAGS = ("eager", "at_once")
LAUNCH = ("rows", "tiles", "warps", "lanes", "stages", "eager", "registers", "at_once")
MEASURED = ("aligned_us", "staggered_us", "rounds", "source")
COLUMNS = ("operation", *LAYER, "state", "interval_length", "batch_size", *LAUNCH, *MEASURED)
MAY_BE_EMPTY = ("interval_length", "staggered_us", "registers")
HEADER = """\
# Launch configurations of the Triton kernels measured on: {device}
# A row is the fastest launch of those tried, the worse of aligned and staggered rows counting: microseconds of a layer
# step, median of `rounds` rounds, CUDA graphs of whole flush cycles over copies of the state larger than the L2 cache,
# bf16 inputs; `source` is the commit, + if changed. `python -m experiments.tune` adds rows.
"""


@dataclass(frozen=True)
class Entry:
    """A row of a table. ``interval_length`` and ``staggered_us`` are None for a stored step, which has neither."""

    operation: str
    geometry: Geometry
    state: str
    interval_length: int | None
    batch_size: int
    launch: Launch
    aligned_us: float
    staggered_us: float | None
    rounds: int
    source: str

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"operation={self.operation!r} is unknown; accepted: {', '.join(OPERATIONS)}")
        if self.state not in DTYPES:
            raise ValueError(f"state={self.state!r} is unknown; accepted: {', '.join(DTYPES)}")
        if self.batch_size < 1 or self.rounds < 1:
            raise ValueError(f"batch_size={self.batch_size} or rounds={self.rounds} is below 1; accepted: at least 1")
        if (self.operation == "replay") != (self.interval_length is not None):
            raise ValueError(f"interval_length={self.interval_length} of {self.operation}; accepted: of replay alone")
        if self.interval_length is not None and not 1 <= self.interval_length <= MAX_INTERVAL_LENGTH:
            accepted = f"1 to {MAX_INTERVAL_LENGTH}"
            raise ValueError(f"interval_length={self.interval_length} is impossible; accepted: {accepted}")

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured; a table has it once, and is sorted by it."""
        g = self.geometry
        layer = (g.family, g.head_dim, g.state_dim, g.heads, g.groups)
        return (OPERATIONS.index(self.operation), *layer, self.state, self.interval_length or 0, self.batch_size)

    @property
    def measured_at(self) -> str:
        g, interval = self.geometry, f", L {self.interval_length}" if self.interval_length else ""
        return f"{g.heads}x{g.head_dim}x{g.state_dim}, batch {self.batch_size}{interval}, state {self.state}"


class Choice(NamedTuple):
    launch: Launch
    how: str
    """For the record: the table and the row's measurement, or the heuristic and the reason for it."""


def launch_for(geometry: Geometry, batch_size: int, state: Tensor, interval_length: int | None = None) -> Launch:
    """`choose` for a step that gets ``state``."""
    return choose(geometry, batch_size, state.element_size(), interval_length, state.device).launch


@functools.cache
def choose(
    geometry: Geometry, batch_size: int, state_bytes: int, interval_length: int | None, device: torch.device
) -> Choice:
    """The launch of a step of ``batch_size`` rows with ``state_bytes`` a state element: of a replay step with its
    interval length, of a stored one with None. Raises ``ValueError``, one line, if the device's table cannot be read.
    """
    name = device_name(device)
    table = path_of(name)
    entries = _loaded(table)
    found = nearest(entries or [], geometry, batch_size, state_bytes, interval_length)
    if found is not None:
        return Choice(found.launch, f"table {table.stem}, measured at {found.measured_at}")
    reason = f"no table for {name}" if entries is None else f"table {table.stem} holds nothing near"
    if interval_length is None:
        return Choice(stored_launch(geometry, batch_size, state_bytes), f"heuristic: {reason}")
    return Choice(replay_launch(geometry, batch_size, state_bytes), f"heuristic: {reason}")


def nearest(
    entries: Iterable[Entry], geometry: Geometry, batch_size: int, state_bytes: int, interval_length: int | None
) -> Entry | None:
    """The row that answers, as the module says; None if there is none. Arguments as of `choose`."""
    heads = max(1, batch_size) * geometry.heads

    def kind(g: Geometry, state_bytes: int, interval_length: int | None) -> tuple[object, ...]:
        ring = None if interval_length is None else max(16, power_of_two(interval_length))
        return g.family, g.head_dim, g.state_dim, state_bytes, ring

    def distance(entry: Entry) -> tuple[float, bool, float, bool]:
        measured = entry.batch_size * entry.geometry.heads
        return (
            _ratio(measured, heads),
            measured > heads,
            _ratio(entry.interval_length or 1, interval_length or 1),
            entry.geometry.heads_per_group != geometry.heads_per_group,
        )

    asked = kind(geometry, state_bytes, interval_length)
    alike = [e for e in entries if kind(e.geometry, DTYPES[e.state].itemsize, e.interval_length) == asked]
    found = min(alike, key=distance, default=None)
    return found if found is not None and distance(found)[0] <= REACH else None


def _ratio(one: int, other: int) -> float:
    return max(one, other) / min(one, other)


@functools.cache
def device_name(device: torch.device) -> str:
    """As the driver tells it, ``NVIDIA H200``; what is no GPU has its type for a name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def path_of(name: str) -> Path:
    """The table of the device of that name, ``nvidia_h200.csv``; it need not exist."""
    return TABLES / (re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + ".csv")


@functools.cache
def _loaded(path: Path) -> list[Entry] | None:
    return read(path) if path.exists() else None


def forget() -> None:
    """Let the next choice read the tables again."""
    choose.cache_clear()
    _loaded.cache_clear()


def read(path: Path) -> list[Entry]:
    """The rows of a table. Raises ``ValueError``, one line with the number of the line, on what is none."""
    entries: dict[tuple[object, ...], Entry] = {}
    columns: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        fields = next(csv.reader([line]))
        try:
            if columns is None:
                columns = fields
                if tuple(columns) != COLUMNS:
                    raise ValueError(f"the columns are {','.join(columns)}; accepted: {','.join(COLUMNS)}")
                continue
            if len(fields) != len(COLUMNS):
                raise ValueError(f"{len(fields)} fields; accepted: {len(COLUMNS)}, as the line of columns says")
            entry = _entry(dict(zip(COLUMNS, fields, strict=True)))
            if entry.key in entries:
                raise ValueError("the same was measured above; accepted: one row a measurement")
        except ValueError as error:
            raise ValueError(f"launch table {path.name}, line {number}: {error}") from None
        entries[entry.key] = entry
    return list(entries.values())


def write(path: Path, device: str, entries: Iterable[Entry]) -> None:
    """Replace the table of the device named ``device`` by these rows, sorted; nobody ever sees half of it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_row, sorted(entries, key=lambda entry: entry.key)))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(HEADER.format(device=device) + text.getvalue(), encoding="utf-8")
    part.replace(path)


def _row(entry: Entry) -> dict[str, object]:
    launch = asdict(entry.launch) | {name: str(getattr(entry.launch, name)).lower() for name in FLAGS}
    own = {name: getattr(entry, name) for name in ("operation", "state", "interval_length", "batch_size", *MEASURED)}
    return own | asdict(entry.geometry) | launch


def _entry(row: Mapping[str, str]) -> Entry:
    for name in COLUMNS:
        if not row[name] and name not in MAY_BE_EMPTY:
            raise ValueError(f"{name} is empty; accepted: a value")

    def whole(name: str) -> int:
        if not row[name].isdecimal():
            raise ValueError(f"{name}={row[name]!r} is impossible; accepted: a whole number")
        return int(row[name])

    def microseconds(name: str) -> float:
        if not re.fullmatch(r"\d+(\.\d+)?", row[name]):
            raise ValueError(f"{name}={row[name]!r} is impossible; accepted: microseconds, such as 12.3")
        return float(row[name])

    def flag(name: str) -> bool:
        if row[name] not in ("true", "false"):
            raise ValueError(f"{name}={row[name]!r} is unknown; accepted: true, false")
        return row[name] == "true"

    launch: dict[str, Any] = {name: flag(name) if name in FLAGS else whole(name) for name in LAUNCH if row[name]}
    return Entry(
        operation=row["operation"],
        geometry=Geometry(row["family"], *(whole(name) for name in LAYER[1:])),
        state=row["state"],
        interval_length=whole("interval_length") if row["interval_length"] else None,
        batch_size=whole("batch_size"),
        launch=Launch(**launch),
        aligned_us=microseconds("aligned_us"),
        staggered_us=microseconds("staggered_us") if row["staggered_us"] else None,
        rounds=whole("rounds"),
        source=row["source"],
    )
