"""The kernel experiment with ``device=cuda``: on a GPU where there is one, else on the CPU in Triton's interpreter.

Without a GPU a stand-in takes its place: tensors on the CPU, a plain loop for the graph, the host's clock for events.
What only a GPU has, graphs and events, is in the tests marked ``gpu``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    # Read when Triton defines its own functions, so before its first import.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed")

from analysis import tables  # noqa: E402
from analysis.gates import remarks  # noqa: E402
from analysis.load import load  # noqa: E402
from experiments.case import Case, Precision, Timing  # noqa: E402
from experiments.measure import devices, layers, provenance, worker  # noqa: E402
from experiments.measure.assemble import Group  # noqa: E402
from experiments.measure.journal import Journal  # noqa: E402
from experiments.measure.record import Record  # noqa: E402
from replayssm.geometry import Geometry  # noqa: E402
from replayssm.kernels.triton import bandwidth  # noqa: E402

ARMS = ("stored/triton", "replay/triton")
ROUNDS, LENGTH = 2, 3 if GPU else 2
ROWS, SHAPE = (64, (32, 8, 64, 128)) if GPU else (2, (1, 1, 8, 16))
"""Batch, heads, groups, head_dim and state_dim: some copies rotate."""
needs_gpu = pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")


class StandIn(devices.Cuda):
    """A GPU of 512 bytes of cache whose tensors lie on the CPU; ``lost`` makes it answer no more."""

    tensors = "cpu:0"  # not "cpu", so that outputs are kept as on a GPU
    timer = "time.perf_counter_ns"
    lost = False
    asked = 0

    def begin(self, case: Case) -> None:
        self.lost, self.asked = False, 0

    def describe(self) -> dict[str, Any]:
        return {"kind": "gpu", "name": "Stand-in", "last_level_cache_bytes": 512, "memory_bytes": 2**30}

    def state(self) -> dict[str, Any]:
        return {"sm_clock_mhz": 1980.0, "clock_reasons": ["sw_power_cap"]}

    def free_bytes(self) -> int:
        return 2**40

    def allocated_bytes(self) -> int:
        self.asked += 1
        return 1000 * self.asked**2

    def peak_memory_bytes(self) -> int:
        return 9999

    def bandwidth_candidates(self) -> dict[str, Any]:
        wanted = ("torch.sum", "torch.mul_", "torch.copy_")
        return {name: found for name, found in bandwidth.candidates().items() if name in wanted}

    def graph(self, layers: Any) -> devices.Run:
        return lambda: layers.cycle()

    def repeated(self, run: devices.Run) -> devices.Run:
        return run

    def elapsed_ns(self, run: devices.Run) -> int:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
        start = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - start

    launches_ns = devices.Cpu.launches_ns

    def works(self) -> bool:
        return not self.lost


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> devices.Cpu:
    if GPU:
        return devices.DEVICES["cuda"]
    stand_in = StandIn()
    monkeypatch.setitem(devices.DEVICES, "cuda", stand_in)
    monkeypatch.setattr(provenance, "device", lambda kind: stand_in.describe())
    monkeypatch.setattr(provenance.nvidia, "gpu_state", stand_in.state)
    monkeypatch.setattr(worker, "probe_bytes", lambda case, copies: 4096)
    return stand_in


def case(family: str = "mamba2", phase: str = "aligned", phase_rounds: int = 0) -> Case:
    heads, groups, head_dim, state_dim = SHAPE
    geometry = Geometry(family, heads, heads if family == "kda" else groups, head_dim, state_dim)
    timing = Timing("test", ROUNDS, 1, 5.0, 0.01, 1.0, 1, 60.0, phase_rounds)
    return Case("kernel", "test", geometry, ROWS, LENGTH, phase, Precision("fp32", "bf16"), "cuda", 0, 0, timing)


def run(of: Case, arms: tuple[str, ...] = ARMS) -> list[Record]:
    return worker.run_group(Group(of, arms, 0, ("test",)))


@pytest.mark.parametrize(("family", "phase"), [("mamba2", "aligned"), ("gdn", "staggered"), ("kda", "staggered")])
def test_both_arms_pass_every_gate_and_reach_the_tables(
    device: devices.Cpu, family: str, phase: str, tmp_path: Path
) -> None:
    records = run(case(family, phase))
    assert [(r.status, r.message) for r in records] == [("ok", "")] * 2
    for record in records:
        assert record.phase_samples_ns == ()
        used = record.timing_used
        assert used["rotated_bytes"] >= 5 * record.device["last_level_cache_bytes"]
        assert record.layer_steps_per_sample == used["copies"] * LENGTH
        assert {"read", "read_modify_write", "copy"} <= set(record.bandwidth)
        assert record.device_state["rounds"]["sm_clock_mhz"] == [1980.0] * ROUNDS or GPU
        assert len(record.device_state["rounds"]["clock_reasons"]) == ROUNDS
        twice = bool(record.again_samples_ns)
        assert ("order" in used, "candidates" in record.bandwidth["read"]) == (twice, twice)
        assert record.device_state["throttled"] is False
        names = [c.quantity for c in record.correctness[0].comparisons]
        assert {"output", "graph: output", "graph: state"} <= set(names)
    if not GPU:  # asked before and after each arm was built
        assert [r.layers_memory_bytes for r in records] == [3000, 7000]
        assert [r.group_peak_memory_bytes for r in records] == [9999] * 2
    before, after = records[1].correctness
    per_cycle = records[1].timing_used["copies"] * ROWS
    assert before.flushes_counted == before.flushes_expected == 2 * per_cycle
    timed = ROUNDS + records[1].timing_used["warmup_rounds"]
    again = ROUNDS if records[1].again_samples_ns else 0
    assert after.flushes_counted == after.flushes_expected == (4 + timed + again) * per_cycle
    journal = Journal(tmp_path, "kernel")
    journal.append(records)
    evidence = load([tmp_path])
    assert not [e for e in evidence.exclusions if e.gate != "A/A"]
    if evidence.records:  # A/A may refuse a machine with other work, by right
        found = tables.build(evidence)
        (row,) = found["kernel_speedups"].to_dict("records")
        assert (row["arm"], row["baseline"], row["device_kind"]) == ("replay/triton", "stored/triton", "gpu")
        assert set(found["roofs"]["device"]) == {records[0].device["name"]}


def test_a_step_is_timed_at_every_ring_length(device: devices.Cpu) -> None:
    stored, replay = run(case(phase_rounds=2))
    assert [len(ns) for ns in replay.phase_samples_ns] == [2] * LENGTH
    assert [len(ns) for ns in stored.phase_samples_ns] == [2]
    again = Record.from_json(replay.to_json())
    assert again.phase_samples_ns == replay.phase_samples_ns


def planted(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Callable[[], object], Any], object]) -> None:
    """``wrong(graph, layers)`` runs in place of every graph of replay layers."""
    right = devices.DEVICES["cuda"].graph

    def graph(of: Any) -> devices.Run:
        inner = right(of)
        return (lambda: wrong(inner, of)) if isinstance(of, layers.ReplayLayers) else inner

    monkeypatch.setattr(devices.DEVICES["cuda"], "graph", graph)


def skip_commits(graph: Callable[[], object], of: Any) -> None:
    cursor = of.cache.cursor.clone()
    graph()
    of.cache.cursor.copy_(cursor + 1)


def miss_a_copy(graph: Callable[[], object], of: Any) -> None:
    graph()
    of.out[:, 0] = torch.nan


def round_state(graph: Callable[[], object], of: Any) -> None:
    graph()
    of.state.copy_(of.state.bfloat16())


def run_twice(graph: Callable[[], object], of: Any) -> None:
    graph()
    graph()


WRONG = {
    skip_commits: "cursor differs",
    miss_a_copy: "graph: output elements not written or not finite",
    round_state: "graph: state error",
    run_twice: "passes more or less than whole cycles",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_graph_is_incorrect(device: devices.Cpu, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, wrong)
    stored, replay = run(case())
    assert stored.status == "ok"
    assert (replay.status, replay.samples_ns) == ("incorrect", ())
    assert WRONG[wrong] in replay.message


@pytest.mark.skipif(GPU, reason="a GPU is not to be broken for a test")
def test_a_lost_device_is_an_error_of_all_arms_that_stand(device: devices.Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(graph: Callable[[], object], of: Any) -> None:
        device.lost = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")

    planted(monkeypatch, lose)
    stored, replay = run(case())
    told = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert (replay.status, replay.message) == ("error", f"before timing: {told}")
    assert (stored.status, stored.message) == ("error", f"the device was lost with replay/triton: {told}")
    assert not device.works()


@pytest.mark.skipif(GPU, reason="the stand-in's memory is full at will")
def test_memory_that_wants_for_the_bandwidth_kernels_is_an_oom_of_all_arms_that_stand(
    device: devices.Cpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*shape: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    planted(monkeypatch, round_state)
    monkeypatch.setattr(worker.torch, "ones", full)
    stored, replay = run(case())
    assert (stored.status, replay.status) == ("oom", "incorrect")
    assert stored.message == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_a_bug_of_the_harness_is_no_record(device: devices.Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_fastest_stored", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(case())


def test_the_others_are_timed_anew_when_the_arm_that_was_timed_twice_is_wrong_afterwards(
    device: devices.Cpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_after, taken = worker._check_after, []

    def spoil(arms: list[worker.Arm], *arguments: Any) -> None:
        stored, _ = arms
        taken.append(stored.layers is not None)
        if stored.layers is not None:
            stored.layers.run_pass = lambda passes: None
        check_after(arms, *arguments)

    monkeypatch.setattr(worker, "_check_after", spoil)
    stored, replay = run(case())
    assert taken == [True, False]
    assert (stored.status, stored.samples_ns) == ("incorrect", ())
    assert (replay.status, replay.message) == ("ok", "")
    assert len(replay.samples_ns) == len(replay.again_samples_ns) == ROUNDS
    assert [c.moment for c in replay.correctness] == ["before", "after", "after"]
    assert all(c.copies_touched == c.copies_expected for c in replay.correctness)


def test_an_arm_that_fails_at_one_ring_length_keeps_its_whole_cycles(
    device: devices.Cpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, position: int) -> None:
        raise KeyError("no such place")

    monkeypatch.setattr(layers.StoredLayers, "place", fail)
    stored, replay = run(case(phase_rounds=2))
    assert (stored.status, stored.phase_samples_ns) == ("ok", ())
    assert stored.timing_used["phases_fault"] == "KeyError: 'no such place'"
    assert len(stored.samples_ns) == len(stored.again_samples_ns) == ROUNDS
    assert [len(ns) for ns in replay.phase_samples_ns] == [2] * LENGTH
    assert "phases_fault" not in replay.timing_used
    assert "not timed by ring length: it failed" in remarks(stored)
    assert "not timed by ring length: it failed" not in remarks(replay)


class Queue:
    """A GPU that waits as long as it is told to, and needs ``needed`` cycles of its clock to be told all of it. It has
    ended launches ``ended`` when the next ones are queued.
    """

    def __init__(self, needed: int) -> None:
        self.needed, self.waits, self.runs = needed, [], 0
        self.ended: set[int] = set()

    def sleep(self, cycles: int) -> None:
        self.waits.append(cycles)

    def run(self) -> None:
        self.runs += 1

    def event(self, enable_timing: bool) -> Any:
        made = types.SimpleNamespace(synchronize=lambda: None, elapsed_time=lambda end: 0.001 * self.waits[-1])
        made.record = lambda: setattr(made, "behind", self.runs)
        made.query = lambda: self.waits[-1] < self.needed or made.behind in self.ended
        return made


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Queue:
    made = Queue(request.param)
    monkeypatch.setattr(devices.torch.cuda, "_sleep", made.sleep, raising=False)
    monkeypatch.setattr(devices.torch.cuda, "Event", made.event)
    return made


FIRST = devices.SPIN_CYCLES


@pytest.mark.parametrize("queue", [3 * FIRST], indirect=True)
def test_a_sample_that_began_before_all_was_queued_is_taken_again(queue: Queue) -> None:
    device, other = devices.Cuda(), lambda: None
    assert device.elapsed_ns(queue.run) == 4 * FIRST * 1000
    assert (queue.waits, queue.runs) == ([FIRST, 2 * FIRST, 4 * FIRST], 3)
    assert device.elapsed_ns(other) == 4 * FIRST * 1000  # the wait that was found is kept
    assert (device.retaken[queue.run], device.retaken[other]) == (2, 0)


@pytest.mark.parametrize("queue", [devices.LONGEST_SPIN_CYCLES * 2], indirect=True)
def test_what_waits_for_the_gpu_itself_is_refused_and_spoils_nobody_else_s_wait(queue: Queue) -> None:
    device = devices.Cuda()
    with pytest.raises(RuntimeError, match=r"^launches are not queued within 512,000,000 cycles of the GPU's clock$"):
        device.elapsed_ns(queue.run)
    queue.needed = 0
    assert device.elapsed_ns(queue.run) == FIRST * 1000


@pytest.mark.parametrize("queue", [0], indirect=True)
def test_launches_that_a_gpu_had_to_wait_for_are_counted(queue: Queue) -> None:
    device, firsts = devices.Cuda(), []
    queue.ended = {0, 3, 4, 6}  # after the first part, the third, fourth and last launch
    elapsed, waits = device.launches_ns(lambda: firsts.append(queue.runs), queue.run, 6)
    assert (elapsed, waits) == (devices.FIRST_SPIN_CYCLES * 1000, 3)
    assert (firsts, queue.runs, queue.waits) == ([0], 6, [devices.FIRST_SPIN_CYCLES])


@pytest.mark.skipif(GPU, reason="the stand-in takes samples again at will")
def test_samples_that_were_taken_again_are_counted(device: devices.Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    elapsed_ns, late = device.elapsed_ns, []

    def twice(run: devices.Run) -> int:
        if len(late) < 3 and run.__defaults__ and isinstance(run.__defaults__[0], worker.Arm):
            late.append(run.__defaults__[0].name)
            device.retaken[run] += 1
            run()
        return elapsed_ns(run)

    monkeypatch.setattr(device, "elapsed_ns", twice)
    records = run(case())
    assert [(r.status, r.message) for r in records] == [("ok", "")] * 2
    (told,) = [r.timing_used["retaken"] for r in records if "retaken" in r.timing_used]
    assert {name: late.count(name) for name in ARMS} == {name: told.get(name, 0) for name in ARMS}


def test_a_replay_counts_the_passes_that_were_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        passes = 10

        def cycle(self) -> None:
            self.passes += 3

    replays: list[int] = []

    def captured(run: devices.Run) -> devices.Run:
        run()
        return lambda: replays.append(1)

    monkeypatch.setattr(devices, "captured", captured)
    of = Recorded()
    graph = devices.CycleGraph(of)
    graph()
    graph()
    assert (of.passes, len(replays)) == (16, 2)


def test_a_graph_keeps_the_tensors_that_only_its_call_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: types.SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: contextlib.nullcontext())

    def captured() -> tuple[devices.Run, weakref.ref[torch.Tensor]]:
        out = torch.zeros(2)
        return devices.Cuda().repeated(lambda: out.add_(1)), weakref.ref(out)

    replay, out = captured()
    gc.collect()
    assert out() is not None
    del replay
    gc.collect()
    assert out() is None


@pytest.mark.gpu
@needs_gpu
def test_a_graph_writes_no_memory_that_was_given_back() -> None:
    """A tensor of the call alone, then another graph, whose capture gives back what nobody holds."""

    def captured() -> devices.Run:
        out = torch.zeros(2**24, device="cuda")
        return devices.Cuda().repeated(lambda: out.add_(1))

    replay = captured()
    captured()
    others = [torch.zeros(2**24, device="cuda") for _ in range(4)]
    replay()
    torch.cuda.synchronize()
    assert [int(other.count_nonzero()) for other in others] == [0] * 4


def test_throttling_is_told_from_a_power_cap() -> None:
    throttled = provenance.nvidia.throttled
    assert throttled([{"clock_reasons": ["sw_power_cap", "gpu_idle"]}, {"clock_reasons": None}]) is False
    assert throttled([{"clock_reasons": []}, {"clock_reasons": ["hw_thermal_slowdown"]}]) is True
    assert throttled([{"clock_reasons": None}]) is None


@pytest.mark.gpu
@needs_gpu
def test_a_graph_of_a_cycle_runs_as_often_as_it_is_replayed() -> None:
    device, of = devices.DEVICES["cuda"], dataclasses.replace(case(), precision=Precision("fp16", "bf16"))
    from experiments.arms import replay_triton

    made = replay_triton.prepare(of, 3)
    made.cycle()
    graph = device.graph(made)
    assert graph is not None
    for _ in range(5):
        graph()
    assert device.elapsed_ns(graph) > 0
    assert (made.passes, made.flushes.unique().tolist()) == (7 * LENGTH, [7])
    assert made.cursor.unique().tolist() == [0]


@pytest.mark.gpu
@needs_gpu
def test_the_driver_tells_the_state_of_the_gpu() -> None:
    told = provenance.nvidia.gpu()
    assert told is not None
    assert told["name"] == torch.cuda.get_device_name(0)
    state = provenance.nvidia.gpu_state()
    assert state["sm_clock_mhz"] > 0
    assert state["clock_reasons"] is not None
