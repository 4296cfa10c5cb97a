"""Every table, as a data frame, CSV, Markdown and LaTeX: speedups, roofs, failures, exclusions, devices."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import accuracy, decode, depths, drift, pairs, phases, roofs, speculative, speedups, table_text
from analysis.cells import CASE, LOUD_AA, Cell, case_columns, cells, device_labels, digits
from analysis.gates import GATES, is_count, number, value
from analysis.load import EXPERIMENTS, Evidence, one_line
from analysis.table_text import GROUPS, latex
from experiments.measure.record import Record

NAMES = ("kernel_speedups", "kernel_pairs", "roofs", "kernel_phases", "window_speedups", "window_pairs")
NAMES += ("speculative_throughput", "decode_speedups")
NAMES += ("decode_depths", *drift.COLUMNS, "accuracy", "accuracy_by_distance", "failures", "exclusions", "devices")
WHOLE = ("context", "blocks", "rows_that_differ", "agreement_length", "ring_length", "batch_size", "interval_length")
WHOLE += ("window", "accepted", "documents", "tokens", "layer", "head", "threads", "arms", "processes", "rounds")
WHOLE += (
    "requests_in_100_gb",
    "rows_unmatched",
    "bytes",
    "runs",
    "items",
    "passages",
    "lost",
    "gained",
    "from_interval",
    "to_interval",
)
FAILURE = [*CASE, "context", "blocks", "window", "arm", "kind", "status", "message", "replicate"]
EXCLUSION = ["gate", "meaning", "detail", "arm", "group", "where"]
DEVICE = ["device", "name", "kind", "cores", "memory_gib", "last_level_cache_mib", "code", "uncommitted", "packages"]
DEVICE += ["multiprocessors", "compute_capability", "driver", "records", "failures", "runs", "seconds"]
NOTES = {
    "kernel_speedups": "The speedup is the median over rounds of the ratio within a round, its mean over processes; "
    "step and baseline are medians over rounds of each arm alone, so that their ratio may differ from it, even in "
    "direction. The interval covers the rounds and, from two processes on, the processes of this one run of one "
    "machine; it covers no other day, build or machine. Rows whose A/A noise exceeds "
    f"{100 * LOUD_AA:.0f} % are AMBIGUOUS, whatever their interval.",
    "kernel_pairs": "Every replay arm over each other arm of the same rounds: stored arms as shipped, and the replay "
    "of others. Baseline of the speedups is the fastest stored arm alone. An arm that gets its gates ready "
    "and one that computes them are not like for like; of ours, replay/triton-gates computes them.",
    "kernel_phases": "All rows at one ring length, no commit, on states that are those of no model; whole cycles, "
    "which the speedups rest on, are timed apart.",
    "window_speedups": "Steps of speculative decoding: a window of tokens verified, some of them committed, the commit "
    "included. Baseline is the fastest arm that keeps a state behind every token of the window. Roof share is the time "
    "that the bytes of state and ring take at the bandwidths of the same run over the measured time.",
    "window_pairs": "Arms of windows over each other arm of the same rounds. oracle/triton is snapshots/triton told "
    "beforehand how many tokens will be accepted, so that it writes one state, which no engine can: from snapshots to "
    "it is what the other writes cost, from it to verify the rest, a state written once an interval and tensor cores. "
    "Ideal bytes, ideal roof: what bytes alone, and bytes at the bandwidths of the same run, would give.",
    "speculative_throughput": "Tokens a second of whole models: all rows' tokens that counted over the time of a step. "
    "over snapshots: over the arm that keeps a state behind every token of the window, at the same drafts and the same "
    "acceptance; over plain: over replay without drafts. Medians over rounds of ratios within a round, means over "
    "processes. A controlled drafter costs nothing and is accepted by chance, given that the drafts before were; all "
    "arms are then forced on one stream of tokens. request: state, ring and convolution of a request; requests in 100 "
    "GB: of these alone, without keys and values. Rows unmatched: those that accepted otherwise than with the other "
    "arm, at near ties. Arms that do not fit beside each other are run in pairs, each over the arm that is in its own "
    "rounds; a remark says where a ratio was put together from two.",
    "devices": "Runs are cases in a process; their seconds hold compilation, checks, warm-up and rounds, not the start "
    "of the process.",
    "decode_speedups": "A step is the difference of two generations of whole models, over the tokens by which they "
    "differ. State share: the state-space layers' steps alone, timed in the same rounds, over the step; the rest is "
    "what remains. Products are the model's matrix products alone, without those of routed experts; the floor of the "
    "rest adds what is moved between them at the read bandwidth of the run. Agreement: tokens of the first steps that "
    "a row's likeliest have in common with those of the group's first arm, in the worst row; with random weights "
    "all arms are forced on one stream of tokens.",
    "decode_depths": "Steps of the first blocks of a model, at depths in which every kind of block has its share, and "
    "the line through them: milliseconds of a block, and of what is not blocks. Of the whole model it is an "
    "extrapolation, not a measurement; where the whole was measured too, the error says how far off it is.",
    "drift_kl": "KL(fp32 reference || arm) in nats, whole vocabulary, mean over the second half of the positions; "
    "everywhere: over all of them. Intervals are over documents. Slope of log KL over log position in the last decade "
    "of positions; agreement of the likeliest token, and perplexity over the reference's, in the second half. State "
    "and read error: of the copies, relative by norm to the reference's states, mean over layers, heads and documents "
    "at the last position recorded. Last over flat: bits a byte of the last octave of positions over those of the "
    "octaves from 2,048 tokens on before it. Step bytes are moved a step and element of the state, ring included. "
    "shared_fp32@1 is the reference, shared_fp32 the noise floor; @L is an interval length of its own.",
    "drift_ratios": "Mean KL over the second half of the positions, over that of another arm over the same documents.",
    "drift_positions": "Mean KL in half octaves of positions, each at its geometric middle.",
    "drift_states": "Relative errors of the states, mean and worst over layers and heads, means over documents.",
    "layer_drift": "One layer over random inputs from zero states: root mean square of the outputs' relative errors "
    "over the second half of the positions, and relative errors of the copies at the last position recorded.",
    "layer_ratios": "Errors of an arm of one layer over those of another over the same inputs: outputs, update copies.",
    "drift_heads": "Relative errors of the states at the last position recorded, by layer and head, of two arms.",
    "accuracy": "Every arm against shared_fp32 on the same items; accuracies in percent, differences in points, 95 % "
    "intervals by bootstrap over passages. An item counts once, however often it was answered: it is lost if right in "
    "fewer of its repeats than with shared_fp32, gained if in more; p is that of the exact sign test on these, which "
    "is McNemar's with one answer an item. damaged forgets its states at the end of the prompt: where it does not "
    "lose, the task proves nothing about states, and no arm gets a verdict. A verdict counts three more lost items "
    "than were seen.",
    "accuracy_by_distance": "Items by the intervals of L tokens between a fact and the question about it; percent, "
    "95 % intervals by bootstrap over passages.",
    "roofs": "The share is the time that the bytes take at the bandwidths of the same run over the measured time; "
    "above 1 the machine moved more than its bandwidth test.",
}
"""What a reader of a table must know, by table."""


def build(evidence: Evidence) -> dict[str, pd.DataFrame]:
    """Every table by name. Empty tables keep their columns; ``groups`` are those of the records behind a row."""
    labels = device_labels(evidence)
    found, windows, models, drafted = (
        cells(r for r in evidence.records if r.experiment == experiment) for experiment in EXPERIMENTS
    )
    drafted = speculative.joined(drafted)
    failures = [
        case_columns(r, labels) | _depth(r) | {"status": r.status, "message": one_line(r.message)}
        for r in evidence.failures
    ]
    rows = {
        "kernel_speedups": ([r for c in found for r in speedups.speedup_rows(c, evidence, labels)], speedups.COLUMNS),
        "kernel_pairs": ([r for c in found for r in pairs.pair_rows(c, labels)], pairs.COLUMNS),
        "kernel_phases": ([r for c in found for r in phases.phase_rows(c, labels)], phases.COLUMNS),
        "window_speedups": (
            [r for c in windows for r in speedups.speedup_rows(c, evidence, labels)],
            speedups.WINDOW_COLUMNS,
        ),
        "window_pairs": (
            [r for c in windows for r in pairs.pair_rows(c, labels, pairs.WINDOW_KINDS)],
            pairs.WINDOW_COLUMNS,
        ),
        "speculative_throughput": ([r for c in drafted for r in speculative.rows(c, labels)], speculative.COLUMNS),
        "decode_speedups": ([r for c in models for r in decode.decode_rows(c, evidence, labels)], decode.COLUMNS),
        "decode_depths": (depths.depth_rows(models, labels), depths.COLUMNS),
        "roofs": ([r for c in found for r in roofs.roof_rows(c, labels)], roofs.COLUMNS),
        "accuracy": (accuracy.rows(evidence.accuracy, labels), accuracy.COLUMNS),
        "accuracy_by_distance": (accuracy.distance_rows(evidence.accuracy, labels), accuracy.BY_DISTANCE),
        "failures": (failures, FAILURE),
        "exclusions": ([vars(e) | {"meaning": GATES[e.gate]} for e in evidence.exclusions], EXCLUSION),
        "devices": (_device_rows(evidence, labels), DEVICE),
    }
    by_drift = drift.rows(evidence.drift, labels)
    rows |= {name: (by_drift[name], columns) for name, columns in drift.COLUMNS.items()}
    processes = _processes([*found, *windows, *models, *drafted])
    for name, (shown, columns) in rows.items():
        if name not in ("exclusions", "devices"):
            columns = [*columns, GROUPS]
            shown = [{GROUPS: processes.get(str(row.get("group")), row.get("group"))} | row for row in shown]
        rows[name] = (shown, columns)
    return {name: _frame(*pair) for name, pair in rows.items()}


def _depth(record: Record) -> dict[str, Any]:
    """Of a whole model, its context and how many of its blocks were run, if not all."""
    found = {name: value(record, name) for name in ("context", "blocks")}
    return {name: count if is_count(count) and count else None for name, count in found.items()}


def _processes(cells: list[Cell]) -> dict[str, str]:
    """Group -> all groups of its cell, whose rows rest on each of them."""
    return {group: " ".join(sorted(cell)) for cell in cells for group in cell}


def write(tables: dict[str, pd.DataFrame], folder: Path) -> None:
    """Each table as ``<name>.csv`` in ``folder``, which is created; as ``<name>.md`` and ``<name>.tex`` too, if it has
    no more than `table_text.READABLE` rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in tables.items():
        frame.to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")
        if len(frame) > table_text.READABLE:
            continue
        (folder / f"{name}.md").write_text(markdown(name, frame), encoding="utf-8")
        (folder / f"{name}.tex").write_text(latex(name, frame, NOTES.get(name, "")), encoding="utf-8")


