"""Precisions by their names in ``configs/precision``: the arms of experiments that compare precisions with one another.

    named("dual_fp32_nvfp4")      # at the experiment's interval length
    named("dual_fp32_nvfp4@4")    # at an interval length of 4
    named("shared_nvfp4@1")       # the stored recurrence with a state in NVFP4

Files that hold ``state`` and ``inputs`` are of the timing experiments and are no arms.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from experiments.names import CONFIGS, is_choice
from experiments.options import ConfigError, listed, refuse
from replayssm.geometry import MAX_INTERVAL_LENGTH
from replayssm.precision import Precision


@dataclass(frozen=True)
class PrecisionArm:
    """A precision and the interval length at which it runs; ``name`` is what was asked for."""

    name: str
    precision: Precision
    interval_length: int


@functools.cache
def names() -> tuple[str, ...]:
    """All precisions that are arms, in alphabetical order."""
    files = sorted((CONFIGS / "precision").glob("*.yaml"))
    return tuple(file.stem for file in files if not is_choice(file))


@functools.cache
def _read(name: str) -> Precision:
    values: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / "precision" / f"{name}.yaml"))
    try:
        return Precision(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"configs/precision/{name}.yaml: {error}") from None


def named(arm: str, interval_length: int = 16) -> PrecisionArm:
    """The arm of that name. Raises ``ConfigError``, one line, on one that does not exist."""
    name, at, length = str(arm).partition("@")
    if name not in names():
        known = listed(names(), name, "configs/precision")
        raise refuse("arms", arm, f"{known}; or one with @L, its interval length", "has no such precision")
    if at and not (length.isdecimal() and 1 <= int(length) <= MAX_INTERVAL_LENGTH):
        raise refuse("arms", arm, f"{name}@L with L from 1 to {MAX_INTERVAL_LENGTH}")
    return PrecisionArm(str(arm), _read(name), int(length) if at else interval_length)
