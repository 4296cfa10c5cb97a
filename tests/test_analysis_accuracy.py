"""Accuracy tables: arms on the same items, intervals over passages, and no verdict without a control that lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from accuracies import GRID, ITEMS, PASSAGES, record
from scipy.stats import binom

from analysis import accuracy, accuracy_figures, accuracy_rules, drift_figures, published, tables
from analysis.bearing import Question
from analysis.load import Evidence, load
from analysis.rules import AGAINST, NOT_RUN, RULES, SUPPORTED, UNCLEAR
from experiments.measure.accuracy_record import AccuracyRecord, Answers

ROOT = Path(__file__).parents[1]


def failed(arm: str) -> AccuracyRecord:
    return record(arm, 0, status="error", message="it broke", answers=(), ended_utc="2026-01-02T00:00:00+00:00")


DUAL = {"arms": ["dual_fp16_sr_nvfp4"], "sensitive_to": "shared_nvfp4"}


def by_arm(records: list[AccuracyRecord]) -> dict[str, dict[str, Any]]:
    return {row["arm"]: row for row in accuracy.rows(records, {})}


def test_mcnemar_is_the_exact_test() -> None:
    assert accuracy.mcnemar(0, 0) == 1
    assert accuracy.mcnemar(9, 2) == pytest.approx(2 * binom.cdf(2, 11, 0.5))
    assert accuracy.mcnemar(2, 9) == accuracy.mcnemar(9, 2)


def test_arms_are_compared_item_by_item() -> None:
    found = by_arm([*GRID, record("shared_int8", 100, at=50)])
    assert list(found) == ["shared_fp32", "dual_fp16_sr_nvfp4", "shared_int8", "shared_nvfp4", "damaged"]
    row = found["shared_nvfp4"]
    assert (row["items"], row["passages"], row["accuracy"], row["difference"]) == (2000, 100, 85, -10)
    assert (row["lost"], row["gained"], row["verdict"]) == (200, 0, accuracy.LOSES)
    spread = 1.96 * 100 * (0.1 * 0.9 / PASSAGES) ** 0.5  # of the share of passages lost, a tenth
    assert row["difference_low"] == pytest.approx(-10 - spread, abs=1)
    assert row["difference_high"] == pytest.approx(-10 + spread, abs=2)
    assert found["dual_fp16_sr_nvfp4"]["verdict"] == accuracy.WITHIN
    assert found["damaged"]["verdict"] == accuracy.IS_CONTROL
    row = found["shared_int8"]  # as many right, but others
    assert (row["lost"], row["gained"], row["difference"], row["mcnemar_p"]) == (50, 50, 0, 1)


def test_an_interval_draws_whole_passages() -> None:
    values = np.repeat([0.0, 1.0], 50)
    alone, together = (
        accuracy.interval(values, groups, 1) for groups in (np.arange(100), np.repeat(np.arange(10), 10))
    )
    assert together[1] - together[0] > 2 * (alone[1] - alone[0])
    assert accuracy.interval(values, np.arange(100), 1) == alone


@pytest.mark.parametrize(
    ("control", "verdict"), [(None, accuracy.NO_CONTROL), (record("damaged", 105), accuracy.NOTHING)]
)
def test_no_arm_gets_a_verdict_where_the_control_does_not_lose(control: AccuracyRecord | None, verdict: str) -> None:
    found = by_arm([*GRID[:3], *([control] if control else [])])
    assert found["shared_nvfp4"]["verdict"] == found["dual_fp16_sr_nvfp4"]["verdict"] == verdict


def test_a_control_that_gains_has_not_lost() -> None:
    found = by_arm([record("shared_fp32", 1900), GRID[1], record("damaged", 100)])
    assert (found["damaged"]["lost"], found["damaged"]["gained"]) == (0, 1800)
    assert found["damaged"]["mcnemar_p"] < accuracy.CONTROL_P
    assert found["damaged"]["verdict"] == found["dual_fp16_sr_nvfp4"]["verdict"] == accuracy.NOTHING


def test_repeats_of_an_item_are_one_observation() -> None:
    """By hand: ten items, each answered forty times; five that are always wrong are five, not two hundred."""

    def repeated(arm: str, *shares: int) -> AccuracyRecord:
        marks = tuple("".join("1" if n < share else "0" for share in shares) for n in range(40))
        told = {"correct": marks, "group": tuple(range(10)), "distance": ()}
        return record(arm, 0, answers=(Answers(**vars(GRID[0].answers[0]) | told),))

    whole = repeated("shared_fp32", *[40] * 9, 20)
    found = by_arm([whole, repeated("shared_int8", *[40] * 8, 39, 21), repeated("damaged", *[0] * 5, *[40] * 4, 20)])
    row = found["shared_int8"]
    assert (row["items"], row["repeats"], row["lost"], row["gained"], row["mcnemar_p"]) == (10, 40, 1, 1, 1)
    assert row["difference"] == 0
    row = found["damaged"]
    assert (row["lost"], row["gained"], row["mcnemar_p"]) == (5, 0, 0.0625)
    assert row["verdict"] == accuracy.NOTHING


def test_a_few_items_of_which_none_changed_do_not_prove_that_none_would() -> None:
    few = [r.answers[0] for r in GRID]
    small = [
        record(r.arm, 0, answers=(Answers(**vars(a) | {"correct": (marks,), "group": (0,) * 50, "distance": ()}),))
        for r, a, marks in zip(GRID, few, ["1" * 50, "1" * 50, "1" * 50, "0" * 50], strict=True)
    ]
    assert by_arm(small)["shared_nvfp4"]["verdict"] == accuracy.OPEN


def test_arms_that_answered_other_items_are_not_compared() -> None:
    other = record("shared_nvfp4", 300)
    other = record("shared_nvfp4", 300, answers=(Answers(**vars(other.answers[0]) | {"digest": "d1"}),))
    row = by_arm([GRID[0], other, GRID[3]])["shared_nvfp4"]
    assert row["verdict"] == "no shared_fp32 of the same items"
    assert "difference" not in row


def test_a_failure_is_shown_and_hides_no_answers() -> None:
    assert by_arm([failed("shared_fp8"), *GRID])["shared_fp8"]["verdict"] == "error"
    assert by_arm([failed("shared_nvfp4"), *GRID])["shared_nvfp4"]["verdict"] == accuracy.LOSES


def test_the_newest_answers_count() -> None:
    older = record("shared_nvfp4", 150, code={"git_sha": "f"})
    newer = record("shared_nvfp4", 300, code={"git_sha": "0"}, ended_utc="2026-01-02T00:00:00+00:00")
    for records in ([older, newer], [newer, older]):
        assert by_arm([GRID[0], *records])["shared_nvfp4"]["lost"] == 200


def test_accuracy_by_distance_counts_intervals() -> None:
    rows = [row for row in accuracy.distance_rows(GRID, {}) if row["arm"] == "shared_fp32"]
    assert [row["from_interval"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert sum(row["items"] for row in rows) == ITEMS
    assert rows[-1]["accuracy"] == 100
    assert rows[0]["accuracy"] == 0  # the first hundred are wrong


def test_records_of_both_kinds_are_read_from_a_folder_and_drawn(tmp_path: Path) -> None:
    torn = GRID[0].to_json().replace('"correct":["', '"correct":["x')
    lines = [*(r.to_json() for r in GRID), torn]
    (tmp_path / "accuracy.jsonl").write_text("".join(f"{line}\n" for line in lines))
    evidence = load([tmp_path])
    assert len(evidence.accuracy) == 4
    assert [(e.gate, "correct" in e.detail) for e in evidence.exclusions] == [("line", True)]
    found = tables.build(evidence)
    assert list(found["accuracy"]["device"].unique()) == ["2-core CPU"]
    paper = published.read(ROOT / "results" / "paper" / "published.csv")
    drawn = accuracy_figures.draw(found["accuracy"], found["accuracy_by_distance"], paper, tmp_path / "figures")
    assert drawn == list(accuracy_figures.NAMES)
    share, difference = accuracy_figures.accuracy_by_arm(found["accuracy"], paper).axes
    rows = found["accuracy"].set_index("arm").loc[[label.get_text() for label in share.get_yticklabels()]]
    assert [bar.lines[0].get_xdata()[0] for bar in share.containers] == list(rows["accuracy"]) != []
    drift = drift_figures.precision_look(drift_figures.MAIN)  # whichever arms are shown beside it
    assert len({bar.lines[0].get_color() for bar in share.containers}) == len(rows)
    for bar, arm in zip(share.containers, rows.index, strict=True):
        if arm in drift:
            assert (bar.lines[0].get_color(), bar.lines[0].get_marker()) == tuple(drift[arm].values())
    low = [bar.lines[2][0].get_segments()[0][0][0] for bar in share.containers]
    assert low == pytest.approx(list(rows["low"]))
    compared = rows[rows["difference"].notna() & (rows.index != "damaged")]
    shown = [bar.lines[0].get_xdata()[0] for bar in difference.containers]
    assert shown == list(compared["difference"])
    assert share.get_xlabel() == "items right, %"
    assert difference.get_xlabel() == "difference to shared_fp32, points"
    assert json.loads(lines[0])["schema"] == "replayssm.accuracy/1"


def without_last_item(whole: AccuracyRecord) -> AccuracyRecord:
    (all_of,) = whole.answers
    kept = {"correct": (all_of.correct[0][:-1],), "group": all_of.group[:-1], "distance": all_of.distance[:-1]}
    return replace(whole, answers=(replace(all_of, **kept),))


@pytest.mark.parametrize(
    ("rule", "parameters", "records", "verdict"),
    [
        ("small_loss", DUAL, GRID, SUPPORTED),
        ("small_loss", DUAL | {"arms": ["shared_nvfp4"]}, GRID, AGAINST),
        ("small_loss", DUAL, [GRID[0], GRID[1], record("shared_nvfp4", 110), GRID[3]], UNCLEAR),
        ("small_loss", DUAL, GRID[:3], NOT_RUN),
        ("small_loss", DUAL, [GRID[0], record("dual_fp16_sr_nvfp4", 140), *GRID[2:]], UNCLEAR),
        ("visible_loss", {"arms": ["shared_nvfp4"], "points": 2.0}, GRID, SUPPORTED),
        ("visible_loss", {"arms": ["shared_nvfp4"], "points": 2.0}, [*map(without_last_item, GRID)], NOT_RUN),
        ("visible_loss", {"arms": ["dual_fp16_sr_nvfp4"], "points": 2.0}, GRID, UNCLEAR),
        ("visible_loss", {"arms": ["shared_nvfp4"], "model_like": "qwen"}, GRID, NOT_RUN),
    ],
)
def test_claims_rest_on_arms_that_a_control_stands_behind(
    rule: str, parameters: dict[str, Any], records: list[AccuracyRecord], verdict: str
) -> None:
    found = {
        "accuracy": pd.DataFrame(accuracy.rows(records, {}), columns=accuracy.COLUMNS),
        "kernel_speedups": pd.DataFrame(columns=["model", "timing"]),
    }
    finding = RULES[rule](Question(parameters, found, Evidence(accuracy=records), "a model"))
    assert finding.verdict == verdict
    if verdict != NOT_RUN:
        assert finding.differed == "model: tiny-nemotron-h; task: recall; hardware: A CPU"
        assert "points (tiny-nemotron-h, recall, " in finding.ours
    assert accuracy_rules.MIN_ITEMS == ITEMS
