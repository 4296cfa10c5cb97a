"""One layer's drift: what leaks into the update copy, records, gates and tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from analysis import tables
from analysis.load import load
from experiments import layer_drift
from experiments.app import CONFIGS, to_plain
from experiments.measure import layer_drift as measure
from experiments.measure.drift_record import DriftRecord
from experiments.options import ConfigError
from experiments.precisions import named
from replayssm.geometry import Geometry

MODELS = {"kimi_linear_48b": 2, "qwen3_5_4b": 2, "nemotron_3_nano_4b": 12}


def config(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_plain(hydra.compose("layer_drift", list(overrides)))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    for model, heads in MODELS.items():
        asked = (f"model={model}", f"heads={heads}", "tokens=48", "count=2", "threads=1", f"records={folder}")
        assert layer_drift.main(config(*asked)) == 0
    return folder


def records(folder: Path) -> list[DriftRecord]:
    return [DriftRecord.from_json(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]


def test_a_read_copys_error_reaches_the_update_copy_through_d_alone(measured: Path) -> None:
    """In the first interval nothing has been read from a rounded copy; from then on the fold from d takes errors in,
    the fold from raw inputs and Mamba-2 do not."""
    for record in records(measured):
        error = record.state_error["update"]
        assert record.state_error["positions"] == [16, 32, 48]
        first, last = (max(max(layer) for layer in error[at]) for at in (0, 2))
        if record.arm == "dual_fp32_nvfp4" and record.case["family"] != "mamba2":
            assert first < 1e-5 < 1e-3 < last
        elif record.arm in ("dual_fp32_nvfp4", "raw_fp32_nvfp4", "shared_fp32"):
            assert last < 1e-5
        elif record.arm not in ("shared_fp32@1", "shared_fp32@1/again"):
            assert last > 1e-4


def test_tables_compare_the_folds(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = load([measured])
    assert not evidence.exclusions
    built = tables.build(evidence)
    assert built["drift_kl"].empty
    assert set(built["layer_drift"]["model"]) == {f"{model}, {heads} heads" for model, heads in MODELS.items()}
    ratios = built["layer_ratios"]
    folds = ratios[(ratios["arm"] == "dual_fp32_nvfp4") & (ratios["over"] == "raw_fp32_nvfp4")]
    assert sorted(folds["family"]) == ["gdn", "kda"]
    assert (folds["state_ratio"] > 100).all()
    assert folds["output_ratio"].between(0.9, 1.3).all()
    asked = ("model=qwen3_5_4b", "heads=2", "tokens=48", "count=2", "threads=1", f"records={measured}")
    assert layer_drift.main(config(*asked)) == 0
    assert "recorded already" in capsys.readouterr().out


def test_numbers_off_by_more_than_rounding_enter_no_table(measured: Path, tmp_path: Path) -> None:
    made = [r for r in records(measured) if r.case["family"] == "kda"]
    off = next(r.output_error for r in made if r.arm == "dual_fp32_nvfp4")
    spoilt = [dataclasses.replace(r, output_error=off) if r.arm == "shared_fp32" else r for r in made]
    (tmp_path / "spoilt.jsonl").write_text("".join(r.to_json() + "\n" for r in spoilt))
    evidence = load([tmp_path])
    assert not evidence.drift
    assert {e.gate for e in evidence.exclusions} == {"noise floor"}


def test_an_outputs_error_is_that_of_all_its_values_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: two arms, one sequence, outputs of 2 x 3 values."""
    outputs = torch.tensor([[[2.0, 2, 2], [2, 2, 2]], [[2, 2, 5], [2, 1, 2]]])

    class Fixed:
        period, slots = 16, 2
        rows_of = staticmethod(lambda arm: slice(arm, arm + 1))
        step = staticmethod(lambda layer, out, inputs, slots: out.copy_(outputs))
        commit = staticmethod(lambda slots: None)

    monkeypatch.setattr(measure, "AlignedArms", lambda *_, **__: Fixed)
    monkeypatch.setattr(measure, "state_errors", lambda states: {})
    arms = [named("shared_fp32"), named("shared_nvfp4")]
    drift = measure.LayerDrift(Geometry("gdn", 2, 2, 3, 4), arms, count=1, tokens=2, seed=0, device="cpu")
    drift.run()
    assert drift.output_error.tolist() == [[[0, 0]], [[10 / 24, 10 / 24]]]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model=qwen3_5_4b", "heads=3"], "heads=3 is impossible; accepted: a multiple of 2, the heads of a group"),
        (["heads=33"], "heads=33 is impossible; accepted: an integer from 1 to 32"),
        (["model=nemotron_3_nano_4b", "heads=12", "arms=[raw_fp32_nvfp4]"], "arms=raw_fp32_nvfp4 is for GDN and KDA.*"),
        (["model=kimi_k3", "tokens=0"], "tokens=0 is impossible; accepted: an integer from 16 to 65536"),
    ],
)
def test_refusals_are_one_line(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}$"):
        layer_drift.case_from_config(config(*overrides))


def test_a_dry_run_lists_the_arms(capsys: pytest.CaptureFixture[str]) -> None:
    assert layer_drift.main(config("dry_run=true", "heads=null")) == 0
    told = capsys.readouterr().out
    assert "a layer of kimi_linear_48b, 32 heads, 4 x 2,048 tokens, L 16, on cpu" in told
    assert "raw_fp8_sr_nvfp4" in told
