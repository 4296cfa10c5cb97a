"""Tasks of lm-eval, with the settings of a case; and what one arm answers to them, item by item."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: bars of milliseconds tell nobody anything

import datasets
from lm_eval.api.task import Task as HarnessTask
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from experiments.accuracy_case import AccuracyCase, Task
from experiments.lm_eval_model import EngineLM
from experiments.measure.accuracy_record import Answers
from experiments.options import ConfigError, refuse

FOLDER = Path(__file__).parent / "assets" / "tasks"
SHUFFLE = 1234
"""Added to the case's seed for what tasks draw: orders of choices, examples before a question."""
logging.getLogger("lm_eval").setLevel(logging.ERROR)
datasets.disable_progress_bars()

Tasks = Mapping[str, HarnessTask]


def load(case: AccuracyCase) -> Tasks:
    """The tasks of that name, several for one of lm-eval's groups. Raises ``ConfigError``, one line."""
    task = case.task
    manager = _own(task) if task.embedded else _lm_evals()
    if task.harness not in manager.all_tasks:
        alike = [name for name in manager.all_tasks if task.harness[:4] in name][:8] or manager.all_tasks[:8]
        raise refuse("task.harness", task.harness, f"a task of lm-eval, such as {', '.join(alike)}", "is unknown")
    random.seed(SHUFFLE + case.seed)  # GPQA shuffles its choices with it
    try:
        found: dict[str, HarnessTask] = manager.load([task.harness])["tasks"]
        for each in found.values():
            _process_once(each)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError) as error:
        raise ConfigError(_without_data(task, error)) from None
    for each in found.values():
        _set(each, task)
    return found


def _own(task: Task) -> TaskManager:
    return TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=dict(task.generator))


@functools.cache  # it reads thousands of files
def _lm_evals() -> TaskManager:
    return TaskManager()


def _process_once(harness: HarnessTask) -> None:
    """Keep the items as they are processed now: GPQA would shuffle its choices anew for every arm."""
    config = harness.config
    if config.process_docs is not None:
        split = config.test_split if harness.has_test_docs() else config.validation_split
        harness.dataset = {**harness.dataset, split: harness.eval_docs}
        config.process_docs = None


def answer(tasks: Tasks, lm: EngineLM, case: AccuracyCase) -> tuple[tuple[Answers, ...], dict[str, Any]]:
    """What the arm answers, and lm-eval's own results of the first repeat. Raises ``ConfigError`` where no metric of
    the task says right or wrong of each item."""
    task, repeats = case.task, []
    for repeat in range(task.repeats):
        lm.settings.seed = case.seed * 1000 + repeat
        for each in tasks.values():
            each.set_fewshot_seed(SHUFFLE + case.seed)
        repeats.append(
            evaluate(
                lm=lm,
                task_dict={"tasks": dict(tasks), "groups": {}},
                limit=task.limit,
                bootstrap_iters=0,
                system_instruction=task.system,
                apply_chat_template=task.chat_template,
                fewshot_as_multiturn=task.chat_template,
            )
        )
    found = tuple(_answers(name, each, [r["samples"][name] for r in repeats], task) for name, each in tasks.items())
    return found, {name: _numbers(result) for name, result in repeats[0]["results"].items()}


def _set(harness: HarnessTask, task: Task) -> None:
    """Put the case's settings in place of the task's own."""
    if task.few_shot is not None or harness.config.num_fewshot is None:
        harness.set_config("num_fewshot", task.few_shot or 0)
    generation = {"max_gen_toks": task.max_gen_toks, "temperature": task.temperature, "top_p": task.top_p}
    given = {name: value for name, value in generation.items() if value is not None}
    generates = harness.config.output_type == "generate_until"
    if given and not generates:
        name, value = next(iter(given.items()))
        raise refuse(f"task.{name}", value, "null", "needs a task that generates text")
    if task.prefill is not None and generates:
        raise refuse(
            "task.prefill", task.prefill, "null with a task that generates text: the engine reads whole prompts"
        )
    if given:
        draws = {"do_sample": task.temperature > 0} if task.temperature is not None else {}
        harness.set_config("generation_kwargs", given | draws, update=True)
    if task.repeats > 1 and not (generates and harness.config.generation_kwargs.get("do_sample")):
        raise refuse("task.repeats", task.repeats, "1, or task.temperature above 0", "would give the same answer again")


def _answers(name: str, harness: HarnessTask, repeats: list[list[dict[str, Any]]], task: Task) -> Answers:
    filters = list(dict.fromkeys(sample["filter"] for sample in repeats[0]))
    chosen = filters[0] if task.filter is None else task.filter
    if chosen not in filters:
        raise refuse("task.filter", chosen, ", ".join(filters), f"is none of {name}")
    repeats = [sorted((s for s in each if s["filter"] == chosen), key=lambda s: s["doc_id"]) for each in repeats]
    samples = repeats[0]
    metric = _metric(name, samples, task)
    chooses = harness.OUTPUT_TYPE == "multiple_choice"
    choices = [len(harness.doc_to_choice(sample["doc"])) for sample in samples] if chooses else []
    told = "".join(f"{s['doc_hash']} {s['target_hash']}\n" for s in samples)
    return Answers(
        task=name,
        metric=metric,
        filter=chosen,
        version=str(harness.VERSION),
        digest=hashlib.sha256(told.encode()).hexdigest()[:16],
        correct=tuple("".join(str(int(s[metric])) for s in each) for each in repeats),
        group=tuple(int(s["doc"].get("passage", place)) for place, s in enumerate(samples)),
        distance=tuple(int(s["doc"]["distance"]) for s in samples) if "distance" in samples[0]["doc"] else (),
        chance=sum(1 / n for n in choices) / len(choices) if choices else None,
    )


def _metric(name: str, samples: list[dict[str, Any]], task: Task) -> str:
    """The metric that says whether an item is right."""
    possible = [m for m in samples[0]["metrics"] if all(s[m] in (0, 1) for s in samples)]
    if task.metric is None and possible:
        return possible[0]
    if task.metric not in possible:
        accepted = ", ".join(possible) or "another task: none of its metrics is 0 or 1 for each item"
        raise refuse("task.metric", task.metric, accepted, f"does not say right or wrong of the items of {name}")
    return task.metric


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in result.items() if type(value) in (int, float) and value == value}


def _without_data(task: Task, error: Exception) -> str:
    told = " ".join(str(error).split())[:160]
    if task.embedded:
        return f"task.generator={dict(task.generator)} is impossible ({told}); accepted: numbers as in configs/task"
    return (
        f"task={task.name}: the data of {task.harness} cannot be read ({type(error).__name__}: {told}); accepted: a "
        "machine that has them, or reaches huggingface.co, with access granted there to gated ones (hf auth login)"
    )
