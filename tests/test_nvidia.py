"""What a GPU's driver tells, through a stand-in for nvidia-smi; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.measure import nvidia, provenance

ANSWERS = {
    "name,memory.total,driver_version": "NVIDIA H200, 143771, 580.159.03",
    "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active": (
        "1980, 3201, 41, 312.55, 0x0000000000000024"
    ),
}
OLD = {
    "name,memory.total,driver_version": "NVIDIA A100, [N/A], 520.61",
    "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active": (
        "1410, 1593, 50, [Not Supported], 0x0000000000000000"
    ),
}


@pytest.fixture(autouse=True)
def without_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nvidia, "_nvml", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvidia.gpu.cache_clear()
    yield
    nvidia.gpu.cache_clear()


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> None:
    """An nvidia-smi that knows these queries of device 0 and refuses all others."""
    cases = "".join(f'"-i 0 --query-gpu={query} "*) echo "{answer}";;\n' for query, answer in answers.items())
    tool = folder / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 2;;\nesac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_name_and_the_state_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, ANSWERS)
    told = {"kind": "gpu", "name": "NVIDIA H200", "memory_bytes": 143771 * 2**20, "driver": "580.159.03"}
    assert nvidia.gpu() == told
    assert provenance.device("cuda")["host"]["kind"] == "cpu"
    state = nvidia.gpu_state()
    assert state == {
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "temperature_c": 41.0,
        "power_w": 312.55,
        "clock_reasons": ["sw_power_cap", "sw_thermal_slowdown"],
    }
    assert nvidia.throttled([state]) is True
    silent = state | {"clock_reasons": None}
    during = provenance.state_during("cuda", state, silent, [state])
    assert (during["throttled"], during["throttling_told"]) == (True, [2, 3])


def test_an_older_driver_and_what_it_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, OLD)
    assert nvidia.gpu() == {"kind": "gpu", "name": "NVIDIA A100", "memory_bytes": None, "driver": "520.61"}
    state = nvidia.gpu_state()
    assert (state["power_w"], state["clock_reasons"]) == (None, [])
    assert nvidia.throttled([state]) is False


def test_the_first_visible_gpu_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, ANSWERS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
    assert nvidia.gpu() is None  # the stand-in knows device 0 alone


def test_without_a_driver_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia.gpu() is None
    state = nvidia.gpu_state()
    assert set(state.values()) == {None}
    assert nvidia.throttled([state]) is None
    during = provenance.state_during("cuda", state, state, [state])
    assert (during["throttled"], during["throttling_told"]) == (None, [0, 3])
    assert provenance.device("cuda")["name"] == "unknown GPU"
