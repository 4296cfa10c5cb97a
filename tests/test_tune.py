"""`experiments.tune` from the command line's config to the table, in Triton's interpreter, by a clock of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU is tuned by experiments.tune itself", allow_module_level=True)
# Read when Triton defines its own functions, so before its first import.
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed")

import hydra
from test_cuda_experiment import StandIn

from experiments import tune
from experiments.app import CONFIGS, to_plain
from experiments.arms import replay_triton, snapshots_triton, stored_triton, verify_triton
from experiments.case import models_with_geometry
from experiments.measure import devices, launch_candidates, launches
from experiments.options import ConfigError
from replayssm.kernels.triton import launch_csv, launch_table, verify_launch_table
from replayssm.kernels.triton.launch import Launch, replay_launch
from replayssm.kernels.triton.verify_launch import WindowLaunch, verify_launch

SMALL = ("model.ssm.heads=1", "model.ssm.groups=1", "model.ssm.head_dim=8", "model.ssm.state_dim=16")
TIMING = ("timing=smoke", "timing.warmup_limit_s=0.01")
UNEVEN, EVEN = Launch(2, 1, 1, lanes=4, stages=1), Launch(4, 1, 1, lanes=4, stages=1)
STALE, BROKEN = Launch(8, 1, 1, lanes=4, stages=1), Launch(1, 1, 1, lanes=4, stages=1)
UNEVEN_WINDOW, EVEN_WINDOW = WindowLaunch(16, eager=True), WindowLaunch(16, stages=2)
BROKEN_WINDOW = WindowLaunch(16, warps=2)
WINDOW = ("window=1", "accepted=1")
CLOCK_MS = {UNEVEN: (10, 30), EVEN: (20, 21), UNEVEN_WINDOW: (10, 30), EVEN_WINDOW: (20, 21)}
"""Of a sample, with aligned and with staggered rows; 40 for any other launch."""


class Clock(StandIn):
    """The stand-in for a GPU. Its graphs keep the launch that they were made with, as captured ones do; while they are
    timed nothing runs, and the clock knows how long each launch takes.
    """

    phase = "aligned"
    ran: Any = None
    timing = False

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"last_level_cache_bytes": 64}  # two copies

    def begin(self, case: Any) -> None:
        super().begin(case)
        self.phase = case.phase

    def graph(self, layers: Any) -> devices.Run:
        launch = layers._step.launch

        def replay() -> None:
            self.ran = launch
            if not self.timing:
                layers.cycle()

        return replay

    def elapsed_ns(self, run: devices.Run) -> int:
        self.timing = True
        run()
        self.timing = False
        assert self.ran is not None
        return CLOCK_MS.get(self.ran, (40, 40))[self.phase == "staggered"] * 1_000_000


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Four candidates: one that is uneven, one that is even, one that leaves its outputs as they were, one that
    raises; of a verify step three, of one with snapshots one.
    """
    of = Clock()
    step = launches.Step.__call__

    def stepped(self: launches.Step, out: torch.Tensor, *arguments: Any) -> None:
        if self.launch in (BROKEN, BROKEN_WINDOW):
            raise RuntimeError("out of resource: shared memory\nwith a second line")
        step(self, torch.zeros_like(out) if self.launch == STALE else out, *arguments)

    monkeypatch.setattr(launches.Step, "__call__", stepped)
    of_windows = {"verify": [UNEVEN_WINDOW, EVEN_WINDOW, BROKEN_WINDOW], "snapshots": [UNEVEN]}
    others = [UNEVEN, EVEN, STALE, BROKEN]
    monkeypatch.setattr(launches, "candidates", lambda operation, *asked: of_windows.get(operation, others))
    monkeypatch.setattr(launches, "SIEVE_ROUNDS", 1)
    monkeypatch.setitem(devices.DEVICES, "cuda", of)
    monkeypatch.setattr(tune.nvidia, "gpu", lambda: {"name": "Stand-in"})
    monkeypatch.setattr(launch_csv, "TABLES", tmp_path / "launches")
    launch_table.forget()
    verify_launch_table.forget()
    yield of
    launch_table.forget()
    verify_launch_table.forget()


