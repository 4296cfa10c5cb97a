"""The case: one fully resolved configuration of a timing experiment, checked before anything heavy is imported.

``case_from_config`` turns a composed config (plain nested dicts) into a frozen ``Case`` or raises ``ConfigError``, one
line that names the option, its value and what is accepted. Standard library only. The arms that run a case are no
part of it: they are checked here against the files of ``experiments/arms``, which are looked at but not imported.

An arm ``a/b-c`` is the file ``experiments/arms/a_b_c.py``. It may declare in module-level literals the devices that it
runs on, ``DEVICES = ("cuda",)``, the state formats that it can hold, ``STATE_FORMATS = ("fp32", "fp16")``, and the
families that it has kernels of, ``FAMILIES = ("gdn",)``; one that declares none runs on cpu, holds fp32 and has all
families. Arms of the kinds `WINDOW_KINDS` are those of a case with a window.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.measure.sources import arm_file
from experiments.options import ConfigError, choice, flag, get, integer, number, only, refuse, text
from experiments.places import recorded, refuse_unwritable
from experiments.tracking.options import tracker_from_config
from replayssm.geometry import FAMILIES, MAX_INTERVAL_LENGTH, Geometry
from replayssm.layout import FORMATS

__all__ = ["Case", "ConfigError", "Precision", "Timing", "arms_from_config", "case_from_config", "case_hash"]

ARMS = Path(__file__).parent / "arms"
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""``quota period`` of the container, or ``max period``."""
MODELS = Path(__file__).parents[1] / "configs" / "model"
DEFAULT_RECORDS = "results/local/records"
"""As in the primary configs. A dry run does not check it: the checkout may be read-only."""
MAX_BATCH_SIZE = 1_000_000

PHASES = ("aligned", "staggered")
INPUT_FORMATS = ("bf16", "fp32")
DEVICES = ("cpu", "cuda")
EXAMPLE_ARMS = {"cpu": "stored/cpu,replay/cpu", "cuda": "stored/triton,replay/triton"}
WINDOW_EXAMPLE_ARMS = {"cpu": "snapshots/cpu,verify/cpu", "cuda": "snapshots/triton,verify/triton"}
EXPERIMENTS = ("kernel",)
OPTIONS = (
    *("experiment", "model", "batch_size", "interval_length", "phase", "precision", "timing", "tracker", "arms"),
    *("device", "threads", "seed", "dry_run", "repeat", "records"),
)
WINDOW_OPTIONS = ("window", "accepted")
"""Those of the kernel experiment alone."""
ABLATIONS = ("oracle/triton", "replay/triton-decay-bf16")
"""Arms that are run only when named."""
WINDOW_KINDS = ("snapshots", "verify", "oracle")
MAX_WINDOW = 16
MODEL_FIELDS = (
    *("name", "hf_id", "hf_id_bf16", "weights", "family", "counts", "ssm", "attention", "mlp", "moe", "mtp"),
    *("hidden_size", "num_blocks", "num_layers", "pattern", "full_attention_interval", "vocab_size"),
    *("tie_word_embeddings", "max_position_embeddings", "vision_tower", "path"),
)
SSM_FIELDS = ("heads", "groups", "head_dim", "state_dim", "conv_kernel", "activation", "gate_lower_bound")
NOT_IN_HASH = ("replicates", "timeout_s")
IN_HASH_IF_SET = ("phase_rounds",)
"""Fields that older cases lack; at 0 they change nothing that is measured."""
DEFAULT_ARMS = "default"


@dataclass(frozen=True)
class Precision:
    """Formats of the stored state and of the layer's inputs and outputs."""

    state: str
    inputs: str


@dataclass(frozen=True)
class Timing:
    """The timing protocol that is asked for; what was done is in the record.

    ``rounds``: times that every arm is timed. ``cycles_per_sample``: whole flush cycles in one sample. ``cold_factor``:
    bytes of rotated tensors over the last-level cache. ``warmup_limit_s``, ``warmup_tolerance``: the warm-up ends when
    three rounds agree within the tolerance, or at the limit. ``replicates``: fresh processes, each with ``timeout_s``.
    ``phase_rounds``: times that a step is timed at each ring length as well; 0: not at all.
    """

    name: str
    rounds: int
    cycles_per_sample: int
    cold_factor: float
    warmup_limit_s: float
    warmup_tolerance: float
    replicates: int
    timeout_s: float
    phase_rounds: int = 0


