"""Training the small hybrids: the loss falls, a stopped run goes on exactly, and what ships loads in transformers."""

import json
import lzma

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from experiments import evaluate_tiny, hybrids, train_tiny
from experiments.assets import books, recall, vocabulary

SMOKE = ["--size", "smoke", "--tokens", "512", "--segment", "256", "--longest", "1024", "--documents", "2"]
SMOKE += ["--learning-rate", "1e-2"]


@pytest.fixture(scope="module")
def few():
    """The first 60,000 characters of one book a split, so that no test waits for the tokenizer."""
    read = {split: books.load(split)[-1] for split in books.SPLITS}
    return {split: {book.title: vocabulary.encode(book.text[:60_000])} for split, book in read.items()}


@pytest.fixture(autouse=True)
def short_books(monkeypatch, few):
    monkeypatch.setattr(vocabulary, "tokens", few.__getitem__)
    recall._filler.cache_clear()
    yield
    recall._filler.cache_clear()
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def run(folder, model, steps, *more):
    return train_tiny.main(["--model", model, "--out", str(folder), "--steps", str(steps), *SMOKE, *map(str, more)])


def log(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("model", hybrids.MODELS)
def test_the_loss_falls_and_the_shipped_folder_gives_the_same_logits_in_transformers(model, tmp_path):
    folder = tmp_path / "shipped"
    assert run(tmp_path / "run", model, 20, "--ship", folder) == 0
    lines = log(tmp_path / "run")
    losses = [line["loss"] / 1.2 for line in lines]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.3
    assert {line["length"] for line in lines} == {256, 512, 1024}
    assert {line["window"] for line in lines} == {64, None}

    trained = hybrids.build(model, "smoke")
    trained.load_state_dict(torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"])
    with torch.no_grad():
        for weight in trained.parameters():
            weight.copy_(weight.bfloat16())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = next(iter(books.load("held_out"))).text[:2000]
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokens[0].tolist() == vocabulary.encode(text).tolist()
    with torch.no_grad():
        expected = trained.logits(trained.trunk(tokens)[0])
        found = loaded(tokens).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {str(file.get_tensor(name).dtype) for name in names} == {"torch.bfloat16"}
    prefix = "backbone." if model == "nemotron-h" else "model."
    assert all(name.startswith((prefix, "mtp.layers.0.", "mtp.", "lm_head.")) for name in names)
    assert ("mtp.layers.0.eh_proj.weight" if model == "nemotron-h" else "mtp.fc.weight") in names
    result = json.loads((folder / "evaluation.json").read_text())
    card = (folder / "README.md").read_text()
    assert evaluate_tiny.main([str(folder), "--longest", "1024", "--documents", "2"]) == 0
    assert json.loads((folder / "evaluation.json").read_text()) == result
    assert (folder / "README.md").read_text() == card
    assert f"{result['bits_per_byte']:.3f} bits per byte" in card
    assert f"--model {model} --size smoke --steps 20" in card
    assert set(result["recall_256_8"]) == {"full", "masked", "carried", "shuffled", "questions"}


@pytest.mark.slow
@pytest.mark.parametrize("model", hybrids.MODELS)
def test_a_run_stopped_at_every_step_has_the_losses_of_one_that_was_not(model, tmp_path):
    assert run(tmp_path / "whole", model, 6) == 0
    for _ in range(5):
        assert run(tmp_path / "parts", model, 6, "--stop-after", 0) == 3
    assert run(tmp_path / "parts", model, 6) == 0
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)
    results = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("whole", "parts")]
    assert results[0] == results[1]


def test_a_stopped_run_ships_what_it_has_and_says_so(tmp_path):
    assert run(tmp_path / "run", "nemotron-h", 9, "--stop-after", 0, "--ship", tmp_path / "shipped") == 3
    assert "was stopped after 1 of these steps." in (tmp_path / "shipped" / "README.md").read_text()
    assert len(lzma.decompress((tmp_path / "shipped" / "training.jsonl.xz").read_bytes()).splitlines()) == 1
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shipped")


@pytest.mark.slow
def test_steps_that_fit_are_as_good_as_steps_that_were_asked_for(tmp_path, monkeypatch):
    fitted = []
    count = train_tiny.steps_that_fit
    monkeypatch.setattr(train_tiny, "steps_that_fit", lambda *a: fitted.append(min(count(*a), 3)) or fitted[-1])
    for _ in range(2):
        assert run(tmp_path / "fit", "nemotron-h", 1, "--fit", 600, "--stop-after", 0) == 3
    assert fitted == [3]
    assert run(tmp_path / "asked", "nemotron-h", 3) == 0
    assert log(tmp_path / "fit") == log(tmp_path / "asked")[:2]
    with pytest.raises(SystemExit, match=r"--fit 0\.001: not one step fits"):
        run(tmp_path / "none", "nemotron-h", 1, "--fit", 0.001)


def test_a_checkpoint_of_another_run_is_refused_in_one_line(tmp_path):
    assert run(tmp_path, "nemotron-h", 6, "--stop-after", 0) == 3
    with pytest.raises(SystemExit, match=r"checkpoint\.pt is of another run: .*'steps': 6.*choose another --out"):
        run(tmp_path, "nemotron-h", 7)


def test_tokens_that_do_not_divide_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "nemotron-h", 6, "--tokens", 300)
    assert "--tokens 300: accepted are multiples of --segment 256" in capsys.readouterr().err


def test_a_perfect_memory_scores_as_one_and_another_rows_state_does_not():
    """The split into halves, the shuffled state and the positions, on a model that remembers all it has read."""
    task = evaluate_tiny.ask(1, 4, 256, 8, "cpu")

    class Remembering:
        """Its state is the tokens read; its hidden state the answer that follows from them."""

        def trunk(self, tokens, states, window):
            read = tokens if states is None else torch.cat([states[0][0], tokens], 1)
            hidden = torch.zeros(*tokens.shape, vocabulary.SIZE)
            fact = int(vocabulary.encode("@")[0])
            for row, line in enumerate(read.tolist()):
                facts = {line[at + 1]: line[at + 2] for at, token in enumerate(line[:-2]) if token == fact}
                for at, token in enumerate(tokens[row].tolist()):
                    hidden[row, at, facts.get(token, 0)] = 1
            return hidden, [(read, read)]

        def logits(self, hidden):
            return hidden

    for halves, low, high in (("whole", 1, 1), ("carried", 1, 1), ("shuffled", 0, 0.2)):
        chosen = evaluate_tiny.answers(Remembering(), task, None, halves).argmax(-1)
        assert low <= (chosen == task[2]).float().mean() <= high, halves


def test_a_folder_that_training_did_not_ship_is_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        evaluate_tiny.main([str(tmp_path)])
    assert "is no model that experiments/train_tiny.py shipped: it lacks training.json" in capsys.readouterr().err
