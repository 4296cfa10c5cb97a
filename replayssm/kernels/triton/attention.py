"""Attention of one token a row, or of a window, to its slot's keys and values; only those that are there are read.

The query heads that share a KV head, of all tokens, are the rows of its products. Few rows with long pasts would leave
most of a GPU idle: there a past is cut into pieces, whose softmaxes a second launch joins. How long a past is, is read
on the device, so that one CUDA graph serves all lengths.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from replayssm.kernels.triton.launch import power_of_two

POSITIONS = (64, 32, 16)
"""Read at a time: the first of these for which a program's shared memory has room, the last if it has for none."""
PROGRAMS = 512
"""That fill a GPU."""
SHORTEST = 256
"""Positions for which a piece of its own pays."""


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor, slots: Tensor) -> Tensor:
    """Attention ``[B,T,Hq,D]`` of ``q [B,T,Hq,D]`` to ``length [B]`` int64 positions and to those of ``k, v
    [B,T,Hkv,D]`` up to its own token, which are written behind them into ``keys, values [S,Hkv,capacity,D]``,
    contiguous.

    Row i is slot i, or padding where ``slots [B]`` int64 holds -1: nothing is written then, and its output means
    nothing. The last axis of all is contiguous. Lengths are not checked.
    """
    rows, tokens, heads, size = q.shape
    kv_heads, capacity = keys.shape[1:3]
    pieces = max(1, min(triton.cdiv(PROGRAMS, rows * kv_heads), triton.cdiv(capacity, SHORTEST)))
    out = torch.empty(rows, tokens, heads, size, dtype=q.dtype, device=q.device)
    part, scale = out, out
    if pieces > 1:
        part = torch.empty(rows, tokens, heads, pieces, size, dtype=torch.float32, device=q.device)
        scale = torch.empty(rows, tokens, heads, pieces, 2, dtype=torch.float32, device=q.device)
    share = heads // kv_heads
    queries, padded = max(16, power_of_two(tokens * share)), max(16, power_of_two(size))
    _attend_kernel[(rows, kv_heads, pieces)](
        part,
        scale,
        q,
        k,
        v,
        keys,
        values,
        length,
        slots,
        q.stride()[:3],
        k.stride()[:3],
        v.stride()[:3],
        capacity,
        size**-0.5,
        T=tokens,
        SHARE=share,
        QUERIES=queries,
        SIZE=size,
        PADDED=padded,
        POSITIONS=_positions(queries, padded, q),
        PIECES=pieces,
        num_warps=4,
    )
    if pieces > 1:
        sizes = {"SIZE": size, "PADDED": power_of_two(size), "PIECES": pieces, "BLOCK": power_of_two(pieces)}
        _join_kernel[(rows * tokens, heads)](out, part, scale, slots, T=tokens, **sizes)
    return out


def _positions(queries: int, size: int, like: Tensor) -> int:
    limit = math.inf if like.device.type == "cpu" else shared_limit_bytes(driver.active.get_current_device())
    room = (n for n in POSITIONS if shared_bytes(queries, size, n, like.dtype) <= limit)
    return next(room, POSITIONS[-1])


def shared_bytes(queries: int, size: int, positions: int, dtype: torch.dtype) -> int:
    """The most that `_attend_kernel` takes of a program's shared memory, as Triton 3.6 lays it out: two tiles of keys
    and two of values on their way, queries and weights, both in two parts where a product is three; from 64 queries
    on, where warps may multiply together, three tiles of each and the queries."""
    parts = 2 if dtype == torch.float32 else 1
    elements = 4 * positions * size + parts * queries * (size + positions)
    if queries >= 64:
        elements = max(elements, 6 * positions * size + queries * size)
    return dtype.itemsize * elements


@functools.cache
def shared_limit_bytes(device: int) -> int:
    """The most shared memory that a program may have there."""
    return driver.active.utils.get_device_properties(device)["max_shared_mem"]


