"""Launch configurations of a window: how a verify step, or one with snapshots, is cut into programs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from replayssm.arms import MAX_WINDOW as MAX_WINDOW
from replayssm.cache import CacheLayer
from replayssm.geometry import Geometry
from replayssm.kernels.triton.launch import Launch, power_of_two, ring


@dataclass(frozen=True)
class WindowLaunch:
    """One program takes ``rows * tiles`` rows of each of ``heads`` heads of a group, ``rows`` at a time.

    It has ``warps`` warps. Products that the heads of a group share are formed once a program. ``stages`` is how many
    tiles are on their way at once; a program of a single tile asks for it before anything else. ``registers`` caps
    those of a thread. ``eager`` reads whole rings without waiting for the cursor: less latency, more bytes; KDA ignores
    it, since its vector decays are summed in time order. ``chunks`` are the parts in which a tile is multiplied and
    written, of 16 columns at least: more of them take fewer registers. Raises ``ValueError`` on numbers that Triton
    cannot take.
    """

    rows: int
    tiles: int = 1
    heads: int = 1
    warps: int = 1
    stages: int = 3
    registers: int | None = None
    eager: bool = False
    chunks: int = 1

    def __post_init__(self) -> None:
        for field in ("rows", "warps", "chunks"):
            value = getattr(self, field)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{field}={value!r} is impossible; accepted: a power of two")
        for field in ("tiles", "heads", "stages"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r} is impossible; accepted: at least 1")


def verify_launch(geometry: Geometry, batch_size: int, window: int) -> WindowLaunch:
    """Default for a verify step, the fastest on an NVIDIA H200 at batches 1 and 256 of windows of 4: few heads are cut
    into tiles of a program each, of many a program walks one or two whole ones."""
    P, few = geometry.head_dim, batch_size * geometry.heads < 512
    tiles = -(-P // 16)
    if geometry.family == "kda":  # whose key side takes more warps than one to hold
        return WindowLaunch(rows=16, warps=4) if few else WindowLaunch(rows=16, tiles=tiles, warps=2)
    if few:
        return WindowLaunch(rows=16) if P % 64 else WindowLaunch(rows=64, warps=4)
    return WindowLaunch(rows=16, tiles=tiles, heads=2 if geometry.family == "mamba2" else 1)


def snapshots_launch(geometry: Geometry, batch_size: int, state_bytes: int) -> Launch:
    """Default for a step with snapshots, ``state_bytes`` an element."""
    if batch_size * geometry.heads < 256:
        return Launch(rows=4, tiles=1, warps=1)
    return Launch(rows=8 if state_bytes >= 4 else 16, tiles=1, warps=1, lanes=16)


def columns(family: str, window: int) -> int:
    """Tokens that a product takes: a window up to a power of two; at least 8 columns for tensor cores, of which GDN and
    KDA take two a token."""
    return max(8 if family == "mamba2" else 4, power_of_two(window))


@dataclass(frozen=True)
class WindowCut:
    """What a kernel is compiled for: a layer's sizes and a launch, in the kernels' own terms."""

    H: int
    SHARE: int
    P: int
    N: int
    PADDED: int
    """N up to a power of two, 16 at least."""
    CHUNKS: int
    """Parts of a tile, ``[M,WIDTH]``."""
    M: int
    TILES: int
    HEADS: int
    PARTS: int
    """Programs that share a head."""
    STAGES: int
    ROW: int
    """Stride of a state's rows."""
    T: int
    COLUMNS: int
    """Of `columns`."""
    L: int
    CAPACITY: int
    RING: int
    """Of `ring`, for L or, EAGER, for all entries."""
    EAGER: bool

    @classmethod
    def of(cls, geometry: Geometry, launch: WindowLaunch, layer: CacheLayer) -> WindowCut:
        """``layer`` with a window."""
        rows = max(16, min(launch.rows, power_of_two(geometry.head_dim)))  # as tensor cores want
        tiles = min(launch.tiles, -(-geometry.head_dim // rows))
        window, eager = layer.window or 1, launch.eager and geometry.family != "kda"
        padded = max(16, power_of_two(geometry.state_dim))
        return cls(
            H=geometry.heads,
            SHARE=geometry.heads_per_group,
            P=geometry.head_dim,
            N=geometry.state_dim,
            PADDED=padded,
            CHUNKS=min(launch.chunks, padded // 16),
            M=rows,
            TILES=tiles,
            HEADS=math.gcd(launch.heads, geometry.heads_per_group),
            PARTS=-(-geometry.head_dim // (rows * tiles)),
            STAGES=launch.stages,
            ROW=layer.state.stride(2),
            T=window,
            COLUMNS=columns(geometry.family, window),
            L=layer.interval_length,
            CAPACITY=layer.capacity,
            RING=ring(layer.capacity if eager else layer.interval_length),
            EAGER=eager,
        )

    @property
    def WIDTH(self) -> int:
        return self.PADDED // self.CHUNKS

    @property
    def PIECES(self) -> int:
        """Tiles of a program."""
        return self.HEADS * self.TILES

    @property
    def PROGRAMS(self) -> int:
        """Programs a row."""
        return self.PARTS * (self.H // self.HEADS)

    @property
    def WHOLE(self) -> bool:
        """No tile reaches beyond the state."""
        return self.P % (self.M * self.TILES) == 0 and self.PADDED == self.N
