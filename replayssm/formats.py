"""Number formats of the state as torch dtypes, and rounding to them: to nearest, or stochastically with Philox.

Names and sizes are those of `replayssm.layout.FORMATS`; here are the ones without scales, and rounding to the elements
of the others, whose storage is in `replayssm.packed`. Rounding to bf16 and fp16 saturates at the largest finite number,
infinities included, and keeps NaN and signs; fp32 is left as it is.

Stochastic rounding moves |x| to floor(|x| / ulp + u) ulp with u uniform in [0, 1), ulp being the format's spacing at x,
below its smallest normal number too. So only the two neighbours of x can come out, a representable x never changes, and
the mean is x.

u has 32 bits and depends on what is rounded and on nothing else: Philox4x32-10 with key = seed and counter = (request,
layer, flush, group). Eight neighbours of a state row ``[N]`` make a group, the last one of a row may be short, and
groups count through the rows of the layer's state ``[H,P,N]``. Neighbours 2 i and 2 i + 1 of a group get word i: the
first as it is, the second with its halves exchanged. What decides at a normal bf16, fp16 or e4m3 number is the top 16,
13 or 20 bits of u: those of a pair are independent in bf16 and fp16, and share four of twenty in e4m3.

Every back end has this definition; `replayssm.kernels.triton.rounding` is the one in Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "GROUP",
    "Rounding",
    "check_rounding",
    "nearest_round",
    "philox4x32_10",
    "random_words",
    "round_with",
    "stochastic_round",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Format -> the dtype that holds it."""


@dataclass(frozen=True)
class Code:
    """Layout of a narrow float: ``lowest`` is its smallest normal number's exponent field in float32; codes of the
    largest finite number and of NaN, where it has one."""

    mantissa_bits: int
    lowest: int
    largest: int
    nan: int | None


CODES = {torch.bfloat16: Code(7, 1, 0x7F7F, 0x7FC0), torch.float16: Code(10, 113, 0x7BFF, 0x7E00)}
E4M3, E2M1 = Code(3, 121, 0x7E, 0x7F), Code(1, 127, 0x7, None)

GROUP = 8
"""Neighbours of a row that share one call of Philox."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def philox4x32_10(key: Tensor, counter: Tensor) -> Tensor:
    """Four random words ``[..., 4]`` for ``key [..., 2]`` and ``counter [..., 4]``, which broadcast.

    All are int64 tensors that hold unsigned 32-bit words. Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
    easy as 1, 2, 3", 2011; the order of words is Random123's.
    """
    k0, k1 = key.unbind(-1)
    c0, c1, c2, c3 = counter.unbind(-1)
    for _ in range(10):
        # The product wraps around int64; all 64 of its bits are right.
        even, odd = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c2 = (odd >> 32 & LOW) ^ c1 ^ k0, (even >> 32 & LOW) ^ c3 ^ k1
        c1, c3 = odd & LOW, even & LOW
        k0, k1 = k0 + KEY_STEPS[0] & LOW, k1 + KEY_STEPS[1] & LOW
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def random_words(
    shape: torch.Size | tuple[int, ...], *, seed: int, request: int | Tensor, layer: int, flush: int | Tensor
) -> Tensor:
    """The word of each element of ``[B, ..., N]``, int64 in [0, 2^32); arguments as in `stochastic_round`."""
    _check_counter(seed, layer)
    device = next((n.device for n in (request, flush) if isinstance(n, Tensor)), None)
    batch_size, state_dim = shape[0], shape[-1]
    in_row = -(-state_dim // GROUP)
    rows = torch.Size(shape[1:-1]).numel()
    group = torch.arange(rows * in_row, device=device)
    counter = torch.stack(
        torch.broadcast_tensors(
            _column("request", request, batch_size, group.device),
            torch.full((1, 1), layer, device=device),
            _column("flush", flush, batch_size, group.device),
            group[None, :],
        ),
        dim=-1,
    )
    key = torch.stack([torch.full((), word, device=device) for word in (seed & LOW, seed >> 32)])
    words = philox4x32_10(key, counter)
    words = torch.stack([words, (words << 16 & LOW) | words >> 16], dim=-1)
    return words.reshape(batch_size, rows, -1)[..., :state_dim].reshape(shape)


def _column(name: str, number: int | Tensor, batch_size: int, device: torch.device) -> Tensor:
    """One word a row, ``[B,1]``, modulo 2^32."""
    # No copy from the host, which a CUDA graph may not hold.
    column = number.to(device) if isinstance(number, Tensor) else torch.full((), number & LOW, device=device)
    if column.dtype.is_floating_point or column.shape not in ((), (batch_size,)):
        raise ValueError(f"{name} has shape {list(column.shape)} of {column.dtype}; accepted: [{batch_size}] integers")
    return (column.long() & LOW).expand(batch_size)[:, None]


def round_with(x: Tensor, format: str, words: Tensor) -> Tensor:
    """Round float32 ``x`` with u = ``words`` / 2^32, as the module says; ``words`` int64 of the shape of ``x``.

    Where |x| < 2^-9 ulp, which only fp16 has, the chance of rounding up is itself cut to a multiple of 2^-32.
    """
    dtype = _dtype(x, format)
    if dtype == torch.float32:
        return x
    rounded = magnitude_codes(x, CODES[dtype], words)
    return torch.where(x.signbit(), rounded - 0x8000, rounded).to(torch.int16).view(dtype)


def magnitude_codes(x: Tensor, code: Code, words: Tensor) -> Tensor:
    """The codes, without their sign, int64, of float32 ``x`` rounded with u = ``words`` / 2^32. Saturates; NaN becomes
    the format's, or its largest number where it has none."""
    magnitude = x.contiguous().view(torch.int32).long() & 0x7FFFFFFF
    exponent = (magnitude >> 23).clamp_min(1)
    significand = torch.where(magnitude < 1 << 23, magnitude, magnitude & 0x7FFFFF | 1 << 23)
    dropped = 23 - code.mantissa_bits + (code.lowest - exponent).clamp_min(0)
    # |x| / ulp with 32 bits behind the point, of which a carry may come.
    fixed = significand << 32 >> dropped.clamp_max(63)
    rounded = (fixed + words >> 32) + ((exponent - code.lowest).clamp_min(0) << code.mantissa_bits)
    rounded = rounded.clamp_max(code.largest)
    return rounded if code.nan is None else rounded.masked_fill(magnitude > 0x7F800000, code.nan)


