"""``replay/triton``: replay in Triton, one launch a step; flushes in place; GDN and KDA fold from d."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch

from experiments.case import Case
from experiments.inputs import DTYPES
from experiments.measure import devices
from experiments.measure.layers import ReplayLayers
from replayssm.traffic import Ring, Traffic, replay

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None if find_spec("triton") else "Triton is not installed"


def prepare(case: Case, copies: int) -> ReplayLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.commit import commit
    from replayssm.kernels.triton.families import KERNELS

    return ReplayLayers(case, copies, KERNELS[case.geometry.family].replay_step, commit)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    from replayssm.kernels.triton.launch_table import choose

    size, device = DTYPES[case.precision.state].itemsize, torch.device(devices.of(case).tensors)
    launch, how = choose(case.geometry, case.batch_size, size, case.interval_length, device)
    fold = "inputs" if case.geometry.family == "mamba2" else "d"
    return {"backend": "triton", "fold": fold, "gates": "ready", "chosen": how} | asdict(launch)


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle."""
    ring = Ring(inputs=case.precision.inputs)
    return replay(case.geometry, case.interval_length, case.precision.state, ring=ring, rows=case.batch_size).per_step()
