"""``stored/vllm``: vLLM's stored-state kernels with the launch configuration that vLLM itself chooses."""

from __future__ import annotations

from typing import Any

from experiments.case import Case
from experiments.inputs import DTYPES
from experiments.measure.layers import StoredLayers
from replayssm.peers import null_slot_in_front, vllm
from replayssm.traffic import Traffic, stored

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return vllm.unsupported(case.geometry.family)


def prepare(case: Case, copies: int) -> StoredLayers:
    return StoredLayers(case, copies, vllm.stored_step(case.geometry.family), null_slot_in_front)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    told = {"backend": "triton", "chosen": "by vLLM"} | vllm.PEER.told()
    told["gates"] = vllm.gates_of(case.geometry.family)
    if unsupported(case):
        return told
    launch = vllm.shipped_launch(case.geometry, case.batch_size, DTYPES[case.precision.state])
    return told | {"kernel": vllm.KERNELS[case.geometry.family][1], "launch": launch and launch._asdict()}


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size)
