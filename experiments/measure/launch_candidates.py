"""Which launches `experiments.tune` tries: `candidates` of an operation, a layer and a batch.

They are of one of two classes: few heads in the batch, where a head is cut finely, and many, where one program walks
much of a head. Those of a stored and a replay step are as many, `BUDGET`; of a window they are at most `WINDOW_BUDGET`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from replayssm.geometry import Geometry
from replayssm.kernels.triton.launch import Launch, power_of_two
from replayssm.kernels.triton.verify_launch import WindowLaunch

AnyLaunch = Launch | WindowLaunch
BUDGET, WINDOW_BUDGET = 32, 24
FEW_HEADS = 1024
"""Fewer heads in the batch are cut finely."""


def candidates(operation: str, geometry: Geometry, batch_size: int, state_bytes: int) -> list[AnyLaunch]:
    """The launches to try for a step; those that come to the same for this layer once."""
    few = batch_size * geometry.heads < FEW_HEADS
    many_or_few = {
        "stored": (_stored_many, _stored_few),
        "replay": (_replay_many, _replay_few),
        "snapshots": (_snapshots_many, _snapshots_few),
        "verify": (_verify_many, _verify_few),
    }
    if geometry.family == "kda":  # whose key side takes more warps than one to hold
        many_or_few["verify"] = (_verify_many_kda, _verify_few_kda)
    tried = many_or_few[operation][few](geometry)
    return list(dict.fromkeys(effective(launch, geometry, state_bytes) for launch in tried))


def effective(launch: AnyLaunch, geometry: Geometry, state_bytes: int) -> AnyLaunch:
    """What a launch comes to for a layer: a head is not cut coarser than it is, a row has no more lanes than loads of
    16 bytes, and KDA has no eager reads; of a verify step, tiles are of 16 rows and chunks of 16 columns at least.
    """
    least = 16 if isinstance(launch, WindowLaunch) else 1
    rows = max(least, min(launch.rows, power_of_two(geometry.head_dim)))
    tiles = min(launch.tiles, -(-geometry.head_dim // rows))
    padded, eager = max(16, power_of_two(geometry.state_dim)), launch.eager and geometry.family != "kda"
    if isinstance(launch, WindowLaunch):
        heads, chunks = math.gcd(launch.heads, geometry.heads_per_group), min(launch.chunks, padded // 16)
        return dataclasses.replace(launch, rows=rows, tiles=tiles, eager=eager, heads=heads, chunks=chunks)
    lanes = min(launch.lanes, max(1, padded * state_bytes // 16))
    return dataclasses.replace(launch, rows=rows, tiles=tiles, eager=eager, lanes=lanes)


def in_words(launch: AnyLaunch) -> str:
    """``rows=16 tiles=5 warps=2 lanes=8 stages=3 registers=128``."""
    told = {name: value for name, value in dataclasses.asdict(launch).items() if value not in (None, False)}
    return " ".join(name if value is True else f"{name}={value}" for name, value in told.items())


def _stored_few(geometry: Geometry) -> list[AnyLaunch]:
    one_tile = itertools.product((2, 4, 8, 16), (1, 2), (8, 16, 32))
    return [
        *(Launch(rows, 1, warps, lanes, stages=1) for rows, warps, lanes in one_tile),
        *(Launch(32, 1, warps, lanes, stages=1) for warps, lanes in itertools.product((2, 4), (8, 16))),
        *(Launch(rows, 2, 1, lanes, stages=2) for rows, lanes in itertools.product((4, 8), (16, 32))),
    ]


def _stored_many(geometry: Geometry) -> list[AnyLaunch]:
    one_tile, whole = itertools.product((4, 8, 16), (1, 2), (16, 32)), itertools.product((8, 16), (1, 2), (8, 16))
    return [
        *(Launch(rows, 1, warps, lanes, stages=1) for rows, warps, lanes in one_tile),
        *(Launch(32, 1, 2, lanes, stages=1) for lanes in (8, 16)),
        *(Launch(64, 1, 4, lanes, stages=1) for lanes in (8, 16)),
        *(
            Launch(rows, _tiles(geometry, rows), warps, lanes, stages)
            for (rows, warps, lanes), stages in itertools.product(whole, (3, 4))
        ),
    ]


def _replay_few(geometry: Geometry) -> list[AnyLaunch]:
    whole = _tiles(geometry, 16)
    one_tile = itertools.product(((16, 2), (16, 4), (32, 4)), (8, 16), (128 if geometry.family == "mamba2" else None,))
    wide = ((64, 4, None), (64, 8, None), (128, 8, 128))
    more = {"registers": 96} if geometry.family == "kda" else {"eager": True, "registers": 128}
    walked = ((8, 1, 8, 128), (8, 1, 16, 128), (16, 1, 8, 128), (16, 1, 8, 168), (16, 1, 16, 128), (16, 1, 16, 168))
    walks = itertools.product((-(-whole // 4), -(-whole // 2), whole), ((1, 168), (2, 128)))
    return [
        *(Launch(rows, 1, warps, lanes, 1, registers=cap, at_once=True) for (rows, warps), lanes, cap in one_tile),
        *(Launch(rows, 1, warps, 8, 1, registers=cap, at_once=True) for rows, warps, cap in wide),
        *(Launch(rows, 1, warps, 16, 1, at_once=True, **more) for rows, warps in ((8, 1), (16, 4))),
        *(Launch(rows, 1, warps, lanes, 1, registers=cap) for rows, warps, lanes, cap in (*walked, (16, 2, 8, 128))),
        *(Launch(16, tiles, warps, 8, 3, registers=cap) for tiles, (warps, cap) in walks),
        *(Launch(16, tiles, warps, 8, 3) for tiles, warps in ((whole, 4), (-(-whole // 2), 1))),
        *_ahead(((16, 1, 1), (16, 1, 2), (32, 1, 2), (32, 1, 4), (64, 1, 4), (16, 2, 1))),
    ]


def _ahead(shapes: tuple[tuple[int, int, int], ...]) -> list[AnyLaunch]:
    """In two launches, by rows, tiles and warps of the reads."""
    return [Launch(rows, tiles, warps, 8, 3 if tiles > 1 else 1, ahead=True) for rows, tiles, warps in shapes]


def _replay_many(geometry: Geometry) -> list[AnyLaunch]:
    whole = _tiles(geometry, 16)
    half, quarter = -(-whole // 2), -(-whole // 4)
    least = 2 if geometry.family == "kda" else 1  # vector decays do not fit into the registers of one warp
    shapes = itertools.product((whole, half), (least, 2 * least), (None, 168))
    capped = ((whole, least, 128), (whole, 2 * least, 128), (half, 2, 128), (quarter, 1, 168))
    long = itertools.product((16 if geometry.family == "mamba2" else 8,), (128, 168), (False, True))
    return [
        *(Launch(16, tiles, warps, 8, 3, registers=cap) for tiles, warps, cap in shapes),
        *(Launch(16, whole, warps, 16, 3, registers=168) for warps in (least, 2 * least)),
        *(Launch(16, tiles, warps, 8, 3, registers=cap) for tiles, warps, cap in capped),
        *(Launch(16, whole, 2 * least, 8, 3, registers=cap, at_once=True) for cap in (None, 128)),
        *(Launch(16, whole, least, lanes, 4, registers=cap, at_once=at_once) for lanes, cap, at_once in long),
        *(Launch(8, _tiles(geometry, 8), least, 16, 4, registers=168, at_once=at_once) for at_once in (False, True)),
        *(Launch(32, 1, 2, lanes, 1, at_once=True) for lanes in (8, 16)),
        Launch(8, 1, 1, 16, 1, registers=128),
        *_ahead(((16, 1, 1), (16, 1, 2), (32, 1, 2), (16, 2, 1))),
        *_ahead(((16, half, 1), (16, whole, 1), (16, whole, 2))),
    ]


def _snapshots_few(geometry: Geometry) -> list[AnyLaunch]:
    one_tile = itertools.product((4, 8, 16), (1, 2), (16, 32))
    return [
        *(Launch(rows, 1, warps, lanes, stages=1) for rows, warps, lanes in one_tile),
        *(Launch(rows, 1, 1, 8, stages=1) for rows in (8, 16)),
        *(Launch(2, 1, 1, lanes, stages=1) for lanes in (16, 32)),
    ]


def _snapshots_many(geometry: Geometry) -> list[AnyLaunch]:
    whole = itertools.product((8, 16), (2, 3))
    return [
        *_snapshots_few(geometry),
        *(Launch(rows, _tiles(geometry, rows), 1, 16, stages) for rows, stages in whole),
        *(Launch(32, 1, 2, lanes, stages=1) for lanes in (8, 16)),
    ]


def _verify_few(geometry: Geometry) -> list[AnyLaunch]:
    whole = _tiles(geometry, 16)
    shapes = itertools.product(((16, 1), (16, 2), (32, 2), (64, 4), (128, 8)), (False, True))
    others = (
        *((64, 4, None, False, 2), (64, 4, 128, False, 4), (16, 1, None, False, 2), (16, 1, None, True, 4)),
        *((16, 2, None, True, 2), (32, 2, None, False, 4), (32, 2, None, True, 2), (64, 4, None, True, 2)),
        *((16, 1, 128, True, 1), (16, 2, 128, True, 1), (32, 4, None, False, 1)),
    )
    return [
        *(WindowLaunch(rows, 1, 1, warps, eager=eager) for (rows, warps), eager in shapes),
        *(WindowLaunch(rows, 1, 1, w, 3, cap, eager, chunks) for rows, w, cap, eager, chunks in others),
        WindowLaunch(16, 2, 1, 1),
        *(WindowLaunch(16, tiles, 1, 1, 3, 168, chunks=4) for tiles in (-(-whole // 2), whole)),
    ]


def _verify_many(geometry: Geometry) -> list[AnyLaunch]:
    whole, heads = _tiles(geometry, 16), (1, 2)
    capped = itertools.product(heads, (2, 3, 4), (2, 4))
    others = itertools.product(heads, ((None, 4), (128, 4), (200, 4), (128, 8)))
    return [
        *(WindowLaunch(16, whole, of_group) for of_group in heads),
        *(WindowLaunch(16, whole, of_group, 1, stages, 168, chunks=chunks) for of_group, stages, chunks in capped),
        *(WindowLaunch(16, whole, of_group, 1, 3, cap, chunks=chunks) for of_group, (cap, chunks) in others),
        WindowLaunch(32, _tiles(geometry, 32), 1, 2, 3, 168, chunks=4),
        WindowLaunch(64, _tiles(geometry, 64), 1, 4, 3, 128, chunks=4),
    ]


def _verify_few_kda(geometry: Geometry) -> list[AnyLaunch]:
    whole = _tiles(geometry, 16)
    shapes = itertools.product(((16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8)), (1, 2))
    capped = ((16, 4, 1), (32, 4, 2), (64, 8, 2))
    return [
        *(WindowLaunch(rows, 1, 1, warps, chunks=chunks) for (rows, warps), chunks in shapes),
        *(WindowLaunch(rows, 1, 1, warps, chunks=4) for rows, warps in ((16, 2), (32, 4), (64, 4), (128, 8))),
        *(WindowLaunch(rows, 1, 1, warps, 3, 168, chunks=chunks) for rows, warps, chunks in capped),
        WindowLaunch(16, 2, 1, 4),
        *(WindowLaunch(16, tiles, 1, 2, chunks=2) for tiles in (-(-whole // 2), whole)),
    ]


def _verify_many_kda(geometry: Geometry) -> list[AnyLaunch]:
    whole = _tiles(geometry, 16)
    walked = itertools.product((2, 4), (1, 2, 4))
    larger = (
        *((32, 4, 3, 1), (32, 2, 3, 4), (32, 4, 3, 2), (64, 4, 3, 1), (64, 8, 3, 1), (64, 4, 2, 1), (64, 4, 3, 4)),
        *((64, 8, 3, 2), (128, 8, 3, 1), (128, 8, 3, 2)),
    )
    capped = ((2, 168, 2), (2, 168, 4), (4, 168, 2), (4, 128, 2))
    return [
        *(WindowLaunch(16, whole, 1, warps, chunks=chunks) for warps, chunks in walked),
        *(WindowLaunch(16, whole, 1, 2, stages, chunks=2) for stages in (2, 4)),
        *(WindowLaunch(16, whole, 1, warps, 3, cap, chunks=chunks) for warps, cap, chunks in capped),
        *(WindowLaunch(16, -(-whole // 2), 1, warps, chunks=2) for warps in (2, 4)),
        *(WindowLaunch(r, _tiles(geometry, r), 1, w, stages, chunks=chunks) for r, w, stages, chunks in larger),
    ]


def _tiles(geometry: Geometry, rows: int) -> int:
    """Tiles of a whole head."""
    return -(-geometry.head_dim // rows)
