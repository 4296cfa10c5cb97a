"""What the driver tells about the NVIDIA GPU that a case runs on, without importing torch: its name, its state.

Asked through NVML where its Python bindings are installed (nvidia-ml-py, of the extra ``gpu``), else through
nvidia-smi, which is slower. With several GPUs it is the first of CUDA_VISIBLE_DEVICES, else the first of the bus; the
workers number them by bus too. What is not told is None.
"""

from __future__ import annotations

import functools
import os
import subprocess
from typing import Any

from experiments.options import refuse

LOWERED = ("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_slowdown", "hw_power_brake_slowdown")
"""Reasons for which a clock is lower than the card was built for; a power cap belongs to the card."""
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
STATE_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The name since driver 535, and the one before it; nvidia-smi answers nothing if it does not know a field."""


def refuse_without(device: str, instead: str = "cpu, or ") -> None:
    """Raises ``ConfigError`` where a case is to run on ``cuda`` and there is no GPU; ``instead``: what else is
    accepted."""
    if device == "cuda" and gpu() is None:
        raise refuse("device", device, f"{instead}a machine where nvidia-smi lists a GPU", "finds no NVIDIA GPU")


@functools.cache
def gpu() -> dict[str, Any] | None:
    """Name, memory and driver; None if there is no GPU that the driver lists."""
    if nvml := _nvml():
        library, handle = nvml
        name, memory = library.nvmlDeviceGetName(handle), library.nvmlDeviceGetMemoryInfo(handle).total
        told = [_text(name), memory, _text(library.nvmlSystemGetDriverVersion())]
    else:
        values = _smi("name", "memory.total", "driver_version")
        if values is None or values[0] is None:
            return None
        told = [values[0], None if values[1] is None else int(float(values[1]) * 2**20), values[2]]
    return {"kind": "gpu"} | dict(zip(("name", "memory_bytes", "driver"), told, strict=True))


def gpu_state() -> dict[str, Any]:
    """Clocks in MHz, temperature in degrees Celsius, power in watts, and why clocks are not higher: now."""
    if nvml := _nvml():
        library, handle = nvml
        numbers = [
            _told(library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM),
            _told(library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_MEM),
            _told(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU),
            _told(library.nvmlDeviceGetPowerUsage, handle),
        ]
        numbers[3] = None if numbers[3] is None else numbers[3] / 1000
        reasons = _told(library.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    else:
        answers = (_smi(*STATE_FIELDS, field) for field in REASON_FIELDS)
        *values, told = next((a for a in answers if a), [None] * (len(STATE_FIELDS) + 1))
        numbers = [None if value is None else float(value) for value in values]
        reasons = None if told is None else int(told, 16)
    names = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")
    return dict(zip(names, numbers, strict=True)) | {
        "clock_reasons": None if reasons is None else [name for bit, name in REASONS.items() if reasons & bit]
    }


def throttled(states: list[dict[str, Any]]) -> bool | None:
    """Whether heat or the supply lowered a clock in one of the states; None where none of them tells."""
    told = [state["clock_reasons"] for state in states if state.get("clock_reasons") is not None]
    return any(reason in LOWERED for reasons in told for reason in reasons) if told else None


@functools.cache
def _nvml() -> tuple[Any, Any] | None:
    """The library, initialised, and the handle of our GPU; None without one of the two."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        which = _which()
        if which.isdigit():
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(which))
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(which)
    except pynvml.NVMLError:
        return None


def _told(ask: Any, *arguments: Any) -> Any:
    """An answer of NVML; None where the card has none."""
    try:
        return ask(*arguments)
    except Exception:  # NVMLError, whose class only the library knows
        return None


def _which() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()


def _smi(*fields: str) -> list[str | None] | None:
    """Values of nvidia-smi's fields, None for one that the card does not have; None without an answer."""
    command = ("nvidia-smi", "-i", _which(), f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.strip().split("\n")[0].split(",")]
    if len(values) != len(fields):
        return None
    return [None if value.startswith("[") or value in ("", "N/A") else value for value in values]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
