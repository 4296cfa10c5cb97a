"""Runs the arms of one accuracy case: loads model and tasks once, and makes a record of what each arm answers."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from experiments.accuracy_case import AccuracyCase, case_hash
from experiments.measure import provenance
from experiments.measure.accuracy_record import SCHEMA, AccuracyRecord
from experiments.measure.assemble import now_utc
from experiments.measure.sources import ROOT, hash_of, sources_from
from experiments.options import ConfigError
from experiments.places import recorded
from experiments.weights import refused_by

PARTS = (
    "lm_eval_model",
    "lm_eval_tasks",
    "forced",
    "forced_together",
    "accuracy_arms",
    "accuracy_scores",
    "precisions",
    "chat",
    "assets/recall",
    "assets/tasks/items",
)
PACKAGES = ("lm-eval", "datasets", "tokenizers")


class Session:
    """A case on this machine, and the ``arms`` that will be asked for. Nothing heavy is imported before the first
    `record`."""

    def __init__(self, case: AccuracyCase, arms: tuple[str, ...], argv: tuple[str, ...], folder: Path) -> None:
        self.case, self.arms, self.argv = case, arms, argv
        self.unfinished = folder / f".accuracy-{case_hash(case)}.npz"
        """Scores of a run that was ended, to go on from."""
        self.device = provenance.device(case.device)
        files = [ROOT / "experiments" / f"{part}.py" for part in PARTS]
        files += sorted((ROOT / "experiments/assets/tasks").glob("*.yaml")) if case.task.embedded else []
        self.sources = sources_from(files, str(self.device["name"]))
        self._loaded: tuple[Any, ...] | None = None

    def key(self, arm: str) -> tuple[str, str, str, str, str, int]:
        """What `AccuracyRecord.key` will be."""
        return (SCHEMA, case_hash(self.case), arm, hash_of(self.sources), str(self.device["name"]), 0)

    def record(self, arm: str) -> AccuracyRecord:
        """Run the arm. Raises ``ConfigError`` where the case itself cannot be run; what goes wrong with an arm is in
        its record."""
        started = now_utc()
        status, message, found = self._run(arm)
        return AccuracyRecord(
            case_hash=case_hash(self.case),
            arm=arm,
            arm_hash=hash_of(self.sources),
            status=status,
            message=message,
            case=recorded(self.case),
            arm_config=found.pop("arm_config", {}),
            code=provenance.code(),
            packages=provenance.packages(PACKAGES),
            device=self.device,
            environment=provenance.environment(),
            argv=provenance.command_line(self.argv),
            seeds={"case": self.case.seed},
            started_utc=started,
            ended_utc=now_utc(),
            **found,
        )

    def _run(self, name: str) -> tuple[str, str, dict[str, Any]]:
        """Status, message, and the record's fields that only a run knows."""
        tasks, arms, scorer, text = self._load()
        import torch

        from experiments.lm_eval_model import EngineLM, Settings
        from experiments.lm_eval_tasks import answer
        from replayssm.models import ModelError

        case, started = self.case, time.monotonic()
        arm, settings = arms[name], Settings(thinking=case.task.thinking)
        config = {"arm_config": arm.describe()}
        if arm.unsupported:
            return "unsupported", arm.unsupported, config
        lm = EngineLM(text, arm, scorer, rows=case.batch_size, settings=settings)
        try:
            answers, metrics = answer(tasks, lm, case)
        except ConfigError:
            raise
        except ModelError as error:
            return "unsupported", str(error), config
        except (MemoryError, torch.OutOfMemoryError) as error:
            return "oom", f"{error}" or "out of memory", config
        except Exception as error:  # a record too: the other arms go on
            traceback.print_exc(file=sys.stderr)
            return "error", f"{type(error).__name__}: {error}", config
        work = dataclasses.asdict(settings.work) | {"seconds": round(time.monotonic() - started, 1)}
        return "ok", "", config | {"answers": answers, "metrics": metrics, "work": work}

    def _load(self) -> tuple[Any, ...]:
        """Tasks, model and tokenizer, once; the tasks first, since their data may be out of reach."""
        if self._loaded is None:
            from experiments import lm_eval_tasks

            case = self.case
            tasks = lm_eval_tasks.load(case)
            import torch

            from experiments.accuracy_arms import Arm
            from experiments.accuracy_scores import Scorer
            from experiments.inputs import DTYPES
            from experiments.lm_eval_model import Text
            from replayssm.models import load_model

            torch.set_num_threads(case.threads or torch.get_num_threads())
            folder, dtype = ROOT / case.path, DTYPES[case.inputs]
            with refused_by("model.path", folder):
                model = load_model(folder, dtype=dtype, device=case.device)
            arms = {n: Arm(n, model, case.engine, case.interval_length, case.seed) for n in self.arms}
            identity = f"{case_hash(case)} {hash_of(self.sources)}"
            kept = {"file": self.unfinished, "identity": identity}
            able = [arm for arm in arms.values() if not arm.unsupported]
            scorer = Scorer(able, rows=case.batch_size, prefill=case.task.prefill, **kept)
            self._loaded = (tasks, arms, scorer, Text(folder))
        return self._loaded
