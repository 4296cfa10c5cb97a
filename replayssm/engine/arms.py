"""The arms: stored or replayed states, stepped by plain torch, Numba on a CPU, or Triton on a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from replayssm.cache import ReplayCache
from replayssm.models import Decoder, ModelCache, ModelError, ReplayStates, States, StoredStates
from replayssm.models.decoding import Decoding

ARMS = ("stored/torch", "stored/cpu", "stored/triton", "replay/torch", "replay/cpu", "replay/triton")


def new_cache(
    model: Decoder,
    arm: str,
    *,
    slots: int,
    capacity: int,
    interval_length: int = 16,
    state_dtype: torch.dtype = torch.float32,
) -> ModelCache:
    """The model's cache for ``slots`` requests of up to ``capacity`` tokens, its states kept and stepped as ``arm``
    says. Raises `ModelError` on an arm that does not exist or cannot run where the model is.
    """
    kind, backend = check_arm(arm, model.embedding.device)
    step = _step(kind, backend, model.geometry.family)
    states: States
    if kind == "stored":
        device, layers = model.embedding.device, model.state_layers
        states = StoredStates(model.geometry, step, slots=slots, layers=layers, state_dtype=state_dtype, device=device)
    else:
        replay = model.new_replay_cache(slots=slots, interval_length=interval_length, state_dtype=state_dtype)
        states = ReplayStates(replay, step, _commit if backend == "triton" else None)
    return model.new_cache(states, slots=slots, capacity=capacity)


def new_decoding(arm: str, cache: ModelCache, slots: Tensor, span: int) -> Decoding:
    """The past of one decoded token a row: with a Triton arm, what needs neither the host nor memory of its own."""
    if arm.endswith("/triton"):
        from replayssm.engine.fused import FusedDecoding

        return FusedDecoding(cache, slots, span)
    return Decoding(cache, slots, span)


def check_arm(arm: str, device: torch.device) -> tuple[str, str]:
    """``(kind, back end)``, where the arm runs on the device; Triton's interpreter counts as running on a CPU."""
    if arm not in ARMS:
        raise ModelError(f"arm={arm} is unknown; accepted: {', '.join(ARMS)}")
    kind, _, backend = arm.partition("/")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (backend == "triton") != (device.type == "cuda") and not (backend == "triton" and interpreted):
        here = [a for a in ARMS if a.endswith("/triton") == (device.type == "cuda")]
        raise ModelError(f"arm={arm} does not run on {device.type}; accepted: {', '.join(here)}")
    return kind, backend


def _step(kind: str, backend: str, family: str) -> Any:
    """The back end's step function; imported here, since not every machine has every back end."""
    name = f"{kind}_step"
    if backend == "torch":
        from replayssm.kernels import torch as plain

        return getattr(plain, name)
    if backend == "cpu":
        from replayssm.kernels import cpu

        return getattr(cpu.KERNELS[family], name)
    from replayssm.kernels.triton.families import KERNELS

    return getattr(KERNELS[family], name)


def _commit(cache: ReplayCache, slots: Tensor) -> None:
    from replayssm.kernels.triton.commit import commit

    commit(cache.cursor, cache.origin, slots, cache.interval_length, cache.capacity)
