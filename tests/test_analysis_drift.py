"""Tables, gates and claims of precisions over documents, from records whose KL follows known laws."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from drift_records import AGAIN, CONTROL, LAWS, drift_group
from records import group, write

from analysis import claims, drift_figures, published, style, tables
from analysis.load import Evidence, load

ROOT = Path(__file__).parents[1]


def changed(records: list[Any], arm: str, **fields: Any) -> list[Any]:
    return [dataclasses.replace(r, **fields) if r.arm == arm else r for r in records]


def loaded(folder: Path, *groups: Any) -> Evidence:
    return load([write(folder, *groups)])


def row(evidence: Evidence, table: str, **wanted: Any) -> Any:
    frame = tables.build(evidence)[table]
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    (found,) = frame.itertuples()
    return found


def test_means_slopes_and_ratios_are_those_of_the_laws(tmp_path: Path) -> None:
    evidence = loaded(tmp_path, drift_group())
    assert not evidence.exclusions
    assert not evidence.records
    dual = row(evidence, "drift_kl", arm="dual_fp32_nvfp4")
    assert dual.kl == pytest.approx(1e-3 * 1.015, rel=1e-3)
    assert dual.kl_low < dual.kl < dual.kl_high
    assert (dual.documents, dual.tokens, dual.update, dual.read) == (4, 16384, "fp32", "nvfp4")
    assert dual.slope == pytest.approx(0, abs=1e-9)
    shared = row(evidence, "drift_kl", arm="shared_nvfp4")
    assert shared.slope == pytest.approx(0.4, abs=1e-3)
    assert shared.slope_low <= shared.slope <= shared.slope_high
    assert dual.agreement == shared.agreement == dual.perplexity_ratio == dual.last_over_flat == 1
    assert dual.bits_per_byte == pytest.approx(2 / 3 / 0.6931, rel=1e-3)
    assert (dual.state_error, dual.read_error) == (3.5e-3, 3.5e-3)
    ratio = row(evidence, "drift_ratios", arm="shared_nvfp4")
    assert ratio.ratio == pytest.approx(12288**0.4, rel=1e-2)
    assert ratio.low == ratio.ratio == ratio.high  # documents differ, their ratio does not
    positions = tables.build(evidence)["drift_positions"]
    line = positions[positions["arm"] == "shared_nvfp4"]
    assert all(r.kl == pytest.approx(1.015e-3 * r.position**0.4, rel=0.02) for r in line.itertuples())
    heads = tables.build(evidence)["drift_heads"]
    assert heads[heads["arm"] == "shared_nvfp4"]["update"].tolist() == [3e-3, 4e-3]


def test_groups_of_one_case_make_one_table_and_the_newest_counts(tmp_path: Path) -> None:
    old = drift_group({"shared_nvfp4": (9.0, 0.0)})
    new = drift_group({"shared_nvfp4": (1e-3, 0.0)}, group="d2", started="2026-11-30T05:00:00+00:00")
    more = drift_group({"dual_fp32_nvfp4": (1e-4, 0.0)}, group="d3")
    evidence = loaded(tmp_path, old, new, more)
    assert {e.gate for e in evidence.exclusions} == {"superseded"}
    assert {e.group for e in evidence.exclusions} == {"d1"}
    assert row(evidence, "drift_ratios", arm="shared_nvfp4").ratio == pytest.approx(10)
    both = {"dual_fp32_nvfp4": (1e-5, 0.0), "shared_fp8": (1e-3, 0.0)}
    last = drift_group(both, group="d4", started="2026-11-30T06:00:00+00:00")
    for number, order in enumerate(([new, more, last], [last, more, new])):
        found = loaded(tmp_path / str(number), *order)
        assert row(found, "drift_ratios", arm="shared_nvfp4").ratio == pytest.approx(100)


def test_numbers_that_another_run_gives_again_are_told_once(tmp_path: Path) -> None:
    """Runs of different arms share some; of a run whose numbers differ all rows stay."""
    alone = tables.build(loaded(tmp_path / "one", drift_group()))["drift_ratios"]
    more = drift_group(LAWS | {"shared_fp8": (1e-4, 0.0)}, group="d2")
    found = tables.build(loaded(tmp_path / "two", drift_group(), more))["drift_ratios"]
    assert found.drop(columns="groups").equals(alone.drop(columns="groups"))


@pytest.mark.parametrize(
    ("spoil", "gate", "told"),
    [
        (lambda g: g[:-1], "incomplete", "an arm lacks a document"),
        (lambda g: [*g, dataclasses.replace(g[0], elapsed_s=2.0)], "incomplete", "has one twice"),
        (lambda g: drift_group(noise=1e-7), "noise floor", "shared_fp32 has a mean KL of 1e-07; at most 1e-08"),
        (lambda g: changed(g, AGAIN, kl=g[-1].kl), "noise floor", f"{AGAIN} has a mean KL"),
        (lambda g: changed(g, "shared_fp32@1", kl=g[-1].kl), "noise floor", "at most 0"),
        (lambda g: [dataclasses.replace(r, case=r.case | {"seed": 1}) for r in g], "case hash", "that of the case is"),
        (lambda g: changed(g, CONTROL, case=g[0].case | {"seed": 1}), "group", "records differ in case"),
        (lambda g: changed(g, CONTROL, status="error", message="x", kl=()), "incomplete", "an arm failed"),
    ],
)
def test_what_a_gate_refuses_is_in_no_table(tmp_path: Path, spoil: Any, gate: str, told: str) -> None:
    evidence = loaded(tmp_path, spoil(drift_group()))
    assert not evidence.drift
    assert any(e.gate == gate and told in e.detail for e in evidence.exclusions)
    assert tables.build(evidence)["drift_kl"].empty


def test_lines_of_both_schemas_share_a_file(tmp_path: Path) -> None:
    folder = write(tmp_path, group(), drift_group())
    (file,) = folder.glob("*.jsonl")
    damaged = json.loads(drift_group()[0].to_json()) | {"kl": [1.0]}
    file.write_text(file.read_text() + json.dumps(damaged, separators=(",", ":")) + "\n")
    evidence = load([folder])
    assert len(evidence.records) == 4
    assert len(evidence.drift) == 24
    (exclusion,) = evidence.exclusions
    assert (exclusion.gate, exclusion.detail) == ("line", "kl does not hold a number a bucket")


@pytest.mark.parametrize(
    ("laws", "size", "expected"),
    [
        ({}, {}, ["supported", "supported", "supported"]),
        ({"dual_fp32_nvfp4": (1e-3, 0.3)}, {}, ["supported", "contradicted", "unclear"]),
        ({"shared_nvfp4": (1e-4, 0.0)}, {}, ["contradicted", "supported", "contradicted"]),
        ({}, {"documents": 1}, ["unclear", "unclear", "unclear"]),
        ({}, {"tokens": 2048}, ["unclear", "unclear", "unclear"]),
    ],
)
def test_claims_follow_the_intervals(tmp_path: Path, laws: Any, size: Any, expected: list[str]) -> None:
    of_arms = {"shared_nvfp4": (1e-3, 0.4), "dual_fp32_nvfp4": (1e-3, 0.0)} | laws
    evidence = loaded(tmp_path, drift_group(of_arms, **size))
    every = claims.read(ROOT / "results" / "paper" / "claims.toml")
    table = claims.evaluate(every, tables.build(evidence), evidence, ROOT).set_index("id")
    ids = ("shared-copy-compounds", "read-errors-stay", "pg19-kl")
    assert [table.loc[name, "verdict"] for name in ids] == [f"{e} on an analogue" for e in expected]
    assert "model: tiny-qwen3.5; text: books, not PG-19; card: NVIDIA H200" in table.loc["pg19-kl", "differed"]


def test_a_claim_rests_on_the_bound_of_an_interval(tmp_path: Path) -> None:
    """Of four documents one grows: the slope of all, 0.08, is within 0.1, and its interval is not."""
    flat, grown = (drift_group({"dual_fp32_nvfp4": (1e-3, power)}) for power in (0.0, 0.15))
    mixed = [
        b if b.arm == "dual_fp32_nvfp4" and b.document["number"] == 0 else a for a, b in zip(flat, grown, strict=True)
    ]
    evidence = loaded(tmp_path, mixed)
    found = row(evidence, "drift_kl", arm="dual_fp32_nvfp4")
    assert found.slope < 0.1 < found.slope_high
    every = claims.read(ROOT / "results" / "paper" / "claims.toml")
    table = claims.evaluate(every, tables.build(evidence), evidence, ROOT).set_index("id")
    assert table.loc["read-errors-stay", "verdict"] == "unclear on an analogue"


def test_a_single_document_is_drawn_where_a_model_has_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    monkeypatch.setattr(style, "save", lambda figure, folder, name: drawn.update({name: figure}) or plt.close(figure))
    found = tables.build(loaded(tmp_path, drift_group()))
    one = {name: frame.assign(documents=1) for name, frame in found.items() if "documents" in frame}
    both = {name: pd.concat([found[name], frame]) for name, frame in one.items()}
    paper = published.read(ROOT / "results" / "paper" / "published.csv")
    for built, counts in ((found, ["4 x"]), (found | one, ["1 x"]), (found | both, ["4 x"])):
        assert "kl_by_bytes" in drift_figures.draw(built, paper, tmp_path)
        headings = [ax.texts[0].get_text() for ax in drawn["kl_by_bytes"].axes]
        assert [text[:3] for text in headings] == counts


def test_figures_draw_every_arm_with_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(style, "save", lambda figure, folder, name: drawn.update({name: figure}) or plt.close(figure))
    built = tables.build(loaded(tmp_path, drift_group()))
    states = built["drift_states"].assign(update=lambda frame: frame["update"] * 2)  # so that copies differ
    drift_figures.draw(built | {"drift_states": states}, published.read(ROOT / "results/paper/published.csv"), tmp_path)
    for name, frame, what, value, dash in (
        ("kl_by_position", built["drift_positions"], "KL, nats", "kl", "-"),
        ("state_error_by_position", states, "state error", "update", "-"),
        ("state_error_by_position", states, "state error", "read", ":"),
    ):
        (ax,) = drawn[name].axes
        lines = [list(line.get_ydata()) for line in ax.lines if line.get_linestyle() == dash]
        for _, rows in frame[frame[value] > 0].groupby("arm"):
            assert list(rows.sort_values("position")[value]) in lines
        assert ax.get_ylabel() == what
    (ax,) = drawn["kl_by_bytes"].axes
    tops = sorted(float(bars.lines[2][0].get_segments()[0][1][1]) for bars in ax.containers)
    shown = built["drift_kl"][built["drift_kl"]["arm"].isin(drift_figures.MAIN)]
    assert len(shown) > 1
    assert tops == pytest.approx(sorted(shown["kl_high"]))
