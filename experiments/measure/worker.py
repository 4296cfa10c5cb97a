"""A replicate: a fresh process that runs cases one after the other and appends a group of records for each.

Started by `experiments.measure.runner`, which writes one JSON job to its standard input and reads one JSON event a line
from its standard output: ``{"event": "start" | "done", "case": i, ...}``. It ends when its input is closed, so it never
outlives the process that watches it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch

from experiments import prompts
from experiments.case import Case, WindowCase
from experiments.measure import devices, gates
from experiments.measure.arm import Arm
from experiments.measure.assemble import Group, case_from_dict, order_seed
from experiments.measure.failures import LostError, fail, status_of, told
from experiments.measure.journal import Journal
from experiments.measure.layers import forget, share
from experiments.measure.phases import time_phases
from experiments.measure.record import Record
from experiments.measure.runner import FALLBACK_CACHE_BYTES, copies_of, needed_bytes, probe_bytes
from experiments.measure.sources import arm_file
from experiments.measure.timing import RaisedError, Samples, interleave, warm_up
from experiments.measure.window_gates import WindowCheck
from replayssm.layout import format_of

AGAIN = " again"
"""Behind the name of the arm that is timed a second time."""
MEMORY_SHARE = 0.8
"""Of the memory that is free; a case that is predicted to need more is ``oom`` without being tried."""


def run_group(group: Group) -> list[Record]:
    """Run all arms of a case and return one record each; failures of an arm are its record, never an exception. A
    lost device, or no room for what they share, is the failure of all that stand.
    """
    arms = [Arm(name) for name in group.arms]
    try:
        return _run(group, arms)
    except LostError as lost:
        status, message = "error", str(lost)
    except Exception as error:
        status, message = status_of(error), told(error)
        if status != "oom":
            raise
    for arm in arms:
        if arm.status == "ok":
            arm.fail(status, message)
    return [_record(arm, group, {}, {}) for arm in arms]


def _run(group: Group, arms: list[Arm]) -> list[Record]:
    case, device = group.case, devices.of(group.case)
    forget()
    if not device.works():
        raise LostError(f"PyTorch {torch.__version__} cannot use the device")
    device.begin(case)
    group.device = device.describe()
    known = group.device.get("last_level_cache_bytes")
    cache_bytes = known or FALLBACK_CACHE_BYTES
    copies = copies_of(case, cache_bytes)
    copy_bytes = format_of(case.precision.state).state_bytes(case.geometry) * case.batch_size
    needed, free = needed_bytes(case, len(group.arms), copies), device.free_bytes()
    if free is not None and needed > MEMORY_SHARE * free:
        predicted = f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free; not tried"
        return group.failures("oom", predicted)

    for arm in arms:
        _prepare(arm, case, copies)
    _check_before(arms, case, copies)
    timed = _timed_and_checked(arms, group, copies)
    time_phases(arms, group)
    used = {
        "copies": copies,
        "rotated_bytes": copies * copy_bytes,
        "last_level_cache_bytes": cache_bytes,
        "last_level_cache_assumed": known is None,
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        "cycles_per_sample": case.timing.cycles_per_sample,
        "interval_length": case.interval_length,
        "timer": device.timer,
    }
    return [_record(arm, group, used, timed) for arm in arms]


def _prepare(arm: Arm, case: Case, copies: int) -> None:
    """Import the arm and build its layers; what goes wrong is the arm's status."""
    device = devices.of(case)
    try:
        arm.module = importlib.import_module(f"experiments.arms.{arm_file(arm.name).stem}")
        arm.config, arm.traffic = arm.module.describe(case), arm.module.traffic(case)
        reason = arm.module.unsupported(case)
        if reason:
            arm.fail("unsupported", reason)
        else:
            share(case, copies)
            before = device.allocated_bytes()
            arm.layers = arm.module.prepare(case, copies)
            arm.memory_bytes = None if before is None else device.allocated_bytes() - before
            arm.graph = device.graph(arm.layers)
    except Exception as error:
        fail(arm, case, error)


def _check_of(case: Case) -> type[gates.Check]:
    return WindowCheck if isinstance(case, WindowCase) else gates.Check


def _check_before(arms: list[Arm], case: Case, copies: int) -> None:
    """Every arm against float64, and all rows of the others against the first arm that is right."""
    check, first = _check_of(case)(case, copies, "before"), None
    for arm in arms:
        outputs = _checked(arm, check)
        if arm.layers is None:
            continue
        if first is None:
            first = outputs
        elif not (found := check.agreement(outputs, first)).passed:
            arm.fail("incorrect", f"{found.quantity}: error {found.error:.3g} exceeds {found.budget:.3g}")
            continue
        gates.mark_copies(arm.layers)


