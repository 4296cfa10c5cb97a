"""What the kernels share: tiles of a state, rings, an exponential.

A tile of M rows of a state ``[P,N]`` is held as ``[chunks, M, width]``: a row is cut into chunks of ``width`` elements, as
many as a few lanes load at once, and the chunks lie one behind the other in a thread's registers. A product with a
vector then adds up over chunks without talking to other threads, and over ``width`` among a few lanes, not a whole warp.

Rings are read in time order, or, with ``EAGER``, as they lie in memory, without waiting for cursor and origin. Eager
reads whole rings; what is not valid is replaced before any arithmetic, so that a free entry's NaN never counts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


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
    """1 / sqrt(square + 1e-6), correctly rounded twice."""
    return tl.div_rn(1.0, tl.sqrt_rn(square + 1e-6))


@triton.jit
def columns(N: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Column numbers ``[chunks, width]`` of a row of N, padded."""
    return tl.arange(0, CHUNKS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_columns(pointer, n, N: tl.constexpr, PADDED: tl.constexpr):
    """Elements ``n`` of a contiguous vector of N in float32, zero behind it."""
    if PADDED == N:
        return tl.load(pointer + n).to(tl.float32)
    else:
        return tl.load(pointer + n, mask=n < N, other=0.0).to(tl.float32)


@triton.jit
def load_tile(pointer, stride, m, n, P: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, WHOLE: tl.constexpr):
    """Rows ``m`` of a state as ``[chunks, M, width]`` in float32; ``WHOLE`` says that all rows exist."""
    offsets = m[None, :, None] * stride + n[:, None, :]
    if WHOLE and PADDED == N:
        return tl.load(pointer + offsets, eviction_policy="evict_first")
    else:
        mask = (m < P)[None, :, None] & (n < N)[:, None, :]
        return tl.load(pointer + offsets, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_tile(pointer, stride, m, n, tile, P: tl.constexpr, N: tl.constexpr):
    """Write what `load_tile` reads, rounded to the state's dtype."""
    offsets = m[None, :, None] * stride + n[:, None, :]
    mask = (m < P)[None, :, None] & (n < N)[:, None, :]
    tl.store(pointer + offsets, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def dot_rows(tile, vector):
    """``[M]`` products of a tile's rows with ``vector [chunks, width]``."""
    return tl.sum(tl.sum(tile * vector[:, None, :], axis=0), axis=1)


@triton.jit
def as_tile(matrix, M: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """A matrix ``[M, N]`` in the order of a tile."""
    return tl.permute(tl.reshape(matrix, (M, CHUNKS, WIDTH)), (1, 0, 2))


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
    """Ring values in float32, zero where ``valid`` is false."""
    if EAGER:
        return tl.where(valid, tl.load(pointers).to(tl.float32), 0.0)
    else:
        return tl.load(pointers, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def sum_later(g, age):
    """For each token of ``g [RING]`` the sum over the tokens behind it, formed without subtracting."""
    return tl.sum(tl.where(age[None, :] > age[:, None], g[None, :], 0.0), axis=1)
