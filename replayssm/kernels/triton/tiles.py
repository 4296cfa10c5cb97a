"""What the kernels share: who takes what, tiles of a state, rings, products on tensor cores, an exponential.

A tile of M rows of a state ``[P,N]`` is held as a tuple of chunks ``[M,WIDTH]``, what the lanes load at once: a product
with a vector adds up over chunks within a thread and only over WIDTH among lanes. ``cut`` is a `launch.Cut` everywhere.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005 (Triton has no unpacking into tuples)

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.kernels.triton.rounding import INTERPRETED, rounded


@triton.jit
def exp(x):
    """e^x for x <= 0, to about one unit in the last place; the hardware's own is off by several.

    A decay is applied at every step, and its error is the same each time for a head whose gate barely moves. NaN stays.
    """
    x = tl.maximum(x, -88.0, propagate_nan=tl.PropagateNan.ALL)
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
def place(cut: tl.constexpr):
    """``(part, head, row)`` of this program; rows as int64, since they are multiplied by strides."""
    program = tl.program_id(0)
    return program % cut.PARTS, program // cut.PARTS % cut.H, (program // (cut.PARTS * cut.H)).to(tl.int64)


@triton.jit
def span(part, cut: tl.constexpr):
    """All rows of a part, up to a power of two, and the first that is not its own."""
    return part * cut.ROWS + tl.arange(0, cut.SPAN), tl.minimum(cut.P, (part + 1) * cut.ROWS)


@triton.jit
def rows_of(values, t, m, cut: tl.constexpr):
    """Of a vector over the span the rows ``m``, which begin at its element ``t``."""
    if m.shape[0] != cut.SPAN:
        values = tl.gather(values, t + tl.arange(0, m.shape[0]), 0)
    return values


@triton.jit
def part_of(values, columns, cut: tl.constexpr):
    """Elements ``columns`` of a vector over PADDED."""
    if columns.shape[0] != cut.PADDED:
        values = tl.gather(values, columns, 0)
    return values


@triton.jit
def element(values, i, cut: tl.constexpr):
    """Element ``i`` of a vector, for every row of the span."""
    SPAN: tl.constexpr = cut.SPAN
    return tl.gather(values, tl.zeros((SPAN,), tl.int32) + i, 0)


@triton.jit
def load_vector(pointer, n, cut: tl.constexpr):
    """Elements ``n`` of a contiguous vector of N in float32, zero behind it."""
    if cut.PADDED == cut.N:
        return tl.load(pointer + n).to(tl.float32)
    else:
        return tl.load(pointer + n, mask=n < cut.N, other=0.0).to(tl.float32)


@triton.jit
def load_chunks(pointer, cut: tl.constexpr):
    """A contiguous vector of N in float32, as a tuple of chunks."""
    chunks = ()
    for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
        chunks = chunks + (load_vector(pointer, c * cut.WIDTH + tl.arange(0, cut.WIDTH), cut),)
    return chunks


@triton.jit
def first_tile(state, part, cut: tl.constexpr):
    """Pointers ``[M,WIDTH]`` to the first chunk of a part's first tile."""
    first = part * cut.ROWS + tl.arange(0, cut.M)
    return state + first[:, None] * cut.ROW + tl.arange(0, cut.WIDTH)[None, :]


@triton.jit
def load_state(pointers, m, end, cut: tl.constexpr):
    """Rows ``m`` before ``end`` as a tuple of chunks, in the state's dtype; ``pointers [M,WIDTH]`` to their first one.

    Other rows, and columns behind N, are zero.
    """
    chunks = ()
    for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
        if cut.WHOLE:
            chunks = chunks + (tl.load(pointers + c * cut.WIDTH),)
        else:
            mask = (m < end)[:, None] & (c * cut.WIDTH + tl.arange(0, cut.WIDTH) < cut.N)[None, :]
            chunks = chunks + (tl.load(pointers + c * cut.WIDTH, mask=mask, other=0.0),)
    return chunks


@triton.jit
def store_state(pointers, m, end, chunks, head, draws, cut: tl.constexpr):
    """Write what `load_state` reads, rounded to the state's dtype with the ``draws`` of `rounding`."""
    for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
        mask = (m < end)[:, None] & (c * cut.WIDTH + tl.arange(0, cut.WIDTH) < cut.N)[None, :]
        narrow = rounded(chunks[c], head * cut.P + m, c * cut.WIDTH, cut.N, draws, pointers.dtype.element_ty)
        tl.store(pointers + c * cut.WIDTH, narrow, mask=mask)


@triton.jit
def zeros(cut: tl.constexpr):
    """``[M,WIDTH]`` in float32."""
    M: tl.constexpr = cut.M
    WIDTH: tl.constexpr = cut.WIDTH
    return tl.zeros((M, WIDTH), tl.float32)


@triton.jit
def ring_order(length, oldest, cut: tl.constexpr):
    """``(entry, age, valid)``, each ``[RING]``: places in the ring, the time order of their tokens, and which count.

    In time order, or, EAGER, as they lie in memory, so that the loads need not wait for cursor and origin.
    """
    j = tl.arange(0, cut.RING)
    if cut.EAGER:
        entry = tl.minimum(j, cut.CAPACITY - 1)
        age = (entry - oldest + cut.CAPACITY) % cut.CAPACITY
        return entry, age, (j < cut.CAPACITY) & (age < length)
    else:
        return (oldest + j) % cut.CAPACITY, j, j < length


@triton.jit
def load_ring(pointers, valid, cut: tl.constexpr):
    """Numbers ``[RING]`` of the ring, zero where ``valid`` is false, whatever lies there."""
    if cut.EAGER:
        return tl.where(valid, tl.load(pointers), 0.0)
    else:
        return tl.load(pointers, mask=valid, other=0.0)


@triton.jit
def load_ring_vectors(pointers, valid, n, end, cut: tl.constexpr):
    """Elements ``n`` before ``end`` of vectors of the ring, ``pointers [RING]`` to their starts, as `load_ring`."""
    pointers = pointers[:, None] + n[None, :]
    if cut.EAGER:
        values = tl.load(pointers, mask=(n < end)[None, :], other=0.0)
        return tl.where(valid[:, None], values, 0.0).to(values.dtype)
    else:
        return tl.load(pointers, mask=valid[:, None] & (n < end)[None, :], other=0.0)


@triton.jit
def sum_later(g, age):
    """For each token of ``g [RING]`` the sum over the tokens behind it, formed without subtracting."""
    return tl.sum(tl.where(age[None, :] > age[:, None], g[None, :], 0.0), axis=1)


@triton.jit
def product(a, b):
    """``a [M,RING] @ b [RING,N]`` to float32's accuracy, on tensor cores; ``a`` in float32, finite.

    Three bfloat16 numbers hold a float32 exactly, so that products with a bfloat16 ``b`` are exact and sums are in
    float32. Any other ``b`` takes three products in tf32.
    """
    # The interpreter multiplies the bits of bfloat16 as if they were integers.
    if b.dtype == tl.bfloat16 and not INTERPRETED:
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b)))
    else:
        return tl.dot(a, b.to(tl.float32), input_precision="tf32x3")
