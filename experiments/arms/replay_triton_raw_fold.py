"""``replay/triton-raw-fold``: ``replay/triton`` for GDN and KDA with flushes that fold from v and beta in the ring, not
from d, so that nothing that was read from the checkpoint enters the next one.
"""

from __future__ import annotations

from typing import Any

from experiments.arms import replay_triton
from experiments.case import Case
from experiments.measure.layers import ReplayLayers
from replayssm.traffic import Ring, Traffic, replay

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    if case.geometry.family == "mamba2":
        return "the ring of mamba2 holds raw inputs already: replay/triton folds from them"
    return replay_triton.unsupported(case)


def prepare(case: Case, copies: int) -> ReplayLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.commit import commit
    from replayssm.kernels.triton.families import KERNELS

    return ReplayLayers(case, copies, KERNELS[case.geometry.family].replay_step, commit, raw_fold=True)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return replay_triton.describe(case) | {"fold": "inputs"}


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle."""
    ring = Ring(inputs=case.precision.inputs, raw=True)
    return replay(case.geometry, case.interval_length, case.precision.state, ring=ring, rows=case.batch_size).per_step()
