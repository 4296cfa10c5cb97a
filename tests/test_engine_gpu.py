"""The engine on a GPU: graphs give what eager steps give, wait for nothing and allocate nothing; memory is foretold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine_models import GEOMETRIES, VOCABULARY, by_request, prompts

from replayssm.engine import Engine, Request, Sampling, Step, new_cache, predict_memory
from replayssm.models import Decoder, config_from_geometry, random_model

pytestmark = pytest.mark.gpu
ARMS = pytest.mark.parametrize("arm", ["stored/triton", "replay/triton"])
MODELS = pytest.mark.parametrize("name", GEOMETRIES)
ROWS, LENGTH = 3, 4


def model_of(name: str, **changes: Any) -> Decoder:
    config = config_from_geometry(GEOMETRIES[name] | changes)
    return random_model(config, seed=3, dtype=torch.bfloat16, device="cuda")


def started(model: Decoder, arm: str) -> Step:
    """A step of three rows, the middle one padding, behind prompts of different lengths."""
    cache = new_cache(model, arm, slots=ROWS, capacity=600, interval_length=LENGTH)
    tokens = torch.randint(VOCABULARY, (ROWS, 500), generator=torch.Generator().manual_seed(0))
    logits = model.prefill(tokens, cache, lengths=[500, 3, 77])
    slots = torch.tensor([0, -1, 2], device="cuda")
    return Step(model, cache, arm, logits.argmax(-1), slots, lambda logits: logits.argmax(-1))


@MODELS
@ARMS
def test_a_graph_does_what_its_steps_do(name: str, arm: str) -> None:
    model = model_of(name)
    eager, graphed = started(model, arm), started(model, arm)
    for _ in range(2 * LENGTH + 1):
        eager.run(600)
        graphed()
        # A library may choose other kernels for its products while a graph is captured.
        torch.testing.assert_close(graphed.logits[::2], eager.logits[::2], rtol=0.05, atol=0.05)
        graphed.tokens.copy_(eager.tokens)
    assert graphed.cache.length.tolist() == eager.cache.length.tolist() == [509, 3, 86]


@MODELS
@ARMS
def test_a_graph_neither_waits_nor_allocates(name: str, arm: str) -> None:
    step = started(model_of(name), arm)
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
    assert step.logits[::2].isfinite().all()


@MODELS
@ARMS
def test_rows_do_not_depend_on_when_they_came(name: str, arm: str) -> None:
    """The same slots and batch shape, so the same products: five requests against each with empty slots beside it."""
    hot = [Sampling(), Sampling(1.2, top_p=0.9, seed=5)]
    asked = [Request(prompt, 6 + number, hot[number % 2]) for number, prompt in enumerate(prompts(5))]
    engine = Engine(model_of(name), arm, slots=2, capacity=48, interval_length=LENGTH, prompt_rows=1)
    made = by_request(engine.generate(asked))
    alone = {n: by_request(engine.generate([request]))[0] for n, request in enumerate(asked)}
    assert made == alone


@ARMS
def test_memory_is_foretold_on_the_device(arm: str) -> None:
    """What PyTorch took at most lies below what was foretold, and not far below."""
    changes: dict[str, Any] = {"hidden_size": 1024, "vocab_size": 8192, "pattern": "M-" * 8 + "*-"}
    changes |= {"ssm": {"heads": 32, "groups": 4, "head_dim": 64, "state_dim": 128, "conv_kernel": 4}}
    changes |= {"mlp": {"intermediate_size": 4096}}
    config = config_from_geometry(GEOMETRIES["nemotron"] | changes)
    foretold = predict_memory(config, arm, slots=64, capacity=512)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = random_model(config, seed=0, device="cuda")
    engine = Engine(model, arm, slots=64, capacity=512)
    list(engine.generate([Request([1, 2, 3] * 20, 20) for _ in range(70)]))
    peak = torch.cuda.max_memory_allocated() - before
    assert foretold.total / 2 < peak <= foretold.total
