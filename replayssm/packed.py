"""Storage of states in the formats of `replayssm.layout.FORMATS`: codes and scales as they would lie in memory.

A row is the last, contracted axis (N or K); blocks are consecutive elements of it. `pack` rounds to a format and
`unpack` gives float32.

| format | codes | scales |
| --- | --- | --- |
| fp32, bf16, fp16 | the dtype itself | none |
| fp8_e4m3, fp8_e4m3_b32 | E4M3 in uint8 | float32, amax / 448 of 128 or 32 elements |
| int8 | int8, -127 to 127 | float32, amax / 127 of 128 elements |
| nvfp4 | E2M1, two a uint8, the even element in the low half | E4M3 in uint8, amax / 6 of 16 elements over the row's
float32 scale, which is amax / 2688 of the row |
| nvfp4_t16 | as nvfp4 | as nvfp4, the float32 scale being that of 16 consecutive rows, counted along the axis before
the last |
| mxfp4 | as nvfp4 | E8M0 in uint8, 2^(floor(log2 amax) - 2) of 32 elements |

Codes are rounded to nearest, ties to even, or stochastically with the words of `replayssm.formats.random_words`: what
is rounded is x over its scale, a float32 quotient, and the mean of what comes back is that quotient times the scale.
Scales are always rounded to nearest. Everything saturates; with scales, what is beyond 2^127 counts as that; a NaN
makes its block NaN, but for nvfp4 its row, and for nvfp4_t16 its 16 rows. Nothing here asks the host, so all of it can
be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.formats import DTYPES, E2M1, E4M3, magnitude_codes, nearest_round, round_with
from replayssm.layout import FORMATS, format_of

__all__ = ["NARROW", "Packed", "empty", "pack", "unpack"]

NARROW = tuple(name for name in FORMATS if name != "fp32")
"""Formats in which nothing is computed."""
SMALLEST, LARGEST = 2.0**-126, 2.0**127
E4M3_MAX, E2M1_MAX, INT8_MAX = 448.0, 6.0, 127.0


@dataclass(frozen=True)
class Packed:
    """Rows of ``size`` numbers ``[..., size]``; each of ``parts`` has their leading axes: ``codes`` and, by format,
    ``scales`` and ``row_scales``, of which one stands for 16 rows in nvfp4_t16."""

    format: str
    size: int
    parts: dict[str, Tensor]

    def __getitem__(self, index: Any) -> Packed:
        """A part of the leading axes; a view where the index gives one."""
        return Packed(self.format, self.size, {name: part[index] for name, part in self.parts.items()})

    def __setitem__(self, index: Any, value: Packed) -> None:
        for name, part in self.parts.items():
            part[index] = value.parts[name]

    def poison(self, index: Any = ...) -> None:
        """Codes and scales that give NaN; integers without one beside scales that do."""
        for part in self.parts.values():
            part[index] = torch.nan if part.is_floating_point() else torch.iinfo(part.dtype).max

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def bytes_per_element(self) -> float:
        return self.nbytes / (self.parts["codes"][..., :1].numel() * self.size)


def empty(shape: tuple[int, ...], format: str, device: torch.device | str = "cpu") -> Packed:
    """Memory for numbers ``shape [..., N]``, poisoned. Raises ``ValueError`` on an unknown format."""
    found, (*rows, size) = format_of(format), shape
    parts = {"codes": torch.empty(shape, dtype=DTYPES.get(format, torch.uint8), device=device)}
    if format == "int8":
        parts["codes"] = torch.empty(shape, dtype=torch.int8, device=device)
    if found.bits == 4:
        parts["codes"] = torch.empty(*rows, -(-size // 2), dtype=torch.uint8, device=device)
    if found.block_scale_bytes:
        dtype = torch.float32 if found.block_scale_bytes == 4 else torch.uint8
        parts["scales"] = torch.empty(*rows, -(-size // found.block), dtype=dtype, device=device)
    if found.row_scale_bytes:
        leading = (*rows[:-1], -(-rows[-1] // found.rows)) if found.rows > 1 else rows
        parts["row_scales"] = torch.empty(*leading, dtype=torch.float32, device=device)
    packed = Packed(format, size, parts)
    packed.poison()
    return packed


def pack(x: Tensor, format: str, words: Tensor | None = None) -> Packed:
    """Numbers ``x [..., N]`` float32 in ``format``; with ``words``, int64 in [0, 2^32) of the shape of x, codes are
    rounded stochastically. Raises ``ValueError`` on an unknown format, another dtype, or one axis for a format that
    has scales of several rows."""
    if x.dtype != torch.float32:
        raise ValueError(f"x has dtype {x.dtype}; accepted: torch.float32")
    found, size = format_of(format), x.shape[-1]
    if found.rows > 1 and x.dim() < 2:
        raise ValueError(f"x has shape {list(x.shape)}; accepted for {format}: [..., P, N]")
    if format in DTYPES:
        codes = nearest_round(x, format) if words is None else round_with(x, format, words)
        return Packed(format, size, {"codes": codes})
    x = x.clamp(-LARGEST, LARGEST)
    amax = _blocks(x, found.block).abs().amax(-1)
    parts = {}
    if found.row_scale_bytes:
        rows = _blocks(amax.amax(-1), found.rows).amax(-1) if found.rows > 1 else amax.amax(-1)
        rows = (rows / (E2M1_MAX * E4M3_MAX)).clamp_min(SMALLEST)
        row = _of_rows(rows, found.rows, x.shape)
        block = _nearest_e4m3(amax / E2M1_MAX / row)
        scale = _e4m3(block) * row
        parts = {"scales": block, "row_scales": rows}
    elif format == "mxfp4":
        parts["scales"] = _power_of_two(amax)
        scale = _e8m0(parts["scales"])
    else:
        scale = (amax / (INT8_MAX if format == "int8" else E4M3_MAX)).clamp_min(SMALLEST)
        parts["scales"] = scale
    spread = _spread(scale, found.block, size)
    # A scale that was rounded to zero stands for a block of zeros.
    quotient = (x / spread).masked_fill(spread == 0, 0.0)
    return Packed(format, size, {"codes": _codes(quotient, format, words)} | parts)


def unpack(packed: Packed) -> Tensor:
    """The numbers, float32 ``[..., N]``."""
    codes, found = packed.parts["codes"], format_of(packed.format)
    if packed.format in DTYPES:
        return codes.float()
    if packed.format == "int8":
        numbers = codes.float()
    elif found.bits == 8:
        numbers = _e4m3(codes)
    else:
        numbers = _e2m1(torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)[..., : packed.size])
    scale = packed.parts["scales"]
    if found.row_scale_bytes:
        scale = _e4m3(scale) * _of_rows(packed.parts["row_scales"], found.rows, codes.shape)
    elif packed.format == "mxfp4":
        scale = _e8m0(scale)
    return numbers * _spread(scale, found.block, packed.size)


def _blocks(x: Tensor, block: int) -> Tensor:
    """``[..., blocks, block]``, the last one filled with zeros."""
    return F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))


def _of_rows(scales: Tensor, rows: int, shape: torch.Size) -> Tensor:
    """For each row of ``shape [..., P, N]`` the scale of its ``rows`` rows, ``[..., P, 1]``."""
    return scales[..., None] if rows == 1 else _spread(scales, rows, shape[-2])[..., None]


def _spread(scale: Tensor, block: int, size: int) -> Tensor:
    """A scale for each element."""
    return scale[..., None].expand(*scale.shape, block).flatten(-2)[..., :size]


def _codes(x: Tensor, format: str, words: Tensor | None) -> Tensor:
    """Codes of ``x``, numbers over their scale."""
    if format == "int8":
        return _int8(x, words)
    if format_of(format).bits == 8:
        return _nearest_e4m3(x) if words is None else _signed(x, magnitude_codes(x, E4M3, words), 0x80)
    codes = _nearest_e2m1(x) if words is None else _signed(x, magnitude_codes(x, E2M1, words), 0x8)
    pairs = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def _signed(x: Tensor, magnitude: Tensor, sign: int) -> Tensor:
    return (magnitude + x.signbit() * sign).to(torch.uint8)


def _int8(x: Tensor, words: Tensor | None) -> Tensor:
    if words is None:
        rounded = x.round()
    else:
        whole = x.abs().floor()
        up = (((x.abs() - whole) * 2.0**32).nan_to_num().long() + words) >> 32
        rounded = (whole + up) * x.sign()
    return rounded.clamp(-INT8_MAX, INT8_MAX).nan_to_num().to(torch.int8)


def _nearest_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _nearest_e2m1(x: Tensor) -> Tensor:
    """Steps of a half up to 2, of one up to 4, of two up to 6; even codes are even multiples of their step."""
    m = x.abs().clamp_max(E2M1_MAX).nan_to_num()
    code = torch.where(m < 2, (2 * m).round(), torch.where(m < 4, m.round() + 2, (m / 2).round() + 4))
    return _signed(x, code, 0x8)


def _e2m1(codes: Tensor) -> Tensor:
    """0, 1/2, then (1 + mantissa / 2) 2^(exponent - 1) of one mantissa bit and two exponent bits."""
    bits = codes.int()
    exponent, mantissa = bits >> 1 & 3, bits & 1
    normal = (((exponent + 126) << 23) | mantissa << 22).view(torch.float32)
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, normal)
    return torch.where(bits >= 8, -magnitude, magnitude)


def _power_of_two(amax: Tensor) -> Tensor:
    """E8M0 of 2^(floor(log2 amax) - 2), at least 2^-126; 255 is NaN."""
    exponent = amax.contiguous().view(torch.int32) >> 23
    return (exponent - 2).clamp_min(1).masked_fill(amax.isnan(), 255).to(torch.uint8)


def _e8m0(codes: Tensor) -> Tensor:
    scale = (codes.int() << 23).view(torch.float32)
    return scale.masked_fill(codes == 255, torch.nan)
