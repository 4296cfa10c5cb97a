"""The case of the accuracy experiment: a model, a task with all its settings, and how the engine runs them.

Needs neither torch nor lm-eval, so that a wrong option is refused before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.case import (
    DEVICES,
    INPUT_FORMATS,
    batch_size_from_config,
    check_run_options,
    interval_length_from_config,
    threads_from_config,
)
from experiments.measure import nvidia
from experiments.measure.sources import ROOT
from experiments.options import ConfigError, choice, flag, get, integer, listed, number, only, refuse, text
from experiments.precisions import named, names
from experiments.weights import refuse_incomplete, weights_folder
from replayssm.arms import ARMS

OPTIONS = (
    *("experiment", "model", "task", "tracker", "arms", "engine", "inputs", "interval_length", "batch_size"),
    *("device", "threads", "seed", "dry_run", "repeat", "records"),
)
TASK_OPTIONS = (
    *("name", "harness", "embedded", "generator", "limit", "few_shot", "repeats", "chat_template", "thinking"),
    *("system", "prefill", "max_gen_toks", "temperature", "top_p", "filter", "metric"),
)
PACKAGES = ("lm_eval", "datasets", "tokenizers")
DAMAGED = "damaged"
"""The control among the arms; the others are names of `experiments.precisions`."""
HASHED_BYTES = 1 << 26
"""Of each file of weights: a retrained small model is another one, and a large one is not read twice."""


@dataclass(frozen=True)
class Task:
    """What is asked, and how; None leaves a setting to the task's own file.

    ``name``: of the file in configs/task. ``harness``: lm-eval's name of the task, ``embedded`` if it is one of ours,
    whose items ``generator`` describes. ``limit``: first so many items. ``repeats``: answers to each item, each with
    random numbers of its own. ``thinking``: given to the chat template as enable_thinking; of a thinking model's answer
    what follows ``</think>`` is judged. ``prefill``: tokens of a prompt that are read at once, the others being decoded
    one by one; None: all but the last. ``filter``, ``metric``: which of lm-eval's says whether an item is right; None:
    the first of the task's that can.
    """

    name: str
    harness: str
    embedded: bool
    generator: tuple[tuple[str, int], ...] = ()
    limit: int | None = None
    few_shot: int | None = None
    repeats: int = 1
    chat_template: bool = False
    thinking: bool | None = None
    system: str | None = None
    prefill: int | None = None
    max_gen_toks: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    filter: str | None = None
    metric: str | None = None


@dataclass(frozen=True)
class AccuracyCase:
    """``engine``: the engine's arm that steps the states, `replay/torch` for every precision. ``inputs``: format of
    weights and activations. The folder ``path``, relative to the checkout where it lies in it, is told by
    ``weights_digest``; ``batch_size`` moves rounding only. Neither is part of the hash.
    """

    model: str
    path: str
    weights_digest: str
    task: Task
    engine: str
    inputs: str
    interval_length: int
    batch_size: int
    device: str
    threads: int
    seed: int
    experiment: str = "accuracy"


def case_hash(case: AccuracyCase) -> str:
    """16 hex digits that identify the case."""
    data = dataclasses.asdict(case)
    for name in ("path", "batch_size", "threads"):
        del data[name]
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def case_from_config(config: Mapping[str, Any]) -> AccuracyCase:
    """Check the whole config, arms, packages and run options too, and build the case. Raises ``ConfigError``."""
    only(config, OPTIONS)
    choice(config, "experiment", ["accuracy"])
    folder = _folder(config)
    task = _task(config)
    arms_from_config(config)
    if task.chat_template and _chat_template(folder) is None:
        raise refuse("task.chat_template", True, "false", f"needs a chat template, which {folder} lacks")
    case = AccuracyCase(
        model=folder.name,
        path=str(folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder),
        weights_digest=digest(folder),
        task=task,
        engine=choice(config, "engine", ARMS),
        inputs=choice(config, "inputs", INPUT_FORMATS),
        interval_length=interval_length_from_config(config),
        batch_size=batch_size_from_config(config),
        device=choice(config, "device", DEVICES),
        threads=threads_from_config(config),
        seed=integer(config, "seed", 0, 2**63 - 1),
    )
    check_run_options(config)
    if not config["dry_run"]:
        nvidia.refuse_without(case.device)
        _refuse_without_packages()
    return case


def arms_from_config(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The arms to run, in the order given; none twice."""
    accepted = f"a list of {listed([DAMAGED, *names()], where='configs/precision')}"
    arms = get(config, "arms", accepted)
    if not isinstance(arms, list) or not arms:
        raise refuse("arms", arms, f"{accepted}, at least one")
    for arm in arms:
        if arm != DAMAGED:
            named(arm)
        if arms.count(arm) > 1:
            raise refuse("arms", arm, "each arm once", "is repeated")
    return tuple(arms)


def digest(folder: Path) -> str:
    """16 hex digits over configuration and tokenizer, and size and first 64 MiB of each file of weights."""
    found = hashlib.sha256()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for file in sorted([*(folder / name for name in names), *folder.glob("*.safetensors")]):
        if file.is_file():
            with open(file, "rb") as opened:
                found.update(f"{file.name} {file.stat().st_size} ".encode() + opened.read(HASHED_BYTES))
    return found.hexdigest()[:16]


def _folder(config: Mapping[str, Any]) -> Path:
    folder = weights_folder(config)
    refuse_incomplete("model.path", config["model"]["path"], folder, "config.json", "tokenizer.json")
    return folder


def _task(config: Mapping[str, Any]) -> Task:
    only(config, TASK_OPTIONS, "task")
    generator = get(config, "task.generator", "a group of numbers")
    if not isinstance(generator, Mapping):
        raise refuse("task.generator", generator, "a group of numbers")

    def optional(read: Any, option: str, *bounds: Any, **more: Any) -> Any:
        return (
            None if get(config, f"task.{option}", "null") is None else read(config, f"task.{option}", *bounds, **more)
        )

    task = Task(
        name=text(config, "task.name", "a name"),
        harness=text(config, "task.harness", "the name of one of lm-eval's tasks"),
        embedded=flag(config, "task.embedded"),
        generator=tuple((name, integer(config, f"task.generator.{name}", 0, 10**6)) for name in sorted(generator)),
        limit=optional(integer, "limit", 1, 10**9),
        few_shot=optional(integer, "few_shot", 0, 1000),
        repeats=integer(config, "task.repeats", 1, 1000),
        chat_template=flag(config, "task.chat_template"),
        thinking=optional(flag, "thinking"),
        system=optional(text, "system", "null, or a text"),
        prefill=optional(integer, "prefill", 0, 1 << 20),
        max_gen_toks=optional(integer, "max_gen_toks", 1, 1 << 20),
        temperature=optional(number, "temperature", 0, equal=True),
        top_p=optional(number, "top_p", 0, 1.0),
        filter=optional(text, "filter", "null, or the name of one of the task's filters"),
        metric=optional(text, "metric", "null, or the name of one of the task's metrics"),
    )
    if not task.chat_template and (task.thinking is not None or task.system is not None):
        raise ConfigError(
            "task.thinking and task.system are given to a chat template; accepted: null, or task.chat_template=true"
        )
    return task


def _refuse_without_packages() -> None:
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f"accuracy needs {', '.join(lacking)}; accepted: pip install -e '.[eval]', then this again")


def _chat_template(folder: Path) -> str | None:
    from experiments.chat import template_of

    return template_of(folder)
