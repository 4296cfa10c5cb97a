"""`Precision`: in which formats an arm keeps the copies of the state and the ring, and from what it folds.

Standard library only, so that an impossible combination is refused before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.geometry import Geometry
from replayssm.layout import FORMATS, PLAIN

__all__ = ["FOLDS", "RING_FORMATS", "Precision"]

RING_FORMATS = ("bf16", "fp8_e4m3")
FOLDS = ("d", "raw")


@dataclass(frozen=True)
class Precision:
    """``update``: format of the copy that is fed back. ``read``: that of a copy for outputs alone, which every flush
    makes anew from the folded state, rounded to nearest; None: the update copy is read, one copy for both.
    ``stochastic``: whether the update copy is rounded stochastically. ``ring``: format of x and B, or k, v and d, in
    the ring; None: inputs as they arrive and d in float32. ``fold``: of GDN and KDA, from the buffered ``d`` or from
    ``raw`` inputs. Raises ``ValueError``, one line, on what cannot be.
    """

    update: str = "fp32"
    read: str | None = None
    stochastic: bool = False
    ring: str | None = None
    fold: str = "d"

    def __post_init__(self) -> None:
        narrow = ", ".join(name for name in FORMATS if name != "fp32")
        if self.update not in FORMATS:
            raise ValueError(f"update={self.update!r} is unknown; accepted: {', '.join(FORMATS)}")
        if self.read is not None and (self.read not in FORMATS or self.read == "fp32"):
            raise ValueError(f"read={self.read!r} is no format of a read copy; accepted: none, {narrow}")
        if self.read is not None and FORMATS[self.read].bits > FORMATS[self.update].bits:
            raise ValueError(f"read={self.read} has more bits than update={self.update}; accepted: no more, or none")
        if self.read == self.update and not self.stochastic:
            raise ValueError(f"read={self.read} is the update copy over again; accepted: none, one copy for both")
        if self.stochastic not in (True, False):
            raise ValueError(f"stochastic={self.stochastic!r} is impossible; accepted: true, false")
        if self.stochastic and self.update == "fp32":
            raise ValueError(f"stochastic=true rounds nothing with update=fp32; accepted: false, or update of {narrow}")
        if self.ring is not None and self.ring not in RING_FORMATS:
            raise ValueError(f"ring={self.ring!r} is unknown; accepted: none, {', '.join(RING_FORMATS)}")
        if self.fold not in FOLDS:
            raise ValueError(f"fold={self.fold!r} is unknown; accepted: {', '.join(FOLDS)}")

    @property
    def plain(self) -> bool:
        """Whether it is a state of one format without scales, rounded to nearest: what every back end has."""
        return self == Precision(update=self.update) and self.update in PLAIN

    def refuse_for(self, geometry: Geometry) -> None:
        """Raises ``ValueError`` where a layer of that geometry has no such arm."""
        if self.fold == "raw" and geometry.family == "mamba2":
            raise ValueError("fold=raw is for GDN and KDA; a Mamba-2 ring holds raw inputs already; accepted: d")
