"""The delta rule on a CPU, for GDN and KDA: they differ in the log decay, one a head or one a key channel.

State rows are values, contiguous in the key channels: every row is decayed, corrected and read on its own, so that one
pass over the row does all. Reading dots a row with q and k, both scaled by the checkpoint's decay; a fold keeps the row
in the first-level cache between adding the ring and adding the current token, whose d needs the folded row. The work is
split as in `arguments`, the formulas are those of `replayssm.recurrence.gdn` and `kda`, of which nothing is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
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
    add,
    advance,
    copy,
    dot,
    dot_row,
    exp,
    fma,
    load,
    load_input,
    load_input_row,
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

CONFIG: dict[str, Any] = {
    **SHARED_CONFIG,
    "heads_at_a_time": {"stored": 1, "read": 1, "fold": 1},
    "rows_at_a_time": {"stored": 1, "read": 1, "fold": 2},
    "chosen": (
        "by medians of interleaved runs at batch 64 on a 2-core CPU (AMD EPYC); stored step, float32 state, bfloat16 "
        "inputs, over the time with 1 head at a time: 2 heads, row by row in turn, 1.13 (GDN of Qwen3.5-4B) and 1.17 "
        "(KDA of Kimi-Linear-48B), 2 heads, both rows loaded first, 1.16 and 1.20, 4 heads in turn 1.37 and 1.32; "
        "several heads at a time were tried for reads too"
    ),
}
"""The launch configuration of both steps of GDN and KDA and how it was chosen, as a record keeps it."""
EPS = np.float32(1e-6)
_MINUS = np.float32(-1)


class _Token(NamedTuple):
    """Addresses of a step's arguments."""

    out: int
    state: int
    q: int
    k: int
    v: int
    g: int
    beta: int
    slots: int


class _Ring(NamedTuple):
    """Addresses of a cache layer's tensors."""

    k: int
    k_rnorm: int
    d: int
    g: int
    cursor: int
    origin: int
    flushes: int


class _Scratch(NamedTuple):
    """A thread's float32 scratch. For each ring token: key (normalised; for KDA decayed too), weighted d, weight w, key
    times q and k, the same weighted (cq, ck). For a head: q and k normalised, decay E, E q, E k, summed log decay,
    state times q and k, and v.
    """

    keys: Any
    d: Any
    w: Any
    kq: Any
    kk: Any
    cq: Any
    ck: Any
    q: Any
    k: Any
    E: Any
    Eq: Any
    Ek: Any
    since: Any
    sq: Any
    sk: Any
    v: Any


def stored_step(out: Tensor, state: Tensor, inputs: Any, slots: Tensor, *, channels: bool) -> None:
    """See `gdn.stored_step`; ``channels`` says that g has a key axis."""
    token, sizes = _token(out, state, inputs, slots, None, channels)
    refuse(_stored(token, sizes, int(channels)), slots, sizes.state_slots)


def replay_step(out: Tensor, layer: Any, inputs: Any, slots: Tensor, *, channels: bool) -> None:
    """See `gdn.replay_step`; ``channels`` says that g has a key axis."""
    token, sizes = _token(out, layer.state, inputs, slots, layer, channels)
    S, R = sizes.state_slots, sizes.capacity
    ring = _Ring(
        k=address("ring k", layer.ring["k"], inputs.k.dtype, (S, sizes.groups, R, sizes.N)),
        k_rnorm=address("ring k_rnorm", layer.ring["k_rnorm"], torch.float32, (S, sizes.groups, R)),
        d=address("ring d", layer.ring["d"], torch.float32, (S, sizes.heads, R, sizes.P)),
        g=address("ring g", layer.ring["g"], torch.float32, (S, sizes.heads, R, *([sizes.N] if channels else []))),
        cursor=address("cursor", layer.cursor, torch.int32, (S,)),
        origin=address("origin", layer.origin, torch.int32, (S,)),
        flushes=address("flushes", layer.flushes, torch.int64, (S,)),
    )
    refuse(_replay(token, ring, sizes, int(channels)), slots, S)


