"""``snapshots/triton``: a state behind every token of a window, in Triton, one launch a step."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch

from experiments.case import WindowCase
from experiments.inputs import DTYPES
from experiments.measure import devices
from experiments.measure.window_layers import SnapshotsLayers
from replayssm.traffic import Traffic, stored

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: WindowCase) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None if find_spec("triton") else "Triton is not installed"


def prepare(case: WindowCase, copies: int) -> SnapshotsLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.verify_snapshots import snapshots_step

    return SnapshotsLayers(case, copies, snapshots_step)


def describe(case: WindowCase) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    from replayssm.kernels.triton.verify_launch_table import choose

    size, device = DTYPES[case.precision.state].itemsize, torch.device(devices.of(case).tensors)
    launch, how = choose(case.geometry, case.batch_size, size, case.window, None, device)
    return {"backend": "triton", "gates": "ready", "chosen": how} | asdict(launch)


def traffic(case: WindowCase) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size, case.window, case.accepted)
