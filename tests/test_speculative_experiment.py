"""The speculative experiment on a CPU: records of tiny models, what it refuses, that its gates see what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from test_decode import TINY

from experiments import prompts, speculative
from experiments.app import CONFIGS, to_plain
from experiments.measure import decode_memory, decode_worker
from experiments.measure.assemble import Group, case_from_dict
from experiments.measure.record import Record
from experiments.measure.session import Session
from experiments.measure.session_gates import Chosen, agreement, check, trace
from experiments.measure.speculation import Opened, generated_as_traced, match, speculation
from experiments.measure.window_session import WindowSession, WindowTrace, mismatch, noise, window_trace
from experiments.options import ConfigError
from experiments.speculative_case import SpeculativeCase, case_from_config, speculative_arms
from replayssm.models import load_model

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "experiments" / "assets" / "models"
OPTIONS = "batch_size=3 interval_length=3 steps=6 context=5 window=3 timing=smoke precision=fp32_fp32 threads=1"
SMALL = {"mamba2": "model.pattern=M*", "gdn": "model.num_layers=2 +model.full_attention_interval=2"}


@pytest.fixture(autouse=True)
def configs() -> Iterator[None]:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def config(family: str | None, *options: str) -> dict[str, Any]:
    model = [*TINY[family].split(), *SMALL[family].split(), "model.vocab_size=61"] if family else []
    return to_plain(hydra.compose("speculative", [*model, *OPTIONS.split(), *options]))


def case(family: str | None, *options: str) -> SpeculativeCase:
    return case_from_config(config(family, *options))


def session(family: str, arm: str, *options: str) -> WindowSession:
    of = case(family, *options)
    opened = Opened.of(of)
    found = opened.session(of, arm, set(range(opened.model.state_layers)))
    assert isinstance(found, WindowSession)
    return found


def checked(found: Session) -> list[str]:
    return check(found, "before", Chosen.of(found.case, found.states.layers, "before")).faults()


def test_all_arms_of_a_case_are_recorded() -> None:
    family = "mamba2"
    hasty = ("timing.rounds=2", "timing.warmup_limit_s=0.05")
    of = case(family, "acceptance=0.7", "steps=24", "batch_size=4", *hasty)
    every = speculative_arms(config(family))
    assert every == tuple(
        f"{kind}/{backend}" for kind in ("replay", "snapshots", "verify") for backend in ("cpu", "torch")
    )
    arms = ("replay/torch", "snapshots/torch", "verify/torch")
    records = decode_worker.run_group(Group(of, arms, 0, ("test",)))
    assert [(r.arm, r.status, r.message) for r in records] == [(arm, "ok", "") for arm in arms]
    assert all(Record.from_json(record.to_json()) == record for record in records)
    plain, snapshots, verify = (record.decode for record in records)
    assert plain["tokens_per_step"] == 1
    assert snapshots["accepted_digest"] == verify["accepted_digest"]
    assert snapshots["tokens_per_step"] == verify["tokens_per_step"] == pytest.approx(1 + 0.7 + 0.49, abs=0.1)
    assert sum(verify["steps_by_tokens"]) == 24 * 4
    assert len(verify["tokens_by_step"]) == 24
    assert verify["token_ns"] == pytest.approx(verify["step_ns"] / verify["tokens_per_step"])
    for found in (snapshots, verify):
        assert found["agreement"]["rows_that_differ"] == 0
        assert found["agreement"]["logprob_drift"]["max"] < 1e-4
        assert found["agreement"]["steps"] >= 10
        assert found["rows_unmatched"] == 0
    assert snapshots["requests_in_100_gb_of_state"] < verify["requests_in_100_gb_of_state"]
    assert snapshots["request_bytes"]["conv"] == verify["request_bytes"]["conv"] > plain["request_bytes"]["conv"]
    assert records[1].again_samples_ns
    assert case_from_dict(json.loads(records[0].to_json())["case"]) == of
    block = records[2].correctness[1]
    assert block.flushes_counted == block.flushes_expected > 0


@pytest.mark.parametrize("drafter", ["mtp", "ngram", "draft_model"])
def test_a_checkpoint_drafts(drafter: str) -> None:
    """The GDN model that ships, with prompts of its own: both arms accept alike, and more than one token a step."""
    options = [f"weights={MODELS / 'tiny-qwen3.5'}", f"drafter={drafter}", "batch_size=2", "context=40"]
    options += [f"draft_weights={MODELS / 'tiny-nemotron-h'}"] if drafter == "draft_model" else []
    of = case(None, *options)
    opened, arms = Opened.of(of), []
    assert opened.prompts is not None
    assert [len(prompt) for prompt in opened.prompts] == [40, 40]
    for name in ("snapshots/torch", "verify/torch"):
        arm = decode_worker.Arm(name)
        found = opened.session(of, name, {0})
        assert isinstance(found, WindowSession)
        arm.session, arm.trace = found, window_trace(found, 9 if drafter == "ngram" else 6)
        arms.append(arm)
    match(arms)
    assert [(arm.status, arm.rows_unmatched) for arm in arms] == [("ok", 0), ("ok", 0)]
    assert int(arms[0].trace.accepted.max()) > 1
    assert torch.equal(arms[0].trace.accepted, arms[1].trace.accepted)
    plain = trace(Session(of, opened.model, "replay/torch", set(), opened.prompts), 6)
    steps = min(6, len(arms[1].trace.logprob))
    assert steps > 3
    assert agreement(arms[1].trace.first(steps), plain.first(steps), False)["rows_that_differ"] == 0
    assert generated_as_traced(arms[1], of) is None
    arms[1].trace.accepted[4, 1] = 4  # what no window can accept
    arms[1].trace.lead_of_step[4, 1] = 1.0
    assert "acceptance while timed and traced: row 1 accepts" in str(generated_as_traced(arms[1], of))


@pytest.mark.parametrize("where", ["lead", "lead_of_step"])
def test_a_near_tie_is_as_near_as_leads_are_off(where: str) -> None:
    """Two arms of one row that agree in every log-probability and accept otherwise in the last of three steps."""

    def traced(off: float, last: int) -> WindowTrace:
        tokens = torch.tensor([[5], [6], [7]])
        found = WindowTrace(
            tokens, torch.ones(3, 1), -torch.ones(3, 1), torch.tensor([[1], [1], [last]]), leads.clone()
        )
        getattr(found, where)[0] += off
        return found

    leads = torch.tensor([[1.0], [1.0], [0.25]])
    for off, fault in ((0.125, False), (0.1, True), (0.0, True)):
        own, other = traced(off, 2), traced(0.0, 1)
        found = noise(own, other)
        assert found == pytest.approx(off)
        assert (mismatch(own.accepted, other.accepted, leads, found)[1] is not None) == fault


@pytest.mark.parametrize(("family", "arm"), [("gdn", "verify/triton"), ("mamba2", "snapshots/triton")])
def test_the_arms_of_a_gpu_pass_the_same_checks(family: str, arm: str) -> None:
    """Interpreted; their steps compute the gates."""
    found = session(family, arm, "batch_size=1", "interval_length=2", "window=2")
    assert checked(found) == []
    found.state_steps()()


@pytest.mark.parametrize(("family", "arm"), [("mamba2", "snapshots/torch"), ("gdn", "verify/torch")])
def test_what_is_wrong_is_seen(family: str, arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = session(family, arm)
    assert checked(found) == []
    step, commit, replays = found.states.step, found.watched.commit, arm.startswith("verify")
    faults = {"state": "state of layer", "output": "output of layer", "commit": "cursor"}
    for fault, told in (faults | ({"flush": "flushes"} if replays else {})).items():
        found.restart()

        def faulty(number: int, out: Any, *given: Any, fault: str = fault, **more: Any) -> None:
            step(number, out, *given, **more)
            if fault == "state":
                found.stored[number] *= 1 + 1e-5
            if fault == "output":
                out *= 1 + 1e-5
            if fault == "flush":
                found.states.cache.flushes[number] += 1  # type: ignore[attr-defined]

        with monkeypatch.context() as patch:
            patch.setattr(found.states, "step", faulty)
            if fault == "commit":
                patch.setattr(found.watched, "commit", lambda slots, counts: commit(slots, counts * 0 + 1))
            assert any(told in text for text in checked(found)), fault


def test_a_generation_that_was_timed_is_that_of_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tokens are forced there are no near ties."""
    of, arm = case("mamba2"), decode_worker.Arm("verify/torch")
    arm.session = found = session("mamba2", arm.name)
    found.run(1)
    shown, logits = found.watched.seen, found.step.logits
    arm.trace = window_trace(found, 3)
    assert shown
    assert found.watched.seen is shown  # whose tensors a graph writes anew
    assert found.step.logits is logits
    assert (arm.trace.lead_of_step > 0).all()  # of what counted: padding would be a tie that excuses everything
    assert generated_as_traced(arm, of) is None
    with monkeypatch.context() as patch:
        patch.setattr(WindowSession, "flushes_expected", -1)
        assert str(generated_as_traced(arm, of)).endswith("flushes of a generation counted, -1 expected")
    arm.trace.accepted[1, 0] += 1
    assert "acceptance while timed and traced: row 0 accepts" in str(generated_as_traced(arm, of))


def test_tokens_are_counted_of_what_was_timed() -> None:
    """Both generations begin with the same L steps, which the difference of their times leaves out."""
    of, arm = case("gdn"), decode_worker.Arm("verify/torch")
    memory = decode_memory.predicted(of, (arm.name,))[arm.name]
    counts = [1] * of.interval_length + [3] * (of.steps - 1) + [2]
    arm.accepted = torch.tensor(counts)[:, None].expand(-1, of.batch_size)
    found = speculation(arm, of, memory, 8.5)
    assert found["tokens_by_step"] == counts[of.interval_length :]
    assert found["steps_by_tokens"] == [0, of.batch_size, of.batch_size * (of.steps - 1)]
    assert found["token_ns"] == pytest.approx(3)
    assert found["tokens_per_step"] == pytest.approx(17 / 6)


def test_a_mismatch_must_be_a_near_tie() -> None:
    own, other = torch.tensor([[1, 2], [3, 1]]), torch.tensor([[1, 2], [3, 2]])
    lead = torch.tensor([[9.0, 9.0], [9.0, 0.5]])
    assert mismatch(own, own, lead, 0.0) == (0, None)
    assert mismatch(own, other, lead, 0.25) == (1, None)
    rows, told = mismatch(own, other, lead, 0.2)
    assert rows == 1
    assert told == "row 1 accepts 1 tokens, not 2, in step 1 at a lead of 0.5, above 0.4"
    a, b = (torch.tensor([[1, 1], [2, 2], [3, 3]]), torch.tensor([[1, 1], [2, 9], [3, 3]]))
    logprob = torch.tensor([[0.0, 0.1], [0.2, 5.0], [0.0, 7.0]])
    empty = torch.zeros(3, 2)
    first = WindowTrace(a, empty, logprob, own, lead)
    assert noise(first, WindowTrace(b, empty, empty, own, lead)) == pytest.approx(0.2)
    again, behind = torch.ones(1, 2, dtype=torch.int64), torch.tensor([[0.0, 0.0], [0.0, 9.0], [0.0, 9.0]])
    first.accepted, first.lead_of_step = torch.cat([own, again]), empty
    second = WindowTrace(b, behind, empty, torch.cat([other, again]), behind)
    assert noise(first, second) == noise(second, first) == pytest.approx(0.2)


