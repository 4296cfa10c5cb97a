"""What decoding will take, from a model's configuration alone: before a weight is read or the device is touched.

Weights, keys and values, convolutions and recurrent states are counted exactly, from the very objects made without
memory. What prompts and steps need on the way is an upper estimate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.arms import ARMS, WINDOW_ARMS
from replayssm.models import Decoder, ModelCache, ModelError, StoredStates, empty_model
from replayssm.models.prompt import TOKENS_AT_A_TIME
from replayssm.models.windows import SnapshotStates

SORTED = 5
"""Vocabularies of float32 that sampling holds at once, where it sorts."""


@dataclass(frozen=True)
class Memory:
    """Bytes. ``states`` are checkpoints, rings and cursors; ``prompts`` and ``steps`` what is needed on the way."""

    weights: int
    keys_values: int
    conv: int
    states: int
    prompts: int
    steps: int

    def requests_in(self, state_bytes: float, slots: int) -> int:
        """How many requests the states and convolutions of which ``state_bytes`` hold; these are of ``slots``."""
        return int(state_bytes * slots // (self.states + self.conv))

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def refuse_above(self, free_bytes: int) -> None:
        """Raises `ModelError` where more is needed than is free."""
        if self.total > free_bytes:
            raise ModelError(
                f"{self.total / 2**30:.1f} GiB needed, {free_bytes / 2**30:.1f} GiB free; not tried; accepted: fewer "
                "slots or a smaller capacity"
            )


def predict_memory(
    config: Any,
    arm: str,
    *,
    slots: int,
    capacity: int,
    interval_length: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    prompt_rows: int = 8,
    chunk: int = 512,
    window: int | None = None,
    head: bool = False,
    sampled: bool = True,
) -> Memory:
    """For the model of a configuration, and an `Engine` with these options, or, with a ``window``, a
    `SpeculativeEngine` whose cache has that ``capacity``, drafts being included where a ``head`` makes them. Steps that
    are never ``sampled`` hold no sorted vocabularies. Raises `ModelError` on an unknown arm."""
    known = ARMS if window is None else WINDOW_ARMS
    if arm not in known:
        raise ModelError(f"arm={arm} is unknown; accepted: {', '.join(known)}")
    model = empty_model(config, dtype, "meta", head)
    sizes: dict[str, Any] = {"slots": slots, "state_dtype": state_dtype}
    placed: dict[str, Any] = {"layers": model.state_layers, "device": "meta"}
    placeholder = (
        StoredStates(model.geometry, print, **sizes, **placed)
        if window is None
        else SnapshotStates(model.geometry, print, window=window, **sizes, **placed)
    )
    caches = [model.new_cache(placeholder, slots=slots, capacity=capacity)]
    if head and window is not None:
        caches.append(model.new_head_cache(slots=slots, capacity=capacity, window=window))
    kept = arm.startswith(("stored/", "snapshots/"))
    states = placeholder if kept else model.new_replay_cache(interval_length=interval_length, window=window, **sizes)
    rows = min(prompt_rows, slots)
    return Memory(
        weights=sum(p.nbytes for p in model.parameters()),
        keys_values=sum(cache.keys.nbytes + cache.values.nbytes for cache in caches),
        conv=caches[0].conv.nbytes,
        states=_held(states),
        prompts=_prompts(model, caches[0], rows, min(chunk, capacity)),
        steps=_steps(model, caches[0], sampled) * (window or 1),
    )


def _held(states: Any) -> int:
    """Bytes of all tensors of an object, and of its mappings of tensors."""
    found = [t for value in vars(states).values() for t in (value.values() if isinstance(value, dict) else [value])]
    return sum(t.nbytes for t in found if isinstance(t, Tensor))


def _prompts(model: Decoder, cache: ModelCache, rows: int, chunk: int) -> int:
    """States of all layers twice, in float32; the widest activations, attention's scores and its repeated keys and
    values, and a chunkwise computation of one layer."""
    g, element = model.geometry, cache.conv.element_size()
    state = g.heads * g.head_dim * g.state_dim * 4
    heads = _attention_heads(model)
    attention = heads * cache.capacity * (3 * 4 * chunk + 4 * 4 * cache.keys.shape[-1])
    tokens = min(chunk, TOKENS_AT_A_TIME)
    recurrence = tokens * g.heads * 4 * (4 * g.head_dim + 6 * g.state_dim + 6 * tokens) + 4 * state
    activations = 6 * chunk * _widest(model) * element
    return rows * (2 * model.state_layers * state + max(attention, recurrence, activations)) + _logits(model, rows)


def _steps(model: Decoder, cache: ModelCache, sampled: bool) -> int:
    element = cache.conv.element_size()
    return cache.slots * 8 * _widest(model) * element + _logits(model, cache.slots) * (1 + SORTED * sampled)


def _logits(model: Decoder, rows: int) -> int:
    return rows * len(model.embedding) * (4 + model.embedding.element_size())


def _widest(model: Decoder) -> int:
    """Features of the widest product but the head's."""
    widths = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    return max(width for width in widths if width != len(model.embedding))


def _attention_heads(model: Decoder) -> int:
    return model.config.num_attention_heads if model.attention[0] else 0
