"""Search the launches of our Triton kernels on a device: whether they are right, how long they take.

Tried are those of `launch_candidates` and what a step takes at present. Each is held against the float64 recurrence by
the gates of the experiment, over one cycle of calls and one of its graph, with some `CHECKED_ROWS` rows: more only take
more of the same programs. `SIEVE_ROUNDS` rounds leave the `FINALISTS` fastest, which are checked and timed with aligned
and, where rows have phases, with staggered rows. All candidates take their turns on the same cold copies, each with a
graph of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from statistics import median
from typing import Any

import torch

from experiments.case import Case, WindowCase, cores
from experiments.measure import devices, gates, provenance
from experiments.measure.launch_candidates import AnyLaunch, candidates, effective, in_words
from experiments.measure.layers import Layers, ReplayLayers, StoredLayers, forget
from experiments.measure.runner import FALLBACK_CACHE_BYTES, copies_of
from experiments.measure.timing import interleave, warm_up
from experiments.measure.window_gates import WindowCheck
from experiments.measure.window_layers import SnapshotsLayers, VerifyLayers
from replayssm.formats import DTYPES
from replayssm.kernels.triton import launch_table, verify_launch_table
from replayssm.kernels.triton.launch_csv import Choice

WITH_PHASES = ("replay", "verify")
"""Operations whose rows are at one ring length or another."""
SIEVE_ROUNDS, FINALISTS = 3, 8
CHECKED_COPIES, CHECKED_ROWS = 2, 8
MOST_COMPILERS = 16
"""Processes that compile at the same time; each holds a context on the GPU."""
_compiled: set[tuple[Any, ...]] = set()
"""What this process has had compiled."""
Say = Callable[[str], object]


class Step:
    """A kernel's step whose launch can be changed, so that candidates share the tensors."""

    def __init__(self, case: Case, operation: str) -> None:
        from replayssm.kernels.triton.families import KERNELS
        from replayssm.kernels.triton.verify_families import VERIFY
        from replayssm.kernels.triton.verify_snapshots import snapshots_step

        family = case.geometry.family
        steps = {"verify": VERIFY[family], "snapshots": snapshots_step}
        steps |= {"stored": KERNELS[family].stored_step, "replay": KERNELS[family].replay_step}
        self.step, self.operation = steps[operation], operation
        self.launch: AnyLaunch | None = None

    def __call__(self, *arguments: Any) -> None:
        self.step(*arguments, launch=self.launch)

    def layers(self, case: Case, copies: int) -> Layers:
        from replayssm.kernels.triton.commit import commit
        from replayssm.kernels.triton.verify_commit import commit_window

        if isinstance(case, WindowCase):
            if self.operation == "verify":
                return VerifyLayers(case, copies, self, commit_window)
            return SnapshotsLayers(case, copies, self)
        if self.operation == "stored":
            return StoredLayers(case, copies, self)
        return ReplayLayers(case, copies, self, commit)


def table_of(operation: str) -> Any:
    """The module whose tables hold an operation."""
    return verify_launch_table if operation in verify_launch_table.LAUNCHES else launch_table


def present(case: Case, operation: str) -> Choice:
    """What a step of the case takes at present: of the table, or the heuristic."""
    state_bytes, device = DTYPES[case.precision.state].itemsize, torch.device(devices.of(case).tensors)
    length = case.interval_length if operation in WITH_PHASES else None
    window = (case.window,) if isinstance(case, WindowCase) else ()
    found: Choice = table_of(operation).choose(case.geometry, case.batch_size, state_bytes, *window, length, device)
    return found


def tried(case: Case, operation: str) -> list[AnyLaunch]:
    """The launch that a step takes at present, then the candidates, each once."""
    state_bytes = DTYPES[case.precision.state].itemsize
    now = effective(present(case, operation).launch, case.geometry, state_bytes)
    return list(dict.fromkeys([now, *candidates(operation, case.geometry, case.batch_size, state_bytes)]))


def search(case: Case, operation: str, say: Say = print) -> tuple[Any, dict[AnyLaunch, tuple[float, ...]]] | None:
    """The fastest launch, as a row of the operation's table, and microseconds of a layer step of all finalists, aligned
    and, with phases, staggered; the worse counts. None if no candidate is right; ``say`` gets a line on each that is
    not.
    """
    compile_ahead(case, [operation])
    now, *_ = launches = tried(case, operation)
    aligned = dataclasses.replace(case, phase="aligned")
    sieve = measure(aligned, operation, launches, SIEVE_ROUNDS, say)
    finalists = sorted(sieve, key=lambda launch: sieve[launch])[:FINALISTS]
    finalists += [now] if now in sieve and now not in finalists else []
    phases = ("aligned", "staggered") if operation in WITH_PHASES else ("aligned",)
    found = [
        measure(dataclasses.replace(case, phase=phase), operation, finalists, case.timing.rounds, say)
        for phase in phases
    ]
    both = {launch: tuple(us[launch] for us in found) for launch in finalists if all(launch in us for us in found)}
    if not both:
        return None
    best = min(both, key=lambda launch: max(both[launch]))
    return _entry(case, operation, best, both[best]), both


