"""Reads folders of JSONL files into records that may enter a table, and says why the others may not.

Nothing is dropped silently: a line that cannot be parsed, a record that fails a gate and a group that was measured
again each leave an ``Exclusion``. Gates come first, so that a newer group that one of them refuses hides no older one
that passed; unless an arm of it gave wrong results, which no gate of its times takes back: then the newer group stands,
and shows the failure in place of the older speedup. The order of files and lines does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import drift_load
from analysis.exclusion import Exclusion, one_line
from analysis.gates import case_faults, group_faults, is_count, number, record_faults, remarks, timing_faults, value
from analysis.stats import median_step_ns
from experiments.measure.accuracy_record import AccuracyRecord, is_accuracy
from experiments.measure.drift_record import DriftRecord, is_drift
from experiments.measure.record import Record, read_lines

EXPERIMENTS = ("kernel", "window", "decode", "speculative")
"""Of which records become tables; ``window`` is the kernel experiment with windows of speculative decoding."""


Pair = tuple[Record, str]
"""A record and where it lies: file and line."""


@dataclass(frozen=True)
class Gated:
    """A complete group after its gates: the records that passed and those that failed to run; ``stands`` if those are
    all, or if an arm was incorrect.
    """

    group: list[Pair]
    passed: list[Pair]
    stands: bool


@dataclass
class Evidence:
    """``records`` passed every gate; ``failures`` are records of another status than ok that nothing superseded;
    ``drift`` are the records of precisions over documents that passed theirs."""

    records: list[Record] = field(default_factory=list)
    drift: list[DriftRecord] = field(default_factory=list)
    failures: list[Record] = field(default_factory=list)
    exclusions: list[Exclusion] = field(default_factory=list)
    accuracy: list[AccuracyRecord] = field(default_factory=list)
    """Of whatever status; `analysis.accuracy` chooses."""
    files: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Group of records, of accuracy the hash of the case -> files that hold them, below their folder."""

    @property
    def frame(self) -> pd.DataFrame:
        """One row a record that passed; times in nanoseconds of one layer step."""
        return pd.DataFrame([describe(r) | _measured(r) for r in self.records])


def load(folders: Sequence[Path]) -> Evidence:
    """All ``*.jsonl`` and ``*.jsonl.xz`` files of the folders, at any depth; a folder that is not there has none."""
    evidence = Evidence()
    groups: dict[str, dict[str, Pair]] = defaultdict(dict)
    for record, where in _parsed(folders, evidence):
        known = groups[record.group].get(record.to_json())
        if known is None or where < known[1]:  # the same line in two files counts once
            groups[record.group][record.to_json()] = (record, where)
    gated = []
    for name in sorted(groups):
        group = sorted(groups[name].values(), key=lambda pair: (pair[0].arm, pair[0].to_json()))
        if faults := group_faults([r for r, _ in group]):
            _exclude(evidence, group, faults)
            evidence.failures += [r for r, _ in group if r.status != "ok"]
        elif group[0][0].experiment not in EXPERIMENTS:
            _exclude(evidence, group, [("experiment", f"experiment {group[0][0].experiment!r}")])
        else:
            gated.append(_gated(group, evidence))
    for record, where in _newest(gated, evidence):
        if record.status == "ok":
            evidence.records.append(record)
        else:
            evidence.failures.append(record)
            _exclude(evidence, [(record, where)], [("status", f"{record.status}: {one_line(record.message)}")])
    evidence.drift = drift_load.load(folders, evidence.exclusions, evidence.files)
    evidence.records.sort(key=_order)
    evidence.failures.sort(key=_order)
    evidence.exclusions.sort(key=lambda e: (e.where, e.group, e.arm, e.gate, e.detail))
    return evidence


def describe(record: Record) -> dict[str, Any]:
    """What was run, flat; what is missing, or no text or count, is None. ``state`` is the arm's own if it has one."""
    texts = {
        "model": value(record, "model"),
        "family": value(record, "geometry", "family"),
        "phase": value(record, "phase"),
        "state": record.arm_config.get("state_format") or value(record, "precision", "state"),
        "inputs": value(record, "precision", "inputs"),
        "timing": value(record, "timing", "name"),
        "device": record.device.get("name"),
        "device_kind": record.device.get("kind"),
    }
    counts = {
        "batch_size": value(record, "batch_size"),
        "interval_length": value(record, "interval_length"),
        "threads": value(record, "threads"),
        "window": value(record, "window"),
        "accepted": value(record, "accepted"),
    }
    return (
        {"experiment": record.experiment, "arm": record.arm, "kind": record.arm.split("/")[0]}
        | {name: found if isinstance(found, str) else None for name, found in texts.items()}
        | {name: found if is_count(found) else None for name, found in counts.items()}
        | {"arms": len(record.arms), "replicate": record.replicate, "group": record.group}
    )


IN_KERNEL = "in the kernel"
"""What a record says of the gates of an arm that computes them itself; most arms get them ready."""


def computes_gates(record: Record) -> bool:
    """Whether the arm's kernel computes its gates; records of vLLM's packed decode that do not say were of one."""
    told = record.arm_config.get("gates")
    return told == IN_KERNEL if told is not None else "packed_decode" in str(record.arm_config.get("kernel"))


def like_for_like(record: Record, other: Record) -> bool:
    """Whether the arm does the work of the other that the comparison is to: it is not spared the gates."""
    return computes_gates(record) or not computes_gates(other)


def moved_bytes(record: Record) -> float | None:
    """Bytes of state and ring of one layer step, mean over the cycle; None where the record does not say."""
    names = ("state_bytes_read", "state_bytes_written", "ring_bytes_read", "ring_bytes_written")
    parts = [number(record.traffic, name) for name in names]
    return None if any(p is None for p in parts) else sum(p for p in parts if p is not None)


def _measured(record: Record) -> dict[str, Any]:
    floor, step = number(record.traffic, "floor_ns"), median_step_ns(record)
    return {
        "median_step_ns": step,
        "floor_ns": floor,
        "moved_bytes": moved_bytes(record),
        "rounds": len(record.samples_ns),
        "remarks": "; ".join(remarks(record)),
    }


def _parsed(folders: Iterable[Path], evidence: Evidence) -> Iterable[Pair]:
    """Records of the timing experiments; those of accuracy go to the evidence."""
    for folder in folders:
        for path, index, line in read_lines(folder):
            name = path.relative_to(folder).as_posix()
            where = f"{name}:{index}"
            try:
                if line is None:
                    raise ValueError("torn tail: the last line has no end")
                if is_accuracy(line):
                    evidence.accuracy.append(AccuracyRecord.from_json(line))
                    evidence.files[evidence.accuracy[-1].case_hash].add(name)
                elif not is_drift(line):
                    record = Record.from_json(line)
                    evidence.files[record.group].add(name)
                    yield record, where
            except ValueError as error:
                evidence.exclusions.append(Exclusion("line", one_line(error), "", "", where))


def _exclude(evidence: Evidence, group: Sequence[Pair], faults: Sequence[tuple[str, str]]) -> None:
    for record, where in group:
        for gate, detail in faults:
            evidence.exclusions.append(Exclusion(gate, detail, record.group, record.arm, where))


def _gated(group: list[Pair], evidence: Evidence) -> Gated:
    """Exclude what a gate refuses among the timed records of one complete group."""
    lost = [pair for pair in group if pair[0].status != "ok"]
    timed = []
    for record, where in group:
        if record.status != "ok":
            continue
        if faults := case_faults(record) or record_faults(record):
            _exclude(evidence, [(record, where)], faults)
        else:
            timed.append((record, where))
    if timed and (faults := timing_faults([r for r, _ in timed])):
        _exclude(evidence, timed, faults)
        timed = []
    incorrect = any(r.status == "incorrect" for r, _ in lost)
    return Gated(group, timed + lost, incorrect or len(timed + lost) == len(group))


def _newest(groups: list[Gated], evidence: Evidence) -> list[Pair]:
    """What passed of one group of each case, device, replicate and set of arms: those that stand first, then newest.

    Replicates of different sources of an arm are not one experiment: only those of the first group's sources stay.
    """
    kept: dict[tuple[Any, ...], Gated] = {}
    sources: dict[tuple[Any, ...], tuple[str, list[str]]] = {}
    for gated in sorted(groups, key=_preference, reverse=True):
        first = gated.group[0][0]
        series = (first.experiment, first.case_hash, str(first.device.get("name")), tuple(sorted(first.arms)))
        chosen, hashes = sources.setdefault(series, (first.group, [r.arm_hash for r, _ in gated.group]))
        if [r.arm_hash for r, _ in gated.group] != hashes:
            _exclude(evidence, gated.passed, [("superseded", f"group {chosen} ran other sources of the arms")])
        elif (*series, first.replicate) in kept:
            by = kept[(*series, first.replicate)].group[0][0].group
            _exclude(evidence, gated.passed, [("superseded", f"group {by} measured the same")])
        else:
            kept[(*series, first.replicate)] = gated
    return [pair for gated in kept.values() for pair in gated.passed]


def _preference(gated: Gated) -> tuple[bool, str, str]:
    return (gated.stands, max(r.started_utc for r, _ in gated.group), gated.group[0][0].group)


def _order(record: Record) -> tuple[str, ...]:
    numbers = (value(record, "batch_size"), value(record, "interval_length"), record.replicate)
    padded = [f"{n:09d}" if isinstance(n, int) else str(n) for n in numbers]
    names = (record.experiment, value(record, "model"), record.device.get("name"), value(record, "phase"))
    return (*map(str, names), *padded, record.case_hash, record.group, record.arm)
