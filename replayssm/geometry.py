"""Shape of one state-space layer. Standard library only, so that a bad shape is refused before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = ("mamba2", "gdn", "kda")
MAX_INTERVAL_LENGTH = 64
"""Longest interval: kernels keep a row's whole ring in fast memory, and beyond it ring traffic only grows."""


@dataclass(frozen=True)
class Geometry:
    """One state-space layer's shape; the state of a row is ``[heads, head_dim, state_dim]``.

    | field | Mamba-2 | GDN, KDA |
    | --- | --- | --- |
    | ``heads`` | heads H | value heads HV |
    | ``groups`` | groups G that share B and C | key heads HK that share q and k |
    | ``head_dim`` | P, rows of the state | V |
    | ``state_dim`` | N, contracted with C | K, contracted with q |

    Head ``h`` uses group ``h // (heads // groups)``. Raises ``ValueError``, one line, on an impossible shape.
    """

    family: str
    heads: int
    groups: int
    head_dim: int
    state_dim: int

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r} is unknown; accepted: {', '.join(FAMILIES)}")
        for field in ("heads", "groups", "head_dim", "state_dim"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field}={value!r} is impossible; accepted: an integer of at least 1")
        if self.heads % self.groups:
            raise ValueError(f"heads={self.heads} is not divisible by groups={self.groups}")
        if self.family == "kda" and self.heads != self.groups:
            raise ValueError(f"groups={self.groups} differs from heads={self.heads}; KDA has one key head a value head")

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.groups

    @property
    def state_elements(self) -> int:
        """Elements of the state of one row of one layer."""
        return self.heads * self.head_dim * self.state_dim
