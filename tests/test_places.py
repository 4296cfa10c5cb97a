"""No record says where on somebody's disk weights, prompts or documents lay; digests say what was there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest

from analysis import gates
from experiments import accuracy_case, decode_case, pg19_case, places, speculative_case
from experiments.app import CONFIGS, to_plain
from experiments.case import case_hash

MODEL = places.ROOT / "experiments" / "assets" / "models" / "tiny-qwen3.5"
ONE = ("batch_size=1", "precision=fp32_fp32", "threads=1")
DRAFTS = (*ONE, "drafter=draft_model", "draft_weights={}", "prompts={}/asked.jsonl", "weights={}")
KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], str], tuple[str, ...]]] = {
    "decode": (decode_case.case_from_config, case_hash, (*ONE, "weights={}")),
    "speculative": (speculative_case.case_from_config, case_hash, DRAFTS),
    "pg19": (pg19_case.case_from_config, pg19_case.case_hash, ("threads=1", "model.path={}", "documents={}")),
    "accuracy": (accuracy_case.case_from_config, accuracy_case.case_hash, ("threads=1", "model.path={}")),
}


def laid_out(folder: Path, words: str = "words") -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(MODEL / name, folder)
    (folder / "model.safetensors").symlink_to(MODEL / "model.safetensors")
    (folder / "asked.jsonl").write_text(json.dumps({"question": words}))
    (folder / "document.txt").write_text(words)
    return folder


@pytest.mark.parametrize("experiment", KINDS)
def test_a_record_says_no_place(experiment: str, tmp_path: Path) -> None:
    case_from_config, hash_of, options = KINDS[experiment]

    def case(folder: Path) -> Any:
        asked = [option.format(folder) for option in options]
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return case_from_config(to_plain(hydra.compose(experiment, [*asked, "dry_run=true"])))

    first, moved = laid_out(tmp_path / "a" / "mine"), laid_out(tmp_path / "b" / "mine")
    one, held = case(first), places.recorded(case(first))
    assert str(tmp_path) not in json.dumps(held)
    field = "path" if experiment == "accuracy" else "weights"
    assert (getattr(one, field), held[field]) == (str(first), ".../mine")
    assert hash_of(case(moved)) == hash_of(one)
    if experiment in ("decode", "speculative"):
        assert gates.case_hash(held) == case_hash(one)
    if experiment in ("speculative", "pg19"):
        assert hash_of(case(laid_out(tmp_path / "c" / "mine", "others"))) != hash_of(one)


def test_within_the_checkout_it_says_where() -> None:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        of = decode_case.case_from_config(to_plain(hydra.compose("decode", [*ONE, f"weights={MODEL}", "dry_run=true"])))
    assert places.recorded(of)["weights"] == "experiments/assets/models/tiny-qwen3.5"
    assert of.weights == str(MODEL)
