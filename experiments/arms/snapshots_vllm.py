"""``snapshots/vllm``: vLLM's kernels that keep a state behind every token of a window, with the launch configuration
that vLLM chooses.
"""

from __future__ import annotations

from typing import Any

from experiments.case import WindowCase
from experiments.measure.window_layers import SnapshotsLayers
from replayssm.peers import vllm, vllm_windows
from replayssm.traffic import Traffic, stored

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: WindowCase) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return vllm_windows.unsupported(case.geometry.family)


def prepare(case: WindowCase, copies: int) -> SnapshotsLayers:
    step = vllm_windows.snapshots_step(case.geometry.family)
    return SnapshotsLayers(case, copies, step, vllm_windows.null_block_in_front)


def describe(case: WindowCase) -> dict[str, Any]:
    """What was run, and in which version, for the record."""
    told = {"backend": "triton", "chosen": "by vLLM", "kernel": vllm_windows.KERNELS[case.geometry.family][1]}
    return told | {"gates": vllm_windows.gates_of(case.geometry.family)} | vllm.PEER.told()


def traffic(case: WindowCase) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size, case.window, case.accepted)
