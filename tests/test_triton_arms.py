"""The named variants of our Triton arms under the experiment's own gates: on a GPU, or interpreted."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from experiments.case import Case, Precision, Timing, known_arms
from experiments.measure import gates
from experiments.measure.gated import raw_inputs
from experiments.measure.layers import Layers, forget
from replayssm.geometry import Geometry
from replayssm.recurrence import FAMILIES

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"
SHAPES = {"mamba2": (2, 1), "gdn": (2, 1), "kda": (2, 2)}
REPLAY = ("replay/triton-gates", "replay/triton-raw-fold", "replay/triton-stochastic")
every_family = pytest.mark.parametrize("family", SHAPES)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    forget()


def case(family: str, state: str = "fp32", phase: str = "aligned", length: int = 3) -> Case:
    heads, groups = SHAPES[family]
    timing = Timing("test", 2, 1, 5.0, 0.01, 1.0, 1, 60.0)
    geometry = Geometry(family, heads, groups, 16, 16)
    return Case("kernel", "test", geometry, 2, length, phase, Precision(state, "bf16"), DEVICE, 0, 3, timing)


def arm(name: str) -> Any:
    return importlib.import_module(f"experiments.arms.{name.replace('/', '_').replace('-', '_')}")


def judged(name: str, of: Case) -> Any:
    """The arm's layers after both checks, each over one cycle, and one between them."""
    if reason := arm(name).unsupported(of):
        pytest.skip(reason)
    layers = arm(name).prepare(of, 2)
    for cycles, moment in ((0, "before"), (2, "after")):
        correctness, _ = gates.Check(of, 2, moment).run(layers, cycles, None)
        assert not correctness.faults()
        gates.mark_copies(layers)
        layers.cycle()
    return layers


@every_family
@pytest.mark.parametrize("name", REPLAY)
def test_replay_variants_pass_the_gates_and_write_once_an_interval(name: str, family: str) -> None:
    layers = judged(name, case(family, "fp16" if "stochastic" in name else "fp32", "staggered"))
    assert layers.flushes.unique().tolist() == [4]


