"""Records of speculative decoding with whole models: their gates, their table, their claims and their figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from records import speculative_group, write

from analysis import claims, published, rules, speculative_figures, style, tables
from analysis.load import Evidence, load
from experiments.measure.record import Record

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "results" / "paper"


def processes(count: int = 3, **options: Any) -> list[list[Record]]:
    return [speculative_group(replicate=n, seed=n, **options) for n in range(count)]


def evidence(folder: Path, *groups: list[Record]) -> Evidence:
    return load([write(folder, *groups)])


def changed(records: list[Record], arm: str, **found: Any) -> list[Record]:
    return [dataclasses.replace(r, decode=r.decode | found) if r.arm == arm else r for r in records]


def test_arms_are_compared_by_their_tokens(tmp_path: Path) -> None:
    built = tables.build(evidence(tmp_path, *processes()))
    rows = {row.arm: row for row in built["speculative_throughput"].itertuples()}
    verify, snapshots, plain = (rows[f"{kind}/triton"] for kind in ("verify", "snapshots", "replay"))
    assert verify.over_snapshots == pytest.approx(2, rel=0.02)
    assert verify.over_plain == pytest.approx(3.2 / 2, rel=0.02)
    assert snapshots.over_plain == pytest.approx(3.2 / 4, rel=0.02)
    assert plain.over_snapshots == pytest.approx(4 / 3.2, rel=0.02)
    assert verify.verdict == "FASTER"
    assert pd.isna(snapshots.verdict)
    assert verify.tokens_per_s == pytest.approx(256 * 3.2 / verify.step_ms * 1e3, rel=1e-3)
    assert (verify.request_mib, verify.conv_mib) == (45, 1)
    assert verify.requests_in_100_gb > 3 * snapshots.requests_in_100_gb
    assert (verify.window, verify.drafter, verify.acceptance) == (4, "controlled", 0.8528)
    assert len(built["decode_speedups"]) == len(built["exclusions"]) == 0


BESIDE_SNAPSHOTS = {"snapshots/triton": 2.0, "verify/triton": 1.0}
BESIDE_PLAIN = {"replay/triton": 0.5, "verify/triton": 1.0}


def in_pairs(**options: Any) -> list[list[Record]]:
    """Arms that do not fit beside each other, in processes of their own; those of the second pair run at another
    speed of the machine."""
    plain = {"arms": BESIDE_PLAIN, "aa_arm": "replay/triton", "step_ns": 3e7 / 48}
    return [*processes(arms=BESIDE_SNAPSHOTS, **options), *processes(**plain | options)]


def test_arms_that_were_run_in_pairs_are_compared_within_each(tmp_path: Path) -> None:
    built = tables.build(evidence(tmp_path, *in_pairs()))
    table = built["speculative_throughput"]
    assert list(table["arm"]) == ["replay/triton", "snapshots/triton", "verify/triton"]
    plain, snapshots, verify = table.itertuples()
    assert verify.over_snapshots == pytest.approx(2, rel=0.02)
    assert verify.over_plain == pytest.approx(3.2 / 2, rel=0.02)
    assert (verify.processes, verify.rounds, verify.verdict) == (3, 60, "FASTER")
    assert len(verify.groups.split()) == 6
    assert snapshots.over_plain == pytest.approx(3.2 / 4, rel=0.03)
    assert snapshots.plain_low < snapshots.over_plain < snapshots.plain_high
    assert snapshots.plain_high / snapshots.plain_low > verify.plain_high / verify.plain_low
    assert "over plain by way of verify/triton, from two runs" in snapshots.remarks
    assert "by way of" not in verify.remarks + plain.remarks
    assert pd.isna(plain.over_snapshots)
    beside = tables.build(evidence(tmp_path / "beside", *in_pairs(), *processes()))["speculative_throughput"]
    assert len(beside) == 3
    assert "by way of" not in "".join(beside["remarks"])


def test_pairs_answer_the_claims_and_draw_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 512 snapshots do not fit: the largest batch at which both ran counts."""
    large = {"batch": 512, "aa_arm": "verify/triton"}
    lost = [speculative_group(arms=BESIDE_SNAPSHOTS, failed={"snapshots/triton": "oom"}, **large)]
    several = [*in_pairs(), *in_pairs(batch=64), *lost, *processes(arms=BESIDE_PLAIN, **large)]
    found = evidence(tmp_path, *several)
    answers = evaluated(found)
    for name in ("speculative-range", "throughput-doubled"):
        assert "(nemotron_3_nano_4b, batch 256, T = 4, controlled drafts, 3.2 tokens a step)" in answers[name].ours
        assert answers[name].differed.startswith("card: NVIDIA H200; weights: random, tokens forced; batch: 256")
    assert answers["speculative-range"].verdict == rules.SUPPORTED
    assert answers["no-snapshots"].verdict == rules.SUPPORTED
    built = tables.build(found)
    drawn: dict[str, pd.DataFrame] = {}
    for name in ("with_drafts", "by_window", "requests"):
        make = getattr(speculative_figures, name)
        monkeypatch.setattr(
            speculative_figures, name, lambda r, *rest, n=name, m=make: drawn.update({n: r}) or m(r, *rest)
        )
    paper = published.read(PAPER / "published.csv")
    folder = tmp_path / "figures"
    assert speculative_figures.draw(built["speculative_throughput"], built["failures"], paper, folder) == list(
        speculative_figures.NAMES
    )
    points = {(r.kind, r.batch_size) for r in drawn["with_drafts"].itertuples()}
    assert points == {("verify", 64), ("snapshots", 64), ("verify", 256), ("snapshots", 256), ("verify", 512)}
    assert [*drawn["by_window"]["batch_size"]] == [64, 256]
    assert {*drawn["requests"]["kind"]} == {"replay", "snapshots", "verify"}