def _check_after(arms: list[Arm], case: Case, copies: int) -> None:
    check = _check_of(case)(case, copies, "after")
    for arm in arms:
        _checked(arm, check)


def _timed_and_checked(arms: list[Arm], group: Group, copies: int) -> dict[str, Any]:
    """Time the arms that are right, and check them again. Where the arm that was timed twice is wrong by then, the
    others have no A/A comparison, and are timed and checked anew.
    """
    case = group.case
    timed = _time_standing(arms, group, probe_bytes(case, copies))
    _check_after(arms, case, copies)
    standing = {arm.name: arm for arm in arms if arm.layers is not None}
    if not standing or set(timed["again"]) <= set(standing):
        return timed
    for arm in standing.values():
        gates.mark_copies(arm.layers)
    return _timed_and_checked(arms, group, copies)


def _checked(arm: Arm, check: gates.Check) -> Any:
    """Run one check on an arm that still stands; returns its outputs."""
    if arm.layers is None:
        return None
    try:
        correctness, outputs = check.run(arm.layers, arm.cycles, arm.graph)
    except Exception as error:
        fail(arm, check.case, error, f"{check.moment} timing: ")
        return None
    arm.cycles += 2 if arm.graph else 1
    arm.correctness.append(correctness)
    if not correctness.passed:
        arm.fail("incorrect", f"{check.moment} timing: " + "; ".join(correctness.faults()))
    return outputs


def _time_standing(arms: list[Arm], group: Group, buffer_bytes: int) -> dict[str, Any]:
    """Time the arms that are right. One that raises is out, and the others are timed anew without it."""
    while any(arm.layers for arm in arms):
        try:
            return _time(arms, group, buffer_bytes)
        except RaisedError as raised:
            name = raised.name.removesuffix(AGAIN)
            blamed = next((arm for arm in arms if arm.name == name), None)
            if blamed is None:
                if raised.__cause__ is not None and status_of(raised.__cause__) == "oom":
                    raise raised.__cause__ from None
                raise LostError(f"{raised.name} failed: {told(raised.__cause__)}") from raised
            fail(blamed, group.case, raised.__cause__, "while timed: ")
    return {}


