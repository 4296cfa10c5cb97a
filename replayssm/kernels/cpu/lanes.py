"""Sixteen float32 lanes: the vectors that the CPU kernels are written in.

Numba leaves vectorisation to LLVM, which gives up on the kernels' inner loops (in-place updates that may alias, a
reduction, run-time lengths). A `Lanes` value is an LLVM ``<16 x float>`` instead, one AVX-512 register or several
narrower ones on other machines, and the functions below are the few instructions that the kernels need. A `Row` is
128 of them, eight registers: all published layers have states with rows of 128, which then never leave the registers.

float32 memory is a raw pointer, from `pointer`. Activations may be bfloat16 as well; they are given by address and
``narrow``, 1 for bfloat16 and 0 for float32, and are widened when read and rounded to nearest even when written (a NaN
stays a NaN). Deciding that at run time halves what has to be compiled, and costs nothing outside of the inner loops.
``*_part`` functions take the first ``count`` lanes; the others read as zero and are not written. Nothing here checks
bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, types
from numba.core import cgutils

from replayssm.kernels.cpu.compilation import exactly, inlined

WIDTH = 16
ROW = 128
LINE = 64
"""Bytes of a cache line."""
FLOAT32 = np.float32(0)
ONE = np.float32(1)
INT32 = np.int32(0)
INT64 = np.int64(0)

intrinsic: Any = extending.intrinsic  # its stubs do not know that numba passes the typing context

_F32, _I32, _I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_VECTOR = ir.VectorType(_F32, WIDTH)
_INTEGERS = ir.VectorType(_I32, WIDTH)


class Lanes(types.Type):
    """Numba's type of a vector of ``count`` float32."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Lanes{count}")


lanes, row = Lanes(WIDTH), Lanes(ROW)


@extending.register_model(Lanes)
class _LanesModel(extending.models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, ir.VectorType(_F32, kind.count))


# Code generation -----------------------------------------------------------------------------------------------------


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """A vector full of ``value``."""
    return ir.Constant(kind, [value] * kind.count)


def _call(builder: Any, name: str, result: ir.Type, arguments: list[Any], **options: Any) -> Any:
    kinds = [argument.type for argument in arguments]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, arguments, **options)


def _splat(builder: Any, value: Any, count: int = WIDTH) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, undefined, _constant(ir.VectorType(_I32, count), 0))


def _load(builder: Any, arguments: Any, count: int) -> Any:
    kind = ir.VectorType(_F32, count)
    memory, index = arguments
    value = builder.load(builder.bitcast(builder.gep(memory, [index]), kind.as_pointer()))
    value.align = 4
    return value


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, [a, b, c])


def _mask(builder: Any, count: Any) -> Any:
    """The first ``count`` lanes."""
    numbers = ir.Constant(_INTEGERS, list(range(WIDTH)))
    return builder.icmp_signed("<", numbers, _splat(builder, builder.trunc(count, _I32)))


def _load_masked(builder: Any, base: Any, index: Any, mask: Any, element: ir.Type, name: str) -> Any:
    kind, size = ir.VectorType(element, WIDTH), 2 if element == _I16 else 4
    place = builder.bitcast(builder.gep(base, [index]), kind.as_pointer())
    arguments = [place, _I32(size), mask, _constant(kind, 0)]
    return _call(builder, f"llvm.masked.load.v{WIDTH}{name}.p0", kind, arguments)


def _store_masked(builder: Any, value: Any, base: Any, index: Any, mask: Any, name: str) -> Any:
    place = builder.bitcast(builder.gep(base, [index]), value.type.as_pointer())
    size = 2 if value.type.element == _I16 else 4
    _call(builder, f"llvm.masked.store.v{WIDTH}{name}.p0", ir.VoidType(), [value, place, _I32(size), mask])


def _narrow(builder: Any, value: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even; NaN becomes a quiet NaN."""
    wide = _INTEGERS
    bits = builder.bitcast(value, wide)
    top = builder.lshr(bits, _constant(wide, 16))
    odd = builder.and_(top, _constant(wide, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, _constant(wide, 0x7FFF)), odd), _constant(wide, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(top, _constant(wide, 0x40))
    return builder.trunc(builder.select(is_nan, quiet, rounded), ir.VectorType(_I16, WIDTH))


# Memory --------------------------------------------------------------------------------------------------------------


@intrinsic
def pointer(typing: Any, address: Any, like: Any) -> Any:
    """The memory at ``address`` (an integer) as elements of the type of the scalar ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.intp, like), generate


