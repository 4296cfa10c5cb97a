"""Copies of the project, in which a test may plant a fault, and the project's real commands run there in processes.

A copy takes the last-level cache of its machine for one of 1 MiB: rotating five times as much takes milliseconds, and
is the same work everywhere.
"""

from __future__ import annotations

import compileall
import csv
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from numba.core.caching import _CacheLocator
from preloaded import Preloaded, Process

from replayssm.kernels.cpu.compilation import CACHE_DIRECTORY

subfolder = _CacheLocator.get_suitable_cache_subpath
ROOT = Path(__file__).parents[1]
PARTS = ("analysis", "configs", "experiments", "replayssm", "tests", "results/paper", "pyproject.toml")
SMALL = ("model=nemotron_3_nano_4b", "model.ssm.heads=8", "batch_size=4", "interval_length=4", "threads=1")
"""A case of 1.25 MiB of state: four copies rotate."""
LIMIT_S = 300


@functools.cache
def preloaded() -> Preloaded:
    """The one of this process."""
    return Preloaded()


@functools.cache
def compile_once() -> None:
    """Byte code beside this checkout's sources, which copies take with them."""
    for part in PARTS:
        if (ROOT / part).is_dir():
            compileall.compile_dir(ROOT / part, quiet=2)


class Tree:
    """A fresh copy of the project below ``folder``, in place of what lay there before; records go to ``records``.

    ``cache`` is where machine code is kept; it serves later trees in the same folder, as far as sources are the same,
    and begins with what this checkout has compiled already.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.root, self.records = folder / "project", folder / "records"
        shutil.rmtree(folder, ignore_errors=True)
        compile_once()
        for part in PARTS:
            source, copy = ROOT / part, self.root / part
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("kernels-cpu-*"))
            else:
                shutil.copy2(source, copy)
        self._take_compiled()
        cache_bytes = '"last_level_cache_bytes": '
        self.patch("experiments/measure/provenance.py", f"{cache_bytes}_last_level_cache()", f"{cache_bytes}1 << 20")

    def _take_compiled(self) -> None:
        """Numba keeps machine code in a folder named after that of its sources, and reads it if those are the same."""
        if CACHE_DIRECTORY is None:
            return
        mine, copied = (root / "replayssm/kernels/cpu/compilation.py" for root in (ROOT, self.root))
        folder = self.cache / CACHE_DIRECTORY.name / subfolder(str(copied))
        folder.mkdir(parents=True, exist_ok=True)
        for path in (CACHE_DIRECTORY / subfolder(str(mine))).glob("*.nb[ci]"):
            shutil.copy(path, folder)

    def patch(self, file: str, old: str, new: str) -> None:
        """Replace ``old``, which must stand in the file exactly once."""
        path = self.root / file
        text = path.read_text(encoding="utf-8")
        assert old != new, f"nothing is planted in {file}"
        assert text.count(old) == 1, f"the patch matches {text.count(old)} times in {file}, once is needed:\n{old}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """Variables of the commands."""
        told = os.environ | {"NUMBA_CACHE_DIR": str(self.cache), "COLUMNS": "120"}
        told.pop("PYTHONPATH", None)
        return told

    def start(self, *arguments: str, stderr: IO[str] | None = None) -> Process:
        """``python -m ...`` in the tree, with packages loaded already; see `preloaded`."""
        return preloaded().start(*arguments, cwd=self.root, env=self.environment(), stderr=stderr)

    def run(self, *arguments: str) -> Done:
        """``python -m ...`` in the tree, to its end."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        return Done(process.wait(), out, err)

    def run_anew(self, *arguments: str) -> Done:
        """As `run`, in a new interpreter."""
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(
            command, cwd=self.root, env=self.environment(), capture_output=True, text=True, timeout=LIMIT_S
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def experiment(self, *options: str, anew: bool = False) -> Done:
        """The kernel experiment; what is recorded is added to ``records``."""
        run = self.run_anew if anew else self.run
        return run("experiments.kernel", *options, f"records={self.records}")

    def analyse(self) -> Tables:
        """Tables, as ``python -m analysis`` makes them from ``records``."""
        out = self.folder / "results"
        done = self.run("analysis", "--records", str(self.records), "--out", str(out))
        assert done.code == 0, done.err
        names = [field.name for field in dataclasses.fields(Tables)]
        return Tables(*(list(csv.DictReader((out / "tables" / f"{name}.csv").open())) for name in names))

    def lines(self) -> list[dict[str, Any]]:
        """Every line of every record file, parsed; one that is torn raises ``ValueError``."""
        texts = [path.read_text(encoding="utf-8") for path in sorted(self.records.glob("*.jsonl"))]
        assert all(text.endswith("\n") for text in texts), "torn tail"
        return [json.loads(line) for text in texts for line in text.splitlines()]


@dataclass(frozen=True)
class Done:
    """A process that has ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Tables:
    """Rows of three tables of the analysis, cells as text."""

    exclusions: list[dict[str, str]]
    failures: list[dict[str, str]]
    kernel_speedups: list[dict[str, str]]
