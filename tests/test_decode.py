"""The decode experiment on a CPU: records of tiny models, what it refuses, and that its gates see what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from tiny_models import tiny_model

from experiments import decode
from experiments.app import CONFIGS, to_plain
from experiments.decode_case import DecodeCase, case_from_config, decode_arms, model_config, whole_periods
from experiments.measure import decode_worker
from experiments.measure.assemble import Group, case_from_dict
from experiments.measure.record import Record
from experiments.measure.session import Session
from experiments.measure.session_gates import Chosen, Trace, agreement, check, trace
from experiments.options import ConfigError
from replayssm.models import random_model

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "mamba2": "model=nemotron_3_nano_4b model.name=nemotron_3_tiny model.hidden_size=32 model.pattern=M-M* "
    "model.ssm.heads=4 model.ssm.groups=2 model.ssm.head_dim=8 model.ssm.state_dim=16 model.attention.heads=4 "
    "model.attention.kv_heads=2 model.attention.head_dim=16 model.mlp.intermediate_size=40",
    "gdn": "model=qwen3_5_35b model.name=qwen3_5_tiny model.hidden_size=32 model.num_layers=4 model.ssm.heads=4 "
    "model.ssm.groups=2 model.ssm.head_dim=16 model.ssm.state_dim=16 model.attention.heads=4 "
    "model.attention.kv_heads=2 model.attention.head_dim=16 model.moe.routed_experts=4 model.moe.top_k=2 "
    "model.moe.expert_intermediate=16 model.moe.shared_intermediate=16",
}
OPTIONS = "model.vocab_size=61 batch_size=3 interval_length=3 steps=96 context=5 timing=smoke precision=fp32_fp32"
FAMILIES = pytest.mark.parametrize("family", TINY)


@pytest.fixture(autouse=True)
def configs() -> Iterator[None]:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def config(family: str, *options: str) -> dict[str, Any]:
    return to_plain(hydra.compose("decode", [*TINY[family].split(), *OPTIONS.split(), "threads=1", *options]))


def case(family: str, *options: str) -> DecodeCase:
    return case_from_config(config(family, *options))


def session(family: str, arm: str, *options: str) -> Session:
    of = case(family, *options)
    model = random_model(model_config(of), seed=of.seed, dtype=torch.float32)
    return Session(of, model, arm, set(range(model.state_layers)))


def test_a_long_past_of_random_weights_is_random_beyond_its_first_chunk_and_the_same_for_all_rows_and_arms() -> None:
    stored, replay = (session("mamba2", f"{kind}/torch", "context=300") for kind in ("stored", "replay"))
    for name in ("keys", "values"):
        memory = getattr(stored.cache, name)
        assert memory[:, 0, :, :300].std(dim=-1).min() > 0
        assert torch.equal(memory, memory[:, :1].expand_as(memory))
        assert torch.equal(memory, getattr(replay.cache, name))
        assert 0.9 < memory[:, 0, :, 256:300].std() < 1.1
    assert set(stored.cache.length.tolist()) == {300}


@pytest.mark.parametrize(("family", "phase"), [("mamba2", "staggered"), ("gdn", "aligned")])
def test_all_arms_of_a_case_are_recorded(family: str, phase: str) -> None:
    of = case(family, f"phase={phase}")
    arms = decode_arms(config(family))
    assert arms == ("stored/cpu", "stored/torch", "replay/cpu", "replay/torch")
    records = decode_worker.run_group(Group(of, arms, 0, ("test",)))
    assert [(r.arm, r.status, r.message) for r in records] == [(arm, "ok", "") for arm in arms]
    for record in records:
        assert Record.from_json(record.to_json()) == record
        assert record.layer_steps_per_sample == 96
        assert len(record.samples_ns) == of.timing.rounds
        for (ns,), (short, long) in zip(record.samples_ns, record.decode["generations_ns"], strict=True):
            assert ns == long - short > 0
        assert record.decode["host_waits"] == [[0, 0]] * of.timing.rounds
        assert record.decode["state_share"] > 0
        memory = record.decode["memory"]
        assert 0 < record.layers_memory_bytes <= memory["keys_values"] + memory["conv"] + memory["states"]
    again = [r for r in records if r.again_samples_ns]
    assert len(again) == 1
    assert again[0].arm.startswith("stored/")
    assert len(again[0].decode["products_ns"]) == of.timing.rounds
    assert again[0].bandwidth["read"]["bytes_per_s"] > 1e6
    conv = {"mamba2": 2 * (4 * 8 + 2 * 2 * 16), "gdn": 3 * (2 * 2 * 16 + 4 * 16)}[family] * 3 * 3 * 4 * 2
    assert again[0].decode["bytes_between"] > conv
    experts = again[0].decode["routers"]
    assert (experts == {}) == (family == "mamba2")
    if experts:
        assert (experts["experts"], experts["rows"]) == (4, 3 * 2)
        assert sum(i * count for i, count in enumerate(experts["histogram"])) == 4 * 3 * 2
    others = [r.decode["agreement"] for r in records if r.arm != "stored/cpu"]
    assert all(found["with"] == "stored/cpu" for found in others)
    assert all(found["rows_that_differ"] == 0 and found["logprob_drift"]["max"] < 1e-4 for found in others)
    assert case_from_dict(json.loads(records[0].to_json())["case"]) == of


@FAMILIES
@pytest.mark.parametrize("arm", ["stored/triton", "replay/triton"])
def test_the_arms_of_a_gpu_pass_the_same_checks(family: str, arm: str) -> None:
    """Interpreted; their steps compute the gates."""
    found = session(family, arm, "phase=staggered", "batch_size=2")
    block = check(found, "before", Chosen.of(found.case, found.states.layers, "before"))
    assert block.faults() == []
    assert block.flushes_counted == (found.flushes.numel() if arm.startswith("replay/") else 0)
    other = trace(session(family, "stored/torch", "phase=staggered", "batch_size=2"), 3)
    assert agreement(trace(found, 3), other, True)["logprob_drift"]["max"] < 1e-4


@FAMILIES
@pytest.mark.parametrize("arm", ["stored/torch", "replay/torch"])
@pytest.mark.parametrize("fault", ["state", "output", "layer", "flush"])
def test_what_is_wrong_is_seen(family: str, arm: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = session(family, arm)
    chosen = Chosen.of(found.case, found.states.layers, "before")
    assert check(found, "before", chosen).faults() == []
    step = found.states.step

    def faulty(number: int, out: Any, inputs: Any, slots: Any, **more: Any) -> None:
        if fault == "layer" and number == chosen.layers[-1]:
            number = chosen.layers[0]
        step(number, out, inputs, slots, **more)
        if fault == "state":
            found.stored[number] *= 1 + 1e-5
        if fault == "output":
            out *= 1 + 1e-5
        if fault == "flush":
            found.flushes[number] += 1

    monkeypatch.setattr(found.states, "step", faulty)
    faults = check(found, "before", chosen).faults()
    expected = {"state": "state of layer", "output": "output of layer", "layer": "copies touched", "flush": "flushes"}
    if fault == "flush" and arm == "stored/torch":
        assert faults == []  # it has none, and the attribute is a new tensor
    else:
        assert any(expected[fault] in text for text in faults), faults


@pytest.mark.parametrize(("family", "arm"), [("mamba2", "stored/torch"), ("gdn", "replay/torch")])
def test_a_model_that_repeats_a_word_is_seen_to_be_stepped(
    family: str, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its short memories are where the next step leaves them; a layer that is not stepped is still found."""
    of = replace(case(family), weights="greedy")
    model = random_model(model_config(case(family)), seed=0, dtype=torch.float32)
    model.lm_head.weight.zero_()  # the first token is as likely as any
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            parameter.fill_(14.0)
    found = Session(of, model, arm, {0})
    found.run(2 * of.interval_length)
    before = found.marks()
    found.run(of.interval_length)
    assert torch.equal(found.marks()[0], before[0])
    chosen = Chosen(torch.arange(3), [0])
    assert check(found, "before", chosen).faults() == []
    step = found.states.step
    monkeypatch.setattr(found.states, "step", lambda number, *a, **more: number and step(number, *a, **more))
    assert any("copies touched" in text for text in check(found, "before", chosen).faults())


def test_a_restart_begins_again() -> None:
    """Bit for bit, and all arms read the same tokens."""
    found = session("mamba2", "replay/torch", "phase=staggered")
    first = trace(found, 6)
    found.run(3)
    again = trace(found, 6)
    for name in ("likeliest", "lead", "logprob"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert found.cache.length.tolist() == [5 + 6 + ahead for ahead in (0, 1, 2)]


def test_agreement_is_counted() -> None:
    own = Trace(torch.tensor([[1, 1, 1], [2, 2, 2], [3, 3, 3]]), torch.zeros(3, 3), torch.zeros(3, 3))
    other = Trace(
        torch.tensor([[1, 1, 9], [2, 2, 2], [3, 4, 3]]),
        torch.arange(9.0).view(3, 3),
        torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 5.0], [0.1, 0.3, 0.0]]),
    )
    found = agreement(own, other, forced=True)
    assert (found["rows_that_differ"], found["agreement_length"]) == (2, {"min": 0, "median": 2.0})
    assert found["largest_lead_at_first_difference"] == 7.0
    assert found["logprob_drift"]["max"] == 5.0
    assert found["tokens_equal"] == pytest.approx(7 / 9, abs=1e-5)
    assert agreement(own, other, forced=False)["logprob_drift"]["max"] == pytest.approx(0.1)


