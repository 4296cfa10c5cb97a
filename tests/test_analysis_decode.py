"""Records of whole models: their gates, their table, their claims and their figure."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import COPIES, GPU, MODEL_ARMS, MODEL_STEPS, case_hash, decode_group, write

from analysis import claims, decode_figures, figures, published, rules, tables
from analysis.load import Evidence, load
from experiments.measure.record import Record

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "results" / "paper"


def processes(count: int = 3, **options: Any) -> list[list[Record]]:
    return [decode_group(replicate=n, seed=n, **options) for n in range(count)]


def evidence(folder: Path, *groups: list[Record]) -> Evidence:
    return load([write(folder, *groups)])


def test_a_model_has_a_row_with_what_is_beside_its_kernels(tmp_path: Path) -> None:
    found = tables.build(evidence(tmp_path, *processes()))
    assert len(found["kernel_speedups"]) == len(found["roofs"]) == len(found["exclusions"]) == 0
    (row,) = found["decode_speedups"].itertuples()
    assert (row.arm, row.baseline, row.verdict) == ("replay/triton", "stored/triton", "FASTER")
    assert row.speedup == pytest.approx(1.4, rel=0.02)
    assert row.baseline_ms / row.step_ms == pytest.approx(1.4, rel=0.05)
    assert row.tokens_per_s == pytest.approx(256 / row.step_ms * 1e3, rel=1e-3)
    assert (row.state_share, row.baseline_state_share) == (0.5, 0.75)
    assert row.rest_ms == pytest.approx(row.step_ms / 2, rel=1e-3)
    assert (row.products_ms, row.peak_gib) == (2.5, 60)
    assert row.rest_floor_ms == pytest.approx(2.5 + 1e3 / 2**12, rel=1e-3)
    assert (row.rows_that_differ, row.agreement_length, row.logprob_drift) == (3, 5, 0.01)
    assert (row.weights, row.context) == ("random", 16)


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"layer_steps_per_sample": MODEL_STEPS - 1}, "63 model steps a sample at interval length 16; 64 at 16 asked"),
        ({"timing_used": {"interval_length": 8}}, "at interval length 8; 64 at 16 asked"),
        ({"decode": {"generations_ns": [[1, 2]]}}, "samples are not the differences of the recorded generations"),
        ({"decode": {}}, "samples are not the differences of the recorded generations"),
    ],
)
def test_samples_are_differences_by_whole_cycles(tmp_path: Path, changes: dict[str, Any], detail: str) -> None:
    records = [dataclasses.replace(r, **changes) for r in decode_group()]
    found = evidence(tmp_path, records)
    assert found.records == []
    assert {e.gate for e in found.exclusions} == {"whole cycles"}
    assert all(e.detail.endswith(detail) for e in found.exclusions)


def test_a_length_that_no_cycle_divides_is_refused(tmp_path: Path) -> None:
    found = evidence(tmp_path, decode_group(fields={"steps": 63}))
    assert {e.gate for e in found.exclusions} == {"whole cycles"}


def evaluated(found: Evidence) -> dict[str, Any]:
    built = tables.build(found)
    table = claims.evaluate(claims.read(PAPER / "claims.toml"), built, found, ROOT)
    return {row.id: row for row in table.itertuples()}


def test_claims_of_whole_models_rest_on_their_own_table(tmp_path: Path) -> None:
    everything = [
        *processes(),
        *processes(model="qwen3_5_4b"),
        *processes(batch=1, arms=MODEL_ARMS | {"replay/triton": 1.0}),
    ]
    found = evaluated(evidence(tmp_path, *everything))
    whole, one = found["decode-range"], found["batch-one-decode"]
    assert whole.verdict == rules.SUPPORTED
    assert "nemotron_3_nano_4b, batch 256" in whole.ours
    assert "card: NVIDIA H200; weights: random, tokens forced; models not run: " in whole.differed
    assert one.verdict == rules.SUPPORTED
    assert "batch 1" in one.ours
    assert found["kernel-range"].verdict == rules.NOT_RUN


@pytest.mark.parametrize("fields", [{"context": 32768}, {"blocks": 8}])
def test_long_contexts_and_parts_of_a_model_bear_on_no_claim(tmp_path: Path, fields: dict[str, int]) -> None:
    assert evaluated(evidence(tmp_path, *processes(fields=fields)))["decode-range"].verdict == rules.NOT_RUN


def test_the_largest_part_of_a_step_is_told_at_the_longest_context(tmp_path: Path) -> None:
    short = processes(fields={"context": 1024})
    found = evaluated(evidence(tmp_path / "short", *short))["ssm-dominates-to-100k"]
    assert (found.verdict, found.ours) == (rules.UNCLEAR, "0.75 at 1024 tokens (nemotron_3_nano_4b, batch 256)")
    assert found.note == "nemotron_3_nano_4b: no longer context run at batch 32 or more"
    long = processes(fields={"context": 100_000})
    found = evaluated(evidence(tmp_path / "long", *short, *long))["ssm-dominates-to-100k"]
    assert (found.verdict, found.note) == (rules.SUPPORTED, "")
    small = [[replace(r, decode=r.decode | {"state_share": 0.3}) for r in records] for records in long]
    found = evaluated(evidence(tmp_path / "small", *small))["ssm-dominates-to-100k"]
    assert found.verdict == rules.UNCLEAR
    cut = processes(fields={"context": 100_000, "blocks": 8})
    assert evaluated(evidence(tmp_path / "cut", *cut))["ssm-dominates-to-100k"].verdict == rules.NOT_RUN


def test_random_weights_reproduce_nothing_even_on_the_papers_card(tmp_path: Path) -> None:
    card = GPU | {"name": "NVIDIA H100 80GB HBM3"}
    found = evaluated(evidence(tmp_path, *processes(device=card)))["decode-range"]
    assert found.verdict == rules.SUPPORTED
    mine = processes(device=card, fields={"weights": "/models/nano"})
    assert evaluated(evidence(tmp_path / "own", *mine))["decode-range"].verdict == rules.PARTLY


def test_depths_are_carried_to_the_whole_model(tmp_path: Path) -> None:
    """2 ms and 0.5 ms a block; the whole, of 32 blocks, was measured with 3 % more."""

    def at(blocks: int, step_ms: float) -> list[list[Record]]:
        fields = {"blocks": blocks, "architecture": {"num_layers": 32}}
        step_ns = step_ms * 1e6 * MODEL_STEPS / (16 * COPIES)
        return processes(model="qwen3_5_4b", noise=1e-6, step_ns=step_ns, fields=fields)

    alone = [*at(8, 6.0), *at(24, 14.0)]
    built = tables.build(evidence(tmp_path / "parts", *alone))["decode_depths"]
    assert list(built["arm"]) == ["replay/triton", "stored/triton"]
    row = built.iloc[1]
    assert (row["depths"], row["blocks"]) == ("8, 24", 32)
    assert (row["block_ms"], row["fixed_ms"], row["extrapolated_ms"]) == pytest.approx((0.5, 2.0, 18.0), rel=0.1)
    assert built["measured_ms"].isna().all()
    told = evaluated(evidence(tmp_path / "beside", *alone, *processes()))["decode-range"]
    assert re.search(r"; qwen3_5_4b: 1\.\d\dx, extrapolated from 8, 24 of 32 blocks$", told.note), told.note
    assert "qwen3_5_4b" not in told.ours
    both = tables.build(evidence(tmp_path / "both", *alone, *at(0, 18.0 * 1.03)))["decode_depths"].iloc[1]
    assert both["measured_ms"] == pytest.approx(18.54, rel=0.05)
    assert both["error"] == pytest.approx(-0.029, abs=0.05)
    assert tables.build(evidence(tmp_path / "one", *at(8, 6.0)))["decode_depths"].empty


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tables of three batches, one of them at two contexts, and of a batch that failed."""
    groups = [g for batch in (1, 64, 256) for g in processes(2, batch=batch)]
    groups += processes(2, batch=64, fields={"context": 4096}, arms=MODEL_ARMS | {"replay/triton": 0.5})
    failed = {"failed": {"replay/triton": "oom"}, "aa_arm": ""}
    groups += [decode_group(batch=512, **failed), decode_group(batch=128, fields={"context": 32}, **failed)]
    return tables.build(evidence(tmp_path_factory.mktemp("swept"), *groups))


