"""Launch configurations: how a step is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.geometry import Geometry


@dataclass(frozen=True)
class Launch:
    """One program takes ``rows * tiles`` rows of one head, ``rows`` at a time, with ``warps`` warps.

    ``lanes`` threads share a row; the fewer, the fewer exchanges a product needs and the shorter the runs of memory a
    warp reads. ``stages`` is how many tiles are on their way at once; a program of one tile asks for it before anything
    else. ``eager`` reads whole rings without waiting for the cursor: less latency, more bytes. KDA ignores it, since
    its vector decays must be summed in time order. ``registers`` caps those of a thread. ``at_once``: the ring's tokens
    are taken all at once, which costs registers and as much time for one token as for all, and not one by one.
    ``ahead``: what the ring's keys give is formed once a head by a launch before this one, and not by every program of
    a head; its values are then taken at once. Raises ``ValueError`` on numbers that Triton cannot take.
    """

    rows: int
    tiles: int
    warps: int
    lanes: int = 32
    stages: int = 3
    eager: bool = False
    registers: int | None = None
    at_once: bool = False
    ahead: bool = False

    def __post_init__(self) -> None:
        for field in ("rows", "warps", "lanes"):
            value = getattr(self, field)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{field}={value!r} is impossible; accepted: a power of two")
        if self.lanes > 32:
            raise ValueError(f"lanes={self.lanes} is impossible; accepted: at most 32, the threads of a warp")
        for field in ("tiles", "stages"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r} is impossible; accepted: at least 1")


def stored_launch(geometry: Geometry, batch_size: int, state_bytes: int) -> Launch:
    """Default for a stored step, ``state_bytes`` an element: what was fastest on an NVIDIA H200 at batch 1 to 256."""
    heads = batch_size * geometry.heads
    if state_bytes >= 4:
        if heads < 256:
            return Launch(rows=4, tiles=1, warps=1)
        return Launch(rows=8, tiles=1, warps=1, lanes=16 if heads >= 2048 else 32)
    if geometry.family == "mamba2" and heads >= 8192:
        return Launch(rows=16, tiles=-(-geometry.head_dim // 16), warps=1, lanes=16, stages=4)
    return Launch(rows=8, tiles=1, warps=1, lanes=16)


def replay_launch(geometry: Geometry, batch_size: int, state_bytes: int) -> Launch:
    """Default for a replay step, ``state_bytes`` an element: what was fastest on an NVIDIA H200 with intervals of 16,
    the worse of aligned and staggered rows counting.

    With many heads one or two warps walk a whole head, so that they take the ring once; with few, a head is cut as
    finely as pays, and with very few all tokens of the ring are taken at once. Other interval lengths are taken to like
    the same, and 16-bit states where few heads were tried with 32 bits alone.
    """
    heads, tiles, wide = batch_size * geometry.heads, -(-geometry.head_dim // 16), state_bytes >= 4
    half = -(-tiles // 2)
    if geometry.family == "kda":
        if heads < 64:
            return Launch(rows=16, tiles=1, warps=2, at_once=True)
        if heads < 256:
            return Launch(rows=16, tiles=1, warps=1, lanes=16, registers=168)
        if heads < 1024:
            return Launch(rows=16, tiles=half, warps=1, lanes=8)
        return Launch(rows=16, tiles=tiles, warps=2, lanes=8, registers=168)
    if geometry.family == "gdn":
        if heads < 128:
            return Launch(rows=16, tiles=1, warps=2, lanes=8, at_once=True)
        if heads < 256:
            return Launch(rows=64, tiles=1, warps=4, lanes=8, at_once=True)
        if heads < 512:
            return Launch(rows=16, tiles=2, warps=1, lanes=8, registers=168)
        if heads < 1024:
            return Launch(rows=16, tiles=half, warps=2, lanes=8, registers=128)
        if heads < 8192:
            return Launch(rows=16, tiles=half, warps=1, lanes=8, registers=None if wide else 168)
        return Launch(rows=16, tiles=tiles, warps=1, lanes=8, stages=3 if wide else 4, registers=None if wide else 168)
    if heads <= 512:
        return Launch(rows=16, tiles=1, warps=2, lanes=8, registers=128, at_once=True)
    if heads < 1024:
        return Launch(rows=16, tiles=tiles, warps=2, lanes=8)
    if heads < 8192:
        if wide:
            return Launch(rows=16, tiles=tiles, warps=1, lanes=16, stages=4, registers=168)
        return Launch(rows=16, tiles=tiles, warps=1, lanes=8, registers=128)
    rows, lanes = (8, 16) if wide else (16, 8)
    whole = -(-geometry.head_dim // rows)
    return Launch(rows=rows, tiles=whole, warps=1, lanes=lanes, stages=4, registers=168, at_once=True)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << (value - 1).bit_length()


def ring(interval_length: int) -> int:
    """Tokens of a ring that a product takes: L up to a power of two, 16 at least, as tensor cores want."""
    return max(16, power_of_two(interval_length))


def _in_time_order(geometry: Geometry, layer: CacheLayer | None) -> bool:
    """Vector decays are summed, and a triangular system is solved, in the order of time."""
    return geometry.family == "kda" or (layer is not None and "v" in layer.ring)


@dataclass(frozen=True)
class Cut:
    """What a kernel is compiled for: a layer's sizes and a launch, in the kernels' own terms."""

    H: int
    SHARE: int
    P: int
    N: int
    PADDED: int
    """N up to a power of two, 16 at least, cut into CHUNKS of WIDTH."""
    WIDTH: int
    M: int
    TILES: int
    STAGES: int
    PARTS: int
    """Programs that share a head."""
    SPAN: int
    """ROWS of a part up to a power of two, a fold's 16 at least."""
    ROW: int
    """Stride of a state's rows."""
    L: int
    CAPACITY: int
    RING: int
    """Tokens that a product over the ring takes, L up to a power of two, 16 at least, as tensor cores want."""
    EAGER: bool
    WALK: bool
    """Take the ring token by token."""

    @classmethod
    def of(cls, geometry: Geometry, launch: Launch, state: Tensor, layer: CacheLayer | None = None) -> Cut:
        """``layer`` for a replay step; without one the ring's sizes mean nothing."""
        padded = max(16, power_of_two(geometry.state_dim))
        width = min(padded, launch.lanes * max(1, 16 // state.element_size()))
        rows = min(launch.rows, power_of_two(geometry.head_dim))
        tiles = min(launch.tiles, -(-geometry.head_dim // rows))
        L, capacity = (layer.interval_length, layer.capacity) if layer else (1, 1)
        return cls(
            H=geometry.heads,
            SHARE=geometry.heads_per_group,
            P=geometry.head_dim,
            N=geometry.state_dim,
            PADDED=padded,
            WIDTH=width,
            M=rows,
            TILES=tiles,
            STAGES=launch.stages,
            PARTS=-(-geometry.head_dim // (rows * tiles)),
            SPAN=max(16, power_of_two(rows * tiles)),
            ROW=state.stride(2),
            L=L,
            CAPACITY=capacity,
            RING=ring(L),
            EAGER=launch.eager and not _in_time_order(geometry, layer),
            WALK=not launch.at_once,
        )

    @property
    def CHUNKS(self) -> int:
        return self.PADDED // self.WIDTH

    @property
    def ROWS(self) -> int:
        """Rows of a part."""
        return self.M * self.TILES

    @property
    def WHOLE(self) -> bool:
        """No tile reaches beyond the state."""
        return self.P % self.ROWS == 0 and self.PADDED == self.N

    @property
    def FOLD(self) -> int:
        """Rows that a flush takes at a time; tensor cores want 16."""
        return 16

    @property
    def FOLDS(self) -> int:
        return -(-self.ROWS // self.FOLD)
