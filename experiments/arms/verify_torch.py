"""``verify/torch``: replay verifies windows in plain torch, from the forms in `replayssm.recurrence`."""

from __future__ import annotations

from typing import Any

from experiments.case import WindowCase
from experiments.measure.window_layers import VerifyLayers
from replayssm.kernels.torch import verify_step
from replayssm.traffic import Ring, Traffic, replay


def unsupported(case: WindowCase) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None


def prepare(case: WindowCase, copies: int) -> VerifyLayers:
    return VerifyLayers(case, copies, verify_step)


def describe(case: WindowCase) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return {"backend": "torch", "fold": "d", "chosen": "nothing to choose"}


def traffic(case: WindowCase) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle."""
    ring, windows = Ring(inputs=case.precision.inputs), {"window": case.window, "accepted": case.accepted}
    state, rows = case.precision.state, case.batch_size
    return replay(case.geometry, case.interval_length, state, ring=ring, rows=rows, **windows).per_step()
