"""Reading records: every gate refuses its planted fault, nothing is dropped silently, order does not matter."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace

import pytest
from records import CACHE_BYTES, COPIES, case, group, write

from analysis import gates, tables
from analysis.gates import GATES
from analysis.load import load
from experiments.case import Case, Precision, Timing
from experiments.case import case_hash as experiment_hash
from replayssm.geometry import Geometry


def reasons(evidence):
    """(gate, arm) of every exclusion."""
    return {(e.gate, e.arm) for e in evidence.exclusions}


def edit(records, arm=None, **changes):
    """The group with fields of one arm, or of all, replaced; a mapping is merged into the field."""
    edited = []
    for record in records:
        if arm in (None, record.arm):
            merged = {k: getattr(record, k) | v if isinstance(v, dict) else v for k, v in changes.items()}
            record = replace(record, **merged)
        edited.append(record)
    return edited


def test_a_good_group_passes_whole(tmp_path):
    evidence = load([write(tmp_path, group())])
    assert [r.arm for r in evidence.records] == ["replay/cpu", "replay/torch", "stored/cpu", "stored/torch"]
    assert evidence.exclusions == []
    frame = evidence.frame
    assert list(frame["kind"]) == ["replay", "replay", "stored", "stored"]
    assert frame.loc[2, "median_step_ns"] == pytest.approx(1.3 * frame.loc[2, "floor_ns"], rel=0.1)
    assert set(frame["remarks"]) == {""}


def test_no_folder_and_no_records_are_no_error(tmp_path):
    evidence = load([tmp_path / "absent", write(tmp_path / "empty")])
    assert (evidence.records, evidence.failures, evidence.exclusions) == ([], [], [])


FAULTS = {
    "rounds": {"samples_ns": ((10**9,),) * 19, "again_samples_ns": ((10**9,),) * 19},
    "whole cycles": {"layer_steps_per_sample": 16 * COPIES + 1},
    "cold state": {"timing_used": {"rotated_bytes": int(4.9 * CACHE_BYTES)}},
    "throttled": {"device_state": {"throttled": True}},
    "case": {"case": {"batch_size": "64"}},
    "experiment": {"experiment": "other"},
}


@pytest.mark.parametrize("gate", FAULTS)
def test_each_gate_refuses_its_planted_fault(tmp_path, gate):
    evidence = load([write(tmp_path, edit(group(), **FAULTS[gate]))])
    assert evidence.records == []
    assert reasons(evidence) == {(gate, arm) for arm in group()[0].arms}
    assert all(e.where.startswith("records.jsonl:") and e.detail for e in evidence.exclusions)


COLD = [
    {"timing_used": {"rotated_bytes": None}},
    {"timing_used": {"last_level_cache_bytes": 2 * CACHE_BYTES}},
    {"device": {"last_level_cache_bytes": 2 * CACHE_BYTES}},
    {"timing_used": {"last_level_cache_bytes": None}, "device": {"last_level_cache_bytes": None}},
]


@pytest.mark.parametrize("changes", COLD)
def test_a_cache_that_is_larger_or_unknown_anywhere_is_refused(tmp_path, changes):
    assert {g for g, _ in reasons(load([write(tmp_path, edit(group(), **changes))]))} == {"cold state"}


def test_a_lower_cold_factor_in_the_case_does_not_lower_the_gate(tmp_path):
    of = case(timing={**case()["timing"], "cold_factor": 2.0})
    evidence = load([write(tmp_path, edit(group(of), timing_used={"rotated_bytes": int(4.9 * CACHE_BYTES)}))])
    assert {g for g, _ in reasons(evidence)} == {"cold state"}


@pytest.mark.parametrize("steps", [8 * COPIES, 16 * COPIES + 16, 16 * (COPIES - 1)])
def test_a_sample_that_is_no_whole_cycle_of_every_copy_is_refused(tmp_path, steps):
    evidence = load([write(tmp_path, edit(group(), layer_steps_per_sample=steps))])
    assert {g for g, _ in reasons(evidence)} == {"whole cycles"}


def test_a_sample_of_another_interval_length_is_refused(tmp_path):
    evidence = load([write(tmp_path, edit(group(), timing_used={"interval_length": 15}))])
    assert {g for g, _ in reasons(evidence)} == {"whole cycles"}


def test_a_fault_of_one_arm_leaves_the_others(tmp_path):
    evidence = load([write(tmp_path, edit(group(), "replay/torch", device_state={"throttled": True}))])
    assert reasons(evidence) == {("throttled", "replay/torch")}
    assert len(evidence.records) == 3


def test_a_biased_aa_refuses_the_whole_group_and_a_small_one_does_not(tmp_path):
    evidence = load([write(tmp_path / "biased", group(aa_bias=1.05))])
    assert evidence.records == []
    assert reasons(evidence) == {("A/A", arm) for arm in group()[0].arms}
    assert re.match(r"stored/cpu timed twice differs by \+[45]\.\d %", evidence.exclusions[0].detail)
    assert len(load([write(tmp_path / "small", group(aa_bias=1.005))]).records) == 4


def test_a_group_without_aa_is_refused(tmp_path):
    evidence = load([write(tmp_path, edit(group(), again_samples_ns=()))])
    assert {g for g, _ in reasons(evidence)} == {"A/A"}


def test_an_aa_that_repeats_its_first_samples_is_refused(tmp_path):
    records = [replace(r, again_samples_ns=r.samples_ns) if r.again_samples_ns else r for r in group()]
    assert {g for g, _ in reasons(load([write(tmp_path, records)]))} == {"A/A"}


def test_another_number_of_cycles_than_asked_is_refused(tmp_path):
    changed = edit(group(), timing_used={"cycles_per_sample": 2}, layer_steps_per_sample=2 * 16 * COPIES)
    assert {g for g, _ in reasons(load([write(tmp_path, changed)]))} == {"whole cycles"}


def test_an_incomplete_group_is_refused(tmp_path):
    evidence = load([write(tmp_path, group()[:-1])])
    assert evidence.records == []
    assert reasons(evidence) == {("incomplete", arm) for arm in group()[0].arms[:-1]}
    assert "replay/cpu" in evidence.exclusions[0].detail


CONTRADICTIONS = [
    {"case_hash": "0" * 16},
    {"replicate": 7},
    {"device": {"name": "Other CPU"}},
    {"arms": ("stored/torch", "stored/cpu", "replay/torch", "replay/cpu", "more/arms")},
]


@pytest.mark.parametrize("changes", CONTRADICTIONS)
def test_a_group_whose_records_contradict_each_other_is_refused(tmp_path, changes):
    evidence = load([write(tmp_path, edit(group(), "stored/cpu", **changes))])
    assert {g for g, _ in reasons(evidence)} == {"group"}


def test_a_second_record_of_an_arm_refuses_the_group_but_a_copy_of_the_line_does_not(tmp_path):
    records = group()
    write(tmp_path, records, name="one")
    assert len(load([write(tmp_path, records, name="two")]).records) == 4
    write(tmp_path, [replace(records[0], ended_utc="2026-11-29T11:00:00Z")], name="three")
    assert {g for g, _ in reasons(load([tmp_path]))} == {"group"}


def test_failures_are_kept_and_excluded_from_times(tmp_path):
    evidence = load([write(tmp_path, group(failed={"replay/torch": "oom"}))])
    assert [(r.arm, r.status) for r in evidence.failures] == [("replay/torch", "oom")]
    assert reasons(evidence) == {("status", "replay/torch")}
    assert len(evidence.records) == 3


def test_the_newest_complete_group_wins(tmp_path):
    old = group(name="old", started="2026-11-29T10:00:00Z")
    new = group(name="new", started="2026-11-29T12:00:00Z")
    cut = group(name="cut", started="2026-11-29T13:00:00Z")[:2]
    other_replicate = group(name="other", started="2026-11-29T09:00:00Z", replicate=1)
    evidence = load([write(tmp_path, old, cut, new, other_replicate)])
    assert {r.group for r in evidence.records} == {"new", "other"}
    assert {(e.gate, e.group) for e in evidence.exclusions} == {("superseded", "old"), ("incomplete", "cut")}


REFUSED = {"A/A": {"aa_bias": 1.1}, "throttled": {"device_state": {"throttled": True}}}


@pytest.mark.parametrize("gate", REFUSED)
def test_a_newer_group_that_a_gate_refuses_hides_no_older_one(tmp_path, gate):
    old = group(name="old", started="2026-11-29T10:00:00Z")
    new = group(name="new", started="2026-11-29T12:00:00Z", **REFUSED[gate])
    evidence = load([write(tmp_path, old, new)])
    assert {r.group for r in evidence.records} == {"old"}
    assert len(evidence.records) == 4
    assert {(e.gate, e.group) for e in evidence.exclusions} == {(gate, "new")}


def test_a_whole_group_comes_before_a_newer_one_of_which_arms_were_refused(tmp_path):
    old = group(name="old", started="2026-11-29T10:00:00Z")
    new = group(name="new", started="2026-11-29T12:00:00Z")
    new = edit(new, "replay/torch", device_state={"throttled": True})
    evidence = load([write(tmp_path, old, new)])
    assert {r.group for r in evidence.records} == {"old"}
    refused = {(e.gate, e.arm) for e in evidence.exclusions}
    others = {("superseded", arm) for arm in ("replay/cpu", "stored/cpu", "stored/torch")}
    assert refused == {("throttled", "replay/torch")} | others


def test_a_newer_failure_is_no_refusal(tmp_path):
    old = group(name="old", started="2026-11-29T10:00:00Z")
    new = group(name="new", started="2026-11-29T12:00:00Z", failed={"replay/cpu": "oom"})
    evidence = load([write(tmp_path, old, new)])
    assert [(r.group, r.arm) for r in evidence.failures] == [("new", "replay/cpu")]
    assert {r.group for r in evidence.records} == {"new"}


@pytest.mark.parametrize("older_sources", [True, False], ids=["other sources", "same sources"])
@pytest.mark.parametrize("refused", ["A/A", "one record"])
def test_a_newer_incorrect_arm_supersedes_older_speedups_whatever_the_gates_say(tmp_path, refused, older_sources):
    old = [group(name=f"old{r}", replicate=r, started=f"2026-11-29T10:0{r}:00Z") for r in range(2)]
    if older_sources:
        old = [edit(records, "replay/cpu", arm_hash="f" * 16) for records in old]
    bias = 1.1 if refused == "A/A" else 1.0
    new = group(name="new", aa_bias=bias, failed={"replay/cpu": "incorrect"}, started="2026-11-29T12:00:00Z")
    if refused == "one record":
        new = edit(new, "replay/torch", device_state={"throttled": True})
    evidence = load([write(tmp_path, *old, new)])
    assert [(r.group, r.arm, r.status) for r in evidence.failures] == [("new", "replay/cpu", "incorrect")]
    shown = {r.group for r in evidence.records}
    assert "old0" not in shown
    assert ("old1" in shown) == (not older_sources)  # a replicate of the same sources stays beside the failure
    assert ("superseded", "old0") in {(e.gate, e.group) for e in evidence.exclusions}
    frame = tables.build(evidence)["failures"]
    assert list(frame["status"]) == ["incorrect"]


def test_refused_replicates_of_newer_sources_hide_no_older_ones(tmp_path):
    old = edit(group(name="old", started="2026-11-29T10:00:00Z"), "replay/cpu", arm_hash="f" * 16)
    new = group(name="new", replicate=1, aa_bias=1.1, started="2026-11-29T12:00:00Z")
    assert {r.group for r in load([write(tmp_path, old, new)]).records} == {"old"}


def test_replicates_of_older_sources_are_not_mixed_with_newer_ones(tmp_path):
    old = edit(group(name="old", replicate=1, started="2026-11-29T10:00:00Z"), "replay/cpu", arm_hash="f" * 16)
    new = group(name="new", replicate=0, started="2026-11-29T12:00:00Z")
    evidence = load([write(tmp_path, old, new)])
    assert {r.group for r in evidence.records} == {"new"}
    assert {(e.gate, e.group) for e in evidence.exclusions} == {("superseded", "old")}


def test_superseded_failures_are_not_shown(tmp_path):
    old = group(name="old", failed={"replay/cpu": "timeout"}, started="2026-11-29T10:00:00Z")
    evidence = load([write(tmp_path, old, group(name="new", started="2026-11-29T12:00:00Z"))])
    assert evidence.failures == []


def test_a_torn_tail_is_reported_and_never_parsed(tmp_path):
    whole = group(name="whole")
    write(tmp_path, whole)
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text() + group(name="late")[0].to_json())  # a whole object, but no end of line
    evidence = load([tmp_path])
    assert {r.group for r in evidence.records} == {"whole"}
    assert [(e.gate, e.where) for e in evidence.exclusions] == [("line", "records.jsonl:5")]
    assert "torn tail" in evidence.exclusions[0].detail


ODD_LINES = [
    "",
    "{",
    "null",
    "[1, 2]",
    '{"id": "a"}',
    "\udcff\udcfe",
    "[" * 100_000,
    '{"schema": "other/1"}',
]


@pytest.mark.parametrize("line", ODD_LINES, ids=range(len(ODD_LINES)))
def test_an_odd_line_is_reported_with_file_and_line_and_harms_nothing_else(tmp_path, line):
    write(tmp_path, group())
    path = tmp_path / "records.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogateescape") + b"\n" + path.read_bytes())
    evidence = load([tmp_path])
    assert len(evidence.records) == 4
    expected = [("line", "records.jsonl:1")] if line else []
    assert [(e.gate, e.where) for e in evidence.exclusions] == expected


ODD_FIELDS = [
    ("group", 3),
    ("group", ["a"]),
    ("device", None),
    ("device", []),
    ("case", []),
    ("case", {}),
    ("timing_used", {}),
    ("timing_used", {"copies": "12"}),
    ("timing_used", {"copies": 0}),
    ("traffic", {"floor_ns": "soon"}),
    ("traffic", None),
    ("bandwidth", {"read": 3}),
    ("packages", None),
    ("code", {}),
    ("code", {"dirty": [], "git_sha": {}}),
    ("device", {"name": "Odd CPU", "kind": ["cpu"], "cores": [2], "last_level_cache_bytes": "32 MB"}),
    ("replicate", "0"),
    ("arms", [1, 2]),
    ("correctness", []),
    ("samples_ns", [[1.5]]),
    ("message", None),
    ("started_utc", None),
]


@pytest.mark.parametrize(("field", "value"), ODD_FIELDS)
def test_an_odd_field_is_excluded_or_shown_without_a_traceback(tmp_path, field, value):
    lines = []
    for record in group():
        data = json.loads(record.to_json())
        data[field] = value
        lines.append(json.dumps(data))
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    evidence = load([tmp_path])
    found = tables.build(evidence)
    assert set(found) == set(tables.NAMES)
    tables.write(found, tmp_path / "tables")
    shown_without = {"traffic", "bandwidth", "code", "device"}
    assert evidence.exclusions or field in shown_without


def test_a_forged_verdict_of_a_correctness_block_is_refused(tmp_path):
    data = json.loads(group()[0].to_json())
    data["correctness"][0]["comparisons"][0]["error"] = 1.0
    (tmp_path / "records.jsonl").write_text(json.dumps(data) + "\n")
    assert [e.gate for e in load([tmp_path]).exclusions] == ["line"]


def test_remarks_flag_and_do_not_exclude(tmp_path):
    waits = {"host_waits": [[0, 2], [1, 0]]}
    changed = edit(group(), code={"dirty": True}, timing_used={"warmup_settled": False}, decode=waits)
    frame = load([write(tmp_path, changed)]).frame
    assert set(frame["remarks"]) == {"uncommitted code; warm-up not settled; the GPU waited for 3 launches"}


@pytest.mark.parametrize(
    ("before", "busy"),
    [
        ({"load_average": [3.1, 0.0, 0.0]}, True),
        ({"load_average": [3.0, 9.0, 9.0]}, False),
        ({"load_average": None}, False),
        ({"load_average": []}, False),
        ({"load_average": ["high"]}, False),
        (None, False),
        ([], False),
    ],
    ids=str,
)
def test_a_busy_machine_is_flagged(tmp_path, before, busy):
    frame = load([write(tmp_path, edit(group(), device_state={"before": before}))]).frame
    assert set(frame["remarks"]) == {"machine busy" if busy else ""}


def test_a_case_that_was_changed_after_its_hash_is_refused(tmp_path):
    evidence = load([write(tmp_path, edit(group(), case={"batch_size": 256}))])
    assert evidence.records == []
    assert reasons(evidence) == {("case hash", arm) for arm in group()[0].arms}
    again = load([write(tmp_path / "again", edit(group(), case={"timing": case()["timing"] | {"replicates": 9}}))])
    assert len(again.records) == 4  # how often a case is repeated is no part of it


def test_the_hash_of_a_case_is_that_of_the_experiment():
    of = Case(
        "kernel",
        "nemotron_3_nano_4b",
        Geometry("mamba2", 96, 8, 80, 128),
        64,
        16,
        "aligned",
        Precision("fp32", "bf16"),
        "cpu",
        2,
        0,
        Timing("default", 20, 1, 5.0, 30.0, 0.01, 3, 600.0),
    )
    recorded = json.loads(json.dumps(dataclasses.asdict(of)))
    assert gates.case_hash(recorded) == experiment_hash(of)
    assert gates.case_hash(recorded | {"seed": 1}) != experiment_hash(of)


def test_the_order_of_files_and_lines_does_not_matter(tmp_path):
    groups = [group(case(batch=b), replicate=r, seed=r) for b in (1, 8) for r in range(2)]
    flat = [record for records in groups for record in records]
    one = load([write(tmp_path / "a", flat)])
    write(tmp_path / "b", flat[::-2], name="z")
    two = load([write(tmp_path / "b", flat[-2::-2], name="a")])
    assert [r.id for r in one.records] == [r.id for r in two.records]
    assert len(one.records) == 16


def test_records_come_by_batch_size_whenever_they_were_made(tmp_path):
    groups = [group(case(batch=b), started=f"2026-11-29T1{hour}:00:00Z") for hour, b in enumerate((64, 1, 8))]
    assert list(load([write(tmp_path, *groups)]).frame["batch_size"].unique()) == [1, 8, 64]


def test_every_gate_that_is_used_is_explained(tmp_path):
    evidence = load([write(tmp_path, group()[:-1], group(name="x", aa_bias=1.1))])
    assert {e.gate for e in evidence.exclusions} <= set(GATES)
