"""Which source files an arm consists of, and their hash: part of the resume key; changed code is measured again.

Found by walking the import statements of the arm's file, without importing anything. It is what runs inside a sample or
decides how one is taken: the arm's kernel and the layers around it, the inputs, what chooses a launch configuration (of
the tables, that of the device), graphs, events and waits of `experiments.measure.devices`, order and warm-up of
`experiments.measure.timing`. The rest of the harness decides how many copies, rounds and cycles there are and whether
results are right; each record says so, and is judged by it. The bandwidth kernels are no arm's: their samples stand in
the records. Kernels of another project, and what Triton makes of ours, change with the installed version, which the
hash therefore covers: an arm whose peer was installed since is run.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = {
    "replayssm/kernels/triton/launch_table.py": "launches/{device}.csv",
    "replayssm/kernels/triton/verify_launch_table.py": "launches/{device}_windows.csv",
}
"""Files beside a source that decide what it does on a device."""
HARNESS = ("experiments.measure.devices", "experiments.measure.timing")
"""How samples are taken; of what these import, only each other belongs to an arm."""
PACKAGES = ("replayssm", "experiments.arms", "experiments.inputs", *HARNESS)
PACKAGES += tuple(
    f"experiments.measure.{name}" for name in ("gated", "layers", "peer_layers", "tuning", "window_layers")
)
AROUND: dict[str, tuple[str, ...]] = {"decode": ("experiments/measure/session.py",)}
AROUND["speculative"] = (*AROUND["decode"], "experiments/measure/window_session.py")
"""Experiment -> files that run inside a sample of every arm."""
INSTALLED = {
    "replayssm/kernels/triton/": ("triton",),
    "experiments/lm_eval_": ("lm-eval", "tokenizers"),
    "replayssm/peers/": ("triton",),
    "replayssm/peers/vllm.py": ("vllm", "regex"),
    "replayssm/peers/fla.py": ("fla-core", "flash-linear-attention"),
    "replayssm/peers/mamba_ssm.py": ("mamba-ssm", "einops"),
    "replayssm/peers/flashinfer.py": ("flashinfer-python",),
}
"""Beginning of a source's path -> the distributions whose version decides what it runs, and whether it runs."""


def arm_file(arm: str) -> Path:
    """The file of an arm, as ``stored_torch.py`` of ``stored/torch``; it need not exist."""
    return ROOT / "experiments" / "arms" / f"{arm.replace('/', '_').replace('-', '_')}.py"


def arm_sources(arm: str, device: str, experiment: str = "kernel") -> dict[str, str]:
    """SHA-256 by path, relative to the repository, of the arm's file, all project files it imports, and `DATA` for the
    device of that name, where there is some; with what an experiment of whole models runs around it.
    """
    return sources_from([arm_file(arm), *(ROOT / path for path in AROUND.get(experiment, ()))], device)


def sources_from(files: list[Path], device: str) -> dict[str, str]:
    """As `arm_sources`, of the files and all that they import."""
    found: dict[Path, str] = {}
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        text = path.read_bytes()
        found[path] = hashlib.sha256(text).hexdigest()
        if path.suffix == ".py":
            waiting.extend(file for name in _imports(text, path) for file in _files(name))
            data = DATA.get(path.relative_to(ROOT).as_posix(), "").format(device=file_name(device))
            waiting.extend([path.parent / data] if data and (path.parent / data).exists() else [])
    return {str(path.relative_to(ROOT)): found[path] for path in sorted(found)}


def file_name(device: str) -> str:
    """What files of a device are called, ``nvidia_h200`` for NVIDIA H200; as its launch table is."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def arm_hash(arm: str, device: str, experiment: str = "kernel") -> str:
    """First 16 hexadecimal digits of the hash over `arm_sources` and the installed versions that they depend on."""
    return hash_of(arm_sources(arm, device, experiment))


def hash_of(found: dict[str, str]) -> str:
    """As `arm_hash`, of sources by path."""
    lines = [f"{path} {digest}" for path, digest in found.items()]
    names = {name for start, names in INSTALLED.items() for name in names if any(p.startswith(start) for p in found)}
    lines += [f"{name} {_version(name)}" for name in sorted(names)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _version(distribution: str) -> str | None:
    """The installed version; None if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=256)
def _imports(text: bytes, path: Path) -> list[str]:
    """Dotted names of everything a module imports, with ``from a import b`` giving both a and a.b."""
    names = []
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    of_harness = path.is_relative_to(ROOT) and ".".join(path.relative_to(ROOT).with_suffix("").parts) in HARNESS
    return [name for name in names if name.startswith(HARNESS if of_harness else PACKAGES)]


def _files(name: str) -> list[Path]:
    """The module's file and the package files on the way to it, those that exist."""
    parts = name.split(".")
    candidates = [ROOT.joinpath(*parts[:i], "__init__.py") for i in range(1, len(parts) + 1)]
    return [path for path in (*candidates, ROOT.joinpath(*parts).with_suffix(".py")) if path.is_file()]
