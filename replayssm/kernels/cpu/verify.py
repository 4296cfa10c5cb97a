"""Speculative decoding on a CPU, Mamba-2 and GDN: a window of T tokens a row, verified against checkpoint and ring.

A task (see `arguments`) reads the state of each of its heads once for all T tokens, row by row in memory order; rows
whose ring could take no further window fold it into the checkpoint in the same pass. The window's tokens are appended
behind the committed ones, whether they will be accepted or not: `replayssm.cache.ReplayCache.commit` moves the cursor.
The formulas are those of `window`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import torch
from torch import Tensor

from replayssm.kernels.cpu.arguments import (
    SHARED_CONFIG,
    Place,
    Sizes,
    address,
    count_flush,
    entry,
    faulty_row,
    new_scratch,
    own_scratch,
    place_of,
    refuse,
    tasks_per_row,
)
from replayssm.kernels.cpu.compilation import compiled, inlined, pasted
from replayssm.kernels.cpu.fold import fold_piece, fold_two
from replayssm.kernels.cpu.lanes import (
    FLOAT32,
    INT32,
    INT64,
    ONE,
    ROW,
    WIDTH,
    advance,
    copy,
    dot,
    dot_row,
    exp,
    fma,
    lane0,
    load,
    load_part,
    load_row,
    mul,
    pointer,
    prefetch_span,
    splat,
    splat_row,
    store,
    store_part,
    widen,
)
from replayssm.kernels.cpu.window import (
    Scratch,
    Token,
    faulty_count,
    finish_window,
    gather_window,
    multiply_keys,
    rnorm,
    split,
    weigh_window,
    window_token,
)

ROWS_AHEAD = 8
"""Rows of the state are asked for so many before they are used: the products of a window leave the memory idle."""
CONFIG: dict[str, Any] = {
    **SHARED_CONFIG,
    "heads_at_a_time": 1,
    "rows_at_a_time": 2,
    "rows_ahead": ROWS_AHEAD,
    "chosen": (
        "by the shortest of several runs at batch 16 on one core of a 2-core CPU (AMD EPYC), Mamba-2 of "
        "Nemotron-3-Nano-4B, T = 4, 3 accepted, float32 state, bfloat16 inputs: ms a step with rows ahead 0: 11.3, 4: "
        "9.1, 16: 9.2, 32: 9.7, 80: 11.0; at 8, 7.5 to 8.0 with the next head's ring asked for too, 8.2 to 8.7 without"
    ),
}
"""The launch configuration and how it was chosen, as a record keeps it."""


class _Ring(NamedTuple):
    """Addresses of a cache layer's tensors: ``values`` x or d, ``decay`` dt or g; no ``k_rnorm`` of Mamba-2."""

    keys: int
    k_rnorm: int
    values: int
    decay: int
    cursor: int
    origin: int
    flushes: int


def verify_step(out: Tensor, layer: Any, inputs: Any, slots: Tensor, *, lengths: Tensor | None = None) -> None:
    """A window of T tokens a row against a `replayssm.cache.CacheLayer` of Mamba-2 or GDN with a window.

    ``out [B,T,H,P]``; ``inputs`` of the family with a T axis behind the rows, bfloat16 or float32 as the ring, with dt,
    A, D, g and beta in float32; ``slots [B]`` int64, -1 for padding; all contiguous. ``lengths [B]`` of integers are
    the tokens that each row's window holds, 0 to T, all T without it; what lies behind is neither read nor written.
    Rows with p > L - T committed tokens fold them into the checkpoint, float32, and count the flush. Mutates ``out``,
    the ring, and checkpoint and ``flushes`` of those rows. Ring entries behind the cursor are never read. Raises
    ``ValueError``, one line, on anything else, before it changes anything.
    """
    if layer.window is None:
        raise ValueError("verify_step needs a cache made with a window; this one decodes one token a step")
    if inputs[0].dim() < 2 or inputs[0].shape[1] != layer.window:
        raise ValueError(f"inputs have shape {list(inputs[0].shape)}; accepted: [B, T, ...] with window={layer.window}")
    if "v" in layer.ring:
        raise ValueError("raw_fold=True keeps v and beta; accepted by the CPU kernels: False, the fold from d")
    counts = None if lengths is None else lengths.to(torch.int64).contiguous()
    size = (layer.capacity, layer.interval_length)
    token, sizes = window_token(layer.family, out, layer.state, inputs, slots, counts, size)
    S, G, H, R, P, N = sizes.state_slots, sizes.groups, sizes.heads, sizes.capacity, sizes.P, sizes.N
    delta, given = layer.family == "gdn", out.dtype
    keys, values, decay = ("k", "d", "g") if delta else ("B", "x", "dt")
    ring = _Ring(
        keys=address(f"ring {keys}", layer.ring[keys], given, (S, G, R, N)),
        k_rnorm=address("ring k_rnorm", layer.ring["k_rnorm"], torch.float32, (S, G, R)) if delta else 0,
        values=address(f"ring {values}", layer.ring[values], torch.float32 if delta else given, (S, H, R, P)),
        decay=address(f"ring {decay}", layer.ring[decay], torch.float32, (S, H, R)),
        cursor=address("cursor", layer.cursor, torch.int32, (S,)),
        origin=address("origin", layer.origin, torch.int32, (S,)),
        flushes=address("flushes", layer.flushes, torch.int64, (S,)),
    )
    wanted = "a cursor of 0 to the longer of interval and window, and a length of 0 to the window's"
    refuse(_verify(token, ring, sizes), slots, S, wanted)


