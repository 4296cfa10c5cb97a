"""A sweep can be stopped in any way and started again: nothing is lost, measured twice or left running.

Real commands in a copy of the project (see `planted`), killed for real: with SIGKILL, which nobody can handle, and with
Ctrl-C. What is compared are the lines of the record files, not what a loader makes of them.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import SMALL, Tree
from preloaded import Process

from experiments.case import Case, Precision, Timing
from experiments.measure import runner
from experiments.measure.record import Record
from replayssm.geometry import Geometry

pytestmark = pytest.mark.slow

ARMS = ("stored/torch", "replay/torch")
QUICK = (*SMALL, "timing=smoke", "timing.rounds=1", "timing.warmup_limit_s=0.01", f"arms=[{','.join(ARMS)}]")
SWEEP = ("-m", *QUICK, "interval_length=2,3,4", "timing.replicates=2")
GROUPS = 6
KILLS = 10
LIMIT_S = 300
ANSWER_S = 60
"""A worker that still imports PyTorch notices that it is alone when that is done."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    base = tmp_path_factory.mktemp("resume")
    return Tree(base / "tree", base / "compiled")


@pytest.fixture
def fresh(tree: Tree) -> Tree:
    """The tree, without records."""
    shutil.rmtree(tree.records, ignore_errors=True)
    return tree


def processes() -> dict[int, tuple[int, str]]:
    """Every process: its parent and state."""
    if Path("/proc/self/stat").exists():
        found = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = file.read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it ended meanwhile
                continue
            found[int(file.parent.name)] = (int(parent), state)
        return found
    listed = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    return {int(pid): (int(parent), state) for pid, parent, state in map(str.split, listed.splitlines())}


def children(pid: int) -> set[int]:
    return {child for child, (parent, state) in processes().items() if parent == pid and state[0] != "Z"}


def alive(pids: set[int]) -> set[int]:
    return {pid for pid, (_, state) in processes().items() if pid in pids and state[0] != "Z"}


