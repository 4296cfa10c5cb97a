"""Names of what was overridden: no record carries the name of a model or of a timing that it is not.

A model whose geometry differs from the file of its name becomes ``nemotron_3_nano_4b+heads=104``, a timing likewise
``gpu+rounds=10``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.options import shown

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BESIDE_TIMING = ("name", "replicates", "timeout_s", "phase_rounds")
"""Fields of a timing that change no sample of a whole cycle."""


def with_model_named(config: dict[str, Any]) -> dict[str, Any]:
    """The plain config with its model named after what was changed of its family and geometry."""
    model = config.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("ssm"), dict):
        return config
    if (file := _file("model", str(model.get("name")))) is None:
        return config
    published, now = ({"family": data.get("family"), **data.get("ssm", {})} for data in (file, model))
    return config | {"model": model | {"name": _named(model["name"], published, now)}}


def with_timing_named(config: dict[str, Any]) -> dict[str, Any]:
    """The plain config with its timing named after the fields in which it differs from the file of its name; also one
    that has been named so before.
    """
    timing = config.get("timing")
    if not isinstance(timing, dict):
        return config
    name = str(timing.get("name")).partition("+")[0]
    if (file := _file("timing", name)) is None:
        return config
    profile, now = ({k: v for k, v in data.items() if k not in BESIDE_TIMING} for data in (file, timing))
    return config | {"timing": timing | {"name": _named(name, profile, now)}}


def _named(name: str, published: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [f"{k}={shown(now.get(k))}" for k in {**published, **now} if now.get(k) != published.get(k)]
    return "+".join([name, *changed])


def is_choice(file: Path) -> bool:
    """Whether a file of a group can be chosen for it. Those of ``configs/precision`` with an ``update`` are the arms of
    experiments that compare precisions; the group's are those of timing experiments.
    """
    return file.parent.name != "precision" or b"\nupdate:" not in file.read_bytes()


@functools.cache
def _file(group: str, name: str) -> Mapping[str, Any] | None:
    """What the file of that name holds; None for a name that has none."""
    file = CONFIGS / group / f"{name}.yaml"
    if not re.fullmatch(r"\w+", name) or not file.exists():
        return None
    data: Any = OmegaConf.to_container(OmegaConf.load(file))
    return data
