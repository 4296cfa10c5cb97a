"""Cursors of a replay peer that keeps them outside its kernels: one launch a pass, without a copy from the host."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def advance(cursor: Tensor, flush: Tensor, flushes: Tensor, slots: Tensor, interval_length: int) -> None:
    """After a step: rows with ``flush [B]`` int8 set are counted in ``flushes [B]`` int64 and their ``cursor [B]``
    int32 returns to 0, the others' moves on by one; then ``flush`` says which rows hold ``interval_length - 1``
    tokens. Padding rows, -1 in ``slots [B]``, stay as they are.
    """
    rows = len(slots)
    _advance_kernel[(triton.cdiv(rows, BLOCK),)](
        cursor, flush, flushes, slots, rows, interval_length, BLOCK=BLOCK, num_warps=1
    )


@triton.jit
def _advance_kernel(cursor, flush, flushes, slots, rows, interval_length, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = tl.load(slots + row, mask=row < rows, other=-1) >= 0
    flushed = tl.load(flush + row, mask=live, other=0)
    moved = tl.where(flushed != 0, 0, tl.load(cursor + row, mask=live, other=0) + 1)
    tl.store(flushes + row, tl.load(flushes + row, mask=live, other=0) + flushed, mask=live)
    tl.store(cursor + row, moved, mask=live)
    tl.store(flush + row, (moved == interval_length - 1).to(tl.int8), mask=live)
