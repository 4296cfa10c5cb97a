"""Replay steps in torch, from the forms of `replayssm.recurrence`: standard (one token) and speculative (a window)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.formats import Rounding, check_rounding
from replayssm.kernels.torch.ring import entries, ordered_ring, refuse_other_dtypes
from replayssm.kernels.torch.stored import FORMATS, consecutive, rounded, step, widened, words
from replayssm.packed import pack, unpack
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
    refuse_other_dtypes(layer, inputs)
    rows = (slots >= 0).nonzero()[:, 0]
    if len(rows) == 0:
        return
    live = slots[rows]
    length = layer.cursor[live].long()
    due = length == layer.interval_length - 1
    if not due.all():
        # Reading the few rows that flush as well costs less than copying the state of all others.
        inputs_live = inputs.rows(rows)
        y, appended = _read(layer, readable(layer, live), live, length, inputs_live)
        out[rows[~due]] = y[~due].to(out.dtype)
        position = (layer.origin[live] + layer.cursor[live]) % layer.capacity
        for name, value in appended.items():
            layer.ring[name][live[~due], :, position[~due].long()] = value[~due]
    if due.any():
        state = _folded(layer, live[due], inputs)
        out[rows[due]] = step(state, inputs.rows(rows[due])).to(out.dtype)
        _flush(layer, live[due], state, rounding)


def verify_step(
    out: Tensor, layer: CacheLayer, inputs: Any, slots: Tensor, *, rounding: Rounding | None = None
) -> None:
    """A window of T tokens a row, ``out [B,T,H,P]``: rows whose flush is due fold their committed ring first; the
    window is computed against checkpoint and ring, and appended behind the committed tokens, whether accepted or not.
    Raises ``ValueError`` for a cache without a window, and for inputs of another T or another dtype than the ring's.
    """
    window = layer.window
    if window is None:
        raise ValueError("verify_step needs a cache made with a window; this one decodes one token a step")
    if inputs[0].shape[1] != window:
        raise ValueError(f"inputs hold {inputs[0].shape[1]} tokens a row; accepted: window={window}")
    check_rounding(rounding, layer.state, stored=False)
    refuse_other_dtypes(layer, inputs)
    rows = (slots >= 0).nonzero()[:, 0]
    if len(rows) == 0:
        return
    live = slots[rows]
    length = layer.cursor[live].long()
    due = (length > layer.interval_length - window) | (layer.interval_length < window)
    if due.any():
        _flush(layer, live[due], _folded(layer, live[due], inputs), rounding)
    ring = ordered_ring(layer, live)
    inputs = inputs.rows(rows)
    visible = torch.where(due, 0, length)
    state = readable(layer, live)
    if layer.family == "mamba2":
        y, d = mamba2.verify(state, ring, visible, inputs), None
    else:
        family = gdn if layer.family == "gdn" else kda
        y, d = family.verify(state, ring, visible, inputs)
    out[rows] = y.to(out.dtype)
    positions = (layer.origin[live].long() + length)[:, None] + torch.arange(window, device=live.device)
    positions = positions % layer.capacity
    for name, value in entries(layer, inputs, d).items():
        # Advanced indices around a slice move the heads behind them: [B,T,heads,...], as the window has it.
        layer.ring[name][live[:, None], :, positions] = value


def _read(
    layer: CacheLayer, state: Tensor, live: Tensor, length: Tensor, inputs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of the current token and what its ring entry holds."""
    ring = ordered_ring(layer, live)
    if layer.family == "mamba2":
        return mamba2.read(state, ring, length, inputs), entries(layer, inputs, None)
    family = gdn if layer.family == "gdn" else kda
    y, d = family.read(state, ring, length, inputs)
    return y, entries(layer, inputs, d)


def _folded(layer: CacheLayer, live: Tensor, inputs: Any) -> Tensor:
    """The checkpoints of ``live``, moved over their committed rings; ``inputs`` brings Mamba-2's A."""
    return folded(layer, checkpoint(layer, live), ordered_ring(layer, live), layer.cursor[live].long(), inputs)


def folded(layer: CacheLayer, state: Tensor, ring: Any, length: Tensor | None, inputs: Any) -> Tensor:
    """``state`` moved over ``length`` tokens of a ring, None for all of them, as the layer folds."""
    if layer.family == "mamba2":
        return mamba2.fold(state, ring, length, inputs.A)
    family = gdn if layer.family == "gdn" else kda
    return (family.fold if ring.v is None else family.fold_raw)(state, ring, length)


def checkpoint(layer: CacheLayer, live: Tensor) -> Tensor:
    """What flushes start from, of the slots ``live``: ``[B,H,P,N]`` in the dtype in which it is computed."""
    return widened(layer.state[live]) if layer.packed is None else unpack(layer.packed[live])


def readable(layer: CacheLayer, live: Tensor) -> Tensor:
    """What outputs are computed from; a view where that can be."""
    if layer.read_copy is not None:
        return unpack(layer.read_copy[live])
    plain = layer.packed is None and layer.state.dtype not in FORMATS
    view = consecutive(layer.state, live) if plain else None
    return checkpoint(layer, live) if view is None else view


def _flush(layer: CacheLayer, live: Tensor, state: Tensor, rounding: Rounding | None) -> None:
    """Write checkpoints, and read copies of the same states, each rounded to its format, and count it."""
    if layer.packed is None:
        layer.state[live] = rounded(state, layer.state.dtype, live, rounding, layer.flushes)
    else:
        drawn = None if rounding is None else words(state.shape, live, rounding, layer.flushes)
        layer.packed[live] = pack(state, layer.packed.format, drawn)
    if layer.read_copy is not None:
        layer.read_copy[live] = pack(state, layer.read_copy.format)
    layer.flushes[live] += 1
