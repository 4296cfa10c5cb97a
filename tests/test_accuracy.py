"""The accuracy experiment: lm-eval's tasks on the engine, every item recorded; what cannot be is said in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import hydra
import lm_eval
import pytest
import tiny_models
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, models, pre_tokenizers

from experiments import accuracy, accuracy_case, chat, lm_eval_model, lm_eval_tasks
from experiments.accuracy_case import case_from_config, case_hash
from experiments.app import CONFIGS, to_plain
from experiments.measure import nvidia
from experiments.measure.accuracy_record import AccuracyRecord, Answers, is_accuracy
from experiments.options import ConfigError
from experiments.tracking import options as tracking_options

ROOT = Path(__file__).parents[1]
SMALL = ("task.generator={items: 8, length: 64, facts: 4, seed: 1}", "batch_size=8", "threads=1")
GPQA = [
    {"Question": f"What is {n} + {n}?", "Correct Answer": str(2 * n)}
    | {f"Incorrect Answer {k}": str(2 * n + k) for k in (1, 2, 3)}
    for n in range(3)
]


def composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_plain(hydra.compose("accuracy", list(overrides)))


def records(folder: Path) -> list[AccuracyRecord]:
    """In the order in which they ended; files of two runs in one second have names in any order."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert all(map(is_accuracy, lines))
    return sorted(map(AccuracyRecord.from_json, lines), key=lambda record: record.ended_utc)


def test_every_answer_is_recorded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(arms: str) -> list[AccuracyRecord]:
        assert accuracy.main(composed(*SMALL, f"arms={arms}", f"records={tmp_path}")) == 0
        return records(tmp_path)

    whole, coarse = run("[shared_fp32,shared_nvfp4]")
    assert [whole.arm, coarse.arm] == ["shared_fp32", "shared_nvfp4"]
    answers, other = whole.answers[0], coarse.answers[0]
    assert (answers.task, answers.metric, answers.filter) == ("replayssm_recall", "acc", "none")
    assert answers.group == (0, 0, 0, 0, 1, 1, 1, 1)
    assert min(answers.distance) > 0
    assert answers.digest == other.digest
    assert answers.correct[0].count("1") >= 7
    assert whole.work["decoded"] > 100
    assert AccuracyRecord.from_json(coarse.to_json()) == coarse

    again = run("[shared_fp32,damaged]")
    assert [record.arm for record in again] == ["shared_fp32", "shared_nvfp4", "damaged"]
    assert again[2].answers[0].correct[0].count("1") <= 2
    told = capsys.readouterr().out
    assert "shared_fp32: recorded already in" in told
    assert "lost and 0 gained from shared_fp32" in told


def test_an_arm_that_a_model_has_not_takes_no_other_with_it(tmp_path: Path) -> None:
    """All arms are decoded side by side, a precision that Mamba-2 does not know excepted."""
    asked = ("model=tiny_nemotron_h", "task.generator={items: 1, length: 16, facts: 1, seed: 1}", "threads=1")
    assert accuracy.main(composed(*asked, "arms=[shared_fp32,raw_fp32_nvfp4]", f"records={tmp_path}")) == 0
    able, other = records(tmp_path)
    assert (able.status, other.status) == ("ok", "unsupported")
    assert other.message.startswith("fold=raw is for GDN and KDA; ")


def test_a_choice_is_right_where_the_right_one_is_likeliest() -> None:
    class Knowing(lm_eval_model.LM):
        """Finds the right value likeliest, from the facts in the text."""

        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
            return [(0.0 if self.follows(*request.args) else -1.0, False) for request in requests]

        def follows(self, context: str, choice: str) -> bool:
            facts, key = context.split("@")[1:], context.rpartition("#")[2]
            return any(fact.startswith(f"{key}{choice}\n") for fact in facts)

        loglikelihood_rolling = generate_until = None

    Knowing.__abstractmethods__ = frozenset()
    lm = Knowing()
    lm.settings = lm_eval_model.Settings()
    case = case_from_config(composed("task=four_choices", *SMALL, "task.generator.items=20"))
    tasks = lm_eval_tasks.load(case)
    doc = tasks["replayssm_four_choices"].task_docs[0]
    assert {"Question", "Correct Answer", *(f"Incorrect Answer {k}" for k in (1, 2, 3))} <= set(doc)
    assert len(set(doc["choices"])) == 4
    answers = lm_eval_tasks.answer(tasks, lm, case)[0][0]
    assert answers.correct == ("1" * 20,)
    assert answers.chance == 0.25
    places = {tasks["replayssm_four_choices"].task_docs[n]["answer"] for n in range(20)}
    assert places == {0, 1, 2, 3}


