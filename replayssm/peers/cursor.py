"""Cursors of replay peers that keep them outside their kernels: one launch a pass, without a copy from the host."""

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


def advance_ring(held: Tensor, start: Tensor, flushes: Tensor, slots: Tensor, window: int, entries: int) -> None:
    """After a step that folded the rings with ``window`` tokens and then appended the token of every row: those hold 1,
    and ``start`` is behind what was folded; the others hold one more. ``held, start [S]`` int32 and ``flushes [S]``
    int64 are mutated; padding rows, -1 in ``slots [B]``, and slots of no row stay as they are.
    """
    rows = len(slots)
    _advance_ring_kernel[(triton.cdiv(rows, BLOCK),)](
        held, start, flushes, slots, rows, window, entries, BLOCK=BLOCK, num_warps=1
    )


@triton.jit
def _advance_ring_kernel(held, start, flushes, slots, rows, window, entries, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    live = slot >= 0
    length = tl.load(held + slot, mask=live, other=0)
    oldest = tl.load(start + slot, mask=live, other=0)
    folded = length == window
    tl.store(start + slot, tl.where(folded, (oldest + length) % entries, oldest), mask=live)
    tl.store(held + slot, tl.where(folded, 1, length + 1), mask=live)
    tl.store(flushes + slot, tl.load(flushes + slot, mask=live, other=0) + folded.to(tl.int64), mask=live)
