"""What the kernels of a window share: who takes what, tiles of a state, sums of decays, products on tensor cores.

``cut`` is a `verify_launch.WindowCut` everywhere. Tokens of the ring are in time order, those of the window behind.
What is as wide as a state's rows, N, is held as a tuple of chunks of WIDTH: a product over N adds up over them, and
what tensor cores take of one chunk need not be kept for the next.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: RUF005 (Triton has no unpacking into tuples)

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.kernels.triton.rounding import INTERPRETED, nearest
from replayssm.kernels.triton.tiles import load_ring_vectors, product

TOKENS = tl.constexpr(16)
"""Tokens of a window that a product takes, as tensor cores want."""


@triton.jit
def place(cut: tl.constexpr):
    """``(part, first head, row)`` of this program; rows as int64, since they are multiplied by strides."""
    program = tl.program_id(0)
    head = program // cut.PARTS % (cut.H // cut.HEADS) * cut.HEADS
    return program % cut.PARTS, head, (program // cut.PROGRAMS).to(tl.int64)


@triton.jit
def rows_of(i, part, cut: tl.constexpr):
    """Rows ``[M]`` of a program's tile ``i``."""
    return (part * cut.TILES + i) * cut.M + tl.arange(0, cut.M)


@triton.jit
def columns_of(c, cut: tl.constexpr):
    """Columns ``[WIDTH]`` of chunk ``c``."""
    return c * cut.WIDTH + tl.arange(0, cut.WIDTH)


@triton.jit
def load_tile(state, m, cut: tl.constexpr):
    """Rows ``m`` of a head's ``state``, chunks ``[M,WIDTH]`` in its dtype; zero behind P and N."""
    chunks = ()
    for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
        n = columns_of(c, cut)
        pointers = state + m[:, None] * cut.ROW + n[None, :]
        if cut.WHOLE:
            chunks = chunks + (tl.load(pointers),)
        else:
            chunks = chunks + (tl.load(pointers, mask=(m < cut.P)[:, None] & (n < cut.N)[None, :], other=0.0),)
    return chunks


@triton.jit
def store_tile(state, m, c, tile, cut: tl.constexpr):
    """Write chunk ``c`` of what `load_tile` reads, rounded to the nearest number of the state's dtype."""
    n = columns_of(c, cut)
    if state.dtype.element_ty != tl.float32:
        tile = nearest(tile, state.dtype.element_ty)
    mask = (m < cut.P)[:, None] & (n < cut.N)[None, :]
    tl.store(state + m[:, None] * cut.ROW + n[None, :], tile, mask=mask)


@triton.jit
def load_vectors(pointer, offsets, valid, n, end):
    """Elements ``n`` before ``end`` of the vectors that begin at ``offsets [J]``: ``[J,n]``, zero where not valid."""
    return tl.load(pointer + offsets[:, None] + n[None, :], mask=valid[:, None] & (n < end)[None, :], other=0.0)


@triton.jit
def load_columns(pointer, offsets, valid, n, end):
    """`load_vectors` with a vector a column: ``[n,J]``."""
    return tl.load(pointer + offsets[None, :] + n[:, None], mask=valid[None, :] & (n < end)[:, None], other=0.0)


@triton.jit
def vector_chunks(pointer, offsets, valid, cut: tl.constexpr):
    """Whole vectors of N by `load_vectors`."""
    chunks = ()
    for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
        chunks = chunks + (load_vectors(pointer, offsets, valid, columns_of(c, cut), cut.N),)
    return chunks


@triton.jit
def column_chunks(pointer, offsets, valid, cut: tl.constexpr):
    """Whole vectors of N by `load_columns`."""
    chunks = ()
    for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
        chunks = chunks + (load_columns(pointer, offsets, valid, columns_of(c, cut), cut.N),)
    return chunks


@triton.jit
def ring_chunks(pointers, valid, cut: tl.constexpr):
    """Whole vectors of N by `tiles.load_ring_vectors`."""
    chunks = ()
    for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
        chunks = chunks + (load_ring_vectors(pointers, valid, columns_of(c, cut), cut.N, cut),)
    return chunks


