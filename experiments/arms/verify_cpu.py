"""``verify/cpu``: replay verifies windows of Mamba-2 and GDN in Numba, one call a layer step; GDN folds from d."""

from __future__ import annotations

from typing import Any

from experiments.case import WindowCase
from experiments.measure.window_layers import VerifyLayers
from replayssm.kernels.cpu import verify
from replayssm.traffic import Ring, Traffic, replay

FAMILIES = ("mamba2", "gdn")
"""Those with CPU kernels of windows."""


def unsupported(case: WindowCase) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    family = case.geometry.family
    return None if family in FAMILIES else f"no CPU kernel of windows of {family}; accepted: {', '.join(FAMILIES)}"


def prepare(case: WindowCase, copies: int) -> VerifyLayers:
    return VerifyLayers(case, copies, verify.verify_step)


def describe(case: WindowCase) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return {"backend": "numba", "fold": "inputs" if case.geometry.family == "mamba2" else "d"} | verify.CONFIG


def traffic(case: WindowCase) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle."""
    ring, windows = Ring(inputs=case.precision.inputs), {"window": case.window, "accepted": case.accepted}
    state, rows = case.precision.state, case.batch_size
    return replay(case.geometry, case.interval_length, state, ring=ring, rows=rows, **windows).per_step()
