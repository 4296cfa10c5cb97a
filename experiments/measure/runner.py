"""Run cases in fresh processes, watch them, and leave a record for whatever becomes of them. Standard library only.

A replicate is one process over the pending cases. A case that takes longer than its timeout, or takes its process down,
is recorded as such for all its arms, and the cases behind it go on in a new process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from experiments.case import Case, WindowCase
from experiments.measure.assemble import Group, resume_keys
from experiments.measure.journal import Journal, finished
from experiments.measure.sources import ROOT
from replayssm.layout import Ring, format_of

Outcome = dict[str, tuple[str, str, float | None]]
"""By arm: status, message, median nanoseconds of a layer step."""
FALLBACK_CACHE_BYTES = 64 << 20
"""Taken for the last-level cache where the system does not tell its size, and recorded as assumed."""
PROBE_BYTES = 2 << 30
"""What bandwidth kernels of a GPU pass over at least: less would be over before all of it has begun."""
GRACE_S = 1.0
"""Time a worker gets to end by itself: more than appending a group takes, so that none is cut short."""
EVENT = b'{"event":'
"""How a line that a worker reports begins."""
Events = queue.Queue[dict[str, Any] | None]
"""What a worker reported, in order; None when it has ended."""


@dataclass
class Watcher:
    """Called as things happen; the default shows nothing."""

    started: Callable[[Case, int], None] = lambda case, replicate: None
    done: Callable[[Case, int, Outcome], None] = lambda case, replicate, outcome: None
    enough: Callable[[], bool] = lambda: False


def pending(
    cases: Sequence[Case], arms: tuple[str, ...], folder: Path, repeat: bool = False
) -> list[tuple[int, list[Case]]]:
    """Cases still to run, by replicate: those of which no group in ``folder`` has final records of all arms; with
    ``repeat`` all of them.
    """
    groups = [] if repeat else finished(folder)
    last = max(case.timing.replicates for case in cases)

    def done(case: Case, replicate: int) -> bool:
        wanted = resume_keys(case, arms, replicate)
        return any(wanted <= group for group in groups)

    by_replicate = [(n, [c for c in cases if n < c.timing.replicates and not done(c, n)]) for n in range(last)]
    return [(replicate, left) for replicate, left in by_replicate if left]


def run(
    replicate: int,
    cases: Sequence[Case],
    arms: tuple[str, ...],
    folder: Path,
    argv: tuple[str, ...],
    watcher: Watcher,
    questions: dict[str, list[str]] | None = None,
) -> list[Outcome]:
    """Run ``cases`` as replicate ``replicate``; returns their outcomes when each has its records in ``folder``, or
    fewer if ``watcher.enough`` said so between two cases. ``questions``: as `experiments.prompts.FETCHED`.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases) and not watcher.enough():
        outcomes += _one_process(replicate, list(cases[len(outcomes) :]), arms, folder, argv, watcher, questions or {})
    return outcomes


def copies_of(case: Case, cache_bytes: int | None) -> int:
    """Copies of the state that rotate, so that together they exceed the last-level cache by the cold factor; on a GPU
    at least two, so that no step follows one of its own layer.
    """
    copy_bytes = format_of(case.precision.state).state_bytes(case.geometry) * case.batch_size
    fewest = 2 if case.device == "cuda" else 1
    return max(fewest, math.ceil(case.timing.cold_factor * (cache_bytes or FALLBACK_CACHE_BYTES) / copy_bytes))


def probe_bytes(case: Case, copies: int) -> int:
    """Size of the buffer that the bandwidth kernels pass over: as much as rotates, on a GPU at least `PROBE_BYTES`."""
    rotated = format_of(case.precision.state).state_bytes(case.geometry) * case.batch_size * copies
    return max(rotated, PROBE_BYTES) if case.device == "cuda" else rotated