@triton.jit
def store_vectors(pointer, offsets, valid, chunks, cut: tl.constexpr):
    """Write what `vector_chunks` loads."""
    for c in tl.static_range(tl.constexpr(cut.CHUNKS)):
        n = columns_of(c, cut)
        mask = valid[:, None] & (n < cut.N)[None, :]
        tl.store(pointer + offsets[:, None] + n[None, :], chunks[c], mask=mask)


@triton.jit
def squares(chunks, axis: tl.constexpr, cut: tl.constexpr):
    """Sums of squares over N, which lies along ``axis``, in float32."""
    total = tl.sum(chunks[0].to(tl.float32) * chunks[0].to(tl.float32), axis=axis)
    for c in tl.static_range(1, tl.constexpr(cut.CHUNKS)):
        total += tl.sum(chunks[c].to(tl.float32) * chunks[c].to(tl.float32), axis=axis)
    return total


@triton.jit
def sums(g, w, c):
    """``(through, between)`` of ``g [TOKENS]``, numbers of the window: ``through [c]`` is the sum over tokens up to and
    with c, ``between [w,c]`` over those behind w up to c. Formed without subtracting.
    """
    u = tl.arange(0, TOKENS)
    behind = tl.where(w[:, None] < u[None, :], g[None, :], 0.0)
    between = product(behind, tl.where(u[:, None] <= c[None, :], 1.0, 0.0).to(tl.bfloat16))
    return tl.sum(tl.where(u[:, None] <= c[None, :], g[:, None], 0.0), axis=0), between


@triton.jit
def input_product(a, b):
    """``a @ b`` of two tensors of one input dtype, whose products float32 holds exactly; sums in float32."""
    # The interpreter multiplies the bits of bfloat16 as if they were integers.
    if INTERPRETED or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def input_products(a, b, cut: tl.constexpr):
    """`input_product` over N: chunks ``[J,WIDTH]`` and ``[WIDTH,C]``."""
    total = input_product(a[0], b[0])
    for c in tl.static_range(1, tl.constexpr(cut.CHUNKS)):
        total += input_product(a[c], b[c])
    return total


@triton.jit
def halves(x):
    """Two tf32 numbers whose sum is ``x``, in float32, to 2^-23: the nearest one, and the rest, of which tensor cores
    drop at most the last bit.
    """
    high = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def state_products(S, b, cut: tl.constexpr):
    """`state_product` over N: chunks ``[M,WIDTH]`` and ``[WIDTH,C]``."""
    total = state_product(S[0], b[0])
    for c in tl.static_range(1, tl.constexpr(cut.CHUNKS)):
        total += state_product(S[c], b[c])
    return total


@triton.jit
def state_product(S, b):
    """``S [M,WIDTH] @ b [WIDTH,C]`` to float32's accuracy, for a state and operands of any dtype: a float32 state is
    never rounded, but split. Numbers of 16 bits are tf32 numbers.
    """
    if S.dtype == b.dtype and S.dtype != tl.float32:
        return input_product(S, b)
    wide = b.to(tl.float32)
    if S.dtype == tl.float32:
        high, low = halves(S)
        if b.dtype == tl.float32:
            wide, rest = halves(wide)
            found = tl.dot(low, wide, tl.dot(high, rest, input_precision="tf32"), input_precision="tf32")
        else:
            found = tl.dot(low, wide, input_precision="tf32")
        return tl.dot(high, wide, found, input_precision="tf32")
    else:
        if b.dtype == tl.float32:
            wide, rest = halves(wide)
            found = tl.dot(S.to(tl.float32), rest, input_precision="tf32")
            return tl.dot(S.to(tl.float32), wide, found, input_precision="tf32")
        else:
            return tl.dot(S.to(tl.float32), wide, input_precision="tf32")


@triton.jit
def weighted(a, w):
    """``a [M,J] @ w [J,C]`` to float32's accuracy; ``w`` in float32, finite, as in `tiles.product`."""
    if a.dtype == tl.bfloat16 and not INTERPRETED:
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))
    else:
        return tl.dot(a.to(tl.float32), w, input_precision="tf32x3")
