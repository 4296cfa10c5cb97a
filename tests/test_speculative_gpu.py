"""Speculative steps on a GPU: graphs give what eager steps give, wait for nothing and allocate nothing; greedy tokens
are those of plain decoding, but for near ties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine_models import GEOMETRIES, VOCABULARY, by_request, prompts

from replayssm.engine import Engine, Request, Sampling, SpeculativeEngine, WindowStep, new_cache, new_drafter
from replayssm.engine.drafters import Controlled, Drafter, acceptances
from replayssm.engine.sampling import greedy
from replayssm.models import Decoder, config_from_geometry, random_model

pytestmark = pytest.mark.gpu
ARMS = pytest.mark.parametrize("arm", ["verify/triton", "snapshots/triton"])
MODELS = pytest.mark.parametrize("name", GEOMETRIES)
DRAFTERS = pytest.mark.parametrize("drafter", ["mtp", "ngram", "draft_model", "controlled"])
ROWS, LENGTH, WINDOW = 3, 8, 4
HEADS: dict[str, dict[str, Any]] = {"nemotron": {"mtp_blocks": ("full_attention", "mlp")}, "qwen": {"mtp_layers": 1}}


def model_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    config = replace(config_from_geometry(GEOMETRIES[name]), **HEADS[name])
    return random_model(config, seed=3, dtype=dtype, device="cuda", head=True)


def started(model: Decoder, arm: str, drafter: str) -> WindowStep:
    """A step of three rows, the middle one padding, behind prompts of different lengths."""
    cache = new_cache(model, arm, slots=ROWS, capacity=600, interval_length=LENGTH, window=WINDOW)
    tokens = torch.randint(VOCABULARY, (ROWS, 500), generator=torch.Generator().manual_seed(0))
    chosen: Drafter
    accept: Any = lambda logits, drafts: greedy(logits, drafts.tokens)  # noqa: E731
    if drafter == "controlled":
        pattern = acceptances(40, ROWS, WINDOW, 0.8, seed=1).cuda()
        chosen = Controlled(cache, torch.randint(VOCABULARY, (200, ROWS), device="cuda"), pattern)
        accept = chosen.verify
    else:
        chosen = new_drafter(drafter, model, cache, arm, model)
    logits = model.prefill(tokens, cache, lengths=[500, 3, 77], follow=chosen.follow(tokens))
    first = logits.argmax(-1)
    chosen.start(list(range(ROWS)), tokens, [500, 3, 77], first)
    slots = torch.tensor([0, -1, 2], device="cuda")
    return WindowStep(model, cache, arm, first, slots, chosen, accept)


@MODELS
@ARMS
@DRAFTERS
def test_a_graph_neither_waits_nor_allocates(name: str, arm: str, drafter: str) -> None:
    step = started(model_of(name), arm, drafter)
    step()
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(LENGTH):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    assert step.logits is not None
    assert step.logits[::2].isfinite().all()
    assert step.cache.length[1] == 3
    assert (step.counted[::2] >= 1).all()


@MODELS
@ARMS
def test_a_graph_does_what_its_steps_do(name: str, arm: str) -> None:
    """On forced tokens, which all steps then have in common."""
    model = model_of(name)
    torch.manual_seed(0)
    eager = started(model, arm, "controlled")
    torch.manual_seed(0)
    graphed = started(model, arm, "controlled")
    for _ in range(2 * LENGTH):
        eager.run(600)
        graphed()
        # A library may choose other kernels for its products while a graph is captured.
        torch.testing.assert_close(graphed.logits[::2], eager.logits[::2], rtol=0.05, atol=0.05)
        assert torch.equal(graphed.counted, eager.counted)
    assert graphed.cache.length.tolist() == eager.cache.length.tolist()


@MODELS
@ARMS
@pytest.mark.parametrize("drafter", ["mtp", "ngram", "draft_model"])
def test_greedy_tokens_are_those_of_plain_decoding(name: str, arm: str, drafter: str) -> None:
    """In float32; a row may part from plain decoding at a near tie, but not most of them."""
    model = model_of(name, torch.float32)
    asked = [Request(prompt, 24) for prompt in prompts(6)]
    plain = by_request(Engine(model, "replay/triton", slots=3, capacity=64, interval_length=LENGTH).generate(asked))
    sizes: dict[str, Any] = {"slots": 3, "capacity": 64, "interval_length": LENGTH, "window": WINDOW}
    made = by_request(SpeculativeEngine(model, arm, drafter=drafter, draft_model=model, **sizes).generate(asked))
    assert [len(made[n]) for n in range(6)] == [24] * 6
    assert sum(made[n] == plain[n] for n in range(6)) >= 5


@MODELS
def test_sampled_requests_repeat(name: str) -> None:
    engine = SpeculativeEngine(model_of(name), "verify/triton", slots=2, capacity=48, window=3, drafter="mtp")
    asked = [Request(prompt, 12, Sampling(1.0, top_p=0.9, seed=n)) for n, prompt in enumerate(prompts(2))]
    first = by_request(engine.generate(asked))
    assert first == by_request(engine.generate(asked))
    assert all(0 <= token < VOCABULARY for tokens in first.values() for token in tokens)
