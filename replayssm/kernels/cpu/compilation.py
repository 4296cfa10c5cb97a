"""How the CPU kernels are compiled, and where the machine code is kept between processes.

Numba keys its cache by the file of the cached function alone, so a change in a file that the kernel calls into would be
served stale machine code. Here the cache directory is named after a hash of all sources of this folder instead.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

FASTMATH = {"reassoc", "contract"}
"""Never more: full fastmath lets the compiler assume that no NaN exists, and a NaN must stay one."""

_njit: Any = numba.njit
_config: Any = numba.config
_inside = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inlined: Any = _njit(fastmath=FASTMATH, **_inside)
"""For functions that kernels call; they are compiled into the kernel and cached with it."""
pasted: Any = _njit(fastmath=FASTMATH, inline="always", **_inside)
"""As `inlined`, for a function of one caller: it becomes a part of it before anything is compiled, which saves a third
of a kernel's compile time where the function holds most of the kernel. It must leave writing memory to functions that
it calls: Numba drops what the body of a parallel loop writes through a pointer itself.
"""
exactly: Any = _njit(**_inside)
"""As `inlined`, where the order of operations matters: Numba puts fastmath flags on all operations of a function."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel entry on first call: multi-threaded over `numba.prange`, kept on disk for later processes."""
    options = {"parallel": True, "nogil": True, "fastmath": FASTMATH, "error_model": "numpy"}
    if CACHE_DIRECTORY is None:
        return _njit(**options)(function)
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(CACHE_DIRECTORY)  # read by numba while it decorates, never later
    try:
        return _njit(cache=True, **options)(function)
    finally:
        _config.CACHE_DIR = before


def source_hash(folder: Path = Path(__file__).parent) -> str:
    """Hash of all sources that go into a kernel."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def cache_directory() -> Path | None:
    """The first place that can be written: NUMBA_CACHE_DIR, beside the sources, the user's cache; None if none can."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    roots = [Path(__file__).parent / "__pycache__", user / "replayssm"]
    if _config.CACHE_DIR:
        roots.insert(0, Path(_config.CACHE_DIR))
    for root in roots:
        path = root / f"kernels-cpu-{source_hash()}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError:
            continue
        return path
    warnings.warn(
        f"none of {[str(r) for r in roots]} can be written; CPU kernels compile in each process", stacklevel=2
    )
    return None


CACHE_DIRECTORY = cache_directory()
