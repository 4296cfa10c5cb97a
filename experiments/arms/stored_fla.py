"""``stored/fla``: flash-linear-attention's fused recurrent kernels, as it launches them, in place."""

from __future__ import annotations

from typing import Any

from experiments.case import Case
from experiments.inputs import DTYPES
from experiments.measure.layers import StoredLayers
from replayssm.peers import fla, null_slot_in_front
from replayssm.traffic import Traffic, stored

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return fla.unsupported(case.geometry.family, DTYPES[case.precision.state])


def prepare(case: Case, copies: int) -> StoredLayers:
    return StoredLayers(case, copies, fla.stored_step(case.geometry.family), null_slot_in_front)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    kernel = fla.KERNELS.get(case.geometry.family, (None, None))[1]
    return {"backend": "triton", "chosen": "by flash-linear-attention", "kernel": kernel} | fla.PEER.told()


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size)
