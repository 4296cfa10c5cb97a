"""``replay/cpu``: replay in Numba, one call a layer step; flushes in place; GDN and KDA fold from d."""

from __future__ import annotations

from typing import Any

from experiments.case import Case
from experiments.measure.layers import ReplayLayers
from replayssm.kernels.cpu import KERNELS
from replayssm.traffic import Ring, Traffic, replay


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None


def prepare(case: Case, copies: int) -> ReplayLayers:
    return ReplayLayers(case, copies, KERNELS[case.geometry.family].replay_step)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return {"backend": "numba", "fold": "d"} | KERNELS[case.geometry.family].CONFIG


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle."""
    ring = Ring(inputs=case.precision.inputs)
    return replay(case.geometry, case.interval_length, case.precision.state, ring=ring, rows=case.batch_size).per_step()
