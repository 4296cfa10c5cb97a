"""Runs the jobs of an experiment's command: which cases share a process, what is recorded already, what is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.case import Case
from experiments.measure import nvidia, runner
from experiments.measure.journal import alone
from experiments.tracking.mirror import Mirror
from experiments.tracking.options import tracker_from_config


@dataclass(frozen=True)
class Experiment:
    """What is an experiment's own: its cases and arms from a config, and how it puts them into words."""

    case: Callable[[dict[str, Any]], Any]
    arms: Callable[[dict[str, Any]], tuple[str, ...]]
    label: Callable[[Any], str]
    dry_run_line: Callable[[Any, tuple[str, ...]], str]
    outcome_lines: Callable[[Any, int, runner.Outcome], str]
    questions: Callable[[Sequence[Any]], dict[str, list[str]]] = lambda cases: {}
    """What the workers of some cases are given, asked for before the first of them starts."""


def sweep(experiment: Experiment, configs: list[dict[str, Any]]) -> int:
    """Run all jobs, or with ``dry_run`` print them. On a GPU, which takes longer to start with than a case to run, a
    replicate is one process over all cases of the same arms. Returns 1 if an arm was wrong, failed or ran out of time.
    """
    jobs = [(experiment.case(config), experiment.arms(config), config) for config in configs]
    together: dict[tuple[Any, ...], list[Case]] = {}
    for case, arms, config in jobs:
        if config["dry_run"]:
            print(experiment.dry_run_line(case, arms))
            continue
        nvidia.refuse_without(case.device)
        alike = (Path(config["records"]).resolve(), arms, config["repeat"], tracker_from_config(config))
        together.setdefault((*alike, None if case.device == "cuda" else case), []).append(case)
    left = [runner.pending(cases, arms, folder, repeat) for (folder, arms, repeat, *_), cases in together.items()]
    given = experiment.questions([case for replicates in left for _, cases in replicates for case in cases])
    worst = 0
    for (folder, arms, repeat, tracker, _), cases in together.items():
        mirror = Mirror(tracker, folder, sys.argv)
        with alone(folder, say=print):
            worst = max(worst, measure(experiment, cases, arms, folder, repeat, mirror, given))
    return worst


def measure(
    experiment: Experiment,
    cases: list[Any],
    arms: tuple[str, ...],
    folder: Path,
    repeat: bool,
    mirror: Mirror,
    given: dict[str, list[str]],
) -> int:
    """Run the replicates that ``folder`` lacks; returns 1 if an arm was wrong, failed or ran out of time."""
    waiting = runner.pending(cases, arms, folder, repeat)
    for case in cases:
        if not any(case in left for _, left in waiting):
            print(f"{experiment.label(case)}: recorded already in {folder}; repeat=true measures it again")
    worst = 0
    for replicate, left in waiting:
        watcher = runner.Watcher(done=lambda *ended: print(experiment.outcome_lines(*ended)))
        try:
            outcomes = runner.run(replicate, left, arms, folder, tuple(sys.argv), watcher, given)
        finally:
            mirror.catch_up()
        failed = any(status not in ("ok", "unsupported", "oom") for o in outcomes for status, *_ in o.values())
        worst = max(worst, int(failed))
    return worst
