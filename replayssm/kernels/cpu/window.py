"""What the CPU kernels of a window share, for Mamba-2 and GDN: arguments, scratch, keys, decays and outputs.

Both families are one recurrence here. A token has a query and a key (C and B; q and k, normalised), a log decay (A dt;
g), a value (x; v) and a step size (dt; beta). Mamba-2 adds u key^T to the state with u = dt x, GDN with u = d = beta (v
- S' k): ``delta`` is 1 where what the state holds under the key is taken off first. With H the state in front of the
window, E_t the window's decay up to token t and D_tr the one since token r,

    u_t = step_t (value_t - delta [E_t H key_t + sum_{r<t} D_tr (key_r . key_t) u_r])
    y_t = E_t H query_t + sum_{r<=t} D_tr (key_r . query_t) u_r
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from replayssm.kernels.cpu.arguments import INPUT_DTYPES, Place, Sizes, address, new_sizes, padded, shape
from replayssm.kernels.cpu.compilation import inlined
from replayssm.kernels.cpu.lanes import (
    FLOAT32,
    INT64,
    ONE,
    WIDTH,
    add,
    advance,
    div,
    dot,
    exp,
    fma,
    load,
    load_input,
    mul,
    pointer,
    splat,
    store,
    store_input,
    store_part,
    widen,
)

FAMILIES = ("mamba2", "gdn")
MAX_WINDOW = WIDTH
"""Tokens: a token's weights of the others are one vector."""
EPS = np.float32(1e-6)
MINUS = np.float32(-1)


class Token(NamedTuple):
    """Addresses of a step's arguments; 0 for what the layer or the call does not have. ``counts`` says how many tokens
    a row's window holds or, of snapshots, how many of its last one were accepted.
    """

    out: int
    state: int
    queries: int
    keys: int
    values: int
    decay: int
    step: int
    A: int
    D: int
    z: int
    slots: int
    counts: int


class Scratch(NamedTuple):
    """A thread's float32 scratch. In front of the window's tokens come those of the ring: ``keys``, ``values`` (those
    of the ring weighted by their decay, the window's u). ``vectors`` are the window's queries and, for GDN, behind them
    its keys; ``products`` theirs with ``keys``, and ``history`` with the state in front of the window. ``weights`` are
    sixteen a token for its query, then for its key; ``E``, ``step`` and ``w`` a number a token.
    """

    keys: Any
    values: Any
    vectors: Any
    products: Any
    history: Any
    weights: Any
    E: Any
    step: Any
    w: Any
    row: Any


def window_token(
    family: str,
    out: Tensor,
    state: Tensor,
    inputs: Any,
    slots: Tensor,
    counts: Tensor | None,
    ring: tuple[int, int],
) -> tuple[Token, Sizes]:
    """Addresses and sizes of a window; ``state [S,H,P,N]`` or ``[S,T,H,P,N]``, ``ring`` its capacity and interval
    length. Raises ``ValueError`` for what these kernels do not take, counts outside of a window excepted.
    """
    if family not in FAMILIES:
        raise ValueError(f"a window of family {family}; accepted by the CPU kernels: {', '.join(FAMILIES)}")
    names = ("C", "B", "x", "dt", "dt") if family == "mamba2" else ("q", "k", "v", "g", "beta")
    query, key, value, decay, step = (getattr(inputs, name) for name in names)
    rows, T, H, P = shape(names[2], value, "BTHP")
    _, _, G, N = shape(names[1], key, "BTGN")
    if not 1 <= T <= MAX_WINDOW:
        raise ValueError(f"inputs hold {T} tokens a row; accepted: 1 to {MAX_WINDOW}")
    if value.dtype not in INPUT_DTYPES:
        raise ValueError(f"inputs have dtype {value.dtype}; accepted: {', '.join(map(str, INPUT_DTYPES))}")
    if H % G:
        raise ValueError(f"inputs have {H} heads; accepted: a multiple of their {G} groups")
    snapshots = (T,) if state.dim() == 5 else ()
    A, D, z = (getattr(inputs, name, None) for name in ("A", "D", "z"))
    token = Token(
        out=address("out", out, value.dtype, (rows, T, H, P)),
        state=address("state", state, torch.float32, (len(state), *snapshots, H, P, N)),
        queries=address(names[0], query, value.dtype, (rows, T, G, N)),
        keys=address(names[1], key, value.dtype, (rows, T, G, N)),
        values=address(names[2], value, value.dtype, (rows, T, H, P)),
        decay=address(names[3], decay, torch.float32, (rows, T, H)),
        step=address(names[4], step, torch.float32, (rows, T, H)),
        A=0 if A is None else address("A", A, torch.float32, (H,)),
        D=0 if D is None else address("D", D, torch.float32, (H,)),
        z=0 if z is None else address("z", z, value.dtype, (rows, T, H, P)),
        slots=address("slots", slots, torch.int64, (rows,)),
        counts=0 if counts is None else address("counts", counts, torch.int64, (rows,)),
    )
    narrow = value.dtype is torch.bfloat16
    return token, _sizes((len(state), H, P, N), rows, G, T, narrow, ring, numba.get_num_threads())


