"""The accuracy experiment: the same questions at several state formats, every answer kept.

    python -m experiments.accuracy
    python -m experiments.accuracy model=tiny_nemotron_h task=four_choices 'arms=[shared_fp32,shared_nvfp4,damaged]'
    python -m experiments.accuracy task.generator.length=512 task.generator.facts=16 task.generator.items=256
    python -m experiments.accuracy model.path=FOLDER task=gpqa_diamond device=cuda engine=replay/triton inputs=bf16
    python -m experiments.accuracy model.path=FOLDER task=lm_eval task.harness=arc_easy task.limit=200

A job is a case; its arms differ in what the recurrent states are held in. Questions come through lm-eval, from the
embedded tasks (recall, four_choices, word_problems) or any of its own. Correctness is kept item by item, so that arms
are compared on the same items: python -m analysis. The arm `damaged` forgets its states at the end of the prompt: a
task that it does not lose proves nothing about states. Needs `pip install -e '.[eval]'`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.accuracy_case import AccuracyCase, arms_from_config, case_from_config, case_hash
from experiments.app import run
from experiments.measure.accuracy_record import FINAL, AccuracyRecord, is_accuracy
from experiments.measure.record import read_lines
from experiments.tracking.mirror import Mirror
from experiments.tracking.options import tracker_from_config


def main(config: dict[str, Any]) -> int:
    """Run one case, or with ``dry_run`` print it. Returns 1 if an arm failed."""
    case, arms = case_from_config(config), arms_from_config(config)
    print(f"{case_hash(case)}  {label(case)}")
    if config["dry_run"]:
        print(f"  arms {', '.join(arms)}")
        return 0
    folder = Path(config["records"])
    return measure(case, arms, folder, config["repeat"], Mirror(tracker_from_config(config), folder, sys.argv))


def label(case: AccuracyCase) -> str:
    """The case in a few words."""
    task = case.task
    parts = [f"{name} {number}" for name, number in task.generator]
    values = {"limit": task.limit, "repeats": task.repeats if task.repeats > 1 else None, "prefill": task.prefill}
    parts += [f"{name} {value}" for name, value in values.items() if value is not None]
    return f"{case.model}, {task.name} ({', '.join(parts) or task.harness}), L {case.interval_length}, {case.engine}"


def measure(case: AccuracyCase, arms: tuple[str, ...], folder: Path, repeat: bool, mirror: Mirror) -> int:
    """Run the arms that ``folder`` lacks, one after the other; returns 1 if one failed."""
    from experiments.measure import accuracy_run
    from experiments.measure.journal import Journal

    known = {} if repeat else {record.key: record for record in recorded(folder)}
    session = accuracy_run.Session(case, arms, tuple(sys.argv), folder)
    session.arms = tuple(arm for arm in arms if session.key(arm) not in known)
    journal, done, failed = Journal(folder, "accuracy"), [], False
    for arm in arms:
        record = known.get(session.key(arm))
        if record is not None:
            print(f"  {arm}: recorded already in {folder}; repeat=true runs it again")
        else:
            started = time.monotonic()
            record = session.record(arm)
            journal.append([record])
            mirror.send([record.to_json()])
            print(f"  {line(record, done)}  [{time.monotonic() - started:.0f} s]", flush=True)
            failed |= record.status not in (*FINAL, "oom")
        done.append(record)
    session.unfinished.unlink(missing_ok=True)
    return int(failed)


def recorded(folder: Path) -> Iterator[AccuracyRecord]:
    """The records in ``folder`` that running again would not change."""
    for _, _, text in read_lines(folder):
        if text is not None and is_accuracy(text):
            try:
                record = AccuracyRecord.from_json(text)
            except ValueError:
                continue
            if record.status in FINAL:
                yield record


def line(record: AccuracyRecord, before: list[AccuracyRecord]) -> str:
    """How many items were right, and how many went the other way than with the first arm; or why there are none."""
    if record.status != "ok":
        return f"{record.arm:<14} {record.status}: {record.message}"
    parts = []
    for place, answers in enumerate(record.answers):
        marks = "".join(answers.correct)
        told = f"{answers.task}: {marks.count('1')} of {len(marks)} right ({marks.count('1') / len(marks):.1%})"
        if before and before[0].status == "ok":
            pairs = list(zip("".join(before[0].answers[place].correct), marks, strict=True))
            told += f", {pairs.count(('1', '0'))} lost and {pairs.count(('0', '1'))} gained from {before[0].arm}"
        parts.append(told)
    return f"{record.arm:<14} {'; '.join(parts)}"


if __name__ == "__main__":
    run("accuracy", main, check=case_from_config)
