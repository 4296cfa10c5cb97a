"""``stored/mamba-ssm``: mamba-ssm's decode kernel, as it launches it."""

from __future__ import annotations

from typing import Any

from experiments.case import Case
from experiments.measure.layers import StoredLayers
from replayssm.peers import mamba_ssm
from replayssm.traffic import Traffic, stored

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return mamba_ssm.unsupported(case.geometry.family)


def prepare(case: Case, copies: int) -> StoredLayers:
    return StoredLayers(case, copies, mamba_ssm.stored_step())


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    told = {"backend": "triton", "chosen": "by mamba-ssm", "kernel": "selective_state_update"}
    return told | mamba_ssm.PEER.told()


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size)