@triton.jit
def _attend_kernel(
    part,
    scale,
    q,
    k,
    v,
    keys,
    values,
    length,
    slots,
    q_strides,
    k_strides,
    v_strides,
    capacity,
    root,
    T: tl.constexpr,
    SHARE: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    POSITIONS: tl.constexpr,
    PIECES: tl.constexpr,
):
    row, head, piece = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if tl.load(slots + row) < 0:
        return
    past = tl.load(length + row).to(tl.int32)
    d, query, at = tl.arange(0, PADDED), tl.arange(0, QUERIES), tl.arange(0, POSITIONS)
    token, of_head = query // SHARE, head * SHARE + query % SHARE
    whole = d < SIZE
    mine = (query < T * SHARE)[:, None] & whole[None]
    asked = row * q_strides[0] + token[:, None] * q_strides[1] + of_head[:, None] * q_strides[2] + d[None]
    queries = tl.load(q + asked, mask=mine, other=0.0)
    base = (row * tl.num_programs(1) + head) * capacity * SIZE
    if piece == 0:
        highest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        result = tl.zeros([QUERIES, PADDED], tl.float32)
        for w in tl.static_range(T):
            new_k = tl.load(k + row * k_strides[0] + w * k_strides[1] + head * k_strides[2] + d, mask=whole, other=0.0)
            new_v = tl.load(v + row * v_strides[0] + w * v_strides[1] + head * v_strides[2] + d, mask=whole, other=0.0)
            tl.store(keys + base + (past + w) * SIZE + d, new_k, mask=whole)
            tl.store(values + base + (past + w) * SIZE + d, new_v, mask=whole)
            score = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32)[None], 1) * root
            if w == 0:  # which every token sees
                highest, total = score, tl.full([QUERIES], 1.0, tl.float32)
                result = tl.zeros([QUERIES, PADDED], tl.float32) + new_v.to(tl.float32)[None]
            else:
                score = tl.where(token >= w, score, -float("inf"))
                higher = tl.maximum(highest, score)
                weight, faded = tl.exp(score - higher), tl.exp(highest - higher)
                total = total * faded + weight
                result = result * faded[:, None] + weight[:, None] * new_v.to(tl.float32)[None]
                highest = higher
    else:
        highest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        result = tl.zeros([QUERIES, PADDED], tl.float32)
    each = tl.cdiv(tl.cdiv(past, PIECES), POSITIONS) * POSITIONS
    end = tl.minimum(past, (piece + 1) * each)
    for first in range(piece * each, end, POSITIONS):
        there = first + at < end
        place = base + (first + at)[:, None] * SIZE + d[None]
        seen = there[:, None] & whole[None]
        found = tl.load(keys + place, mask=seen, other=0.0)
        score = tl.dot(queries, tl.trans(found), input_precision="tf32x3") * root
        score = tl.where(there[None], score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        faded = tl.exp(highest - higher)
        total = total * faded + tl.sum(weight, 1)
        found = tl.load(values + place, mask=seen, other=0.0)
        result = result * faded[:, None] + tl.dot(weight.to(found.dtype), found, input_precision="tf32x3")
        highest = higher
    rows = (row * T + token) * tl.num_programs(1) * SHARE + of_head
    if PIECES == 1:
        tl.store(part + rows[:, None] * SIZE + d[None], (result / total[:, None]).to(part.dtype.element_ty), mask=mine)
    else:
        rows = rows * PIECES + piece
        tl.store(part + rows[:, None] * SIZE + d[None], result, mask=mine)
        tl.store(scale + rows * 2, highest, mask=query < T * SHARE)
        tl.store(scale + rows * 2 + 1, total, mask=query < T * SHARE)


@triton.jit
def _join_kernel(
    out,
    part,
    scale,
    slots,
    T: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots + row // T) < 0:
        return
    place = row * tl.num_programs(1) + tl.program_id(1)
    d, piece = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    highest = tl.load(scale + (place * PIECES + piece) * 2, mask=piece < PIECES, other=-float("inf"))
    total = tl.load(scale + (place * PIECES + piece) * 2 + 1, mask=piece < PIECES, other=0.0)
    weight = tl.exp(highest - tl.max(highest, 0))
    seen = (piece < PIECES)[:, None] & (d < SIZE)[None]
    result = tl.load(part + (place * PIECES + piece)[:, None] * SIZE + d[None], mask=seen, other=0.0)
    result = tl.sum(result * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + place * SIZE + d, result.to(out.dtype.element_ty), mask=d < SIZE)