def stochastic_round(
    x: Tensor, format: str, *, seed: int, request: int | Tensor, layer: int, flush: int | Tensor
) -> Tensor:
    """Round one layer's states, float32 ``[B, ..., N]``, to ``format``, one of `DTYPES`.

    ``seed`` and ``layer`` are integers of 64 and 32 bits; ``request`` and ``flush``, the number of the flush, are
    integers or ``[B]``, taken modulo 2^32. Raises ``ValueError`` on others.
    """
    words = random_words(x.shape, seed=seed, request=request, layer=layer, flush=flush)
    return round_with(x, format, words.to(x.device))


def nearest_round(x: Tensor, format: str) -> Tensor:
    """Round float32 ``x`` to the nearest number of ``format``, one of `DTYPES`; ties to even."""
    dtype = _dtype(x, format)
    if dtype == torch.float32:
        return x
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


class Rounding(NamedTuple):
    """Stochastic rounding of a layer's 16-bit states, for a kernel's step; ``seed, layer`` as in `stochastic_round`.

    ``requests [S]`` int64 names each slot's request; None takes the number of the slot. A replay step rounds where it
    flushes, and numbers flushes by the layer's ``flushes``. A stored step rounds at each step: ``steps [S]`` int64 is
    the number of each slot's, for which the caller counts on; None in a replay step.
    """

    seed: int
    layer: int = 0
    requests: Tensor | None = None
    steps: Tensor | None = None


def check_rounding(rounding: Rounding | None, state: Tensor, *, stored: bool) -> None:
    """Raises ``ValueError``, one line, if a step on ``state [S,...]`` cannot round so; values are not looked at."""
    if rounding is None:
        return
    _check_counter(rounding.seed, rounding.layer)
    if state.dtype not in (*CODES, torch.uint8, torch.int8):
        raise ValueError(f"state has dtype {state.dtype}; accepted with rounding: {', '.join(map(str, CODES))}")
    if stored != (rounding.steps is not None):
        accepted = "[S] int64 for a stored step" if stored else "None for a replay step, which counts its flushes"
        raise ValueError(f"rounding.steps is {'None' if stored else 'given'}; accepted: {accepted}")
    for name in ("requests", "steps"):
        tensor = getattr(rounding, name)
        if tensor is None:
            continue
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != state.shape[:1] or not tensor.is_contiguous():
            told = f"shape {list(tensor.shape)} of {tensor.dtype}"
            raise ValueError(f"rounding.{name} has {told}; accepted: [{len(state)}] contiguous int64")
        if tensor.device != state.device:
            raise ValueError(f"rounding.{name} is on {tensor.device}; accepted: {state.device}, where the state is")


def _check_counter(seed: int, layer: int) -> None:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} is impossible; accepted: an integer from 0 to 2^64 - 1")
    if not 0 <= layer < 2**32:
        raise ValueError(f"layer={layer} is impossible; accepted: an integer from 0 to 2^32 - 1")


def _dtype(x: Tensor, format: str) -> torch.dtype:
    if format not in DTYPES:
        raise ValueError(f"format={format!r} has no rounding; accepted: {', '.join(DTYPES)}")
    if x.dtype != torch.float32:
        raise ValueError(f"x has dtype {x.dtype}; accepted: torch.float32")
    return DTYPES[format]
