"""Launch tables of windows: which launches were fastest on a device. ``launches/<device>_windows.csv``, a file of its
own, since a verify step has another kind of launch; `experiments.tune` writes it.

A row is a measurement as in `launch_table`: of operation ``verify``, of which ``lanes`` is empty, or ``snapshots``, of
which ``interval_length``, ``heads_a_program``, ``eager``, ``chunks`` and ``staggered_us`` are. `choose` takes the
nearest row of the same operation, family, ``head_dim``, ``state_dim``, bytes a state element, columns of a product
(windows up to 8 with Mamba-2, to 4 or 8 with the others, to 16) and, for verify, ring length in the kernels (intervals
up to 16, to 32, to 64): first by heads in the batch, at most a factor of `REACH` away, then by window and interval, all
by ratio, then the same heads a group. Without one the heuristics of `verify_launch` choose.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.formats import DTYPES
from replayssm.geometry import Geometry
from replayssm.kernels.triton import launch_csv
from replayssm.kernels.triton.launch import Launch, ring
from replayssm.kernels.triton.launch_csv import LAYER, Choice, Fields, device_name, ratio
from replayssm.kernels.triton.verify_launch import (
    MAX_WINDOW,
    WindowLaunch,
    columns,
    snapshots_launch,
    verify_launch,
)

LAUNCHES: dict[str, type[Launch] | type[WindowLaunch]] = {"snapshots": Launch, "verify": WindowLaunch}
"""Operation -> its kind of launch."""
COLUMN_OF = {"heads": "heads_a_program"}
"""Fields of a launch whose columns have another name: the layer has heads too."""
LAUNCH = ("rows", "tiles", "heads_a_program", "warps", "lanes", "stages", "registers", "eager", "chunks")
OF_ONE = {"snapshots": ("lanes",), "verify": ("interval_length", "heads_a_program", "eager", "chunks", "staggered_us")}
"""Columns that the other operation leaves empty."""
MEASURED = ("accepted", "aligned_us", "staggered_us", "rounds", "source")
COLUMNS = ("operation", *LAYER, "state", "interval_length", "window", "batch_size", *LAUNCH, *MEASURED)
HEADER = """\
# Launch configurations of the Triton kernels for windows of speculative decoding, measured on: {device}
# A row is the fastest launch of those tried, the worse of aligned and staggered rows counting: microseconds of a layer
# step of `window` tokens, of which `accepted` were committed, median of `rounds` rounds, CUDA graphs of whole flush
# cycles over copies of the state larger than the L2 cache, bf16 inputs; `source` is the commit, + if changed.
# `python -m experiments.tune window=4 accepted=3` adds rows.
"""


@dataclass(frozen=True)
class Entry:
    """A row of a table. ``interval_length`` and ``staggered_us`` are None for snapshots, which have neither."""

    operation: str
    geometry: Geometry
    state: str
    interval_length: int | None
    window: int
    batch_size: int
    launch: Launch | WindowLaunch
    accepted: int
    aligned_us: float
    staggered_us: float | None
    rounds: int
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.launch, _kind_of(self.operation)):
            raise ValueError(f"{self.launch} of {self.operation}; accepted: a {LAUNCHES[self.operation].__name__}")
        if (self.operation == "verify") != (self.interval_length is not None):
            raise ValueError(f"interval_length={self.interval_length} of {self.operation}; accepted: of verify alone")
        launch_csv.check_measured(self.state, self.batch_size, self.interval_length, self.rounds)
        if not 1 <= self.accepted <= self.window <= MAX_WINDOW:
            told = f"window={self.window} with accepted={self.accepted} is impossible"
            raise ValueError(f"{told}; accepted: 1 to {MAX_WINDOW}, with at least 1 and at most all of it")

    @property
    def key(self) -> tuple[Any, ...]:
        """What was measured; a table has it once, and is sorted by it."""
        g = self.geometry
        layer = (g.family, g.head_dim, g.state_dim, g.heads, g.groups)
        sizes = (self.interval_length or 0, self.window, self.batch_size)
        return ([*LAUNCHES].index(self.operation), *layer, self.state, *sizes)

    @property
    def measured_at(self) -> str:
        g, interval = self.geometry, f", L {self.interval_length}" if self.interval_length else ""
        sizes = f"batch {self.batch_size}{interval}, window {self.window}"
        return f"{g.heads}x{g.head_dim}x{g.state_dim}, {sizes}, state {self.state}"


def verify_launch_for(geometry: Geometry, batch_size: int, layer: CacheLayer) -> WindowLaunch:
    """`choose` for a verify step of a layer with a window."""
    sizes = (layer.window or 1, layer.interval_length)
    return choose(geometry, batch_size, layer.state.element_size(), *sizes, layer.state.device).launch


def snapshots_launch_for(geometry: Geometry, batch_size: int, states: Tensor) -> Launch:
    """`choose` for a step with snapshots ``states [S,T,H,P,N]``."""
    return choose(geometry, batch_size, states.element_size(), states.shape[1], None, states.device).launch


@functools.cache
def choose(
    geometry: Geometry,
    batch_size: int,
    state_bytes: int,
    window: int,
    interval_length: int | None,
    device: torch.device,
) -> Choice:
    """The launch of a step that takes ``window`` tokens of ``batch_size`` rows with ``state_bytes`` a state element: of
    a verify step with its interval length, of one with snapshots with None. Raises ``ValueError``, one line, if the
    device's table cannot be read.
    """
    name = device_name(device)
    table = path_of(name)
    entries = _loaded(table)
    found = nearest(entries or [], geometry, batch_size, state_bytes, window, interval_length)
    if found is not None:
        return Choice(found.launch, f"table {table.stem}, measured at {found.measured_at}")
    reason = f"no table of windows for {name}" if entries is None else f"table {table.stem} holds nothing near"
    if interval_length is None:
        return Choice(snapshots_launch(geometry, batch_size, state_bytes), f"heuristic: {reason}")
    return Choice(verify_launch(geometry, batch_size, window), f"heuristic: {reason}")


def nearest(
    entries: Iterable[Entry],
    geometry: Geometry,
    batch_size: int,
    state_bytes: int,
    window: int,
    interval_length: int | None,
) -> Entry | None:
    """The row that answers, as the module says; None if there is none. Arguments as of `choose`."""
    heads = max(1, batch_size) * geometry.heads

    def kind(g: Geometry, state_bytes: int, window: int, interval_length: int | None) -> tuple[object, ...]:
        held = None if interval_length is None else ring(interval_length)
        return g.family, g.head_dim, g.state_dim, state_bytes, columns(g.family, window), held

    def distance(entry: Entry) -> tuple[float, bool, float, float, bool]:
        measured = entry.batch_size * entry.geometry.heads
        return (
            ratio(measured, heads),
            measured > heads,
            ratio(entry.window, window),
            ratio(entry.interval_length or 1, interval_length or 1),
            entry.geometry.heads_per_group != geometry.heads_per_group,
        )

    asked = kind(geometry, state_bytes, window, interval_length)
    alike = [e for e in entries if kind(e.geometry, DTYPES[e.state].itemsize, e.window, e.interval_length) == asked]
    return launch_csv.nearest(alike, distance)


def path_of(name: str) -> Path:
    """The table of the device of that name, ``nvidia_h200_windows.csv``; it need not exist."""
    return launch_csv.path_of(name, "_windows")


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
    launch = {COLUMN_OF.get(name, name): value for name, value in asdict(entry.launch).items()}
    own = {name: value for name, value in vars(entry).items() if name not in ("geometry", "launch")}
    row = own | asdict(entry.geometry) | launch
    return {name: row[name] for name in COLUMNS if name in row and not _of_another(entry.operation, name)}


def _entry(row: Fields) -> Entry:
    operation = row.text("operation")
    kind = _kind_of(operation)
    for name in filter(row.given, COLUMNS):
        if other := _of_another(operation, name):
            raise ValueError(f"{name} of {operation} is given; accepted: of {other} alone")

    def number(name: str) -> bool | int | None:
        if name == "eager":
            return row.flag(name)
        return row.whole(name) if row.given(name) or name != "registers" else None

    named = {field.name: COLUMN_OF.get(field.name, field.name) for field in fields(kind)}
    launch: dict[str, Any] = {
        name: number(column)
        for name, column in named.items()
        if column in LAUNCH and not _of_another(operation, column)
    }
    verify = operation == "verify"
    return Entry(
        operation=operation,
        geometry=row.geometry(),
        state=row.text("state"),
        interval_length=row.whole("interval_length") if verify else None,
        window=row.whole("window"),
        batch_size=row.whole("batch_size"),
        launch=kind(**launch),
        accepted=row.whole("accepted"),
        aligned_us=row.microseconds("aligned_us"),
        staggered_us=row.microseconds("staggered_us") if verify else None,
        rounds=row.whole("rounds"),
        source=row.text("source"),
    )


def _kind_of(operation: str) -> type[Launch] | type[WindowLaunch]:
    if operation not in LAUNCHES:
        raise ValueError(f"operation={operation!r} is unknown; accepted: {', '.join(LAUNCHES)}")
    return LAUNCHES[operation]


def _of_another(operation: str, column: str) -> str | None:
    """The operation to which a column belongs alone, if that is another one."""
    return next((other for other, names in OF_ONE.items() if other != operation and column in names), None)