@lru_cache(maxsize=256)
def _sizes(
    state: tuple[int, ...], rows: int, groups: int, window: int, narrow: bool, ring: tuple[int, int], threads: int
) -> Sizes:
    (*_, P, N), (capacity, _) = state, ring
    tokens_padded = padded(capacity) + WIDTH
    floats = (capacity + 2 * window) * (padded(P) + padded(N)) + 2 * window * tokens_padded
    floats += (2 * window + 2) * WIDTH + tokens_padded + padded(N)
    return new_sizes(state, rows, groups, narrow, ring, threads, tokens_padded, floats, window=window)


@inlined
def faulty_count(counts_address: int, slots_address: int, rows: int, lowest: int, highest: int) -> int:
    """The first row, padding excepted, whose count is outside of a range, or -1; none without counts."""
    slots, counts = pointer(slots_address, INT64), pointer(counts_address, INT64)
    if counts_address != 0:
        for row in range(rows):
            if slots[row] >= 0 and (counts[row] < lowest or counts[row] > highest):
                return row
    return -1


@inlined
def split(own: Any, sizes: Sizes) -> Scratch:
    """The parts of a thread's scratch."""
    T, n, p = sizes.window, sizes.n_padded, sizes.p_padded
    values = advance(own, sizes.capacity * n)
    vectors = advance(values, sizes.capacity * p)
    products = advance(vectors, 2 * T * n)
    history = advance(products, 2 * T * sizes.tokens_padded)
    weights = advance(history, 2 * T * p)
    E = advance(weights, 2 * T * WIDTH)
    step = advance(E, WIDTH)
    w = advance(step, WIDTH)
    row = advance(w, sizes.tokens_padded)
    return Scratch(own, values, vectors, products, history, weights, E, step, w, row)


@inlined
def gather_window(token: Token, sizes: Sizes, own: Scratch, row: int, group: int, count: int, held: int) -> None:
    """Queries and keys of a group of heads, for GDN normalised, the keys behind ``held`` others; and their products."""
    N, n = sizes.N, sizes.n_padded
    for t in range(count):
        at = ((row * sizes.window + t) * sizes.groups + group) * N
        query, key = advance(own.vectors, t * n), advance(own.keys, (held + t) * n)
        widen(query, token.queries, at, N, ONE, sizes.narrow)
        widen(key, token.keys, at, N, ONE, sizes.narrow)
        if token.A == 0:
            copied = advance(own.vectors, (sizes.window + t) * n)
            q_scale = ONE / np.sqrt((dot(query, query, N) + EPS) * np.float32(N))
            k_rnorm = rnorm(key, N)
            for i in range(0, N, WIDTH):
                store(query, i, mul(splat(q_scale), load(query, i)))
                store(key, i, mul(splat(k_rnorm), load(key, i)))
                store(copied, i, load(key, i))
    multiply_keys(sizes, own, token.A == 0, count, held, held + count)


