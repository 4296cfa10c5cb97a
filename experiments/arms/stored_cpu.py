"""``stored/cpu``: the stored recurrence in Numba, vectorised and multi-threaded: the baseline to beat."""

from __future__ import annotations

from typing import Any

from experiments.case import Case
from experiments.measure.layers import StoredLayers
from replayssm.kernels.cpu import KERNELS
from replayssm.traffic import Traffic, stored


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None


def prepare(case: Case, copies: int) -> StoredLayers:
    return StoredLayers(case, copies, KERNELS[case.geometry.family].stored_step)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return {"backend": "numba"} | KERNELS[case.geometry.family].CONFIG


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size)