@dataclass(frozen=True)
class Case:
    """One layer geometry, batch, interval length, precision, phase, seed and protocol. ``threads`` is resolved; it is 0
    on a GPU, where it means nothing.
    """

    experiment: str
    model: str
    geometry: Geometry
    batch_size: int
    interval_length: int
    phase: str
    precision: Precision
    device: str
    threads: int
    seed: int
    timing: Timing

    @property
    def steps_per_cycle(self) -> int:
        """From flush to flush of a row."""
        return self.interval_length


@dataclass(frozen=True)
class WindowCase(Case):
    """A case of speculative decoding: each step verifies ``window`` tokens, of which ``accepted`` are committed."""

    window: int = 1
    accepted: int = 1

    @property
    def steps_per_cycle(self) -> int:
        return len(self.positions)

    @property
    def positions(self) -> list[int]:
        """Committed tokens at the start of each step of a cycle, from the one after a flush to the next flush."""
        last = self.interval_length - self.window
        return list(range(self.accepted, max(last, 0) + self.accepted + 1, self.accepted))


def case_hash(case: Case) -> str:
    """16 hex digits that identify the case; how often it is repeated, and how long it may take, are left out."""
    data = recorded(case)
    unset = [name for name in IN_HASH_IF_SET if not data["timing"][name]]
    data["timing"] = {k: v for k, v in data["timing"].items() if k not in (*NOT_IN_HASH, *unset)}
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def case_from_config(config: Mapping[str, Any]) -> Case:
    """Check the whole config, arms and run options too, and build the case. Raises ``ConfigError``."""
    only(config, (*OPTIONS, *WINDOW_OPTIONS))
    model, geometry = model_from_config(config)
    experiment = choice(config, "experiment", EXPERIMENTS)
    window = _window(config)
    shared = shared_from_config(config)
    if window:
        case: Case = WindowCase("window", model, geometry, **shared, window=window[0], accepted=window[1])
    else:
        case = Case(experiment=experiment, model=model, geometry=geometry, **shared)
    arms_from_config(config)
    check_run_options(config)
    return case


def shared_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a case that every timing experiment has, but for its model."""
    return {
        "batch_size": batch_size_from_config(config),
        "interval_length": interval_length_from_config(config),
        "phase": choice(config, "phase", PHASES),
        "precision": _precision(config),
        "device": choice(config, "device", DEVICES),
        "threads": threads_from_config(config),
        "seed": integer(config, "seed", 0, 2**63 - 1),
        "timing": _timing(config),
    }


def check_run_options(config: Mapping[str, Any]) -> None:
    """Refuse options of the run, which are no part of the case, that cannot be."""
    flag(config, "repeat")
    records = text(config, "records", "a folder")
    if not flag(config, "dry_run") or records != DEFAULT_RECORDS:
        refuse_unwritable(records)
    tracker_from_config(config)  # last, since it may find a package missing


def _window(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Window and accepted tokens; None in standard decoding, where both are null."""
    if config.get("window") is None:
        if config.get("accepted") is not None:
            raise refuse("accepted", config["accepted"], "null, or a window as well, such as window=4")
        return None
    longest = min(MAX_WINDOW, interval_length_from_config(config))
    window = integer(config, "window", 1, longest, "at most 16 tokens, and no longer than the interval; or null")
    if config.get("accepted") is None:
        raise ConfigError(f"window={window} needs accepted, tokens committed a step; accepted: accepted=1 to {window}")
    return window, integer(config, "accepted", 1, window, "tokens that are committed a step, of the window's")


def batch_size_from_config(config: Mapping[str, Any]) -> int:
    """Rows decoded together."""
    return integer(config, "batch_size", 1, MAX_BATCH_SIZE)


def interval_length_from_config(config: Mapping[str, Any]) -> int:
    """L, at most 64: the kernels keep one row's whole ring in fast memory and are built for no more tokens."""
    return integer(config, "interval_length", 1, MAX_INTERVAL_LENGTH, "64 tokens is the kernels' ring limit")