@every_family
def test_stored_gates_pass_the_gates(family: str) -> None:
    judged("stored/triton-gates", case(family, length=2))


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("name", REPLAY)
def test_other_intervals_pass_too(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if length == 1 and "stochastic" in name:
        # As many roundings as the honest version's, by sqrt(2) further off each, of states that scatter by 40 percent.
        monkeypatch.setattr(gates, "SLACK", 3.0)
    judged(name, case("gdn", "fp16", length=length))


def of_decays() -> Case:
    """Inputs in float32, so that no rounding of outputs hides one of decays."""
    return dataclasses.replace(case("kda", phase="staggered", length=5), precision=Precision("fp32", "fp32"))


def test_decays_in_bfloat16_pass_the_gates() -> None:
    """At an interval of one, too, where no token is ever in a ring."""
    judged("replay/triton-decay-bf16", of_decays())
    judged("replay/triton-decay-bf16", case("kda", length=1))


def found_errors(name: str, check: gates.Check) -> tuple[Tensor, dict[str, float]]:
    correctness, outputs = check.run(arm(name).prepare(check.case, 2), 0, None)
    return outputs, {c.quantity: c.error for c in correctness.comparisons if c.budget}


def test_the_error_of_decays_in_bfloat16_is_told_against_decays_as_they_are() -> None:
    """And arms that round none are compared with one that does by its budget, not by theirs."""
    check = gates.Check(of_decays(), 2, "before")
    rounded, told = found_errors("replay/triton-decay-bf16", check)
    exact, beside = found_errors("replay/triton", check)
    assert told.keys() == beside.keys()
    assert all(100 * beside[quantity] < told[quantity] < 1e-2 for quantity in told)
    agreement = check.agreement(exact, rounded)
    assert 1e-5 < agreement.error <= agreement.budget < 1e-2


def faults_of(layers: Any, of: Case) -> tuple[str, ...]:
    return tuple(gates.Check(of, 2, "before").run(layers, 0, None)[0].faults())


def test_decays_that_are_not_rounded_to_nearest_are_seen() -> None:
    of = of_decays()
    layers = arm("replay/triton-decay-bf16").prepare(of, 2)
    step = layers._step

    def with_a_bit_less(out: Any, layer: Any, inputs: Any, slots: Any) -> None:
        step(out, layer, inputs, slots)
        layer.ring["g"].view(torch.int16).bitwise_and_(-2)

    layers._step = with_a_bit_less
    assert any(fault.startswith("output error") for fault in faults_of(layers, of))


def test_an_arm_that_rounds_decays_needs_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    of = of_decays()
    layers = arm("replay/triton-decay-bf16").prepare(of, 2)
    monkeypatch.setattr(type(layers), "honest_step", Layers.honest_step)
    assert any(fault.startswith("output error") for fault in faults_of(layers, of))


@every_family
def test_raw_inputs_give_the_ready_gates(family: str) -> None:
    token = arm("replay/triton").prepare(case(family), 1).tokens.at(0, 0)
    raw, given = raw_inputs(token)
    if family == "mamba2":
        made = {"dt": FAMILIES[family].discretize(raw.dt.double(), given.dt_bias.double())}
    else:
        told = (given.A_log.double(), given.dt_bias.double())
        made = dict(zip(("g", "beta"), FAMILIES[family].gates(raw.g.double(), raw.beta.double(), *told), strict=True))
    for name, tensor in token._asdict().items():
        if name in made:
            assert torch.allclose(made[name], tensor.double(), rtol=1e-6, atol=1e-8)
            assert not torch.equal(getattr(raw, name), tensor)
        else:
            assert getattr(raw, name) is tensor


def test_gates_without_their_bias_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the variant computes reaches the outputs: another A_log is another decay."""
    module = importlib.import_module("experiments.measure.gated")
    monkeypatch.setattr(module, "RAW_A_LOG", module.RAW_A_LOG + 0.01)
    of = case("gdn")
    correctness, _ = gates.Check(of, 2, "before").run(arm("replay/triton-gates").prepare(of, 2), 0, None)
    assert correctness.faults()


def test_copies_and_seeds_draw_other_numbers() -> None:
    def flushed(seed: int) -> Any:
        forget()
        of = Case(**{**vars(case("gdn", "fp16", length=1)), "seed": seed})
        made = arm("replay/triton-stochastic").prepare(of, 2)
        made.cache.load_state(made._batch, made.state[:1].expand(2, -1, -1, -1, -1).clone())
        token = made.tokens.at(0, 0)
        made.tokens.tokens = [token]
        made.cycle()
        return made.state

    first, again = flushed(3), flushed(3)
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])


def test_each_record_tells_the_variants_apart() -> None:
    of = case("gdn", "fp16")
    told = {name: arm(name).describe(of) for name in ("stored/triton-gates", "replay/triton", *REPLAY)}
    assert told["stored/triton-gates"]["gates"] == told["replay/triton-gates"]["gates"] == "in the kernel"
    assert (told["replay/triton"]["gates"], told["replay/triton"]["fold"]) == ("ready", "d")
    assert told["replay/triton-raw-fold"]["fold"] == "inputs"
    assert "Philox" in told["replay/triton-stochastic"]["rounding"]
    bytes_of = {name: arm(name).traffic(of).ring_bytes_written for name in ("replay/triton", "replay/triton-raw-fold")}
    assert bytes_of["replay/triton-raw-fold"] > bytes_of["replay/triton"]
    assert set(told) <= set(known_arms())


def test_the_record_of_decays_in_bfloat16_tells_them_their_bytes_and_their_budget() -> None:
    of = case("kda")
    told = arm("replay/triton-decay-bf16").describe(of)
    assert (told["decay"], told["gates"]) == ("bf16", "ready")
    assert told["budget"] == "of a version that rounds the decays of tokens in the ring to bf16"
    exact, rounded = (arm(name).traffic(of) for name in ("replay/triton", "replay/triton-decay-bf16"))
    tokens = of.batch_size * (of.interval_length - 1) / of.interval_length
    assert exact.ring_bytes_written - rounded.ring_bytes_written == pytest.approx(tokens * 2 * 16 * 2)