@intrinsic
def advance(typing: Any, memory: Any, count: Any) -> Any:
    """The memory ``count`` elements further on."""
    return memory(memory, types.intp), lambda context, builder, _, arguments: builder.gep(arguments[0], [arguments[1]])


@intrinsic
def load(typing: Any, memory: Any, index: Any) -> Any:
    """Lanes from the sixteen elements at ``index``."""
    return lanes(memory, types.intp), lambda context, builder, _, arguments: _load(builder, arguments, WIDTH)


@intrinsic
def load_row(typing: Any, memory: Any, index: Any) -> Any:
    """A row from the 128 elements at ``index``."""
    return row(memory, types.intp), lambda context, builder, _, arguments: _load(builder, arguments, ROW)


@intrinsic
def store(typing: Any, memory: Any, index: Any, value: Any) -> Any:
    """Write lanes, or a row, to ``index``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, place, value = arguments
        builder.store(value, builder.bitcast(builder.gep(base, [place]), value.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(memory, types.intp, value), generate


@intrinsic
def store_past_caches(typing: Any, memory: Any, index: Any, value: Any) -> Any:
    """Write a row to ``index``, at a cache line, without reading what was there; other threads see it after `fence`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, place, value = arguments
        store = builder.store(value, builder.bitcast(builder.gep(base, [place]), value.type.as_pointer()))
        store.align = LINE
        store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return types.void(memory, types.intp, row), generate


@intrinsic
def fence(typing: Any) -> Any:
    """What was written before is seen before what is written after."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def load_part(typing: Any, memory: Any, index: Any, count: Any) -> Any:
    """Lanes from the first ``count`` elements at ``index``, zero behind them; ``count`` may exceed sixteen."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, place, count = arguments
        return _load_masked(builder, base, place, _mask(builder, count), _F32, "f32")

    return lanes(memory, types.intp, types.intp), generate


@intrinsic
def store_part(typing: Any, memory: Any, index: Any, count: Any, value: Any) -> Any:
    """Write the first ``count`` lanes to ``index``; ``count`` may exceed sixteen."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, place, count, value = arguments
        _store_masked(builder, value, base, place, _mask(builder, count), "f32")
        return context.get_dummy_value()

    return types.void(memory, types.intp, types.intp, lanes), generate


@intrinsic
def load_input(typing: Any, address: Any, index: Any, count: Any, narrow: Any) -> Any:
    """As `load_part` from activations: bfloat16 where ``narrow``, else float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, index, count, narrow = arguments
        mask, result = _mask(builder, count), cgutils.alloca_once(builder, _VECTOR)
        with builder.if_else(cgutils.is_not_null(builder, narrow)) as (bfloat16, float32):
            with bfloat16:
                base = builder.inttoptr(address, _I16.as_pointer())
                bits = builder.zext(_load_masked(builder, base, index, mask, _I16, "i16"), _INTEGERS)
                builder.store(builder.bitcast(builder.shl(bits, _constant(_INTEGERS, 16)), _VECTOR), result)
            with float32:
                base = builder.inttoptr(address, _F32.as_pointer())
                builder.store(_load_masked(builder, base, index, mask, _F32, "f32"), result)
        return builder.load(result)

    return lanes(types.intp, types.intp, types.intp, types.intp), generate


