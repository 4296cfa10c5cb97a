"""Options of a ``config.json``: each is read once, and what it cannot be is said in one line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class ModelError(ValueError):
    """A folder, configuration or tensor that is not what the model needs; the message is one line."""


class Options:
    """A mapping read from ``source``; every reader raises `ModelError` on a value that is absent or of another kind.

    An option given as null counts as absent. ``default`` is what the published configuration class assumes.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer under the first of ``names`` that is present: spellings of one option."""
        name = next((name for name in names if self.get(name) is not None), names[0])
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(name, value, "an integer of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, bool):
            raise self.refusal(name, value, "true or false")
        return value

    def section(self, name: str) -> Options:
        """The mapping under ``name``; absent is empty."""
        value = {} if self.get(name) is None else self.get(name)
        if not isinstance(value, Mapping):
            raise self.refusal(name, value, "a mapping")
        return Options(value, f"{self.source}, {name}")

    def only(self, name: str, accepted: Any) -> None:
        """Refuse a present option whose value this implementation does not have."""
        if self.get(name) is not None and self.get(name) != accepted:
            raise self.refusal(name, self.get(name), repr(accepted))

    def names(self, name: str, accepted: Collection[str]) -> tuple[str, ...]:
        """A list of names of which each is accepted."""
        value = self.get(name)
        known = isinstance(value, list | tuple) and all(isinstance(item, str) and item in accepted for item in value)
        if not value or not known:
            raise self.refusal(name, value, f"a list of {', '.join(accepted)}")
        return tuple(value)

    def divisor(self, name: str, value: int, of: int) -> int:
        """``value`` of the option ``name``, where it divides ``of``."""
        if of % value:
            raise self.refusal(name, value, f"a divisor of {of}")
        return value

    def refusal(self, name: str, value: Any, accepted: str) -> ModelError:
        what = f"{name} is missing" if value is None else f"{name}={value!r} is unsupported"
        return ModelError(f"{self.source}: {what}; accepted: {accepted}")