@inlined
def multiply_keys(sizes: Sizes, own: Scratch, delta: bool, count: int, first: int, end: int) -> None:
    """``products`` of the keys from ``first`` to ``end``."""
    for j in range(first, end):
        key = advance(own.keys, j * sizes.n_padded)
        for t in range(count):
            own.products[t * sizes.tokens_padded + j] = dot(advance(own.vectors, t * sizes.n_padded), key, sizes.N)
            if delta:
                m = sizes.window + t
                own.products[m * sizes.tokens_padded + j] = dot(advance(own.vectors, m * sizes.n_padded), key, sizes.N)


@inlined
def rnorm(key: Any, N: int) -> float:
    """Reciprocal L2 norm."""
    return ONE / np.sqrt(dot(key, key, N) + EPS)


@inlined
def weigh_window(token: Token, sizes: Sizes, own: Scratch, row: int, head: int, count: int, held: int) -> None:
    """Decays and step sizes of a head's window; ``weights`` D_tr (key_r . query_t), for GDN also D_tr (key_r . key_t).

    Log decays are summed for each pair of tokens: a difference of sums would lose what a strong decay leaves.
    """
    decay, step, factor = pointer(token.decay, FLOAT32), pointer(token.step, FLOAT32), ONE
    if token.A != 0:
        factor = pointer(token.A, FLOAT32)[head]
    for t in range(count):
        since, weights = FLOAT32, advance(own.weights, t * WIDTH)
        for r in range(t, -1, -1):
            weights[r] = since
            since += factor * decay[(row * sizes.window + r) * sizes.heads + head]
        for r in range(t + 1, WIDTH):
            weights[r] = FLOAT32
        own.E[t], own.step[t] = since, step[(row * sizes.window + t) * sizes.heads + head]
        D, at = exp(load(weights, 0)), t * sizes.tokens_padded + held
        store(weights, 0, mul(D, load(own.products, at)))
        if token.A == 0:
            m = sizes.window
            store(own.weights, (m + t) * WIDTH, mul(D, load(own.products, m * sizes.tokens_padded + at)))
    for t in range(count, WIDTH):
        own.E[t] = FLOAT32
    store(own.E, 0, exp(load(own.E, 0)))


@inlined
def finish_window(token: Token, sizes: Sizes, own: Scratch, place: Place, count: int, d: int) -> None:
    """Outputs of a head from ``history``, and u of the window in ``values`` behind the ring's; with ``d``, the address
    of the head's ring of d, GDN's are appended there.
    """
    P, p, held, delta = sizes.P, sizes.p_padded, place.length, token.A == 0
    for v in range(0, P, WIDTH):
        for t in range(count):
            at = ((place.row * sizes.window + t) * sizes.heads + place.head) * P + v
            value = load_input(token.values, at, P - v, sizes.narrow)
            u, y = value, mul(splat(own.E[t]), load(own.history, t * p + v))
            if delta:
                m = sizes.window + t
                u = fma(splat(MINUS * own.E[t]), load(own.history, m * p + v), u)
                for r in range(t):
                    u = fma(splat(MINUS * own.weights[m * WIDTH + r]), load(own.values, (held + r) * p + v), u)
            u = mul(splat(own.step[t]), u)
            store(own.values, (held + t) * p + v, u)
            for r in range(t + 1):
                y = fma(splat(own.weights[t * WIDTH + r]), load(own.values, (held + r) * p + v), y)
            write_output(token, sizes, place.head, at, P - v, value, y)
            if d != 0:
                index = place.oldest + held + t
                index = index if index < sizes.capacity else index - sizes.capacity
                store_part(pointer(d, FLOAT32), index * P + v, P - v, u)


@inlined
def write_output(token: Token, sizes: Sizes, head: int, at: int, count: int, value: Any, y: Any) -> None:
    """Skip connection, gate and the one rounding of an output's first ``count`` lanes."""
    if token.D != 0:
        y = fma(splat(pointer(token.D, FLOAT32)[head]), value, y)
    if token.z != 0:
        z = load_input(token.z, at, count, sizes.narrow)
        y = mul(y, div(z, add(splat(ONE), exp(mul(splat(MINUS), z)))))
    store_input(token.out, at, count, y, sizes.narrow)
