"""Checks of what a kernel is given, on the host, without looking at any value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.cache import CacheLayer

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
STATES = (torch.float32, torch.bfloat16, torch.float16)
WIDE = (torch.float32,)


def check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], scalars: bool = False
) -> tuple[int, ...]:
    """The strides of all axes but the last, which has to be contiguous; one-line ``ValueError`` if it is wrong.

    Of ``scalars``, which are loaded one by one, the strides of all axes.
    """
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}; accepted: {', '.join(map(str, dtypes))}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; accepted: {list(shape)}")
    strides = tensor.stride()
    if scalars:
        return tuple(strides)
    if strides[-1] != 1 and shape[-1] != 1:
        raise ValueError(f"{name} has strides {list(strides)}; accepted: a contiguous last axis")
    return tuple(strides[:-1])


def check_parameter(name: str, tensor: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """A layer's own parameter: contiguous, where the state is; one-line ``ValueError`` if it is not."""
    if tensor is None or tuple(tensor.shape) != shape or tensor.dtype not in INPUTS or not tensor.is_contiguous():
        told = "None" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{name} is {told}; accepted: contiguous {list(shape)} of {', '.join(map(str, INPUTS))}")
    check_place({name: tensor}, device)


def check_place(tensors: dict[str, Tensor | None], device: torch.device) -> None:
    """All on one device, or one-line ``ValueError``."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; accepted: {device}, where the state is")


def check_layer(layer: CacheLayer, family: str) -> None:
    """Raises ``ValueError`` for a layer of another family or with a window."""
    if layer.family != family:
        raise ValueError(f"layer is of family {layer.family}; accepted: {family}")
    if layer.window is not None:
        raise ValueError(f"replay_step got a cache with window={layer.window}; accepted: None")


def check_slots(slots: Tensor, rows: int) -> None:
    if slots.dtype != torch.int64 or tuple(slots.shape) != (rows,) or (rows > 1 and slots.stride(0) != 1):
        raise ValueError(f"slots has shape {list(slots.shape)} of {slots.dtype}; accepted: [{rows}] contiguous int64")


def state_shape(state: Tensor, inputs: Any, key_heads: int) -> tuple[int, int, int, int]:
    """``(S, H, P, N)`` of a state; raises ``ValueError`` if its heads cannot share ``key_heads``."""
    if state.dim() != 4 or state.shape[1] % key_heads:
        raise ValueError(f"state has shape {list(state.shape)}; accepted: [S,H,P,N], H a multiple of {key_heads}")
    slots, heads, rows, columns = state.shape
    return slots, heads, rows, columns
