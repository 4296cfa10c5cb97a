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

import functools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.formats import DTYPES
from replayssm.geometry import Geometry
from replayssm.kernels.triton import launch_csv
from replayssm.kernels.triton.launch import Launch, replay_launch, ring, stored_launch
from replayssm.kernels.triton.launch_csv import LAYER, Choice, Fields, device_name, ratio

OPERATIONS = ("stored", "replay")
FLAGS = ("eager", "at_once", "ahead")
LAUNCH = ("rows", "tiles", "warps", "lanes", "stages", "eager", "registers", "at_once", "ahead")
MEASURED = ("aligned_us", "staggered_us", "rounds", "source")
COLUMNS = ("operation", *LAYER, "state", "interval_length", "batch_size", *LAUNCH, *MEASURED)
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
        if (self.operation == "replay") != (self.interval_length is not None):
            raise ValueError(f"interval_length={self.interval_length} of {self.operation}; accepted: of replay alone")
        launch_csv.check_measured(self.state, self.batch_size, self.interval_length, self.rounds)

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
        held = None if interval_length is None else ring(interval_length)
        return g.family, g.head_dim, g.state_dim, state_bytes, held

    def distance(entry: Entry) -> tuple[float, bool, float, bool]:
        measured = entry.batch_size * entry.geometry.heads
        return (
            ratio(measured, heads),
            measured > heads,
            ratio(entry.interval_length or 1, interval_length or 1),
            entry.geometry.heads_per_group != geometry.heads_per_group,
        )

    asked = kind(geometry, state_bytes, interval_length)
    alike = [e for e in entries if kind(e.geometry, DTYPES[e.state].itemsize, e.interval_length) == asked]
    return launch_csv.nearest(alike, distance)


def path_of(name: str) -> Path:
    """The table of the device of that name, ``nvidia_h200.csv``; it need not exist."""
    return launch_csv.path_of(name)


@functools.cache
def _loaded(path: Path) -> list[Entry] | None:
    return read(path) if path.exists() else None


def forget() -> None:
    """Let the next choice read the tables again."""
    choose.cache_clear()
    _loaded.cache_clear()


def read(path: Path) -> list[Entry]:
    """The rows of a table. Raises ``ValueError``, one line with the number of the line, on what is none."""
    return launch_csv.read(path, COLUMNS, _entry)


def write(path: Path, device: str, entries: Iterable[Entry]) -> None:
    """Replace the table of the device named ``device`` by these rows, sorted; nobody ever sees half of it."""
    ordered = sorted(entries, key=lambda entry: entry.key)
    launch_csv.write(path, HEADER.format(device=device), COLUMNS, map(_row, ordered))


def _row(entry: Entry) -> dict[str, object]:
    own = {name: getattr(entry, name) for name in ("operation", "state", "interval_length", "batch_size", *MEASURED)}
    return own | asdict(entry.geometry) | asdict(entry.launch)


def _entry(row: Fields) -> Entry:
    def number(name: str) -> bool | int | None:
        if name in FLAGS:
            return row.flag(name)
        return row.whole(name) if row.given(name) or name != "registers" else None

    launch: dict[str, Any] = {name: number(name) for name in LAUNCH}
    return Entry(
        operation=row.text("operation"),
        geometry=row.geometry(),
        state=row.text("state"),
        interval_length=row.whole("interval_length") if row.given("interval_length") else None,
        batch_size=row.whole("batch_size"),
        launch=Launch(**launch),
        aligned_us=row.microseconds("aligned_us"),
        staggered_us=row.microseconds("staggered_us") if row.given("staggered_us") else None,
        rounds=row.whole("rounds"),
        source=row.text("source"),
    )
