"""``stored/triton-gates``: ``stored/triton`` with dt, or g and beta, computed in the kernel from raw projections."""

from __future__ import annotations

from typing import Any

from experiments.arms import stored_triton
from experiments.arms.stored_triton import traffic, unsupported
from experiments.case import Case
from experiments.measure.gated import gated
from experiments.measure.layers import StoredLayers

__all__ = ["describe", "prepare", "traffic", "unsupported"]

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def prepare(case: Case, copies: int) -> StoredLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.families import KERNELS

    return StoredLayers(case, copies, gated(KERNELS[case.geometry.family].stored_step))


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return stored_triton.describe(case) | {"gates": "in the kernel"}
