"""What a tracker shows of a record: one run a record, with name, group, tags, config, metrics, tables and a series.

Standard library only. Everything follows from the record alone, so a record that is mirrored as it is written and one
that is uploaded later give the same run under the same id. Every number that the record measured is a metric, or, from
a list, a row of a table; what was run is config.

Names of metrics end in their unit. ``speed/speedup`` is over the fastest ``stored/*`` (of windows: ``snapshots/*``) arm
of the same group by median; it has no interval, and `analysis` alone decides what is shown as a result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from experiments.measure.accuracy_record import AccuracyRecord, is_accuracy
from experiments.measure.drift_record import DriftRecord, is_drift
from experiments.measure.record import Record

MEASURED = ("timing_used", "traffic", "bandwidth", "decode", "device_state")
"""Mappings of a timing record whose numbers are metrics."""
NOT_CONFIG = (*MEASURED, "samples_ns", "again_samples_ns", "phase_samples_ns", "correctness", "layers_memory_bytes")
NOT_CONFIG += ("group_peak_memory_bytes",)
BASELINES = ("stored", "snapshots")
LONGEST_TAG = 64  # wandb refuses longer ones
OPTIONS_OF_NO_SWEEP = ("tracker", "records", "repeat")
"""Options that may change between a sweep and its resumption."""
Table = tuple[list[str], list[list[Any]]]
"""Columns and rows."""


@dataclass
class TrackedRun:
    """``series`` are rows of a history, each with its own step, drawn against ``step_metric``."""

    id: str
    name: str
    group: str
    job_type: str
    tags: list[str]
    failed: bool
    config: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    series: list[dict[str, float]] = field(default_factory=list)
    step_metric: str = "round"


def runs(lines: Iterable[str]) -> Iterator[TrackedRun | str]:
    """The runs of record lines, or, of a line that is no record, what is wrong with it. Lines of a group may come in
    any order, but all of them, since speedups compare arms."""
    groups: dict[str, list[Record]] = {}
    for line in lines:
        try:
            if is_drift(line):
                yield of_document(DriftRecord.from_json(line))
            elif is_accuracy(line):
                yield of_task(AccuracyRecord.from_json(line))
            else:
                record = Record.from_json(line)
                groups.setdefault(record.group, []).append(record)
        except ValueError as error:
            yield str(error)
    for group in groups.values():
        baseline = min((r for r in group if r.status == "ok" and kind(r.arm) in BASELINES), key=step_ns, default=None)
        yield from (of_timing(record, baseline) for record in group)


def of_timing(record: Record, baseline: Record | None) -> TrackedRun:
    """The run of a record of layers or whole models."""
    case, data = record.case, dataclasses.asdict(record)
    config = {name: value for name, value in data.items() if name not in NOT_CONFIG}
    config |= {"kind": kind(record.arm), "baseline": baseline.arm if baseline else None}
    precision = case.get("precision", {}).get("state")
    name = f"{case.get('model')} b{case.get('batch_size')} L{case.get('interval_length')} {precision} {record.arm}"
    run = TrackedRun(**_identity(record, config), name=f"{name} #{record.replicate}")
    for part in MEASURED:
        _flatten(run, part, data[part])
    for check in record.correctness:
        _flatten(run, f"correctness/{check.moment}", _check(check))
    for part in ("layers_memory_bytes", "group_peak_memory_bytes"):
        _flatten(run, f"memory/{part}", data[part])
    if record.status == "ok":
        _add_times(run, record, baseline)
    return run


def of_document(record: DriftRecord) -> TrackedRun:
    """The run of an arm over a document; its series goes by position."""
    measured = ("edges", "kl", "nll", "agree", "bytes", "state_error", "traffic", "checks", "elapsed_s")
    config = {name: value for name, value in dataclasses.asdict(record).items() if name not in measured}
    config["kind"] = kind(record.arm)
    name = f"{record.case.get('model')} {record.arm} document {record.document['number']}"
    run = TrackedRun(**_identity(record, config, record.document["number"]), name=name, step_metric="position")
    for part, number in record.traffic.items():
        run.metrics[f"traffic/{part}_bytes_per_element"] = number
    for check in record.checks:
        _flatten(run, f"checks/{check.name}", {"value": check.value, "limit": check.limit})
    run.metrics["time/elapsed_s"] = record.elapsed_s
    if record.status == "ok":
        _add_buckets(run, record)
    return run


def of_task(record: AccuracyRecord) -> TrackedRun:
    """The run of an arm on a task; each answered item is a row of the table ``answers``."""
    config = {n: v for n, v in dataclasses.asdict(record).items() if n not in ("answers", "metrics", "work")}
    config["kind"] = kind(record.arm)
    name = f"{record.case.get('model')} {record.arm} {record.case.get('task', {}).get('name')}"
    group = f"{record.case_hash}:{record.arm_hash}:{record.started_utc}"  # such a record has no group
    run = TrackedRun(**_identity(record, config, group=group), name=name)
    rows = []
    for answers in record.answers:
        marks = "".join(answers.correct)
        run.metrics[f"accuracy/{answers.task}/share"] = marks.count("1") / len(marks)
        run.metrics[f"accuracy/{answers.task}/items"] = len(marks)
        for repeat, correct in enumerate(answers.correct):
            distances = answers.distance or (None,) * len(correct)
            items = zip(answers.group, distances, correct, strict=True)
            rows += [[answers.task, repeat, n, d, g, int(c)] for n, (g, d, c) in enumerate(items)]
    run.tables["answers"] = (["task", "repeat", "item", "distance_tokens", "group", "correct"], rows)
    _flatten(run, "harness", record.metrics)
    _flatten(run, "work", record.work)
    return run


def kind(arm: str) -> str:
    """``stored`` of ``stored/cpu``, ``dual_fp32_nvfp4`` of ``dual_fp32_nvfp4@4``."""
    return re.split("[/@]", arm)[0]


def step_ns(record: Record) -> float:
    """Median time of a step, of a layer or of a model."""
    return statistics.median(s for r in record.samples_ns for s in r) / record.layer_steps_per_sample


def run_id(*parts: object) -> str:
    """16 hex digits that follow from what the record is, so that no second upload makes a second run."""
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()[:16]


def sweep_of(experiment: str, argv: Iterable[str], device: str) -> str:
    """The same for all records of a command, and of the command that resumes it."""
    told = [word for word in list(argv)[1:] if word.lstrip("+~").split("=")[0].split(".")[0] not in OPTIONS_OF_NO_SWEEP]
    digest = hashlib.sha256("\0".join(told).encode()).hexdigest()[:8]
    return f"{experiment} {digest} {device}"[:120]


def _identity(
    record: Record | DriftRecord | AccuracyRecord, config: dict[str, Any], *more: object, group: str | None = None
) -> dict[str, Any]:
    device = str(record.device.get("name"))
    tags = (record.experiment, str(record.case.get("model")), device, kind(record.arm))
    return {
        "id": run_id(group or getattr(record, "group", ""), record.arm, *more),
        "group": sweep_of(record.experiment, record.argv, device),
        "job_type": record.experiment,
        "tags": list(dict.fromkeys(tag[:LONGEST_TAG] for tag in tags)),
        "failed": record.status not in ("ok", "unsupported"),
        "config": config,
    }


def _check(check: Any) -> dict[str, Any]:
    found = {c.quantity: {"error": c.error, "budget": c.budget} for c in check.comparisons}
    counts = ("flushes_counted", "flushes_expected", "copies_touched", "copies_expected", "cursor_equal")
    return found | {name: getattr(check, name) for name in counts} | {"rows": check.rows, "copies": check.copies}


def _flatten(run: TrackedRun, path: str, value: Any) -> None:
    """Numbers and flags under ``path`` to metrics, those in lists to the table ``lists``; texts are left out."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _flatten(run, f"{path}/{re.sub('[^0-9a-zA-Z_]+', '_', str(name)).strip('_')}", inner)
    elif isinstance(value, list | tuple):
        rows = run.tables.setdefault("lists", (["field", "index", "value"], []))[1]
        rows += [[path, index, number] for index, number in _numbers(value)]
    elif isinstance(value, int | float):
        run.metrics[path] = int(value) if isinstance(value, bool) else value


