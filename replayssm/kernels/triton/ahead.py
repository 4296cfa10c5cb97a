"""Steps in two launches: what goes from the first to the second, and how they overlap."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from replayssm.cache import CacheLayer
from replayssm.kernels.triton.launch import Cut, power_of_two
from replayssm.kernels.triton.rounding import INTERPRETED

WARPS = 4
"""Of the first launch."""
OVERLAPS = 90
"""Compute capability, times ten, from which on a launch may start beside the one before it."""
SCALARS = tl.constexpr(4)
"""Room for the numbers of a row and head behind their weights."""


def workspace(layer: CacheLayer, rows: int, cut: Cut, words: int) -> Tensor:
    """``[rows,H,words + SCALARS]`` float32 between the launches of a step, rows up to a power of two. The layers of a
    cache share it; made when a size is first asked for, and kept, since graphs may have captured it.
    """
    shape = (power_of_two(rows), cut.H, words + SCALARS.value)
    if shape not in layer.workspace:
        layer.workspace[shape] = torch.empty(shape, dtype=torch.float32, device=layer.state.device)
    return layer.workspace[shape]


def overlap() -> dict[str, Any]:
    """Options of a second launch that may start beside the first; none where the device cannot."""
    if INTERPRETED or driver.active.get_current_target().arch < OVERLAPS:
        return {}
    return {"launch_pdl": True}