@compiled
def _verify(token: Token, ring: _Ring, sizes: Sizes) -> int:
    longest = max(sizes.interval_length, sizes.window)
    fault = faulty_row(token.slots, sizes.rows, sizes.state_slots, ring.cursor, longest + 1)
    if fault < 0:
        fault = faulty_count(token.counts, token.slots, sizes.rows, 0, sizes.window)
    if fault < 0:
        scratch = new_scratch(sizes, 1)
        for task in numba.prange(sizes.rows * tasks_per_row(sizes)):
            _task(token, ring, sizes, task, scratch)
    return fault


@pasted
def _task(token: Token, ring: _Ring, sizes: Sizes, task: int, scratch: Any) -> None:
    row = task % sizes.rows
    slot = pointer(token.slots, INT64)[row]
    if slot < 0:
        return
    own = split(own_scratch(scratch, sizes, 1), sizes)
    count = sizes.window
    if token.counts != 0:
        count = pointer(token.counts, INT64)[row]
    held = int(pointer(ring.cursor, INT32)[slot])
    oldest = int(pointer(ring.origin, INT32)[slot]) % sizes.capacity
    flush = held > sizes.interval_length - sizes.window or sizes.interval_length < sizes.window
    first, share = task // sizes.rows * sizes.heads_per_task, sizes.heads // sizes.groups
    for head in range(first, min(first + sizes.heads_per_task, sizes.heads)):
        place = place_of(sizes, row, slot, head, held, oldest)
        if head == first or head % share == 0:
            _gather(token, ring, sizes, own, place, count, flush)
        decay = _weigh(token, ring, sizes, own, place)
        weigh_window(token, sizes, own, row, head, count, held)
        state = advance(pointer(token.state, FLOAT32), place.at_slot * sizes.P * sizes.N)
        if flush:
            _fold(state, token, ring, sizes, own, place, decay)
        _history(state, token, ring, sizes, own, place, count, flush)
        if not flush:
            _add_ring(sizes, own, token.A == 0, count, held, decay)
        _finish(token, ring, sizes, own, place, count)
    if flush and first == 0:
        count_flush(ring.flushes, slot)


@inlined
def _gather(token: Token, ring: _Ring, sizes: Sizes, own: Scratch, place: Place, count: int, flush: bool) -> None:
    """Keys of ring and window and the window's queries, for the heads of a group; the first of them appends keys."""
    N, share, rnorms = sizes.N, sizes.heads // sizes.groups, pointer(ring.k_rnorm, FLOAT32)
    at_ring, scale = place.slot * sizes.groups + place.group, ONE
    for j in range(place.length):
        index = entry(at_ring, j, place.oldest, sizes.capacity)
        if ring.k_rnorm != 0:
            scale = rnorms[index]
        widen(advance(own.keys, j * sizes.n_padded), ring.keys, index * N, N, scale, sizes.narrow)
    gather_window(token, sizes, own, place.row, place.group, count, place.length)
    if not flush:
        multiply_keys(sizes, own, token.A == 0, count, 0, place.length)
    if place.head % share == 0:
        for t in range(count):
            index = entry(at_ring, place.length + t, place.oldest, sizes.capacity)
            at = ((place.row * sizes.window + t) * sizes.groups + place.group) * N
            copy(ring.keys, index * N, token.keys, at, N, sizes.narrow)
            if ring.k_rnorm != 0:
                widen(own.row, token.keys, at, N, ONE, sizes.narrow)
                rnorms[index] = rnorm(own.row, N)


@inlined
def _weigh(token: Token, ring: _Ring, sizes: Sizes, own: Scratch, place: Place) -> float:
    """The ring's values, weighted by what decay and step size leave of them; returns the checkpoint's decay."""
    P, decay, since, factor = sizes.P, pointer(ring.decay, FLOAT32), FLOAT32, ONE
    if token.A != 0:
        factor = pointer(token.A, FLOAT32)[place.head]
    for j in range(place.length - 1, -1, -1):
        own.w[j] = since
        since += factor * decay[entry(place.at_slot, j, place.oldest, sizes.capacity)]
    for j in range(0, place.length, WIDTH):
        store(own.w, j, exp(load(own.w, j)))
    for j in range(place.length):
        index, weight = entry(place.at_slot, j, place.oldest, sizes.capacity), own.w[j]
        if token.A != 0:
            weight *= decay[index]
        narrow = 0 if token.A == 0 else sizes.narrow
        widen(advance(own.values, j * sizes.p_padded), ring.values, index * P, P, weight, narrow)
    return lane0(exp(splat(since)))


