"""The arms of the accuracy experiment: what the recurrent states are held in, the same engine around all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.accuracy_case import DAMAGED
from experiments.precisions import PrecisionArm, named
from replayssm.engine import Engine, new_cache
from replayssm.models import Decoder, ModelCache, States


@dataclass(frozen=True)
class Arm:
    """An arm on a model: a name of `experiments.precisions`, or the control, float32 states that forget everything at
    the end of the prompt. ``seed`` is of stochastic rounding."""

    name: str
    model: Decoder
    engine: str
    interval_length: int
    seed: int

    @property
    def damaged(self) -> bool:
        return self.name == DAMAGED

    @property
    def precision(self) -> PrecisionArm:
        return named("shared_fp32" if self.damaged else self.name, self.interval_length)

    @property
    def unsupported(self) -> str:
        """Why the model's layers have no such precision; empty where they have."""
        try:
            self.precision.precision.refuse_for(self.model.geometry)
        except ValueError as error:
            return str(error)
        return ""

    def new_cache(self, slots: int, capacity: int) -> ModelCache:
        """An empty cache of the arm's formats. Raises `ModelError` where the engine has no such arm."""
        chosen = self.precision
        return new_cache(
            self.model,
            self.engine,
            slots=slots,
            capacity=capacity,
            interval_length=chosen.interval_length,
            precision=chosen.precision,
            seed=self.seed,
        )

    def new_engine(self, slots: int, capacity: int) -> Engine:
        """As `new_cache`, for text that the model makes itself."""
        chosen = self.precision
        engine = Engine(
            self.model,
            self.engine,
            slots=slots,
            capacity=capacity,
            interval_length=chosen.interval_length,
            precision=chosen.precision,
            rounding_seed=self.seed,
        )
        if self.damaged:
            engine.cache.states = Forgetting(engine.cache.states)  # type: ignore[assignment]
        return engine

    def describe(self) -> dict[str, Any]:
        """For the record."""
        chosen = self.precision
        about = {"engine": self.engine, "interval_length": chosen.interval_length, "damaged": self.damaged}
        return about | asdict(chosen.precision)


class Forgetting:
    """States that a prompt leaves empty."""

    def __init__(self, states: States) -> None:
        self._states = states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._states, name)

    def load(self, slots: Sequence[int], states: Tensor) -> None:
        self._states.load(slots, torch.zeros_like(states))
