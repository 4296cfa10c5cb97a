"""Whole models against Hugging Face transformers' own, in float32: a prompt and 64 decoded tokens.

The tiny models are saved as folders, loaded here, and both read the same tokens. Every logit must agree to 1e-4 of the
largest. That the comparison can fail is shown by dropping each block in turn, and each part of the cache.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, VOCABULARY, tiny_model
from torch import Tensor, nn

from replayssm.geometry import Geometry
from replayssm.kernels import cpu
from replayssm.kernels.torch import replay_step, stored_step
from replayssm.models import Decoder, ModelCache, ModelError, ReplayStates, StoredStates, load_model

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE
LENGTHS, STEPS, CHUNK = (90, 37), 64, 48
CAPACITY = max(LENGTHS) + STEPS


def tokens_of(rows: int = len(LENGTHS)) -> Tensor:
    return torch.randint(VOCABULARY, (rows, CAPACITY), generator=torch.Generator().manual_seed(1))


@cache
def theirs(name: str) -> list[Tensor]:
    """For each row the logits ``[prompt + STEPS, vocabulary]`` of transformers' model, each row by itself."""
    model, rows = tiny_model(name), []
    for row, length in zip(tokens_of(), LENGTHS, strict=True):
        output = model(input_ids=row[None, :length], use_cache=True)
        logits = [output.logits[0]]
        for t in range(length, length + STEPS):
            output = model(input_ids=row[None, t : t + 1], cache=output.cache, use_cache=True)
            logits.append(output.logits[0])
        rows.append(torch.cat(logits))
    return rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in folders.items():
        tiny_model(name).save_pretrained(folder)
    return folders


def stored(model: Decoder, slots: int, step: Any = stored_step) -> ModelCache:
    states = StoredStates(model.geometry, step, slots=slots, layers=model.state_layers)
    return model.new_cache(states, slots=slots, capacity=CAPACITY)


def replay(model: Decoder, slots: int, length: int, step: Any = replay_step) -> ModelCache:
    states = ReplayStates(model.new_replay_cache(slots=slots, interval_length=length), step)
    return model.new_cache(states, slots=slots, capacity=CAPACITY)


def ours(model: Decoder, cache: ModelCache, damage: Any = None, steps: int = STEPS) -> list[Tensor]:
    """As `theirs`, both rows at once; ``damage(cache)`` happens between prompt and decoding."""
    tokens, rows = tokens_of(), list(range(len(LENGTHS)))
    prompt = model.prefill(tokens[:, : max(LENGTHS)], cache, rows, LENGTHS, chunk=CHUNK, every=True)
    if damage is not None:
        damage(cache)
    logits = [[prompt[row, :length]] for row, length in enumerate(LENGTHS)]
    for t in range(steps):
        step = model.decode(torch.stack([tokens[row, length + t] for row, length in enumerate(LENGTHS)]), cache)
        for row in rows:
            logits[row].append(step[row, None])
    return [torch.cat(row) for row in logits]


