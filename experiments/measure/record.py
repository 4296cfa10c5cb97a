"""The record: one case x arm x replicate with its raw samples, one JSON object a line; and reading files of them.

Standard library only.

A record is evidence. It is appended once and never changed; failures are records too. A record of status ``ok`` cannot
be constructed without samples and without passed correctness blocks from before *and* after timing, and one that has
no passed correctness cannot hold samples, so that no table can show the speed of a wrong result.

Records of the arms of one case that were timed together, in one process, share ``group``; only samples of one group
may be compared. The order of the rounds and the samples of the bandwidth kernels, which are those of the group, stand
in the record of the arm that was timed twice. ``arms`` lists the arms of the group: a group that lacks one was cut
short and is not used.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "replayssm.record/3"
READABLE = ("replayssm.record/1", "replayssm.record/2", SCHEMA)
"""Records of version 1 lack ``phase_samples_ns``, which may be empty; before version 3 ``group_peak_memory_bytes`` was
``peak_memory_bytes``, and stays so on their line, which has no ``decode``.
"""
STATUSES = ("ok", "oom", "unsupported", "incorrect", "error", "timeout")
MOMENTS = ("before", "after")
TEXTS = ("group", "experiment", "case_hash", "arm", "arm_hash", "status", "message", "started_utc", "ended_utc")
COUNTS = ("replicate", "layer_steps_per_sample")
MAPPINGS = ("case", "arm_config", "code", "packages", "device", "device_state", "environment", "seeds")
MAPPINGS += ("timing_asked", "timing_used", "traffic", "bandwidth")
CHECK_COUNTS = ("flushes_counted", "flushes_expected", "copies_touched", "copies_expected")
MAX_DEPTH = 16
"""Levels of lists and mappings in a line; those of experiments have five."""


@dataclass(frozen=True)
class Comparison:
    """One compared quantity: relative error by norm against float64, and the budget it had to stay within."""

    quantity: str
    error: float
    budget: float

    @property
    def passed(self) -> bool:
        return math.isfinite(self.error) and math.isfinite(self.budget) and self.error <= self.budget


@dataclass(frozen=True)
class Correctness:
    """One check of an arm over one whole flush cycle, ``before`` or ``after`` its timing.

    ``rows`` are the batch rows compared with float64, ``copies`` the rotated copies compared. ``flushes_counted`` is
    what the kernels counted over the span the check covers, ``flushes_expected`` follows from the protocol.
    """

    moment: str
    comparisons: tuple[Comparison, ...]
    rows: tuple[int, ...]
    copies: tuple[int, ...]
    cursor_equal: bool
    flushes_counted: int
    flushes_expected: int
    copies_touched: int
    copies_expected: int

    def __post_init__(self) -> None:
        if self.moment not in MOMENTS:
            raise ValueError(f"moment={self.moment!r} is unknown; accepted: {', '.join(MOMENTS)}")

    @property
    def passed(self) -> bool:
        return not self.faults()

    def faults(self) -> list[str]:
        """What is wrong, one phrase each; empty when the check passed."""
        found = [
            f"{c.quantity} error {c.error:.3g} exceeds budget {c.budget:.3g}" for c in self.comparisons if not c.passed
        ]
        if not self.comparisons or not self.rows or not self.copies:
            found.append("nothing was compared")
        if not self.cursor_equal:
            found.append("cursor differs from the protocol's")
        if self.flushes_counted != self.flushes_expected:
            found.append(f"{self.flushes_counted} flushes counted, {self.flushes_expected} expected")
        if self.copies_touched != self.copies_expected:
            found.append(f"{self.copies_touched} of {self.copies_expected} copies touched")
        return found


@dataclass(frozen=True)
class Record:
    """One case x arm x replicate. Units are in the names; see the module docstring for what may be constructed."""

    # identity
    group: str
    experiment: str
    case_hash: str
    arm: str
    arm_hash: str
    arms: tuple[str, ...]
    replicate: int
    status: str
    message: str
    # what was run
    case: dict[str, Any]
    arm_config: dict[str, Any]
    code: dict[str, Any]
    packages: dict[str, str]
    device: dict[str, Any]
    device_state: dict[str, Any]
    environment: dict[str, str]
    argv: tuple[str, ...]
    seeds: dict[str, int]
    started_utc: str
    ended_utc: str
    # what was measured
    timing_asked: dict[str, Any]
    timing_used: dict[str, Any] = field(default_factory=dict)
    samples_ns: tuple[tuple[int, ...], ...] = ()
    """Elapsed time by round; each sample is ``layer_steps_per_sample`` layer steps, whole flush cycles; of whole models
    it is the difference of two generations, so many model steps."""
    again_samples_ns: tuple[tuple[int, ...], ...] = ()
    """A/A: the same arm timed a second time in each round; only one arm of a group has it."""
    layer_steps_per_sample: int = 0
    phase_samples_ns: tuple[tuple[int, ...], ...] = ()
    """Elapsed time of a pass, a step of each copy, by ring length 0 .. L-1 in all rows; a stored arm has one entry.
    Empty where it was not measured. The state they are taken on is that of no model.
    """
    correctness: tuple[Correctness, ...] = ()
    traffic: dict[str, Any] = field(default_factory=dict)
    bandwidth: dict[str, Any] = field(default_factory=dict)
    layers_memory_bytes: int | None = None
    """Memory of the device that the arm's layers took when they were built: state, ring, outputs and what else it
    allocates then. None on a CPU, and in older records.
    """
    group_peak_memory_bytes: int | None = None
    """The most that was in use on the GPU during the whole group: all arms, inputs, checks and bandwidth kernels. On a
    CPU that of the process since it started, cases before this one included.
    """
    decode: dict[str, Any] = field(default_factory=dict)
    """Of whole models: what `experiments.measure.decode_worker` adds; a sample is then so many model steps."""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.schema not in READABLE:
            raise ValueError(f"schema={self.schema!r} is none of {', '.join(READABLE)}")
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} is unknown; accepted: {', '.join(STATUSES)}")
        if self.arm not in self.arms:
            raise ValueError(f"arm={self.arm!r} is not among the group's arms {list(self.arms)}")
        samples = [s for r in (*self.samples_ns, *self.again_samples_ns, *self.phase_samples_ns) for s in r]
        if any(isinstance(s, bool) or not isinstance(s, int) or s <= 0 for s in samples):
            raise ValueError("samples must be positive integers in nanoseconds")
        passed = {c.moment for c in self.correctness if c.passed}
        if not all(c.passed for c in self.correctness) or passed != set(MOMENTS):
            if samples:
                raise ValueError("a record with samples needs passed correctness before and after timing")
            if self.status == "ok":
                raise ValueError("status 'ok' needs passed correctness before and after timing")
        if self.status == "ok" and (not self.samples_ns or not all(self.samples_ns)):
            raise ValueError("status 'ok' needs a sample in every round")
        if self.status != "ok" and samples:
            raise ValueError(f"status {self.status!r} cannot hold samples")
        if self.status != "ok" and not self.message:
            raise ValueError(f"status {self.status!r} needs a message")
        if samples and self.layer_steps_per_sample < 1:
            raise ValueError("samples need layer_steps_per_sample of at least 1")
        if self.again_samples_ns and [len(r) for r in self.again_samples_ns] != [len(r) for r in self.samples_ns]:
            raise ValueError("A/A samples must match the samples round by round")

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        """Resume key: schema, case, arm, the arm's sources, device, replicate."""
        return (self.schema, self.case_hash, self.arm, self.arm_hash, str(self.device["name"]), self.replicate)

    @property
    def id(self) -> str:
        return f"{self.group}:{self.arm}"

    def to_json(self) -> str:
        """One line without a newline. Raises ``ValueError`` on a NaN or infinity, which JSON cannot hold."""
        data = {"schema": self.schema, "id": self.id} | dataclasses.asdict(self)
        if self.schema != SCHEMA:
            del data["layers_memory_bytes"], data["decode"]
            data["peak_memory_bytes"] = data.pop("group_peak_memory_bytes")
        for block, check in zip(data["correctness"], self.correctness, strict=True):
            block["passed"] = check.passed
            for row, comparison in zip(block["comparisons"], check.comparisons, strict=True):
                row["error"] = row["error"] if math.isfinite(comparison.error) else str(comparison.error)
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Parse and re-validate one line; raises ``ValueError``, one line, that says what is wrong with it."""
        try:
            data = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_finite_integer)
            line.encode()  # bytes that were no UTF-8 when the file was read
            _check_types(data)
            data.pop("id")
            if data["schema"] != SCHEMA:
                data["group_peak_memory_bytes"] = data.pop("peak_memory_bytes", None)
            blocks = data.pop("correctness")
            stated = [block.pop("passed") for block in blocks]
            data["correctness"] = tuple(_correctness(block) for block in blocks)
            for name in ("samples_ns", "again_samples_ns", "phase_samples_ns"):
                data[name] = tuple(tuple(r) for r in data.get(name, ()))
            data["arms"], data["argv"] = tuple(data["arms"]), tuple(data["argv"])
            record = cls(**data)
        except RecursionError:
            raise ValueError(f"not a {SCHEMA} object: nested too deep") from None
        except UnicodeEncodeError:
            raise ValueError(f"not a {SCHEMA} object: not UTF-8") from None
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a {SCHEMA} object: {error}") from None
        if stated != [c.passed for c in record.correctness]:
            raise ValueError("a correctness block states another verdict than its numbers give")
        return record


def read_lines(folder: Path) -> Iterator[tuple[Path, int, str | None]]:
    """``(file, line number, text)`` of every line with something in it in ``*.jsonl`` below ``folder``, at any depth.

    So too in ``*.jsonl.xz``, which xz makes of files that grow no more. The text is None for a tail that was cut
    short, since every whole line ends with a newline, and for a compressed file that is damaged. Bytes that are not
    UTF-8 become surrogates, which ``Record.from_json`` refuses. A folder that does not exist holds no lines.
    """
    for path in sorted([*folder.rglob("*.jsonl"), *folder.rglob("*.jsonl.xz")]):
        data = path.read_bytes()
        if path.suffix == ".xz":
            try:
                data = lzma.decompress(data)
            except lzma.LZMAError:
                yield path, 1, None
                continue
        *lines, tail = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield path, number, line.decode(errors="surrogateescape")
        if tail.strip():
            yield path, len(lines) + 1, None


def _check_types(data: Any) -> None:
    """Raises ``ValueError`` where a field that others index by, sum or show has another type than it should."""
    if not isinstance(data, dict):
        raise ValueError(f"not a {SCHEMA} object: {type(data).__name__}")
    if _depth(data) > MAX_DEPTH:
        raise ValueError(f"not a {SCHEMA} object: nested too deep")
    for names, kind in ((TEXTS, str), (COUNTS, int), (MAPPINGS, dict), (("arms", "argv", "correctness"), list)):
        for name in names:
            if not isinstance(data[name], kind) or isinstance(data[name], bool):
                raise ValueError(f"{name}={_short(data[name])} is no {kind.__name__}")
    for name in ("arms", "argv"):
        if not all(isinstance(text, str) for text in data[name]):
            raise ValueError(f"{name}={_short(data[name])} holds something else than text")
    if not isinstance(data["device"].get("name"), str):
        raise ValueError(f"device.name={_short(data['device'].get('name'))} is no text")


def _correctness(block: dict[str, Any]) -> Correctness:
    comparisons = tuple(Comparison(c["quantity"], float(c["error"]), c["budget"]) for c in block.pop("comparisons"))
    typed = isinstance(block["cursor_equal"], bool) and all(type(block[name]) is int for name in CHECK_COUNTS)
    if not typed or not all(isinstance(c.quantity, str) for c in comparisons):
        raise ValueError("a correctness block holds a name, a count or a flag of another type")
    return Correctness(
        comparisons=comparisons, rows=tuple(block.pop("rows")), copies=tuple(block.pop("copies")), **block
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number that JSON can hold")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{_short(text)} is beyond a float")
    return number


def _finite_integer(text: str) -> int:
    number = int(text)
    _finite(text)
    return number


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
