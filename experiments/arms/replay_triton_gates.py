"""``replay/triton-gates``: ``replay/triton`` with dt, or g and beta, computed in the kernel from raw projections.

So is every kernel that computes them itself compared with one that does the same work.
"""

from __future__ import annotations

from typing import Any

from experiments.arms import replay_triton
from experiments.arms.replay_triton import traffic, unsupported
from experiments.case import Case
from experiments.measure.gated import gated
from experiments.measure.layers import ReplayLayers

__all__ = ["describe", "prepare", "traffic", "unsupported"]

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def prepare(case: Case, copies: int) -> ReplayLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.commit import commit
    from replayssm.kernels.triton.families import KERNELS

    return ReplayLayers(case, copies, gated(KERNELS[case.geometry.family].replay_step), commit)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return replay_triton.describe(case) | {"gates": "in the kernel"}