def _token(out: Tensor, state: Tensor, inputs: Any, slots: Tensor, layer: Any, channels: bool) -> tuple[_Token, Sizes]:
    rows, HV, V = shape("v", inputs.v, "BHV")
    _, HK, K = shape("k", inputs.k, "BHK")
    dtype = inputs.v.dtype
    sizes = sizes_of(state, rows, HK, dtype, layer, vectors=(3, 6, 5))
    token = _Token(
        out=address("out", out, dtype, (rows, HV, V)),
        state=address("state", state, torch.float32, (sizes.state_slots, HV, V, K)),
        q=address("q", inputs.q, dtype, (rows, HK, K)),
        k=address("k", inputs.k, dtype, (rows, HK, K)),
        v=address("v", inputs.v, dtype, (rows, HV, V)),
        g=address("g", inputs.g, torch.float32, (rows, HV, *([K] if channels else []))),
        beta=address("beta", inputs.beta, torch.float32, (rows, HV)),
        slots=address("slots", slots, torch.int64, (rows,)),
    )
    return token, sizes


# Work split ----------------------------------------------------------------------------------------------------------


@compiled
def _stored(token: _Token, sizes: Sizes, channels: int) -> int:
    fault = faulty_slot(token.slots, sizes.rows, sizes.state_slots)
    if fault < 0:
        scratch = new_scratch(sizes, 1)
        for task in numba.prange(sizes.rows * tasks_per_row(sizes)):
            _stored_task(token, sizes, channels, task, scratch)
    return fault


@compiled
def _replay(token: _Token, ring: _Ring, sizes: Sizes, channels: int) -> int:
    fault = faulty_row(token.slots, sizes.rows, sizes.state_slots, ring.cursor, sizes.interval_length)
    if fault < 0:
        scratch = new_scratch(sizes, 1)
        for task in numba.prange(sizes.rows * tasks_per_row(sizes)):
            _replay_task(token, ring, sizes, channels, task, scratch)
    return fault


