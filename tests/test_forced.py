"""Teacher forcing: scores are those of the model, whatever is shared, merged, read at once or decoded with others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import forced_together
from experiments.accuracy_arms import Arm
from experiments.accuracy_scores import Scorer
from experiments.assets import vocabulary
from experiments.forced import Asked, Row, Score, Work, merged, score
from experiments.forced_together import Saved, score_together
from replayssm.engine import Engine, Request, new_cache
from replayssm.models import Decoder, ModelError, load_model

FOLDER = Path(__file__).parents[1] / "experiments" / "assets" / "models"
TEXT = vocabulary.encode("It was the best of times, it was the worst of times; he said nothing at all to her.")
TOKENS = [int(token) for token in TEXT[:24]]
OTHER = [int(token) for token in TEXT[3:20]]
ASKED = [
    Asked(TOKENS[:12], 9),
    Asked(TOKENS[:20], 17),
    Asked(TOKENS, 20),
    Asked([*TOKENS[:6], 9, 8], 6),
    Asked(OTHER, 1),
]
"""The first two are the beginning of the third, the fourth leaves it, the last has a prompt of one token."""


@pytest.fixture(scope="module", params=["tiny-nemotron-h", "tiny-qwen3.5"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return load_model(FOLDER / request.param, dtype=torch.float32)


@pytest.fixture(scope="module")
def small() -> Decoder:
    """For what does not depend on the layers' family."""
    return load_model(FOLDER / "tiny-qwen3.5", dtype=torch.float32)


def arm(model: Decoder, name: str = "shared_fp32") -> Arm:
    return Arm(name, model, "replay/torch", interval_length=4, seed=0)


def scored(model: Decoder, name: str = "shared_fp32", rows: int = 8, prefill: int | None = None) -> list[Score]:
    chosen = arm(model, name)
    made = chosen.new_cache
    return score(model, chosen.engine, ASKED, made, rows=rows, work=Work(), prefill=prefill, damaged=chosen.damaged)


def logprobs(scores: list[Score]) -> np.ndarray:
    return np.array([each.logprob for each in scores])


@torch.no_grad()
def expected(model: Decoder, asked: Asked) -> Score:
    cache = new_cache(model, "stored/torch", slots=1, capacity=len(asked.tokens), state_dtype=torch.float32)
    logits = model.prefill(torch.tensor([asked.tokens[:-1]]), cache, every=True)[0].float().log_softmax(-1)
    at = torch.arange(asked.first - 1, len(asked.tokens) - 1)
    tokens = torch.tensor(asked.tokens[asked.first :])
    return Score(float(logits[at, tokens].sum()), bool((logits[at].argmax(-1) == tokens).all()))


def test_sequences_that_others_begin_with_are_fed_once() -> None:
    rows = merged(ASKED)
    assert [len(row.tokens) for row in rows] == [23, 16, 7]
    assert rows[0].first == 8
    assert {request for pairs in rows[0].wanted.values() for request, _ in pairs} == {0, 1, 2}
    assert sum(len(pairs) for row in rows for pairs in row.wanted.values()) == sum(
        len(asked.tokens) - asked.first for asked in ASKED
    )


@pytest.mark.parametrize(("rows", "prefill"), [(8, None), (1, 5), (2, 0)])
def test_scores_are_those_of_the_model(model: Decoder, rows: int, prefill: int | None) -> None:
    found, wanted = scored(model, rows=rows, prefill=prefill), [expected(model, asked) for asked in ASKED]
    assert logprobs(found) == pytest.approx(logprobs(wanted), rel=2e-4, abs=1e-4)
    assert [each.greedy for each in found] == [each.greedy for each in wanted]


def test_the_control_forgets_the_prompt_and_nothing_else(small: Decoder) -> None:
    whole, damaged = logprobs(scored(small, prefill=0)), logprobs(scored(small, "damaged", prefill=0))
    assert (np.abs(whole - damaged)[:4] > 1e-3).all()
    assert damaged[4] == pytest.approx(whole[4], rel=1e-4)  # behind a prompt of one token there is nothing to forget


def test_a_coarse_state_changes_scores(small: Decoder) -> None:
    whole = logprobs(scored(small, prefill=0))
    assert (logprobs(scored(small, "shared_nvfp4", prefill=0)) != whole).any()


