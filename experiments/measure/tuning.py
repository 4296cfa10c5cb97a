"""Choose a launch configuration on the device: each candidate is timed like the arm, on cold copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, TypeVar

from experiments.case import Case
from experiments.measure import devices
from experiments.measure.runner import FALLBACK_CACHE_BYTES, copies_of

Candidate = TypeVar("Candidate")
REPEATS = 7


def fastest(
    case: Case, candidates: Iterable[Candidate], prepare: Callable[[Case, int, Candidate], Any]
) -> tuple[Candidate, dict[str, int | str]]:
    """The candidate with the least median time of a step, and that time in nanoseconds for each; a candidate that
    cannot run has its error instead. ``prepare(case, copies, candidate)`` builds the layers. Raises ``RuntimeError``
    if none runs.
    """
    case, device = dataclasses.replace(case, phase="aligned"), devices.of(case)
    copies = copies_of(case, device.describe().get("last_level_cache_bytes") or FALLBACK_CACHE_BYTES)
    told: dict[str, int | str] = {}
    best: tuple[float, Candidate] | None = None
    for candidate in candidates:
        layers = run = None  # those of the last candidate make room first, or this one could fail for want of it
        device.retaken.clear()
        try:
            layers = prepare(case, copies, candidate)
            layers.run_steps()
            run = device.repeated(layers.run_steps)
            run()
            elapsed = median(device.elapsed_ns(run) for _ in range(REPEATS)) / copies
        except Exception as error:  # a launch that the device has no room for is an answer too
            told[str(candidate)] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        told[str(candidate)] = round(elapsed)
        if best is None or elapsed < best[0]:
            best = elapsed, candidate
    if best is None:
        raise RuntimeError(f"no launch configuration runs: {told}")
    return best[1], told
