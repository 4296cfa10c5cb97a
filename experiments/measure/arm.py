"""An arm of a group while it runs."""

from __future__ import annotations

from typing import Any

from experiments.measure import devices
from experiments.measure.record import Correctness
from replayssm.traffic import Traffic


class Arm:
    """One arm of a running group: its layers, and what became of it. ``graph`` is what timing replays on a GPU."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status, self.message = "ok", ""
        self.layers: Any = None
        self.graph: devices.Run | None = None
        self.module: Any = None
        self.config: dict[str, Any] = {}
        self.traffic: Traffic | None = None
        self.correctness: list[Correctness] = []
        self.memory_bytes: int | None = None
        self.cycles = 0
        self.phases_ns: tuple[tuple[int, ...], ...] = ()
        self.phases_fault = ""

    def fail(self, status: str, message: str) -> None:
        self.status, self.message, self.layers, self.graph = status, " ".join(message.split()), None, None

    def run(self, cycles: int) -> None:
        cycle = self.graph or self.layers.cycle
        for _ in range(cycles):
            cycle()
        self.cycles += cycles
