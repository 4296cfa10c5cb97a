"""Where a case runs: where its tensors are, how its cycles are repeated and timed, what memory and cache it has.

On a CPU a cycle is repeated by calling it and timed with the host's clock. On a GPU it is captured in a CUDA graph, L
passes over all copies and their commits, and timed between two events: no launch is waited for, as in a server.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numba
import torch

from experiments.case import Case
from experiments.measure import provenance
from experiments.measure.timing import host_elapsed_ns
from replayssm.graphs import capture

Run = Callable[[], object]
SPIN_CYCLES, LONGEST_SPIN_CYCLES = 2_000_000, 512_000_000
"""About 1 ms that the GPU waits before a sample, so that its launches are queued before the first one runs; and a
quarter of a second, what launching a graph may take at most. `Cuda.elapsed_ns` finds what is enough.
"""
FIRST_SPIN_CYCLES = 40_000_000
"""About 20 ms that the GPU waits before many launches: the host is then some of them ahead of it."""


class Cpu:
    """The host: Numba and torch kernels in a loop."""

    tensors = "cpu"
    timer = "time.perf_counter_ns"

    def __init__(self) -> None:
        self.retaken: Counter[Run] = Counter()
        """How often a sample of what was timed had to be taken again since the case began."""

    def begin(self, case: Case) -> None:
        """Prepare the process for a case."""
        torch.set_num_threads(case.threads)
        numba.set_num_threads(case.threads)

    def describe(self) -> dict[str, Any]:
        return provenance.device("cpu")

    def state(self) -> dict[str, Any] | None:
        """State after a round; None where asking for it would disturb the next one, or tell nothing."""
        return None

    def free_bytes(self) -> int | None:
        return provenance.available_memory_bytes()

    def allocated_bytes(self) -> int | None:
        """What PyTorch's tensors on the device take at present; None where nobody counts."""
        return None

    def peak_memory_bytes(self) -> int:
        """Of this process since it started; macOS counts in bytes, others in KiB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def bandwidth_candidates(self) -> dict[str, Any]:
        from replayssm.kernels.cpu import bandwidth

        return bandwidth.candidates()

    def graph(self, layers: Any) -> Run | None:
        """What repeats a cycle of the layers apart from the calls it consists of; None if nothing does."""
        return None

    def repeated(self, run: Run) -> Run:
        return run

    def elapsed_ns(self, run: Run) -> int:
        return host_elapsed_ns(run)

    def launches_ns(self, first: Run, launch: Run, count: int) -> tuple[int, int]:
        """``(ns, waits)`` of ``first`` and ``count`` times ``launch`` behind it; ``waits`` counts launches that the
        device had to wait for, having nothing left to do. A host that is the device itself waits for none."""

        def run() -> None:
            first()
            for _ in range(count):
                launch()

        return host_elapsed_ns(run), 0

    def works(self) -> bool:
        """False where PyTorch finds no such device, and after an error that no later call of this process survives."""
        return True


class Cuda(Cpu):
    """The first visible NVIDIA GPU."""

    tensors = "cuda"
    timer = "CUDA events around CUDA graph replays"

    def __init__(self) -> None:
        super().__init__()
        self.spin_cycles = SPIN_CYCLES

    def begin(self, case: Case) -> None:
        self.retaken.clear()
        self.spin_cycles = SPIN_CYCLES
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def describe(self) -> dict[str, Any]:
        told = torch.cuda.get_device_properties(0)
        return provenance.device("cuda") | {
            "memory_bytes": told.total_memory,
            "last_level_cache_bytes": told.L2_cache_size,
            "multiprocessors": told.multi_processor_count,
            "compute_capability": f"{told.major}.{told.minor}",
            "cuda": torch.version.cuda,
        }

    def state(self) -> dict[str, Any] | None:
        return provenance.nvidia.gpu_state()

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info()[0]

    def allocated_bytes(self) -> int | None:
        return torch.cuda.memory_allocated()

    def peak_memory_bytes(self) -> int:
        """Of this case's tensors on the GPU."""
        return torch.cuda.max_memory_allocated()

    def bandwidth_candidates(self) -> dict[str, Any]:
        from replayssm.kernels.triton import bandwidth

        return bandwidth.candidates()

    def graph(self, layers: Any) -> Run | None:
        return CycleGraph(layers)

    def repeated(self, run: Run) -> Run:
        return captured(run)

    def elapsed_ns(self, run: Run) -> int:
        """No work of the host lies inside: the GPU waits while everything is queued, and where it has begun before
        that, as with a graph of thousands of kernels, the wait of this case doubles and the sample is taken again.
        Raises ``RuntimeError`` if no wait is long enough.
        """
        while self.spin_cycles <= LONGEST_SPIN_CYCLES:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self.spin_cycles)
            start.record()
            run()
            end.record()
            begun = start.query()
            end.synchronize()
            if not begun:
                return round(start.elapsed_time(end) * 1e6)
            self.retaken[run] += 1
            self.spin_cycles *= 2
        self.spin_cycles = SPIN_CYCLES
        raise RuntimeError(f"launches are not queued within {LONGEST_SPIN_CYCLES:,} cycles of the GPU's clock")

    def launches_ns(self, first: Run, launch: Run, count: int) -> tuple[int, int]:
        """More than a queue of some ten thousand kernels holds, so that the host queues while the GPU works: it waits
        for a launch that is queued when all before it has ended."""
        torch.cuda._sleep(FIRST_SPIN_CYCLES)
        start = before = torch.cuda.Event(enable_timing=True)
        start.record()
        first()
        waits = 0
        for _ in range(count):
            launch()
            waits += before.query()
            before = torch.cuda.Event(enable_timing=True)
            before.record()
        before.synchronize()
        return round(start.elapsed_time(before) * 1e6), waits

    def works(self) -> bool:
        try:
            if not torch.cuda.is_available():
                return False
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True


class CycleGraph:
    """A cycle of layers in one CUDA graph, captured at the first call; every call replays it.

    The kernels must have run before, since they cannot be compiled or tuned while a graph is captured. The layers'
    ``passes`` move on by what the capture recorded.
    """

    def __init__(self, layers: Any) -> None:
        self.layers, self.passes = layers, 0
        self._replay: Run | None = None

    def __call__(self) -> None:
        if self._replay is None:
            before = self.layers.passes
            self._replay = captured(self.layers.cycle)
            self.passes, self.layers.passes = self.layers.passes - before, before
        self._replay()
        self.layers.passes += self.passes


def captured(run: Run) -> Run:
    """Replays what ``run`` launches; it is called once, and nothing of it runs before the first replay. It is kept as
    long as the graph: tensors that nobody else holds are read and written at every replay."""
    graph = capture(run)

    def replay(kept: Run = run) -> None:
        graph.replay()

    return replay


DEVICES: dict[str, Cpu] = {"cpu": Cpu(), "cuda": Cuda()}


def of(case: Case) -> Cpu:
    """The device that a case runs on."""
    return DEVICES[case.device]
