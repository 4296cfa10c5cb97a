"""Claims and published numbers: the files are complete, and each rule can say yes, no and unclear."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import yaml
from records import ARMS, case, check, group, traffic, write

from analysis import bearing, claims, published, rules, tables
from analysis.load import load
from experiments.app import CONFIGS
from experiments.measure.record import MOMENTS, Comparison

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = ROOT / "results" / "paper" / "claims.toml"
PAPER = ROOT / "results" / "paper" / "published.csv"


def verdicts(folder, *groups, root=ROOT):
    """Claim id -> row of the claims table."""
    evidence = load([write(folder, *groups)])
    table = claims.evaluate(claims.read(CLAIMS), tables.build(evidence), evidence, root)
    return {r.id: r for r in table.itertuples()}


def fast(model="nemotron_3_nano_4b", batch=256, factor=0.6, device=None, level=1.05, rounds=20, **changes):
    """Three processes in which replay takes ``factor`` of the stored time, near its roof."""
    of = case(model, batch, timing=case()["timing"] | {"rounds": rounds})
    arms = ARMS | {"replay/cpu": factor}
    changes |= {"device": {**group()[0].device, **device}} if device else {}
    step = level * traffic(of, "stored/cpu")["floor_ns"]
    return [group(of, arms=arms, replicate=r, seed=r, step_ns=step, **changes) for r in range(3)]


H100, B300 = {"name": "NVIDIA H100", "kind": "cuda"}, {"name": "NVIDIA B300", "kind": "cuda"}
ALL_DIRECT = [("nemotron_3_nano_4b", H100), ("qwen3_5_4b", H100)]
ALL_DIRECT += [("nemotron_3_super_120b", B300), ("qwen3_5_122b", B300)]


def test_every_claim_has_all_fields_and_a_unique_id():
    found = claims.read(CLAIMS)
    assert len(found) >= 25
    assert len({c.id for c in found}) == len(found)
    for claim in found:
        empty = [f for f in claims.TEXT_FIELDS if not getattr(claim, f).strip()]
        assert set(empty) <= {"unit", "experiment"}, claim.id
        assert "summary of the paper" in claim.source


def test_no_claim_rests_on_an_overridden_timing(tmp_path):
    def claim(name, timing):
        of = case("nemotron_3_nano_4b", 256, timing=case()["timing"] | {"name": timing})
        step = 1.05 * traffic(of, "stored/cpu")["floor_ns"]
        groups = [group(of, arms=ARMS | {"replay/cpu": 0.6}, replicate=r, seed=r, step_ns=step) for r in range(3)]
        return verdicts(tmp_path / name, *groups)["kernel-range"]

    assert claim("whole", "gpu").verdict == rules.SUPPORTED
    overridden = claim("overridden", "gpu+rounds=3")
    assert overridden.verdict == rules.NOT_RUN
    assert overridden.note.endswith("; left out, timed by no profile for evidence: gpu+rounds=3")


SAID = ["1.46 to 1.80", "1.20 to 1.47", "1.85 to 2.10", "0.136 to 0.0038", "6.7", "5.6", "31.3", "no gain", "100,000"]
SAID += ["e2e_decode_speedup.py --model-id Qwen/Qwen3.5-4B", "e2e_spec_decode_throughput.py --batch-size 512"]
SAID += ["reduce the amount of data read"]
SAID += ["TensorRT-LLM", "GLM-5.3-Flash and Kimi-K3", "the summaries disagree", "Tensor Cores", "rolled back"]


@pytest.mark.parametrize("needle", SAID)
def test_every_number_of_the_summaries_is_a_claim(needle):
    assert needle in CLAIMS.read_text(encoding="utf-8")


def test_commands_name_models_that_exist():
    known = {p.stem for p in (ROOT / "configs" / "model").glob("*.yaml")}
    for claim in claims.read(CLAIMS):
        for part in claim.command.split():
            if part.startswith("model="):
                assert set(part.removeprefix("model=").rstrip(";").split(",")) <= known, claim.id


def test_commands_name_options_that_exist():
    """All but that of arms which this version does not have; of a sweep the first job."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for claim in claims.read(CLAIMS):
            name, *options = shlex.split(claim.command.partition("python -m experiments.")[2].partition(";")[0]) or [""]
            if name and claim.id != "cost-second-copy":
                hydra.compose(name, [o if "=[" in o else o.split(",")[0] for o in options if o != "-m"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('id = "kernel-range"', 'id = "decode-range"'), "taken"),
        (('rule = "kernel_range"', 'rule = "guess"'), "rule='guess' is unknown"),
        (('unit = "tokens"', "unit = 3"), "unit must be text"),
        (('unit = "tokens"\n', ""), "missing or unknown"),
    ],
)
def test_a_faulty_claims_file_is_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "claims.toml"
    path.write_text(CLAIMS.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        claims.read(path)
    assert "\n" not in str(caught.value)


def test_without_records_nothing_is_claimed(tmp_path):
    found = verdicts(tmp_path)
    compiled = found.pop("tensor-core-verification")
    assert compiled.verdict == rules.UNCLEAR
    assert "no record tells for how many heads" in compiled.note
    assert {r.verdict for r in found.values()} == {rules.NOT_RUN, rules.CANNOT_RUN}
    assert all(r.ours == "" for r in found.values())
    assert found["throughput-doubled"].note == "needs as the speculative range"


def test_an_experiment_that_exists_is_not_called_missing(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "pg19.py").touch()
    found = verdicts(tmp_path / "records", root=tmp_path)
    assert "needs a trained model, 4 documents" in found["pg19-kl"].note
    assert found["throughput-doubled"].note == "experiments.speculative is not part of this version yet"


def test_verdicts_come_from_the_fixed_set(tmp_path):
    assert len(rules.VERDICTS) == 8
    assert {r.verdict for r in verdicts(tmp_path, *fast()).values()} <= set(rules.VERDICTS)


def test_a_cpu_can_only_support_the_kernel_range_on_an_analogue(tmp_path):
    found = verdicts(tmp_path, *fast(batch=64, factor=0.6))["kernel-range"]
    assert found.verdict == rules.SUPPORTED
    assert found.ours.startswith("1.67 [")
    for part in ("card: 2-core CPU", "batch: 64", "models not run: nemotron_3_super_120b", "kernels: this project's"):
        assert part in found.differed
    assert "only aligned flush phases" in found.note


def test_an_analogue_near_its_roof_contradicts_and_a_poor_kernel_does_not(tmp_path):
    near = verdicts(tmp_path / "near", *fast(batch=64, factor=0.7, level=0.95))["kernel-range"]
    assert near.verdict == rules.AGAINST
    poor = verdicts(tmp_path / "poor", *fast(batch=64, factor=0.8, level=1.3))["kernel-range"]
    assert poor.verdict == rules.UNCLEAR
    assert "of its own roof" in poor.note


def test_an_analogue_whose_roof_forbids_the_speed_stays_unclear(tmp_path):
    groups = []
    for records in fast(batch=64, factor=0.85):
        floor = next(r for r in records if r.arm == "stored/cpu").traffic["floor_ns"] / 1.2
        groups.append(
            [replace(r, traffic=r.traffic | {"floor_ns": floor}) if "replay" in r.arm else r for r in records]
        )
    found = verdicts(tmp_path, *groups)["kernel-range"]
    assert found.verdict == rules.UNCLEAR
    assert "the roof of this machine allows 1.20x" in found.note


def test_a_speed_above_the_range_asks_for_the_baseline(tmp_path):
    found = verdicts(tmp_path / "cpu", *fast(batch=64, factor=0.5))["kernel-range"]
    assert found.verdict == rules.UNCLEAR
    assert "nemotron_3_nano_4b: above the range: check the baseline" in found.note
    groups = [g for model, device in ALL_DIRECT for g in fast(model, 256, 0.5, device)]
    assert verdicts(tmp_path / "direct", *groups)["kernel-range"].verdict == rules.PARTLY


def test_an_interval_that_reaches_below_the_range_is_no_yes(tmp_path):
    found = verdicts(tmp_path, *fast(batch=64, factor=1 / 1.47, noise=0.05, level=0.95))["kernel-range"]
    estimate, low, high = (float(part.strip("[],")) for part in found.ours.split()[:3])
    assert low < 1.46 <= estimate < high
    assert found.verdict == rules.UNCLEAR


def test_a_small_batch_says_nothing_about_the_kernel_range(tmp_path):
    found = verdicts(tmp_path, *fast(batch=32))["kernel-range"]
    assert (found.verdict, found.ours) == (rules.NOT_RUN, "")


def test_all_models_on_the_papers_cards_reproduce_and_some_only_partly(tmp_path):
    groups = [g for model, device in ALL_DIRECT for g in fast(model, 256, 0.6, device)]
    assert verdicts(tmp_path / "all", *groups)["kernel-range"].verdict == rules.REPRODUCED
    assert verdicts(tmp_path / "some", *groups[:6])["kernel-range"].verdict == rules.PARTLY
    slow = [g for model, device in ALL_DIRECT for g in fast(model, 256, 0.9, device)]
    assert verdicts(tmp_path / "slow", *slow)["kernel-range"].verdict == rules.CONTRADICTED


def test_the_slower_flush_phase_counts(tmp_path):
    groups = fast(batch=64, factor=0.55)
    step = 1.05 * traffic(case(), "stored/cpu")["floor_ns"]
    staggered = case(batch=64, phase="staggered")
    groups += [group(staggered, arms=ARMS | {"replay/cpu": 0.7}, replicate=r, seed=r, step_ns=step) for r in range(3)]
    found = verdicts(tmp_path, *groups)["kernel-range"]
    assert found.ours.startswith("1.43 [")
    assert "phases" not in found.note


@pytest.mark.parametrize(
    ("factor", "noise", "verdict"),
    [
        (1.0, 0.01, rules.SUPPORTED),
        (1.2, 0.01, rules.SUPPORTED),
        (0.8, 0.01, rules.AGAINST),
        (0.97, 0.2, rules.UNCLEAR),
    ],
)
def test_batch_one(tmp_path, factor, noise, verdict):
    assert verdicts(tmp_path, *fast(batch=1, factor=factor, noise=noise))["batch-one-kernel"].verdict == verdict


DOUBTS = {
    "one process": (1, {}, "one process"),
    "few rounds": (3, {"rounds": 4}, "fewer than 5 processes of fewer than 5 rounds"),
    "loud": (3, {"noise": 0.6}, "A/A noise of"),
}
TIMED = {
    "kernel-range yes": ("kernel-range", {"factor": 0.6}),
    "kernel-range no": ("kernel-range", {"factor": 0.7, "level": 0.95}),
    "batch-one yes": ("batch-one-kernel", {"batch": 1, "factor": 2.0}),
    "batch-one no": ("batch-one-kernel", {"batch": 1, "factor": 0.3}),
    "memory-bound": ("state-traffic-bound", {"level": 1.0}),
}


@pytest.mark.parametrize("doubt", DOUBTS)
@pytest.mark.parametrize("question", TIMED)
def test_no_time_is_evidence_from_one_process_few_rounds_or_a_loud_machine(tmp_path, question, doubt):
    claim, changes = TIMED[question]
    count, weak, reason = DOUBTS[doubt]
    changes = {"batch": 64} | changes
    assert verdicts(tmp_path / "good", *fast(**changes))[claim].verdict in (rules.SUPPORTED, rules.AGAINST)
    found = verdicts(tmp_path / "weak", *fast(**changes, **weak)[:count])[claim]
    assert found.verdict == rules.UNCLEAR
    assert f"nemotron_3_nano_4b: {reason}" in found.note


def test_a_distance_that_two_timings_of_one_arm_also_show_is_no_evidence(tmp_path):
    near = verdicts(tmp_path / "near", *fast(batch=1, factor=1 / 1.03, aa_bias=1.02))["batch-one-kernel"]
    assert near.verdict == rules.UNCLEAR
    assert "too much to tell 1.0" in near.note
    far = verdicts(tmp_path / "far", *fast(batch=1, factor=1.3, aa_bias=1.02))["batch-one-kernel"]
    assert (far.verdict, "A/A" in far.note) == (rules.SUPPORTED, False)


def staggered(level, batch=64, length=16):
    of = case(batch=batch, length=length, phase="staggered")
    step = level * traffic(of, "stored/cpu")["floor_ns"]
    return [group(of, replicate=r, seed=r, step_ns=step) for r in range(3)]


def test_of_two_phases_the_worse_says_how_near_the_roof_stored_arms_are(tmp_path):
    found = verdicts(tmp_path / "both", *fast(batch=64), *staggered(1.9))["state-traffic-bound"]
    assert found.ours.startswith("0.5")
    assert found.verdict == rules.UNCLEAR
    assert "phases" not in found.note
    alone = verdicts(tmp_path / "alone", *fast(batch=64))["state-traffic-bound"]
    assert alone.verdict == rules.SUPPORTED
    assert "only aligned flush phases" in alone.note


def test_only_the_protocols_interval_length_says_how_near_the_roof_stored_arms_are(tmp_path):
    groups = [*fast(batch=64, level=1.9), *staggered(1.0, length=4)]
    assert verdicts(tmp_path / "both", *groups)["state-traffic-bound"].ours.startswith("0.5")
    assert verdicts(tmp_path / "four", *staggered(1.0, length=4))["state-traffic-bound"].verdict == rules.NOT_RUN


def test_claims_about_bytes_say_that_nothing_was_measured(tmp_path):
    found = verdicts(tmp_path, *fast(batch=64))
    for name in ("traffic-halved", "cost-buffer"):
        assert "computed from bytes, not measured" in found[name].note


def test_what_a_rule_reads_is_written_by_the_command_beside_it():
    for claim in claims.read(CLAIMS):
        if claim.rule not in ("not_run", "outside"):
            experiment = "decode" if claim.parameters.get("table") == "decode_speedups" else "kernel"
            experiment = "pg19" if claim.rule.startswith("drift") else experiment
            drafted = claim.rule in ("drafted_range", "rolled_back", "requests_fit")
            experiment = "speculative" if drafted else experiment
            of_kernels = claim.rule in ("outputs_only", "tensor_cores", "gain_cause")
            assert not of_kernels or " window=4" in claim.command, claim.id
            experiment = "accuracy" if claim.rule in ("small_loss", "visible_loss") else experiment
            assert claim.command.startswith(f"python -m experiments.{experiment} "), claim.id


def test_arms_that_are_not_replay_never_count(tmp_path):
    arms = {"stored/cpu": 1.0, "replay/cpu": 0.95, "auto/cpu": 0.5}
    groups = [group(case(batch=64), arms=arms, replicate=r, seed=r) for r in range(3)]
    assert verdicts(tmp_path, *groups)["kernel-range"].ours.startswith("1.05 [")


def test_bytes_flushes_and_errors_support_their_claims(tmp_path):
    found = verdicts(tmp_path, *fast(batch=64))
    for name in ("traffic-halved", "gain-at-most-two", "one-write-an-interval", "same-outputs", "cost-buffer"):
        assert found[name].verdict == rules.SUPPORTED, name
    assert found["traffic-halved"].ours == "0.55 of the bytes, ring included"
    assert found["state-traffic-bound"].verdict == rules.SUPPORTED
    assert float(found["state-traffic-bound"].ours.split()[0]) == pytest.approx(1 / 1.05, abs=0.03)


def test_bytes_that_are_not_halved_contradict(tmp_path):
    groups = []
    for records in fast():
        written = [{"state_bytes_written": r.traffic["state_bytes_read"]} for r in records]
        groups.append([replace(r, traffic=r.traffic | w) for r, w in zip(records, written, strict=True)])
    assert verdicts(tmp_path, *groups)["traffic-halved"].verdict == rules.AGAINST


def with_replay_bytes(groups, **shares):
    """The groups with bytes of their replay arms replaced; each is given as a share of the state that is read."""
    changed = []
    for records in groups:
        state = records[0].traffic["state_bytes_read"]
        bytes_ = {name: share * state for name, share in shares.items()}
        changed.append([replace(r, traffic=r.traffic | bytes_) if "replay" in r.arm else r for r in records])
    return changed


@pytest.mark.parametrize(
    ("factor", "ring", "verdict"),
    [
        (0.6, 0.06, rules.SUPPORTED),
        (0.6, 0.3, rules.AGAINST),  # an ideal of 1.5 is not near two
        (0.4, 0.06, rules.AGAINST),  # 2.5 times as fast: not bounded by bytes
        (0.53, 0.06, rules.UNCLEAR),  # above its own ideal, below two
    ],
)
def test_the_bound_of_bytes_can_be_refused(tmp_path, factor, ring, verdict):
    groups = with_replay_bytes(fast(batch=64, factor=factor), ring_bytes_read=ring)
    arms = tuple(arm for arm in ARMS if arm != "replay/torch")
    groups = [[replace(r, arms=arms) for r in g if r.arm in arms] for g in groups]
    found = verdicts(tmp_path, *groups)["gain-at-most-two"]
    assert found.verdict == verdict
    beyond = "more than bytes explain (nemotron_3_nano_4b, aligned; the measured bandwidths allow "
    assert found.note.count(beyond) == (verdict != rules.SUPPORTED)


def test_of_gains_beyond_bytes_the_largest_of_a_model_is_told(tmp_path):
    arms = ("stored/cpu", "replay/cpu")
    groups = [*fast(batch=64, factor=0.53), *fast(batch=128, factor=0.52)]
    groups = [[replace(r, arms=arms) for r in g if r.arm in arms] for g in groups]
    note = verdicts(tmp_path, *groups)["gain-at-most-two"].note
    assert note.startswith("replay/cpu gains 1.9")
    assert note.count("more than bytes explain") == 1
    assert note.endswith("x), the most of 2 such")


@pytest.mark.parametrize(
    ("ring", "verdict"), [(0.06, rules.SUPPORTED), (0.0, rules.AGAINST), (1.0, rules.AGAINST)], ids=str
)
def test_a_buffer_that_costs_nothing_or_more_than_it_saves_contradicts(tmp_path, ring, verdict):
    groups = with_replay_bytes(fast(batch=64), ring_bytes_read=ring, ring_bytes_written=0.0)
    found = verdicts(tmp_path, *groups)["cost-buffer"]
    assert found.verdict == verdict
    assert "of the writes saved" in found.ours


@pytest.mark.parametrize(("share", "verdict"), [(0.5, rules.SUPPORTED), (1.0, rules.AGAINST)])
def test_a_coarser_state_has_to_read_less(tmp_path, share, verdict):
    groups = with_replay_bytes(fast(batch=64), state_bytes_read=share)
    assert verdicts(tmp_path / "fp32", *groups)["low-precision-reads"].verdict == rules.NOT_RUN
    coarse = [[replace(r, arm_config={"state_format": "fp16"}) if "replay" in r.arm else r for r in g] for g in groups]
    found = verdicts(tmp_path / "fp16", *coarse)["low-precision-reads"]
    assert found.verdict == verdict
    assert found.ours == f"{share:.2f} of the state bytes that fp32 reads (fp16)"


@pytest.mark.parametrize(
    ("block", "claim"),
    [(check("before", error=1e-3), "same-outputs"), (check("before", flushes_counted=0), "one-write-an-interval")],
)
def test_an_incorrect_replay_arm_contradicts(tmp_path, block, claim):
    groups = [group(case(batch=64), failed={"replay/cpu": "incorrect"})]
    groups[0] = [replace(r, correctness=(block,)) if r.status == "incorrect" else r for r in groups[0]]
    found = verdicts(tmp_path, *groups)
    assert found[claim].verdict == rules.AGAINST
    assert {found[c].verdict for c in ("same-outputs", "one-write-an-interval")} == {rules.AGAINST, rules.SUPPORTED}


def test_an_arm_with_a_budget_of_its_own_supports_no_equality(tmp_path):
    def with_budget(records):
        rough = tuple(replace(check(m), comparisons=(Comparison("state", 1.5e-3, 2.5e-3),)) for m in MOMENTS)
        of_its_own = {"correctness": rough, "arm_config": {"budget": "of a version that rounds"}}
        return [replace(r, **of_its_own) if r.arm == "replay/vllm" else r for r in records]

    both = with_budget(group(case(batch=64), arms=ARMS | {"replay/vllm": 0.7}))
    found = verdicts(tmp_path / "both", both)["same-outputs"]
    assert found.verdict == rules.SUPPORTED
    assert "error 1.0e-06 of a budget of 4.0e-06" in found.ours
    assert found.note == "against float64; left out, judged by budgets of their own: replay/vllm"
    alone = with_budget(group(case(batch=64), arms={"stored/cpu": 1.0, "replay/vllm": 0.7}))
    assert verdicts(tmp_path / "alone", alone)["same-outputs"].verdict == rules.NOT_RUN
    failed = group(case(batch=64), arms=ARMS | {"replay/vllm": 0.7}, failed={"replay/vllm": "incorrect"})
    worse = [replace(r, correctness=(check("before", error=1e-2),)) for r in failed if not r.samples_ns]
    worse = [replace(r, arm_config={"budget": "of a version that rounds"}) for r in worse]
    wrong = verdicts(tmp_path / "wrong", [r for r in failed if r.samples_ns] + worse)["same-outputs"]
    assert (wrong.verdict, wrong.note) == (rules.SUPPORTED, found.note)


def test_flushes_that_a_kernel_does_not_count_are_told(tmp_path):
    records = group(case(batch=64), arms=ARMS | {"replay/vllm": 0.7})
    records = [replace(r, arm_config={"cursor": "moved by ours"}) if r.arm == "replay/vllm" else r for r in records]
    found = verdicts(tmp_path, records)["one-write-an-interval"]
    assert found.note == "counted by the kernels; for replay/vllm by the launch that moves cursors"


def test_published_numbers_are_readable_and_cite_public_sources():
    frame = published.read(PAPER)
    assert len(frame) > 300
    assert frame["source"].str.contains(r"^https://|^summary of the paper", regex=True).all()
    assert published.four_models(frame) == (256, 1.46, 1.80)
    assert set(frame["experiment"]) >= {"kernel_standard", "e2e_standard", "e2e_spec", "precision_gpqa"}


def test_published_curves_are_tuned_fp32_at_sixteen():
    curves = published.curves(published.read(PAPER), "nemotron_3_nano_4b")
    assert list(curves) == ["H100"]
    assert list(curves["H100"]["batch_size"]) == [1, 8, 32, 128]
    assert list(curves["H100"]["value"]) == [0.73, 1.36, 1.69, 1.78]
    assert published.curves(published.read(PAPER), "qwen3_5_4b") == {}


def test_a_model_that_was_inferred_from_its_card_proves_no_card():
    frame = published.read(PAPER)
    assert published.model_inferred(published.curves(frame, "nemotron_3_nano_4b")["H100"])
    evidence = next(c.evidence for c in claims.read(CLAIMS) if c.id == "hardware-of-small-models")
    named = frame[(frame["hardware"] == "H100") & ~frame["inferred_fields"].str.contains("model")]
    for model, source in (("Qwen3.5-4B", "48792"), ("NVIDIA-Nemotron-3-Nano-4B", "47572")):
        rows = named[named["model"] == model]
        assert rows["source"].str.contains(source).any()
        assert source in evidence
    assert "48018" not in evidence


def test_published_names_match_model_configs():
    known = {p.stem for p in (ROOT / "configs" / "model").glob("*.yaml")}
    names = published.display_names(published.read(PAPER))
    assert {"nemotron_3_nano_4b", "qwen3_5_4b", "nemotron_3_super_120b", "qwen3_5_122b"} <= known & set(names)
    assert names["nemotron_3_super_120b"] == "Nemotron-3-Super-120B"


def test_claims_may_rest_on_the_timing_that_an_experiment_takes_unless_told():
    for experiment in ("kernel", "decode"):
        config = yaml.safe_load((ROOT / "configs" / f"{experiment}.yaml").read_text())
        assert next(d["timing"] for d in config["defaults"] if "timing" in d) in bearing.PROFILES
