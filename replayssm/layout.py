"""How many bytes the state and a ring token take in each number format. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.geometry import Geometry

__all__ = ["FORMATS", "PUBLISHED_RING", "Format", "Ring", "format_of"]


@dataclass(frozen=True)
class Format:
    """Storage of the numbers of a tensor's rows, a row being the contiguous, contracted axis (N, K).

    ``bits`` an element; ``block_scale_bytes`` for each ``block`` consecutive elements of a row, the last block may be
    short; ``row_scale_bytes`` for each ``rows`` consecutive rows, the last of them may be fewer. A row's codes fill
    whole bytes.
    """

    name: str
    bits: int
    block: int = 1
    block_scale_bytes: int = 0
    row_scale_bytes: int = 0
    rows: int = 1

    def row_bytes(self, elements: int) -> int:
        """Bytes of one row of ``elements`` numbers, its scales included."""
        return self.matrix_bytes(1, elements)

    def matrix_bytes(self, rows: int, elements: int) -> int:
        """Bytes of ``rows`` rows of ``elements`` numbers, their scales included."""
        scales = -(-elements // self.block) * self.block_scale_bytes
        return rows * (-(-elements * self.bits // 8) + scales) + -(-rows // self.rows) * self.row_scale_bytes

    def state_bytes(self, geometry: Geometry) -> int:
        """Bytes of the state ``[heads, head_dim, state_dim]`` of one row of one layer."""
        return geometry.heads * self.matrix_bytes(geometry.head_dim, geometry.state_dim)


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 32),
        Format("bf16", 16),
        Format("fp16", 16),
        # One float32 scale for 128 consecutive elements of a state row: a whole row at N or K = 128.
        Format("fp8_e4m3", 8, block=128, block_scale_bytes=4),
        Format("fp8_e4m3_b32", 8, block=32, block_scale_bytes=4),
        Format("int8", 8, block=128, block_scale_bytes=4),
        # Two codes a byte, one E4M3 scale for 16 elements, and a float32 scale a row (a value row, by one block owned).
        Format("nvfp4", 4, block=16, block_scale_bytes=1, row_scale_bytes=4),
        # As nvfp4, with a float32 scale for a tile of 16 rows.
        Format("nvfp4_t16", 4, block=16, block_scale_bytes=1, row_scale_bytes=4, rows=16),
        # As nvfp4, with a power of two (E8M0) for 32 elements and nothing else: OCP Microscaling Formats 1.0.
        Format("mxfp4", 4, block=32, block_scale_bytes=1),
    )
}
PLAIN = ("fp32", "bf16", "fp16")
IN_RING = (*PLAIN, "fp8_e4m3")
DECAYS = ("fp32", "bf16")


@dataclass(frozen=True)
class Ring:
    """What one ring token holds. Mamba-2: x, B in ``inputs``, dt in float32. GDN and KDA: k in ``inputs``, d in ``d``,
    g in float32, KDA's in ``decay``, with ``key_norm`` the float32 1/norm of k, with ``raw`` also v in ``inputs`` and
    beta in float32, from which flushes then fold instead of d. Scales of fp8_e4m3 are those of each vector; raises
    ``ValueError`` on another format."""

    inputs: str = "bf16"
    d: str = "fp32"
    key_norm: bool = True
    raw: bool = False
    decay: str = "fp32"

    def __post_init__(self) -> None:
        for field in ("inputs", "d"):
            if getattr(self, field) not in IN_RING:
                raise ValueError(f"{field}={getattr(self, field)!r} is no ring format; accepted: {', '.join(IN_RING)}")
        if self.decay not in DECAYS:
            raise ValueError(f"decay={self.decay!r} is no format of decays; accepted: {', '.join(DECAYS)}")

    def token_bytes(self, geometry: Geometry) -> tuple[int, int, int]:
        """Bytes of one token ``(appended, read for outputs, read to fold)``. Raises ``ValueError`` for another family
        than KDA with a ``decay`` that is not fp32.
        """
        g, inputs = geometry, FORMATS[self.inputs]
        if self.decay != "fp32" and g.family != "kda":
            raise ValueError(f"decay={self.decay} is for KDA; accepted for {g.family}: fp32")
        values, keys = g.heads * inputs.row_bytes(g.head_dim), g.groups * inputs.row_bytes(g.state_dim)
        if g.family == "mamba2":
            token = values + keys + 4 * g.heads
            return token, token, token
        key = keys + 4 * g.groups * self.key_norm
        decay = 4 * g.heads
        if g.family == "kda":
            decay = g.heads * FORMATS[self.decay].row_bytes(g.state_dim)
        corrected = g.heads * FORMATS[self.d].row_bytes(g.head_dim)
        raw = values + 4 * g.heads if self.raw else 0
        return key + decay + corrected + raw, key + decay + corrected, key + decay + (raw or corrected)


PUBLISHED_RING = Ring(d="bf16", key_norm=False)
"""The ring of the public kernels: d in the activation format and no stored key norm."""


def format_of(name: str | Format) -> Format:
    """The format of that name; a ``Format`` is taken as it is. Raises ``ValueError`` on an unknown name."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"format={name!r} is unknown; accepted: {', '.join(FORMATS)}")
    return FORMATS[name]