def markdown(name: str, frame: pd.DataFrame) -> str:
    """A table under a heading, with its ``NOTES``."""
    return table_text.markdown(name, frame, NOTES.get(name, ""))


def _device_rows(evidence: Evidence, labels: dict[str, str]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    seen: set[str] = set()
    for r in [*evidence.records, *evidence.failures, *evidence.drift]:
        packages = ", ".join(f"{k} {v}" for k, v in sorted(r.packages.items()))
        name, sha = str(r.device.get("name")), str(r.code.get("git_sha") or "")[:12]
        dirty = {"True": "yes", "False": "no"}.get(str(r.code.get("dirty")), "not recorded")
        row = rows.setdefault(
            (labels[name], name, sha, dirty, packages),
            {
                "device": labels[name],
                "name": name,
                "kind": str(r.device.get("kind")),
                "cores": number(r.device, "cores"),
                "multiprocessors": number(r.device, "multiprocessors"),
                "compute_capability": r.device.get("compute_capability"),
                "driver": r.device.get("driver"),
            }
            | {"code": sha, "uncommitted": dirty, "packages": packages, "records": 0, "failures": 0}
            | {"runs": 0, "seconds": 0.0}
            | {"memory_gib": _scaled(r.device, "memory_bytes", 2**30)}
            | {"last_level_cache_mib": _scaled(r.device, "last_level_cache_bytes", 2**20)},
        )
        row["records" if r.status == "ok" else "failures"] += 1
        if r.group not in seen:
            seen.add(r.group)
            row["runs"] += 1
            row["seconds"] = round(row["seconds"] + _seconds(r), 1)
    return [rows[key] for key in sorted(rows)]


def _seconds(record: Record) -> float:
    """How long the group of a record took, from preparing its arms to writing this record; 0 where it does not tell."""
    try:
        started, ended = (datetime.fromisoformat(text) for text in (record.started_utc, record.ended_utc))
        return (ended - started).total_seconds()
    except (ValueError, TypeError):  # TypeError: only one of them has a time zone
        return 0.0


def _scaled(mapping: dict[str, Any], name: str, unit: int) -> float | None:
    found = number(mapping, name)
    return None if found is None else digits(found / unit)


def _frame(rows: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    frame = pd.DataFrame([{c: row.get(c) for c in columns} for row in rows], columns=columns)
    for name in set(WHOLE) & set(columns):  # a missing count must not turn the others into fractions
        frame[name] = pd.array(list(frame[name].astype(object)), dtype="Int64")
    return frame
