"""Search the launches of our Triton kernels on a device: which are tried, whether they are right, how long they take.

`candidates` are at most `BUDGET` launches, the same for a stored and a replay step, of one of two classes: few heads in
the batch, where a head is cut finely, and many, where one program walks much of a head. What `choose` takes at present
is tried with them. Each is held against the float64 recurrence by the gates of the experiment, over one cycle of calls
and one of its graph. `SIEVE_ROUNDS` rounds leave the `FINALISTS` fastest, which are checked and timed with aligned and,
for replay, with staggered rows. All candidates take their turns on the same cold copies, each with a graph of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from statistics import median
from typing import Any

import torch

from experiments.case import Case, cores
from experiments.measure import devices, gates, provenance
from experiments.measure.layers import Layers, ReplayLayers, StoredLayers, forget
from experiments.measure.runner import FALLBACK_CACHE_BYTES, copies_of
from experiments.measure.timing import interleave, warm_up
from replayssm.formats import DTYPES
from replayssm.geometry import Geometry
from replayssm.kernels.triton.launch import Launch, power_of_two
from replayssm.kernels.triton.launch_table import Choice, Entry, choose

BUDGET = 32
FEW_HEADS = 1024
"""Fewer heads in the batch are cut finely."""
SIEVE_ROUNDS, FINALISTS = 3, 8
CHECKED_COPIES = 2
MOST_COMPILERS = 8
"""Processes that compile at the same time; each holds a context on the GPU."""
_compiled: set[tuple[Any, ...]] = set()
"""What this process has had compiled; a kernel does not depend on the batch."""
Say = Callable[[str], object]


def candidates(operation: str, geometry: Geometry, batch_size: int, state_bytes: int) -> list[Launch]:
    """The launches to try for a step; those that come to the same for this layer once."""
    few = batch_size * geometry.heads < FEW_HEADS
    tried = {"stored": (_stored_many, _stored_few), "replay": (_replay_many, _replay_few)}[operation][few](geometry)
    assert len(tried) == BUDGET
    return list(dict.fromkeys(effective(launch, geometry, state_bytes) for launch in tried))


def effective(launch: Launch, geometry: Geometry, state_bytes: int) -> Launch:
    """What a launch comes to for a layer: a head is not cut coarser than it is, a row has no more lanes than loads of
    16 bytes, and KDA has no eager reads.
    """
    rows = min(launch.rows, power_of_two(geometry.head_dim))
    return dataclasses.replace(
        launch,
        rows=rows,
        tiles=min(launch.tiles, -(-geometry.head_dim // rows)),
        lanes=min(launch.lanes, max(1, max(16, power_of_two(geometry.state_dim)) * state_bytes // 16)),
        eager=launch.eager and geometry.family != "kda",
    )


def _stored_few(geometry: Geometry) -> list[Launch]:
    one_tile = itertools.product((2, 4, 8, 16), (1, 2), (8, 16, 32))
    return [
        *(Launch(rows, 1, warps, lanes, stages=1) for rows, warps, lanes in one_tile),
        *(Launch(32, 1, warps, lanes, stages=1) for warps, lanes in itertools.product((2, 4), (8, 16))),
        *(Launch(rows, 2, 1, lanes, stages=2) for rows, lanes in itertools.product((4, 8), (16, 32))),
    ]


def _stored_many(geometry: Geometry) -> list[Launch]:
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


def _replay_few(geometry: Geometry) -> list[Launch]:
    whole = _tiles(geometry, 16)
    other = {"registers": 168} if geometry.family == "kda" else {"eager": True}
    shapes = itertools.product(((8, 1), (16, 1), (16, 2), (32, 2)), (8, 32), ({}, other))
    walks = itertools.product((-(-whole // 4), -(-whole // 2), whole), (1, 2), (None, 168))
    return [
        *(Launch(rows, 1, warps, lanes, stages=1, **more) for (rows, warps), lanes, more in shapes),
        *(Launch(16, tiles, warps, 8, 3 if tiles > 1 else 1, registers=cap) for tiles, warps, cap in walks),
        *(Launch(16, whole, 4, 8, 3, registers=cap) for cap in (None, 128)),
        *(Launch(32, -(-whole // 2), 2, 8, 3, registers=cap) for cap in (None, 128)),
    ]


def _replay_many(geometry: Geometry) -> list[Launch]:
    whole = _tiles(geometry, 16)
    least = 2 if geometry.family == "kda" else 1  # vector decays do not fit into the registers of one warp
    shapes = itertools.product((whole, -(-whole // 2)), (least, 2 * least), (8, 16), (None, 168))
    long = itertools.product((8, 16), (128, 168), (False, True))
    return [
        *(Launch(16, tiles, warps, lanes, 3, registers=cap) for tiles, warps, lanes, cap in shapes),
        *(Launch(16, whole, warps, 8, 3, registers=128) for warps in (least, 2 * least)),
        *(Launch(16, whole, 2 * least, 8, 3, registers=cap, at_once=True) for cap in (None, 128)),
        *(Launch(16, whole, least, lanes, 4, registers=cap, at_once=at_once) for lanes, cap, at_once in long),
        *(Launch(8, _tiles(geometry, 8), least, 16, 4, registers=168, at_once=at_once) for at_once in (False, True)),
        *(Launch(32, 1, 2, lanes, stages=1) for lanes in (8, 16)),
    ]


def _tiles(geometry: Geometry, rows: int) -> int:
    """Tiles of a whole head."""
    return -(-geometry.head_dim // rows)


class Step:
    """A kernel's step whose launch can be changed, so that candidates share the tensors."""

    def __init__(self, case: Case, operation: str) -> None:
        from replayssm.kernels.triton.families import KERNELS

        kernels = KERNELS[case.geometry.family]
        self.step = kernels.stored_step if operation == "stored" else kernels.replay_step
        self.operation = operation
        self.launch: Launch | None = None

    def __call__(self, *arguments: Any) -> None:
        self.step(*arguments, launch=self.launch)

    def layers(self, case: Case, copies: int) -> Layers:
        from replayssm.kernels.triton.commit import commit

        if self.operation == "stored":
            return StoredLayers(case, copies, self)
        return ReplayLayers(case, copies, self, commit)


