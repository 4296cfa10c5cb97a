"""The arms: stored or replayed states, stepped by plain torch, Numba on a CPU, or Triton on a GPU; for windows of
tokens snapshots, or replay that verifies them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from replayssm.arms import ARMS, MAX_WINDOW, WINDOW_ARMS
from replayssm.cache import ReplayCache
from replayssm.formats import DTYPES
from replayssm.geometry import Geometry
from replayssm.models import Decoder, ModelCache, ModelError, ReplayStates, States, StoredStates
from replayssm.models.decoding import Decoding
from replayssm.models.windows import SnapshotStates, VerifyStates, WindowDecoding
from replayssm.precision import Precision


def new_cache(
    model: Decoder,
    arm: str,
    *,
    slots: int,
    capacity: int,
    interval_length: int = 16,
    state_dtype: torch.dtype = torch.float32,
    precision: Precision | None = None,
    seed: int = 0,
    window: int | None = None,
) -> ModelCache:
    """The model's cache for ``slots`` requests of up to ``capacity`` tokens, its states kept and stepped as ``arm``
    says. ``precision`` takes the place of ``state_dtype``: arm replay/torch has every one of them, with
    ``interval_length=1`` as the stored recurrence, the others those of one format without scales; ``seed`` is of its
    stochastic rounding. ``window``, the tokens of a step, is for the arms of windows alone, and needed there. Raises
    `ModelError` on an arm that does not exist or cannot run where the model is, and on a precision that it does not
    have.
    """
    kind, backend = check_arm(arm, model.embedding.device, window)
    if precision is not None:
        _refuse(precision, arm, model.geometry)
        if precision.plain:
            state_dtype, precision = DTYPES[precision.update], None
    step = _step(kind, backend, model.geometry.family)
    states: States
    sizes: dict[str, Any] = {"slots": slots, "state_dtype": state_dtype}
    placed: dict[str, Any] = {"layers": model.state_layers, "device": model.embedding.device}
    if kind == "stored":
        states = StoredStates(model.geometry, step, **sizes, **placed)
    elif kind == "snapshots":
        states = SnapshotStates(model.geometry, step, window=window or 1, **sizes, **placed)
    else:
        replay = model.new_replay_cache(interval_length=interval_length, window=window, precision=precision, **sizes)
        if kind == "verify":
            states = VerifyStates(replay, step, _commit_window if backend == "triton" else None)
            return model.new_cache(states, slots=slots, capacity=capacity)
        rounding_seed = seed if precision is not None and precision.stochastic else None
        states = ReplayStates(replay, step, _commit if backend == "triton" else None, rounding_seed)
    return model.new_cache(states, slots=slots, capacity=capacity)


def new_decoding(arm: str, cache: ModelCache, slots: Tensor, span: int) -> Decoding:
    """The past of one decoded token a row: with a Triton arm, what needs neither the host nor memory of its own."""
    if arm.endswith("/triton"):
        from replayssm.engine.fused import FusedDecoding

        return FusedDecoding(cache, slots, span)
    return Decoding(cache, slots, span)


def new_window(
    arm: str,
    cache: ModelCache,
    slots: Tensor,
    span: int,
    first: Tensor | None = None,
    tokens: int | None = None,
) -> WindowDecoding:
    """As `new_decoding` of a window, or of ``tokens`` tokens a row from its position ``first [B]`` on."""
    if arm.endswith("/triton"):
        from replayssm.engine.fused import FusedWindow

        return FusedWindow(cache, slots, span, first, tokens)
    return WindowDecoding(cache, slots, span, first, tokens)


def check_arm(arm: str, device: torch.device, window: int | None = None) -> tuple[str, str]:
    """``(kind, back end)``, where the arm runs on the device; Triton's interpreter counts as running on a CPU."""
    known = ARMS if window is None else WINDOW_ARMS
    if arm not in known:
        of = "" if window is None else f" to windows, window={window}"
        raise ModelError(f"arm={arm} is unknown{of}; accepted: {', '.join(known)}")
    if window is not None and not 1 <= window <= MAX_WINDOW:
        raise ModelError(f"window={window} is impossible; accepted: an integer from 1 to {MAX_WINDOW}")
    kind, _, backend = arm.partition("/")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (backend == "triton") != (device.type == "cuda") and not (backend == "triton" and interpreted):
        here = [a for a in known if a.endswith("/triton") == (device.type == "cuda")]
        raise ModelError(f"arm={arm} does not run on {device.type}; accepted: {', '.join(here)}")
    return kind, backend


def _refuse(precision: Precision, arm: str, geometry: Geometry) -> None:
    if arm != "replay/torch" and not precision.plain:
        raise ModelError(
            f"{precision} is not held by arm={arm}; accepted: replay/torch, or an update of fp32, bf16, fp16"
        )
    if arm.endswith("/cpu") and precision.update != "fp32":
        raise ModelError(f"update={precision.update} is not held by arm={arm}; accepted: fp32")
    try:
        precision.refuse_for(geometry)
    except ValueError as error:
        raise ModelError(str(error)) from None


def _step(kind: str, backend: str, family: str) -> Any:
    """The back end's step function; imported here, since not every machine has every back end."""
    name = f"{kind}_step"
    if kind in ("snapshots", "verify") and backend == "triton":
        from replayssm.kernels.triton.verify_families import VERIFY
        from replayssm.kernels.triton.verify_snapshots import snapshots_step

        return VERIFY[family] if kind == "verify" else snapshots_step
    if backend == "torch":
        from replayssm.kernels import torch as plain

        return getattr(plain, name)
    if backend == "cpu" and kind in ("snapshots", "verify"):
        from replayssm.kernels.cpu import snapshots, verify

        return verify.verify_step if kind == "verify" else snapshots.snapshots_step
    if backend == "cpu":
        from replayssm.kernels import cpu

        return getattr(cpu.KERNELS[family], name)
    from replayssm.kernels.triton.families import KERNELS

    return getattr(KERNELS[family], name)


def _commit_window(cache: ReplayCache, slots: Tensor, accepted: Tensor) -> None:
    from replayssm.kernels.triton.verify_commit import commit_window

    sizes = (cache.interval_length, cache.window or 1, cache.capacity)
    commit_window(cache.cursor, cache.origin, slots, accepted, *sizes)


def _commit(cache: ReplayCache, slots: Tensor) -> None:
    from replayssm.kernels.triton.commit import commit

    commit(cache.cursor, cache.origin, slots, cache.interval_length, cache.capacity)
