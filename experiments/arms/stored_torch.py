"""``stored/torch``: the stored recurrence in plain torch, in place; what someone without our kernels would write."""

from __future__ import annotations

from typing import Any

from experiments.case import Case
from experiments.measure.layers import StoredLayers
from replayssm.kernels.torch import stored_step
from replayssm.traffic import Traffic, stored


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None


def prepare(case: Case, copies: int) -> StoredLayers:
    return StoredLayers(case, copies, stored_step)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return {"backend": "torch", "chosen": "nothing to choose"}


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size)
