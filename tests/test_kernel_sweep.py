"""Which cases of a sweep share a process; nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest

from experiments import kernel
from experiments.app import CONFIGS, to_plain
from experiments.measure import nvidia, runner
from experiments.options import ConfigError

GPU = {"name": "Test GPU", "kind": "gpu"}


def configs(device: str, folder: Path) -> list[dict[str, Any]]:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        options = [f"device={device}", "timing.replicates=2", f"records={folder}"]
        return [to_plain(hydra.compose("kernel", [*options, f"batch_size={batch}"])) for batch in (1, 8)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Replicate and batch sizes of each process that would be started."""
    seen: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(runner, "run", lambda replicate, cases, *_: seen.append((replicate, sizes(cases))) or [])
    monkeypatch.setattr(nvidia, "gpu", lambda: GPU)
    return seen


def sizes(cases: list[Any]) -> list[int]:
    return [case.batch_size for case in cases]


def test_the_cases_of_a_gpu_share_a_process(runs: list[Any], tmp_path: Path) -> None:
    assert kernel.sweep(configs("cuda", tmp_path)) == 0
    assert runs == [(0, [1, 8]), (1, [1, 8])]


def test_those_of_a_cpu_do_not(runs: list[Any], tmp_path: Path) -> None:
    assert kernel.sweep(configs("cpu", tmp_path)) == 0
    assert runs == [(0, [1]), (1, [1]), (0, [8]), (1, [8])]


def test_without_a_gpu_nothing_is_started(runs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "gpu", lambda: None)
    with pytest.raises(ConfigError, match=r"^device=cuda finds no NVIDIA GPU; accepted: cpu, or a machine where "):
        kernel.sweep(configs("cuda", tmp_path))
    assert runs == []
