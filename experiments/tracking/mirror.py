"""Mirrors the records of a running experiment, in a process of its own.

The process runs ``python -m experiments.upload -`` between the processes that measure, so nothing shares the machine
with what is timed; a tracker that raises, hangs or dies costs one line on stderr, and the rest is not mirrored.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from experiments.measure.provenance import command_line
from experiments.measure.record import read_lines
from experiments.measure.sources import ROOT
from experiments.tracking.options import Tracker

LIMIT_S, LIMIT_S_A_RECORD = 120.0, 20.0


class Mirror:
    """Follows the records that this command writes to ``folder``; without a tracker it does nothing."""

    def __init__(self, tracker: Tracker | None, folder: Path, argv: Iterable[str]) -> None:
        self.tracker, self.folder, self.argv = tracker, folder, command_line(argv)
        self.seen = set(self._lines()) if tracker else set()

    def catch_up(self) -> None:
        """Mirror what was written since the last call."""
        if self.tracker is None:
            return
        new = [line for line in self._lines() if line not in self.seen]
        self.seen.update(new)
        self.send(new)

    def send(self, lines: list[str]) -> None:
        """Mirror these lines. Never raises; after the first failure it does nothing."""
        if self.tracker is None or not lines:
            return
        command = [sys.executable, "-m", "experiments.upload", "-", "--mode", self.tracker.mode]
        command += ["--project", self.tracker.project, "--folder", str(Path(self.tracker.folder).resolve())]
        command += ["--entity", self.tracker.entity] if self.tracker.entity else []
        try:
            done = subprocess.run(
                command,
                input="\n".join(lines).encode(),
                capture_output=True,
                cwd=ROOT,
                timeout=LIMIT_S + LIMIT_S_A_RECORD * len(lines),
                start_new_session=True,
            )
            told = done.stderr.decode(errors="replace").strip().splitlines() if done.returncode else None
            failure = None if told is None else (told or [f"exit code {done.returncode}"])[-1]
        except (OSError, subprocess.SubprocessError) as error:
            failure = str(error).splitlines()[0]
        if failure is not None:
            later = f"python -m experiments.upload {self.folder}"
            print(f"tracker=wandb failed and is off for the rest of this run ({failure}); `{later}`", file=sys.stderr)
            self.tracker = None

    def _lines(self) -> list[str]:
        """Whole lines of the folder that this command line wrote."""
        mark = f'"argv":{json.dumps(self.argv, separators=(",", ":"))}'
        return [text for _, _, text in read_lines(self.folder) if text and mark in text]
