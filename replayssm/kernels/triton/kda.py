"""KDA in Triton: stored-state and replay step, one log decay a key channel; the kernels are those of `delta`."""

from __future__ import annotations

from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.formats import Rounding
from replayssm.kernels.triton import delta
from replayssm.kernels.triton.gates import Gates
from replayssm.kernels.triton.launch import Launch
from replayssm.recurrence.kda import Inputs

__all__ = ["replay_step", "stored_step"]


def stored_step(
    out: Tensor,
    state: Tensor,
    inputs: Inputs,
    slots: Tensor,
    launch: Launch | None = None,
    *,
    rounding: Rounding | None = None,
    gates: Gates | None = None,
) -> None:
    """The recurrence for one token a row, in place; see `replayssm.kernels.triton` for dtypes and strides.

    ``state [S,H,V,K]``, ``out [B,H,V]``, ``slots [B]`` int64, -1 for padding; of ``inputs``, g ``[B,H,K]`` and
    beta ``[B,H]`` are float32. Mutates ``out`` and ``state``; raises ``ValueError``, one line, on tensors it does
    not take.
    """
    delta.stored_step("kda", out, state, inputs, slots, launch, rounding, gates)


def replay_step(
    out: Tensor,
    layer: CacheLayer,
    inputs: Inputs,
    slots: Tensor,
    launch: Launch | None = None,
    *,
    rounding: Rounding | None = None,
    gates: Gates | None = None,
) -> None:
    """One token a row in standard decoding; arguments as `stored_step`, with a `replayssm.cache.CacheLayer`.

    Rows with a full ring fold ring and token into the checkpoint and count the flush: from d, or from v and beta in a
    ring that keeps them (``raw_fold``). The others append the token and its d. The ring's g is float32 or bfloat16, to
    which it is rounded there; the token's own output takes it as it arrived. Mutates ``out``, the checkpoint and
    ``flushes`` or the ring; raises ``ValueError`` on what it does not take.
    """
    delta.replay_step("kda", out, layer, inputs, slots, launch, rounding, gates)
