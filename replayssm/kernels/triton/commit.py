"""The commit of standard decoding in one launch: cursors move on the device, without a copy to the host or back."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def commit(cursor: Tensor, origin: Tensor, slots: Tensor, interval_length: int, capacity: int) -> None:
    """What `ReplayCache.commit` does after one token a row: a ring with ``interval_length - 1`` tokens was folded, so
    its cursor returns to 0 and its origin moves behind them; every other cursor moves on by one.

    ``cursor, origin [S]`` int32, mutated; ``slots [B]`` int64, each at most once, -1 for padding. Can be captured in a
    CUDA graph. Slot numbers are not checked.
    """
    rows = len(slots)
    if rows:
        _commit_kernel[(triton.cdiv(rows, BLOCK),)](
            cursor, origin, slots, rows, interval_length, capacity, BLOCK=BLOCK, num_warps=1
        )


@triton.jit
def _commit_kernel(cursor, origin, slots, rows, interval_length, capacity, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    live = slot >= 0
    length = tl.load(cursor + slot, mask=live, other=0)
    oldest = tl.load(origin + slot, mask=live, other=0)
    due = length == interval_length - 1
    tl.store(origin + slot, tl.where(due, (oldest + length) % capacity, oldest), mask=live)
    tl.store(cursor + slot, tl.where(due, 0, length + 1), mask=live)
