"""Interleaved timing: every participant once a round, in a balanced random order. Returns samples; others summarise.

Participants are callables that run whole flush cycles or one pass of a bandwidth kernel. A round's order is a random
permutation, the next round's its reverse, so that nobody is always early or always behind the same neighbour. The
warm-up runs whole rounds at full load until the last three agree, or until its limit.

``elapsed_ns`` runs a participant and tells how long it took: with the host's clock, or the device's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Participants = dict[str, Any]
Timer = Callable[[Any], int]


class RaisedError(Exception):
    """The participant of that name raised while it was timed; the cause is its error."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def host_elapsed_ns(run: Callable[[], object]) -> int:
    """Nanoseconds of the host's clock that ``run`` takes."""
    start = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - start


@dataclass
class Samples:
    """``elapsed_ns[name]`` one integer a round; ``order`` the participants of each round as they ran."""

    elapsed_ns: dict[str, list[int]] = field(default_factory=dict)
    order: list[list[str]] = field(default_factory=list)


@dataclass
class WarmUp:
    """How a warm-up went; ``settled`` is False when it ended at its limit."""

    rounds: int
    elapsed_s: float
    settled: bool
    last_ns: dict[str, int]
    """Elapsed time of each participant in the last round."""


def warm_up(
    participants: Participants, limit_s: float, tolerance: float, elapsed_ns: Timer = host_elapsed_ns
) -> WarmUp:
    """Run rounds until the totals of three in a row lie within ``tolerance`` of their mean, at most ``limit_s``."""
    start = time.perf_counter_ns()
    totals: list[int] = []
    while True:
        last_ns = {name: _timed(name, run, elapsed_ns) for name, run in participants.items()}
        totals.append(sum(last_ns.values()))
        last = totals[-3:]
        settled = len(last) == 3 and (max(last) - min(last)) * 3 <= tolerance * sum(last)
        elapsed_s = (time.perf_counter_ns() - start) / 1e9
        if settled or elapsed_s >= limit_s:
            return WarmUp(len(totals), elapsed_s, settled, last_ns)


def interleave(
    participants: Participants,
    rounds: int,
    seed: int,
    elapsed_ns: Timer = host_elapsed_ns,
    after_round: Callable[[], object] = lambda: None,
) -> Samples:
    """Time every participant once in each of ``rounds`` rounds."""
    samples = Samples({name: [] for name in participants})
    shuffled = random.Random(seed)
    order: list[str] = []
    for number in range(rounds):
        order = order[::-1] if number % 2 else shuffled.sample(list(participants), len(participants))
        for name in order:
            samples.elapsed_ns[name].append(_timed(name, participants[name], elapsed_ns))
        samples.order.append(order)
        after_round()
    return samples


def _timed(name: str, participant: Any, elapsed_ns: Timer) -> int:
    try:
        return elapsed_ns(participant)
    except Exception as error:
        raise RaisedError(name) from error
