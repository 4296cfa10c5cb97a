"""Faults planted in the product, one at a time: the real command is run on the faulty copy, and a gate must refuse it.

A fault that an arm or the harness has makes the experiment refuse the arm, as ``incorrect`` or ``error``; one that the
run itself shows makes the analysis exclude its records. Either way no table may hold a speedup. Faults of speculative
decoding, which no experiment times yet, must fail the tests of the mutated copy.

Copies run two at a time, with packages loaded already (`preloaded`), but for one control. Their records are analysed
by the real command where a gate of the analysis has to refuse them, and in this process where the experiment has
refused them itself.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import DRAFTS, FAULTS, GDN, REPLAY, SMOKE, STORED, Fault
from planted import Done, Tables, Tree, preloaded

from analysis import tables
from analysis.load import load

pytestmark = pytest.mark.slow

LANES = 2
DRAFT_TESTS = ("tests/test_replay.py", "-k", "every_accepted_count and (mamba2 or kda) and 9-4")

CONTROLS = {
    "all arms": (*SMOKE, "timing.rounds=10"),
    "staggered": (*SMOKE, f"arms=[{STORED},{REPLAY}]", "phase=staggered", "timing.rounds=10"),
    "gdn": (*SMOKE, f"arms=[{STORED},{REPLAY}]", *GDN, "timing.rounds=10"),
}
ATTEMPTS = 3
"""On a machine with other work a good run may fail A/A, by right; three in a row do not."""


@dataclass(frozen=True)
class Outcome:
    """What a run in a copy left behind."""

    done: Done
    records: list[dict[str, Any]]
    tables: Tables


def run_fault(tree: Tree, fault: Fault) -> Outcome:
    tree.patch(fault.file, fault.old, fault.new)
    done = tree.experiment(*fault.overrides)
    return Outcome(done, tree.lines(), analysed_here(tree.records) if fault.gate == "status" else tree.analyse())


def run_control(tree: Tree, overrides: tuple[str, ...], anew: bool) -> Outcome:
    for _ in range(ATTEMPTS):
        for path in tree.records.glob("*.jsonl"):
            path.unlink()
        outcome = Outcome(tree.experiment(*overrides, anew=anew), tree.lines(), tree.analyse())
        if {e["gate"] for e in outcome.tables.exclusions} != {"A/A"}:
            break
    return outcome


def run_drafts(tree: Tree, file: str, old: str, new: str) -> Done:
    tree.patch(file, old, new)
    return tree.run("pytest", "-q", "-x", "-p", "no:cacheprovider", *DRAFT_TESTS)


def analysed_here(folder: Path) -> Tables:
    """The tables of the command, without its figures and report."""
    found = tables.build(load([folder]))
    rows = {name: found[name].astype(object).where(found[name].notna(), "") for name in found}
    return Tables(*(rows[n].to_dict("records") for n in ("exclusions", "failures", "kernel_speedups")))


@pytest.fixture(scope="module")
def outcome_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    """The outcome of the selected cases of this module by name; all are started at once, a few at a time."""
    base = tmp_path_factory.mktemp("planted")
    preloaded()  # before two lanes want it at once
    lanes: queue.Queue[Path] = queue.Queue()
    for number in range(LANES):
        lanes.put(base / f"lane{number}")

    def in_lane(task: Callable[..., Any], *arguments: Any) -> Any:
        lane = lanes.get()
        try:
            return task(Tree(lane, base / "compiled"), *arguments)
        finally:
            lanes.put(lane)

    tasks: dict[str, tuple[Any, ...]] = {n: (run_control, o, n == "all arms") for n, o in CONTROLS.items()}
    tasks |= {name: (run_fault, fault) for name, fault in FAULTS.items()}
    tasks |= {name: (run_drafts, *patch) for name, patch in DRAFTS.items()}
    mine = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params["name"] for item in mine if hasattr(item, "callspec")}
    with ThreadPoolExecutor(LANES) as pool:
        futures: dict[str, Future[Any]] = {n: pool.submit(in_lane, *tasks[n]) for n in tasks if n in selected}
        yield lambda name: futures[name].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CONTROLS)
def test_without_a_fault_every_arm_passes_and_a_speedup_is_shown(outcome_of: Callable[..., Outcome], name: str) -> None:
    outcome = outcome_of(name)
    assert outcome.done.code == 0, outcome.done.err
    assert {r["status"] for r in outcome.records} == {"ok"}
    arms = {r["arm"] for r in outcome.records}
    assert arms == ({STORED, REPLAY, "stored/cpu", "replay/cpu"} if name == "all arms" else {STORED, REPLAY})
    assert outcome.tables.exclusions == outcome.tables.failures == []
    shown = {row["arm"]: float(row["speedup"]) for row in outcome.tables.kernel_speedups}
    assert {arm for arm in arms if arm.startswith("replay/")} <= set(shown)
    assert min(shown.values()) > 0


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refused(outcome_of: Callable[..., Outcome], name: str) -> None:
    fault, outcome = FAULTS[name], outcome_of(name)
    told = f"{outcome.tables}\n{outcome.done.out}\n{outcome.done.err}"
    refusals = {e["arm"] for e in outcome.tables.exclusions if e["gate"] == fault.gate}
    assert refusals == set(fault.refused), told
    failed = {r["arm"] for r in outcome.records if r["status"] != "ok"}
    details = [e["detail"] for e in outcome.tables.exclusions if e["gate"] == fault.gate]
    if fault.gate == "status":  # tables cut long messages short
        details = [f"{r['status']}: {r['message']}" for r in outcome.records if r["arm"] in failed]
    assert all(re.search(fault.reason, detail) for detail in details), told
    assert all(row["speedup"] == "" for row in outcome.tables.kernel_speedups), told
    assert failed == (set(fault.refused) if fault.gate == "status" else set())
    assert not any(r["samples_ns"] for r in outcome.records if r["arm"] in failed)
    assert outcome.done.code == (1 if failed else 0)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_fault_of_speculative_decoding_fails_the_tests(outcome_of: Callable[..., Done], name: str) -> None:
    done = outcome_of(name)
    assert done.code == 1, f"{done.out}\n{done.err}"
    assert re.search(r"^E +(AssertionError|assert )", done.out, re.MULTILINE), done.out
    assert "1 failed" in done.out
