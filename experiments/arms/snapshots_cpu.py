"""``snapshots/cpu``: a state behind every token of a window of Mamba-2 and GDN, in Numba: the baseline to beat."""

from __future__ import annotations

from typing import Any

from experiments.case import WindowCase
from experiments.measure.window_layers import SnapshotsLayers
from replayssm.kernels.cpu import snapshots
from replayssm.traffic import Traffic, stored

FAMILIES = ("mamba2", "gdn")
"""Those with CPU kernels of windows."""


def unsupported(case: WindowCase) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    family = case.geometry.family
    return None if family in FAMILIES else f"no CPU kernel of windows of {family}; accepted: {', '.join(FAMILIES)}"


def prepare(case: WindowCase, copies: int) -> SnapshotsLayers:
    return SnapshotsLayers(case, copies, snapshots.snapshots_step)


def describe(case: WindowCase) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return {"backend": "numba"} | snapshots.CONFIG


def traffic(case: WindowCase) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size, case.window, case.accepted)
