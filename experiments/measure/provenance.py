"""Where a record comes from: code, packages, device and its state. Standard library only.

What the machine does not tell is recorded as None, never guessed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.case import cores
from experiments.measure import nvidia
from experiments.measure.sources import ROOT
from experiments.places import told

PACKAGES = ("torch", "numba", "llvmlite", "numpy", "triton", "replayssm")
PACKAGES += ("vllm", "flashinfer-python", "flash-linear-attention", "fla-core", "mamba-ssm")
VARIABLES = ("OMP_", "MKL_", "NUMBA_", "OPENBLAS_", "GOMP_", "KMP_", "TORCH_", "CUDA_", "TRITON_", "MALLOC_")
ABSOLUTE_PATH = re.compile(r"""(?:(?<=[=,:;\['"\s])|^)~?/[^,:;\]'"]*""")
_CPU = Path("/sys/devices/system/cpu")


def code() -> dict[str, Any]:
    """Git revision and whether tracked files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(("git", "-C", str(ROOT), *arguments), capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
    return {"git_sha": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def packages(more: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python and of the packages that matter for a number, those installed."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """Environment variables that change threads, compilers or allocators; paths as in `without_places`."""
    return {name: without_places(value) for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}


def command_line(argv: Iterable[str]) -> tuple[str, ...]:
    """The words of a command, paths as in `without_places`."""
    return tuple(map(without_places, argv))


def without_places(text: str) -> str:
    """The text with each absolute path as `experiments.places.told` has it."""
    return ABSOLUTE_PATH.sub(lambda match: told(match[0]), text)


def device(kind: str) -> dict[str, Any]:
    """The device of a case, ``cpu`` or ``cuda``, as far as it can be told without torch; always with a name."""
    if kind == "cpu":
        return cpu()
    return {"kind": "gpu", "name": "unknown GPU"} | (nvidia.gpu() or {}) | {"host": cpu()}


def state(kind: str) -> dict[str, Any]:
    """The state of the device of a case, and of the machine that drives it: now."""
    return cpu_state() if kind == "cpu" else nvidia.gpu_state() | {"host": cpu_state()}


def state_during(
    kind: str, before: dict[str, Any], after: dict[str, Any], rounds: list[dict[str, Any]]
) -> dict[str, Any]:
    """`state` around a run and after each round, and whether the device throttled (None if it does not tell), with the
    number of states that tell and of all: where some are silent, False is of the others alone.
    """
    if kind == "cpu":
        return cpu_state_during(before, after)
    states = [before, *rounds, after]
    told = sum(state.get("clock_reasons") is not None for state in states)
    by_name = {name: [state[name] for state in rounds] for name in (rounds[0] if rounds else {})}
    return {
        "throttled": nvidia.throttled(states),
        "throttling_told": [told, len(states)],
        "before": before,
        "after": after,
        "rounds": by_name,
    }


def cpu() -> dict[str, Any]:
    """The CPU as a device: name, cores usable by this process, memory and last-level cache in bytes."""
    arm = [_field("/proc/cpuinfo", name) for name in ("CPU implementer", "CPU part")]
    model = _field("/proc/cpuinfo", "model name") or _sysctl("machdep.cpu.brand_string")
    model = model or " ".join(filter(None, [platform.machine(), *arm]))
    memory = _field("/proc/meminfo", "MemTotal")
    return {
        "name": f"{model}, {cores()} cores",
        "kind": "cpu",
        "cores": cores(),
        "memory_bytes": int(memory.split()[0]) * 1024 if memory else _sysctl_number("hw.memsize"),
        "last_level_cache_bytes": _last_level_cache(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def cpu_state() -> dict[str, Any]:
    """Clocks in MHz, count of thermal throttling events, time stolen by a hypervisor, load: now."""
    throttles = [_number(path) for path in sorted(_CPU.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))]
    stat = _first_line("/proc/stat")
    return {
        "clock_mhz": [float(value) for value in _fields("/proc/cpuinfo", "cpu MHz")],
        "throttle_count": None if not throttles or None in throttles else sum(t for t in throttles if t is not None),
        "stolen_ticks": int(stat.split()[8]) if stat else None,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def cpu_state_during(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """`cpu_state` around a run, and whether the CPU throttled in between (None where it does not tell)."""
    counts = (before["throttle_count"], after["throttle_count"])
    return {
        "throttled": None if None in counts else counts[1] > counts[0],
        "throttling_told": [sum(count is not None for count in counts), len(counts)],
        "before": before,
        "after": after,
    }


def available_memory_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not tell."""
    available = _field("/proc/meminfo", "MemAvailable")
    return int(available.split()[0]) * 1024 if available else None


def _last_level_cache() -> int | None:
    """Bytes of the last-level caches of all cores that this process may use: a kernel's threads fill each of them."""
    levels: dict[tuple[int, str], int] = {}
    for core in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        for index in (_CPU / f"cpu{core}" / "cache").glob("index*"):
            level, size = _first_line(index / "level"), _first_line(index / "size")
            if level and size and size.endswith("K"):
                levels[int(level), _first_line(index / "shared_cpu_list") or ""] = int(size[:-1]) * 1024
    if levels:
        last = max(level for level, _ in levels)
        return sum(size for (level, _), size in levels.items() if level == last)
    return _sysctl_number("hw.l3cachesize")  # Apple's own chips do not tell the size of their system-level cache


def _sysctl(name: str) -> str | None:
    """A value of macOS's sysctl."""
    try:
        return subprocess.run(("sysctl", "-n", name), capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _sysctl_number(name: str) -> int | None:
    value = _sysctl(name)
    return int(value) if value and value.isdigit() and int(value) else None


def _first_line(path: str | Path) -> str | None:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    line = _first_line(path)
    return int(line) if line and line.isdigit() else None


def _fields(path: str, name: str) -> list[str]:
    """All values of ``name : value`` lines."""
    try:
        with open(path) as file:
            pairs = [line.partition(":") for line in file]
    except OSError:
        return []
    return [value.strip() for key, _, value in pairs if key.strip() == name]


def _field(path: str, name: str) -> str | None:
    return next(iter(_fields(path, name)), None)