class Saying(lm_eval_model.EngineLM):
    """Says what ``answer(prompt)`` gives; keeps the options that it was asked with."""

    def __init__(self, answer: Any) -> None:
        super().__init__(None, None, None, rows=1, settings=lm_eval_model.Settings())
        self.says, self.options, self.seeds = answer, [], []

    def generate_until(self, requests: list[Instance]) -> list[str]:
        self.options += [request.args[1] for request in requests]
        self.seeds.append(self.settings.seed)
        return [self.says(request.args[0]) for request in requests]


def test_word_problems_are_read_by_the_filter_of_gsm8k() -> None:
    case = case_from_config(composed("task=word_problems", "task.generator.items=6"))
    tasks = lm_eval_tasks.load(case)
    docs = {doc["question"]: doc["answer"] for doc in tasks["replayssm_word_problems"].task_docs}

    def worked(prompt: str) -> str:
        assert prompt.count("#### ") == prompt.count("Question: ") - 1 == 5
        question = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        number = int(docs[question].rpartition("#### ")[2])
        return f"So many.\n#### {number if number % 2 else number + 1}"

    lm = Saying(worked)
    answers = lm_eval_tasks.answer(tasks, lm, case)[0][0]
    odd = "".join(str(int(answer[-1]) % 2) for answer in docs.values())
    assert answers.correct == (odd,)
    assert answers.filter == "strict-match"
    assert lm.options[0]["max_gen_toks"] == 96


def test_an_answer_ends_at_its_stop_and_begins_behind_thoughts() -> None:
    lm = Saying(None)
    said = "Is it (B)?</think>\n\n(A). Question: next"
    assert lm._answer(said, ["Question:", "never"]) == "Is it (B)?</think>\n\n(A). "
    lm.settings.thinking = True
    assert lm._answer(said, ["Question:", "never"]) == "(A). "


def test_a_continuation_begins_with_the_spaces_before_it() -> None:
    """As lm-eval asks of a model: a prompt's last space is part of the next word, not a token of its own."""
    text = lm_eval_model.Text(ROOT / "experiments/assets/models/tiny-qwen3.5")
    asked = text.pair("He said ", "that he")
    assert asked == text.pair("He said", " that he")
    assert text.tokenizer.decode(asked.tokens[asked.first :]) == " that he"
    alone = text.pair("", "that")
    assert (alone.tokens[0], alone.first) == (text.prefix, 1)


@pytest.fixture(autouse=True)
def only_gpqa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lm-eval's own tasks, thousands of files, only these are looked through."""
    folder = Path(lm_eval.__file__).parent / "tasks" / "gpqa"
    manager = lm_eval_tasks.TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(lm_eval_tasks, "_lm_evals", lambda: manager)


