"""One factory for synthetic records of kernels that verify a window, beside those that keep snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from records import COPIES, GPU, READ, RMW, case, check, group

from analysis.speculative_rules import UNCHANGED
from experiments.measure.record import Comparison, Record

ARMS = {"snapshots/triton": 1.0, "oracle/triton": 0.4, "verify/triton": 0.2}
"""Writing one state instead of four gains 2.5, the rest 2, where its bytes alone would give 1.6."""
STATES = {"snapshots": 4.0, "oracle": 1.0, "verify": 0.2}
"""That a step writes for one that it reads; replay at L = 16, window 4, 3 accepted, flushes at every fifth."""
FLOORS = {"snapshots": 5.0, "oracle": 2.0, "verify": 1.25}


def windows(
    model: str = "qwen3_5_122b",
    arms: Mapping[str, float] = ARMS,
    *,
    changed: float = 0,
    heads: int = 1,
    processes: int = 3,
    fields: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[list[Record]]:
    """A run on a GPU; ``changed`` elements of checkpoints between flushes."""
    told = {"experiment": "window", "window": 4, "accepted": 3, "device": "cuda", "threads": 0} | dict(fields or {})
    of = case(model, told.pop("batch_size", 256), **told)
    looked_at = Comparison(UNCHANGED, changed, 0.0)
    blocks = [check(moment) for moment in ("before", "after")]
    seen = tuple(dataclasses.replace(b, comparisons=(*b.comparisons, looked_at)) for b in blocks)
    groups = []
    for n in range(processes):
        more = {"layer_steps_per_sample": 5 * COPIES, "aa_arm": "snapshots/triton", "device": dict(GPU)} | options
        made = group(of, arms=arms, replicate=n, seed=n, experiment="window", **more)
        groups.append([_of_a_window(r, seen, heads) for r in made])
    return groups


def _of_a_window(record: Record, seen: Any, heads: int) -> Record:
    kind, read = record.arm.split("/")[0], 1e9
    traffic = {"state_bytes_read": read, "state_bytes_written": STATES[kind] * read, "ring_bytes_read": 0.0}
    traffic |= {"ring_bytes_written": 0.0, "floor_ns": FLOORS[kind] * read / RMW, "read_bytes": READ, "flops": 1.0}
    found: dict[str, Any] = {"traffic": traffic} if record.status == "ok" else {}
    if kind == "verify":
        found |= {"correctness": seen, "arm_config": {"heads": heads}}
    return dataclasses.replace(record, **found)
