"""The physics of one state-space layer's decode step, before any timing: bytes, FLOPs and the floor of its time.

    python -m experiments.traffic model=nemotron_3_nano_4b batch_size=256
    python -m experiments.traffic model=qwen3_5_4b bandwidth_gb_s=4590 read_modify_write_gb_s=3830
    python -m experiments.traffic model=nemotron_3_super_120b precision.state=fp16 read_copy=nvfp4
    python -m experiments.traffic model=qwen3_5_122b window=4 accepted=3

Prints bytes and FLOPs per step of the stored recurrence and of replay, the ideal speedup by interval length, the best
interval length and, for measured bandwidths, the floor in microseconds. Nothing is timed and no file is written; the
formulas are in ``replayssm/traffic.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.app import run
from experiments.case import INPUT_FORMATS, batch_size_from_config, interval_length_from_config, model_from_config
from experiments.options import ConfigError, choice, flag, get, integer, number, only, refuse
from replayssm import traffic
from replayssm.geometry import Geometry
from replayssm.layout import FORMATS, Ring
from replayssm.traffic import Traffic

OPTIONS = (
    *("model", "precision", "batch_size", "interval_length", "read_copy", "ring", "window", "accepted"),
    *("bandwidth_gb_s", "read_modify_write_gb_s"),
)


@dataclasses.dataclass(frozen=True)
class Question:
    """What the card is about; see ``configs/traffic.yaml`` for the fields."""

    model: str
    geometry: Geometry
    batch_size: int
    interval_length: int
    state: str
    read_copy: str | None
    ring: Ring
    window: int | None
    accepted: float
    bandwidth_gb_s: float | None
    read_modify_write_gb_s: float | None

    def replay(self, interval_length: int) -> Traffic:
        """The mean step at an interval length, whole batch."""
        cycle = traffic.replay(
            self.geometry,
            interval_length,
            self.state,
            self.read_copy,
            self.ring,
            self.batch_size,
            self.window,
            self.accepted,
        )
        return dataclasses.replace(cycle.per_step(), steps=cycle.steps)

    def stored(self, state: str | None = None) -> Traffic:
        """The step of the stored recurrence in a state format (default: the update copy's), whole batch."""
        return traffic.stored(self.geometry, state or self.state, self.batch_size, self.window, self.accepted)


def question_from_config(config: dict[str, Any]) -> Question:
    """Raises ``ConfigError``, one line, on a config that has no answer."""
    only(config, OPTIONS)
    only(config, ["state", "inputs"], "precision")
    only(config, ["d", "key_norm", "raw"], "ring")
    model, geometry = model_from_config(config)
    window = integer(config, "window", 1, 64) if get(config, "window", "null or 1 to 64") is not None else None
    given = get(config, "accepted", "null or a number")
    if window is None and given is not None:
        raise ConfigError(f"accepted={given} needs a window; accepted: null, or window=T with T of at least {given}")
    if window is not None and given is None:
        raise ConfigError(f"accepted=null with window={window}; accepted: tokens accepted a step, 1 to {window}")
    read, in_place = _bandwidth(config, "bandwidth_gb_s"), _bandwidth(config, "read_modify_write_gb_s")
    if read is None and in_place is not None:
        raise refuse("read_modify_write_gb_s", in_place, "bandwidth_gb_s=... with it", "needs bandwidth_gb_s too")
    return Question(
        model=model,
        geometry=geometry,
        batch_size=batch_size_from_config(config),
        interval_length=interval_length_from_config(config),
        state=choice(config, "precision.state", list(FORMATS)),
        read_copy=choice(config, "read_copy", list(FORMATS)) if config.get("read_copy") is not None else None,
        ring=Ring(
            inputs=choice(config, "precision.inputs", INPUT_FORMATS),
            d=choice(config, "ring.d", INPUT_FORMATS),
            key_norm=flag(config, "ring.key_norm"),
            raw=flag(config, "ring.raw"),
        ),
        window=window,
        accepted=1 if window is None else number(config, "accepted", 1, window, equal=True),
        bandwidth_gb_s=read,
        read_modify_write_gb_s=in_place,
    )


def _bandwidth(config: dict[str, Any], option: str) -> float | None:
    if get(config, option, "null or a number") is None:
        return None
    return number(config, option, 1e-3, 1e7, equal=True, why="GB/s")


def main(config: dict[str, Any]) -> None:
    from rich.console import Console

    from experiments.traffic_card import card

    Console(highlight=False, soft_wrap=True).print(card(question_from_config(config)))


if __name__ == "__main__":
    run("traffic", main, question_from_config)
