"""The drift experiment: documents from folders, records and their checks, a killed run that goes on, damage refused."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

from experiments import documents, pg19
from experiments.app import CONFIGS, to_plain
from experiments.assets import vocabulary
from experiments.measure.drift import Drift
from experiments.measure.drift_record import Check, DriftRecord
from experiments.measure.drift_result import traffic
from experiments.options import ConfigError
from experiments.pg19_case import MODELS, ROOT, arms_from_config, case_from_config, case_hash
from experiments.precisions import named
from replayssm.geometry import Geometry

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
TOKENS = 48
WORDS = "And it came to pass that the people of the land, 1830 of them, went up to the city. "


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    (folder / "first.txt").write_text(WORDS * 9)
    (folder / "second.txt").write_text("Call me Ishmael. Some years ago\u2014never mind how long. " * 9)
    (folder / "short.txt").write_text("Too short.")
    return folder


def config(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_plain(hydra.compose("pg19", list(overrides)))


def options(books: Path, records: Path) -> list[str]:
    sizes = [f"documents={books}", "count=2", f"tokens={TOKENS}", "threads=1", "checkpoint_tokens=20", "seed=3"]
    return [*sizes, "arms=[shared_nvfp4,dual_fp8_sr_nvfp4]", f"records={records}"]


def read(folder: Path) -> list[DriftRecord]:
    return [DriftRecord.from_json(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def measured(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    assert pg19.main(config(*options(books, folder))) == 0
    return folder


def test_records_hold_what_was_asked(measured: Path, books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = read(measured)
    assert {(r.arm, r.document["title"]) for r in records} == {
        (arm, title) for arm in records[0].arms for title in ("first", "second")
    }
    assert len(records) == len(records[0].arms) * 2 == 10
    for record in records:
        assert record.status == "ok"
        assert record.edges[0] == 0
        assert record.edges[-1] == TOKENS
        assert {16, 32} < set(record.edges)
        text = (books / f"{record.document['title']}.txt").read_text()
        ids = vocabulary.encode(text)[1 : TOKENS + 1]
        assert sum(record.bytes) == len(vocabulary.load().decode(ids.tolist()).encode())
        assert record.state_error["positions"] == [16, 32, 48]
    by_arm = {arm: [r for r in records if r.arm == arm] for arm in records[0].arms}
    mean = {arm: sum(sum(r.kl) for r in found) / TOKENS / 2 for arm, found in by_arm.items()}
    assert mean["shared_fp32@1"] == 0
    moved = {arm: found[0].traffic for arm, found in by_arm.items()}
    assert moved["shared_fp32@1"] == {"update": 4.0, "read": 0.0, "step": 8.0}
    assert (moved["dual_fp8_sr_nvfp4"]["update"], moved["dual_fp8_sr_nvfp4"]["read"]) == (1 + 4 / 128, 0.5 + 12 / 128)
    assert moved["dual_fp8_sr_nvfp4"]["step"] < moved["shared_fp32"]["step"] / 3
    assert mean["shared_fp32"] < 1e-9 < 1e-5 < mean["dual_fp8_sr_nvfp4"] < 0.5
    assert 1e-4 < mean["shared_nvfp4"] < 0.5
    assert sum(by_arm["shared_fp32"][0].agree) == TOKENS
    assert not list(measured.glob(".pg19*"))
    assert pg19.main(config(*options(books, measured))) == 0
    assert "recorded already" in capsys.readouterr().out
    assert len(read(measured)) == 10


def test_a_killed_run_goes_on_in_the_middle_of_a_document(measured: Path, books: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.pg19", *options(books, tmp_path)]
    killed = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(".pg19*.pt")) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not read(tmp_path)
    assert len(list(tmp_path.glob(".pg19*.pt"))) == 1
    loaded: list[int] = []

    class Watched(Drift):
        def load(self, path: Path, identity: str) -> bool:
            found = super().load(path, identity)
            loaded.append(self.done)
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.measure.drift.Drift", Watched)
        assert pg19.main(config(*options(books, tmp_path))) == 0
    assert 0 < loaded[0] < TOKENS
    names = ("arm", "document", "kl", "nll", "agree", "bytes", "state_error", "checks", "case_hash", "arm_hash")
    one, other = (
        sorted([{name: getattr(r, name) for name in names} for r in read(folder)], key=str)
        for folder in (measured, tmp_path)
    )
    assert one == other


@pytest.mark.parametrize("damage", ["state", "keys", "tokens"])
def test_a_damaged_run_holds_no_numbers(
    damage: str, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state or a key of the reference that is not what it was, or a token that is not the document's."""
    whole = Drift._step

    def step(self: Drift, span: int) -> None:
        if self.done == 8:
            row = self.states.rows_of(0).start
            if damage == "state":
                self.states.cohorts[0].cache.state[0, row] = 0
            elif damage == "keys":
                self.cache.keys[0, row, 0, 3] += 1
            else:
                self.tokens[0, 9] += 1
        whole(self, span)

    monkeypatch.setattr(Drift, "_step", step)
    asked = [*options(books, tmp_path), "count=1", "tokens=16", "arms=[shared_nvfp4]"]
    assert pg19.main(config(*asked)) == 1
    records = read(tmp_path)
    assert len(records) == 4
    assert {r.status for r in records} == {"incorrect"}
    assert all(not r.kl and r.message for r in records)
    assert "incorrect: " in capsys.readouterr().out


