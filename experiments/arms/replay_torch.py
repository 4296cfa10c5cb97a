"""``replay/torch``: replay in plain torch from the forms in `replayssm.recurrence`; GDN and KDA fold from d."""

from __future__ import annotations

from typing import Any

from experiments.case import Case
from experiments.measure.layers import ReplayLayers
from replayssm.kernels.torch import replay_step
from replayssm.traffic import Ring, Traffic, replay


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None


def prepare(case: Case, copies: int) -> ReplayLayers:
    return ReplayLayers(case, copies, replay_step)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return {"backend": "torch", "fold": "d", "chosen": "nothing to choose"}


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle."""
    ring = Ring(inputs=case.precision.inputs)
    return replay(case.geometry, case.interval_length, case.precision.state, ring=ring, rows=case.batch_size).per_step()
