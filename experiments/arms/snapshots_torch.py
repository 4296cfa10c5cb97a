"""``snapshots/torch``: a state behind every token of a window, in plain torch; what replay rolls back without."""

from __future__ import annotations

from typing import Any

from experiments.case import WindowCase
from experiments.measure.window_layers import SnapshotsLayers
from replayssm.kernels.torch.snapshots import snapshots_step
from replayssm.traffic import Traffic, stored


def unsupported(case: WindowCase) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None


def prepare(case: WindowCase, copies: int) -> SnapshotsLayers:
    return SnapshotsLayers(case, copies, snapshots_step)


def describe(case: WindowCase) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return {"backend": "torch", "chosen": "nothing to choose"}


def traffic(case: WindowCase) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size, case.window, case.accepted)