@intrinsic
def load_input_row(typing: Any, address: Any, index: Any, narrow: Any) -> Any:
    """A row of 128 activations: bfloat16 where ``narrow``, else float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, index, narrow = arguments
        kind, wide = ir.VectorType(_F32, ROW), ir.VectorType(_I32, ROW)
        result = cgutils.alloca_once(builder, kind)
        with builder.if_else(cgutils.is_not_null(builder, narrow)) as (bfloat16, float32):
            with bfloat16:
                half = ir.VectorType(_I16, ROW)
                base = builder.gep(builder.inttoptr(address, _I16.as_pointer()), [index])
                value = builder.load(builder.bitcast(base, half.as_pointer()))
                value.align = 2
                bits = builder.shl(builder.zext(value, wide), _constant(wide, 16))
                builder.store(builder.bitcast(bits, kind), result)
            with float32:
                base = builder.inttoptr(address, _F32.as_pointer())
                builder.store(_load(builder, (base, index), ROW), result)
        return builder.load(result)

    return row(types.intp, types.intp, types.intp), generate


@intrinsic
def store_input(typing: Any, address: Any, index: Any, count: Any, value: Any, narrow: Any) -> Any:
    """As `store_part` to activations: bfloat16 where ``narrow``, else float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, index, count, value, narrow = arguments
        mask = _mask(builder, count)
        with builder.if_else(cgutils.is_not_null(builder, narrow)) as (bfloat16, float32):
            with bfloat16:
                base = builder.inttoptr(address, _I16.as_pointer())
                _store_masked(builder, _narrow(builder, value), base, index, mask, "i16")
            with float32:
                base = builder.inttoptr(address, _F32.as_pointer())
                _store_masked(builder, value, base, index, mask, "f32")
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, lanes, types.intp), generate


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at ``address`` to read it; a hint, so it may lie anywhere."""
    return types.void(types.intp), lambda *generation: _prefetch(generation, 0)


@intrinsic
def prefetch_to_write(typing: Any, address: Any) -> Any:
    """Ask for the cache line at ``address`` to write it.

    Stores retire in order: one that misses all caches holds up those behind it.
    """
    return types.void(types.intp), lambda *generation: _prefetch(generation, 1)


def _prefetch(generation: tuple[Any, ...], write: int) -> Any:
    context, builder, _, arguments = generation
    place = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, _I32(write), _I32(3), _I32(1)])
    return context.get_dummy_value()


@inlined
def prefetch_span(address: int, size: int) -> None:
    """Ask for all cache lines of ``size`` bytes, to read them."""
    for line in range(address, address + size, LINE):
        prefetch(line)
    prefetch(address + size - 1)


@inlined
def prefetch_span_to_write(address: int, size: int) -> None:
    """Ask for all cache lines of ``size`` bytes, to write them."""
    for line in range(address, address + size, LINE):
        prefetch_to_write(line)
    prefetch_to_write(address + size - 1)


@inlined
def widen(target: Any, address: int, at: int, count: int, scale: float, narrow: int) -> None:
    """``target[i] = scale source[at + i]`` for ``count`` activations, zero up to the next whole vector."""
    factor = splat(scale)
    for i in range(0, count, WIDTH):
        store(target, i, mul(load_input(address, at + i, count - i, narrow), factor))


@inlined
def accumulate(target: Any, weight: float, address: int, at: int, count: int, narrow: int) -> None:
    """``target[i] += weight source[at + i]`` for ``count`` activations, in float32."""
    factor = splat(weight)
    if narrow != 0:
        for i in range(0, count, WIDTH):
            store(target, i, fma(factor, load_input(address, at + i, count - i, 1), load(target, i)))
    else:
        for i in range(0, count, WIDTH):
            store(target, i, fma(factor, load_input(address, at + i, count - i, 0), load(target, i)))


@inlined
def copy(target: int, to: int, address: int, at: int, count: int, narrow: int) -> None:
    """``target[to + i] = source[at + i]`` for ``count`` activations."""
    for i in range(0, count, WIDTH):
        store_input(target, to + i, count - i, load_input(address, at + i, count - i, narrow), narrow)


@inlined
def dot(a: Any, b: Any, count: int) -> float:
    """Sum of ``a[i] b[i]``, both zero from ``count`` to the next whole vector."""
    products = splat(FLOAT32)
    for i in range(0, count, WIDTH):
        products = fma(load(a, i), load(b, i), products)
    return total(products)


# Arithmetic ----------------------------------------------------------------------------------------------------------


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """One float32 in all of the lanes."""
    return lanes(types.float32), lambda context, builder, _, arguments: _splat(builder, arguments[0])


@intrinsic
def lane0(typing: Any, a: Any) -> Any:
    """The first lane."""
    return types.float32(lanes), lambda context, builder, _, arguments: builder.extract_element(arguments[0], _I32(0))


@intrinsic
def splat_row(typing: Any, value: Any) -> Any:
    """One float32 in all of a row."""
    return row(types.float32), lambda context, builder, _, arguments: _splat(builder, arguments[0], ROW)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, fused where the machine can; lanes or rows."""
    return a(a, a, a), lambda context, builder, _, arguments: _fma(builder, *arguments)


@intrinsic
def mul(typing: Any, a: Any, b: Any) -> Any:
    """a b; lanes or rows."""
    return a(a, a), lambda context, builder, _, arguments: builder.fmul(*arguments)


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """a + b; lanes or rows."""
    return a(a, a), lambda context, builder, _, arguments: builder.fadd(*arguments)


@intrinsic
def div(typing: Any, a: Any, b: Any) -> Any:
    """a / b; lanes or rows."""
    return a(a, a), lambda context, builder, _, arguments: builder.fdiv(*arguments)


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """Sum of the lanes, as a tree."""
    return types.float32(lanes), lambda context, builder, _, arguments: _total(builder, arguments[0])


@intrinsic
def dot_row(typing: Any, a: Any, b: Any) -> Any:
    """Sum of the products of two rows.

    One chain over the lanes, then a tree: taking the pieces in memory order is what hardware prefetchers follow.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pieces = [[_piece(builder, r, start) for start in range(0, ROW, WIDTH)] for r in arguments]
        (x, y), *rest = zip(*pieces, strict=True)
        products = builder.fmul(x, y)
        for x, y in rest:
            products = _fma(builder, x, y, products)
        return _total(builder, products)

    return types.float32(row, row), generate


def _piece(builder: Any, value: Any, first: int) -> Any:
    """Sixteen lanes of a row."""
    numbers = ir.Constant(_INTEGERS, list(range(first, first + WIDTH)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), numbers)


def _total(builder: Any, value: Any) -> Any:
    arguments = [_F32(-0.0), value]
    return _call(builder, f"llvm.vector.reduce.fadd.v{WIDTH}f32", _F32, arguments, fastmath=("reassoc",))


@exactly
def exp(x: Any) -> Any:
    """exp(x) to about one unit in the last place, lanes or rows; 0 below -87, exp(88) above 88, NaN for NaN.

    Writing x = n ln 2 + r with |r| <= ln(2) / 2: the Taylor polynomial of degree 7 in r, times 2^n put together in the
    exponent's bits. ln 2 is split in two so that r is exact to float32, which a reassociation would undo.
    """
    return _exp_of(x)


@intrinsic
def _exp_of(typing: Any, x: Any) -> Any:
    return x(x), lambda context, builder, _, arguments: _exp(builder, arguments[0])


def _exp(builder: Any, x: Any) -> Any:
    count = x.type.count
    integers = ir.VectorType(_I32, count)

    def number(value: float) -> ir.Constant:
        return _constant(x.type, value)

    x = builder.select(builder.fcmp_ordered(">", x, number(88.0)), number(88.0), x)
    underflow = builder.fcmp_ordered("<", x, number(-87.0))
    finite = builder.select(builder.fcmp_ordered(">", x, number(-87.0)), x, number(-87.0))
    shifted = _fma(builder, finite, number(_f32(1.4426950408889634)), number(0.5))
    n = _call(builder, f"llvm.floor.v{count}f32", x.type, [shifted])
    r = _fma(builder, n, number(-0.693359375), x)
    r = _fma(builder, n, number(_f32(0.693359375 - 0.6931471805599453)), r)
    p = number(_f32(1 / 5040))
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = _fma(builder, p, r, number(_f32(coefficient)))
    exponent = builder.shl(builder.add(builder.fptosi(n, integers), _constant(integers, 127)), _constant(integers, 23))
    result = builder.fmul(p, builder.bitcast(exponent, x.type))
    return builder.select(underflow, number(0.0), result)


def _f32(value: float) -> float:
    """The nearest float32; LLVM refuses a float constant that is not one."""
    return float(np.float32(value))