def needed_bytes(case: Case, arms: int, copies: int) -> int:
    """Memory that a group needs at most: the states, of a window's tokens one each, ring and outputs of each arm, the
    initial state and what it is made of, the buffer of the bandwidth kernels, and the outputs that the checks of two
    arms hold.
    """
    state = format_of(case.precision.state).state_bytes(case.geometry)
    token = Ring(inputs=case.precision.inputs, raw=True).token_bytes(case.geometry)[0]
    window = case.window if isinstance(case, WindowCase) else 1
    ring = token * max(1, case.interval_length - 1 + window)
    output = case.geometry.heads * case.geometry.head_dim * 4 * window
    kept, made_of = (case.steps_per_cycle, 2) if case.device == "cuda" else (1, 0)
    a_row = arms * (window * state + ring + kept * output) + (1 + made_of) * state + 2 * case.steps_per_cycle * output
    return case.batch_size * copies * a_row + probe_bytes(case, copies)


def _one_process(
    replicate: int,
    cases: list[Case],
    arms: tuple[str, ...],
    folder: Path,
    argv: tuple[str, ...],
    watcher: Watcher,
    questions: dict[str, list[str]],
) -> list[Outcome]:
    """Run one worker as far as it gets, at least to the end of one case; returns the outcomes."""
    job = {
        "cases": [dataclasses.asdict(case) for case in cases],
        "arms": arms,
        "replicate": replicate,
        "folder": str(folder),
        "argv": argv,
        "questions": questions,
    }
    worker = subprocess.Popen(
        [sys.executable, "-m", "experiments.measure.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        # Threads that spin after a parallel region would take the cores from the next arm's kernels.
        # GPUs are numbered as the driver's tools number them.
        env={"OMP_WAIT_POLICY": "PASSIVE", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | os.environ,
        start_new_session=True,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    outcomes: list[Outcome] = []
    try:
        events = _follow(worker.stdout)
        with contextlib.suppress(BrokenPipeError):  # a worker that is gone already is found out below
            worker.stdin.write(json.dumps(job).encode() + b"\n")
            worker.stdin.flush()
        for case in cases:
            group = Group(case, arms, replicate, argv)
            watcher.started(case, replicate)
            outcome, failure = _await(worker, events, case.timing.timeout_s)
            if failure:
                Journal(folder, case.experiment).append(group.failures(*failure))
                outcome = dict.fromkeys(arms, (*failure, None))
            outcomes.append(outcome)
            watcher.done(case, replicate, outcome)
            if worker.returncode is not None or watcher.enough():
                break
    finally:
        _end(worker)
    return outcomes


def _follow(stdout: IO[bytes]) -> Events:
    """Read a worker's events as they come, in a thread, so that waiting for the next one can have a limit."""
    events: Events = queue.Queue()

    def read() -> None:
        with stdout:
            for line in stdout:
                if line.startswith(EVENT) and line.endswith(b"\n"):  # else printed by others, or cut short by a kill
                    events.put(json.loads(line))
        events.put(None)

    threading.Thread(target=read, daemon=True).start()
    return events


def _await(worker: subprocess.Popen[bytes], events: Events, timeout_s: float) -> tuple[Outcome, tuple[str, str] | None]:
    """Wait for the current case's end: its outcome, or the status and message of what ended it and its worker."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            _end(worker)
            # It may have recorded the case while it was being ended; a second record would contradict the first.
            late = [event["outcome"] for event in iter(events.get, None) if event["event"] == "done"]
            if late:
                return late[0], None
            return {}, ("timeout", f"still running after timing.timeout_s={timeout_s:g}; stopped")
        if event is None:
            return {}, ("error", f"its process ended with {_exit_name(worker.wait())}")
        if event["event"] == "done":
            if event["last"]:  # its device was lost
                worker.wait()
            return event["outcome"], None


def _exit_name(code: int) -> str:
    if code >= 0:
        return f"exit code {code}; its own message is on standard error"
    reason = "; a system out of memory does this" if -code == signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{reason}"


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Leave nothing running: closing its input ends a worker between two groups, killing it makes sure."""
    assert worker.stdin is not None
    with contextlib.suppress(OSError):
        worker.stdin.close()
    try:
        worker.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
