"""``stored/flashinfer``: FlashInfer's Mamba-2 decode kernel, with the algorithm that it chooses."""

from __future__ import annotations

from typing import Any

from experiments.case import Case
from experiments.measure.layers import StoredLayers
from replayssm.peers import flashinfer
from replayssm.traffic import Traffic, stored

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return flashinfer.unsupported(case.geometry)


def prepare(case: Case, copies: int) -> StoredLayers:
    return StoredLayers(case, copies, flashinfer.stored_step())


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    told = {"backend": "cuda", "chosen": "by FlashInfer", "kernel": "selective_state_update"}
    return told | flashinfer.PEER.told()


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size)