def model_from_config(config: Mapping[str, Any]) -> tuple[str, Geometry]:
    """Name and layer geometry of the group ``model``; refuses a model whose geometry was never published."""
    only(config, MODEL_FIELDS, "model")
    name = text(config, "model.name", "a name")
    known = models_with_geometry()
    if "ssm" not in config["model"] and name not in known:
        raise ConfigError(f"model={name} has no published layer geometry; accepted: {', '.join(known)}")
    group = "the group of numbers heads, groups, head_dim, state_dim"
    if not isinstance(get(config, "model.ssm", group), Mapping):
        raise refuse("model.ssm", get(config, "model.ssm", group), group)
    only(config, SSM_FIELDS, "model.ssm")
    family = choice(config, "model.family", FAMILIES)
    fields = {f: integer(config, f"model.ssm.{f}", 1, 65536) for f in ("heads", "groups", "head_dim", "state_dim")}
    heads, groups = fields["heads"], fields["groups"]
    if heads % groups:
        accepted = f"a multiple of model.ssm.groups={groups}"
        raise refuse("model.ssm.heads", heads, accepted, f"is not divisible by model.ssm.groups={groups}")
    if family == "kda" and heads != groups:
        raise refuse("model.ssm.groups", groups, f"{heads}, since KDA has one key head a value head")
    return name, Geometry(family=family, **fields)


def models_with_geometry() -> list[str]:
    """Names of the model files that hold a layer geometry."""
    return [f.stem for f in sorted(MODELS.glob("*.yaml")) if b"\nssm:" in f.read_bytes()]


def arms_from_config(
    config: Mapping[str, Any], of: Collection[str] | None = None, mixed: bool = False
) -> tuple[str, ...]:
    """The arms to run, in the order given; each exists, none twice, and each runs on ``device``, can hold
    ``precision.state`` and has kernels of the model's family. ``default`` are all such arms but ablations, stored ones
    first. An experiment of whole models names those ``of`` which its engine has, for every family; ``mixed``, one that
    runs those of windows and others together.
    """
    device, state = choice(config, "device", DEVICES), choice(config, "precision.state", list(FORMATS))
    windowed = config.get("window") is not None
    known = known_arms() if of is None else tuple(arm for arm in known_arms() if arm in of)
    known = tuple(arm for arm in known if mixed or of_windows(arm) == windowed)
    family = choice(config, "model.family", FAMILIES) if of is None else None
    here = [arm for arm in known if device in devices(arm) and family in (None, *families(arm))]
    example = "a list of " + (", ".join(here) or "arms, but none runs here")
    arms = get(config, "arms", example)
    if arms == DEFAULT_ARMS:
        fit = [arm for arm in here if state in state_formats(arm) and arm not in ABLATIONS]
        if not fit:
            held = [name for name in FORMATS if any(name in state_formats(arm) for arm in here)]
            raise refuse("precision.state", state, ", ".join(held) or "none", f"is held by no arm of {device=!s}")
        return tuple(sorted(fit, key=lambda arm: (not arm.startswith("stored/"), arm)))
    if not isinstance(arms, list) or not arms:
        some = (WINDOW_EXAMPLE_ARMS if windowed else EXAMPLE_ARMS)[device].split(",")
        if any(arm in known and arm not in here for arm in some):
            some = here[:2]
        such = f"at least one, such as 'arms=[{','.join(some)}]'"
        raise refuse("arms", arms, f"{DEFAULT_ARMS}, or {example}, {such}")
    for arm in arms:
        if not mixed and arm in known_arms() and of_windows(arm) != windowed:
            raise refuse("arms", arm, example, "is for no window" if windowed else "is for a window, such as window=4")
        if not isinstance(arm, str) or arm not in known:
            raise refuse("arms", arm, example, "has no such arm")
        if arms.count(arm) > 1:
            raise refuse("arms", arm, "each arm once", "is repeated")
        if device not in devices(arm):
            raise refuse("arms", arm, example, f"runs on {', '.join(devices(arm))}, not on {device=!s}")
        if arm not in here:
            raise refuse("arms", arm, example, f"has kernels of {', '.join(families(arm))}, not of {family}")
        held = state_formats(arm)
        if state not in held:
            raise refuse("precision.state", state, ", ".join(held), f"cannot be held by arm {arm}")
    return tuple(arms)


def known_arms() -> tuple[str, ...]:
    """Every arm that has a file of lower-case letters, digits and underscores, as ``stored/torch``."""
    return _arms_in(ARMS)


