"""``replay/triton-stochastic``: ``replay/triton`` on a 16-bit state that a flush rounds stochastically (Philox4x32-10).

Each copy is a layer of its own to the counter, each slot a request; the key is the case's seed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from experiments.arms import replay_triton
from experiments.arms.replay_triton import traffic, unsupported
from experiments.case import Case
from experiments.measure.layers import ReplayLayers, Step
from replayssm.cache import CacheLayer
from replayssm.formats import Rounding

__all__ = ["describe", "prepare", "traffic", "unsupported"]

DEVICES = ("cuda",)
STATE_FORMATS = ("bf16", "fp16")


def prepare(case: Case, copies: int) -> ReplayLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.commit import commit
    from replayssm.kernels.triton.families import KERNELS

    return ReplayLayers(case, copies, _drawn(KERNELS[case.geometry.family].replay_step, case.seed), commit)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    return replay_triton.describe(case) | {"rounding": "stochastic at the flush, Philox4x32-10", "seed": case.seed}


def _drawn(step: Any, seed: int) -> Step:
    roundings: dict[int, Rounding] = {}

    def drawn_step(out: Tensor, layer: CacheLayer, inputs: Any, slots: Tensor) -> None:
        # Layers are numbered as they are first stepped; the layers of an arm live as long as its step.
        rounding = roundings.setdefault(layer.state.data_ptr(), Rounding(seed, len(roundings)))
        step(out, layer, inputs, slots, rounding=rounding)

    return drawn_step
