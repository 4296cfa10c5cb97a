"""What the torch back end puts into a ring and takes out of it: entries as they arrived, or in the ring's format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.cache import VECTORS, CacheLayer
from replayssm.formats import DTYPES
from replayssm.packed import Packed, pack, unpack
from replayssm.recurrence import gdn, mamba2


def ordered_ring(layer: CacheLayer, live: Tensor) -> Any:
    """The rings of the slots ``live [B]`` in time order, as the family's ``Ring`` tuple; free entries included."""
    capacity = layer.capacity
    order = (layer.origin[live].long()[:, None] + torch.arange(capacity, device=live.device)) % capacity
    return as_ring(layer, {name: t[live[:, None], :, order].transpose(1, 2) for name, t in layer.ring.items()})


def as_ring(layer: CacheLayer, tensors: dict[str, Tensor]) -> Any:
    """The family's ``Ring`` tuple of a layer's ring tensors, or of parts of them, out of their format."""
    if layer.ring_format is not None and layer.ring_format not in DTYPES:
        packed = {
            name: Packed(layer.ring_format, t.shape[-1], {"codes": t, "scales": tensors[f"{name}_scales"]})
            for name, t in tensors.items()
            if name in VECTORS
        }
        tensors = {name: t for name, t in tensors.items() if not name.endswith("_scales")}
        tensors |= {name: unpack(numbers) for name, numbers in packed.items()}
    return (mamba2.Ring if layer.family == "mamba2" else gdn.Ring)(**tensors)


def entries(layer: CacheLayer, inputs: Any, d: Tensor | None) -> dict[str, Tensor]:
    """What a step appends, by ring tensor, in its dtype; ``d`` of GDN and KDA."""
    if d is None:
        values = {"x": inputs.x, "B": inputs.B, "dt": inputs.dt}
    else:
        values = {"k": inputs.k, "k_rnorm": gdn.rnorm(inputs.k.to(d.dtype)), "d": d, "g": inputs.g}
        values |= {"v": inputs.v, "beta": inputs.beta} if "v" in layer.ring else {}
    made: dict[str, Tensor] = {}
    for name, value in values.items():
        if f"{name}_scales" in layer.ring:
            packed = pack(value.float(), str(layer.ring_format)).parts
            made |= {name: packed["codes"], f"{name}_scales": packed["scales"]}
        else:
            made[name] = value.to(layer.ring[name].dtype)
    return made


def refuse_other_dtypes(layer: CacheLayer, inputs: Any) -> None:
    """A ring without a format of its own holds inputs as they arrived; another dtype would round them silently. Decays
    are in bfloat16 where that was asked for.
    """
    if layer.ring_format is not None:
        return
    for name, held in layer.ring.items():
        given = getattr(inputs, name).dtype if name in inputs._fields else held.dtype
        if given is not held.dtype and (name != "g" or held.dtype is not torch.bfloat16):
            raise ValueError(f"{name} has dtype {given}; accepted: {held.dtype}, the dtype of the ring")