def _entry(case: Case, operation: str, launch: AnyLaunch, us: tuple[float, ...]) -> Any:
    code, window = provenance.code(), {}
    if isinstance(case, WindowCase):
        window = {"window": case.window, "accepted": case.accepted}
    return table_of(operation).Entry(
        operation=operation,
        geometry=case.geometry,
        state=case.precision.state,
        interval_length=case.interval_length if operation in WITH_PHASES else None,
        batch_size=case.batch_size,
        launch=launch,
        aligned_us=round(us[0], 2),
        staggered_us=round(us[1], 2) if operation in WITH_PHASES else None,
        rounds=case.timing.rounds,
        source=(code["git_sha"] or "unknown")[:7] + ("+" if code["dirty"] else ""),
        **window,
    )


def measure(case: Case, operation: str, launches: Sequence[AnyLaunch], rounds: int, say: Say) -> dict[AnyLaunch, float]:
    """Median microseconds of a layer step with each launch that is right; ``say`` gets a line on the others."""
    device = devices.of(case)
    forget()
    device.begin(case)
    check_of = WindowCheck if isinstance(case, WindowCase) else gates.Check
    rows = min(case.batch_size, CHECKED_ROWS + case.batch_size % 2)  # as even or odd, see `compile_ahead`
    check, right = check_of(dataclasses.replace(case, batch_size=rows), CHECKED_COPIES, "before"), []
    for launch in launches:
        fault = wrong(check, operation, launch)
        if fault:
            say(f"  {operation} {in_words(launch)}, {case.phase}: {fault}")
        else:
            right.append(launch)
    forget()
    copies = copies_of(case, device.describe().get("last_level_cache_bytes") or FALLBACK_CACHE_BYTES)
    if not right:
        return {}
    step, participants = Step(case, operation), {}
    step.launch = right[0]  # rows that are ahead have taken steps already
    layers = step.layers(case, copies)
    for step.launch in right:
        layers.cycle()
        graph = device.graph(layers)
        graph()  # captured with this launch
        participants[in_words(step.launch)] = _repeated(graph, case.timing.cycles_per_sample)
    warm_up(participants, case.timing.warmup_limit_s, case.timing.warmup_tolerance, device.elapsed_ns)
    samples = interleave(participants, rounds, case.seed, device.elapsed_ns).elapsed_ns
    steps = copies * case.steps_per_cycle * case.timing.cycles_per_sample
    return {launch: median(samples[in_words(launch)]) / steps / 1000 for launch in right}


def wrong(check: gates.Check, operation: str, launch: AnyLaunch) -> str:
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


def compile_ahead(case: Case, operations: Sequence[str]) -> None:
    """Fill Triton's cache of compiled kernels from several processes, each with a row or two of the batch on the GPU:
    what an operation tries, unless this process has had it compiled. A kernel depends on the batch only by how tensors
    of copies are aligned, which is another way where rows are an odd number.
    """
    window = case.window if isinstance(case, WindowCase) else None
    rows = 2 - case.batch_size % 2
    kind = (case.geometry, case.precision, case.interval_length, window, rows)
    asked = [(operation, launch) for operation in operations for launch in tried(case, operation)]
    new = [one for one in asked if (kind, one) not in _compiled]
    _compiled.update((kind, one) for one in new)
    workers = min(cores(), MOST_COMPILERS, len(new))
    if not torch.cuda.is_available() or workers < 2:
        return
    forget()
    devices.of(case).begin(case)  # so that the processes have room for their contexts
    small = dataclasses.replace(case, batch_size=rows)
    # A process that ends early leaves the rest to this one, which tells what is wrong with it.
    with (
        contextlib.suppress(BrokenProcessPool),
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):
        list(pool.map(_compile, [(small, *one) for one in new]))


def _compile(task: tuple[Case, str, AnyLaunch]) -> None:
    """Two copies, of which the second is aligned otherwise where rows are odd."""
    case, operation, launch = task
    step = Step(case, operation)
    step.launch = launch
    with contextlib.suppress(Exception):
        step.layers(case, CHECKED_COPIES).run_pass(0)


def _repeated(run: devices.Run, times: int) -> devices.Run:
    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated
