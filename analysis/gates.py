"""Checks that a record, and the group it was timed in, must pass before a table may show its time.

The experiment checks most of this when it runs. It is checked again here, from the record alone, so that a number
does not depend on the version of the code that wrote it. ``Record`` itself re-checks the correctness blocks. Each
fault is a pair (gate, what is wrong); gates are named in ``GATES``. Faults exclude, remarks only flag.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from analysis.stats import aa_fault
from experiments.measure.record import Record

MIN_COLD_FACTOR = 5.0
"""Rotated bytes over the size of the last-level cache: at 5 the next visit of a copy finds next to nothing cached."""

NOT_IN_HASH = ("replicates", "timeout_s")
"""Fields of a case's timing that its hash leaves out: how often it is repeated, and how long it may take."""
IN_HASH_IF_SET = ("phase_rounds",)
"""Fields that older cases lack; at 0 they change nothing that is measured."""
BUSY = 1.5
"""Load before a run, over the number of cores, above which other work took part in it."""

GATES = {
    "line": "the line is no valid record",
    "experiment": "no table exists for this experiment",
    "status": "the arm did not run to its end; shown as a failure",
    "case": "the resolved case lacks a field or holds an impossible value",
    "case hash": "the hash is not that of the case: one of the two was changed",
    "group": "the records of one group contradict each other",
    "incomplete": "an arm of the group has no record",
    "superseded": "another complete group measured the same, and is newer, passed every gate or found an arm incorrect",
    "rounds": "fewer samples than rounds",
    "whole cycles": "a sample is no whole number of flush cycles of all copies",
    "cold state": "the rotated copies do not exceed the last-level cache five times",
    "throttled": "the device lowered its clock during the run",
    "noise floor": "replay with a float32 state, or the reference run again, differs from it by more than rounding",
    "A/A": "one arm timed twice differs from itself",
    "acceptance": "arms of one window accepted other numbers of drafts, and no near tie explains it",
}
Fault = tuple[str, str]


def value(record: Record, *path: str) -> Any:
    """``record.case[path[0]][path[1]]...``; None where the case holds no such field."""
    found: Any = record.case
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def number(mapping: Any, name: str) -> float | None:
    """A finite number of a mapping, or None."""
    found = mapping.get(name) if isinstance(mapping, dict) else None
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        return None
    return found


def is_count(found: Any) -> bool:
    """Whether a value is an integer of at least 1 that a table can hold."""
    return isinstance(found, int) and not isinstance(found, bool) and 1 <= found < 2**63


def case_faults(record: Record) -> list[Fault]:
    """Fields without which a record cannot be placed in a table."""
    faults = []
    for path in (("batch_size",), ("interval_length",), ("timing", "rounds")):
        found = value(record, *path)
        if not is_count(found):
            faults.append(("case", f"{'.'.join(path)}={found!r} is no integer of at least 1"))
    for path in (("model",), ("phase",), ("geometry", "family"), ("precision", "state"), ("precision", "inputs")):
        if not isinstance(value(record, *path), str):
            faults.append(("case", f"{'.'.join(path)}={value(record, *path)!r} is no text"))
    if not faults and (expected := case_hash(record.case)) != record.case_hash:
        faults.append(("case hash", f"case_hash={record.case_hash}, that of the case is {expected}"))
    return faults