def test_gpqa_is_that_of_lm_eval_with_the_settings_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(path: str, name: str, **_: Any) -> dict[str, datasets.Dataset]:
        asked.append((path, name))
        return {"train": datasets.Dataset.from_list(GPQA)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    sampled = ("task.chat_template=false", "task.repeats=3", "task.temperature=0.6", "task.top_p=0.9")
    case = case_from_config(composed("task=gpqa_diamond", *sampled, "task.max_gen_toks=77"))
    tasks = lm_eval_tasks.load(case)
    assert asked == [("Idavidrein/gpqa", "gpqa_diamond")]
    docs = list(tasks["gpqa_diamond_cot_zeroshot"].eval_docs)
    lm = Saying(lambda prompt: "Not (B), but (A).")
    answers = lm_eval_tasks.answer(tasks, lm, case)[0][0]
    assert answers.filter == "flexible-extract"
    assert answers.correct == ("".join(str(int(doc["answer"] == "(A)")) for doc in docs),) * 3
    given = {"max_gen_toks": 77, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    assert lm.options[0].items() >= given.items()
    assert lm.seeds == [0, 1, 2]
    again = lm_eval_tasks.load(case)["gpqa_diamond_cot_zeroshot"].eval_docs
    assert [doc["answer"] for doc in again] == [doc["answer"] for doc in docs]


def test_data_out_of_reach_and_unknown_tasks_are_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("'Idavidrein/gpqa' is gated.\nAsk for access.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    gated = r"^task=gpqa_diamond: the data of gpqa_diamond_cot_zeroshot cannot be read \(DatasetNotFoundError: [^\n]*$"
    with pytest.raises(ConfigError, match=gated):
        lm_eval_tasks.load(case_from_config(composed("task=gpqa_diamond", "task.chat_template=false")))
    with pytest.raises(
        ConfigError, match=r"^task.harness=replayssm_nothing is unknown; accepted: a task of lm-eval, su"
    ):
        lm_eval_tasks.load(case_from_config(composed("task.harness=replayssm_nothing")))
    for wrong, said in {
        "task.filter=nope": "task.filter=nope is none of replayssm_word_problems; accepted: strict-match, ",
        "task.metric=acc": "task.metric=acc does not say right or wrong of the items of replayssm_word_probl",
    }.items():
        case = case_from_config(composed("task=word_problems", "task.generator.items=1", wrong))
        with pytest.raises(ConfigError, match=f"^{said}"):
            lm_eval_tasks.answer(lm_eval_tasks.load(case), Saying(lambda prompt: ""), case)
    for wrong in ("task.repeats=2", "task.prefill=3"):
        with pytest.raises(ConfigError, match=f"^{wrong} .*; accepted: "):
            lm_eval_tasks.load(case_from_config(composed("task=word_problems", "task.generator.items=1", wrong)))
    with pytest.raises(ConfigError, match=r"^task.temperature=0.5 needs a task that generates text; accepted: null$"):
        lm_eval_tasks.load(case_from_config(composed(*SMALL, "task.temperature=0.5")))
    with pytest.raises(
        ConfigError, match=r"^task.generator=.* is impossible \(recall: length 64, pairs 40, queries 40: "
    ):
        lm_eval_tasks.load(case_from_config(composed(*SMALL, "task.generator.facts=40")))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.path=/nowhere", "model.path=/nowhere is no folder; accepted: a Hugging Face folder with config.json"),
        ("model.path=/dev", "model.path=/dev lacks config.json; accepted: a Hugging Face folder with config.json"),
        ("model=nemotron_3_nano_4b", "model=nemotron_3_nano_4b ships no weights; accepted: model.path=a Hugging Face"),
        ("arms=[shared_fp32,nvfp4]", "arms=nvfp4 has no such precision; accepted: shared_nvfp4, "),
        ("arms=[damaged,damaged]", "arms=damaged is repeated; accepted: each arm once"),
        ("arms=[]", "arms=[] is impossible; accepted: a list of damaged, dual_fp16_sr_fp8"),
        ("engine=replay/jax", "engine=replay/jax is unknown; accepted: stored/torch, "),
        ("task.chat_template=true", "task.chat_template=true needs a chat template, which "),
        ("task.thinking=true", "task.thinking and task.system are given to a chat template; accepted: null, or "),
        ("task.generator.items=many", "task.generator.items=many is text; accepted: an integer"),
        ("+task.few_shots=5", "task.few_shots=5 is not an option; accepted: name, "),
        ("task.repeats=0", "task.repeats=0 is impossible; accepted: an integer from 1"),
        ("task.top_p=1.5", "task.top_p=1.5 is impossible; accepted: a number above 0 and at most 1"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        case_from_config(composed(override))
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_wrong_value_is_refused_before_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_case, "PACKAGES", ("no_such_package",))
    monkeypatch.setattr(nvidia, "gpu", lambda: None)
    monkeypatch.setattr(tracking_options, "installed", lambda package: False)
    for wrong, told in {
        "batch_size=0": "batch_size=0 is impossible",
        "records=/dev/null": "records=/dev/null cannot be used: /dev/null is not a folder",
        "device=cuda": "device=cuda finds no NVIDIA GPU; accepted: cpu, or a machine where nvidia-smi lists a GPU$",
        "tracker=none": "accuracy needs no_such_package; accepted: pip install",
    }.items():
        with pytest.raises(ConfigError, match=f"^{told}"):
            case_from_config(composed(*([] if wrong == "device=cuda" else ["tracker=wandb"]), wrong))


def test_what_changes_answers_changes_the_case_and_nothing_else() -> None:
    def hashed(*overrides: str) -> str:
        return case_hash(case_from_config(composed(*overrides)))

    first = hashed()
    assert hashed("batch_size=3", "threads=1", "arms=[damaged]") == first
    changes = (
        "seed=1",
        "task.limit=7",
        "interval_length=8",
        "model=tiny_nemotron_h",
        "task.prefill=null",
        "inputs=bf16",
    )
    assert len({first, *map(hashed, changes)}) == 1 + len(changes)


def test_a_checkpoint_made_by_transformers_runs(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-checkpoint"
    tiny_models.tiny_model("nemotron-mlp").save_pretrained(folder)
    known = ["?", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW #@"]
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(known)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    asked = (f"model.path={folder}", "task=word_problems", "task.generator.items=3", "task.max_gen_toks=5", "threads=1")
    arms = ["shared_fp32", "dual_fp16_sr_nvfp4", "damaged"]
    assert accuracy.main(composed(*asked, f"arms=[{','.join(arms)}]", f"records={tmp_path}")) == 0
    found = records(tmp_path)
    assert [(record.arm, record.status) for record in found] == [(arm, "ok") for arm in arms]
    assert {record.case["model"] for record in found} == {"tiny-checkpoint"}
    assert [len(record.answers[0].group) for record in found] == [3, 3, 3]
    assert 0 < found[0].work["decoded"] <= 3 * 5


def test_a_refusal_comes_before_torch() -> None:
    code = (
        "import sys\nfrom experiments.accuracy import case_from_config, run, main\nimport atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'lm_eval' in sys.modules))\n"
        "run('accuracy', main, check=case_from_config)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, "task.repeats=0"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (told.returncode, told.stdout) == (2, "False False\n")
    assert told.stderr.count("\n") == 1


def test_a_chat_is_rendered_as_transformers_renders_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = """{%- for m in messages %}
    {%- if m.role == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}
    {{- '<|' + m.role + '|>' + m.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{{ {'b': 1} | tojson }}"""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi"}]
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        assert chat.render(tmp_path, messages, continues=False, **variables) == wanted
    messages.append({"role": "assistant", "content": "The answer is"})
    wanted = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert chat.render(tmp_path, messages, continues=True) == wanted
    with pytest.raises(ConfigError, match=r"its chat template refuses \(no aliens\); accepted: another task$"):
        chat.render(tmp_path, [{"role": "alien", "content": ""}], continues=False)


def test_a_record_without_items_or_with_other_marks_cannot_be() -> None:
    good = {"task": "t", "metric": "acc", "filter": "none", "version": "1", "digest": "d", "correct": ("01",)}
    assert Answers(**good, group=(0, 0)).correct == ("01",)
    marks, distances = {"group": (0, 1), "correct": ("0x",)}, {"group": (0, 1), "distance": (3,)}
    for wrong in ({"group": ()}, {"group": (0,)}, marks, distances):
        with pytest.raises(ValueError, match=r"must hold|without items"):
            Answers(**good | wrong)
