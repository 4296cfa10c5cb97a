"""The arms of a case with a window under the experiment's own gates; those in Triton on a GPU, or interpreted."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM wants no GPU to be told so
pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl

from experiments.case import Precision, Timing, WindowCase, case_hash
from experiments.measure import devices, gates
from experiments.measure.assemble import Group, case_from_dict
from experiments.measure.layers import forget
from experiments.measure.window_gates import WindowCheck
from experiments.measure.worker import run_group
from replayssm.geometry import Geometry
from replayssm.peers import vllm, vllm_windows
from replayssm.traffic import replay

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"
IN_TRITON = [("verify/triton", "gdn"), ("snapshots/triton", "mamba2")]
IN_TRITON += [("verify/triton", "mamba2"), ("verify/triton", "kda"), ("snapshots/triton", "gdn")] if GPU else []
IN_TRITON += [("oracle/triton", family) for family in ("mamba2", "gdn", "kda")] if GPU else []
"""Interpreted, these take seconds each; tests/test_verify_triton.py has the kernels of all families."""
SHAPES = {"mamba2": (2, 1), "gdn": (2, 1), "kda": (2, 2)}


@pytest.fixture(autouse=True)
def forgotten() -> None:
    forget()


def case(
    family: str = "gdn", phase: str = "staggered", length: int = 7, window: int = 3, accepted: int = 2
) -> WindowCase:
    heads, groups = SHAPES[family]
    timing = Timing("test", 2, 1, 5.0, 0.01, 1.0, 1, 60.0)
    geometry, precision = Geometry(family, heads, groups, 16, 16), Precision("fp32", "bf16")
    shared = ("window", "test", geometry, 3, length, phase, precision, DEVICE, 0 if GPU else 1, 3, timing)
    return WindowCase(*shared, window=window, accepted=accepted)


def arm(name: str) -> Any:
    return importlib.import_module(f"experiments.arms.{name.replace('/', '_').replace('-', '_')}")


def judged(name: str, of: WindowCase) -> Any:
    """The arm's layers after both checks, each over one cycle, and one between them."""
    layers = arm(name).prepare(of, 2)
    for cycles, moment in ((0, "before"), (2, "after")):
        correctness, _ = WindowCheck(of, 2, moment).run(layers, cycles, None)
        assert not correctness.faults()
        gates.mark_copies(layers)
        layers.cycle()
    return layers


@pytest.mark.parametrize(("name", "family"), IN_TRITON)
def test_arms_in_triton_pass_the_gates(name: str, family: str) -> None:
    judged(name, case(family, length=4, accepted=1, window=2))


@pytest.mark.parametrize(("length", "window", "accepted", "phase"), [
    (16, 4, 3, "staggered"), (4, 4, 2, "aligned"), (5, 1, 1, "staggered"), (6, 2, 2, "staggered"),
])  # fmt: skip
def test_arms_in_torch_pass_the_gates(length: int, window: int, accepted: int, phase: str) -> None:
    of = case("mamba2", phase, length, window, accepted)
    for name in ("verify/torch", "snapshots/torch"):
        layers = judged(name, of)
    assert of.steps_per_cycle == replay(of.geometry, length, window=window, accepted=accepted).steps
    assert layers.flushes.unique().tolist() == [0]


def test_a_window_that_is_committed_whole_is_seen() -> None:
    """A cursor that rejects nothing, or snapshots that do not."""
    for name in ("verify/torch", "snapshots/torch"):
        of = case()
        layers = arm(name).prepare(of, 2)
        layers._accepted.fill_(of.window)
        assert WindowCheck(of, 2, "before").run(layers, 0, None)[0].faults()


def test_an_oracle_that_writes_another_state_is_seen() -> None:
    """Behind the last token of the window, not behind the last one accepted; it reads and writes one state a step."""
    of = case("mamba2", "aligned", length=2, window=2, accepted=1)
    layers = arm("oracle/triton").prepare(of, 2)
    assert not WindowCheck(of, 2, "before").run(layers, 0, None)[0].faults()
    layers._accepted.fill_(of.window)
    faults = WindowCheck(of, 2, "before").run(layers, 1, None)[0].faults()
    assert any(fault.startswith("state error") for fault in faults)
    found, every = (arm(name).traffic(of) for name in ("oracle/triton", "snapshots/triton"))
    assert found.state_bytes_written == found.state_bytes_read == every.state_bytes_written / 2
    assert (found.rmw_bytes, found.read_bytes, found.flops) == (found.total_bytes, 0, every.flops)


@pytest.mark.parametrize("by", ["values", "the sign of a zero"])
def test_a_checkpoint_that_steps_on_between_flushes_is_seen(by: str) -> None:
    of, layers = case(), arm("verify/torch").prepare(case(), 2)
    step = layers._step

    def stepping(out: Any, layer: Any, inputs: Any, slots: Any) -> None:
        step(out, layer, inputs, slots)
        if by == "values":
            layer.state.mul_(1 + 1e-6)
        else:
            layer.state[..., 0, 0] = (-0.0, 0.0)[int(layer.state[0, 0, 0, 0].signbit())]

    layers.state[..., 0, 0] = 0.0
    layers._step = stepping
    faults = WindowCheck(of, 2, "before").run(layers, 0, None)[0].faults()
    assert any(fault.startswith("state elements written between flushes") for fault in faults)


def test_a_group_becomes_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both arms, timed, against each other; the case survives being written."""
    monkeypatch.setattr("experiments.measure.worker.copies_of", lambda *_: 2)
    names = tuple(f"{kind}/{'triton' if GPU else 'torch'}" for kind in ("snapshots", "verify"))
    of = case("mamba2", "aligned")
    records = run_group(Group(of, names, 0, ()))
    assert [record.status for record in records] == ["ok", "ok"], [record.message for record in records]
    assert {record.layer_steps_per_sample for record in records} == {2 * 3}
    assert records[0].again_samples_ns
    assert case_from_dict(records[1].case) == of
    assert records[0].traffic["state_bytes_written"] == 3 * records[0].traffic["state_bytes_read"]
    assert case_hash(of) != case_hash(dataclasses.replace(of, accepted=1))


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [None, vllm.Launch(8, 1)])
@pytest.mark.parametrize("family", SHAPES)
def test_snapshots_of_vllm_pass_the_gates(
    family: str, launch: vllm.Launch | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU interpreted, where it is installed."""
    if reason := vllm_windows.unsupported(family):
        pytest.skip(reason)
    if not GPU:
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        module = sys.modules[vllm_windows.KERNELS[family][0]]
        if hasattr(module, "exp"):  # the interpreter finds it only as a function of Triton's language
            monkeypatch.setattr(module, "exp", lambda x: tl.exp(x))
    of = case(family, length=4, accepted=1, window=2)
    layers = arm("snapshots/vllm-tuned")._layers(of, 2, launch)
    graph = devices.of(of).graph(layers) if GPU else None
    assert not WindowCheck(of, 2, "before").run(layers, 0, graph)[0].faults()


def test_windows_of_vllm_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayssm.peers.folder", lambda package: None)
    for name in ("snapshots/vllm", "snapshots/vllm-tuned"):
        assert arm(name).unsupported(case()).startswith("vLLM is not installed; smallest install: pip install")
        assert arm(name).describe(case())["gates"] == "in the kernel"
