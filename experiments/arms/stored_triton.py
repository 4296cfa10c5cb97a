"""``stored/triton``: the stored recurrence in Triton, one launch a step; a GPU's baseline without other packages."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch

from experiments.case import Case
from experiments.inputs import DTYPES
from experiments.measure import devices
from experiments.measure.layers import StoredLayers
from replayssm.traffic import Traffic, stored

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None if find_spec("triton") else "Triton is not installed"


def prepare(case: Case, copies: int) -> StoredLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.families import KERNELS

    return StoredLayers(case, copies, KERNELS[case.geometry.family].stored_step)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    from replayssm.kernels.triton.launch_table import choose

    size, device = DTYPES[case.precision.state].itemsize, torch.device(devices.of(case).tensors)
    launch, how = choose(case.geometry, case.batch_size, size, None, device)
    return {"backend": "triton", "gates": "ready", "chosen": how} | asdict(launch)


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size)
