"""Mamba-2 on a CPU: the stored-state step and the replay step, float32 state, bfloat16 or float32 inputs and ring.

A task (see `arguments`) walks the states of its heads row by row in memory order, each row of N floats once; a read
walks four heads that lie far apart at a time. What lies elsewhere, the ring and the output, is asked for ahead. B, C
and the ring's products B_j . C are prepared once a group. The formulas are those of `replayssm.recurrence.mamba2`, of
which nothing is imported.
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
    faulty_slot,
    new_scratch,
    own_scratch,
    place_of,
    refuse,
    shape,
    sizes_of,
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
    accumulate,
    add,
    advance,
    copy,
    div,
    dot,
    dot_row,
    exp,
    fma,
    lane0,
    load,
    load_input,
    load_part,
    load_row,
    mul,
    pointer,
    prefetch,
    prefetch_span,
    prefetch_span_to_write,
    prefetch_to_write,
    splat,
    splat_row,
    store,
    store_input,
    store_part,
    total,
    widen,
)

__all__ = ["CONFIG", "replay_step", "stored_step"]

HEADS_READ = 4
"""Heads that a task of a replay step reads at a time."""
CONFIG: dict[str, Any] = {
    **SHARED_CONFIG,
    "heads_at_a_time": {"stored": 1, "read": HEADS_READ, "fold": 1},
    "rows_at_a_time": {"stored": 1, "read": 1, "fold": 2},
    "chosen": (
        "by medians of interleaved runs at batch 64 on a 2-core CPU, in which several heads at a time were tried for "
        "the stored step and for reads"
    ),
}
"""The launch configuration of both steps and how it was chosen, as a record keeps it."""


class _Token(NamedTuple):
    """Addresses of a step's arguments; 0 for a D or z that the layer does not have."""

    out: int
    state: int
    x: int
    B: int
    C: int
    dt: int
    A: int
    D: int
    z: int
    slots: int


class _Ring(NamedTuple):
    """Addresses of a cache layer's tensors."""

    x: int
    B: int
    dt: int
    cursor: int
    origin: int
    flushes: int


class _Scratch(NamedTuple):
    """A thread's float32 scratch: for each token B, weighted x, B . C and weight; for a head C and y."""

    B: Any
    x: Any
    BC: Any
    w: Any
    C: Any
    y: Any
    decay: Any


def stored_step(out: Tensor, state: Tensor, inputs: Any, slots: Tensor) -> None:
    """The recurrence for one token a row, in place.

    ``state [S,H,P,N]`` float32; ``inputs`` a `replayssm.recurrence.mamba2.Inputs` with x, B, C, z bfloat16 or float32
    and dt, A, D float32; ``out [B,H,P]`` as x; ``slots [B]`` int64, -1 for padding. All contiguous. Mutates ``out`` and
    ``state``. Raises ``ValueError`` on anything else, before it changes anything.
    """
    token, sizes = _token(out, state, inputs, slots, None)
    refuse(_stored(token, sizes), slots, sizes.state_slots)


def replay_step(out: Tensor, layer: Any, inputs: Any, slots: Tensor) -> None:
    """Standard decoding for one token a row; arguments as `stored_step`, with a `replayssm.cache.CacheLayer`.

    Rows with a full ring fold ring and token into the checkpoint, take their output from it and count the flush; the
    others take it from checkpoint, ring and token, and append the token. Ring entries behind the cursor are never read.
    """
    token, sizes = _token(out, layer.state, inputs, slots, layer)
    dtype, S, R = inputs.x.dtype, sizes.state_slots, sizes.capacity
    ring = _Ring(
        x=address("ring x", layer.ring["x"], dtype, (S, sizes.heads, R, sizes.P)),
        B=address("ring B", layer.ring["B"], dtype, (S, sizes.groups, R, sizes.N)),
        dt=address("ring dt", layer.ring["dt"], torch.float32, (S, sizes.heads, R)),
        cursor=address("cursor", layer.cursor, torch.int32, (S,)),
        origin=address("origin", layer.origin, torch.int32, (S,)),
        flushes=address("flushes", layer.flushes, torch.int64, (S,)),
    )
    refuse(_replay(token, ring, sizes), slots, S)


def _token(out: Tensor, state: Tensor, inputs: Any, slots: Tensor, layer: Any) -> tuple[_Token, Sizes]:
    rows, H, P = shape("x", inputs.x, "BHP")
    _, G, N = shape("B", inputs.B, "BGN")
    dtype = inputs.x.dtype
    sizes = sizes_of(state, rows, G, dtype, layer, vectors=(1, 1, 3))
    token = _Token(
        out=address("out", out, dtype, (rows, H, P)),
        state=address("state", state, torch.float32, (sizes.state_slots, H, P, N)),
        x=address("x", inputs.x, dtype, (rows, H, P)),
        B=address("B", inputs.B, dtype, (rows, G, N)),
        C=address("C", inputs.C, dtype, (rows, G, N)),
        dt=address("dt", inputs.dt, torch.float32, (rows, H)),
        A=address("A", inputs.A, torch.float32, (H,)),
        D=0 if inputs.D is None else address("D", inputs.D, torch.float32, (H,)),
        z=0 if inputs.z is None else address("z", inputs.z, dtype, (rows, H, P)),
        slots=address("slots", slots, torch.int64, (rows,)),
    )
    return token, sizes


# Work split ----------------------------------------------------------------------------------------------------------


@compiled
def _stored(token: _Token, sizes: Sizes) -> int:
    fault = faulty_slot(token.slots, sizes.rows, sizes.state_slots)
    if fault < 0:
        scratch = new_scratch(sizes, 1)
        for task in numba.prange(sizes.rows * tasks_per_row(sizes)):
            _stored_task(token, sizes, task, scratch)
    return fault


@compiled
def _replay(token: _Token, ring: _Ring, sizes: Sizes) -> int:
    fault = faulty_row(token.slots, sizes.rows, sizes.state_slots, ring.cursor, sizes.interval_length)
    if fault < 0:
        scratch = new_scratch(sizes, HEADS_READ)
        for task in numba.prange(sizes.rows * tasks_per_row(sizes)):
            _replay_task(token, ring, sizes, task, scratch)
    return fault


@pasted
def _stored_task(token: _Token, sizes: Sizes, task: int, scratch: Any) -> None:
    row = task % sizes.rows
    slot = pointer(token.slots, INT64)[row]
    if slot < 0:
        return
    own = _split(own_scratch(scratch, sizes, 1), sizes)
    dt, A = pointer(token.dt, FLOAT32), pointer(token.A, FLOAT32)
    first = task // sizes.rows * sizes.heads_per_task
    for head in range(first, min(first + sizes.heads_per_task, sizes.heads)):
        at, share = row * sizes.heads + head, sizes.heads // sizes.groups
        if head == first or head % share == 0:
            at_group = (row * sizes.groups + head // share) * sizes.N
            widen(own.B, token.B, at_group, sizes.N, ONE, sizes.narrow)
            widen(own.C, token.C, at_group, sizes.N, ONE, sizes.narrow)
        _prefetch_output(token, sizes, at)
        decay = lane0(exp(splat(A[head] * dt[at])))
        widen(own.x, token.x, at * sizes.P, sizes.P, dt[at], sizes.narrow)
        state = advance(pointer(token.state, FLOAT32), (slot * sizes.heads + head) * sizes.P * sizes.N)
        _step_rows(state, sizes, decay, own)
        _finish(token, sizes, at, head, own.y)


@pasted
def _replay_task(token: _Token, ring: _Ring, sizes: Sizes, task: int, scratch: Any) -> None:
    row = task % sizes.rows
    slot = pointer(token.slots, INT64)[row]
    if slot < 0:
        return
    own = own_scratch(scratch, sizes, HEADS_READ)
    length = int(pointer(ring.cursor, INT32)[slot])
    oldest = int(pointer(ring.origin, INT32)[slot]) % sizes.capacity
    first = task // sizes.rows * sizes.heads_per_task
    end = min(first + sizes.heads_per_task, sizes.heads)
    if length < sizes.interval_length - 1:
        _read_heads(token, ring, sizes, own, row, slot, first, end, length, oldest)
        return
    for head in range(first, end):
        place = place_of(sizes, row, slot, head, length, oldest)
        _prepare(token, ring, sizes, _split(own, sizes), place, head == first)
        _fold_head(token, ring, sizes, _split(own, sizes), place)
        _finish(token, sizes, place.at, head, _split(own, sizes).y)
    if first == 0:
        count_flush(ring.flushes, slot)


@inlined
def _read_heads(
    token: _Token,
    ring: _Ring,
    sizes: Sizes,
    own: Any,
    row: int,
    slot: int,
    first: int,
    end: int,
    length: int,
    oldest: int,
) -> None:
    """Heads ``first`` to ``end``, several at a time that lie far apart."""
    span = (end - first + HEADS_READ - 1) // HEADS_READ
    for step in range(span):
        active = (end - first - step + span - 1) // span
        for stream in range(active):
            place = place_of(sizes, row, slot, first + stream * span + step, length, oldest)
            mine = _split(advance(own, stream * sizes.floats), sizes)
            _prepare(token, ring, sizes, mine, place, step == 0)
            _prefetch_append(token, ring, sizes, place)
            if place.head % (sizes.heads // sizes.groups) == 0:
                _append_B(token, ring, sizes, place)
        at = slot * sizes.heads + first + step
        state = advance(pointer(token.state, FLOAT32), at * sizes.P * sizes.N)
        _read_rows(state, ring, sizes, _split(own, sizes), at, span, active, length, oldest)
        for stream in range(active):
            place = place_of(sizes, row, slot, first + stream * span + step, length, oldest)
            mine = _split(advance(own, stream * sizes.floats), sizes)
            _read_head(token, ring, sizes, mine, place)
            _finish(token, sizes, place.at, place.head, mine.y)


@inlined
def _prepare(token: _Token, ring: _Ring, sizes: Sizes, own: _Scratch, place: Place, start: bool) -> None:
    if start or place.head % (sizes.heads // sizes.groups) == 0:
        _gather(token, ring, sizes, own, place)
    own.decay[0] = _weigh(token, ring, sizes, own, place)


@inlined
def _split(own: Any, sizes: Sizes) -> _Scratch:
    x = advance(own, sizes.interval_length * sizes.n_padded)
    BC = advance(x, sizes.interval_length * sizes.p_padded)
    w = advance(BC, sizes.tokens_padded)
    C = advance(w, sizes.tokens_padded)
    y = advance(C, sizes.n_padded)
    return _Scratch(own, x, BC, w, C, y, advance(y, sizes.p_padded))


# One group, one head -------------------------------------------------------------------------------------------------


@inlined
def _gather(token: _Token, ring: _Ring, sizes: Sizes, own: _Scratch, place: Place) -> None:
    """C of a group, B of its ring, oldest first, and of the token, and their products with C."""
    N, at = sizes.N, (place.row * sizes.groups + place.group) * sizes.N
    widen(own.C, token.C, at, N, ONE, sizes.narrow)
    for j in range(place.length):
        index = entry(place.slot * sizes.groups + place.group, j, place.oldest, sizes.capacity)
        widen(advance(own.B, j * sizes.n_padded), ring.B, index * N, N, ONE, sizes.narrow)
    widen(advance(own.B, place.length * sizes.n_padded), token.B, at, N, ONE, sizes.narrow)
    for j in range(place.length + 1):
        own.BC[j] = dot(advance(own.B, j * sizes.n_padded), own.C, N)


@inlined
def _append_B(token: _Token, ring: _Ring, sizes: Sizes, place: Place) -> None:
    last = entry(place.slot * sizes.groups + place.group, place.length, place.oldest, sizes.capacity)
    copy(ring.B, last * sizes.N, token.B, (place.row * sizes.groups + place.group) * sizes.N, sizes.N, sizes.narrow)


@inlined
def _weigh(token: _Token, ring: _Ring, sizes: Sizes, own: _Scratch, place: Place) -> float:
    """Weights dt_j exp(A (c - c_j)) of ring and token; returns the checkpoint's decay exp(A c)."""
    A, dt = pointer(token.A, FLOAT32)[place.head], pointer(token.dt, FLOAT32)[place.at]
    ring_dt, since = pointer(ring.dt, FLOAT32), dt
    own.w[place.length] = FLOAT32
    for j in range(place.length - 1, -1, -1):
        own.w[j] = A * since
        since += ring_dt[entry(place.at_slot, j, place.oldest, sizes.capacity)]
    for j in range(0, place.length + 1, WIDTH):
        store(own.w, j, exp(load(own.w, j)))
    own.w[place.length] *= dt
    for j in range(place.length):
        own.w[j] *= ring_dt[entry(place.at_slot, j, place.oldest, sizes.capacity)]
    return lane0(exp(splat(A * since)))


@inlined
def _read_head(token: _Token, ring: _Ring, sizes: Sizes, own: _Scratch, place: Place) -> None:
    """Output from the checkpoint's part in ``y``, ring and token, then append the token."""
    P, decay = sizes.P, splat(own.decay[0])
    for p in range(0, P, WIDTH):
        store(own.y, p, mul(decay, load(own.y, p)))
    for j in range(place.length):
        at_ring = entry(place.at_slot, j, place.oldest, sizes.capacity)
        accumulate(own.y, own.w[j] * own.BC[j], ring.x, at_ring * P, P, sizes.narrow)
    accumulate(own.y, own.w[place.length] * own.BC[place.length], token.x, place.at * P, P, sizes.narrow)
    last = entry(place.at_slot, place.length, place.oldest, sizes.capacity)
    copy(ring.x, last * P, token.x, place.at * P, P, sizes.narrow)
    pointer(ring.dt, FLOAT32)[last] = pointer(token.dt, FLOAT32)[place.at]


@inlined
def _prefetch_entry(ring: _Ring, sizes: Sizes, at_slot: int, j: int, oldest: int) -> None:
    """Ask for x of ring token j, and once for the next head's dt."""
    size = sizes.P * (4 - 2 * sizes.narrow)
    prefetch_span(ring.x + entry(at_slot, j, oldest, sizes.capacity) * size, size)
    if j == 0:
        prefetch(ring.dt + 4 * (at_slot + 1) * sizes.capacity)


@inlined
def _prefetch_append(token: _Token, ring: _Ring, sizes: Sizes, place: Place) -> None:
    """Ask for what is written when the head is read: the token's ring entry and the output."""
    last, size = entry(place.at_slot, place.length, place.oldest, sizes.capacity), sizes.P * (4 - 2 * sizes.narrow)
    prefetch_span_to_write(ring.x + last * size, size)
    prefetch_to_write(ring.dt + 4 * last)
    _prefetch_output(token, sizes, place.at)


@inlined
def _prefetch_output(token: _Token, sizes: Sizes, at: int) -> None:
    """Ask for a head's output, to write it, and for the x that comes with it."""
    size = sizes.P * (4 - 2 * sizes.narrow)
    prefetch_span_to_write(token.out + at * size, size)
    prefetch_span(token.x + at * size, size)


@inlined
def _fold_head(token: _Token, ring: _Ring, sizes: Sizes, own: _Scratch, place: Place) -> None:
    """Fold ring and token into the checkpoint, in one pass that also gives the output."""
    P = sizes.P
    for j in range(place.length):
        at_ring = entry(place.at_slot, j, place.oldest, sizes.capacity) * P
        widen(advance(own.x, j * sizes.p_padded), ring.x, at_ring, P, own.w[j], sizes.narrow)
    x = advance(own.x, place.length * sizes.p_padded)
    widen(x, token.x, place.at * P, P, own.w[place.length], sizes.narrow)
    _prefetch_output(token, sizes, place.at)
    _fold_rows(advance(pointer(token.state, FLOAT32), place.at_slot * P * sizes.N), ring, sizes, own, place)


@inlined
def _finish(token: _Token, sizes: Sizes, at: int, head: int, y: Any) -> None:
    """Skip connection, gate and the one rounding of a head's output."""
    D = pointer(token.D, FLOAT32)[head] if token.D != 0 else FLOAT32
    for p in range(0, sizes.P, WIDTH):
        count, start = sizes.P - p, at * sizes.P + p
        value = load(y, p)
        if token.D != 0:
            value = fma(splat(D), load_input(token.x, start, count, sizes.narrow), value)
        if token.z != 0:
            z = load_input(token.z, start, count, sizes.narrow)
            value = mul(value, div(z, add(splat(ONE), exp(mul(splat(-ONE), z)))))
        store_input(token.out, start, count, value, sizes.narrow)


# Rows of a head's state: 128 wide in registers, others in pieces -----------------------------------------------------


@inlined
def _step_rows(state: Any, sizes: Sizes, decay: float, own: _Scratch) -> None:
    """s <- decay s + x B and y = s . C for each row."""
    if sizes.N == ROW:
        B, C = load_row(own.B, 0), load_row(own.C, 0)
        for p in range(sizes.P):
            s = fma(load_row(state, p * ROW), splat_row(decay), mul(B, splat_row(own.x[p])))
            store(state, p * ROW, s)
            own.y[p] = dot_row(s, C)
        return
    for p in range(sizes.P):
        x, y = splat(own.x[p]), splat(FLOAT32)
        for n in range(0, sizes.N, WIDTH):
            at, count = p * sizes.N + n, sizes.N - n
            s = fma(load_part(state, at, count), splat(decay), mul(load(own.B, n), x))
            store_part(state, at, count, s)
            y = fma(s, load(own.C, n), y)
        own.y[p] = total(y)


@inlined
def _read_rows(
    state: Any, ring: _Ring, sizes: Sizes, own: _Scratch, at: int, span: int, active: int, length: int, oldest: int
) -> None:
    """y = s . C for each row of ``active`` heads, ``span`` apart; meanwhile asks for the heads' rings."""
    for p in range(sizes.P):
        for stream in range(active):
            if p < length:
                _prefetch_entry(ring, sizes, at + stream * span, p, oldest)
            row = (stream * span * sizes.P + p) * sizes.N
            if sizes.N == ROW:
                own.y[stream * sizes.floats + p] = dot_row(load_row(state, row), load_row(own.C, stream * sizes.floats))
            else:
                y = splat(FLOAT32)
                for n in range(0, sizes.N, WIDTH):
                    y = fma(load_part(state, row + n, sizes.N - n), load(own.C, stream * sizes.floats + n), y)
                own.y[stream * sizes.floats + p] = total(y)


@inlined
def _fold_rows(state: Any, ring: _Ring, sizes: Sizes, own: _Scratch, place: Place) -> None:
    """s <- decay s + sum_j x_j B_j and y = s . C for each row; meanwhile asks for the next head's ring."""
    tokens, decay = place.length + 1, own.decay[0]
    if sizes.N == ROW:
        E = splat_row(decay)
        for p in range(0, sizes.P, 2):
            if p // 2 < place.length:
                _prefetch_entry(ring, sizes, place.at_slot + 1, p // 2, place.oldest)
            q = min(p + 1, sizes.P - 1)  # an odd last row is computed twice, from the same values
            s, t = mul(E, load_row(state, p * ROW)), mul(E, load_row(state, q * ROW))
            s, t = fold_two(s, t, advance(own.x, p), advance(own.x, q), sizes, tokens, own.B)
            store(state, p * ROW, s)
            store(state, q * ROW, t)
            own.y[p], own.y[q] = dot_row(s, load_row(own.C, 0)), dot_row(t, load_row(own.C, 0))
        return
    for p in range(sizes.P):
        y = splat(FLOAT32)
        for n in range(0, sizes.N, WIDTH):
            at, count = p * sizes.N + n, sizes.N - n
            s = mul(splat(decay), load_part(state, at, count))
            s = fold_piece(s, advance(own.x, p), sizes, tokens, advance(own.B, n))
            store_part(state, at, count, s)
            y = fma(s, load(own.C, n), y)
        own.y[p] = total(y)