def of_windows(arm: str) -> bool:
    """Whether an arm verifies windows, or decodes one token a step."""
    return arm.partition("/")[0] in WINDOW_KINDS


def state_formats(arm: str) -> tuple[str, ...]:
    """The state formats that an arm's file declares in ``STATE_FORMATS``, read without importing it."""
    return _declared_in(ARMS / arm_file(arm).name, "STATE_FORMATS") or ("fp32",)


def devices(arm: str) -> tuple[str, ...]:
    """The devices that an arm's file declares in ``DEVICES``, read without importing it."""
    return _declared_in(ARMS / arm_file(arm).name, "DEVICES") or ("cpu",)


def families(arm: str) -> tuple[str, ...]:
    """The families that an arm's file declares in ``FAMILIES``, read without importing it."""
    return _declared_in(ARMS / arm_file(arm).name, "FAMILIES") or FAMILIES


def without_kernels(case: Case) -> tuple[str, ...]:
    """Arms of the case's device that ``default`` leaves out, since they have no kernels of its family."""
    windowed = isinstance(case, WindowCase)
    there = [arm for arm in known_arms() if of_windows(arm) == windowed and case.device in devices(arm)]
    return tuple(arm for arm in there if case.geometry.family not in families(arm) and arm not in ABLATIONS)


@functools.cache  # a sweep asks once a case
def _arms_in(folder: Path) -> tuple[str, ...]:
    named = re.compile(r"[a-z0-9]+_[a-z0-9_]+")
    stems = sorted(f.stem.partition("_") for f in folder.glob("*.py") if named.fullmatch(f.stem))
    return tuple(f"{kind}/{backend.replace('_', '-')}" for kind, _, backend in stems)


@functools.cache
def _declared_in(file: Path, name: str) -> tuple[str, ...] | None:
    """The literal tuple that a file assigns to a name at its top level; None if there is none."""
    try:
        for node in ast.parse(file.read_bytes()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return tuple(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, TypeError) as error:  # ValueError, TypeError: it is no literal tuple
        raise ConfigError(
            f"the arm of {file} cannot be read: {error}; accepted: Python, with {name} a tuple of names"
        ) from None
    return None


def cores() -> int:
    """Cores that this process may use: its affinity, less where a container's quota or NUMBA_NUM_THREADS says so."""
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    quota = CPU_QUOTA.read_text().split() if CPU_QUOTA.is_file() else ["max"]
    if quota[0] != "max":
        limits.append(math.ceil(int(quota[0]) / int(quota[1])))
    if os.environ.get("NUMBA_NUM_THREADS", "").isdigit():
        limits.append(int(os.environ["NUMBA_NUM_THREADS"]))
    return max(1, min(limits))


def threads_from_config(config: Mapping[str, Any]) -> int:
    """Threads of CPU arms, all cores for 0; 0 on a GPU."""
    asked = integer(config, "threads", 0, cores(), "0: all cores of this machine")
    if choice(config, "device", DEVICES) == "cuda":
        if asked:
            raise refuse("threads", asked, "0 with device=cuda, since threads are those of CPU arms")
        return 0
    return asked or cores()


def _precision(config: Mapping[str, Any]) -> Precision:
    only(config, [f.name for f in dataclasses.fields(Precision)], "precision")
    return Precision(
        state=choice(config, "precision.state", list(FORMATS)),
        inputs=choice(config, "precision.inputs", INPUT_FORMATS),
    )


def _timing(config: Mapping[str, Any]) -> Timing:
    only(config, [f.name for f in dataclasses.fields(Timing)], "timing")
    return Timing(
        name=text(config, "timing.name", "a name"),
        rounds=integer(config, "timing.rounds", 1, 10_000),
        cycles_per_sample=integer(config, "timing.cycles_per_sample", 1, 1000),
        cold_factor=number(config, "timing.cold_factor", 5, 100, equal=True, why="less leaves the state in the cache"),
        warmup_limit_s=number(config, "timing.warmup_limit_s", 0, 30),
        warmup_tolerance=number(config, "timing.warmup_tolerance", 0, 1),
        replicates=integer(config, "timing.replicates", 1, 1000),
        timeout_s=number(config, "timing.timeout_s", 0, 86400),
        phase_rounds=integer(config, "timing.phase_rounds", 0, 1000, "0: the time at each ring length is not measured"),
    )
