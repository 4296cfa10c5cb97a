"""What the kernels share: tiles of a state, rings, an exponential.

A tile of M rows of a state ``[P,N]`` is held as a tuple of chunks ``[M, WIDTH]``, what the lanes load at once. All
chunks of all tiles lie at fixed distances from one pointer a thread, which the loads take as part of the instruction;
and a product with a vector adds up over chunks within a thread and only over WIDTH among lanes.

Rings are read in time order, or, with ``EAGER``, as they lie in memory, without waiting for cursor and origin. Eager
reads whole rings; what is not valid is replaced before any arithmetic, so that a free entry's NaN never counts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005 (Triton has no unpacking into tuples)

from __future__ import annotations

import triton
import triton.language as tl

UNROLL = tl.constexpr(3)
"""Ring tokens that a fold loads before it uses the first."""


@triton.jit
def exp(x):
    """e^x for x <= 0, to about one unit in the last place; the hardware's own is off by several.

    A decay is applied at every step, and its error is the same each time for a head whose gate barely moves.
    """
    x = tl.maximum(x, -88.0)
    n = tl.floor(x * 1.44269504 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    p = 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    scale = ((tl.maximum(n, -126.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x <= -87.5, 0.0, p * scale)


@triton.jit
def rnorm(square):
    """1 / sqrt(square + 1e-6): the hardware's guess and a Newton step. Exact division and root cost 90 registers."""
    square += 1e-6
    guess = tl.rsqrt(square)
    return guess * (1.5 - 0.5 * square * guess * guess)


@triton.jit
def load_vector(pointer, n, N: tl.constexpr, PADDED: tl.constexpr):
    """Elements ``n`` of a contiguous vector of N in float32, zero behind it."""
    if PADDED == N:
        return tl.load(pointer + n).to(tl.float32)
    else:
        return tl.load(pointer + n, mask=n < N, other=0.0).to(tl.float32)


@triton.jit
def load_chunks(pointer, N: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """A contiguous vector of N in float32, as a tuple of chunks."""
    chunks = ()
    for c in tl.static_range(PADDED // WIDTH):
        chunks = chunks + (load_vector(pointer, c * WIDTH + tl.arange(0, WIDTH), N, PADDED),)
    return chunks


@triton.jit
def load_state(pointers, m, end, N: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``m`` before ``end`` as a tuple of chunks, in the state's dtype; ``pointers [M,WIDTH]`` to their first one.

    Other rows hold anything; columns behind N are zero.
    """
    chunks = ()
    for c in tl.static_range(CHUNKS):
        if CHUNKS * WIDTH == N:
            chunks = chunks + (tl.load(pointers + c * WIDTH, mask=(m < end)[:, None]),)
        else:
            mask = (m < end)[:, None] & (c * WIDTH + tl.arange(0, WIDTH) < N)[None, :]
            chunks = chunks + (tl.load(pointers + c * WIDTH, mask=mask, other=0.0),)
    return chunks


@triton.jit
def shifted(queue, new, SIZE: tl.constexpr, LENGTH: tl.constexpr):
    """A flat queue of LENGTH groups of SIZE without its first group, and with ``new`` at its end."""
    result = ()
    for i in tl.static_range(SIZE, SIZE * LENGTH):
        result = result + (queue[i],)
    return result + new


@triton.jit
def store_state(pointers, m, end, chunks, N: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """Write what `load_state` reads, rounded to the state's dtype."""
    for c in tl.static_range(CHUNKS):
        mask = (m < end)[:, None]
        if CHUNKS * WIDTH != N:
            mask = mask & (c * WIDTH + tl.arange(0, WIDTH) < N)[None, :]
        tl.store(pointers + c * WIDTH, chunks[c].to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def ring_order(length, oldest, RING: tl.constexpr, CAPACITY: tl.constexpr, EAGER: tl.constexpr):
    """``(entry, age, valid)``, each ``[RING]``: places in the ring, the time order of their tokens, and which count."""
    j = tl.arange(0, RING)
    if EAGER:
        entry = tl.minimum(j, CAPACITY - 1)
        age = (entry - oldest + CAPACITY) % CAPACITY
        return entry, age, (j < CAPACITY) & (age < length)
    else:
        return (oldest + j) % CAPACITY, j, j < length


@triton.jit
def load_ring(pointers, valid, EAGER: tl.constexpr):
    """Ring values in the ring's dtype, zero where ``valid`` is false."""
    if EAGER:
        return tl.where(valid, tl.load(pointers), 0.0).to(pointers.dtype.element_ty)
    else:
        return tl.load(pointers, mask=valid, other=0.0)


@triton.jit
def sum_later(g, age):
    """For each token of ``g [RING]`` the sum over the tokens behind it, formed without subtracting."""
    return tl.sum(tl.where(age[None, :] > age[:, None], g[None, :], 0.0), axis=1)