@pytest.mark.parametrize(("lead", "statuses"), [(1.0, ["ok", "incorrect", "incorrect"]), (0.0, ["ok"] * 3)])
def test_arms_of_windows_must_accept_alike(lead: float, statuses: list[str]) -> None:
    """But for near ties, which are counted; the arm without drafts has no part in it."""
    arms = [decode_worker.Arm(name) for name in ("replay/torch", "snapshots/torch", "verify/torch")]
    same = torch.zeros(2, 2, dtype=torch.int64)
    for arm, accepted in zip(arms[1:], (torch.tensor([[1, 2], [3, 1]]), torch.tensor([[1, 2], [3, 2]])), strict=True):
        arm.trace = WindowTrace(same, same.float(), same.float(), accepted, torch.full((2, 2), lead))
    match(arms)
    assert [arm.status for arm in arms] == statuses
    assert arms[2].rows_unmatched == 1
    told = "acceptance of verify/torch and snapshots/torch: row 1 accepts 2 tokens, not 1, in step 1 at a lead of 1"
    assert all(arm.message.startswith(told) for arm in arms if arm.status == "incorrect")


def test_arms_that_cannot_fit_are_left_out() -> None:
    """Without drafts first, since the arms of windows are compared; snapshots where these do not fit either."""
    of, names = case("gdn"), ("replay/torch", "snapshots/torch", "verify/torch")
    memory = decode_memory.predicted(of, names)

    def needed(*kinds: str) -> int:
        return decode_memory.needed_bytes({arm: memory[arm] for arm in names if arm.startswith(kinds)})

    rooms = {
        needed("replay", "snapshots", "verify"): ["ok", "ok", "ok"],
        needed("snapshots", "verify"): ["oom", "ok", "ok"],
        needed("replay", "verify"): ["ok", "oom", "ok"],
        needed("verify"): ["oom", "oom", "ok"],
        1000: ["oom", "oom", "oom"],
    }
    assert sorted(rooms, reverse=True) == list(rooms), "each holds more than the next"
    for room, statuses in rooms.items():
        arms = [decode_worker.Arm(name) for name in names]
        decode_memory.drop(arms, of, memory, room, room)
        assert [arm.status for arm in arms] == statuses
        assert all(arm.message.endswith("GiB free; not tried") for arm in arms if arm.status == "oom")


