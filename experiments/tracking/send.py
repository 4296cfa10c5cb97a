"""Sends runs to Weights & Biases; the only file that imports wandb."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.tracking.options import Tracker
from experiments.tracking.runs import TrackedRun, run_id

INIT_TIMEOUT_S, FINISH_TIMEOUT_S = 60.0, 120.0


def send(runs: Iterable[TrackedRun], tracker: Tracker) -> int:
    """Send runs, one after the other and each to its end; returns how many. Raises what wandb raises."""
    count = 0
    for run in runs:
        opened = _open(tracker, run.id, run.name, run.group, run.job_type, run.tags, run.config)
        if run.series:
            opened.define_metric(run.step_metric, hidden=True)
            opened.define_metric("*", step_metric=run.step_metric)
        for step, row in enumerate(run.series):
            opened.log(row, step=step)
        # A step of its own that a run which is uploaded again has reached already: wandb then drops the second copy.
        tables = {name: _table(*table) for name, table in run.tables.items() if table[1]}
        opened.log(tables | run.metrics, step=len(run.series))
        opened.finish(exit_code=int(run.failed))
        count += 1
    return count


def send_figures(folder: Path, tracker: Tracker) -> int:
    """The PNG files of a folder as images of one run, which follows from their bytes; returns how many."""
    import wandb

    files = sorted(folder.glob("*.png"))
    if files:
        name = run_id("figures", *(file.read_bytes().hex() for file in files))
        opened = _open(tracker, name, "figures", "analysis", "analysis", ["analysis"], {})
        opened.log({f"figures/{file.stem}": wandb.Image(str(file)) for file in files}, step=0)
        opened.finish()
    return len(files)


def _open(
    tracker: Tracker, id: str, name: str, group: str, job_type: str, tags: list[str], config: dict[str, Any]
) -> Any:
    import wandb

    Path(tracker.folder).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_SILENT", "true")
    # What wandb finds out by itself about code, console and machine is left out: the record holds it.
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_save_requirements=False,
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
    )
    return wandb.init(
        project=tracker.project,
        entity=tracker.entity,
        dir=tracker.folder,
        mode=tracker.mode,
        id=id,
        resume="allow",
        name=name,
        group=group,
        job_type=job_type,
        tags=tags,
        config=config,
        settings=settings,
    )


def _table(columns: list[str], rows: list[list[Any]]) -> Any:
    import wandb

    return wandb.Table(columns=columns, data=rows)