def config(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_plain(hydra.compose("tune", list(overrides)))


@pytest.mark.slow
def test_the_best_of_the_right_launches_becomes_the_row(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    asked = config(*SMALL, *TIMING, "batch_size=2", "interval_length=2")
    case = tune.question_from_config(asked)
    assert replay_triton.describe(case)["chosen"] == "heuristic: no table for cpu"
    assert tune.main(asked) == 0
    told = capsys.readouterr().out
    assert "incorrect: " in told
    assert "RuntimeError: out of resource: shared memory\n" in told
    assert "second line" not in told
    stored, replay = launch_table.read(launch_csv.TABLES / "cpu.csv")
    assert (stored.launch, replay.launch) == (UNEVEN, EVEN)
    assert (stored.aligned_us, stored.staggered_us) == (10_000 / 4, None)  # two copies, two steps
    assert (replay.aligned_us, replay.staggered_us) == (20_000 / 4, 21_000 / 4)
    assert (replay.geometry, replay.batch_size, replay.interval_length, replay.rounds) == (case.geometry, 2, 2, 3)
    heuristic = launch_candidates.effective(replay_launch(case.geometry, 2, 4), case.geometry, 4)
    was = f"10000.00 / 10000.00 us  {launch_candidates.in_words(heuristic)}  (heuristic: table cpu holds nothing near)"
    assert was in told
    after = replay_triton.describe(case)
    assert after["chosen"] == "table cpu, measured at 1x8x16, batch 2, L 2, state fp32"
    assert (after["rows"], after["stages"]) == (EVEN.rows, EVEN.stages)
    assert stored_triton.describe(case)["rows"] == UNEVEN.rows


@pytest.mark.slow
def test_windows_have_a_table_of_their_own(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    asked = config(*SMALL, *TIMING, *WINDOW, "batch_size=2", "interval_length=1")
    case = tune.question_from_config(asked)
    assert verify_triton.describe(case)["chosen"] == "heuristic: no table of windows for cpu"
    assert tune.main(asked) == 0
    told = capsys.readouterr().out
    assert "incorrect: " not in told
    assert "  verify rows=16 tiles=1 heads=1 warps=2 stages=3 chunks=1, aligned: RuntimeError: out of resource" in told
    assert [path.name for path in launch_csv.TABLES.iterdir()] == ["cpu_windows.csv"]
    snapshots, verify = verify_launch_table.read(launch_csv.TABLES / "cpu_windows.csv")
    assert (snapshots.launch, verify.launch) == (UNEVEN, EVEN_WINDOW)
    assert (snapshots.aligned_us, snapshots.staggered_us) == (10_000 / 2, None)  # two copies, one step
    assert (verify.aligned_us, verify.staggered_us) == (20_000 / 2, 21_000 / 2)
    assert (verify.geometry, verify.batch_size, verify.rounds) == (case.geometry, 2, 3)
    assert (verify.interval_length, verify.window, verify.accepted) == (1, 1, 1)
    heuristic = launch_candidates.effective(verify_launch(case.geometry, 2, 1), case.geometry, 4)
    assert f"{launch_candidates.in_words(heuristic)}  (heuristic: table cpu_windows holds nothing near)" in told
    after = verify_triton.describe(case)
    assert after["chosen"] == "table cpu_windows, measured at 1x8x16, batch 2, L 1, window 1, state fp32"
    assert after["stages"] == EVEN_WINDOW.stages
    assert snapshots_triton.describe(case)["rows"] == UNEVEN.rows


def test_one_operation_is_tuned_where_one_is_asked_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    best: dict[str, Any] = {"snapshots": EVEN, "verify": EVEN_WINDOW}
    monkeypatch.setattr(launches, "measure", lambda case, operation, *asked: {best[operation]: 1.0})
    window = ("window=2", "accepted=1", "interval_length=2")
    asked = config(*SMALL, *TIMING, *window, "batch_size=1", "operations=[verify]")
    tune.main(asked)
    (only,) = verify_launch_table.read(launch_csv.TABLES / "cpu_windows.csv")
    assert (only.launch, only.window, only.accepted) == (EVEN_WINDOW, 2, 1)
    tune.main(asked | {"operations": ["snapshots"]})
    best["verify"] = UNEVEN_WINDOW
    tune.main(asked)
    found = [e.launch for e in verify_launch_table.read(launch_csv.TABLES / "cpu_windows.csv")]
    assert found == [EVEN, UNEVEN_WINDOW]


def test_tuning_again_replaces_a_row_and_keeps_the_others(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    best = [EVEN]
    monkeypatch.setattr(launches, "measure", lambda case, operation, tried, rounds, say: {best[0]: 1.0})
    asked = config("model=kimi_linear_48b", *SMALL, *TIMING, "interval_length=2", "batch_size=1")
    tune.main(asked)
    tune.main(asked | {"batch_size": 2})
    best[0] = UNEVEN
    tune.main(asked)
    found = launch_table.read(launch_csv.TABLES / "cpu.csv")
    assert [(e.operation, e.batch_size, e.launch) for e in found] == [
        (operation, batch, launch) for operation in ("stored", "replay") for batch, launch in ((1, UNEVEN), (2, EVEN))
    ]


def test_nothing_right_leaves_the_table_alone(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "wrong", lambda *asked: "incorrect: all of it")
    assert tune.main(config(*SMALL, *TIMING, "interval_length=2", "batch_size=1")) == 1
    assert not launch_csv.TABLES.exists()


def test_a_bad_table_is_one_line_for_tuner_and_kernel(clock: Clock) -> None:
    launch_csv.TABLES.mkdir()
    (launch_csv.TABLES / "cpu.csv").write_text("rows,tiles\n")
    asked = config(*SMALL, *TIMING, "interval_length=2", "batch_size=1")
    with pytest.raises(ConfigError, match=r"launch table cpu.csv, line 1: the columns are rows,tiles; accepted: "):
        tune.main(asked)
    case = tune.question_from_config(asked)
    for arm in (stored_triton, replay_triton):
        made = arm.prepare(case, 1)
        with pytest.raises(ValueError, match=r"launch table cpu.csv, line 1"):
            made.run_pass(0)


def test_a_bad_table_of_windows_is_one_line_for_tuner_and_kernel(clock: Clock) -> None:
    launch_csv.TABLES.mkdir()
    (launch_csv.TABLES / "cpu_windows.csv").write_text("rows,tiles\n")
    bad = r"launch table cpu_windows.csv, line 1: the columns are rows,tiles; accepted: "
    for model in ("nemotron_3_nano_4b", "qwen3_5_4b"):
        asked = config(f"model={model}", *SMALL, *TIMING, *WINDOW, "interval_length=2", "batch_size=1")
        with pytest.raises(ConfigError, match=bad):
            tune.main(asked)
        for arm in (verify_triton, snapshots_triton):
            with pytest.raises(ValueError, match=bad):  # rows are one window ahead at the start
                arm.prepare(tune.question_from_config(asked), 1)


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (7, 7), (64, 8), (65, 9)])
def test_launches_are_checked_with_a_few_rows(batch: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(launches, "wrong", lambda check, *_: checked.append(check.case.batch_size) or "not today")
    case = tune.question_from_config(config(*SMALL, *TIMING, f"batch_size={batch}"))
    monkeypatch.setitem(devices.DEVICES, "cuda", StandIn())
    assert launches.measure(case, "replay", [EVEN], 1, print) == {}
    assert checked == [rows]


@pytest.mark.parametrize("model", models_with_geometry())
@pytest.mark.parametrize("operation", ["stored", "replay"])
def test_candidates_are_distinct_and_within_the_budget(model: str, operation: str) -> None:
    geometry = tune.question_from_config(config(f"model={model}")).geometry
    for state_bytes, batch in itertools.product((4, 2), (1, 256)):
        found = launch_candidates.candidates(operation, geometry, batch, state_bytes)
        assert len(set(found)) == len(found) <= launch_candidates.BUDGET
        assert state_bytes == 2 or len(found) >= launch_candidates.BUDGET - 2
        assert all(launch.rows * launch.tiles < 2 * geometry.head_dim for launch in found)


@pytest.mark.parametrize("model", models_with_geometry())
@pytest.mark.parametrize("operation", ["snapshots", "verify"])
def test_candidates_of_windows_are_distinct_and_within_the_budget(model: str, operation: str) -> None:
    geometry = tune.question_from_config(config(f"model={model}")).geometry
    for state_bytes, batch in itertools.product((4, 2), (1, 256)):
        found = launch_candidates.candidates(operation, geometry, batch, state_bytes)
        assert len(set(found)) == len(found) <= launch_candidates.WINDOW_BUDGET
        assert len(found) >= (8 if operation == "snapshots" else 18)
        assert all(launch.rows * launch.tiles < 2 * geometry.head_dim for launch in found)
        assert {type(launch) for launch in found} == {verify_launch_table.LAUNCHES[operation]}


def test_kernels_are_compiled_once_for_all_batches_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for the GPU and for the processes."""
    compiled: list[Any] = []

    class Pool:
        def __init__(self, workers: int, context: Any) -> None:
            assert workers == launches.MOST_COMPILERS

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def map(self, compile: Any, tasks: list[Any]) -> list[None]:
            compiled.extend(tasks)
            return [None]

    monkeypatch.setattr(launches, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(launches, "_compiled", set())
    monkeypatch.setattr(launches, "cores", lambda: 64)
    monkeypatch.setitem(devices.DEVICES, "cuda", StandIn())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def asked(batch: int, *operations: str) -> int:
        case = tune.question_from_config(config("window=4", "accepted=3", f"batch_size={batch}"))
        before = len(compiled)
        launches.compile_ahead(case, operations)
        assert {task[0].batch_size for task in compiled[before:]} <= {2 - batch % 2}
        return len(compiled) - before

    both = asked(64, "snapshots", "verify")
    assert both == len(set(compiled)) >= 40
    assert asked(64, "verify") == asked(256, "snapshots", "verify") == 0
    assert asked(2, "snapshots") == 0  # what is tried for few heads is for many as well
    assert asked(1, "snapshots") > 8  # aligned otherwise


def test_a_dry_run_needs_no_gpu_and_a_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(config("dry_run=true", "batch_size=1")) == 0
    assert capsys.readouterr().out.count("rows=") == 2 * launch_candidates.BUDGET
    assert tune.main(config("dry_run=true", "batch_size=1", "window=4", "accepted=3", "operations=[verify]")) == 0
    told = capsys.readouterr().out
    assert "L 16, window 4, 3 accepted, state fp32\n  verify: 24 launches and the present one\n" in told
    assert told.count("rows=") == launch_candidates.WINDOW_BUDGET
    with pytest.raises(
        ConfigError, match=r"^device=cuda finds no NVIDIA GPU; accepted: a machine where nvidia-smi lists a GPU$"
    ):
        tune.main(config("batch_size=1"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=cpu", "device=cpu is unknown; accepted: cuda"),
        ("precision=fp32_fp32", "precision.inputs=fp32 is unknown; accepted: bf16"),
        ("precision.state=nvfp4", "precision.state=nvfp4 cannot be held by arm stored/triton; accepted: fp32"),
        ("dry_run=maybe", "dry_run=maybe is impossible; accepted: true, false"),
        ("+arms=[stored/cpu]", "arms=.* is not an option"),
        ("window=4", "window=4 needs accepted, tokens committed a step; accepted: accepted=1 to 4"),
        *(
            (f"operations={asked}", f"operations={shown} is impossible; accepted: default, or a list of stored, replay")
            for asked, shown in (("[verify]", r'\["verify"\]'), ("[]", r"\[\]"), ("stored", "stored"))
        ),
        ("operations=[replay,replay]", "operations=.* is impossible; accepted: "),
    ],
)
def test_what_cannot_be_tuned_gets_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tune.question_from_config(config(override))