def test_a_record_cannot_be_made_up(measured: Path) -> None:
    good = read(measured)[0]
    assert DriftRecord.from_json(good.to_json()) == good
    for change, told in (
        ({"kl": (*good.kl[:-1], float("nan"))}, "kl does not hold a number a bucket"),
        ({"agree": good.agree[1:]}, "agree does not hold a number a bucket"),
        ({"edges": (0, *good.edges)}, "do not rise from 0"),
        ({"checks": (Check("noise", 1.0, 0.5),)}, "status 'ok' with failed checks: noise"),
        ({"checks": ()}, "status 'ok' with failed checks: there is none"),
        ({"status": "incorrect"}, "status 'incorrect' needs a message"),
        ({"status": "error", "message": "x"}, "cannot hold numbers"),
    ):
        with pytest.raises(ValueError, match=told):
            dataclasses.replace(good, **change)
    for line in ("{}", "[]", '{"schema":"replayssm.drift/2"}', good.to_json().replace('"number":0', '"number":"0"')):
        with pytest.raises(ValueError, match=r"^(not a replayssm.drift/1 object|document.number)"):
            DriftRecord.from_json(line)


def test_documents_of_a_folder(books: Path, tmp_path: Path) -> None:
    tokenizer = documents.tokenizer_of(MODELS / "tiny-qwen3.5")
    found = documents.load(str(books), 2, 50, tokenizer)
    assert [document.title for document in found] == ["first", "second"]
    assert [len(document.tokens) for document in found] == [51, 51]
    assert (WORDS * 9).startswith(tokenizer.decode(found[0].tokens.tolist()))
    told = r"^documents=.* has 2 documents of more than 50 tokens, 1 shorter ones; accepted: 3 of them, "
    with pytest.raises(ConfigError, match=told):
        documents.load(str(books), 3, 50, tokenizer)
    longest = max(len(tokenizer.encode(file.read_text(), add_special_tokens=False)) for file in books.glob("*.txt"))
    assert len(documents.load(str(books), 1, longest - 1, tokenizer)[0].tokens) == longest
    with pytest.raises(ConfigError, match=rf"^documents=.* has 0 documents of more than {longest} tokens, 3 shorter "):
        documents.load(str(books), 1, longest, tokenizer)
    with pytest.raises(ConfigError, match=r"^documents=.* holds no .txt and no .parquet file; accepted: "):
        documents.load(str(tmp_path), 1, 50, tokenizer)
    with pytest.raises(ConfigError, match=r"^documents=nowhere is no folder; accepted: books, hub, or a folder "):
        documents.load("nowhere", 1, 50, tokenizer)
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing; accepted: "):
        documents.tokenizer_of(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / "tiny-qwen3.5", tmp_path / "model"))