def difference(mine: list[Tensor], other: list[Tensor], first: int = 0) -> float:
    """The largest, as a share of the largest logit; from the prompt's token on, or behind the prompt."""
    cut = [0, 0] if first == 0 else list(LENGTHS)
    pairs = [(a[at:], b[at : len(a)]) for a, b, at in zip(mine, other, cut, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_prompt_and_decoding_agree_with_transformers(folders: dict[str, Path], name: str) -> None:
    model = load_model(folders[name], dtype=torch.float32)
    assert difference(ours(model, stored(model, 2)), theirs(name)) <= TOLERANCE


@pytest.mark.parametrize("length", [1, 3, 16])
@pytest.mark.parametrize("name", ["nemotron-moe-latent", "qwen-mlp-tied"])
def test_the_replay_arm_gives_the_same_logits(folders: dict[str, Path], name: str, length: int) -> None:
    model = load_model(folders[name], dtype=torch.float32)
    cache = replay(model, 2, length)
    assert difference(ours(model, cache), theirs(name)) <= TOLERANCE
    assert isinstance(cache.states, ReplayStates)
    assert (cache.states.cache.flushes == STEPS // length).all()


@pytest.mark.parametrize("name", ["nemotron-mlp", "qwen-moe"])
def test_the_cpu_back_end_gives_the_same_logits(folders: dict[str, Path], name: str) -> None:
    model = load_model(folders[name], dtype=torch.float32)
    kernels = cpu.KERNELS[model.geometry.family]
    assert difference(ours(model, stored(model, 2, kernels.stored_step)), theirs(name)) <= TOLERANCE
    assert difference(ours(model, replay(model, 2, 3, kernels.replay_step)), theirs(name)) <= TOLERANCE


def blocks(model: nn.Module) -> list[str]:
    """Mixers and MLPs, and the two parts of a mixture of experts."""
    kinds = ("mixer", "linear_attn", "self_attn", "mlp", "experts", "shared_expert", "shared_experts")
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] in kinds]


@pytest.mark.parametrize("name", ["nemotron-mlp", "nemotron-moe-latent", "qwen-mlp-tied", "qwen-moe"])
def test_dropping_any_block_shows(folders: dict[str, Path], name: str) -> None:
    model = load_model(folders[name], dtype=torch.float32)
    whole = ours(model, stored(model, 2), steps=2)
    dropped = {}
    for block in blocks(model):
        hook = model.get_submodule(block).register_forward_hook(lambda module, inputs, out: torch.zeros_like(out))
        damaged = ours(model, stored(model, 2), steps=2)
        dropped[block] = min(difference(damaged, whole), difference(damaged, whole, first=1))
        hook.remove()
    assert len(dropped) >= 8
    assert min(dropped.values()) > VISIBLE, dropped


@pytest.mark.parametrize("part", ["states", "conv", "keys", "values", "length"])
@pytest.mark.parametrize("name", ["nemotron-mlp", "qwen-mlp-tied"])
def test_losing_a_part_of_the_cache_shows(folders: dict[str, Path], name: str, part: str) -> None:
    model = load_model(folders[name], dtype=torch.float32)

    def damage(cache: ModelCache) -> None:
        if part == "states":
            cache.states.state.zero_()
        elif part == "length":
            cache.length -= 20
        else:
            getattr(cache, part).zero_()

    damaged = ours(model, stored(model, 2), damage, steps=2)
    assert difference(damaged, theirs(name), first=1) > VISIBLE


@pytest.mark.parametrize("name", ["nemotron-mlp", "qwen-moe"])
def test_a_prompt_does_not_depend_on_chunks_and_neighbours(folders: dict[str, Path], name: str) -> None:
    model = load_model(folders[name], dtype=torch.float32)
    tokens = tokens_of()[:, : max(LENGTHS)]
    both, alone = stored(model, 2), stored(model, 2)
    last = model.prefill(tokens, both, lengths=LENGTHS, chunk=2)
    for row, length in enumerate(LENGTHS):
        other = model.prefill(tokens[row, None, :length], alone, [row])
        assert float((last[row] - other[0]).abs().max() / other.abs().max()) <= TOLERANCE
    torch.testing.assert_close(both.conv, alone.conv, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(both.states.state, alone.states.state, rtol=TOLERANCE, atol=TOLERANCE)
    assert both.length.tolist() == alone.length.tolist() == list(LENGTHS)


def memory_of(cache: ModelCache, slot: int) -> list[Tensor]:
    """Copies of all that the cache holds of a slot."""
    states = cache.states.cache if isinstance(cache.states, ReplayStates) else cache.states
    tensors = [cache.keys, cache.values, cache.conv, states.state, *getattr(states, "ring", {}).values()]
    return [tensor[:, slot].clone() for tensor in tensors]


@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("name", ["nemotron-mlp", "qwen-mlp-tied"])
def test_a_slot_is_reused_while_others_go_on(folders: dict[str, Path], name: str, length: int | None) -> None:
    """Row 1 pauses, then its slot starts row 0's prompt anew, while slot 0 decodes."""
    model = load_model(folders[name], dtype=torch.float32)
    cache = stored(model, 3) if length is None else replay(model, 3, length)
    tokens, expected = tokens_of(), theirs(name)[0]
    prompt = LENGTHS[0]
    model.prefill(tokens[:, :prompt], cache, [0, 1], LENGTHS)
    padded, paused = torch.tensor([0, -1]), memory_of(cache, 1)
    for t in range(5):
        logits = model.decode(tokens[:, prompt + t], cache, padded, span=prompt + 5)
        assert float((logits[0] - expected[prompt + t]).abs().max() / expected.abs().max()) <= TOLERANCE
    assert cache.length.tolist() == [prompt + 5, LENGTHS[1], 0]
    for before, after in zip(paused, memory_of(cache, 1), strict=True):
        assert torch.equal(before.nan_to_num(-7.5), after.nan_to_num(-7.5))
    model.prefill(tokens[0, None, :prompt], cache, [1])
    for t in range(5):
        step = torch.stack([tokens[0, prompt + 5 + t], tokens[0, prompt + t]])
        logits = model.decode(step, cache)
        for row, at in ((0, prompt + 5 + t), (1, prompt + t)):
            assert float((logits[row] - expected[at]).abs().max() / expected.abs().max()) <= TOLERANCE


def test_what_cannot_be_decoded_is_refused(folders: dict[str, Path]) -> None:
    model = load_model(folders["qwen-mlp-tied"], dtype=torch.float32)
    cache, tokens = stored(model, 2), tokens_of()
    for call, message in (
        (lambda: model.prefill(tokens[:, :4], cache, [0, 0]), "slots=.0, 0. is impossible; accepted: 2 different"),
        (lambda: model.prefill(tokens[:, :4], cache, [0, 2]), "slots=.0, 2. is impossible"),
        (lambda: model.prefill(tokens[:, :4], cache, lengths=[4, 5]), "lengths=.4, 5. is impossible; accepted: 2 of 1"),
        (lambda: model.prefill(tokens[:, :4], cache, lengths=[4, 0]), "lengths=.4, 0. is impossible"),
        (lambda: model.prefill(tokens[:, :4] + VOCABULARY, cache), "outside the vocabulary; accepted: 0 to 60"),
        (lambda: model.prefill(tokens[:, :4], cache, chunk=0), "chunk=0 is impossible"),
        (lambda: model.decode(tokens[:, 0], cache, torch.tensor([1, 0])), "accepted: row i holds i"),
        (lambda: model.decode(tokens[:, 0], cache, span=CAPACITY + 1), "a span of 1 to"),
        (lambda: model.decode(tokens[0, :3], cache), "3 tokens for 2 slots"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    model.prefill(tokens, cache)
    with pytest.raises(ModelError, match=f"holds {CAPACITY} tokens already; accepted: fewer than {CAPACITY}"):
        model.decode(tokens[:, 0], cache)
    other = StoredStates(Geometry("gdn", 4, 2, 12, 16), stored_step, slots=2, layers=1)
    with pytest.raises(ValueError, match=r"states of 1 layers of .* accepted: 3 layers"):
        model.new_cache(other, slots=2, capacity=8)
    with pytest.raises(ValueError, match="slots=3 and capacity=8 with states of 2 slots"):
        model.new_cache(cache.states, slots=3, capacity=8)