def present(case: Case, operation: str) -> Choice:
    """What a step of the case takes at present: of the table, or the heuristic."""
    state_bytes, device = DTYPES[case.precision.state].itemsize, torch.device(devices.of(case).tensors)
    length = case.interval_length if operation == "replay" else None
    return choose(case.geometry, case.batch_size, state_bytes, length, device)


def search(case: Case, operation: str, say: Say = print) -> tuple[Entry, dict[Launch, tuple[float, ...]]] | None:
    """The fastest launch, as a row of the table, and microseconds of a layer step of all finalists, aligned and, for
    replay, staggered; the worse counts. None if no candidate is right; ``say`` gets a line on each that is not.
    """
    state_bytes = DTYPES[case.precision.state].itemsize
    now = effective(present(case, operation).launch, case.geometry, state_bytes)
    tried = list(dict.fromkeys([now, *candidates(operation, case.geometry, case.batch_size, state_bytes)]))
    compile_ahead(case, operation, tried)
    aligned = dataclasses.replace(case, phase="aligned")
    sieve = measure(aligned, operation, tried, SIEVE_ROUNDS, say)
    finalists = sorted(sieve, key=lambda launch: sieve[launch])[:FINALISTS]
    finalists += [now] if now in sieve and now not in finalists else []
    phases = ("aligned", "staggered") if operation == "replay" else ("aligned",)
    found = [
        measure(dataclasses.replace(case, phase=phase), operation, finalists, case.timing.rounds, say)
        for phase in phases
    ]
    both = {launch: tuple(us[launch] for us in found) for launch in finalists if all(launch in us for us in found)}
    if not both:
        return None
    best = min(both, key=lambda launch: max(both[launch]))
    code = provenance.code()
    entry = Entry(
        operation=operation,
        geometry=case.geometry,
        state=case.precision.state,
        interval_length=case.interval_length if operation == "replay" else None,
        batch_size=case.batch_size,
        launch=best,
        aligned_us=round(both[best][0], 2),
        staggered_us=round(both[best][1], 2) if operation == "replay" else None,
        rounds=case.timing.rounds,
        source=(code["git_sha"] or "unknown")[:7] + ("+" if code["dirty"] else ""),
    )
    return entry, both


