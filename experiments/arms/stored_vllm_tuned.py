"""``stored/vllm-tuned``: vLLM's stored-state kernels with the fastest of many launch configurations, timed on the
device in the same process before the case.
"""

from __future__ import annotations

import functools
from typing import Any

from experiments.case import Case
from experiments.measure import tuning
from experiments.measure.layers import StoredLayers
from replayssm.peers import null_slot_in_front, vllm
from replayssm.traffic import Traffic, stored

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return vllm.unsupported(case.geometry.family)


def prepare(case: Case, copies: int) -> StoredLayers:
    return _layers(case, copies, _chosen(case)[0])


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record: the time of a step with each candidate."""
    told = {"backend": "triton", "chosen": "fastest of the candidates on this device"} | vllm.PEER.told()
    told["gates"] = vllm.gates_of(case.geometry.family)
    if unsupported(case):
        return told
    launch, times = _chosen(case)
    kernel = vllm.KERNELS[case.geometry.family][1]
    return told | {"kernel": kernel, "launch": launch._asdict(), "candidates_ns": times}


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size)


@functools.lru_cache(maxsize=1)
def _chosen(case: Case) -> tuple[vllm.Launch, dict[str, int | str]]:
    return tuning.fastest(case, vllm.candidates(case.geometry.family), _layers)


def _layers(case: Case, copies: int, launch: vllm.Launch) -> StoredLayers:
    return StoredLayers(case, copies, vllm.stored_step(case.geometry.family, launch), null_slot_in_front)
