"""Tables: the baseline, verdicts, ideals and remarks of rows built from synthetic records."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from records import ARMS, COPIES, READ, RMW, case, group, traffic, write

from analysis import table_text, tables
from analysis.cells import strongest, weaknesses
from analysis.load import load


def built(tmp_path, *groups):
    return tables.build(load([write(tmp_path, *groups)]))


def row(frame, arm):
    found = frame[frame["arm"] == arm]
    assert len(found) == 1
    return found.iloc[0]


def processes(count=3, **changes):
    return [group(replicate=r, seed=r, **changes) for r in range(count)]


def test_speedups_are_over_the_fastest_stored_arm(tmp_path):
    frame = built(tmp_path, *processes())["kernel_speedups"]
    assert sorted(frame["arm"]) == ["replay/cpu", "replay/torch", "stored/torch"]
    replay = row(frame, "replay/cpu")
    assert (replay["baseline"], replay["verdict"]) == ("stored/cpu", "FASTER")
    assert replay["speedup"] == pytest.approx(1.25, rel=0.01)
    assert replay["low"] < replay["speedup"] < replay["high"]
    assert row(frame, "replay/torch")["verdict"] == "SLOWER"
    assert row(frame, "stored/torch")["speedup"] == pytest.approx(1 / 1.4, rel=0.01)
    assert (replay["processes"], replay["rounds"], replay["interval_over"]) == (3, 60, "processes and rounds")


def test_the_baseline_follows_the_fastest_stored_arm_not_a_name(tmp_path):
    frame = built(tmp_path, *processes(arms=ARMS | {"stored/torch": 0.7}))["kernel_speedups"]
    assert row(frame, "replay/cpu")["baseline"] == "stored/torch"
    assert row(frame, "replay/cpu")["verdict"] == "SLOWER"


def test_a_stored_arm_of_another_state_format_is_no_baseline(tmp_path):
    groups = []
    for records in processes():
        config = {"state_format": "fp16"}
        groups.append([replace(r, arm_config=config) if r.arm == "stored/cpu" else r for r in records])
    frame = built(tmp_path, *groups)["kernel_speedups"]
    assert row(frame, "replay/cpu")["baseline"] == "stored/torch"


def test_one_process_says_so(tmp_path):
    replay = row(built(tmp_path, group())["kernel_speedups"], "replay/cpu")
    assert replay["interval_over"] == "rounds only"
    assert "one process" in replay["remarks"]


def test_a_loud_machine_gives_no_verdict_and_says_so(tmp_path):
    quiet = row(built(tmp_path / "quiet", *processes(arms=ARMS | {"replay/cpu": 0.2}))["kernel_speedups"], "replay/cpu")
    loud = processes(arms=ARMS | {"replay/cpu": 0.2}, noise=0.6)
    found = row(built(tmp_path / "loud", *loud)["kernel_speedups"], "replay/cpu")
    assert found["low"] > 1 + found["aa_noise"] > 1.25
    assert (quiet["verdict"], found["verdict"]) == ("FASTER", "AMBIGUOUS")
    assert f"A/A noise of {100 * found['aa_noise']:.0f} %" in found["remarks"]
    assert quiet["remarks"] == ""


def test_the_head_of_the_speedups_says_how_they_relate_to_the_times(tmp_path):
    text = tables.markdown("kernel_speedups", built(tmp_path, *processes())["kernel_speedups"])
    head = text[: text.index("|")]
    for part in ("median over rounds of the ratio within a round", "interval covers", "exceeds 25 % are AMBIGUOUS"):
        assert part in head


def test_bandwidths_are_averaged_over_processes_as_floors_are(tmp_path):
    groups = []
    for records, factor in zip(processes(2), (1.0, 0.5), strict=True):
        rates = {"read_modify_write": {"kernel": "torch.add_", "bytes_per_s": RMW * factor}}
        floors = [r.traffic | {"floor_ns": r.traffic["floor_ns"] / factor} for r in records]
        pairs = zip(records, floors, strict=True)
        groups.append([replace(r, bandwidth=r.bandwidth | rates, traffic=floor) for r, floor in pairs])
    stored = row(built(tmp_path, *groups)["roofs"], "stored/cpu")
    assert stored["roof_gb_per_s"] == stored["rmw_gb_per_s"] == pytest.approx(RMW / 1e9 * 2 / 3, rel=1e-3)


@pytest.mark.parametrize(("status", "verdict"), [("oom", "AMBIGUOUS"), ("unsupported", "FASTER")])
def test_a_baseline_that_failed_withholds_faster_unless_the_device_cannot_run_it(tmp_path, status, verdict):
    groups = processes(failed={"stored/cpu": status}, aa_arm="stored/torch")
    replay = row(built(tmp_path, *groups)["kernel_speedups"], "replay/cpu")
    assert replay["baseline"] == "stored/torch"
    assert replay["speedup"] > 1.5
    assert replay["verdict"] == verdict
    assert ("stored/cpu missing from the baseline" in replay["remarks"]) == (verdict == "AMBIGUOUS")


def test_without_any_stored_arm_there_is_a_row_but_no_speedup(tmp_path):
    groups = processes(arms={"replay/cpu": 1.0}, aa_arm="replay/cpu")
    replay = row(built(tmp_path, *groups)["kernel_speedups"], "replay/cpu")
    assert pd.isna(replay["speedup"])
    assert replay["verdict"] == "AMBIGUOUS"


def test_ideals_are_ratios_of_recorded_bytes_and_floors(tmp_path):
    replay = row(built(tmp_path, *processes())["kernel_speedups"], "replay/cpu")
    state, ring = 4.0 * 96 * 80 * 128, 17792.0
    mean = state * (1 + 1 / 16) + ring * (15 / 2 + 15 / 16)  # of one row and layer step
    assert replay["ideal_bytes"] == pytest.approx(2 * state / mean, abs=1e-4)
    floors = [traffic(case(), arm)["floor_ns"] for arm in ("stored/cpu", "replay/cpu")]
    assert replay["ideal_roof"] == pytest.approx(floors[0] / floors[1], abs=1e-4)


def test_devices_tell_how_long_their_runs_took(tmp_path):
    ended = ["2026-11-29T10:00:07.5+00:00", "2026-11-29T10:00:02Z", "late"]
    groups = [group(replicate=n, seed=n, ended_utc=end) for n, end in enumerate(ended)]
    (device,) = built(tmp_path, *groups)["devices"].to_dict("records")
    assert (device["records"], device["runs"], device["seconds"]) == (12, 3, 9.5)


def test_roofs_give_share_and_bandwidths(tmp_path):
    stored = row(built(tmp_path, *processes())["roofs"], "stored/cpu")
    assert stored["share"] == pytest.approx(1 / 1.3, rel=0.05)
    assert stored["low"] < stored["share"] < stored["high"]
    assert (stored["read_gb_per_s"], stored["rmw_gb_per_s"]) == (READ / 1e9, RMW / 1e9)
    assert stored["gb_per_s"] == pytest.approx(stored["share"] * RMW / 1e9, rel=1e-3)


def test_failures_and_exclusions_are_tables(tmp_path):
    found = built(tmp_path, group(failed={"replay/cpu": "incorrect"}), group(case(batch=8))[:-1])
    assert list(found["failures"]["status"]) == ["incorrect"]
    assert set(found["exclusions"]["gate"]) == {"status", "incomplete"}
    assert found["exclusions"]["meaning"].str.len().min() > 10


def test_two_devices_with_as_many_cores_stay_apart(tmp_path):
    device = {**group()[0].device, "name": "Another CPU"}
    other = group(case(batch=8), device=device)
    found = built(tmp_path, group(), other)
    assert set(found["kernel_speedups"]["device"]) == {"2-core CPU A", "2-core CPU B"}
    assert set(found["devices"]["name"]) == {"Test CPU", "Another CPU"}


def test_strongest_keeps_the_row_with_most_rounds(tmp_path):
    smoke = case(timing={**case()["timing"], "name": "smoke", "rounds": 5})
    frame = built(tmp_path, group(smoke), *processes())["kernel_speedups"]
    assert set(frame["timing"]) == {"smoke", "default"}
    assert set(strongest(frame)["timing"]) == {"default"}
    assert len(strongest(frame)) == 3


def test_tables_are_written_as_csv_and_markdown(tmp_path):
    found = built(tmp_path / "records", *processes())
    tables.write(found, tmp_path / "out")
    again = pd.read_csv(tmp_path / "out" / "kernel_speedups.csv")
    assert list(again["speedup"]) == list(found["kernel_speedups"]["speedup"])
    assert again["batch_size"].dtype.kind == "i"
    assert "| FASTER |" in (tmp_path / "out" / "kernel_speedups.md").read_text()
    assert "No rows." in (tmp_path / "out" / "failures.md").read_text()


def test_latex_is_escaped_and_complete():
    frame = pd.DataFrame({"an_arm": ["[a|b]_1", "c & d\n50 %"], "step_us": [1.5, None]})
    lines = table_text.latex("some_table", frame, "Less < 2^3.").splitlines()
    assert lines[1] == r"\begin{longtable}{ll}"
    assert lines[2] == r"\caption{some table. Less \textless{} 2\textasciicircum{}3.} \\"
    assert r"an arm & step us \\" in lines
    assert r"{[}a\textbar{}b]\_1 & 1.5 \\" in lines
    assert r"c \& d 50 \% &  \\" in lines
    assert lines[-2:] == [r"\end{longtable}", r"\endgroup"]


def test_what_all_rows_share_is_said_once():
    frame = pd.DataFrame({"device": ["GPU"] * 3, "batch_size": [1, 8, 64], "empty": None, "groups": ["a", "b", "c"]})
    assert table_text.parts(frame) == ({"device": "GPU"}, ["batch size"], [["1"], ["8"], ["64"]])
    assert "All rows: device GPU.\n\n| batch size |" in table_text.markdown("t", frame)
    assert "| GPU | 1 |" in table_text.markdown("t", frame[:1])


def test_rows_name_the_groups_of_all_their_processes(tmp_path):
    groups = processes()
    found = row(built(tmp_path, *groups)["kernel_speedups"], "replay/cpu")
    assert found["groups"].split() == sorted(records[0].group for records in groups)


def test_markdown_escapes_a_bar():
    assert "a\\|b" in tables.markdown("x", pd.DataFrame({"c": ["a|b"]}))


def windows(steps: int, **changes):
    of = case(experiment="window", window=4, accepted=3, **changes)
    arms, more = {"snapshots/triton": 1.0, "verify/triton": 0.25}, {"layer_steps_per_sample": steps * COPIES}
    return [
        group(of, arms=arms, aa_arm="snapshots/triton", replicate=r, seed=r, experiment="window", **more)
        for r in range(3)
    ]


def test_windows_are_compared_with_snapshots_in_a_table_of_their_own(tmp_path):
    """L = 16, window 4, 3 accepted: steps at 3, 6, 9, 12 and 15 tokens, the last of which flushes."""
    found = built(tmp_path, *windows(5), *processes())
    verify = row(found["window_speedups"], "verify/triton")
    assert (verify["baseline"], verify["verdict"]) == ("snapshots/triton", "FASTER")
    assert (verify["window"], verify["accepted"]) == (4, 3)
    assert verify["speedup"] == pytest.approx(4, rel=0.01)
    assert verify["roof_share"] > 0
    assert set(found["kernel_speedups"]["kind"]) == {"stored", "replay"}
    assert len(found["exclusions"]) == 0


def test_windows_of_another_cycle_are_refused(tmp_path):
    found = built(tmp_path, *windows(16))
    assert len(found["window_speedups"]) == 0
    assert set(found["exclusions"]["gate"]) == {"whole cycles"}


def test_why_a_row_proves_nothing_is_told_once():
    assert weaknesses(1, 2, 0.0) == ["one process of fewer than 5 rounds"]
    assert weaknesses(1, 10, 0.0) == ["one process"]
    assert weaknesses(2, 8, 0.0) == ["fewer than 5 processes of fewer than 5 rounds"]
    assert weaknesses(5, 10, 0.3) == ["A/A noise of 30 %"]
