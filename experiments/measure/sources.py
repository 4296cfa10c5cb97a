"""Which source files an arm consists of, and their hash: part of the resume key; changed code is measured again.

Found by walking the import statements of the arm's file, without importing anything. What is timed around the arm's
kernel (`experiments.measure.layers`), the inputs, and what chooses a launch configuration belong to it; the rest of the
harness does not run inside a sample. Kernels of another project, and what Triton makes of ours, change with the
installed version, which the hash therefore covers: an arm whose peer was installed since is run.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = {"replayssm/kernels/triton/launch_table.py": "launches/*.csv"}
"""Files beside a source that decide what it does, by their pattern."""
PACKAGES = ("replayssm", "experiments.arms", "experiments.inputs", "experiments.measure.layers")
PACKAGES += ("experiments.measure.tuning",)
INSTALLED = {
    "replayssm/kernels/triton/": ("triton",),
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


def arm_sources(arm: str) -> dict[str, str]:
    """SHA-256 by path, relative to the repository, of the arm's file, all project files it imports, and `DATA`."""
    found: dict[Path, str] = {}
    waiting = [arm_file(arm)]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        text = path.read_bytes()
        found[path] = hashlib.sha256(text).hexdigest()
        if path.suffix == ".py":
            waiting.extend(file for name in _imports(text, path) for file in _files(name))
            pattern = DATA.get(path.relative_to(ROOT).as_posix())
            waiting.extend(path.parent.glob(pattern) if pattern else ())
    return {str(path.relative_to(ROOT)): found[path] for path in sorted(found)}


def arm_hash(arm: str) -> str:
    """First 16 hexadecimal digits of the hash over `arm_sources` and the installed versions that they depend on."""
    found = arm_sources(arm)
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
    return [name for name in names if name.startswith(PACKAGES)]


def _files(name: str) -> list[Path]:
    """The module's file and the package files on the way to it, those that exist."""
    parts = name.split(".")
    candidates = [ROOT.joinpath(*parts[:i], "__init__.py") for i in range(1, len(parts) + 1)]
    return [path for path in (*candidates, ROOT.joinpath(*parts).with_suffix(".py")) if path.is_file()]
