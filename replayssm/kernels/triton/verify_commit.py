"""The commit of speculative decoding in one launch: cursors move on the device, without a copy to the host or back."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def commit_window(
    cursor: Tensor, origin: Tensor, slots: Tensor, accepted: Tensor, interval_length: int, window: int, capacity: int
) -> None:
    """What `ReplayCache.commit` does after a window: ``accepted`` tokens of each row, 0 to ``window``, join the ring's
    committed ones, of which nothing is left where the step folded them. The others are thereby rejected.

    ``cursor, origin [S]`` int32, mutated; ``slots [B]`` int64, each at most once, -1 for padding; ``accepted [B]`` of
    integers. Can be captured in a CUDA graph. Neither slot numbers nor counts are checked; a shape is, and raises
    ``ValueError``.
    """
    rows = len(slots)
    if tuple(accepted.shape) != (rows,) or accepted.dtype.is_floating_point or (rows > 1 and accepted.stride(0) != 1):
        told = f"{list(accepted.shape)} of {accepted.dtype}"
        raise ValueError(f"accepted has shape {told}; accepted: [{rows}] contiguous integers")
    if rows:
        _commit_kernel[(triton.cdiv(rows, BLOCK),)](
            cursor, origin, slots, accepted, rows, interval_length, window, capacity, BLOCK=BLOCK, num_warps=1
        )


@triton.jit
def _commit_kernel(cursor, origin, slots, accepted, rows, interval_length, window, capacity, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    live = slot >= 0
    count = tl.load(accepted + row, mask=live, other=0).to(tl.int32)
    length = tl.load(cursor + slot, mask=live, other=0)
    oldest = tl.load(origin + slot, mask=live, other=0)
    due = (length > interval_length - window) | (interval_length < window)
    tl.store(origin + slot, tl.where(due, (oldest + length) % capacity, oldest), mask=live)
    tl.store(cursor + slot, tl.where(due, 0, length) + count, mask=live)