def case_hash(case: dict[str, Any]) -> str:
    """16 hex digits of the canonical JSON of a recorded case, computed apart from the experiment that wrote it."""
    left_out = (*NOT_IN_HASH, *(name for name in IN_HASH_IF_SET if not case["timing"].get(name)))
    timing = {k: v for k, v in case["timing"].items() if k not in left_out}
    canonical = json.dumps(case | {"timing": timing}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def record_faults(record: Record) -> list[Fault]:
    """Faults of one record of status ``ok`` whose case is readable."""
    faults = []
    rounds = value(record, "timing", "rounds")
    if len(record.samples_ns) < rounds:
        faults.append(("rounds", f"{len(record.samples_ns)} rounds of samples, {rounds} asked"))
    if record.experiment in ("decode", "speculative"):
        faults += _generation_faults(record)
    else:
        faults += _cycle_faults(record)
        faults += _cold_faults(record)
    if record.device_state.get("throttled"):
        faults.append(("throttled", "the device reported throttling"))
    return faults


def group_faults(group: Sequence[Record]) -> list[Fault]:
    """Faults that exclude a whole group: it is incomplete, or its records contradict each other."""
    present, stated = sorted(r.arm for r in group), {r.arms for r in group}
    if len(stated) > 1:
        return [("group", f"records state {len(stated)} different lists of arms")]
    if len(set(present)) < len(present):
        return [("group", "an arm has more than one record")]
    if missing := sorted(set(group[0].arms) - set(present)):
        return [("incomplete", f"no record of {', '.join(missing)}")]
    for name in ("experiment", "case_hash", "replicate", "case"):
        if any(getattr(r, name) != getattr(group[0], name) for r in group):
            return [("group", f"records differ in {name}")]
    if any(r.device.get("name") != group[0].device.get("name") for r in group):
        return [("group", "records differ in device")]
    return []


def timing_faults(group: Sequence[Record]) -> list[Fault]:
    """Faults of the timed records (status ``ok``) of one complete group, as a whole: its A/A comparison."""
    twice = [r for r in group if r.again_samples_ns]
    if not twice:
        return [("A/A", "no arm of the group was timed twice")]
    if len({len(r.samples_ns) for r in group}) > 1:
        return [("rounds", "arms of the group have different numbers of rounds")]
    if any(r.again_samples_ns == r.samples_ns for r in twice):  # two timings never agree to the nanosecond
        return [("A/A", "the second timing of an arm holds the samples of the first")]
    return [("A/A", fault) for r in twice if (fault := aa_fault(r))] + _acceptance_faults(group)


def _acceptance_faults(group: Sequence[Record]) -> list[Fault]:
    """Arms that verify windows must have accepted alike, step by step and row by row, as the digest of it tells; rows
    that differ at near ties are counted by the experiment, and then the mean may not differ by more than they can."""
    drafted = [r for r in group if "accepted_digest" in r.decode]
    if len({str(r.decode["accepted_digest"]) for r in drafted}) < 2:
        return []
    rows = sum(number(r.decode, "rows_unmatched") or 0 for r in drafted)
    means = [number(r.decode, "tokens_per_step") or 0.0 for r in drafted]
    batch, window = value(drafted[0], "batch_size"), number(drafted[0].case, "window") or 1
    if rows and max(means) - min(means) <= (window - 1) * rows / batch:
        return []
    return [("acceptance", f"{min(means):.4g} to {max(means):.4g} tokens a step, {rows:g} rows differ at near ties")]


def remarks(record: Record) -> list[str]:
    """What a reader should know about a record that is shown."""
    found = []
    if record.code.get("dirty") is not False:
        found.append("uncommitted code" if record.code.get("dirty") else "code version not recorded")
    if record.timing_used.get("warmup_settled") is not True:
        found.append("warm-up not settled")
    load, cores = _load_before(record), number(_host(record.device), "cores")
    if load is not None and cores and load > BUSY * cores:
        found.append("machine busy")
    if record.timing_used.get("phases_fault"):
        found.append("not timed by ring length: it failed")
    return found + _waited(record) + _silent(record) + _capped(record)


def _waited(record: Record) -> list[str]:
    """A host that launches too slowly is part of what was measured."""
    waits = record.decode.get("host_waits")  # older records lack it
    counts = [n for pair in waits if isinstance(pair, list) for n in pair] if isinstance(waits, list) else []
    total = sum(n for n in counts if isinstance(n, int))
    return [f"the GPU waited for {total:,} launches"] if total else []


def _silent(record: Record) -> list[str]:
    """That nobody knows whether the device throttled, in some of its states or in all of them."""
    if not isinstance(record.device_state.get("throttled"), bool):
        return ["throttling not read"]
    counts = record.device_state.get("throttling_told")  # older records lack it
    if isinstance(counts, list) and len(counts) == 2 and counts[0] != counts[1]:
        return [f"throttling read in {counts[0]} of {counts[1]} states"]
    return []


def _capped(record: Record) -> list[str]:
    """A GPU at its power limit lowers its clock: not a fault of the run, yet part of what it measured."""
    rounds = record.device_state.get("rounds")
    reasons = rounds.get("clock_reasons") if isinstance(rounds, dict) else None
    reasons = reasons if isinstance(reasons, list) else []
    capped = [told for told in reasons if isinstance(told, list) and "sw_power_cap" in told]
    return [f"power cap in {len(capped)} of {len(reasons)} rounds"] if capped else []


def _host(mapping: dict[str, Any]) -> Any:
    """What is recorded of the machine that drives a GPU; a CPU is its own."""
    return mapping.get("host", mapping)


def _load_before(record: Record) -> float | None:
    """Load average over the minute before the run; None where it was not recorded."""
    before = record.device_state.get("before")
    before = _host(before) if isinstance(before, dict) else None
    averages = before.get("load_average") if isinstance(before, dict) else None
    return number({"first": averages[0]}, "first") if isinstance(averages, list) and averages else None


def _cycle_faults(record: Record) -> list[Fault]:
    asked, used = value(record, "interval_length"), number(record.timing_used, "interval_length")
    copies = number(record.timing_used, "copies")
    if used != asked:
        return [("whole cycles", f"interval length {used} timed, {asked} asked")]
    if not copies or copies < 1:
        return [("whole cycles", f"timing_used.copies={record.timing_used.get('copies')!r} is no count")]
    cycles, wanted = (number(m, "cycles_per_sample") for m in (record.timing_used, value(record, "timing")))
    if not cycles or cycles != wanted:
        return [("whole cycles", f"{cycles} cycles a sample timed, {wanted} asked")]
    steps = steps_of_cycle(record) * copies * cycles
    if record.layer_steps_per_sample != steps:
        return [("whole cycles", f"{record.layer_steps_per_sample} layer steps a sample counted, {steps} timed")]
    return []


def steps_of_cycle(record: Record) -> int:
    """From flush to flush. With a window: until more tokens are committed than leave room for another window."""
    length, window, accepted = (value(record, name) for name in ("interval_length", "window", "accepted"))
    if not is_count(window) or not is_count(accepted):
        return int(length)
    return int(max(length - window, 0) // accepted + 1)


def _generation_faults(record: Record) -> list[Fault]:
    """A whole model's layers are cold by themselves; its samples must be differences by whole flush cycles."""
    length, steps = value(record, "interval_length"), value(record, "steps")
    used = number(record.timing_used, "interval_length")
    if used != length or not is_count(steps) or steps % length or record.layer_steps_per_sample != steps:
        told = f"{record.layer_steps_per_sample} model steps a sample at interval length {used}"
        return [("whole cycles", f"{told}; {steps} at {length} asked")]
    pairs = record.decode.get("generations_ns")
    pairs = pairs if isinstance(pairs, list) else []
    if [long - short for short, long in pairs] != [ns for of_round in record.samples_ns for ns in of_round]:
        return [("whole cycles", "samples are not the differences of the recorded generations")]
    return []


def _cold_faults(record: Record) -> list[Fault]:
    rotated = number(record.timing_used, "rotated_bytes")
    caches = [number(m, "last_level_cache_bytes") for m in (record.timing_used, record.device)]
    cache = max((c for c in caches if c), default=None)
    if rotated is None or not cache:
        return [("cold state", "rotated bytes or size of the last-level cache not recorded")]
    factor = max(MIN_COLD_FACTOR, number(value(record, "timing"), "cold_factor") or 0)
    if rotated < factor * cache:
        return [("cold state", f"{rotated / cache:.2f} x the last-level cache rotated, {factor:g} x needed")]
    return []
