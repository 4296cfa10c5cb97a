"""Launch configurations: how a step is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.geometry import Geometry


@dataclass(frozen=True)
class Launch:
    """One program takes ``rows * tiles`` rows of one head, ``rows`` at a time, with ``warps`` warps, loading ``ahead``
    tiles in advance.

    ``lanes`` threads share a row; the fewer, the fewer exchanges a product needs and the shorter the runs of memory a
    warp reads. ``eager`` reads whole rings without waiting for the cursor: less latency, more bytes. KDA ignores it,
    since its vector decays must be summed in time order. ``registers`` caps those of a thread: folds want many, reads
    do not need them. Raises ``ValueError`` on numbers that Triton cannot take.
    """

    rows: int
    tiles: int
    warps: int
    lanes: int = 32
    ahead: int = 2
    eager: bool = False
    registers: int | None = None

    def __post_init__(self) -> None:
        for field in ("rows", "warps", "lanes"):
            value = getattr(self, field)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{field}={value!r} is impossible; accepted: a power of two")
        if self.lanes > 32:
            raise ValueError(f"lanes={self.lanes} is impossible; accepted: at most 32, the threads of a warp")
        for field in ("tiles", "ahead"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r} is impossible; accepted: at least 1")


LARGE, MEDIUM = 1024, 192
"""Heads in a batch from which one program a head fills the GPU; below MEDIUM a head is cut as finely as pays."""


def stored_launch(geometry: Geometry, batch_size: int, state_bytes: int) -> Launch:
    """Default for a stored step, ``state_bytes`` an element: what was fastest on an NVIDIA H200 at batch 1 to 256."""
    if state_bytes >= 4:
        return Launch(rows=8, tiles=1, warps=1, lanes=32)
    if geometry.head_dim % 64 == 0:
        return Launch(rows=64, tiles=1, warps=4, lanes=8)
    return Launch(rows=16, tiles=-(-geometry.head_dim // 16), warps=2, lanes=16)


def replay_launch(geometry: Geometry, batch_size: int, state_bytes: int, interval_length: int) -> Launch:
    """Default for a replay step, ``state_bytes`` an element: what was fastest on an NVIDIA H200 with intervals of 16.

    With many heads one warp walks a whole head, so that it computes the ring's products once. Other interval lengths
    are taken to like the same.
    """
    heads, tiles = batch_size * geometry.heads, -(-geometry.head_dim // 8)
    if heads >= LARGE:
        if geometry.family == "kda":
            return Launch(rows=8, tiles=tiles, warps=2, lanes=32, ahead=1, registers=168)
        if geometry.family == "gdn" and state_bytes >= 4:
            return Launch(rows=8, tiles=tiles, warps=1, lanes=32, ahead=1, registers=128)
        tight = geometry.family == "mamba2" and state_bytes < 4
        return Launch(rows=8, tiles=tiles, warps=1, lanes=16, ahead=1, registers=128 if tight else 168)
    if heads >= MEDIUM:
        if geometry.family == "mamba2":
            return Launch(rows=8, tiles=5, warps=1, lanes=32, ahead=1)
        return Launch(rows=16, tiles=4, warps=4, lanes=8, ahead=1, registers=128 if geometry.family == "gdn" else None)
    return Launch(rows=16, tiles=1, warps=4, lanes=8)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class Cut:
    """What a kernel is compiled for: a layer's sizes and a launch, in the kernels' own terms."""

    H: int
    SHARE: int
    P: int
    N: int
    PADDED: int
    WIDTH: int
    M: int
    TILES: int
    AHEAD: int
    PARTS: int

    @classmethod
    def of(cls, geometry: Geometry, launch: Launch, state_bytes: int) -> Cut:
        """``PADDED`` is N up to a power of two, cut into chunks of ``WIDTH``; ``PARTS`` programs share a head."""
        padded = power_of_two(geometry.state_dim)
        width = min(padded, launch.lanes * max(1, 16 // state_bytes))
        rows = min(launch.rows, power_of_two(geometry.head_dim))
        tiles = min(launch.tiles, -(-geometry.head_dim // rows))
        return cls(
            H=geometry.heads,
            SHARE=geometry.heads_per_group,
            P=geometry.head_dim,
            N=geometry.state_dim,
            PADDED=padded,
            WIDTH=width,
            M=rows,
            TILES=tiles,
            AHEAD=max(1, min(launch.ahead, tiles - 1)),
            PARTS=-(-geometry.head_dim // (rows * tiles)),
        )
