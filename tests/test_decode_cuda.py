"""The decode experiment with ``device=cuda``: on a GPU where there is one, else with a stand-in that interprets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from test_cuda_experiment import GPU, device  # noqa: F401
from test_decode import TINY

from analysis import tables
from analysis.load import load
from experiments.app import CONFIGS, to_plain
from experiments.decode_case import case_from_config, decode_arms
from experiments.measure import decode_worker, nvidia, session_gates
from experiments.measure.assemble import Group
from experiments.measure.journal import Journal

pytestmark = [pytest.mark.gpu] if GPU else [pytest.mark.slow]
OPTIONS = "device=cuda timing=smoke timing.rounds=1 timing.warmup_limit_s=0.01 precision=fp32_bf16 model.vocab_size=64"
SIZES = "batch_size=64 interval_length=16 steps=64" if GPU else "batch_size=2 interval_length=2 steps=2 context=3"


@pytest.mark.parametrize(("family", "phase"), [("mamba2", "staggered"), ("gdn", "aligned")][: 2 if GPU else 1])
def test_both_arms_pass_every_gate_and_reach_the_table(
    family: str,
    phase: str,
    device: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not GPU:
        monkeypatch.setattr(session_gates, "SLACK", 4.0)  # as in test_cuda_experiment
        monkeypatch.setattr(nvidia, "gpu", lambda: {"name": "a stand-in"})
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        options = [*TINY[family].split(), *OPTIONS.split(), *SIZES.split(), f"phase={phase}"]
        config = to_plain(hydra.compose("decode", options))
    of, arms = case_from_config(config), decode_arms(config)
    assert arms == ("stored/triton", "replay/triton")
    records = decode_worker.run_group(Group(of, arms, 0, ("test",)))
    assert [(r.arm, r.status, r.message) for r in records] == [(arm, "ok", "") for arm in arms]
    assert records[1].decode["agreement"]["steps"] == min(of.steps, 4 * of.interval_length)
    assert records[1].arm_config["backend"] == "triton"
    Journal(tmp_path, "decode").append(records)
    evidence = load([tmp_path])
    assert {e.gate for e in evidence.exclusions} <= {"A/A"}  # a machine that does other work meanwhile
    if not evidence.exclusions:
        assert [r.arm for r in tables.build(evidence)["decode_speedups"].itertuples()] == ["replay/triton"]