@inlined
def _add_ring(sizes: Sizes, own: Scratch, delta: bool, count: int, held: int, decay: float) -> None:
    """``history`` of the state behind the ring from that of the checkpoint."""
    p = sizes.p_padded
    for half in range(2 if delta else 1):
        for m in range(half * sizes.window, half * sizes.window + count):
            for v in range(0, sizes.P, WIDTH):
                value = mul(splat(decay), load(own.history, m * p + v))
                for j in range(held):
                    weight = splat(own.products[m * sizes.tokens_padded + j])
                    value = fma(weight, load(own.values, j * p + v), value)
                store(own.history, m * p + v, value)


@inlined
def _finish(token: Token, ring: _Ring, sizes: Sizes, own: Scratch, place: Place, count: int) -> None:
    """Outputs, and what the head appends to the ring."""
    P, R, held, decay = sizes.P, sizes.capacity, place.length, pointer(ring.decay, FLOAT32)
    d = ring.values + place.at_slot * R * P * 4 if token.A == 0 else 0
    finish_window(token, sizes, own, place, count, d)
    for t in range(count):
        index, at = entry(place.at_slot, held + t, place.oldest, R), (place.row * sizes.window + t) * sizes.heads
        decay[index] = pointer(token.decay, FLOAT32)[at + place.head]
        if token.A != 0:
            copy(ring.values, index * P, token.values, (at + place.head) * P, P, sizes.narrow)


# Rows of a head's state: 128 wide in registers, others in scratch ----------------------------------------------------


@inlined
def _history(
    state: Any, token: Token, ring: _Ring, sizes: Sizes, own: Scratch, place: Place, count: int, cached: bool
) -> None:
    """``history``: each row of a head's state times every vector; ``cached`` says that the state has just been used."""
    p, halves = sizes.p_padded, 2 if token.A == 0 else 1
    for v in range(0, sizes.P, 2):
        u = min(v + 1, sizes.P - 1)  # an odd last row is read twice
        if sizes.N == ROW:
            if not cached:
                _prefetch(token, ring, sizes, place, v)
            s, t = load_row(state, v * ROW), load_row(state, u * ROW)
            for half in range(halves):
                for m in range(half * sizes.window, half * sizes.window + count):
                    vector = load_row(own.vectors, m * ROW)
                    own.history[m * p + v], own.history[m * p + u] = dot_row(s, vector), dot_row(t, vector)
        else:
            for i in range(v, u + 1):
                widen(own.row, token.state, (place.at_slot * sizes.P + i) * sizes.N, sizes.N, ONE, 0)
                for half in range(halves):
                    for m in range(half * sizes.window, half * sizes.window + count):
                        own.history[m * p + i] = dot(own.row, advance(own.vectors, m * sizes.n_padded), sizes.N)


@inlined
def _fold(state: Any, token: Token, ring: _Ring, sizes: Sizes, own: Scratch, place: Place, decay: float) -> None:
    """state <- decay state + sum_j value_j key_j over the ring, for a head."""
    N, held = sizes.N, place.length
    for v in range(0, sizes.P, 2):
        u = min(v + 1, sizes.P - 1)  # an odd last row is computed twice, from the same values
        x, y = advance(own.values, v), advance(own.values, u)
        if N == ROW:
            _prefetch(token, ring, sizes, place, v)
            E = splat_row(decay)
            s, t = mul(E, load_row(state, v * ROW)), mul(E, load_row(state, u * ROW))
            s, t = fold_two(s, t, x, y, sizes, held, own.keys)
            store(state, v * ROW, s)
            store(state, u * ROW, t)
        else:
            for i in range(v, u + 1):
                for n in range(0, N, WIDTH):
                    s = mul(splat(decay), load_part(state, i * N + n, N - n))
                    s = fold_piece(s, advance(own.values, i), sizes, held, advance(own.keys, n))
                    store_part(state, i * N + n, N - n, s)


@inlined
def _prefetch(token: Token, ring: _Ring, sizes: Sizes, place: Place, v: int) -> None:
    """Ask for two rows that come `ROWS_AHEAD`, and for a ring token of the next head."""
    prefetch_span(token.state + 4 * (place.at_slot * sizes.P + v + ROWS_AHEAD) * ROW, 8 * ROW)
    if v // 2 < place.length:
        size = sizes.P * (4 if token.A == 0 else 4 - 2 * sizes.narrow)
        prefetch_span(ring.values + entry(place.at_slot + 1, v // 2, place.oldest, sizes.capacity) * size, size)