def test_a_case_that_cannot_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_worker.Opened, "of", lambda case: pytest.fail("weights were made"))
    records = decode_worker.run_group(Group(case("gdn", "batch_size=100000", "context=100000"), ("stored/cpu",), 0, ()))
    assert [(r.status, r.message.endswith("GiB free; not tried")) for r in records] == [("oom", True)]
    assert records[0].decode["memory"]["keys_values"] > 2**40


def test_a_checkpoint_goes_on_greedily(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own; a second run finds everything recorded."""
    tiny_model("qwen-mlp-tied").save_pretrained(tmp_path / "mine")
    options = ["threads=1", f"weights={tmp_path / 'mine'}", f"records={tmp_path / 'records'}"]
    asked = hydra.compose("decode", [*options, "arms=[stored/cpu,replay/cpu]", *OPTIONS.split()[1:]])
    for expected in ("tokens/s", "recorded already"):
        assert decode.main(to_plain(asked)) == 0
        assert expected in capsys.readouterr().out
    lines = [line for file in (tmp_path / "records").glob("*.jsonl") for line in file.read_text().splitlines()]
    records = [Record.from_json(line) for line in lines]
    assert [r.status for r in records] == ["ok", "ok"]
    assert records[0].case["model"] == "mine"
    assert records[0].case["geometry"]["heads"] == 4
    assert records[1].decode["weights"] == "checkpoint, greedy"
    assert records[1].decode["agreement"]["rows_that_differ"] == 0


def test_whole_periods_keep_the_shares_of_kinds() -> None:
    def periods(model: str) -> list[int]:
        whole = model_config(case_from_config(to_plain(hydra.compose("decode", [f"model={model}"]))))
        return whole_periods(getattr(whole, "layer_types", None) or whole.layers_block_type)

    assert periods("qwen3_5_4b") == [4, 8, 12, 16, 20, 24, 28]
    assert periods("nemotron_3_nano_4b") == []
    assert periods("nemotron_3_super_120b")
    cut = case_from_config(to_plain(hydra.compose("decode", ["model=qwen3_5_4b", "blocks=8"])))
    assert model_config(cut).layer_types.count("full_attention") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["steps=7"], "steps=7 is impossible; accepted: a multiple of interval_length=3, whole flush cycles"),
        (["context=0"], "context=0 is impossible; accepted: an integer from 1 to"),
        (["weights=/nowhere"], "weights=/nowhere is no folder; accepted: random, or a folder with config.json"),
        (["weights=/dev"], "weights=/dev lacks config.json; accepted: random, or a folder with config.json and safet"),
        (["blocks=3"], "blocks=3 is impossible; accepted: null"),
        (["arms=[stored/vllm]"], "arms=stored/vllm has no such arm; accepted: a list of replay/cpu, replay/torch, st"),
        (["model=kimi_linear_48b"], "model=kimi_linear_48b: model kimi_linear_48b is not implemented; accepted: Nemo"),
        (["model=nemotron_3_ultra_550b"], "model=nemotron_3_ultra_550b: geometry of nemotron_3_ultra_550b: hybrid_ov"),
        (["experiment=kernel"], "experiment=kernel is unknown; accepted: decode"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], message: str) -> None:
    base = ["model=qwen3_5_4b", *OPTIONS.split()[1:]]
    with pytest.raises(ConfigError) as caught:
        case_from_config(to_plain(hydra.compose("decode", [*base, *options])))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_folder_is_refused_by_its_option(tmp_path: Path) -> None:
    """Without weights, and with a configuration that no model has."""
    asked = to_plain(hydra.compose("decode", [f"weights={tmp_path}", *OPTIONS.split()]))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"^weights={tmp_path} holds no safetensors; accepted: random, or a folder"):
        case_from_config(asked)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=rf"^weights={tmp_path}: .*model_type=None is unknown; accepted: nemotron_h"):
        case_from_config(asked)
    shutil.copy(ROOT / "experiments/assets/models/tiny-qwen3.5/config.json", tmp_path)
    with pytest.raises(ConfigError, match=rf"^weights={tmp_path}: .*safetensors cannot be read, truncated or no safe"):
        case_from_config(asked)


def test_a_dry_run_says_what_memory_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    asked = to_plain(hydra.compose("decode", ["batch_size=256", "device=cuda", "dry_run=true"]))
    assert decode.sweep([asked]) == 0
    assert "nemotron_3_nano_4b (random weights), batch 256" in capsys.readouterr().out
    assert replace(case_from_config(asked), steps=16).longest == 16 + 16 + 4 * 16
