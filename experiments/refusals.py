"""The lines for what Hydra and OmegaConf refuse: the option, its value and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf._utils import yaml  # the PyYAML that it reads files with, which is no requirement of ours
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from experiments.help_page import primary_configs
from experiments.names import CONFIGS, is_choice
from experiments.options import listed, shown


def describe(error: Exception, overrides: Sequence[Override], folders: Sequence[Path] = (CONFIGS,)) -> str:
    """One line for an error of Hydra or OmegaConf: the option, its value and what is accepted."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    written = next((str(o.input_line) for o in overrides if o.key_or_group == key), key)
    if isinstance(error, OverrideParseException):
        group, _, text = str(error.override).partition("=")
        if group and (CONFIGS / group).is_dir():
            return unknown_choice(group, shown(text), folders)
        return f"{shown(error.override)} cannot be parsed; accepted: option=value, option=[a,b], or option=a,b with -m"
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if error.options is None:
            group, choices = "--config-name", primary_configs(CONFIGS)
        else:
            files = [folder / group / f"{choice}.yaml" for folder in folders for choice in error.options]
            choices = sorted({*error.options} - {f.stem for f in files if f.exists() and not is_choice(f)})
        return f"{group}={shown(name)} is unknown; accepted: {listed(choices, name)}"
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} is missing; accepted: {key}=VALUE"
    if isinstance(cause, InterpolationResolutionError):
        return f"{written} cannot be resolved: {_first_line(cause)}; accepted: a value, or the name of another option"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        known = sorted(str(key) for key in cause.parent_node if key != "hydra") or ["what --help lists"]
        return f"{written} is not an option; accepted: {listed(known, written)}"
    message = _first_line(cause) if cause is not error else " ".join(str(error).split())
    culprit = next((str(o.input_line) for o in overrides if o.key_or_group in message), written)
    message = f"{culprit} cannot be composed: {message}" if culprit else message
    return f"{message}; accepted: the groups and options of --help"


def _first_line(error: Exception) -> str:
    """OmegaConf adds lines about its own objects."""
    return str(error).partition("\n")[0]


def unknown_choice(group: str, written: str, folders: Sequence[Path]) -> str:
    """The line for a choice that a group does not have."""
    return f"{group}={written} is unknown; accepted: one of {choices_of(group, written, folders)}"


def choices_of(group: str, written: str, folders: Sequence[Path]) -> str:
    """What can be chosen for a group, with what was ``written`` near."""
    files = [f for folder in folders for f in (folder / group).glob("*.yaml")]
    return listed(sorted({f.stem for f in files if is_choice(f)}), written)


def unreadable(error: yaml.YAMLError | UnicodeDecodeError, folders: Sequence[Path]) -> str:
    """The line for a config file that is no YAML; PyYAML names the file, a decoder does not."""
    mark = getattr(error, "problem_mark", None)
    name = mark.name if mark else getattr(error, "name", None)
    if isinstance(error, UnicodeDecodeError):
        name = next((f for folder in folders for f in folder.rglob("*.yaml") if f.read_bytes() == error.object), None)
    line = f", line {mark.line + 1}," if mark else ""
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"{name or 'a config file'}{line} cannot be read: {problem}; accepted: YAML, as in configs/"