def test_arms_score_together_as_they_do_alone(model: Decoder) -> None:
    names = ["shared_fp32", "dual_fp32_nvfp4", "dual_fp8_sr_nvfp4", "damaged"]
    arms = {name: arm(model, name).precision for name in names}
    together = score_together(model, arms, ASKED, rows=2, work=Work(), damaged="damaged", seed=0)
    for name in ("shared_fp32", "dual_fp32_nvfp4", "damaged"):
        alone = scored(model, name, rows=2, prefill=0)
        assert logprobs(together[name]) == pytest.approx(logprobs(alone), rel=2e-3, abs=2e-3), name
    assert (np.abs(logprobs(together["damaged"]) - logprobs(together["shared_fp32"]))[:4] > 1e-2).all()
    assert (logprobs(together["dual_fp8_sr_nvfp4"]) != logprobs(together["dual_fp32_nvfp4"])).any()


@torch.no_grad()
def test_a_shared_beginning_is_read_once_with_the_same_result(model: Decoder) -> None:
    tokens, lengths = torch.tensor([TOKENS, [*TOKENS[:10], *TOKENS[:14]], TOKENS]), [24, 20, 11]

    def read(shared: int) -> list[torch.Tensor]:
        cache = new_cache(model, "stored/torch", slots=4, capacity=32)
        every = model.prefill(tokens, cache, [2, 0, 3], lengths, chunk=4, every=True, shared=shared)
        after = model.decode(torch.tensor([5, 5, 5, 5]), cache, torch.tensor([0, -1, 2, 3]))[[0, 2, 3]]
        return [*(row[:length] for row, length in zip(every, lengths, strict=True)), after]

    for one, other in zip(read(0), read(10), strict=True):
        assert one.isfinite().all()
        assert torch.allclose(one, other, rtol=0, atol=1e-3)
    for wrong in (11, -1):
        with pytest.raises(ModelError, match=rf"^shared={wrong} is impossible; accepted: fewer tokens than a row"):
            read(wrong)
    tokens[1, 3] += 1
    with pytest.raises(ModelError, match=r"^shared=10 is impossible"):
        read(10)


def test_a_run_that_was_ended_goes_on_behind_its_last_batch(
    small: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"shared_fp32": arm(small).precision}
    given = {"rows": 2, "work": Work(), "damaged": "damaged", "seed": 0}
    whole, ran, run = score_together(small, arms, ASKED, **given), [], forced_together._run

    def counted(given_model: Decoder, arms: object, rows: list[Row], *more: object) -> None:
        if ran and fails:
            raise KeyboardInterrupt
        ran.append(len(rows))
        run(given_model, arms, rows, *more)

    monkeypatch.setattr(forced_together, "_run", counted)
    fails, saved = True, Saved(tmp_path / "scores.npz", "this")
    with pytest.raises(KeyboardInterrupt):
        score_together(small, arms, ASKED, saved=saved, **given)
    fails = False
    assert score_together(small, arms, ASKED, saved=saved, **given) == whole
    assert ran == [2, 1]
    assert score_together(small, arms, ASKED, saved=Saved(saved.path, "other"), **given) == whole
    assert ran == [2, 1, 2, 1]


def test_scores_that_were_kept_of_other_arms_are_not_taken(small: Decoder, tmp_path: Path) -> None:
    found = []
    for name in ("shared_fp32", "shared_nvfp4"):
        arms = [arm(small, each) for each in dict.fromkeys(("shared_fp32", name))]
        scorer = Scorer(arms, rows=8, prefill=0, file=tmp_path / "scores.npz", identity="case")
        found.append(scorer.score(arms[-1], ASKED[:1], Work()))
    assert found[0] != found[1]


def test_a_request_that_is_ended_gives_up_its_slot_and_leaves_the_others(small: Decoder) -> None:
    requests = [Request(TOKENS[:5], 8), Request(TOKENS[:7], 8), Request(TOKENS[:6], 4)]

    def tokens(end: bool) -> dict[int, list[int]]:
        engine, made = Engine(small, "replay/torch", slots=2, capacity=20), {0: [], 1: [], 2: []}
        for token in engine.generate(requests):
            made[token.request].append(token.token)
            if end and token.request == 0 and len(made[0]) == 3:
                engine.end(0)
                engine.end(7)
        return made

    whole, ended = tokens(False), tokens(True)
    assert ended == {0: whole[0][:3], 1: whole[1], 2: whole[2]}