def test_a_draft_model_takes_memory_too() -> None:
    """Its weights with all arms; what it keeps of requests, its checkpoints at least, with those that draft."""
    model, drafts = (f"weights={MODELS / 'tiny-qwen3.5'}", "drafter=draft_model"), MODELS / "tiny-nemotron-h"
    arms = ("replay/torch", "verify/torch")
    with_drafts = decode_memory.predicted(case(None, *model, f"draft_weights={drafts}"), arms)
    without = decode_memory.predicted(case(None, model[0], "drafter=ngram"), arms)
    of = load_model(drafts, dtype=torch.float32)
    weights = sum(p.nbytes for p in of.parameters())
    assert all(with_drafts[arm].weights == without[arm].weights + weights for arm in arms)
    assert with_drafts[arms[0]].steps == without[arms[0]].steps
    checkpoints = 3 * of.state_layers * of.geometry.state_elements * 4
    assert with_drafts[arms[1]].steps > without[arms[1]].steps + checkpoints
    assert with_drafts[arms[1]].requests_in(1e9, 3) == without[arms[1]].requests_in(1e9, 3)


def test_prompts_are_questions(tmp_path: Path) -> None:
    model = f"weights={MODELS / 'tiny-qwen3.5'}"
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"question": f"What is {n}?", "answer": "#### 1"}) + "\n" for n in range(3)))
    of = case(None, model, "drafter=ngram", f"prompts={file}", "batch_size=5")
    assert of.prompts_digest
    asked = prompts.questions(of)
    assert len(asked) == 5
    assert sorted(set(asked)) == [f"What is {n}?" for n in range(3)]
    ends = [prompts.tokenizer_of(of.weights).decode(prompt) for prompt in prompts.prompts(of)]
    assert ends == ["nswer:"] * 5  # the last tokens of a text that is longer
    given = (model, "drafter=ngram", f"prompts={file}", "batch_size=5")
    assert case(None, *given, "acceptance=0.3") == of
    file.write_text(file.read_text() + '{"question": "And what is that?"}')
    assert case(None, *given) != of
    for lines, told in (
        ('{"question": "a?"}\n\nno JSON\n', "has no question in line 3; accepted: word_problems, a JSON"),
        ('{"answer": 1}', "has no question in line 1; accepted"),
        ("[1]", "has no question in line 1; accepted"),
        ('{"question": 2}', "has no question in line 1; accepted"),
        ("\n", "has no line; accepted"),
    ):
        file.write_text(lines)
        with pytest.raises(ConfigError, match=rf"^prompts=\S+ {told}"):
            case(None, model, "drafter=ngram", f"prompts={file}")
    embedded = case(None, model, "drafter=ngram", "batch_size=5")
    assert len(set(prompts.questions(embedded))) == 5
    assert all(question.endswith("worth together?") for question in prompts.questions(embedded))