def measure(case: Case, operation: str, launches: Sequence[Launch], rounds: int, say: Say) -> dict[Launch, float]:
    """Median microseconds of a layer step with each launch that is right; ``say`` gets a line on the others."""
    device = devices.of(case)
    forget()
    device.begin(case)
    check, right = gates.Check(case, CHECKED_COPIES, "before"), []
    for launch in launches:
        fault = wrong(check, operation, launch)
        if fault:
            say(f"  {operation} {in_words(launch)}, {case.phase}: {fault}")
        else:
            right.append(launch)
    copies = copies_of(case, device.describe().get("last_level_cache_bytes") or FALLBACK_CACHE_BYTES)
    step = Step(case, operation)
    layers = step.layers(case, copies) if right else None
    participants = {}
    for launch in right:
        step.launch = launch
        layers.cycle()
        graph = device.graph(layers)
        graph()  # captured with this launch
        participants[in_words(launch)] = _repeated(graph, case.timing.cycles_per_sample)
    if not participants:
        return {}
    warm_up(participants, case.timing.warmup_limit_s, case.timing.warmup_tolerance, device.elapsed_ns)
    samples = interleave(participants, rounds, case.seed, device.elapsed_ns).elapsed_ns
    steps = copies * case.interval_length * case.timing.cycles_per_sample
    return {launch: median(samples[in_words(launch)]) / steps / 1000 for launch in right}


def wrong(check: gates.Check, operation: str, launch: Launch) -> str:
    """Why a launch is out: what it computes, or the error of a launch that the device does not take; "" if it is right.
    Raises what the device does not survive.
    """
    case, device = check.case, devices.of(check.case)
    try:
        step = Step(case, operation)
        step.launch = launch
        layers = step.layers(case, CHECKED_COPIES)
        correctness, _ = check.run(layers, 0, device.graph(layers))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not device.works():
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "" if correctness.passed else "incorrect: " + "; ".join(correctness.faults())


def compile_ahead(case: Case, operation: str, launches: Sequence[Launch]) -> None:
    """Fill Triton's cache of compiled kernels from several processes, each with a row of the batch on the GPU."""
    kind = (case.geometry, case.precision, case.interval_length, operation)
    new = [launch for launch in launches if (*kind, launch) not in _compiled]
    _compiled.update((*kind, launch) for launch in new)
    workers = min(cores(), MOST_COMPILERS, len(new))
    if not torch.cuda.is_available() or workers < 2:
        return
    parts = [(dataclasses.replace(case, batch_size=1), operation, new[n::workers]) for n in range(workers)]
    # A process that ends early leaves its part to this one, which tells what is wrong with it.
    with (
        contextlib.suppress(BrokenProcessPool),
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):
        list(pool.map(_compile, parts))


def _compile(part: tuple[Case, str, list[Launch]]) -> None:
    case, operation, launches = part
    step = Step(case, operation)
    layers = step.layers(case, 1)
    for step.launch in launches:
        with contextlib.suppress(Exception):
            layers.run_pass(0)


def in_words(launch: Launch) -> str:
    """``rows=16 tiles=5 warps=2 lanes=8 stages=3 registers=128``."""
    told = {name: value for name, value in dataclasses.asdict(launch).items() if value not in (None, False)}
    return " ".join(name if value is True else f"{name}={value}" for name, value in told.items())


def _repeated(run: devices.Run, times: int) -> devices.Run:
    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated
