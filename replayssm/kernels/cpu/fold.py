"""Folding tokens into the state: the one loop of these kernels that arithmetic limits, not memory."""

from __future__ import annotations

from typing import Any

from replayssm.kernels.cpu.arguments import Sizes
from replayssm.kernels.cpu.compilation import inlined
from replayssm.kernels.cpu.lanes import FLOAT32, WIDTH, add, fma, load, load_part, mul, splat, store, store_part, total


@inlined
def fold_rows(
    s: Any, t: Any, x: Any, y: Any, sizes: Sizes, tokens: int, E: Any, keys: Any, a: Any, b: Any
) -> tuple[float, float, float, float]:
    """s <- E s + sum_j x_j keys_j and t <- E t + sum_j y_j keys_j for two rows; returns s . a, t . a, s . b, t . b.

    x_j is ``x[j * p_padded]``, keys_j is ``keys[j * n_padded:]``. Two rows share the loads of the keys, four vectors of
    each stay in registers over all tokens: eight independent sums. s and t may be the same row: it is then computed
    twice from the same values and stored twice.
    """
    sa, sb, block = splat(FLOAT32), splat(FLOAT32), 4 * WIDTH
    ta, tb = sa, sb
    done = sizes.N // block * block
    for n in range(0, done, block):
        E0, E1, E2, E3 = load(E, n), load(E, n + WIDTH), load(E, n + 2 * WIDTH), load(E, n + 3 * WIDTH)
        s0, s1 = mul(E0, load(s, n)), mul(E1, load(s, n + WIDTH))
        s2, s3 = mul(E2, load(s, n + 2 * WIDTH)), mul(E3, load(s, n + 3 * WIDTH))
        t0, t1 = mul(E0, load(t, n)), mul(E1, load(t, n + WIDTH))
        t2, t3 = mul(E2, load(t, n + 2 * WIDTH)), mul(E3, load(t, n + 3 * WIDTH))
        for j in range(tokens):
            xj, yj, at = splat(x[j * sizes.p_padded]), splat(y[j * sizes.p_padded]), j * sizes.n_padded + n
            k0, k1, k2, k3 = (
                load(keys, at),
                load(keys, at + WIDTH),
                load(keys, at + 2 * WIDTH),
                load(keys, at + 3 * WIDTH),
            )
            s0, s1, s2, s3 = fma(xj, k0, s0), fma(xj, k1, s1), fma(xj, k2, s2), fma(xj, k3, s3)
            t0, t1, t2, t3 = fma(yj, k0, t0), fma(yj, k1, t1), fma(yj, k2, t2), fma(yj, k3, t3)
        _store4(s, n, s0, s1, s2, s3)
        _store4(t, n, t0, t1, t2, t3)
        sa, sb = add(sa, _dot4(a, n, s0, s1, s2, s3)), add(sb, _dot4(b, n, s0, s1, s2, s3))
        ta, tb = add(ta, _dot4(a, n, t0, t1, t2, t3)), add(tb, _dot4(b, n, t0, t1, t2, t3))
    for n in range(done, sizes.N, WIDTH):
        count = sizes.N - n
        s0, t0 = mul(load(E, n), load_part(s, n, count)), mul(load(E, n), load_part(t, n, count))
        for j in range(tokens):
            k0 = load(keys, j * sizes.n_padded + n)
            s0, t0 = fma(splat(x[j * sizes.p_padded]), k0, s0), fma(splat(y[j * sizes.p_padded]), k0, t0)
        store_part(s, n, count, s0)
        store_part(t, n, count, t0)
        sa, sb = fma(s0, load(a, n), sa), fma(s0, load(b, n), sb)
        ta, tb = fma(t0, load(a, n), ta), fma(t0, load(b, n), tb)
    return total(sa), total(ta), total(sb), total(tb)


@inlined
def _store4(memory: Any, at: int, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
    store(memory, at, v0)
    store(memory, at + WIDTH, v1)
    store(memory, at + 2 * WIDTH, v2)
    store(memory, at + 3 * WIDTH, v3)


@inlined
def _dot4(memory: Any, at: int, v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    """Lane sums of four vectors times the memory at ``at``."""
    first = fma(v1, load(memory, at + WIDTH), mul(v0, load(memory, at)))
    second = fma(v3, load(memory, at + 3 * WIDTH), mul(v2, load(memory, at + 2 * WIDTH)))
    return add(first, second)
