"""Rounding of a tile of the state to its dtype, as `replayssm.formats` defines it: nearest, or stochastic bit for bit.

``stochastic`` costs one call of Philox for eight neighbours where a tile's chunks are at least that wide, and holds
them in the order in which a thread holds eight 16-bit numbers of a row. Integer arithmetic only, so it is the same on
every device and in the interpreter.

Where something is rounded, ``draws`` is a `Draws`, or None for the nearest number.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl

from replayssm import formats

GROUP = tl.constexpr(formats.GROUP)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Draws(NamedTuple):
    """What all random words of one slot have in common: scalars of `stochastic`."""

    seed: Any
    layer: Any
    request: Any
    flush: Any


@triton.jit
def draws_of(rounding, slot, number):
    """The `Draws` of a slot's flush, or stored step, with that number, from a `formats.Rounding`."""
    request = slot
    if rounding.requests is not None:
        request = tl.load(rounding.requests + slot)
    return Draws(rounding.seed, rounding.layer, request, number)


@triton.jit
def arrive(flushes, PROGRAMS: tl.constexpr):
    """The number of a row's flush, the same for all of its programs, of which the last to ask counts it.

    ``flushes`` points to the slot's count, int64 and below 2^32: above that the programs are counted that have asked.
    """
    before = tl.atomic_add(flushes, 1 << 32, sem="relaxed")
    number = before & 0xFFFFFFFF
    if before >> 32 == PROGRAMS - 1:
        tl.store(flushes, number + 1)
    return number


@triton.jit
def rounded(x, rows, FIRST: tl.constexpr, N: tl.constexpr, draws, dtype: tl.constexpr):
    """``x [M,W]`` float32, rounded to ``dtype``; ``rows`` and ``FIRST`` as for `stochastic`."""
    if dtype == tl.float32:
        return x
    elif draws is not None:
        return stochastic(x, rows, FIRST, N, draws.seed, draws.request, draws.layer, draws.flush, dtype)
    else:
        return nearest(x, dtype)


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """``x`` float32 to ``dtype``, bfloat16 or float16: what is too large becomes the largest number; NaN is kept."""
    # On a device one instruction for two numbers, as many as a conversion that overflows takes.
    if INTERPRETED:
        largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
        x = tl.maximum(x, -largest, propagate_nan=tl.PropagateNan.ALL)
        return tl.minimum(x, largest, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def stochastic(x, rows, FIRST: tl.constexpr, N: tl.constexpr, seed, request, layer, flush, dtype: tl.constexpr):
    """``x [M,W]`` float32, rounded to ``dtype``, bfloat16 or float16.

    ``rows [M]`` are numbers of the rows in the layer's state ``[H,P,N]``, head * P + p; ``FIRST`` is the column of
    ``x[:,0]``, a multiple of W. ``seed`` is an integer of 64 bits; ``request``, ``layer`` and ``flush``, the number of
    the flush, are integers of which the low 32 bits count.
    """
    return round_with(x, random_words(rows, FIRST, x.shape[1], N, seed, request, layer, flush), dtype)


@triton.jit
def random_words(rows, FIRST: tl.constexpr, W: tl.constexpr, N: tl.constexpr, seed, request, layer, flush):
    """``[M,W]`` uint32: the words of columns ``FIRST`` to ``FIRST + W`` of the rows."""
    request = tl.cast(request, tl.uint32)
    layer = tl.cast(layer, tl.uint32)
    flush = tl.cast(flush, tl.uint32)
    IN_ROW: tl.constexpr = (N + GROUP - 1) // GROUP
    first = rows.to(tl.uint32)[:, None] * IN_ROW + FIRST // GROUP
    if W >= GROUP:
        group = first + tl.arange(0, W // GROUP).to(tl.uint32)[None, :]
        w0, w1, w2, w3 = tl.philox(seed, request, layer, flush, group)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        return tl.reshape(tl.join(words, _exchanged(words)), (rows.shape[0], W))
    else:
        w0, w1, w2, w3 = tl.philox(seed, request, layer, flush, first)
        place = ((FIRST + tl.arange(0, W)) % GROUP)[None, :]
        words = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
        return tl.where(place % 2 == 0, words, _exchanged(words))


@triton.jit
def _exchanged(words):
    return (words << 16) | (words >> 16)


@triton.jit
def round_with(x, words, dtype: tl.constexpr):
    """``x`` float32 to ``dtype``: |x| to floor(|x| / ulp + words / 2^32) ulp."""
    tl.static_assert(dtype == tl.bfloat16 or dtype == tl.float16, "accepted: bfloat16, float16")
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if dtype == tl.bfloat16:
        # Float32 with 16 bits less, subnormals included.
        code = tl.where(magnitude > 0x7F800000, 0x7FC0, tl.minimum((magnitude + (words >> 16)) >> 16, 0x7F7F))
    else:
        # |x| / ulp with 32 bits behind the point, of which a carry may come; 113 is 2^-14, the smallest normal number.
        exponent = (magnitude >> 23).to(tl.int32)
        significand = ((magnitude & 0x7FFFFF) | 0x800000).to(tl.uint64)
        dropped = tl.minimum(tl.maximum(126 - exponent, 13), 63)
        carried = ((significand << 32) >> dropped.to(tl.uint64)) + words.to(tl.uint64)
        code = (carried >> 32).to(tl.uint32) + (tl.maximum(exponent - 113, 0) << 10).to(tl.uint32)
        code = tl.where(magnitude > 0x7F800000, 0x7E00, tl.minimum(code, 0x7BFF))
    return (code | ((bits >> 16) & 0x8000)).to(tl.uint16).to(dtype, bitcast=True)