def test_the_hub_is_asked_once_before_any_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two cases; where it fails for one of them none is run. A worker does not ask again."""
    asked = tmp_path / "asked"
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(name, *rest, split):\n"
        f"    open({str(asked)!r}, 'a').write(name + ' ')\n"
        "    return {'one/set': {'question': ['Why?', 'How?']}}[name]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr(prompts, "FETCHED", {})
    options = (f"weights={MODELS / 'tiny-qwen3.5'}", "drafter=ngram", f"records={tmp_path / 'records'}")
    options += ("arms=[replay/torch]", "batch_size=1", "timing.warmup_limit_s=0.01", "timing.rounds=1", "steps=3")
    jobs = [config(None, *options, "prompts=one/set", f"context={n}") for n in (5, 6)]
    with monkeypatch.context() as patch:
        patch.setattr("experiments.measure.runner.run", lambda *_: pytest.fail("a worker was started"))
        lost = config(None, *options, "prompts=two/set")
        with pytest.raises(ConfigError, match=r"^prompts=two/set cannot be read \(KeyError: 'two/set'\); accepted: a "):
            speculative.sweep([*jobs, lost])
    assert asked.read_text() == "one/set two/set "
    assert speculative.sweep(jobs[:1]) == 0
    assert asked.read_text() == "one/set two/set ", "a worker asked again"
    (line,) = next((tmp_path / "records").glob("*.jsonl")).read_text().splitlines()
    assert Record.from_json(line).case["prompts"] == "one/set"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["window=4"], "window=4 is impossible; accepted: an integer from 1 to 3 (at most 16 tokens, and no longer"),
        (["window=null"], "window=null is impossible; accepted: an integer from 1 to 3"),
        (["drafter=medusa"], "drafter=medusa is unknown; accepted: controlled, mtp, ngram, draft_model"),
        (["drafter=mtp"], "drafter=mtp drafts for no random weights; accepted: controlled, or weights=FOLDER"),
        (["acceptance=1.5"], "acceptance=1.5 is impossible; accepted: a number of at least 0 and at most 1"),
        (["drafter=draft_model"], "drafter=draft_model needs weights of its own; accepted: draft_weights=a folder"),
        (["draft_weights=/nowhere"], "draft_weights=/nowhere is impossible; accepted: null, or drafter=draft_model"),
        (["drafter=draft_model", "draft_weights=/nowhere"], "draft_weights=/nowhere is no folder; accepted: a folder"),
        ([f"weights={MODELS}"], f"weights={MODELS} lacks config.json; accepted: random, or a folder"),
        (["drafter=draft_model", "draft_weights=/dev"], "draft_weights=/dev lacks config.json; accepted: a folder"),
        (["weights=/nowhere"], "weights=/nowhere is no folder; accepted: random, or a folder"),
        (
            ["arms=[stored/torch]"],
            "arms=stored/torch has no such arm; accepted: a list of replay/cpu, repl",
        ),
        (["steps=7"], "steps=7 is impossible; accepted: a multiple of interval_length=3"),
        (["experiment=decode"], "experiment=decode is unknown; accepted: speculative"),
        (
            [f"weights={MODELS / 'tiny-qwen3.5'}", "drafter=ngram", "prompts=none.jsonl"],
            "prompts=none.jsonl is no file",
        ),
    ],
)
def test_wrong_options_are_one_line(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        case("gdn", *options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_draft_model_is_read_before_anything_runs(tmp_path: Path) -> None:
    """Its configuration is there and has the vocabulary of the model, and its weights can be read."""
    drafted = (f"weights={MODELS / 'tiny-qwen3.5'}", "drafter=draft_model", f"draft_weights={tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=rf"^draft_weights={tmp_path}: \S+config.json: model_type=None is unknown"):
        case(None, *drafted)
    with pytest.raises(ConfigError, match=rf"^weights={tmp_path} lacks tokenizer.json; accepted: a folder with one"):
        case(None, f"weights={tmp_path}", "drafter=ngram")
    other = json.loads((MODELS / "tiny-nemotron-h" / "config.json").read_text()) | {"vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match=r"^draft_weights=\S+ is a model of 99 tokens; accepted: a model of \d+, as"):
        case(None, *drafted)
    (tmp_path / "config.json").write_text(json.dumps(other | {"vocab_size": 1024}))
    with pytest.raises(ConfigError, match=r"^draft_weights=\S+: \S+model.safetensors cannot be read, truncated"):
        case(None, *drafted)


def test_a_dry_run_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    asked = to_plain(hydra.compose("speculative", ["batch_size=256", "device=cuda", "dry_run=true"]))
    assert speculative.sweep([asked]) == 0
    told = capsys.readouterr().out
    assert "nemotron_3_nano_4b (random weights), batch 256" in told
    assert "window 4, drafts controlled at 0.8528" in told
    assert "requests' states in 100 GB" in told
