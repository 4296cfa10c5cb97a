"""Replay steps in torch, from the forms of `replayssm.recurrence`: standard (one token) and speculative (a window)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.formats import Rounding, check_rounding
from replayssm.kernels.torch.stored import FORMATS, consecutive, rounded, step, widened
from replayssm.recurrence import gdn, kda, mamba2


def replay_step(
    out: Tensor, layer: CacheLayer, inputs: Any, slots: Tensor, *, rounding: Rounding | None = None
) -> None:
    """One token a row in standard decoding; see `replayssm.kernels` for the call.

    Mutates ``out``, the checkpoint and ``flushes`` of rows whose ring is full, and the ring of the others. Raises
    ``ValueError`` for a cache made with a window and for inputs of another dtype than the ring's.
    """
    if layer.window is not None:
        raise ValueError(f"replay_step got a cache with window={layer.window}; accepted: None, or use verify_step")
    check_rounding(rounding, layer.state, stored=False)
    _refuse_other_dtypes(layer, inputs)
    rows = (slots >= 0).nonzero()[:, 0]
    if len(rows) == 0:
        return
    live = slots[rows]
    length = layer.cursor[live].long()
    due = length == layer.interval_length - 1
    if not due.all():
        # Reading the few rows that flush as well costs less than copying the state of all others.
        inputs_live = inputs.rows(rows)
        view = None if layer.state.dtype in FORMATS else consecutive(layer.state, live)
        state = widened(layer.state[live]) if view is None else view
        y, entries = _read(layer, state, live, length, inputs_live)
        out[rows[~due]] = y[~due].to(out.dtype)
        position = (layer.origin[live] + layer.cursor[live]) % layer.capacity
        for name, value in entries.items():
            layer.ring[name][live[~due], :, position[~due].long()] = value[~due].to(layer.ring[name].dtype)
    if due.any():
        state = _folded(layer, live[due], inputs)
        out[rows[due]] = step(state, inputs.rows(rows[due])).to(out.dtype)
        _flush(layer, live[due], state, rounding)


def verify_step(out: Tensor, layer: CacheLayer, inputs: Any, slots: Tensor) -> None:
    """A window of T tokens a row, ``out [B,T,H,P]``: rows whose flush is due fold their committed ring first; the
    window is computed against checkpoint and ring, and appended behind the committed tokens, whether accepted or not.
    Raises ``ValueError`` for a cache without a window, and for inputs of another T or another dtype than the ring's.
    """
    window = layer.window
    if window is None:
        raise ValueError("verify_step needs a cache made with a window; this one decodes one token a step")
    if inputs[0].shape[1] != window:
        raise ValueError(f"inputs hold {inputs[0].shape[1]} tokens a row; accepted: window={window}")
    _refuse_other_dtypes(layer, inputs)
    rows = (slots >= 0).nonzero()[:, 0]
    if len(rows) == 0:
        return
    live = slots[rows]
    length = layer.cursor[live].long()
    due = (length > layer.interval_length - window) | (layer.interval_length < window)
    if due.any():
        _flush(layer, live[due], _folded(layer, live[due], inputs), None)
    ring = ordered_ring(layer, live)
    inputs = inputs.rows(rows)
    visible = torch.where(due, 0, length)
    if layer.family == "mamba2":
        y = mamba2.verify(widened(layer.state[live]), ring, visible, inputs)
        entries = {"x": inputs.x, "B": inputs.B, "dt": inputs.dt}
    else:
        family = gdn if layer.family == "gdn" else kda
        y, d = family.verify(widened(layer.state[live]), ring, visible, inputs)
        entries = _delta_entries(layer, inputs, d)
    out[rows] = y.to(out.dtype)
    positions = (layer.origin[live].long() + length)[:, None] + torch.arange(window, device=live.device)
    positions = positions % layer.capacity
    for name, value in entries.items():
        # Advanced indices around a slice move the heads behind them: [B,T,heads,...], as the window has it.
        layer.ring[name][live[:, None], :, positions] = value.to(layer.ring[name].dtype)


def _refuse_other_dtypes(layer: CacheLayer, inputs: Any) -> None:
    """The ring holds inputs as they arrived; appending them in another dtype would round them silently."""
    for name, entries in layer.ring.items():
        held = entries.dtype
        given = getattr(inputs, name).dtype if name in inputs._fields else held
        if given is not held:
            raise ValueError(f"{name} has dtype {given}; accepted: {held}, the dtype of the ring")


def ordered_ring(layer: CacheLayer, live: Tensor) -> Any:
    """The rings of the slots ``live [B]`` in time order, as the family's ``Ring`` tuple; free entries included."""
    capacity = layer.capacity
    order = (layer.origin[live].long()[:, None] + torch.arange(capacity, device=live.device)) % capacity
    tensors = {name: tensor[live[:, None], :, order].transpose(1, 2) for name, tensor in layer.ring.items()}
    return (mamba2.Ring if layer.family == "mamba2" else gdn.Ring)(**tensors)


def _read(
    layer: CacheLayer, state: Tensor, live: Tensor, length: Tensor, inputs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of the current token and what its ring entry holds."""
    ring = ordered_ring(layer, live)
    if layer.family == "mamba2":
        return mamba2.read(state, ring, length, inputs), {"x": inputs.x, "B": inputs.B, "dt": inputs.dt}
    family = gdn if layer.family == "gdn" else kda
    y, d = family.read(state, ring, length, inputs)
    return y, _delta_entries(layer, inputs, d)


def _delta_entries(layer: CacheLayer, inputs: gdn.Inputs, d: Tensor) -> dict[str, Tensor]:
    k = inputs.k.to(d.dtype)
    entries = {"k": inputs.k, "k_rnorm": gdn.rnorm(k), "d": d, "g": inputs.g}
    return entries | ({"v": inputs.v, "beta": inputs.beta} if "v" in layer.ring else {})


def _folded(layer: CacheLayer, live: Tensor, inputs: Any) -> Tensor:
    """The checkpoints of ``live``, moved over their committed rings; ``inputs`` brings Mamba-2's A."""
    ring, length, state = ordered_ring(layer, live), layer.cursor[live].long(), widened(layer.state[live])
    if layer.family == "mamba2":
        return mamba2.fold(state, ring, length, inputs.A)
    family = gdn if layer.family == "gdn" else kda
    return (family.fold if ring.v is None else family.fold_raw)(state, ring, length)


def _flush(layer: CacheLayer, live: Tensor, state: Tensor, rounding: Rounding | None) -> None:
    """Write checkpoints, rounded to their dtype, and count it."""
    layer.state[live] = rounded(state, layer.state.dtype, live, rounding, layer.flushes)
    layer.flushes[live] += 1
