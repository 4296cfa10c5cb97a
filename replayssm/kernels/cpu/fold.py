"""Adding a ring of tokens to rows of the state: the one loop of these kernels that arithmetic limits, not memory."""

from __future__ import annotations

from typing import Any

from replayssm.kernels.cpu.arguments import Sizes
from replayssm.kernels.cpu.compilation import inlined
from replayssm.kernels.cpu.lanes import fma, load, load_row, splat, splat_row


@inlined
def fold_two(s: Any, t: Any, x: Any, y: Any, sizes: Sizes, tokens: int, keys: Any) -> tuple[Any, Any]:
    """Rows s + sum_j x_j key_j and t + sum_j y_j key_j, x_j being ``x[j * p_padded]``, key_j ``keys[j * n_padded:]``.

    Two rows share the loads of the keys, and stay in sixteen registers.
    """
    for j in range(tokens):
        key = load_row(keys, j * sizes.n_padded)
        s = fma(splat_row(x[j * sizes.p_padded]), key, s)
        t = fma(splat_row(y[j * sizes.p_padded]), key, t)
    return s, t


@inlined
def fold_piece(s: Any, x: Any, sizes: Sizes, tokens: int, keys: Any) -> Any:
    """Lanes s + sum_j x_j key_j."""
    for j in range(tokens):
        s = fma(splat(x[j * sizes.p_padded]), load(keys, j * sizes.n_padded), s)
    return s