def test_a_verdict_is_no_surer_than_the_same_arm_timed_twice(tmp_path: Path) -> None:
    """Replay is twice as fast as snapshots here, and 4 % faster there."""
    near = {"replay/triton": 0.5, "snapshots/triton": 2.0, "verify/triton": 1.92}
    for name, noise, options in (("loud", 1.5, {}), ("near", 1.2, {"arms": near})):
        found = []
        for records in processes(**options):
            for number, record in enumerate(records):
                again = [(int(ns * noise ** (1 if n % 2 else -1)),) for n, (ns,) in enumerate(record.samples_ns)]
                if record.again_samples_ns:
                    records[number] = dataclasses.replace(record, again_samples_ns=tuple(again))
            found.append(records)
        rows = tables.build(evidence(tmp_path / name, *found))["speculative_throughput"]
        verify = next(row for row in rows.itertuples() if row.arm == "verify/triton")
        assert verify.low > 1
        assert verify.verdict == "AMBIGUOUS", name


def test_arms_that_accept_otherwise_are_excluded(tmp_path: Path) -> None:
    for name, unmatched, tokens, standing in (("no", 0, 3.1, 0), ("mean", 0, 3.2, 0), ("some", 9, 3.1, 3)):
        other = {"accepted_digest": "f" * 16, "tokens_per_step": tokens}
        group = changed(speculative_group(), "verify/triton", rows_unmatched=unmatched, **other)
        found = evidence(tmp_path / name, group)
        assert len(found.records) == standing
        gates = {e.gate for e in found.exclusions}
        assert gates == (set() if standing else {"acceptance"})
    assert "3.1 to 3.2 tokens a step, 0 rows differ" in load([tmp_path / "no"]).exclusions[0].detail


def evaluated(found: Evidence) -> dict[str, Any]:
    table = claims.evaluate(claims.read(PAPER / "claims.toml"), tables.build(found), found, ROOT)
    return {row.id: row for row in table.itertuples()}


def test_claims_rest_on_drafts(tmp_path: Path) -> None:
    found = evaluated(evidence(tmp_path / "a", *processes(), *processes(model="qwen3_5_4b", batch=64)))
    wide = found["speculative-range"]
    assert wide.verdict == rules.SUPPORTED
    assert wide.ours.startswith("2.0")
    assert "(nemotron_3_nano_4b, batch 256, T = 4, controlled drafts, 3.2 tokens a step)" in wide.ours
    assert "weights" in wide.differed
    back = found["rollback-by-cursor"]
    assert back.verdict == rules.SUPPORTED
    assert back.ours == "360 tokens taken back in 6 records (gdn, mamba2)"
    assert found["no-snapshots"].verdict == rules.SUPPORTED
    assert found["no-snapshots"].ours.startswith("3.58 times as many requests")
    fast = {"replay/triton": 0.5, "snapshots/triton": 2.0, "verify/triton": 0.9}
    several = [*processes(arms=fast), *processes(window=5), *processes(batch=512, fields={"blocks": 8})]
    several += processes(window=8, fields={"acceptance": 0.9})  # of which the paper says nothing
    answers = evaluated(evidence(tmp_path / "several", *several))
    assert "T = 8" not in answers["no-snapshots"].ours
    worse = answers["speculative-range"]
    assert worse.ours.startswith("2.0")
    assert "batch 256, T = 5" in worse.ours
    slow = {"replay/triton": 0.5, "snapshots/triton": 2.0, "verify/triton": 1.5}
    assert evaluated(evidence(tmp_path / "b", *processes(arms=slow)))["speculative-range"].verdict == rules.UNCLEAR
    fast = {"replay/triton": 0.5, "snapshots/triton": 2.0, "verify/triton": 0.7}
    above = evaluated(evidence(tmp_path / "c", *processes(arms=fast)))["speculative-range"]
    assert "above the range: check the baseline" in above.note
    assert above.verdict == rules.UNCLEAR
    wrong = speculative_group(failed={"verify/triton": "incorrect"})
    assert evaluated(evidence(tmp_path / "d", wrong))["rollback-by-cursor"].verdict == rules.AGAINST


