"""``verify/triton``: replay verifies windows in Triton, one launch a step, and commits them in one; folds from d."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch

from experiments.case import WindowCase
from experiments.inputs import DTYPES
from experiments.measure import devices
from experiments.measure.window_layers import VerifyLayers
from replayssm.traffic import Ring, Traffic, replay

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: WindowCase) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return None if find_spec("triton") else "Triton is not installed"


def prepare(case: WindowCase, copies: int) -> VerifyLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.verify_commit import commit_window
    from replayssm.kernels.triton.verify_families import VERIFY

    return VerifyLayers(case, copies, VERIFY[case.geometry.family], commit_window)


def describe(case: WindowCase) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    from replayssm.kernels.triton.verify_launch_table import choose

    size, device = DTYPES[case.precision.state].itemsize, torch.device(devices.of(case).tensors)
    launch, how = choose(case.geometry, case.batch_size, size, case.window, case.interval_length, device)
    fold = "inputs" if case.geometry.family == "mamba2" else "d"
    return {"backend": "triton", "fold": fold, "gates": "ready", "chosen": how} | asdict(launch)


def traffic(case: WindowCase) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle."""
    ring, windows = Ring(inputs=case.precision.inputs), {"window": case.window, "accepted": case.accepted}
    state, rows = case.precision.state, case.batch_size
    return replay(case.geometry, case.interval_length, state, ring=ring, rows=rows, **windows).per_step()
