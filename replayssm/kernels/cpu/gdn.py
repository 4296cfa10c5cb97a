"""GDN on a CPU: the stored-state step and the replay step, float32 state, bfloat16 or float32 inputs and ring.

The kernels are those of `delta`, with one log decay a value head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replayssm.kernels.cpu import delta
from replayssm.kernels.cpu.delta import CONFIG

__all__ = ["CONFIG", "replay_step", "stored_step"]


def stored_step(out: Tensor, state: Tensor, inputs: Any, slots: Tensor) -> None:
    """The recurrence for one token a row, in place.

    ``state [S,HV,V,K]`` float32; ``inputs`` a `replayssm.recurrence.gdn.Inputs` with q, k, v bfloat16 or float32 and g,
    beta float32; ``out [B,HV,V]`` as v; ``slots [B]`` int64, -1 for padding. All contiguous. Mutates ``out`` and
    ``state``. Raises ``ValueError`` on anything else, before it changes anything.
    """
    delta.stored_step(out, state, inputs, slots, channels=False)


def replay_step(out: Tensor, layer: Any, inputs: Any, slots: Tensor) -> None:
    """Standard decoding for one token a row; arguments as `stored_step`, with a `replayssm.cache.CacheLayer`.

    Rows with a full ring fold ring and token into the checkpoint, take their output from it and count the flush; the
    others take it from checkpoint, ring and token, and append the token and its d. Ring entries behind the cursor are
    never read.
    """
    delta.replay_step(out, layer, inputs, slots, channels=False)
