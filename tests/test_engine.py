"""The engine on a CPU with tiny random models: each arm against the models' plain decoding, token for token; slots,
chunks, sampling, stop tokens, and the memory that was foretold. Triton's arms are interpreted."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from engine_models import CAPACITY, GEOMETRIES, by_request, model_of, plainly, prompts, tokens_of
from torch import Tensor

from replayssm.engine import (
    ARMS,
    WINDOW_ARMS,
    Engine,
    Request,
    Sampling,
    SpeculativeEngine,
    Token,
    new_cache,
    predict_memory,
)
from replayssm.engine.sampling import Sampler, draw, uniform
from replayssm.models import ModelError, config_from_geometry, random_model

pytest.importorskip("triton", reason="Triton is not installed")

HOT = Sampling(1.2, top_p=0.9, seed=5)
MODELS = pytest.mark.parametrize("name", GEOMETRIES)
CPU_ARMS = [arm for arm in ARMS if not arm.endswith("/triton")]


@MODELS
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_makes_the_tokens_of_plain_decoding(name: str, arm: str) -> None:
    """Three prompts in two slots, the third in one that was used before, over flushes."""
    model, tokens = model_of(name), 4 if arm.endswith("/triton") else 9
    engine = Engine(model, arm, slots=2, capacity=CAPACITY, interval_length=3, chunk=7)
    asked = [Request(prompt, tokens + number) for number, prompt in enumerate(prompts(3))]
    made = by_request(engine.generate(asked))
    assert made == {n: plainly(model, request.prompt, request.max_new_tokens) for n, request in enumerate(asked)}


@MODELS
@pytest.mark.parametrize("arm", CPU_ARMS)
def test_rows_do_not_depend_on_their_neighbours(name: str, arm: str) -> None:
    """Seven requests in three slots against each alone, greedy and sampled ones mixed."""
    model = model_of(name)
    hot = [Sampling(), Sampling(1.3, seed=5), Sampling(0.8, top_p=0.7, seed=6)]
    asked = [Request(prompt, 3 + number, hot[number % 3]) for number, prompt in enumerate(prompts(7, seed=1))]
    together = Engine(model, arm, slots=3, capacity=CAPACITY, interval_length=4, prompt_rows=2)
    alone = Engine(model, arm, slots=1, capacity=CAPACITY, interval_length=4)
    made = by_request(together.generate(asked))
    assert made == {n: by_request(alone.generate([request]))[0] for n, request in enumerate(asked)}
    assert [len(made[n]) for n in range(7)] == [3 + n for n in range(7)]


@MODELS
def test_chunks_of_a_prompt_change_nothing(name: str) -> None:
    asked = [Request(prompt, 12) for prompt in prompts(3)]
    made = [
        by_request(Engine(model_of(name), "replay/torch", slots=3, capacity=CAPACITY, chunk=chunk).generate(asked))
        for chunk in (1, 5, 512)
    ]
    assert made[0] == made[1] == made[2]


def test_tokens_stream_while_others_wait() -> None:
    """The first token comes before the second step, a finished slot is taken again, an early end gives slots back."""
    engine = Engine(model_of("qwen"), "replay/torch", slots=2, capacity=CAPACITY)
    asked = [Request(prompt, tokens) for prompt, tokens in zip(prompts(3), (1, 5, 2), strict=True)]
    tokens = engine.generate(asked)
    assert next(tokens).request == 0
    assert engine.cache.length.tolist() == [len(asked[0].prompt), len(asked[1].prompt)]
    order = [token.request for token in tokens]
    assert order == [1, 2, 2, 1, 1, 1, 1]
    stopped = engine.generate(asked)
    next(stopped)
    with pytest.raises(ModelError, match=r"another generate .* has not ended"):
        engine.generate(asked)
    stopped.close()
    assert by_request(engine.generate(asked))[1] == plainly(engine.model, asked[1].prompt, 5)


@pytest.mark.parametrize(
    ("kind", "arm", "more"),
    [(Engine, "replay/torch", {}), (SpeculativeEngine, "verify/torch", {"window": 3, "drafter": "ngram"})],
)
def test_an_engine_that_nobody_holds_goes_at_once(kind: type[Engine], arm: str, more: dict[str, Any]) -> None:
    """With its cache and its steps, whose graphs hold memory; not when Python next collects garbage."""
    engine = kind(model_of("qwen"), arm, slots=2, capacity=CAPACITY, **more)
    asked = [Request(prompt, 2, sampling) for prompt, sampling in zip(prompts(2), (Sampling(), HOT), strict=True)]
    assert len(list(engine.generate(asked))) == 4
    held = [weakref.ref(thing) for thing in (engine, engine.cache, *engine._steps.values())]
    enabled = gc.isenabled()
    gc.disable()
    try:
        del engine
        assert [thing() for thing in held] == [None] * 4
    finally:
        if enabled:
            gc.enable()


def test_a_stop_token_ends_a_row_only() -> None:
    model = model_of("nemotron")
    first, second = prompts(2, seed=4)
    whole = plainly(model, first, 8)
    at = next(i for i, token in enumerate(whole) if token not in whole[:i] and i >= 2)
    engine = Engine(model, "replay/cpu", slots=2, capacity=CAPACITY)
    asked = [Request(first, 8, stop=frozenset({whole[at]})), Request(second, 8)]
    tokens = list(engine.generate(asked))
    assert by_request(tokens) == {0: whole[: at + 1], 1: plainly(model, second, 8)}
    finished = {token.request: token.finished for token in tokens if token.finished}
    assert finished == {0: "stop", 1: "length"}
    assert tokens[0] == Token(0, whole[0])


def test_draws_follow_the_probabilities() -> None:
    rows = 20_000
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(rows, 4)
    seed, number = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)

    def shares(temperature: float, top_p: float) -> Tensor:
        full = [torch.full((rows,), value) for value in (temperature, top_p)]
        return torch.bincount(draw(logits, *full, seed, number), minlength=4) / rows

    def near(found: Tensor, *expected: float) -> None:
        assert float((found - torch.tensor(expected)).abs().max()) < 5 * (0.25 / rows) ** 0.5

    near(shares(1.0, 1.0), 0.4, 0.3, 0.2, 0.1)
    near(shares(0.5, 1.0), 16 / 30, 9 / 30, 4 / 30, 1 / 30)
    near(shares(1.0, 0.6), 4 / 7, 3 / 7, 0.0, 0.0)
    near(shares(1.0, 0.05), 1.0, 0.0, 0.0, 0.0)
    assert shares(1.0, 0.6)[2:].sum() == 0
    u = uniform(seed, number)
    assert 0 <= float(u.min()) < 1e-3
    assert 1 - 1e-3 < float(u.max()) < 1
    assert len(uniform(torch.full_like(seed, 7), seed).unique()) > rows * 0.99


def test_a_seed_repeats_and_another_does_not() -> None:
    engine = Engine(model_of("qwen"), "stored/cpu", slots=2, capacity=CAPACITY)

    def made(seed: int) -> list[int]:
        return by_request(engine.generate([Request([1, 2, 3], 20, Sampling(1.0, seed=seed))]))[0]

    assert made(2**40 + 1) == made(2**40 + 1)
    assert made(1) != made(2) != made(2**40 + 1) != made(1)


def test_greedy_rows_of_a_sampled_batch_stay_greedy() -> None:
    sampler = Sampler(2, torch.device("cpu"))
    sampler.start(0, Sampling())
    sampler.start(1, Sampling(2.0, seed=1))
    logits = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    tokens = [sampler.choose(logits, torch.arange(2), greedy=False) for _ in range(6)]
    assert {int(t[0]) for t in tokens} == {int(logits[0].argmax())}
    assert len({int(t[1]) for t in tokens}) > 3


def test_padding_draws_nothing() -> None:
    sampler = Sampler(3, torch.device("cpu"))
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    sampler.choose(logits, torch.tensor([-1, 1, -1]), greedy=False)
    assert sampler.drawn.tolist() == [0, 1, 0]


@MODELS
@pytest.mark.parametrize("arm", ARMS)
def test_steps_of_padding_alone_change_nothing(name: str, arm: str) -> None:
    """What a GPU's first step does while requests stand in their slots: greedy and sampled ones, over a flush."""
    asked = [Request(prompt, 4, sampling) for prompt, sampling in zip(prompts(2), (Sampling(), HOT), strict=True)]

    def made(padded: bool) -> dict[int, list[int]]:
        engine = Engine(model_of(name), arm, slots=2, capacity=CAPACITY, interval_length=2)
        return tokens_of(engine, asked, padded)

    assert made(padded=True) == made(padded=False)