def test_a_tokenizer_that_does_not_fit_is_refused_in_one_line(folder: Path) -> None:
    """One of more tokens than the model has, which would be looked up behind the end of its embedding."""
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"vocab_size": 1024', '"vocab_size": 1023'))
    with pytest.raises(ConfigError, match=r"tokenizer.json has token 1023; accepted: 0 to 1022, which the model of "):
        documents.tokenizer_of(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read \(EOF .*\); accepted: a tokenizer.json of "):
        documents.tokenizer_of(folder)


def test_weights_that_cannot_be_loaded_are_refused_before_anything_runs(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ConfigError, match=r"^model.path=.*model.safetensors cannot be read, truncated or no safeten"):
        case_from_config(config(f"model.path={folder}"))


def test_a_head_beside_tied_embeddings_is_refused_before_anything_runs(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^model.path={folder}: {folder}: lm_head.weight is not the embedding; ac"):
        case_from_config(config(f"model.path={folder}"))


def test_documents_of_a_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is pandas', which needs a package that not everyone has: its table is put in its place."""
    tokenizer = documents.tokenizer_of(MODELS / "tiny-qwen3.5")
    table = pd.DataFrame({"short_book_title": ["one", "two"], "text": [WORDS * 9, WORDS * 8]})
    (tmp_path / "test.parquet").touch()
    monkeypatch.setattr(pd, "read_parquet", lambda file: table)
    assert [d.title for d in documents.load(str(tmp_path), 2, 50, tokenizer)] == ["one", "two"]
    monkeypatch.setattr(pd, "read_parquet", lambda file: table.rename(columns={"text": "prose"}))
    with pytest.raises(ConfigError, match=r"has columns short_book_title, prose; accepted: one that is named text or"):
        documents.load(str(tmp_path), 2, 50, tokenizer)

    def missing(file: Path) -> None:
        raise ImportError("no pyarrow")

    monkeypatch.setattr(pd, "read_parquet", missing)
    with pytest.raises(ConfigError, match=r"needs pyarrow, which is not installed; accepted: pip install pyarrow"):
        documents.load(str(tmp_path), 2, 50, tokenizer)


def test_documents_of_the_hub_name_the_repositories_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = documents.tokenizer_of(MODELS / "tiny-qwen3.5")

    def load_dataset(name: str, **more: Any) -> list[dict[str, str]]:
        if name != documents.HUB_COPIES[1] or not reachable:
            raise ConnectionError("cannot reach\nthe hub")
        return [{"short_book_title": "A book", "text": WORDS * 9}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    reachable = True
    assert [d.title for d in documents.load("hub", 1, 50, tokenizer)] == ["A book"]
    reachable = False
    with pytest.raises(ConfigError) as refused:
        documents.load("hub", 1, 50, tokenizer)
    assert all(f"{name} (cannot reach the hub)" in str(refused.value) for name in documents.HUB_COPIES)
    assert "\n" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"^documents=hub needs the package datasets, which is not installed; acc"):
        documents.load("hub", 1, 50, tokenizer)


def test_books_are_the_held_out_ones() -> None:
    """A beginning is encoded without the rest of the book, with the same tokens."""
    (emma,) = documents.load("books", 1, 300, vocabulary.load())
    assert emma.title == "Emma from token 0"
    whole = vocabulary.encode(documents_text("Emma")[:40000])
    assert emma.tokens.tolist() == whole[:301].tolist()


def test_stretches_of_books_meet_and_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of one, which is only predicted, is the first of the next."""
    few = [types.SimpleNamespace(title=title, text=WORDS * times) for title, times in (("long", 9), ("short", 3))]
    monkeypatch.setattr("experiments.assets.books.load", lambda split: few)
    tokens = len(vocabulary.encode(few[1].text)) // 2
    found = documents.load("books", 4, tokens - 1, vocabulary.load())
    titles = [f"{title} from token {at}" for at in (0, tokens - 1) for title in ("long", "short")]
    assert [document.title for document in found] == titles
    assert [document.tokens[-1] for document in found[:2]] == [document.tokens[0] for document in found[2:]]


def test_a_fold_from_raw_inputs_moves_them_too() -> None:
    """v and beta beside d: bytes of the ring, and of nothing else."""
    geometry = Geometry("gdn", 2, 1, 128, 128)
    from_d, raw = (traffic(geometry, named(f"{fold}_fp32_nvfp4"), "bf16") for fold in ("dual", "raw"))
    assert raw["step"] > from_d["step"]
    assert raw | {"step": 0} == from_d | {"step": 0}


def documents_text(title: str) -> str:
    from experiments.assets import books

    return next(book.text for book in books.load("held_out") if book.title == title)


def test_other_weights_of_the_same_shapes_are_another_case(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-qwen3.5"
    shutil.copytree(MODELS / "tiny-qwen3.5", folder)
    same = case_from_config(config(f"model.path={folder}"))
    assert case_hash(same) == case_hash(case_from_config(config()))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert case_hash(case_from_config(config(f"model.path={folder}"))) != case_hash(same)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.path=nowhere"], r"model.path=nowhere is no folder; accepted: a Hugging Face folder with .*"),
        (["model.path=/dev"], r"model.path=/dev lacks config.json; accepted: a Hugging Face folder with .*"),
        (["model=qwen3_5_4b"], r"model=qwen3_5_4b ships no weights; accepted: model.path=a Hugging Face folder .*"),
        (["documents=nowhere"], r"documents=nowhere is no folder; accepted: books, hub, or a folder of .txt or .*"),
        ([f"documents={MODELS}"], r"documents=.*models holds no .txt and no .parquet file; accepted: books, .*"),
        (["arms=[nvfp4]"], r"arms=nvfp4 has no such precision; accepted: shared_.*"),
        (["arms=[shared_fp32]"], r"arms=shared_fp32 is repeated; accepted: each arm once; .*"),
        (["arms=[]"], r"arms=\[\] is impossible; accepted: default, or a list of precisions .*"),
        (["model=tiny_nemotron_h", "arms=[raw_fp32_nvfp4]"], r"arms=raw_fp32_nvfp4 is for GDN and KDA, not for .*"),
        (["tokens=8"], r"tokens=8 is impossible; accepted: an integer from 16 to 1048576"),
        (["checkpoint_tokens=0"], r"checkpoint_tokens=0 is impossible; accepted: an integer of at least 1"),
        (["device=cuda", "threads=1"], r"threads=1 is impossible; accepted: 0 with device=cuda.*"),
    ],
)
def test_refusals_are_one_line(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}$"):
        case_from_config(config(*overrides))


def test_the_default_has_four_arms_beside_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    default = config("dry_run=true")
    arms = [arm.name for arm in arms_from_config(default, case_from_config(default))]
    assert arms[:2] == ["shared_fp32@1", "shared_fp32@1/again"]
    assert arms[2:] == ["shared_fp32", "shared_nvfp4", "dual_fp32_nvfp4", "dual_fp16_sr_nvfp4"]
    assert pg19.main(default) == 0
    assert "tiny-qwen3.5, 1 x 2,048 tokens of books, L 16, fp32 on cpu: 6 arms, 0.0" in capsys.readouterr().out
    bounds = pg19.edges(2048)
    assert all(2**power in bounds for power in range(12))
    assert bounds[0] == 0
    assert all(one < other for one, other in pairwise(bounds))
