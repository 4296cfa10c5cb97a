"""Speculative decoding with snapshots in torch: a state is stored behind every token of a window."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replayssm.kernels.torch.stored import rounded, step, widened


def snapshots_step(family: str, out: Tensor, states: Tensor, inputs: Any, slots: Tensor, accepted: Tensor) -> None:
    """The recurrence for a window of T tokens a row, from the state behind token ``accepted`` of the last window.

    ``out [B,T,H,P]``, ``states [S,T,H,P,N]``, ``inputs`` with a T axis behind the rows, ``slots [B]`` int64, -1 for
    padding; ``accepted [B]``, 1 to T, counts the tokens of the last window that were. Mutates ``out`` and ``states``,
    each rounded to the nearest when it is stored. The family is that of the inputs; ``family`` is not looked at.
    """
    rows = (slots >= 0).nonzero()[:, 0]
    if len(rows) == 0:
        return
    live, window = slots[rows], inputs.rows(rows)
    current = widened(states[live, accepted[rows].long() - 1])
    for t in range(states.shape[1]):
        names = zip(window._fields, window, strict=True)
        token = type(window)(*(x if x is None or name in ("A", "D") else x[:, t] for name, x in names))
        out[rows, t] = step(current, token).to(out.dtype)
        states[live, t] = rounded(current, states.dtype, live, None, None)