@MODELS
@pytest.mark.parametrize("arm", [*ARMS, *WINDOW_ARMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_foretold(name: str, arm: str, dtype: torch.dtype) -> None:
    config = config_from_geometry(GEOMETRIES[name])
    sizes: dict[str, Any] = {"slots": 3, "capacity": 20, "interval_length": 5}
    sizes["window"] = 3 if arm in WINDOW_ARMS else None
    foretold = predict_memory(config, arm, dtype=dtype, **sizes)
    model = random_model(config, seed=0, dtype=dtype)
    cache = new_cache(model, arm, **sizes)
    kept = getattr(cache.states, "cache", cache.states)
    states = [t for v in vars(kept).values() for t in (v.values() if isinstance(v, dict) else [v])]
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert foretold.weights == sum(weights.values())
    assert foretold.states == sum(t.untyped_storage().nbytes() for t in states if isinstance(t, Tensor))
    assert foretold.keys_values == cache.keys.nbytes + cache.values.nbytes > 0
    assert foretold.conv == cache.conv.nbytes > 0
    assert foretold.total > foretold.weights + foretold.states + foretold.keys_values + foretold.conv
    foretold.refuse_above(foretold.total)
    with pytest.raises(ModelError, match=r"0.0 GiB needed, 0.0 GiB free; not tried; accepted: fewer slots"):
        foretold.refuse_above(foretold.total - 1)


def test_nothing_is_allocated_to_foretell_the_largest() -> None:
    """1.1 TB, on a machine that would not have it."""
    geometry = GEOMETRIES["nemotron"] | {"hidden_size": 65536, "mlp": {"intermediate_size": 2**22}}
    foretold = predict_memory(config_from_geometry(geometry), "replay/triton", slots=4, capacity=64)
    assert foretold.weights > 10**12


def test_what_cannot_run_is_refused() -> None:
    model = model_of("qwen")
    engine = Engine(model, "replay/torch", slots=2, capacity=CAPACITY)
    for call, message in (
        (lambda: Engine(model, "replay/vllm", slots=2, capacity=8), r"arm=replay/vllm is unknown; accepted: stored/to"),
        (lambda: predict_memory(model.config, "torch", slots=2, capacity=8), "arm=torch is unknown"),
        (lambda: engine.generate([Request([], 3)]), "prompt of request 0 is impossible; accepted: at least one token"),
        (lambda: engine.generate([Request([1], 3), Request([61], 3)]), "prompt of request 1 .* 0 to 60"),
        (lambda: engine.generate([Request([1], 0)]), "request 0 asks for 0 tokens"),
        (lambda: engine.generate([Request([1] * 40, 9)]), "9 tokens behind 40; accepted: at least 1, and 48 together"),
        (lambda: Sampling(-1.0), "temperature=-1.0 is impossible"),
        (lambda: Sampling(float("nan")), "temperature=nan is impossible"),
        (lambda: Sampling(1.0, top_p=0.0), "top_p=0.0 is impossible; accepted: above 0"),
        (lambda: Sampling(1.0, seed=-1), "seed=-1 is impossible"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_triton_arm_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ModelError, match="arm=stored/triton does not run on cpu; accepted: stored/torch"):
        Engine(model_of("qwen"), "stored/triton", slots=2, capacity=8)
