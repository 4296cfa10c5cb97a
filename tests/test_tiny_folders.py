"""The small models that ship: their size, their logits here and in transformers, their cards and figure."""

import pytest
import torch
import transformers

from analysis import training
from analysis.__main__ import same
from experiments.assets import books, vocabulary
from experiments.evaluate_tiny import card
from replayssm.kernels.torch import stored_step
from replayssm.models import StoredStates, load_model

FOLDERS = sorted(path.parent for path in training.MODELS.glob("*/config.json"))
shipped = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@shipped
def test_it_loads_here_and_in_transformers_with_equal_logits(folder):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = books.load("held_out")[0].text[:1000]
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokens[0].tolist() == vocabulary.encode(text).tolist()
    ours = load_model(folder, dtype=torch.float32)
    states = StoredStates(ours.geometry, stored_step, slots=1, layers=ours.state_layers)
    cache = ours.new_cache(states, slots=1, capacity=tokens.shape[1])
    with torch.no_grad():
        expected = theirs(tokens).logits
    found = ours.prefill(tokens, cache, [0], (tokens.shape[1],), every=True)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@shipped
def test_its_weights_fit_and_its_card_says_what_its_files_say(folder):
    assert (folder / "model.safetensors").stat().st_size <= 5_500_000
    assert (folder / "README.md").read_text() == card(folder)


@pytest.mark.skipif(not FOLDERS, reason="no trained models are there")
def test_the_figure_is_drawn_from_the_shipped_logs(tmp_path):
    assert training.main(["--out", str(tmp_path)]) == 0
    for name in ("training.svg", "training.png"):
        assert same(tmp_path / name, training.MODELS / name), name