def wait_for(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """The value of ``condition`` once it is true; fails the test when it does not become so in time."""
    assert seconds_to(condition, limit_s) < limit_s, f"nothing after {limit_s} s"
    return condition()


def seconds_to(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> float:
    """How long it took ``condition`` to become true, at most ``limit_s``."""
    start = time.monotonic()
    while (elapsed_s := time.monotonic() - start) < limit_s and not condition():
        time.sleep(0.01)
    return min(elapsed_s, limit_s)


def kill_main(process: Process) -> set[int]:
    """SIGKILL the process alone; returns the children that it had at that moment."""
    os.kill(process.pid, signal.SIGSTOP)
    left = children(process.pid)
    process.kill()
    process.wait()
    return left


def start(tree: Tree, *options: str) -> Process:
    """The quick case."""
    return tree.start("experiments.kernel", *QUICK, f"records={tree.records}", *options)


def contents(folder: Path) -> dict[str, bytes]:
    """Every record file."""
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


def files_beside(known: dict[str, bytes], folder: Path) -> set[str]:
    return contents(folder).keys() - known.keys()


def keys(tree: Tree) -> list[tuple[Any, ...]]:
    """Resume key and status of every line."""
    return sorted((*Record.from_json(json.dumps(line)).key, line["status"]) for line in tree.lines())


def test_ten_kills_lose_nothing_and_repeat_nothing(fresh: Tree, tmp_path: Path) -> None:
    reference = Tree(tmp_path / "tree", fresh.cache)
    undisturbed = reference.start("experiments.kernel", *SWEEP, f"records={reference.records}")
    group_s = seconds_to(lambda: contents(reference.records))

    moments, orphans, before = random.Random(5), set(), {}
    errors = (tmp_path / "stderr").open("w+")
    for number in range(KILLS):
        begun = time.monotonic()
        process = fresh.start("experiments.kernel", *SWEEP, f"records={fresh.records}", stderr=errors)
        # At most a little behind a run's first group, and within it when few are left: the last run must find work.
        latest = 1.6 if GROUPS - len(before) > 2 else 0.7
        moment_s, shift_s = moments.uniform(0.1, latest) * group_s, moments.uniform(0, 0.2) * group_s
        if number % 2:  # not before there is a worker
            wait_for(functools.partial(children, process.pid))
        left_s = max(0.0, moment_s - (time.monotonic() - begun))
        if seconds_to(functools.partial(files_beside, before, fresh.records), left_s) < left_s:
            group_s = time.monotonic() - begun
            time.sleep(shift_s)
        assert process.poll() is None
        orphans |= kill_main(process)
        after = contents(fresh.records)
        assert all(after[name].startswith(text) for name, text in before.items())
        before = after
    print(f"{len(before)} groups were recorded before the last kill, {group_s:.1f} s a group")
    last = fresh.experiment(*SWEEP)
    assert last.code == 0, last.err
    assert all(contents(fresh.records)[name] == text for name, text in before.items())

    assert undisturbed.wait(LIMIT_S) == 0, undisturbed.communicate()
    assert len(keys(reference)) == GROUPS * len(ARMS)
    assert keys(fresh) == keys(reference)
    assert len(set(keys(fresh))) == len(keys(fresh))
    assert {line["status"] for line in fresh.lines()} == {"ok"}
    assert len(orphans) >= KILLS // 2
    wait_for(lambda: not alive(orphans), ANSWER_S)
    errors.seek(0)
    assert errors.read() == ""


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(fresh: Tree) -> None:
    process = start(fresh)
    workers = wait_for(lambda: children(process.pid))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted; what is recorded stays, and the same command goes on from there\n")
    assert not alive(workers)
    assert contents(fresh.records) == {}
    assert fresh.experiment(*QUICK).code == 0
    assert [line["status"] for line in fresh.lines()] == ["ok", "ok"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_group_that_is_being_written_is_finished(fresh: Tree, how: signal.Signals) -> None:
    once, twice = "        for line in lines:\n", "        for line in lines:\n            time.sleep(0.3)\n"
    fresh.patch("experiments/measure/journal.py", once, twice)
    try:
        process = start(fresh)
        wait_for(lambda: any(contents(fresh.records).values()))
        workers = children(process.pid)
        process.send_signal(how)
        process.communicate(timeout=LIMIT_S)
        wait_for(lambda: not alive(workers), ANSWER_S)
    finally:
        fresh.patch("experiments/measure/journal.py", twice, once)
    assert [line["status"] for line in fresh.lines()] == ["ok", "ok"]
    assert "recorded already" in fresh.experiment(*QUICK).out


@pytest.mark.parametrize("reports", [True, False])
def test_a_case_that_is_recorded_while_it_is_stopped_is_no_timeout(reports: bool) -> None:
    """A worker that has begun to write when its time is up reports the case after its input was closed."""
    start, done = (json.dumps({"event": event, "case": 0, "outcome": {}}) for event in ("start", "done"))
    script = f"import sys\nprint('hello')\nprint({start!r}, flush=True)\nsys.stdin.read()\n"
    script += f"print({done!r})" if reports else f"print({done[:30]!r}, end='')"
    worker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    failure = ("timeout", "still running after timing.timeout_s=0.1; stopped")
    assert runner._await(worker, runner._follow(worker.stdout), 0.1) == ({}, None if reports else failure)
    assert worker.returncode == 0


def test_a_recorded_case_is_not_run_again_and_a_torn_tail_is_reported(fresh: Tree) -> None:
    assert fresh.experiment(*QUICK).code == 0
    before = contents(fresh.records)
    again = fresh.experiment(*QUICK)
    assert (again.code, again.err) == (0, "")
    assert "recorded already" in again.out
    assert contents(fresh.records) == before

    (journal,) = fresh.records.glob("*.jsonl")
    whole = journal.read_bytes()
    group = fresh.lines()[0]["group"].encode()
    (fresh.records / "cut.jsonl").write_bytes(whole.removesuffix(b"\n").replace(group, b"another"))
    with journal.open("ab") as file:
        file.write(whole[:500])
    tables = fresh.analyse()
    torn = [e for e in tables.exclusions if e["gate"] == "line"]
    assert {e["where"] for e in torn} == {"cut.jsonl:2", f"{journal.name}:3"}
    assert all("torn tail" in e["detail"] for e in torn)
    assert "recorded already" in fresh.experiment(*QUICK).out
    assert journal.read_bytes() == whole + whole[:500]

    journal.unlink()  # what is left is a group cut short, which counts as not measured
    cut = contents(fresh.records)
    assert fresh.experiment(*QUICK).code == 0
    assert contents(fresh.records).items() > cut.items()
    assert "recorded already" in fresh.experiment(*QUICK).out


def test_two_runs_at_once_measure_once(fresh: Tree) -> None:
    both = [fresh.start("experiments.kernel", *QUICK, f"records={fresh.records}") for _ in range(2)]
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    (second,) = (out for out in outputs if "recorded already" in out)
    assert "waiting for its end" in second
    assert [line["status"] for line in fresh.lines()] == ["ok", "ok"]


def test_changed_sources_of_an_arm_are_measured_again(fresh: Tree) -> None:
    assert fresh.experiment(*QUICK).code == 0
    before = contents(fresh.records)
    with (fresh.root / "experiments/arms/replay_torch.py").open("a") as file:
        file.write("# changed\n")
    assert "recorded already" not in fresh.experiment(*QUICK).out
    assert contents(fresh.records).items() > before.items()
    assert len(set(keys(fresh))) == 3  # the stored arm is the same as before and was timed beside the changed one


def test_a_timeout_is_recorded_and_tried_again(fresh: Tree) -> None:
    stopped = fresh.experiment(*QUICK, "timing.timeout_s=0.1")
    assert stopped.code == 1
    assert [(line["status"], line["samples_ns"]) for line in fresh.lines()] == [("timeout", [])] * 2
    assert all("timing.timeout_s=0.1" in line["message"] for line in fresh.lines())
    before = contents(fresh.records)
    assert fresh.experiment(*QUICK).code == 0
    assert sorted(line["status"] for line in fresh.lines()) == ["ok", "ok", "timeout", "timeout"]
    assert contents(fresh.records).items() >= before.items()


def test_a_case_that_cannot_fit_is_not_tried(fresh: Tree) -> None:
    done = fresh.experiment(*QUICK, "batch_size=1000000", "model.ssm.head_dim=4096")
    assert done.code == 0
    assert done.out.count("not tried") == 2
    assert [line["status"] for line in fresh.lines()] == ["oom", "oom"]
    assert all(
        line["message"].endswith("not tried") and line["group_peak_memory_bytes"] is None for line in fresh.lines()
    )
    # Memory may be free by then.
    assert "recorded already" not in fresh.experiment(*QUICK, "batch_size=1000000", "model.ssm.head_dim=4096").out


ARM = '''"""Stored, but for one thing."""
from experiments.arms.stored_torch import describe, traffic, unsupported
from experiments.measure.layers import StoredLayers
from replayssm.kernels.torch import stored_step


def prepare(case, copies):
    {}
    return layers


def fail(*arguments):
    raise KeyError("no such thing")
'''
BROKEN = {
    "stored/unprepared": "layers = fail()",
    "stored/unsteppable": "layers = StoredLayers(case, copies, stored_step); layers.run_pass = fail",
    "stored/untimeable": "layers = StoredLayers(case, copies, stored_step); layers.cycle = fail",
    "stored/full": "raise RuntimeError('DefaultCPUAllocator: cannot allocate memory')",
}


def test_an_arm_that_raises_leaves_the_others_their_samples(fresh: Tree) -> None:
    for arm, line in BROKEN.items():
        (fresh.root / "experiments/arms" / f"{arm.replace('/', '_')}.py").write_text(ARM.format(line))
    done = fresh.experiment(*QUICK[:-1], f"arms=[{','.join((*BROKEN, *ARMS))}]")
    assert done.code == 1
    assert "Traceback" not in done.err
    found = {line["arm"]: (line["status"], line["message"]) for line in fresh.lines()}
    failure = "KeyError: 'no such thing'"
    assert found == {
        "stored/unprepared": ("error", failure),
        "stored/unsteppable": ("error", f"before timing: {failure}"),
        "stored/untimeable": ("error", f"while timed: {failure}"),
        "stored/full": ("oom", "RuntimeError: DefaultCPUAllocator: cannot allocate memory"),
    } | dict.fromkeys(ARMS, ("ok", ""))
    assert {line["arm"] for line in fresh.lines() if line["samples_ns"]} == set(ARMS)
    assert len({line["group"] for line in fresh.lines()}) == 1


def test_a_worker_does_not_go_on_alone(fresh: Tree) -> None:
    """It ends in the middle of a case that would take longer than we wait."""
    begun = fresh.folder / "begun"
    lines = f"open({str(begun)!r}, 'w'); layers = StoredLayers(case, copies, stored_step)"
    (fresh.root / "experiments/arms/stored_told.py").write_text(ARM.format(lines))
    process = start(fresh, "arms=[stored/told]", "timing.rounds=10000")
    wait_for(begun.exists)
    workers = children(process.pid)
    process.kill()
    assert workers
    try:
        wait_for(lambda: not alive(workers), ANSWER_S)
    finally:
        for worker in alive(workers):
            os.kill(worker, signal.SIGKILL)
    assert process.communicate() == ("", "")
    assert contents(fresh.records) == {}


def test_a_killed_worker_is_an_error_of_its_case_and_the_sweep_goes_on(fresh: Tree) -> None:
    process = fresh.start("experiments.kernel", "-m", *QUICK, "interval_length=2,3", f"records={fresh.records}")
    (worker,) = wait_for(lambda: children(process.pid))
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (1, "")
    found = [(line["case"]["interval_length"], line["status"]) for line in fresh.lines()]
    assert sorted(found) == [(2, "error"), (2, "error"), (3, "ok"), (3, "ok")]
    assert all("signal SIGKILL" in line["message"] for line in fresh.lines() if line["status"] == "error")
    assert "recorded already" in fresh.experiment("-m", *QUICK, "interval_length=2,3").out
    assert sorted(line["status"] for line in fresh.lines()) == ["error"] * 2 + ["ok"] * 4


def small_case(batch_size: int, seed: int, timeout_s: float = LIMIT_S, warmup_limit_s: float = 0.01) -> Case:
    timing = Timing("test", 1, 1, 5.0, warmup_limit_s, 0.0, 1, timeout_s)
    geometry, precision = Geometry("mamba2", 16, 8, 80, 128), Precision("fp32", "bf16")
    return Case("kernel", "test", geometry, batch_size, 2, "aligned", precision, "cpu", 1, seed, timing)


def test_one_process_runs_many_cases_until_it_is_killed(fresh: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case's limit is its own, behind one that is over at once too; those behind a killed one get a new worker."""
    monkeypatch.setattr(runner, "ROOT", fresh.root)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(fresh.cache))
    cases = [
        small_case(2, seed=0),
        small_case(10**9, seed=1, timeout_s=2.0),
        small_case(10**9, seed=2, timeout_s=2.0),
        small_case(2, seed=3, warmup_limit_s=4.0),
        small_case(2, seed=4),
        small_case(2, seed=5),
    ]
    others, workers = children(os.getpid()), set()

    def started(case: Case, replicate: int) -> None:
        workers.update(children(os.getpid()) - others)
        if case is cases[1]:
            time.sleep(1.0)  # whoever shows the progress is slow: meanwhile two cases end and the next one begins
        if case is cases[4]:
            for worker in alive(workers):
                os.kill(worker, signal.SIGKILL)

    outcomes = runner.run(0, cases, ARMS, fresh.records, ("test",), runner.Watcher(started=started))
    expected = ["ok", "oom", "oom", "ok", "error", "ok"]
    found = [[status for status, *_ in outcome.values()] for outcome in outcomes]
    assert found == [[status] * len(ARMS) for status in expected], outcomes
    recorded = sorted((line["seeds"]["case"], line["status"]) for line in fresh.lines())
    assert recorded == [(seed, status) for seed, status in enumerate(expected) for _ in ARMS]
    assert len(workers) == 2
    assert not alive(workers)


def test_a_worker_whose_device_is_lost_runs_no_other_case(fresh: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ROOT", fresh.root)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(fresh.cache))
    others, workers = children(os.getpid()), set()
    watcher = runner.Watcher(started=lambda case, replicate: workers.update(children(os.getpid()) - others))
    works, lost = "lost = not devices.of(case).works()", "lost = number == 1"
    fresh.patch("experiments/measure/worker.py", works, lost)
    try:
        runner.run(0, [small_case(2, seed) for seed in range(3)], ARMS, fresh.records, ("test",), watcher)
    finally:
        fresh.patch("experiments/measure/worker.py", lost, works)
    assert [(line["seeds"]["case"], line["status"]) for line in fresh.lines()] == [
        (seed, "ok") for seed in range(3) for _ in ARMS
    ]
    assert len(workers) == 2
