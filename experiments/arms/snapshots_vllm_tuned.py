"""``snapshots/vllm-tuned``: vLLM's kernels that keep a state behind every token of a window, with the fastest of many
launch configurations, timed on the device in the same process before the case.
"""

from __future__ import annotations

import functools
from typing import Any

from experiments.case import WindowCase
from experiments.measure import tuning
from experiments.measure.window_layers import SnapshotsLayers
from replayssm.peers import vllm, vllm_windows
from replayssm.traffic import Traffic, stored

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: WindowCase) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return vllm_windows.unsupported(case.geometry.family)


def prepare(case: WindowCase, copies: int) -> SnapshotsLayers:
    return _layers(case, copies, _chosen(case)[0])


def describe(case: WindowCase) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record: the time of a step with each candidate."""
    told = {"backend": "triton", "chosen": "fastest of the candidates on this device"} | vllm.PEER.told()
    told["gates"] = vllm_windows.gates_of(case.geometry.family)
    if unsupported(case):
        return told
    launch, times = _chosen(case)
    kernel = vllm_windows.KERNELS[case.geometry.family][1]
    return told | {"kernel": kernel, "launch": launch._asdict(), "candidates_ns": times}


def traffic(case: WindowCase) -> Traffic:
    """Bytes and FLOPs of one layer step."""
    return stored(case.geometry, case.precision.state, case.batch_size, case.window, case.accepted)


@functools.lru_cache(maxsize=1)
def _chosen(case: WindowCase) -> tuple[vllm.Launch, dict[str, int | str]]:
    return tuning.fastest(case, vllm.candidates(case.geometry.family), _layers)


def _layers(case: WindowCase, copies: int, launch: vllm.Launch) -> SnapshotsLayers:
    step = vllm_windows.snapshots_step(case.geometry.family, launch)
    return SnapshotsLayers(case, copies, step, vllm_windows.null_block_in_front)
