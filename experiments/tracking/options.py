"""The config group ``tracker``; one that is not installed is refused before anything runs. Standard library only."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.options import ConfigError, choice, get, only, refuse, text

TRACKERS = ("none", "wandb")
MODES = ("online", "offline", "disabled")
DEFAULT_PROJECT, DEFAULT_FOLDER = "replayssm", "results/local"
INSTALL = "pip install -e '.[wandb]' -c constraints/cpu.txt"


@dataclass(frozen=True)
class Tracker:
    """Where records are mirrored to. ``folder`` is where wandb keeps its own files, below ``wandb/``."""

    mode: str = "online"
    project: str = DEFAULT_PROJECT
    entity: str | None = None
    folder: str = DEFAULT_FOLDER


def tracker_from_config(config: Mapping[str, Any]) -> Tracker | None:
    """None for ``tracker=none``. Raises ``ConfigError``, also where wandb is asked for and not installed."""
    if choice(config, "tracker.name", TRACKERS) == "none":
        only(config, ["name"], "tracker")
        return None
    only(config, ["name", "mode", "project", "entity", "folder"], "tracker")
    accepted = "a user or team, or null"
    entity = None if get(config, "tracker.entity", accepted) is None else text(config, "tracker.entity", accepted)
    tracker = Tracker(
        mode=choice(config, "tracker.mode", MODES),
        project=text(config, "tracker.project", "a project's name"),
        entity=entity,
        folder=text(config, "tracker.folder", "a folder"),
    )
    if "/" in tracker.project:
        raise refuse("tracker.project", tracker.project, "a name without a slash; tracker.entity is the user or team")
    if not installed("wandb"):
        raise ConfigError(f"tracker=wandb needs wandb, which is not installed; accepted: tracker=none, or {INSTALL}")
    return tracker


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None
