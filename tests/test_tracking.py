"""experiments.tracking and experiments.upload: what is mirrored, offline and read back, and what failures cost."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from drift_records import drift_group
from records import group, speculative_group

from experiments.measure.journal import Journal
from experiments.options import ConfigError
from experiments.tracking import options
from experiments.tracking.dashboard import SECTIONS, workspace
from experiments.tracking.mirror import Mirror
from experiments.tracking.options import Tracker, tracker_from_config
from experiments.tracking.runs import MEASURED, TrackedRun, runs, sweep_of

WANDB = {"name": "wandb", "mode": "offline", "project": "p", "entity": None, "folder": "f"}
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None,
    reason="no wandb is installed; make test EXTRAS='dev eval wandb' runs this",
)


def tracked(records: list[Any]) -> list[TrackedRun]:
    found = list(runs(record.to_json() for record in records))
    assert all(isinstance(run, TrackedRun) for run in found)
    return found  # type: ignore[return-value]


def numbers(value: Any) -> list[float]:
    """Every number in a value, flags too."""
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers(inner)]
    if isinstance(value, list | tuple):
        return [n for inner in value for n in numbers(inner) if not isinstance(inner, bool)]
    return [value] if isinstance(value, int | float) else []


def test_every_number_of_a_timing_record_is_a_metric_or_a_row() -> None:
    for record, run in zip(records := group(), tracked(records), strict=True):
        data = dataclasses.asdict(record)
        shown = sorted([*run.metrics.values(), *(row[-1] for _, rows in run.tables.values() for row in rows)])
        for field in (*MEASURED, "samples_ns", "again_samples_ns", "layers_memory_bytes", "group_peak_memory_bytes"):
            assert all(number in shown for number in numbers(data[field])), field
        errors = [c.error for check in record.correctness for c in check.comparisons]
        assert sum(name.endswith("/error") for name in run.metrics) == len(errors) > 0
        assert run.config["case"] == record.case
        assert run.tags[0] == record.experiment


def test_a_speedup_is_over_the_fastest_stored_arm_of_the_group() -> None:
    by_arm = {run.config["arm"]: run for run in tracked(group())}
    step = {arm: run.metrics["time/layer_step_us"] for arm, run in by_arm.items()}
    assert by_arm["replay/cpu"].config["baseline"] == "stored/cpu"
    assert by_arm["replay/cpu"].metrics["speed/speedup"] == pytest.approx(step["stored/cpu"] / step["replay/cpu"])
    assert by_arm["stored/cpu"].metrics["speed/speedup"] == 1


def test_arms_with_drafts_are_compared_by_their_tokens() -> None:
    speeds = {run.config["arm"]: run.metrics for run in tracked(speculative_group())}
    rate = {arm: found["speed/tokens_per_s"] for arm, found in speeds.items()}
    for arm, found in speeds.items():
        assert found["speed/speedup"] == pytest.approx(rate[arm] / rate["snapshots/triton"])
    assert speeds["replay/triton"]["speed/speedup"] < 2  # a step without drafts is four times as fast, for one token


def test_a_document_is_a_series_by_position() -> None:
    record = drift_group(documents=1, tokens=256)[-1]
    (run,) = tracked([record])
    assert [row["position"] for row in run.series] == list(record.edges[1:])
    assert run.metrics["drift/mean_kl_nats"] == sum(record.kl) / 256
    assert len(run.tables["state_error"][1]) == len(numbers(record.state_error)) - 2  # two are positions


def test_ids_and_sweeps_follow_from_the_records() -> None:
    records = [*group(), *drift_group(documents=2, tokens=64)]
    ids = [run.id for run in tracked(records)]
    assert len(set(ids)) == len(ids)
    assert ids == [run.id for run in tracked(records)]
    first = sweep_of("kernel", ["a/kernel.py", "-m", "batch_size=1,8"], "CPU")
    assert first == sweep_of("kernel", ["b/kernel.py", "-m", "batch_size=1,8", "tracker=wandb", "repeat=true"], "CPU")
    assert first != sweep_of("kernel", ["a/kernel.py", "-m", "batch_size=1,64"], "CPU")


def test_what_is_no_record_is_named() -> None:
    assert list(runs(["{}"])) == ["not a replayssm.record/3 object: 'group'"]


def test_panels_show_metrics_that_runs_have() -> None:
    metrics = {"round", "position", "decode/state_share", "speed/tokens_per_s", "time/model_step_ms"}  # of whole models
    for run in tracked([*group(), *drift_group(documents=1, tokens=64)]):
        metrics |= run.metrics.keys() | {name for row in run.series for name in row}
    shown = {name for panels in SECTIONS.values() for panel in panels for name in (panel.x, panel.y)}
    # The factory's records are of a CPU, which does not tell the memory of an arm.
    assert {name for name in shown if name and not name.startswith("case.")} - metrics <= {"memory/layers_memory_bytes"}


def test_a_tracker_that_is_not_installed_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"^tracker=wandb needs wandb, which is not installed; accepted: .*$"):
        tracker_from_config({"tracker": WANDB})
    assert tracker_from_config({"tracker": {"name": "none"}}) is None
    monkeypatch.setattr(options, "installed", lambda package: True)
    assert tracker_from_config({"tracker": WANDB}) == Tracker("offline", "p", None, "f")
    with pytest.raises(ConfigError, match=r"tracker.mode=dryrun is unknown; accepted: online, offline, disabled"):
        tracker_from_config({"tracker": WANDB | {"mode": "dryrun"}})


def test_a_mirror_sends_only_what_its_command_wrote_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[str]] = []
    old, mine = group(group="a"), group(group="b")
    argv = mine[0].argv
    other = [dataclasses.replace(record, argv=("another",)) for record in group(group="c")]
    Journal(tmp_path, "kernel").append(old)
    mirror = Mirror(Tracker(), tmp_path, argv)
    monkeypatch.setattr(mirror, "send", sent.append)
    for records in (mine, other):
        Journal(tmp_path, "kernel").append(records)
        mirror.catch_up()
    assert sent == [[record.to_json() for record in mine], []]


@pytest.mark.parametrize("broken", ["import sys; sys.exit('no network')", "import os; os.kill(os.getpid(), 9)"])
def test_a_failure_costs_one_line_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], broken: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{broken}\n")
    python.chmod(0o755)
    mirror = Mirror(Tracker(), tmp_path, [])
    monkeypatch.setattr(sys, "executable", str(python))
    mirror.send(["{}"])
    mirror.send(["{}"])
    told = capfd.readouterr().err
    assert told.startswith("tracker=wandb failed and is off for the rest of this run (")
    assert told.count("\n") == 1


@needs_wandb
def test_offline_runs_read_back_hold_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    timed, document = group()[-1], drift_group(documents=1, tokens=64)[-1]
    failed = dataclasses.replace(
        timed, group="f", status="oom", message="too large", samples_ns=(), again_samples_ns=(), correctness=()
    )
    lines = [record.to_json() for record in (timed, document, failed)]
    mirror = Mirror(Tracker("offline", "p", None, str(tmp_path)), tmp_path, [])
    mirror.send(lines)
    assert mirror.tracker is not None, "the mirror failed"
    for run in tracked([timed, document, failed]):
        (folder,) = (tmp_path / "wandb").glob(f"offline-run-*-{run.id}")
        told, summary, history, tables = read_back(folder)
        assert (told["run_group"], told["tags"], told["display_name"]) == (run.group, run.tags, run.name)
        assert {name: summary[name] for name in run.metrics} == run.metrics
        written = json.loads(json.dumps(run.config))
        assert {name: told["config"]["update"][name] for name in written} == written
        assert [{name: row.get(name) for name in run.series[0]} for row in history[: len(run.series)]] == run.series
        expected = {name: table for name, table in run.tables.items() if table[1]}
        assert {name: (t["columns"], t["data"]) for name, t in tables.items()} == json.loads(json.dumps(expected)) | {
            name: (columns, rows) for name, (columns, rows) in expected.items()
        }


def read_back(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The run's description, summary, history and tables, as wandb's own reader finds them in its folder."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    events = [json.loads(line) for line in lines]
    summary: dict[str, Any] = {}
    for event in events:
        summary |= event.get("summary", {}).get("update", {})
    run = next(event["run"] for event in events if event["type"] == "run")
    history = [event["history"]["item"] for event in events if event["type"] == "history"]
    files = (folder / "files" / "media" / "table").glob("*.table.json")
    return run, summary, history, {file.name.rsplit("_", 2)[0]: json.loads(file.read_text()) for file in files}


@needs_wandb
def test_the_dashboard_is_what_wandb_workspaces_accepts() -> None:
    found = workspace(Tracker(project="p"), "e")
    assert [section.name for section in found.sections] == list(SECTIONS)
    assert [len(section.panels) for section in found.sections] == [len(panels) for panels in SECTIONS.values()]