def _time(arms: list[Arm], group: Group, buffer_bytes: int) -> dict[str, Any]:
    """Warm up, then time all arms that are right, the bandwidth kernels, and one stored arm a second time (A/A)."""
    case, device = group.case, devices.of(group.case)
    cycles = case.timing.cycles_per_sample
    standing = {arm.name: arm for arm in arms if arm.layers is not None}
    participants = {name: (lambda arm=arm: arm.run(cycles)) for name, arm in standing.items()}
    buffer = torch.ones(buffer_bytes // 8 * 2, device=device.tensors)
    probes = device.bandwidth_candidates()
    participants |= {f"probe {name}": (lambda run=run: run(buffer)) for name, (_, run, _) in probes.items()}
    moved = {name: run(buffer) for name, (_, run, _) in probes.items()}
    before = {name: arm.cycles for name, arm in standing.items()}
    warmed = warm_up(participants, case.timing.warmup_limit_s, case.timing.warmup_tolerance, device.elapsed_ns)
    again = _fastest_stored(list(standing), warmed.last_ns)
    participants[f"{again}{AGAIN}"] = participants[again]
    states: list[Any] = []
    samples = interleave(
        participants,
        case.timing.rounds,
        order_seed(case, group.replicate),
        device.elapsed_ns,
        after_round=lambda: states.append(device.state()),
    )
    group.states = [state for state in states if state]
    for name, arm in standing.items():
        rounds = warmed.rounds + case.timing.rounds * (2 if name == again else 1)
        asked = cycles * (rounds + device.retaken[participants[name]])
        if arm.cycles - before[name] != asked:
            arm.fail("incorrect", f"{arm.cycles - before[name]} cycles run while timed, {asked} asked")
    return {
        "samples": {name: samples.elapsed_ns[name] for name in standing},
        "again": {again: samples.elapsed_ns[f"{again}{AGAIN}"]},
        "bandwidth": {
            kind: fastest_probe({n: moved[n] for n, (of_kind, _, _) in probes.items() if of_kind == kind}, samples)
            for kind in dict.fromkeys(of_kind for of_kind, _, _ in probes.values())
        }
        | {"buffer_bytes": buffer_bytes},
        "used": {
            "warmup_rounds": warmed.rounds,
            "warmup_s": round(warmed.elapsed_s, 3),
            "warmup_settled": warmed.settled,
            "retaken": {name: n for name, run in participants.items() if (n := device.retaken[run])},
            "participants": list(participants),
            "order": [[list(participants).index(name) for name in order] for order in samples.order],
        },
    }


def _fastest_stored(names: list[str], last_ns: dict[str, int]) -> str:
    """The arm timed twice: the fastest stored one of the warm-up, since all speedups rest on it."""
    stored = [name for name in names if name.startswith(("stored/", "snapshots/"))]
    return min(stored or names, key=lambda name: last_ns[name])


def fastest_probe(moved: dict[str, int], samples: Samples) -> dict[str, Any]:
    """The kernel of highest median bandwidth, from the bytes it moves; the samples of all of them."""
    elapsed = {name: samples.elapsed_ns[f"probe {name}"] for name in moved}
    rates = {name: median(moved[name] / ns * 1e9 for ns in elapsed[name]) for name in moved}
    best = max(rates, key=lambda name: rates[name])
    told = {name: {"bytes": moved[name], "elapsed_ns": elapsed[name]} for name in moved}
    return {"kernel": best, "bytes_per_s": rates[best], "candidates": told}


def _record(arm: Arm, group: Group, used: dict[str, Any], timed: dict[str, Any]) -> Record:
    """The arm's record; one that failed keeps what was found about its correctness, and no samples."""
    checks = {"correctness": tuple(arm.correctness), "arm_config": arm.config}
    if arm.status != "ok" or arm.traffic is None:
        return group.record(arm.name, arm.status, arm.message, **checks)
    case, bandwidth, of_timing = group.case, timed["bandwidth"], timed["used"]
    device = devices.of(case)
    if arm.phases_fault:
        of_timing = of_timing | {"phases_fault": arm.phases_fault}
    if arm.name not in timed["again"]:  # what is the same for all is told once
        bandwidth = {kind: _without(of_kind, "candidates") for kind, of_kind in bandwidth.items()}
        of_timing = _without(of_timing, "participants", "order", "retaken")
    return group.record(
        arm.name,
        "ok",
        **checks,
        timing_used=used | of_timing,
        samples_ns=tuple((ns,) for ns in timed["samples"][arm.name]),
        again_samples_ns=tuple((ns,) for ns in timed["again"].get(arm.name, ())),
        layer_steps_per_sample=used["copies"] * case.steps_per_cycle * case.timing.cycles_per_sample,
        traffic=arm.traffic.record(bandwidth["read"]["bytes_per_s"], bandwidth["read_modify_write"]["bytes_per_s"]),
        bandwidth=bandwidth,
        layers_memory_bytes=arm.memory_bytes,
        group_peak_memory_bytes=device.peak_memory_bytes(),
        phase_samples_ns=arm.phases_ns,
    )


def _without(block: Any, *names: str) -> Any:
    return {k: v for k, v in block.items() if k not in names} if isinstance(block, dict) else block


def _median_step_ns(record: Record) -> float | None:
    """Of a token of a row, where a step takes several."""
    if "token_ns" in record.decode:
        return float(record.decode["token_ns"])
    samples = [ns for of_round in record.samples_ns for ns in of_round]
    return median(samples) / record.layer_steps_per_sample if samples else None


def _end_with_parent(stdin: TextIO, writing: threading.Lock) -> None:
    """End when the watching process closes our input, which the system does for it if it is killed: at once, or, when
    a group is being appended, as soon as it is written and reported.
    """

    def wait() -> None:
        stdin.read()
        writing.acquire()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _report(events: TextIO, **event: Any) -> None:
    """Tell the watching process; without one there is nobody left to run for."""
    try:
        print(json.dumps(event), file=events)
    except BrokenPipeError:
        os._exit(1)


def _runner(case: Case) -> Callable[[Group], list[Record]]:
    if case.experiment in ("decode", "speculative"):
        from experiments.measure.decode_worker import run_group as run_models

        return run_models
    return run_group


def main() -> None:
    """Read the job, run its cases, report each."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints is no event
    line = sys.stdin.readline()
    if not line:
        return
    job, writing = json.loads(line), threading.Lock()
    _end_with_parent(sys.stdin, writing)
    parent = os.getppid()
    cases = [case_from_dict(data) for data in job["cases"]]
    prompts.FETCHED.update(job["questions"])

    gc.freeze()  # what has been imported is no garbage, which a capture collects
    torch.set_grad_enabled(False)
    journals = {case.experiment: Journal(Path(job["folder"]), case.experiment) for case in cases}
    for number, case in enumerate(cases):
        _report(events, event="start", case=number)
        records = _runner(case)(Group(case, tuple(job["arms"]), job["replicate"], tuple(job["argv"])))
        outcome = {record.arm: (record.status, record.message, _median_step_ns(record)) for record in records}
        with writing:
            if os.getppid() != parent:
                return
            journal = journals[case.experiment]
            journal.append(records)
            lost = not devices.of(case).works()
            _report(events, event="done", case=number, outcome=outcome, last=lost)
        if lost:
            os._exit(1)  # what an orderly end would free is out of reach


if __name__ == "__main__":
    main()