@pasted
def _stored_task(token: _Token, sizes: Sizes, channels: int, task: int, scratch: Any) -> None:
    row = task % sizes.rows
    slot = pointer(token.slots, INT64)[row]
    if slot < 0:
        return
    own = _split(own_scratch(scratch, sizes, 1), sizes)
    first = task // sizes.rows * sizes.heads_per_task
    for head in range(first, min(first + sizes.heads_per_task, sizes.heads)):
        share = sizes.heads // sizes.groups
        at, at_slot = row * sizes.heads + head, slot * sizes.heads + head
        if head == first or head % share == 0:
            _normalise(token, sizes, own, row * sizes.groups + head // share)
        _start_decay(token, sizes, channels, own, at)
        _finish_decay(sizes, own)
        _step_head(token, sizes, channels, own, at, at_slot)


@pasted
def _replay_task(token: _Token, ring: _Ring, sizes: Sizes, channels: int, task: int, scratch: Any) -> None:
    row = task % sizes.rows
    slot = pointer(token.slots, INT64)[row]
    if slot < 0:
        return
    own = _split(own_scratch(scratch, sizes, 1), sizes)
    length = int(pointer(ring.cursor, INT32)[slot])
    oldest = int(pointer(ring.origin, INT32)[slot]) % sizes.capacity
    flush = length == sizes.interval_length - 1
    first = task // sizes.rows * sizes.heads_per_task
    for head in range(first, min(first + sizes.heads_per_task, sizes.heads)):
        share = sizes.heads // sizes.groups
        at, at_slot = row * sizes.heads + head, slot * sizes.heads + head
        place = Place(head, head // share, row, slot, at, at_slot, length, oldest)
        if head == first or head % share == 0:
            k_rnorm = _normalise(token, sizes, own, row * sizes.groups + place.group)
            if channels == 0:
                _gather(ring, sizes, own, place)
            if not flush and head % share == 0:
                _append_key(token, ring, sizes, place, k_rnorm)
        _start_decay(token, sizes, channels, own, at)
        if channels == 0:
            _weigh(ring, sizes, own, place)
        else:
            _decay_keys(ring, sizes, own, place)
        _finish_decay(sizes, own)
        if flush:
            _fold_head(token, ring, sizes, channels, own, place)
        else:
            _read_head(token, ring, sizes, channels, own, place)
    if flush and first == 0:
        count_flush(ring.flushes, slot)


@inlined
def _split(own: Any, sizes: Sizes) -> _Scratch:
    d = advance(own, sizes.interval_length * sizes.n_padded)
    w = advance(d, sizes.interval_length * sizes.p_padded)
    q = advance(w, 5 * sizes.tokens_padded)
    sq = advance(q, 6 * sizes.n_padded)
    return _Scratch(
        own,
        d,
        w,
        advance(w, sizes.tokens_padded),
        advance(w, 2 * sizes.tokens_padded),
        advance(w, 3 * sizes.tokens_padded),
        advance(w, 4 * sizes.tokens_padded),
        q,
        advance(q, sizes.n_padded),
        advance(q, 2 * sizes.n_padded),
        advance(q, 3 * sizes.n_padded),
        advance(q, 4 * sizes.n_padded),
        advance(q, 5 * sizes.n_padded),
        sq,
        advance(sq, sizes.p_padded),
        advance(sq, 2 * sizes.p_padded),
    )


# Keys and decay ------------------------------------------------------------------------------------------------------


@inlined
def _normalise(token: _Token, sizes: Sizes, own: _Scratch, at: int) -> float:
    """q K^-1/2 and k of a key head over their L2 norms; returns k's reciprocal norm."""
    widen(own.q, token.q, at * sizes.N, sizes.N, ONE, sizes.narrow)
    widen(own.k, token.k, at * sizes.N, sizes.N, ONE, sizes.narrow)
    q_scale = ONE / np.sqrt((dot(own.q, own.q, sizes.N) + EPS) * np.float32(sizes.N))
    k_rnorm = ONE / np.sqrt(dot(own.k, own.k, sizes.N) + EPS)
    for n in range(0, sizes.N, WIDTH):
        store(own.q, n, mul(splat(q_scale), load(own.q, n)))
        store(own.k, n, mul(splat(k_rnorm), load(own.k, n)))
    return k_rnorm


@inlined
def _start_decay(token: _Token, sizes: Sizes, channels: int, own: _Scratch, at: int) -> None:
    """The token's log decay in every key channel."""
    if channels == 0:
        g = splat(pointer(token.g, FLOAT32)[at])
        for n in range(0, sizes.N, WIDTH):
            store(own.since, n, g)
    else:
        widen(own.since, token.g, at * sizes.N, sizes.N, ONE, 0)


@inlined
def _finish_decay(sizes: Sizes, own: _Scratch) -> None:
    """E = exp of the summed log decay, E q and E k."""
    for n in range(0, sizes.N, WIDTH):
        E = exp(load(own.since, n))
        store(own.E, n, E)
        store(own.Eq, n, mul(E, load(own.q, n)))
        store(own.Ek, n, mul(E, load(own.k, n)))


@inlined
def _gather(ring: _Ring, sizes: Sizes, own: _Scratch, place: Place) -> None:
    """GDN: a key head's normalised ring keys and their products with q and k, shared by its value heads."""
    rnorm = pointer(ring.k_rnorm, FLOAT32)
    for j in range(place.length):
        index = entry(place.slot * sizes.groups + place.group, j, place.oldest, sizes.capacity)
        key = advance(own.keys, j * sizes.n_padded)
        widen(key, ring.k, index * sizes.N, sizes.N, rnorm[index], sizes.narrow)
        own.kq[j] = dot(key, own.q, sizes.N)
        own.kk[j] = dot(key, own.k, sizes.N)


@inlined
def _weigh(ring: _Ring, sizes: Sizes, own: _Scratch, place: Place) -> None:
    """GDN: weights exp(G - G_j) of the ring, alone and times the products; leaves the summed log decay in ``since``."""
    ring_g, since = pointer(ring.g, FLOAT32), own.since[0]
    for j in range(place.length - 1, -1, -1):
        own.w[j] = since
        since += ring_g[entry(place.at_slot, j, place.oldest, sizes.capacity)]
    for j in range(0, place.length, WIDTH):
        w = exp(load(own.w, j))
        store(own.w, j, w)
        store(own.cq, j, mul(w, load(own.kq, j)))
        store(own.ck, j, mul(w, load(own.kk, j)))
    for n in range(0, sizes.N, WIDTH):
        store(own.since, n, splat(since))


@inlined
def _decay_keys(ring: _Ring, sizes: Sizes, own: _Scratch, place: Place) -> None:
    """KDA: the ring's keys times exp(G - G_j), newest first so that only sums of log decays are raised, and their
    products with q and k; leaves the summed log decay in ``since``.
    """
    ring_g, rnorm = pointer(ring.g, FLOAT32), pointer(ring.k_rnorm, FLOAT32)
    if sizes.N == ROW:
        log_decay = load_row(own.since, 0)
        for j in range(place.length - 1, -1, -1):
            index = entry(place.at_slot, j, place.oldest, sizes.capacity)
            key = mul(load_input_row(ring.k, index * ROW, sizes.narrow), splat_row(rnorm[index]))
            key = mul(key, exp(log_decay))
            store(own.keys, j * ROW, key)
            own.w[j], own.cq[j], own.ck[j] = ONE, dot_row(key, load_row(own.q, 0)), dot_row(key, load_row(own.k, 0))
            log_decay = add(log_decay, load_row(ring_g, index * ROW))
        store(own.since, 0, log_decay)
        return
    for j in range(place.length - 1, -1, -1):
        index = entry(place.at_slot, j, place.oldest, sizes.capacity)
        scale, cq, ck = splat(rnorm[index]), splat(FLOAT32), splat(FLOAT32)
        for n in range(0, sizes.N, WIDTH):
            since, count, start = load(own.since, n), sizes.N - n, index * sizes.N + n
            key = mul(mul(scale, load_input(ring.k, start, count, sizes.narrow)), exp(since))
            store(own.keys, j * sizes.n_padded + n, key)
            cq, ck = fma(key, load(own.q, n), cq), fma(key, load(own.k, n), ck)
            store(own.since, n, add(since, load_part(ring_g, start, count)))
        own.w[j], own.cq[j], own.ck[j] = ONE, total(cq), total(ck)


# One head ------------------------------------------------------------------------------------------------------------


@inlined
def _step_head(token: _Token, sizes: Sizes, channels: int, own: _Scratch, at: int, at_slot: int) -> None:
    """The recurrence for one head."""
    V, K = sizes.P, sizes.N
    state = advance(pointer(token.state, FLOAT32), at_slot * V * K)
    _prefetch_output(token, sizes, at)
    widen(own.v, token.v, at * V, V, ONE, sizes.narrow)
    _step_rows(state, sizes, channels, own, pointer(token.beta, FLOAT32)[at], dot(own.k, own.q, K))
    for v in range(0, V, WIDTH):
        store_input(token.out, at * V + v, V - v, load(own.sq, v), sizes.narrow)


@inlined
def _read_head(token: _Token, ring: _Ring, sizes: Sizes, channels: int, own: _Scratch, place: Place) -> None:
    """Output from checkpoint, ring and token, then append the token with its d."""
    V, K = sizes.P, sizes.N
    _prefetch_append(token, ring, sizes, channels, place)
    _read_rows(advance(pointer(token.state, FLOAT32), place.at_slot * V * K), ring, sizes, channels, own, place)
    ring_d, last = pointer(ring.d, FLOAT32), entry(place.at_slot, place.length, place.oldest, sizes.capacity)
    beta, kq = splat(pointer(token.beta, FLOAT32)[place.at]), splat(dot(own.k, own.q, K))
    for v in range(0, V, WIDTH):
        sk, sq, count = load(own.sk, v), load(own.sq, v), V - v
        for j in range(place.length):
            d = load_part(ring_d, entry(place.at_slot, j, place.oldest, sizes.capacity) * V + v, count)
            sk, sq = fma(splat(own.ck[j]), d, sk), fma(splat(own.cq[j]), d, sq)
        value = load_input(token.v, place.at * V + v, count, sizes.narrow)
        d = mul(beta, fma(splat(_MINUS), sk, value))
        store_part(ring_d, last * V + v, count, d)
        store_input(token.out, place.at * V + v, count, fma(d, kq, sq), sizes.narrow)
    if channels == 0:
        pointer(ring.g, FLOAT32)[last] = pointer(token.g, FLOAT32)[place.at]
    else:
        copy(ring.g, last * K, token.g, place.at * K, K, 0)


@inlined
def _fold_head(token: _Token, ring: _Ring, sizes: Sizes, channels: int, own: _Scratch, place: Place) -> None:
    """Fold ring and token into the checkpoint, row by row; outputs are those of the folded rows."""
    V, K = sizes.P, sizes.N
    for j in range(place.length):
        index = entry(place.at_slot, j, place.oldest, sizes.capacity)
        widen(advance(own.d, j * sizes.p_padded), ring.d, index * V, V, own.w[j], 0)
    state = advance(pointer(token.state, FLOAT32), place.at_slot * V * K)
    widen(own.v, token.v, place.at * V, V, ONE, sizes.narrow)
    beta, kq = pointer(token.beta, FLOAT32)[place.at], dot(own.k, own.q, K)
    _prefetch_output(token, sizes, place.at)
    _fold_rows(state, ring, sizes, channels, own, place, beta, kq)
    for v in range(0, V, WIDTH):
        store_input(token.out, place.at * V + v, V - v, load(own.sq, v), sizes.narrow)


@inlined
def _append_key(token: _Token, ring: _Ring, sizes: Sizes, place: Place, k_rnorm: float) -> None:
    """The token's key, as it arrived, with its reciprocal norm."""
    last = entry(place.slot * sizes.groups + place.group, place.length, place.oldest, sizes.capacity)
    copy(ring.k, last * sizes.N, token.k, (place.row * sizes.groups + place.group) * sizes.N, sizes.N, sizes.narrow)
    pointer(ring.k_rnorm, FLOAT32)[last] = k_rnorm


@inlined
def _prefetch_append(token: _Token, ring: _Ring, sizes: Sizes, channels: int, place: Place) -> None:
    """Ask for what is written when the head is read: the token's ring entry and the output."""
    last = entry(place.at_slot, place.length, place.oldest, sizes.capacity)
    prefetch_span_to_write(ring.d + last * 4 * sizes.P, 4 * sizes.P)
    if channels == 0:
        prefetch_to_write(ring.g + 4 * last)
    else:
        prefetch_span_to_write(ring.g + last * 4 * sizes.N, 4 * sizes.N)
    _prefetch_output(token, sizes, place.at)


@inlined
def _prefetch_output(token: _Token, sizes: Sizes, at: int) -> None:
    """Ask for a head's output, to write it, and for the v that comes with it."""
    size = sizes.P * (4 - 2 * sizes.narrow)
    prefetch_span_to_write(token.out + at * size, size)
    prefetch_span(token.v + at * size, size)


@inlined
def _prefetch_entry(ring: _Ring, sizes: Sizes, channels: int, place: Place, ahead: int, j: int) -> None:
    """Ask for d of ring token j, of the head or the one ``ahead``, and for what the next head starts with."""
    R, key_bytes, share = sizes.capacity, sizes.N * (4 - 2 * sizes.narrow), sizes.heads // sizes.groups
    prefetch_span(ring.d + entry(place.at_slot + ahead, j, place.oldest, R) * 4 * sizes.P, 4 * sizes.P)
    if (place.head + 1) % share == 0:
        group = place.slot * sizes.groups + place.group + 1
        prefetch_span(ring.k + entry(group, j, place.oldest, R) * key_bytes, key_bytes)
    if channels != 0:
        prefetch_span(ring.g + entry(place.at_slot + 1, j, place.oldest, R) * 4 * sizes.N, 4 * sizes.N)
    elif j == 0:
        prefetch(ring.g + 4 * (place.at_slot + 1) * R)


# Rows of a head's state: 128 wide in registers, others in pieces -----------------------------------------------------


@inlined
def _step_rows(state: Any, sizes: Sizes, channels: int, own: _Scratch, beta: float, kq: float) -> None:
    """d = beta (v - E s . k), s <- E s + d k, output s . q for each row."""
    if sizes.N != ROW:
        _step_pieces(state, sizes, own, beta, kq)
    elif channels == 0:
        q, k, E = load_row(own.q, 0), load_row(own.k, 0), own.E[0]
        for v in range(sizes.P):
            s = load_row(state, v * ROW)
            sq, d = E * dot_row(s, q), beta * (own.v[v] - E * dot_row(s, k))
            store(state, v * ROW, fma(splat_row(E), s, mul(splat_row(d), k)))
            own.sq[v] = sq + d * kq
    else:
        Eq, Ek = load_row(own.Eq, 0), load_row(own.Ek, 0)
        for v in range(sizes.P):
            s = load_row(state, v * ROW)
            sq, d = dot_row(s, Eq), beta * (own.v[v] - dot_row(s, Ek))
            store(state, v * ROW, fma(load_row(own.E, 0), s, mul(splat_row(d), load_row(own.k, 0))))
            own.sq[v] = sq + d * kq


@inlined
def _step_pieces(state: Any, sizes: Sizes, own: _Scratch, beta: float, kq: float) -> None:
    K = sizes.N
    for v in range(sizes.P):
        sk, sq = _dot_pieces(state, v * K, K, own.Ek, own.Eq)
        d = beta * (own.v[v] - sk)
        for n in range(0, K, WIDTH):
            s = mul(load(own.E, n), load_part(state, v * K + n, K - n))
            store_part(state, v * K + n, K - n, fma(splat(d), load(own.k, n), s))
        own.sq[v] = sq + d * kq


@inlined
def _read_rows(state: Any, ring: _Ring, sizes: Sizes, channels: int, own: _Scratch, place: Place) -> None:
    """E s . k and E s . q for each row; meanwhile asks for the ring."""
    if sizes.N == ROW:
        Eq, Ek = load_row(own.Eq, 0), load_row(own.Ek, 0)
        for v in range(sizes.P):
            if v < place.length:
                _prefetch_entry(ring, sizes, channels, place, 0, v)
            s = load_row(state, v * ROW)
            own.sk[v], own.sq[v] = dot_row(s, Ek), dot_row(s, Eq)
        return
    for v in range(sizes.P):
        own.sk[v], own.sq[v] = _dot_pieces(state, v * sizes.N, sizes.N, own.Ek, own.Eq)


@inlined
def _fold_rows(
    state: Any, ring: _Ring, sizes: Sizes, channels: int, own: _Scratch, place: Place, beta: float, kq: float
) -> None:
    """s <- E s + sum_j d_j key_j, d = beta (v - s . k), s <- s + d k, output s . q for each row."""
    if sizes.N != ROW:
        _fold_pieces(state, sizes, place.length, own, beta, kq)
        return
    for v in range(0, sizes.P, 2):
        if v // 2 < place.length:
            _prefetch_entry(ring, sizes, channels, place, 1, v // 2)
        u = min(v + 1, sizes.P - 1)  # an odd last row is computed twice, from the same values
        E = load_row(own.E, 0)
        s, t = mul(E, load_row(state, v * ROW)), mul(E, load_row(state, u * ROW))
        s, t = fold_two(s, t, advance(own.d, v), advance(own.d, u), sizes, place.length, own.keys)
        q, k = load_row(own.q, 0), load_row(own.k, 0)
        sd, td = beta * (own.v[v] - dot_row(s, k)), beta * (own.v[u] - dot_row(t, k))
        own.sq[v], own.sq[u] = dot_row(s, q) + sd * kq, dot_row(t, q) + td * kq
        store(state, v * ROW, fma(splat_row(sd), k, s))
        store(state, u * ROW, fma(splat_row(td), k, t))


@inlined
def _fold_pieces(state: Any, sizes: Sizes, tokens: int, own: _Scratch, beta: float, kq: float) -> None:
    K = sizes.N
    for v in range(sizes.P):
        for n in range(0, K, WIDTH):
            s = mul(load(own.E, n), load_part(state, v * K + n, K - n))
            store_part(state, v * K + n, K - n, fold_piece(s, advance(own.d, v), sizes, tokens, advance(own.keys, n)))
        sk, sq = _dot_pieces(state, v * K, K, own.k, own.q)
        d = beta * (own.v[v] - sk)
        for n in range(0, K, WIDTH):
            store_part(state, v * K + n, K - n, fma(splat(d), load(own.k, n), load_part(state, v * K + n, K - n)))
        own.sq[v] = sq + d * kq


@inlined
def _dot_pieces(state: Any, at: int, K: int, a: Any, b: Any) -> tuple[float, float]:
    """s . a and s . b for one row."""
    sa, sb = splat(FLOAT32), splat(FLOAT32)
    for n in range(0, K, WIDTH):
        s = load_part(state, at + n, K - n)
        sa, sb = fma(s, load(a, n), sa), fma(s, load(b, n), sb)
    return total(sa), total(sb)
