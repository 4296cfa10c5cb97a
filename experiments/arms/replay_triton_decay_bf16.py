"""``replay/triton-decay-bf16``: ``replay/triton`` for KDA with the ring's log decays in bfloat16, half of their bytes.

What a token's own output decays by is not rounded, nor is the token that flushes; sums of decays are float32. An
ablation: it gives up accuracy, so that its budget is that of a float32 version which rounds the same decays
(`RoundedDecayLayers`), while the errors in its record are against the decays as they are, like those of every arm.
Runs only where it is asked for by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.arms import replay_triton
from experiments.arms.replay_triton import unsupported
from experiments.case import Case
from experiments.measure.layers import ReplayLayers
from replayssm.traffic import Ring, Traffic, replay

__all__ = ["describe", "prepare", "traffic", "unsupported"]

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")
FAMILIES = ("kda",)


def prepare(case: Case, copies: int) -> RoundedDecayLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.commit import commit
    from replayssm.kernels.triton.kda import replay_step

    return RoundedDecayLayers(case, copies, replay_step, commit, decay_dtype=torch.bfloat16)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    budget = "of a version that rounds the decays of tokens in the ring to bf16"
    return replay_triton.describe(case) | {"decay": "bf16", "budget": budget}


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle."""
    ring = Ring(inputs=case.precision.inputs, decay="bf16")
    return replay(case.geometry, case.interval_length, case.precision.state, ring=ring, rows=case.batch_size).per_step()


class RoundedDecayLayers(ReplayLayers):
    """Replay layers of KDA whose rings hold decays in bfloat16."""

    def honest_step(self, step: Any, state: Tensor, inputs: Any, appended: Tensor) -> tuple[Tensor, Tensor]:
        rounded = torch.where(appended[:, None, None], inputs.g.bfloat16().to(inputs.g), inputs.g)
        return step(state, inputs)[0], step(state, inputs._replace(g=rounded))[1]
