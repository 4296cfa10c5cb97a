"""Speculative decoding of whole models on a CPU: windows whose tokens are rejected again and again, at every flush
phase, leave behind what a run leaves that never drafted; greedy tokens are those of plain decoding, sampled ones have
its probabilities; a step changes nothing of padding and asks the device nothing. Float64 where numbers are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import CAPACITY, GEOMETRIES, by_request, model_of, plainly, prompts, tokens_of
from sequences import relative_error
from torch import Tensor

from replayssm.engine import (
    DRAFTERS,
    WINDOW_ARMS,
    Engine,
    Request,
    Sampling,
    SpeculativeEngine,
    WindowStep,
    new_cache,
    predict_memory,
)
from replayssm.engine.arms import new_window
from replayssm.engine.drafters import (
    Controlled,
    Drafter,
    DraftModel,
    Drafts,
    Mtp,
    Ngram,
    acceptances,
    likeliest,
    mean_accepted,
)
from replayssm.engine.sampling import Sampler, greedy, probabilities
from replayssm.kernels.torch.ring import ordered_ring
from replayssm.models import Decoder, ModelError, config_from_geometry, empty_model, load_model, random_model
from replayssm.models.decoding import Decoding
from replayssm.models.windows import NoStates, SnapshotStates, WindowDecoding
from replayssm.recurrence import FAMILIES

MODELS = pytest.mark.parametrize("name", GEOMETRIES)
TINY = Path(__file__).resolve().parents[1] / "experiments" / "assets" / "models"
ROWS = 2
EXACT = 1e-11
"""Of whole models in float64."""
HEADS: dict[str, dict[str, Any]] = {"nemotron": {"mtp_blocks": ("full_attention", "mlp")}, "qwen": {"mtp_layers": 1}}


def with_head(name: str) -> Decoder:
    """Random, of as few layers as have every kind of memory, with a head."""
    few = GEOMETRIES[name] | ({"pattern": "M*-"} if name == "nemotron" else {"num_layers": 2})
    if name == "qwen":
        few = {option: value for option, value in few.items() if option != "moe"}
        few |= {"mlp": {"intermediate_size": 40}}
    config = replace(config_from_geometry(few), **HEADS[name])
    return random_model(config, seed=3, dtype=torch.float64, head=True)


def state_of(model: Decoder, cache: Any) -> Tensor:
    """``[layers,S,H,P,N]`` behind the last token that counts, of replay with its ring folded."""
    states = cache.states
    if isinstance(states, SnapshotStates):
        return states.state[:, range(ROWS), states.accepted - 1]
    rates, found = [m.A_log for m in model.modules() if hasattr(m, "A_log")], []
    for number in range(states.layers):
        layer = states.cache.layer(number)
        A = (-torch.exp(rates[number]),) if layer.family == "mamba2" else ()
        ring = ordered_ring(layer, torch.arange(ROWS))
        found.append(FAMILIES[layer.family].fold(layer.state, ring, layer.cursor.long(), *A))
    return torch.stack(found)


def conv_of(cache: Any) -> Tensor:
    """``[layers,S,K-1,C]``: the last inputs that count."""
    K = cache.prompt_conv.shape[2]
    last = (cache.accepted[:, None] + torch.arange(K))[None, ..., None]
    return cache.conv.gather(2, last.expand(len(cache.conv), -1, -1, cache.conv.shape[3]))


@dataclass
class Plain:
    """Decoding of ``stream [S,N]``, a token a step: by tokens seen, logits behind the last one, state and inputs of the
    convolutions; ``hidden [S,N,...]`` at each token."""

    logits: Tensor
    state: list[Tensor]
    conv: list[Tensor]
    hidden: Tensor
    cache: Any


@cache
def never_drafted(name: str) -> tuple[Decoder, Tensor, Plain]:
    """A model, a stream and its plain decoding, behind a prompt of two tokens."""
    model, tokens = with_head(name), {"nemotron": 1100, "qwen": 400}[name]
    stream = torch.randint(61, (ROWS, tokens), generator=torch.Generator().manual_seed(5))
    plain = new_cache(model, "stored/torch", slots=ROWS, capacity=tokens, state_dtype=torch.float64)
    logits = [model.prefill(stream[:, :2], plain, every=True)]
    found = Plain(logits[0], [torch.empty(0)] * 2, [torch.empty(0)] * 2, torch.empty(0), plain)
    hidden: list[Tensor] = [torch.zeros(ROWS, 2, 32, dtype=torch.float64)]
    with torch.no_grad():
        for at in range(2, tokens + 1):
            found.state.append(plain.states.state.clone())  # type: ignore[attr-defined]
            found.conv.append(plain.conv.clone())
            if at < tokens:
                past = Decoding(plain, torch.arange(ROWS), tokens)
                hidden.append(model.hidden(stream[:, at : at + 1], past))
                past.finish()
    found.hidden = torch.cat(hidden, dim=1)
    found.logits = torch.cat([logits[0], model.scores(found.hidden[:, 2:])], dim=1)
    return model, stream, found


@pytest.mark.parametrize(
    ("name", "interval", "window", "arm", "steps"),
    [
        ("nemotron", 6, 4, "verify/torch", 500),
        ("qwen", 9, 3, "verify/torch", 200),
        ("nemotron", 6, 4, "snapshots/torch", 60),
        ("qwen", 9, 3, "snapshots/torch", 60),
    ],
)
def test_what_was_rejected_never_was(name: str, interval: int, window: int, arm: str, steps: int) -> None:
    """Windows of which 0 to T tokens count, 1 to T with snapshots, in each of two rows other ones: logits, states,
    convolutions, keys and values are those of decoding a token a step."""
    model, stream, truth = never_drafted(name)
    generator, replays = torch.Generator().manual_seed(7), arm.startswith("verify")
    counts = torch.randint(0 if replays else 1, window + 1, (steps, ROWS), generator=generator)
    kept: dict[str, Any] = {"slots": ROWS, "capacity": stream.shape[1], "state_dtype": torch.float64}
    cache = new_cache(model, arm, interval_length=interval, window=window, **kept)
    model.prefill(stream[:, :2], cache)
    phases, slots, rows = set(), torch.arange(ROWS), range(ROWS)
    for number, count in enumerate(counts):
        at = cache.length[:, None] + torch.arange(window)
        right = torch.arange(window) < count[:, None]
        wrong = torch.randint(61, (ROWS, window), generator=generator)
        past = WindowDecoding(cache, slots, int(at.max()) + 1)
        with torch.no_grad():
            logits = model.scores(model.hidden(torch.where(right, stream.gather(1, at), wrong), past))
        expected = torch.stack([truth.logits[row, at[row]] for row in rows])
        if right.any():
            assert relative_error(logits[right][None], expected[right][None]) < EXACT
        if replays:
            phases |= set(cache.states.cache.cursor.tolist())  # type: ignore[attr-defined]
        past.finish(count)
        if number % 10 and number < steps - 1:
            continue
        behind = cache.length.tolist()
        state = torch.stack([truth.state[n][:, row] for row, n in enumerate(behind)], dim=1)
        conv = torch.stack([truth.conv[n][:, row] for row, n in enumerate(behind)], dim=1)
        assert relative_error(state_of(model, cache), state) < EXACT
        assert relative_error(conv_of(cache), conv) < EXACT
    assert torch.equal(cache.length - 2, counts.sum(0))
    assert not replays or phases == set(range(interval + 1))
    for row, length in enumerate(cache.length.tolist()):
        for name in ("keys", "values"):
            found, expected = (getattr(of, name)[:, row, :, :length] for of in (cache, truth.cache))
            assert relative_error(found, expected) < EXACT


@MODELS
def test_the_head_forgets_what_was_rejected(name: str) -> None:
    """Its drafts, hidden states, keys and values, after windows of random acceptance, against a head that goes along
    with plain decoding, a token a step, and drafts on from there."""
    model, stream, truth = never_drafted(name)
    window, steps, capacity = 4, 40, 180
    pattern = torch.randint(1, window + 1, (steps, ROWS), generator=torch.Generator().manual_seed(6))
    kept: dict[str, Any] = {"slots": ROWS, "capacity": capacity, "window": window, "state_dtype": torch.float64}
    cache = new_cache(model, "verify/torch", **kept)
    drafter, slots = Mtp(model, cache, "verify/torch"), torch.arange(ROWS)
    model.prefill(stream[:, :2], cache, follow=drafter.follow(stream[:, :2]))
    drafter.start([0, 1], stream[:, :2], [2, 2], stream[:, 2])
    forced = Controlled(cache, stream[:, 2:].T, pattern)
    step = WindowStep(model, cache, "verify/torch", stream[:, 2].clone(), slots, Forced(drafter, forced), forced.verify)
    never, prompt = Mtp(model, cache, "verify/torch"), []
    model.prefill(stream[:, :2], new_cache(model, "verify/torch", **kept), follow=lambda h, past: prompt.append(h))
    hidden = torch.cat([*prompt, truth.hidden[:, 2:]], dim=1)

    def head(hidden: Tensor, following: Tensor, at: Tensor) -> Tensor:
        past = new_window("verify/torch", never.past, slots, capacity, at, 1)
        return never.head(hidden, never._embedded(following), past)

    with torch.no_grad():
        for at in range(capacity - window):
            head(hidden[:, at : at + 1], stream[:, at + 1 : at + 2], torch.full((ROWS,), at))
    for count in pattern:
        before = cache.length.tolist()
        step(span=capacity)
        memory = [t.clone() for t in (never.past.keys, never.past.values)]
        at = torch.tensor(before)
        ahead, token, foretold = hidden[slots, at - 1][:, None], stream.gather(1, at[:, None]), []
        with torch.no_grad():
            for number in range(window - 1):
                ahead = head(ahead, token, at - 1 + number)
                token = model.scores(ahead).argmax(-1)
                foretold.append(token)
        assert torch.equal(step.drafter.own.tokens, torch.cat(foretold, dim=1))  # type: ignore[attr-defined]
        never.past.keys.copy_(memory[0])
        never.past.values.copy_(memory[1])
        for row, (first, n) in enumerate(zip(before, count.tolist(), strict=True)):
            assert relative_error(drafter.hidden[None, row, :n], hidden[None, row, first : first + n]) < EXACT
            for part in ("keys", "values"):  # of all tokens before this window, whose own the next drafts will read
                found, expected = (getattr(of.past, part)[:, row, :, :first] for of in (drafter, never))
                assert relative_error(found, expected) < EXACT
    assert cache.length.tolist() == (2 + pattern.sum(0)).tolist()


class Forced(Drafter):
    """Lets a drafter draft, and gives the drafts of another; those that will be rejected are wrong."""

    def __init__(self, drafter: Drafter, forced: Controlled) -> None:
        super().__init__(drafter.cache)
        self.drafter, self.forced = drafter, forced

    def draft(self, *given: Any) -> Drafts:
        self.own = self.drafter.draft(*given)
        drafts, kept = self.forced.draft(*given).tokens, self.forced.pattern.gather(0, self.forced.steps[None])[0]
        return Drafts(torch.where(torch.arange(1, self.window) < kept[:, None], drafts, (drafts + 1) % 61))

    def verified(self, *given: Any) -> None:
        self.drafter.verified(*given)
        self.forced.verified(*given)


def engine(model: Decoder, arm: str, drafter: str, **more: Any) -> SpeculativeEngine:
    sizes: dict[str, Any] = {"slots": 2, "capacity": CAPACITY, "interval_length": 5, "draft_model": model}
    return SpeculativeEngine(model, arm, drafter=drafter, **(sizes | more))


@pytest.mark.parametrize("folder", ["tiny-nemotron-h", "tiny-qwen3.5"])
def test_greedy_tokens_are_those_of_plain_decoding(folder: str) -> None:
    """Of the models that ship, with their own heads and with each other's help; some drafts are right, some are not."""
    model = load_model(TINY / folder, head=True, dtype=torch.float64)
    text = [[46, 300, 7, 12, 99, 300, 7], [5, 811, 23]]
    kept: dict[str, Any] = {"capacity": 32, "state_dtype": torch.float64}
    asked = [Request(prompt, 18) for prompt in text]
    made = by_request(Engine(model, "replay/torch", slots=2, interval_length=5, **kept).generate(asked))
    for arm, drafter, window in (
        ("verify/torch", "mtp", 4),
        ("snapshots/torch", "mtp", 4),
        ("verify/torch", "ngram", 6),
    ):
        found = engine(model, arm, drafter, window=window, **kept)
        tokens = list(found.generate(asked))
        assert by_request(tokens) == made


