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
from experiments.arms import replay_triton, stored_triton
from experiments.case import models_with_geometry
from experiments.measure import devices, gates, launches
from experiments.options import ConfigError
from replayssm.kernels.triton import launch_csv, launch_table
from replayssm.kernels.triton.launch import Launch, replay_launch

SMALL = ("model.ssm.heads=1", "model.ssm.groups=1", "model.ssm.head_dim=8", "model.ssm.state_dim=16")
TIMING = ("timing=smoke", "timing.warmup_limit_s=0.01")
UNEVEN, EVEN = Launch(2, 1, 1, lanes=4, stages=1), Launch(4, 1, 1, lanes=4, stages=1)
STALE, BROKEN = Launch(8, 1, 1, lanes=4, stages=1), Launch(1, 1, 1, lanes=4, stages=1)
CLOCK_MS = {UNEVEN: (10, 30), EVEN: (20, 21)}
"""Of a sample, with aligned and with staggered rows; 40 for any other launch."""


class Clock(StandIn):
    """The stand-in for a GPU. Its graphs keep the launch that they were made with, as captured ones do; while they are
    timed nothing runs, and the clock knows how long each launch takes.
    """

    phase = "aligned"
    ran: Launch | None = None
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
    raises.
    """
    of = Clock()
    step = launches.Step.__call__

    def stepped(self: launches.Step, out: torch.Tensor, *arguments: Any) -> None:
        if self.launch == BROKEN:
            raise RuntimeError("out of resource: shared memory\nwith a second line")
        step(self, torch.zeros_like(out) if self.launch == STALE else out, *arguments)

    monkeypatch.setattr(launches.Step, "__call__", stepped)
    monkeypatch.setattr(launches, "candidates", lambda *asked: [UNEVEN, EVEN, STALE, BROKEN])
    monkeypatch.setattr(launches, "SIEVE_ROUNDS", 1)
    monkeypatch.setitem(devices.DEVICES, "cuda", of)
    monkeypatch.setattr(tune.nvidia, "gpu", lambda: {"name": "Stand-in"})
    monkeypatch.setattr(gates, "SLACK", 4.0)  # the interpreter truncates bfloat16, which doubles the error of outputs
    monkeypatch.setattr(launch_csv, "TABLES", tmp_path / "launches")
    launch_table.forget()
    yield of
    launch_table.forget()


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
    heuristic = launches.effective(replay_launch(case.geometry, 2, 4), case.geometry, 4)
    was = f"10000.00 / 10000.00 us  {launches.in_words(heuristic)}  (heuristic: table cpu holds nothing near)"
    assert was in told
    after = replay_triton.describe(case)
    assert after["chosen"] == "table cpu, measured at 1x8x16, batch 2, L 2, state fp32"
    assert (after["rows"], after["stages"]) == (EVEN.rows, EVEN.stages)
    assert stored_triton.describe(case)["rows"] == UNEVEN.rows


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


@pytest.mark.parametrize("model", models_with_geometry())
@pytest.mark.parametrize("operation", ["stored", "replay"])
def test_candidates_are_distinct_and_within_the_budget(model: str, operation: str) -> None:
    geometry = tune.question_from_config(config(f"model={model}")).geometry
    for state_bytes, batch in itertools.product((4, 2), (1, 256)):
        found = launches.candidates(operation, geometry, batch, state_bytes)
        assert len(set(found)) == len(found) <= launches.BUDGET
        assert state_bytes == 2 or len(found) >= launches.BUDGET - 2
        assert all(launch.rows * launch.tiles < 2 * geometry.head_dim for launch in found)


def test_a_dry_run_needs_no_gpu_and_a_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(config("dry_run=true", "batch_size=1")) == 0
    assert capsys.readouterr().out.count("rows=") == 2 * launches.BUDGET
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
    ],
)
def test_what_cannot_be_tuned_gets_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tune.question_from_config(config(override))
