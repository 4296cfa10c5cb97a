"""Records of a GPU in tables and figures: beside those of CPUs, never mixed with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from records import GPU_ARMS, case, gpu_group, group, write

from analysis import claims, figures, gpu_figures, published, style, tables
from analysis.load import computes_gates, load
from experiments.case import devices, known_arms

ROOT = Path(__file__).resolve().parent.parent
H200 = "NVIDIA H200"


@pytest.fixture
def paper():
    return published.read(ROOT / "results" / "paper" / "published.csv")


def found_in(folder, *groups):
    return tables.build(load([write(folder, *groups)]))


def test_a_cell_holds_one_device(tmp_path):
    found = found_in(tmp_path, gpu_group(batch=64), group(case("qwen3_5_4b", 64)))
    speedups = found["kernel_speedups"]
    assert dict(speedups.groupby("device")["arm"].count()) == {"2-core CPU": 3, H200: 4}
    assert set(speedups[speedups["device"] == H200]["baseline"]) == {"stored/vllm-tuned"}
    assert set(speedups[speedups["device"] == H200]["threads"].isna()) == {True}
    assert style.facets(speedups) == [("2-core CPU", "qwen3_5_4b", "fp32"), (H200, "qwen3_5_4b", "fp32")]


def test_every_replay_arm_is_compared_with_every_other_arm(tmp_path):
    pairs = found_in(tmp_path, *(gpu_group(replicate=n, seed=n) for n in range(3)))["kernel_pairs"]
    ours = pairs[pairs["arm"] == "replay/triton"].set_index("against")
    assert sorted(ours.index) == ["replay/vllm", "stored/triton", "stored/vllm", "stored/vllm-tuned"]
    assert ours.loc["stored/vllm", "speedup"] == pytest.approx(2.4, rel=0.02)
    assert ours.loc["replay/vllm", "speedup"] == pytest.approx(1.2, rel=0.02)
    assert set(ours["verdict"]) == {"FASTER"}
    assert set(ours["processes"]) == {3}
    theirs = pairs[pairs["arm"] == "replay/vllm"].set_index("against")
    assert theirs.loc["replay/triton", "verdict"] == "SLOWER"


def gated(records, *arms):
    """The records with those of ``arms`` saying that their kernels compute the gates."""
    told = {True: {"gates": "in the kernel"}, False: {"gates": "ready"}}
    return [replace(r, arm_config=told[r.arm in arms]) for r in records]


OURS_TOO = GPU_ARMS | {"replay/triton-gates": 0.55}
INSIDE = ("stored/vllm", "stored/vllm-tuned", "replay/triton-gates")


def test_an_arm_with_ready_gates_is_not_like_one_that_computes_them(tmp_path):
    groups = [gated(gpu_group(replicate=n, seed=n, arms=OURS_TOO), *INSIDE) for n in range(2)]
    found = found_in(tmp_path, *groups)
    speedups = found["kernel_speedups"].set_index("arm")
    assert dict(speedups["like_for_like"]) == {
        "replay/triton": "no",
        "replay/triton-gates": "yes",
        "replay/vllm": "no",
        "stored/triton": "no",
        "stored/vllm": "yes",
    }
    told = "the baseline computes its gates, this arm gets them ready"
    assert {arm for arm, remarks in speedups["remarks"].items() if told in remarks} == {
        "replay/triton",
        "replay/vllm",
        "stored/triton",
    }
    pairs = found["kernel_pairs"].set_index(["arm", "against"])
    assert pairs.loc[("replay/triton", "stored/vllm"), "like_for_like"] == "no"
    assert pairs.loc[("replay/triton", "stored/triton"), "like_for_like"] == "yes"
    assert set(pairs.loc["replay/triton-gates"]["like_for_like"]) == {"yes"}


def test_an_older_record_of_packed_decode_computes_its_gates():
    (record, *_) = gpu_group()
    packed = replace(record, arm_config={"kernel": "fused_recurrent_gated_delta_rule_packed_decode"})
    assert (computes_gates(record), computes_gates(packed)) == (False, True)


@pytest.mark.parametrize(("arms", "answering"), [(OURS_TOO, "replay/triton-gates"), (GPU_ARMS, "replay/triton")])
def test_claims_take_the_like_for_like_arm_where_there_is_one(tmp_path, arms, answering):
    groups = [gated(gpu_group(replicate=n, seed=n, arms=arms), *INSIDE) for n in range(2)]
    evidence = load([write(tmp_path, *groups)])
    table = claims.evaluate(claims.read(ROOT / "results/paper/claims.toml"), tables.build(evidence), evidence, ROOT)
    row = table.set_index("id").loc["kernel-range"]
    factor = arms[answering] / arms["stored/vllm-tuned"]
    assert float(row["ours"].split(" ")[0]) == pytest.approx(1 / factor, rel=0.03)
    told = "qwen3_5_4b: stored/vllm-tuned computes its gates, replay/triton gets them ready"
    assert (told in row["note"]) == (answering == "replay/triton")


def test_a_loud_machine_gives_no_verdict_of_pairs(tmp_path):
    pairs = found_in(tmp_path, *(gpu_group(replicate=n, seed=n, noise=0.5) for n in range(2)))["kernel_pairs"]
    assert len(pairs) == 8
    assert set(pairs["verdict"]) == {"AMBIGUOUS"}
    assert pairs["remarks"].str.contains("A/A noise").all()


def test_two_arms_are_no_pair_beside_their_speedup(tmp_path):
    two = {"stored/triton": 1.0, "replay/triton": 0.5}
    assert found_in(tmp_path, gpu_group(arms=two))["kernel_pairs"].empty


def test_a_step_by_ring_length_is_a_table(tmp_path):
    phases = found_in(tmp_path, gpu_group(phased=True), gpu_group(batch=8))["kernel_phases"]
    ours = phases[phases["arm"] == "replay/triton"]
    assert list(ours["ring_length"]) == list(range(16))
    assert list(ours["step_us"]) == [round(1 + 0.01 * p, 2) for p in range(16)]
    assert list(phases[phases["arm"] == "stored/vllm"]["ring_length"]) == [0]
    assert set(phases["batch_size"]) == {256}


def test_each_state_format_has_its_panels(tmp_path, paper):
    models = ("nemotron_3_nano_4b", "qwen3_5_4b")
    groups = [gpu_group(m, b, s, phased=True) for m in models for b in (1, 256) for s in ("fp32", "fp16")]
    found = found_in(tmp_path, *groups)
    speedups = found["kernel_speedups"]
    drawn = figures.speedup_by_batch(speedups[speedups["kind"] == "replay"], found["failures"], paper).axes
    titles = [next(t.get_text() for t in ax.texts if "state" in t.get_text()) for ax in drawn]
    assert [text.split(", ")[1] for text in titles] == ["fp32 state"] * 2 + ["fp16 state"] * 2
    ranges = [[line for line in ax.lines if line.get_linewidth() == 5] for ax in drawn]
    assert [len(lines) for lines in ranges] == [1, 1, 0, 0]  # the paper's, which is of fp32 states
    shares = gpu_figures.roof_share_by_batch(found["roofs"], paper).axes
    assert len(shares) == 4
    assert [ax.get_ylabel() for ax in shares] == ["share of the arm's roof", "", "", ""]
    assert len([c for c in shares[0].containers if c.has_yerr]) == 5
    steps = gpu_figures.step_by_ring_length(found["kernel_phases"], paper).axes
    assert [len(ax.lines) for ax in steps] == [5] * 4
    assert {len(line.get_xdata()) for line in steps[0].lines} == {2, 16}


def test_the_paper_s_range_is_drawn_for_its_models_alone(tmp_path, paper):
    def drawn(*models):
        found = found_in(tmp_path / models[0], *(gpu_group(m) for m in models))
        speedups = found["kernel_speedups"]
        figure = figures.speedup_by_batch(speedups[speedups["kind"] == "replay"], found["failures"], paper)
        ranges = [sum(line.get_linewidth() == 5 for line in ax.lines) for ax in figure.axes]
        return ranges, any("four models" in text.get_text() for text in figure.legends[0].get_texts())

    assert drawn("qwen3_5_4b", "kimi_linear_48b") == ([1, 0], True)
    assert drawn("kimi_linear_48b") == ([0], False)


def test_arms_of_a_figure_differ_in_colour_and_marker():
    arms = sorted(arm for arm in known_arms() if "cuda" in devices(arm))
    for kinds in (("stored", "replay"), ("snapshots", "verify")):  # of one token a step and of windows: never together
        shown = [arm for arm in arms if arm.startswith(kinds)]
        looks = style.arm_look(shown)
        assert len({look["color"] for look in looks.values()}) == len(shown) >= 2
    pairs = {tuple(look.values()) for look in style.arm_look([f"replay/{n}" for n in range(84)]).values()}
    assert len(pairs) == 84


def test_shares_of_one_process_are_hollow_and_the_legend_says_why(tmp_path, paper):
    def drawn(name, *groups):
        figure = gpu_figures.roof_share_by_batch(found_in(tmp_path / name, *groups)["roofs"], paper)
        hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
        return len(hollow), style.WEAK in {text.get_text() for text in figure.legends[0].get_texts()}

    sound = [gpu_group(replicate=r, seed=r) for r in range(2)]
    assert drawn("sound", *sound) == (0, False)
    assert drawn("weak", *sound, gpu_group(batch=8)) == (5, True)


def test_bars_are_for_cpus(tmp_path, paper):
    found = found_in(tmp_path / "records", gpu_group())
    assert "bandwidth" not in figures.draw(found, paper, tmp_path / "drawn")
    assert "roof_share_by_batch" in figures.draw(found, paper, tmp_path / "drawn")


def test_a_power_cap_is_a_remark_and_throttling_a_fault(tmp_path):
    rounds = {"clock_reasons": [["sw_power_cap"], [], None]}
    capped = gpu_group(device_state={"throttled": False, "rounds": rounds})
    hot = gpu_group(batch=8, device_state={"throttled": True, "rounds": rounds})
    evidence = load([write(tmp_path, capped, hot)])
    speedups = tables.build(evidence)["kernel_speedups"]
    assert set(speedups["batch_size"]) == {256}
    assert speedups["remarks"].str.contains("power cap in 1 of 3 rounds").all()
    assert {e.gate for e in evidence.exclusions} == {"throttled"}


@pytest.mark.parametrize(
    ("state", "remark"),
    [
        ({"throttled": None, "throttling_told": [0, 4]}, "throttling not read"),
        ({"throttled": None}, "throttling not read"),
        ({"throttled": False, "throttling_told": [3, 4]}, "throttling read in 3 of 4 states"),
        ({"throttled": False, "throttling_told": [4, 4]}, ""),
    ],
)
def test_throttling_that_could_not_be_read_is_a_remark(tmp_path, state, remark):
    groups = (gpu_group(replicate=n, seed=n, device_state=state) for n in range(2))
    for name, frame in found_in(tmp_path, *groups).items():
        if name in ("kernel_speedups", "kernel_pairs", "roofs"):
            assert set(frame["remarks"]) == {remark}, name


def test_a_busy_host_of_a_gpu_is_told(tmp_path):
    busy = {"throttled": False, "rounds": {}, "before": {"host": {"load_average": [40.0, 1.0, 1.0]}}}
    speedups = found_in(tmp_path, gpu_group(device_state=busy))["kernel_speedups"]
    assert speedups["remarks"].str.contains("machine busy").all()


def test_a_card_of_another_kind_is_an_analogue_and_goes_before_cpus(tmp_path):
    evidence = load(
        [write(tmp_path, *(gpu_group(replicate=n, seed=n) for n in range(2)), group(case("qwen3_5_4b", 256)))]
    )
    table = claims.evaluate(
        claims.read(ROOT / "results/paper/claims.toml"), tables.build(evidence), evidence, ROOT
    ).set_index("id")
    row = table.loc["kernel-range"]
    assert "on an analogue" in row["verdict"]
    assert H200 in row["differed"]
    assert "CPU" not in row["differed"]
    assert row["differed"].endswith("kernels: this project's")


def test_a_claim_names_the_replay_kernel_of_others_that_answers_it(tmp_path):
    faster = {"stored/triton": 1.0, "replay/triton": 0.7, "replay/vllm": 0.6}
    evidence = load([write(tmp_path, *(gpu_group(replicate=n, seed=n, arms=faster) for n in range(2)))])
    table = claims.evaluate(claims.read(ROOT / "results/paper/claims.toml"), tables.build(evidence), evidence, ROOT)
    assert table.set_index("id").loc["kernel-range", "differed"].endswith("kernels: replay/vllm")