def test_figures_show_ours_and_the_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = speculative_group(batch=512, failed={"snapshots/triton": "oom"}, aa_arm="verify/triton")
    several = [*processes(), *processes(batch=64), *processes(window=8, fields={"acceptance": 0.9}), lost]
    built = tables.build(evidence(tmp_path, *several))
    rows, failures = built["speculative_throughput"], built["failures"]
    assert list(failures["window"]) == [4]
    paper = published.read(PAPER / "published.csv")
    kinds, by_window = [], speculative_figures.by_window

    def seen(rows: pd.DataFrame, *rest: Any) -> Any:
        kinds.append({*rows["kind"]})
        return by_window(rows, *rest)

    monkeypatch.setattr(speculative_figures, "by_window", seen)
    drawn = speculative_figures.draw(rows, failures, paper, tmp_path / "figures")
    assert kinds == [{"verify"}]  # over snapshots, replay without drafts is another question
    assert drawn == list(speculative_figures.NAMES)
    assert all((tmp_path / "figures" / f"{name}.svg").stat().st_size > 5000 for name in drawn)
    with plt.rc_context(style.RC):
        shown = rows[rows["kind"] == "verify"].dropna(subset=["over_snapshots"])
        figure = speculative_figures.by_window(shown, failures, paper)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[0] == "Nemotron-3-Nano-4B"
    assert {"Qwen3.5-122B", "Nemotron-3-Super-120B"} <= set(titles)
    plt.close(figure)
    assert "oom" in [text.get_text() for text in figure.axes[0].texts]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "64", "256", "512"]
    assert speculative_figures.draw(rows.iloc[:0], failures, paper, tmp_path / "none") == []


def test_points_of_one_batch_size_stand_apart_with_their_numbers(tmp_path: Path) -> None:
    rows = tables.build(evidence(tmp_path, *processes()))["speculative_throughput"]
    paper = published.read(PAPER / "published.csv")
    with plt.rc_context(style.RC):
        ax = speculative_figures.with_drafts(rows[rows["over_plain"].notna()], paper).axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["256"]
    wanted = {f"{row.over_plain:.2f}" for row in rows.itertuples() if row.kind != "replay"}
    numbers = {text.get_text(): text.xy for text in ax.texts if text.get_text() in wanted}
    assert set(numbers) == wanted
    assert len({x for x, _ in numbers.values()}) == 2
    assert max(y for _, y in numbers.values()) < ax.get_ylim()[1]


def test_a_panel_of_several_acceptances_tells_their_range(tmp_path: Path) -> None:
    paper = published.read(PAPER / "published.csv")
    for name, tokens, told in (("one", 3.2, "T = 4, 3.2 tokens"), ("several", 3.61, "T = 4, 3.2 to 3.61 tokens")):
        small = speculative_group(batch=64)
        for arm in ("snapshots/triton", "verify/triton"):
            small = changed(small, arm, tokens_per_step=tokens)
        rows = tables.build(evidence(tmp_path / name, speculative_group(), small))["speculative_throughput"]
        ax = speculative_figures.with_drafts(rows[rows["over_plain"].notna()], paper).axes[0]
        assert f"Mamba-2, fp32 state, {told} a step, NVIDIA H200" in [text.get_text() for text in ax.texts]
        plt.close(ax.figure)


def test_every_request_count_is_a_bar_with_its_bytes(tmp_path: Path) -> None:
    several = [*processes(), *processes(window=8, fields={"acceptance": 0.9})]
    rows = tables.build(evidence(tmp_path, *several))["speculative_throughput"]
    with plt.rc_context(style.RC):
        axes = speculative_figures.requests(rows, published.read(PAPER / "published.csv")).axes
    ours, theirs = axes[0], next(ax for ax in axes if ax.get_title(loc="left") == "Nemotron-3-Super-120B")
    assert [label.get_text() for label in ours.get_yticklabels()] == ["T = 1", *["T = 4"] * 2, *["T = 8"] * 2]
    at_four = rows[(rows["kind"] == "verify") & (rows["window"] == 4)].iloc[0]
    told = f"{at_four['requests_in_100_gb']:,}: {at_four['request_mib']:.4g} MiB each"
    assert told in [text.get_text() for text in ours.texts]
    assert ours.patches[1].get_width() == at_four["requests_in_100_gb"]
    assert ours.get_xlabel() == "requests in 100 GB"
    assert [(bar.get_width(), bar.get_facecolor()[:3]) for bar in theirs.patches] == [
        (694, (1, 1, 1)),
        (213, (1, 1, 1)),
    ]


def test_published_values_are_read() -> None:
    paper = published.read(PAPER / "published.csv")
    over = published.drafted(paper, "qwen3_5_122b", published.NATIVE)
    found = {(int(r.batch_size), int(r.window)): r.value for r in over.itertuples()}
    assert found[512, 4] == 2.10
    assert published.concurrency(paper, "nemotron_3_super_120b") == {"snapshots": 213, "verify": 694}
    assert published.concurrency(paper, "nemotron_3_nano_4b") == {}