def count_live(
    counts: set[int], verified: Callable[..., None], hidden: Tensor, chosen: Tensor, accepted: Tensor, slots: Tensor
) -> None:
    counts |= set(accepted[slots >= 0].tolist())
    verified(hidden, chosen, accepted, slots)


@MODELS
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_makes_the_tokens_of_plain_decoding(
    name: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random models in float32, three prompts in two slots; the draft model of its own model is always right."""
    model = with_head(name).float() if drafter == "mtp" else model_of(name)
    asked = [Request(prompt, 7 + number) for number, prompt in enumerate(prompts(3))]
    plain = {n: plainly(model, request.prompt, request.max_new_tokens) for n, request in enumerate(asked)}
    arms = ("verify/cpu", "snapshots/cpu") if drafter == "ngram" else ("verify/torch", "verify/torch")
    for arm, window in zip(arms, (1, 3), strict=True):
        found = engine(model, arm, drafter, window=window, interval_length=4)
        counts: set[int] = set()
        monkeypatch.setattr(found.drafts, "verified", partial(count_live, counts, found.drafts.verified))
        assert by_request(found.generate(asked)) == plain
        assert drafter != "draft_model" or counts == {window}


@pytest.mark.parametrize("most", [4, 9])
def test_nothing_comes_of_a_request_that_was_ended(most: int) -> None:
    """Not the other tokens of its window either, of which with ``most`` 4 the last has finished it already."""
    model = model_of("nemotron")
    found = engine(model, "verify/torch", "draft_model", window=3, interval_length=4)
    tokens = []
    for token in found.generate([Request(prompt, n) for prompt, n in zip(prompts(2), (most, 6), strict=True)]):
        tokens.append(token)
        if [t.request for t in tokens].count(0) == 2:
            found.end(0)
    plain = [plainly(model, prompt, n) for prompt, n in zip(prompts(2), (2, 6), strict=True)]
    assert by_request(tokens) == dict(enumerate(plain))


@pytest.mark.parametrize(("name", "arm"), [("nemotron", "verify/triton"), ("qwen", "snapshots/triton")])
def test_the_arms_of_a_gpu_make_them_too(name: str, arm: str) -> None:
    """Interpreted."""
    model = with_head(name).float()
    asked = [Request(prompts(1)[0], 5)]
    found = engine(model, arm, "mtp", window=3, slots=1, interval_length=3)
    assert by_request(found.generate(asked))[0] == plainly(model, asked[0].prompt, 5)


@MODELS
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_steps_of_padding_alone_change_nothing(name: str, drafter: str) -> None:
    """What a GPU's first step does while requests stand in their slots: greedy and sampled ones."""
    model = with_head(name).float()
    hot = Sampling(1.2, top_p=0.9, seed=5)
    asked = [Request(prompt, 5, sampling) for prompt, sampling in zip(prompts(2), (Sampling(), hot), strict=True)]

    def made(padded: bool) -> dict[int, list[int]]:
        return tokens_of(engine(model, "verify/torch", drafter, window=3, interval_length=3), asked, padded)

    assert made(padded=True) == made(padded=False)


@MODELS
@pytest.mark.parametrize("drafter", [*DRAFTERS, "controlled"])
def test_a_step_asks_the_device_nothing(name: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where whatever looks at a value raises; the states' own steps are left out, since those of a
    GPU are kernels."""
    config = replace(config_from_geometry(GEOMETRIES[name] | {"pattern": "M*M-"}), **HEADS[name])
    model = empty_model(config, torch.float32, "meta", head=True)
    for module in [m for m in model.modules() if type(m).__name__ == "MixtureOfExperts"]:
        monkeypatch.setattr(module, "forward", lambda x: x)  # on a CPU it asks where each expert's rows end

    class Stepped(NoStates):
        geometry, layers = model.geometry, model.state_layers

        def step(self, *given: Any, **more: Any) -> None:
            pass

    def new(of: Decoder) -> Any:
        return of.new_cache(Stepped(3, 4, "meta"), slots=3, capacity=40)

    cache = new(model)
    table = torch.zeros(9, 3, dtype=torch.int64, device="meta")
    drafts: Any = {"mtp": lambda: Mtp(model, cache, "verify/torch"), "ngram": lambda: Ngram(cache)}
    drafts |= {"draft_model": lambda: DraftModel(model, cache, "verify/torch", 8)}
    drafts |= {"controlled": lambda: Controlled(cache, table, table)}
    monkeypatch.setattr("replayssm.engine.drafters.new_cache", lambda *given, **more: new(model))
    chosen = drafts[drafter]()
    sampler = Sampler(3, torch.device("meta"))
    tokens, slots = torch.zeros(3, dtype=torch.int64, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta")
    for hot in (False, True):
        accept = getattr(chosen, "verify", lambda logits, drafts: greedy(logits, drafts.tokens))
        choose: Any = likeliest
        if hot:
            accept = lambda logits, drafts: sampler.verify(logits, drafts.tokens, drafts.probability, slots)  # noqa: E731
            choose = lambda logits, ahead: sampler.draft(logits, slots, ahead)  # noqa: E731
        step = WindowStep(model, cache, "verify/torch", tokens, slots, chosen, accept, choose)
        step.run(40)
        assert step.chosen.shape == (3, 4)


def chi_square(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The statistic of counts against probabilities, and what it exceeds once in 100,000 (Wilson and Hilferty)."""
    mean = expected * found.sum()
    assert float(mean.min()) > 5
    degrees = len(found) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 4.265 * (2 / (9 * degrees)) ** 0.5) ** 3
    return float(((found - mean) ** 2 / mean).sum()), limit


def nucleus(p: Tensor, top_p: float) -> Tensor:
    """Of the fewest of the likeliest that reach ``top_p``."""
    order = p.argsort(descending=True)
    kept = torch.zeros_like(p)
    for token in order:
        if kept.sum() < top_p:
            kept[token] = p[token]
    return kept / kept.sum()


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_rejection_sampling_keeps_the_distribution(drawn: bool, top_p: float) -> None:
    """Of a window's first two tokens together, of 40,000 rows, whatever the drafts' own probabilities are."""
    rows, generator = 40_000, torch.Generator().manual_seed(2)
    logits, own = torch.randn(3, 5, generator=generator), torch.randn(2, 5, generator=generator)
    sampler = Sampler(rows, torch.device("cpu"))
    sampler.temperature.fill_(0.9)
    sampler.top_p.fill_(top_p)
    sampler.seed.copy_(torch.arange(rows))
    slots = torch.arange(rows)
    found = [sampler.draft(own[n].expand(rows, 5), slots, n) for n in range(2)]
    if not drawn:
        found = [(logits[n].argmax().expand(rows), None) for n in range(2)]
    drafts = Drafts.of(found, slots)
    tokens, accepted = sampler.verify(logits.expand(rows, 3, 5), drafts.tokens, drafts.probability, slots)
    p = probabilities(logits, torch.full((3,), 0.9), torch.full((3,), top_p))
    assert torch.allclose(p, torch.stack([nucleus((row / 0.9).softmax(-1), top_p) for row in logits]))
    kept = p[0] > 0
    assert (torch.bincount(tokens[:, 0], minlength=5)[~kept] == 0).all()
    statistic, limit = chi_square(torch.bincount(tokens[:, 0], minlength=5)[kept], p[0][kept])
    assert statistic < limit
    for count in (2, 3):  # a window's next token, where it came so far: independent of how
        here, sure = accepted >= count, p[count - 1] > 0
        statistic, limit = chi_square(torch.bincount(tokens[here, count - 1], minlength=5)[sure], p[count - 1][sure])
        assert statistic < limit
    assert torch.equal(sampler.drawn, accepted)
    assert {1, 2, 3} == set(accepted.tolist())
    wrong = p[0][kept] * torch.linspace(0.9, 1.1, int(kept.sum()))
    statistic, limit = chi_square(torch.bincount(tokens[:, 0], minlength=5)[kept], wrong / wrong.sum())
    assert statistic > limit  # the test can fail


def test_sampled_engines_agree_in_distribution() -> None:
    """The second and third token of one prompt together, of 600 requests with seeds of their own, against the model's
    probabilities; the draft model is another one, and draws."""
    tiny = GEOMETRIES["nemotron"] | {"vocab_size": 3, "pattern": "M-"}
    model, other = (random_model(config_from_geometry(tiny), seed=seed, dtype=torch.float32) for seed in (3, 8))
    found = engine(model, "verify/torch", "draft_model", draft_model=other, slots=100, window=3, capacity=8)
    asked = [Request([1, 2], 4, Sampling(1.0, seed=seed)) for seed in range(600)]
    made = by_request(found.generate(asked))
    kept = model.new_cache(new_cache(model, "stored/torch", slots=9, capacity=8).states, slots=9, capacity=8)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    start = torch.tensor([1, 2]).expand(9, 2)
    logits = model.prefill(torch.cat([start, pairs], dim=1), kept, every=True)
    first, second, third = (logits[:, at].softmax(-1) for at in (1, 2, 3))
    joint = first.gather(1, pairs[:, :1])[:, 0, None, None] * second.gather(1, pairs[:, 1:])[:, :, None]
    joint = joint[:, 0] * third  # of the first three tokens
    counts = torch.zeros(27)
    for tokens in made.values():
        counts[tokens[0] * 9 + tokens[1] * 3 + tokens[2]] += 1
    merged = joint.flatten() * 600 > 6
    observed = torch.cat([counts[merged], counts[~merged].sum()[None]])
    expected = torch.cat([joint.flatten()[merged], joint.flatten()[~merged].sum()[None]])
    if float(expected[-1]) * 600 <= 5:
        observed, expected = observed[:-1], expected[:-1] / expected[:-1].sum()
    statistic, limit = chi_square(observed, expected)
    assert statistic < limit


def test_controlled_acceptance_has_the_mean_it_says() -> None:
    pattern = acceptances(40, 64, 4, 0.8528, seed=1)
    assert set(pattern.flatten().tolist()) == {1, 2, 3, 4}
    assert float(pattern.double().mean()) == pytest.approx(mean_accepted(4, 0.8528), abs=2e-3)
    assert mean_accepted(4, 0.8528) == pytest.approx(3.2, abs=1e-3)
    assert torch.equal(pattern, acceptances(40, 64, 4, 0.8528, seed=1))
    assert not torch.equal(pattern, acceptances(40, 64, 4, 0.8528, seed=2))
    assert acceptances(5, 2, 3, 1.0, 0).unique().tolist() == [3]
    assert acceptances(5, 2, 3, 0.0, 0).unique().tolist() == [1]


def test_the_text_so_far_is_looked_up() -> None:
    model = model_of("nemotron")
    cache = new_cache(model, "verify/torch", slots=4, capacity=20, window=4)
    drafter = Ngram(cache)
    text = [[7, 1, 2, 3, 5, 6, 2, 3, 8, 3, 1, 2], [4] * 6 + [0] * 6, [1, 2, 3, 4] * 3]
    text += [[1, 2, 3, 5, 6, 1, 2, 3, 8, 9, 1, 2]]  # of two places as good the last
    lengths = [12, 6, 12, 12]
    cache.length.copy_(torch.tensor(lengths))
    drafter.start([0, 1, 2, 3], torch.tensor(text), lengths, torch.tensor([3, 4, 60, 3]))
    drafts = drafter.draft(torch.zeros(4), torch.arange(4), 20, likeliest).tokens
    assert drafts.tolist() == [[5, 6, 2], [4, 4, 4], [60, 60, 60], [8, 9, 1]]


def test_what_cannot_run_is_refused() -> None:
    model = model_of("qwen")
    for call, message in (
        (
            lambda: engine(model, "replay/torch", "ngram"),
            "arm=replay/torch is unknown to windows, window=4; accepted",
        ),
        (lambda: engine(model, "verify/torch", "mtp"), "loaded without its draft head; accepted: load_model"),
        (lambda: engine(model, "verify/torch", "medusa"), "drafter=medusa is unknown; accepted: mtp, ngram, draft_mo"),
        (lambda: engine(model, "verify/torch", "ngram", window=17), "window=17 is impossible; accepted: an integer fr"),
        (
            lambda: engine(model, "verify/torch", "draft_model", draft_model=None),
            "has none; accepted: a model of 61",
        ),
        (lambda: Engine(model, "verify/torch", slots=1, capacity=8), "arm=verify/torch is unknown; accepted: stored/"),
        (
            lambda: predict_memory(model.config, "stored/torch", slots=1, capacity=8, window=2),
            "arm=stored/torch",
        ),
        (lambda: empty_model(model.config, device="meta", head=True), "mtp_num_hidden_layers=0 is not implemented"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@MODELS
def test_requests_that_fit_are_counted(name: str) -> None:
    """Snapshots hold a state a token, replay one and a ring."""
    config = config_from_geometry(GEOMETRIES[name])
    fit = {}
    for arm in ("verify/torch", "snapshots/torch"):
        memory = predict_memory(config, arm, slots=4, capacity=9, window=4, dtype=torch.float32, interval_length=2)
        fit[arm] = memory.requests_in(1e9, 4)
        assert fit[arm] == 10**9 * 4 // (memory.states + memory.conv)
    assert fit["verify/torch"] > fit["snapshots/torch"]
    assert set(WINDOW_ARMS) > set(fit)
