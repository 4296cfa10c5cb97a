"""Reading one option out of a plain config; every refusal is one line with the option, its value and what is accepted.

Standard library only: a wrong option has to be refused before anything heavy is imported. Each function takes the
config (nested dicts, as composed), the option's dotted name, and what is accepted; each raises ``ConfigError``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

LONGEST_LIST = 260
"""Characters of accepted names that are all listed in a refusal."""
SHOWN_OF_LONG_LIST = 5


class ConfigError(ValueError):
    """A request that cannot be carried out; its text is one line for the person who made it."""


class LineParser(argparse.ArgumentParser):
    """Its refusals are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; accepted: what --help lists\n")


def shown(value: object) -> str:
    """``value`` as it would be written on the command line, on one line."""
    if isinstance(value, str) and value.isprintable() and value.strip() and not _looks_like_another_type(value):
        return value
    try:
        return json.dumps(value)
    except TypeError:
        return repr(value)


def _looks_like_another_type(value: str) -> bool:
    """Whether the text, without quotes, would be read as a number, ``true``, ``null`` or a list."""
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def refuse(option: str, value: object, accepted: str, why: str = "is impossible") -> ConfigError:
    """The error to raise for ``option``; ``why`` completes the sentence ``option=value ...``."""
    return ConfigError(f"{shown(option)}={shown(value)} {why}; accepted: {accepted}")


def listed(names: Sequence[str], near: object = "", where: str = "--help") -> str:
    """The names; of a list that is longer than a person reads some, those most like ``near`` if given, and how many
    others ``where`` tells.
    """
    text = ", ".join(names)
    if len(text) <= LONGEST_LIST:
        return text
    some = names[:SHOWN_OF_LONG_LIST]
    if near:
        some = difflib.get_close_matches(str(near), names, SHOWN_OF_LONG_LIST, cutoff=0)
    return f"{', '.join(some)} or {len(names) - len(some)} others, see {where}"


def get(config: Mapping[str, Any], option: str, accepted: str) -> Any:
    """The value at a dotted name; refuses an absent one."""
    node: Any = config
    walked: list[str] = []
    for part in option.split("."):
        if not isinstance(node, Mapping):
            raise refuse(".".join(walked), node, "a group of options, see --help")
        if part not in node:
            raise ConfigError(f"{option} is missing; accepted: {accepted}")
        walked.append(part)
        node = node[part]
    return node


def only(config: Mapping[str, Any], accepted: Iterable[str], prefix: str = "") -> None:
    """Refuse a key of the group ``prefix`` (``""``: top level) that is not in ``accepted``."""
    group = get(config, prefix, "a group of options") if prefix else config
    if not isinstance(group, Mapping):
        raise refuse(prefix, group, "a group of options, see --help")
    accepted = list(accepted)
    for key, value in group.items():
        if key not in accepted:
            name = f"{prefix}.{key}" if prefix else str(key)
            raise refuse(name, value, listed(accepted, key), "is not an option")


def integer(config: Mapping[str, Any], option: str, low: int, high: int | None = None, why: str = "") -> int:
    """An integer of at least ``low`` and at most ``high``; ``why`` gives the reason for the bounds."""
    accepted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    accepted += f" ({why})" if why else ""
    value = get(config, option, accepted)
    _refuse_text(option, value, accepted)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise refuse(option, value, accepted)
    return value


def number(
    config: Mapping[str, Any], option: str, above: float, high: float | None = None, equal: bool = False, why: str = ""
) -> float:
    """A finite number above ``above`` (or ``equal`` to it) and at most ``high``."""
    accepted = f"a number {'of at least' if equal else 'above'} {above:g}"
    accepted += "" if high is None else f" and at most {high:g}"
    accepted += f" ({why})" if why else ""
    value = get(config, option, accepted)
    _refuse_text(option, value, accepted)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise refuse(option, value, accepted)
    if value < above or (value == above and not equal) or (high is not None and value > high):
        raise refuse(option, value, accepted)
    return float(value)


def _refuse_text(option: str, value: object, accepted: str) -> None:
    if isinstance(value, str):
        raise refuse(option, value, accepted, "is text")


def choice(config: Mapping[str, Any], option: str, accepted: Collection[str]) -> str:
    """One of the words in ``accepted``."""
    value = get(config, option, listed([*accepted]))
    if not isinstance(value, str) or value not in accepted:
        raise refuse(option, value, listed([*accepted], value), "is unknown")
    return value


def flag(config: Mapping[str, Any], option: str) -> bool:
    """``true`` or ``false``."""
    value = get(config, option, "true, false")
    if not isinstance(value, bool):
        raise refuse(option, value, "true, false")
    return value


def text(config: Mapping[str, Any], option: str, accepted: str) -> str:
    """A string that is not blank; ``accepted`` describes it."""
    value = get(config, option, accepted)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise refuse(option, value, accepted)
    return value