PUBLISHED = published.read(PAPER / "published.csv")


def test_the_figure_shows_models_beside_the_published_curves(swept: dict[str, Any]) -> None:
    figure = figures.decode_by_batch(swept["decode_speedups"], swept["failures"], PUBLISHED)
    (ax,) = figure.axes
    heights = [y for line in ax.get_lines() for y in line.get_ydata()]
    assert 1.47 in heights  # published, batch 256
    assert max(heights) < 1.8  # the longer context, twice as fast, is not drawn
    assert any("random weights, context 16" in text.get_text() for text in ax.texts)
    assert [text.get_text() for text in ax.texts].count("oom") == 1  # of the other context none
    assert "512" in [label.get_text() for label in ax.get_xticklabels()]
    assert "allowed by measured bandwidths" not in [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_parts_of_a_step_add_up(swept: dict[str, Any]) -> None:
    rows = swept["decode_speedups"].assign(products_ms=0.1)
    (ax,) = decode_figures.step_by_part(rows, PUBLISHED).axes
    at = rows[(rows["context"] == 16) & (rows["batch_size"] == 256)].iloc[0]
    tops = [patch.get_y() + patch.get_height() for patch in ax.patches]
    stored, replay = tops[-6:-3], tops[-3:]
    assert stored == pytest.approx(
        [0.75 * at["baseline_ms"], 0.75 * at["baseline_ms"] + 0.1, at["baseline_ms"]], rel=1e-3
    )
    assert replay == pytest.approx([0.5 * at["step_ms"], 0.5 * at["step_ms"] + 0.1, at["step_ms"]], rel=1e-3)
    assert len(tops) == 3 * 2 * 3  # parts, arms, batches; of the longer context none
    assert [bool(patch.get_hatch()) for patch in ax.patches[-6:]] == [True] * 3 + [False] * 3
    told = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert {"left, hatched: stored", "right: replay"} < {*told}
    assert ax.get_ylabel() == "milliseconds a step"
    cut = rows.assign(products_ms=1e3)
    (ax,) = decode_figures.step_by_part(cut, PUBLISHED).axes
    assert max(patch.get_y() + patch.get_height() for patch in ax.patches) == pytest.approx(max(tops))


def test_share_and_speedup_are_shown_by_context_where_there_are_several(swept: dict[str, Any]) -> None:
    several = decode_figures.several_contexts(swept["decode_speedups"])
    assert set(several["batch_size"]) == {64}
    lost = swept["failures"].assign(batch_size=64, context=[512, 65536])
    figure = decode_figures.decode_by_context(several, lost, PUBLISHED)
    share, speedup = figure.axes
    assert [list(line.get_ydata()) for line in share.get_lines()[:2]] == [[0.75, 0.75], [0.5, 0.5]]
    assert [label.get_text() for label in speedup.get_xticklabels()] == ["64K", "4K", "512", "16"]
    assert [text.get_text() for text in speedup.texts].count("oom") == 2
    assert [c.has_yerr for c in speedup.containers] == [True]
    assert "batch 64" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert [decode_figures.short(n) for n in (16, 8192, 100_000, 131_072)] == ["16", "8K", "100K", "128K"]


def test_the_hash_of_a_case_covers_what_only_models_have() -> None:
    assert case_hash(decode_group()[0].case) == decode_group()[0].case_hash
    assert decode_group()[0].case_hash != decode_group(fields={"context": 17})[0].case_hash