def _numbers(value: Any, index: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _numbers(inner, f"{index}.{place}" if index else str(place))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield index, value


def _tokens(record: Record) -> float:
    """Of a row in a step: with drafts, those that counted."""
    return float(record.decode.get("tokens_per_step", 1.0))


def _add_times(run: TrackedRun, record: Record, baseline: Record | None) -> None:
    whole = record.experiment in ("decode", "speculative")
    unit, scale = ("time/model_step_{}ms", 1e6) if whole else ("time/layer_step_{}us", 1e3)
    steps, kinds = record.layer_steps_per_sample, {"timed": record.samples_ns, "again": record.again_samples_ns}
    rows = [
        [series, place, number, sample]
        for series, rounds in (kinds | {"ring_length": record.phase_samples_ns}).items()
        for place, samples in enumerate(rounds)
        for number, sample in enumerate(samples)
    ]
    run.tables["samples"] = (["series", "round_or_ring_length", "sample", "elapsed_ns"], rows)
    for series, prefix in (("timed", ""), ("again", "again_")):
        times = sorted(sample / steps / scale for samples in kinds[series] for sample in samples)
        if times:
            run.metrics[unit.format(prefix)] = statistics.median(times)
            run.metrics[unit.format(f"{prefix}min_")], run.metrics[unit.format(f"{prefix}max_")] = times[0], times[-1]
    run.series = [
        {"round": place, unit.format("round_"): statistics.median(samples) / steps / scale}
        for place, samples in enumerate(record.samples_ns)
    ]
    step = step_ns(record)
    if baseline:
        run.metrics["speed/speedup"] = step_ns(baseline) / step * _tokens(record) / _tokens(baseline)
    if whole:
        run.metrics["speed/tokens_per_s"] = record.case["batch_size"] * _tokens(record) / step * 1e9
    moved = [record.traffic.get(f"{part}_bytes_{way}") for part in ("state", "ring") for way in ("read", "written")]
    if all(isinstance(part, int | float) for part in moved):
        run.metrics["speed/achieved_bytes_per_s"] = sum(moved) / step * 1e9
    if isinstance(record.traffic.get("floor_ns"), int | float):
        run.metrics["speed/share_of_roof"] = record.traffic["floor_ns"] / step


def _add_buckets(run: TrackedRun, record: DriftRecord) -> None:
    tokens, text_bytes, bits = record.edges[-1], sum(record.bytes), 0.6931471805599453
    run.metrics["drift/mean_kl_nats"] = sum(record.kl) / tokens
    run.metrics["drift/mean_nll_nats"] = sum(record.nll) / tokens
    run.metrics["drift/agreement_share"] = sum(record.agree) / tokens
    if text_bytes:
        run.metrics["drift/bits_per_byte"] = sum(record.nll) / bits / text_bytes
    spans = list(zip(record.edges, record.edges[1:], record.kl, record.nll, record.agree, record.bytes, strict=False))
    columns = ["first_position", "end_position", "kl_sum_nats", "nll_sum_nats", "agree_positions", "text_bytes"]
    run.tables["buckets"] = (columns, [list(span) for span in spans])
    run.series = [
        {
            "position": end,
            "by_position/kl_nats": kl / (end - first),
            "by_position/nll_nats": nll / (end - first),
            "by_position/agreement_share": agree / (end - first),
        }
        for first, end, kl, nll, agree, _ in spans
    ]
    rows = [
        [copy, position, layer, head, error]
        for copy in ("update", "read")
        for position, layers in zip(record.state_error["positions"], record.state_error[copy], strict=True)
        for layer, heads in enumerate(layers)
        for head, error in enumerate(heads)
    ]
    run.tables["state_error"] = (["copy", "position", "layer", "head", "relative_error"], rows)
