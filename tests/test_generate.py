"""Text from the embedded models: readable, the same from every arm and seed, streamed; refusals are one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from experiments import chat, generate
from experiments.assets import books
from experiments.options import ConfigError

MODELS = sorted(path.parent for path in generate.TINY.parent.glob("*/config.json"))


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["generate", *options])
    return generate.main()


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_both_models_write_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for arm in ("replay/cpu", "stored/torch", "replay/cpu"):
        assert run(monkeypatch, str(folder), "--arm", arm, "--seed", "3") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith(generate.PROMPT)
    known = set(re.findall(r"[a-z]+", " ".join(book.text for book in books.load("train")).lower()))
    words = re.findall(r"[a-z]+", texts[0].removeprefix(generate.PROMPT).lower())
    assert len(words) > 30
    assert sum(word in known for word in words) > 0.8 * len(words), texts[0]
    assert len(set(words)) > 0.4 * len(words), texts[0]


def test_characters_are_shown_whole() -> None:
    tokenizer = Tokenizer.from_file(str(generate.TINY / "tokenizer.json"))
    tokens = tokenizer.encode("a — b", add_special_tokens=False).ids
    pieces = list(generate.text_of(iter(tokens), tokenizer))
    assert "".join(pieces) == "a — b"
    assert len(pieces) > 2
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["/nowhere"], "folder=/nowhere is no folder; accepted: a Hugging Face folder with config.json, tok"),
        (["/dev"], "folder=/dev lacks config.json; accepted: a Hugging Face folder with config.json, tok"),
        (["--arm", "stored/vllm"], "arm=stored/vllm is unknown; accepted: stored/torch"),
        (["--tokens", "0"], "tokens=0 is impossible; accepted: an integer of at least 1"),
        (["--temperature", "-1"], "temperature=-1.0 is impossible; accepted: a number of at least 0"),
        (["--top-p", "0"], "top_p=0.0 is impossible; accepted: a number above 0 and at most 1"),
        (["--prompt", ""], 'prompt="" is impossible; accepted: a text'),
        (["--device", "cuda"], "device=cuda finds no NVIDIA GPU; accepted: cpu, or a machine where nvidia-smi li"),
    ],
)
def test_refusals_are_one_line(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate.nvidia, "gpu", lambda: None)
    assert run(monkeypatch, *options) == 2
    told = capsys.readouterr()
    assert told.err.startswith(message)
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_a_configuration_that_is_no_json_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{")
    assert run(monkeypatch, str(tmp_path)) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"folder={tmp_path}: {tmp_path / 'config.json'} is no JSON")
    assert (told.err.count("\n"), told.out) == (1, "")


def test_a_text_ends_with_the_tokens_that_a_folder_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": null}')
    assert chat.ends_of(tmp_path) == []
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 5}}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert chat.ends_of(tmp_path) == [4, 5]
    for text, told in (
        ('{"eos_token_id": "</s>"}', "generation_config.json: eos_token_id='</s>' is impossible; accepted: a token"),
        ("{", "generation_config.json is no JSON (Expecting property name"),
        ("[]", "generation_config.json holds a list; accepted: a JSON object"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=re.escape(told)):
            chat.ends_of(tmp_path)


def test_a_refusal_is_one_line_and_comes_before_torch() -> None:
    code = (
        "import sys, atexit; from experiments import generate\n"
        "atexit.register(lambda: print(sorted({'torch', 'tokenizers', 'numpy'} & set(sys.modules))))\n"
        "sys.argv[1:] = OPTIONS; sys.exit(generate.main())"
    )
    for options in (["--temperature", "-1"], ["--device", "tpu"], ["--tokens", "many"], ["--nope"]):
        command = [sys.executable, "-c", code.replace("OPTIONS", repr(options))]
        told = subprocess.run(command, cwd=generate.ROOT, capture_output=True, text=True)
        assert (told.returncode, told.stdout) == (2, "[]\n"), told.stderr
        assert told.stderr.count("\n") == 1
        assert "; accepted: " in told.stderr
