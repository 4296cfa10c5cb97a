"""Which drift records may enter a table. A line of another schema is left to others; nothing is dropped silently."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.exclusion import Exclusion, one_line
from experiments.measure.drift_record import LAYER, DriftRecord, is_drift
from experiments.measure.record import read_lines

CONTROL, AGAIN = "shared_fp32", "shared_fp32@1/again"
NOISE = {"fp32": 1e-8, "bf16": 1e-2}
"""Most mean KL in nats of the control, a replay with a float32 state, and of the reference run again."""
LAYER_NOISE = 1e-9
"""Of one layer, most mean squared relative error of their outputs."""


def load(folders: Sequence[Path], exclusions: list[Exclusion], files: dict[str, set[str]]) -> list[DriftRecord]:
    """The records of all complete groups that passed, of each case, device and set of arms the newest; what is left out
    goes to ``exclusions``, the files of each group to ``files``, whose values begin empty."""
    groups: dict[str, dict[str, tuple[DriftRecord, str]]] = defaultdict(dict)
    for folder in folders:
        for path, index, line in read_lines(folder):
            if line is not None and is_drift(line):
                name = path.relative_to(folder).as_posix()
                where = f"{name}:{index}"
                try:
                    record = DriftRecord.from_json(line)
                    groups[record.group].setdefault(record.to_json(), (record, where))
                    files[record.group].add(name)
                except ValueError as error:
                    exclusions.append(Exclusion("line", one_line(error), "", "", where))
    found: list[DriftRecord] = []
    seen: dict[tuple[Any, ...], str] = {}
    by_age = sorted(groups.values(), key=lambda g: max(r.started_utc for r, _ in g.values()), reverse=True)
    for group in by_age:
        pairs = list(group.values())
        first, fault = pairs[0][0], _fault([r for r, _ in pairs])
        key = (first.case_hash, str(first.device.get("name")), first.arms)
        if fault is None and key in seen:
            fault = ("superseded", f"group {seen[key]} measured the same")
        if fault is None:
            seen[key] = first.group
            found += [r for r, _ in pairs]
        for record, where in pairs if fault else ():
            bad = record.status != "ok"
            gate, detail = ("status", f"{record.status}: {one_line(record.message)}") if bad else fault
            exclusions.append(Exclusion(gate, detail, record.group, record.arm, where))
    return found


def _fault(group: list[DriftRecord]) -> tuple[str, str] | None:
    """Why a group enters no table; the experiment checked this when it ran, here it is checked from the numbers."""
    first = group[0]
    wanted = {(arm, number) for arm in first.arms for number in range(first.documents)}
    if {(r.arm, r.document["number"]) for r in group} != wanted or len(group) != len(wanted):
        return "incomplete", "an arm lacks a document, or has one twice"
    if any(
        (r.case, r.arms, r.documents, r.edges) != (first.case, first.arms, first.documents, first.edges) for r in group
    ):
        return "group", "records differ in case, arms or buckets"
    if any(r.status != "ok" for r in group):
        return "incomplete", "an arm failed or was incorrect over a document"
    identity = json.dumps(
        {k: v for k, v in first.case.items() if k != "weights"}, sort_keys=True, separators=(",", ":")
    )
    if (expected := hashlib.sha256(identity.encode()).hexdigest()[:16]) != first.case_hash:
        return "case hash", f"case_hash={first.case_hash}, that of the case is {expected}"
    if first.edges[-1] != first.case.get("tokens"):
        return "case", f"buckets end at {first.edges[-1]}, not at {first.case.get('tokens')} tokens"
    for record in group:
        layer = record.experiment == LAYER
        mean = sum(record.output_error if layer else record.kl) / record.edges[-1]
        limit = LAYER_NOISE if layer else NOISE.get(str(record.case.get("inputs")), 0.0)
        limit = {record.reference: 0.0, CONTROL: limit, AGAIN: limit}.get(record.arm, float("inf"))
        if mean > limit:
            what = "mean squared output error" if layer else "mean KL"
            return "noise floor", f"{record.arm} has a {what} of {mean:.2g}; at most {limit:g}"
    return None
