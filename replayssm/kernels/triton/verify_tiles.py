"""What the kernels of a window share: who takes what, tiles of a state, sums of decays, products on tensor cores.

``cut`` is a `verify_launch.WindowCut` everywhere. Tokens of the ring are in time order, those of the window behind.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.kernels.triton.rounding import INTERPRETED, nearest
from replayssm.kernels.triton.tiles import product

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
def load_tile(state, m, cut: tl.constexpr):
    """Rows ``m`` of a head's ``state``, ``[M,PADDED]`` in its dtype; zero behind P and N."""
    n = tl.arange(0, cut.PADDED)
    pointers = state + m[:, None] * cut.ROW + n[None, :]
    if cut.WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(m < cut.P)[:, None] & (n < cut.N)[None, :], other=0.0)


@triton.jit
def store_tile(state, m, tile, cut: tl.constexpr):
    """Write what `load_tile` reads, rounded to the nearest number of the state's dtype."""
    n = tl.arange(0, cut.PADDED)
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
def halves(x):
    """Two tf32 numbers whose sum is ``x``, in float32, to 2^-23: the nearest one, and the rest, of which tensor cores
    drop at most the last bit.
    """
    high = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def state_product(S, b):
    """``S [M,PADDED] @ b [PADDED,C]`` to float32's accuracy, for a state and operands of any dtype: a float32 state is
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
