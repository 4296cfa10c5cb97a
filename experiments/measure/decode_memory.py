"""The memory that a case of whole models needs, and which of its arms are left out where it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.case import of_windows
from experiments.decode_case import DecodeCase, model_config
from experiments.inputs import DTYPES
from experiments.measure.session import CHUNK
from experiments.speculative_case import SpeculativeCase
from replayssm.engine import Memory, predict_memory
from replayssm.models import config_from_folder

MEMORY_SHARE = 0.9
"""Of the memory that is free; a case that is predicted to need more is ``oom`` without being tried."""
LEFT_OUT = (("replay",), ("snapshots",), ("replay", "snapshots"))
"""Kinds of arms without which others may fit, tried in this order."""
TRACED_LOGITS = 2
"""What a trace holds of a step's logits beside them, in float32, as a share of what the step is predicted to take."""


def predicted(case: DecodeCase, arms: tuple[str, ...]) -> dict[str, Memory]:
    """What each arm needs; the weights are one and the same. A draft model's are among them, and what it keeps of its
    own counts as memory of the steps that ask it."""
    sizes: dict[str, Any] = {"slots": case.batch_size, "chunk": CHUNK, "prompt_rows": 1}
    sizes |= {"interval_length": case.interval_length, "dtype": DTYPES[case.precision.inputs], "head": case.head}
    config, state_dtype = model_config(case), DTYPES[case.precision.state]
    window = case.window if isinstance(case, SpeculativeCase) else None
    sizes["sampled"] = window is None
    found = {}
    for arm in arms:
        own = window if of_windows(arm) else None
        capacity = case.capacity(own)
        found[arm] = predict_memory(config, arm, state_dtype=state_dtype, window=own, capacity=capacity, **sizes)
    if isinstance(case, SpeculativeCase) and case.draft_weights:
        drafting = config_from_folder(case.draft_weights)
        drafts = predict_memory(drafting, "verify/torch", window=window, capacity=case.capacity(window), **sizes)
        kept = drafts.keys_values + drafts.conv + drafts.states + drafts.steps
        for arm, memory in found.items():
            steps = memory.steps + (kept if of_windows(arm) else 0)
            found[arm] = replace(memory, weights=memory.weights + drafts.weights, steps=steps)
    return found


def needed_bytes(memory: dict[str, Memory]) -> int:
    """Of all arms together, and of the trace of one."""
    shared = max(m.weights for m in memory.values()) + max(m.prompts for m in memory.values())
    traced = TRACED_LOGITS * max(m.steps for m in memory.values())
    return shared + traced + sum(m.keys_values + m.conv + m.states + m.steps for m in memory.values())


def drop(arms: Sequence[Any], case: DecodeCase, memory: dict[str, Memory], room: float, free: int) -> None:
    """What cannot fit together is not tried: all arms, or, with drafts, those without any, or else those that keep
    snapshots, or else both, so that the others are measured."""
    needed = needed_bytes(memory)
    if needed <= room:
        return
    text = f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free; not tried"
    for kinds in LEFT_OUT if isinstance(case, SpeculativeCase) else ():
        left = {name: m for name, m in memory.items() if name.partition("/")[0] not in kinds}
        if left and len(left) < len(memory) and needed_bytes(left) <= room:
            break
    else:
        left = {}
    for arm in arms:
        if arm.name not in left:
            arm.fail("oom", text)
