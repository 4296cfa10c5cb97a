"""Claims about speculative decoding that kernels' windows answer: what is written, what left out, what of it gains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from records import COPIES, write
from window_records import ARMS, windows

from analysis import claims, report, rules, tables
from analysis.load import load
from experiments.measure.record import Record

ROOT = Path(__file__).resolve().parents[1]


def evaluated(folder: Path, *groups: list[Record]) -> dict[str, Any]:
    found = load([write(folder, *groups)])
    assert {e.gate for e in found.exclusions} <= {"status"}, found.exclusions
    table = claims.evaluate(claims.read(ROOT / "results/paper/claims.toml"), tables.build(found), found, ROOT)
    return {row.id: row for row in table.itertuples()}


def test_one_run_parts_the_gain(tmp_path: Path) -> None:
    found = evaluated(tmp_path / "a", *windows())["speculative-gain-cause"]
    assert found.verdict == rules.SUPPORTED
    factors = r"(\S+) \[.*\] from the other writes left out, (\S+) \[.*\] from the rest, (\S+) \[.*\] together "
    told = re.fullmatch(factors + r"\(qwen3_5_122b, batch 256, T = 4\)", found.ours)
    assert told
    assert [float(x) for x in told.groups()] == pytest.approx([2.5, 2.0, 5.0], rel=0.02)
    assert "bytes alone would give 2.50 and 1.60" in found.note
    for part in ("card: NVIDIA H200", "batch: 256", "nemotron_3_super_120b", "no engine"):
        assert part in found.differed
    assert found.records == "records.jsonl"


@pytest.mark.parametrize(
    ("name", "options", "verdict"),
    [
        ("the rest gains no more than its bytes", {"arms": ARMS | {"verify/triton": 0.25}}, rules.UNCLEAR),
        ("the rest gains less than its bytes", {"arms": ARMS | {"verify/triton": 0.32}}, rules.UNCLEAR),
        ("neither gains", {"arms": ARMS | {"oracle/triton": 1.2, "verify/triton": 1.4}}, rules.AGAINST),
        ("one process", {"processes": 1}, rules.UNCLEAR),
        ("no oracle", {"arms": {"snapshots/triton": 1.0, "verify/triton": 0.2}}, rules.NOT_RUN),
        ("another window", {"fields": {"window": 6}, "layer_steps_per_sample": 4 * COPIES}, rules.NOT_RUN),
        ("a small batch", {"fields": {"batch_size": 8}}, rules.NOT_RUN),
    ],
)
def test_a_gain_of_which_less_is_known(tmp_path: Path, name: str, options: dict[str, Any], verdict: str) -> None:
    assert evaluated(tmp_path, *windows(**options))["speculative-gain-cause"].verdict == verdict, name


def test_factors_of_different_runs_are_not_put_together(tmp_path: Path) -> None:
    halves = [{"snapshots/triton": 1.0, "oracle/triton": 0.4, "snapshots/cpu": 3.0}]
    halves.append({"oracle/triton": 0.4, "verify/triton": 0.2, "verify/cpu": 3.0})
    groups = [g for arms in halves for g in windows(arms=arms, aa_arm="oracle/triton")]
    assert evaluated(tmp_path, *groups)["speculative-gain-cause"].verdict == rules.NOT_RUN


def test_the_largest_batch_and_the_paper_s_count(tmp_path: Path) -> None:
    small = windows(arms=ARMS | {"verify/triton": 0.1}, fields={"batch_size": 64})
    found = evaluated(tmp_path, *small, *windows(), *windows("nemotron_3_super_120b", fields={"batch_size": 512}))
    told = found["speculative-gain-cause"].ours
    assert "qwen3_5_122b, batch 256" in told
    assert "nemotron_3_super_120b, batch 512" in told
    assert "batch 64" not in told


def test_the_oracle_is_nobody_s_baseline(tmp_path: Path) -> None:
    built = tables.build(load([write(tmp_path, *windows())]))
    assert set(built["window_speedups"]["baseline"]) == {"snapshots/triton"}
    pairs = {(r.arm, r.against): r for r in built["window_pairs"].itertuples()}
    assert {arm for arm, _ in pairs} == {"oracle/triton", "verify/triton"}
    assert pairs["verify/triton", "oracle/triton"].ideal_roof == pytest.approx(1.6)
    assert pairs["oracle/triton", "snapshots/triton"].window == 4
    assert pairs["oracle/triton", "snapshots/triton"].ideal_bytes == pytest.approx(2.5)


def test_checkpoints_that_stay_as_they_were(tmp_path: Path) -> None:
    """Of five windows a cycle, four flush nothing; both checks compare two rows of one copy."""
    found = evaluated(tmp_path / "a", *windows())
    unchanged = found["output-only-verification"]
    assert unchanged.verdict == rules.SUPPORTED
    assert unchanged.ours.startswith("48 checkpoints unchanged bit for bit by a window (3 records, gdn)")
    assert "0.20 of the state bytes read are written" in unchanged.ours
    back = found["rollback-by-cursor"]
    assert (back.verdict, back.ours) == (rules.SUPPORTED, "60 tokens taken back in 3 records (gdn)")
    sizes = found["no-snapshots"]
    assert sizes.verdict == rules.SUPPORTED
    assert sizes.ours == "0.20 states written a step instead of 4 (kernels, T = 4)"
    assert "computed from bytes" in sizes.note
    stepped = evaluated(tmp_path / "b", *windows(changed=7, failed={"verify/triton": "incorrect"}))
    assert stepped["output-only-verification"].verdict == rules.AGAINST
    assert stepped["rollback-by-cursor"].verdict == rules.AGAINST


def test_windows_that_always_flush_show_no_checkpoint_left_alone(tmp_path: Path) -> None:
    fields = {"interval_length": 4, "window": 4}
    found = evaluated(tmp_path, *windows(fields=fields, layer_steps_per_sample=COPIES))
    assert found["output-only-verification"].verdict == rules.NOT_RUN
    assert found["rollback-by-cursor"].verdict == rules.SUPPORTED


def test_matrix_instructions_come_from_the_compiled_kernels(tmp_path: Path) -> None:
    """Sharing products needs a record that tells of it, of every family with grouped heads."""
    alone = evaluated(tmp_path / "a", *windows())["tensor-core-verification"]
    assert alone.verdict == rules.UNCLEAR
    assert "snapshots: none; heads for which a program forms the key-query products: 1 (gdn)" in alone.ours
    shared = evaluated(tmp_path / "b", *windows(heads=4), *windows("nemotron_3_super_120b", heads=2))
    assert shared["tensor-core-verification"].verdict == rules.SUPPORTED
    assert "products: 4 (gdn); heads" in shared["tensor-core-verification"].ours


def test_kernels_without_matrix_instructions_contradict(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "results"
    folder.mkdir(parents=True)
    (tmp_path / "root" / "experiments").symlink_to(ROOT / "experiments")
    table = pd.read_csv(ROOT / "results" / "triton_resources.csv")
    table.loc[table["step"] == "verify", "tensor_instructions"] = 0
    table.to_csv(folder / "triton_resources.csv", index=False)
    found = load([write(tmp_path / "records", *windows())])
    for root, verdict in ((tmp_path / "root", rules.AGAINST), (tmp_path / "none", rules.NOT_RUN)):
        rows = claims.evaluate(claims.read(ROOT / "results/paper/claims.toml"), tables.build(found), found, root)
        assert rows.set_index("id").loc["tensor-core-verification", "verdict"] == verdict


def test_what_windows_differ_in_stands_with_speculative_decoding(tmp_path: Path) -> None:
    evidence = load([write(tmp_path, *windows())])
    built = tables.build(evidence)
    table = claims.evaluate(claims.read(ROOT / "results" / "paper" / "claims.toml"), built, evidence, ROOT)
    page = report.render(built, table, [], evidence, linked=False)
    kernel, windowed, *_ = page.split("<section>")[1:]
    told = "models not run: nemotron_3_nano_4b"
    assert (told in kernel, told in windowed) == (False, True)
    assert (" window=4" in kernel, " window=4" in windowed) == (False, True)
    compiled = table.assign(differed="compiled, not run; kernels: this project's")
    assert "compiled, not run; kernels: this project" in report.render(built, compiled, [], evidence, linked=False)
