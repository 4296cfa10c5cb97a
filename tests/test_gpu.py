"""What only a GPU can show: drift over 4,096 steps, CUDA graphs, no allocation and no waiting, sanitizers.

`test_kernels_triton` and `test_rounding_triton` run on the device as well where there is one, and carry the same mark.
Needs torch, Triton, pytest, hypothesis, numba; `compute-sanitizer` of a CUDA toolkit for the last test.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from experiments.case import Case, Precision, Timing
from experiments.inputs import make_inputs, make_state
from experiments.measure import launches
from replayssm.cache import CacheLayer, ReplayCache
from replayssm.formats import DTYPES, nearest_round
from replayssm.geometry import Geometry
from replayssm.graphs import capture
from replayssm.kernels.triton import gdn, kda, launch_csv, launch_table, mamba2
from replayssm.kernels.triton.launch import Launch
from replayssm.recurrence import FAMILIES
from scripts import sanitize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"),
]

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICE = "cuda"
KERNELS: dict[str, Any] = {"mamba2": mamba2, "gdn": gdn, "kda": kda}
LENGTH = 16
STEPS, LAST = 4096, 256
"""Steps of a drift test, and the last ones of them, over which outputs are compared."""

every_family = pytest.mark.parametrize("family", FAMILIES)
every_format = pytest.mark.parametrize("format", DTYPES)
AHEAD = Launch(rows=16, tiles=1, warps=2, lanes=8, ahead=True)
every_form = pytest.mark.parametrize("launch", [None, AHEAD], ids=["one launch", "two launches"])


def geometry(family: str) -> Geometry:
    return Geometry(family, 4, 4 if family == "kda" else 2, 80, 128)


class Layer:
    """One layer of a cache whose rows use every slot, and the tokens of a request a row."""

    def __init__(
        self, family: str, format: str, *, rows: int, tokens: int, seed: int = 0, launch: Launch | None = None
    ) -> None:
        shape = geometry(family)
        self.kernels, self.rows, self.launch = KERNELS[family], rows, launch
        self.cache = ReplayCache(shape, slots=rows, interval_length=LENGTH, state_dtype=DTYPES[format], device=DEVICE)
        self.batch = self.cache.batch(self.cache.allocate(rows))
        self.start = make_state(shape, rows, dtype=torch.float32, seed=seed + 1, device=DEVICE)
        self.cache.load_state(self.batch, self.start[None])
        self.inputs = make_inputs(shape, rows, tokens, dtype=torch.bfloat16, seed=seed, device=DEVICE)
        self.slots, self.layer = self.cache.index(self.batch), self.cache.layer(0)
        self.out = torch.empty(rows, shape.heads, shape.head_dim, device=DEVICE)

    def stored(self, token: int) -> None:
        self.kernels.stored_step(self.out, self.layer.state, self.inputs[token], self.slots)

    def replay(self, token: int) -> None:
        self.kernels.replay_step(self.out, self.layer, self.inputs[token], self.slots, self.launch)

    def stagger(self) -> None:
        """Every row at another point of its cycle, with a ring as some steps have left it."""
        for token in range(LENGTH - 1):
            self.replay(token)
            self.layer.cursor.add_((torch.arange(self.rows, device=DEVICE) > token).int())

    def memory(self) -> list[Tensor]:
        """Everything that a step may change."""
        layer = self.layer
        return [layer.flushes, layer.cursor, layer.origin, layer.state, *layer.ring.values()]


def double(inputs: Any) -> Any:
    return type(inputs)(*(None if tensor is None else tensor.double() for tensor in inputs))


def drift(family: str, format: str, step: Callable[[int], tuple[Tensor, Tensor]], first: Tensor, inputs: Any) -> Any:
    """Relative errors by norm, of the last outputs and of the state after all steps, against float64.

    ``step`` gives the output of a token and the state after it; ``first`` is the state as the format holds it.
    """
    truth, error, size = first.double(), 0.0, 0.0
    for token, given in enumerate(inputs):
        expected, truth = FAMILIES[family].step(truth, double(given))
        output, state = step(token)
        if token >= len(inputs) - LAST:
            error = error + (output.double() - expected).square().sum()
            size = size + expected.square().sum()
    return (error / size).sqrt().item(), ((state.double() - truth).norm() / truth.norm()).item()


@every_family
@every_format
def test_drift_is_within_twice_that_of_an_honest_stored_recurrence(family: str, format: str) -> None:
    """The honest one: torch in float32, its state rounded to the format after every step. Replay rounds once in 16."""
    layers = [Layer(family, format, rows=3, tokens=STEPS, launch=launch) for launch in (None, None, AHEAD)]
    inputs, held = layers[0].inputs, nearest_round(layers[0].start, format).float()

    def honest(token: int) -> tuple[Tensor, Tensor]:
        nonlocal held
        output, after = FAMILIES[family].step(held, inputs[token])
        held = nearest_round(after, format).float()
        return output, held

    def stored(token: int) -> tuple[Tensor, Tensor]:
        layers[0].stored(token)
        return layers[0].out, layers[0].layer.state

    def replayed(layer: Layer, token: int) -> tuple[Tensor, Tensor]:
        layer.replay(token)
        layer.cache.commit(layer.batch)
        return layer.out, layer.layer.state

    steps = {"stored": stored, "replay": partial(replayed, layers[1]), "two launches": partial(replayed, layers[2])}
    first = held
    budget = [2 * error for error in drift(family, format, honest, first, inputs)]
    found = {name: drift(family, format, step, first, inputs) for name, step in steps.items()}
    for layer in layers[1:]:
        assert layer.layer.flushes.tolist() == [STEPS // LENGTH] * 3
        assert layer.layer.cursor.tolist() == [0] * 3
    for name, errors in found.items():
        assert errors[0] <= budget[0], f"{name}: outputs {errors[0]:.2e}, accepted {budget[0]:.2e}"
        assert errors[1] <= budget[1], f"{name}: state {errors[1]:.2e}, accepted {budget[1]:.2e}"


def cycle(layer: Layer, outputs: Tensor) -> None:
    """``LENGTH`` steps with the commit on the device, each into its own outputs."""
    for token in range(LENGTH):
        layer.replay(token)
        outputs[token].copy_(layer.out)
        advance(layer.layer)


def advance(layer: CacheLayer) -> None:
    """What `ReplayCache.commit` does, without looking at the cursor."""
    due = layer.cursor == LENGTH - 1
    layer.origin.copy_(torch.where(due, (layer.origin + layer.cursor) % layer.capacity, layer.origin))
    layer.cursor.copy_(torch.where(due, 0, layer.cursor + 1))


@every_family
@every_format
@every_form
def test_a_graph_does_what_its_steps_do(family: str, format: str, launch: Launch | None) -> None:
    """Bit for bit, over two replays of a graph of a whole cycle, with rows that flush at different steps of it."""
    eager, graphed = (Layer(family, format, rows=5, tokens=LENGTH, launch=launch) for _ in range(2))
    outputs = [torch.zeros(LENGTH, *layer.out.shape, device=DEVICE) for layer in (eager, graphed)]
    for layer in (eager, graphed):
        layer.stagger()
        assert len(layer.layer.cursor.unique()) == layer.rows
    before = [tensor.clone() for tensor in graphed.memory()]
    graph = capture(lambda: cycle(graphed, outputs[1]))
    for tensor, old in zip(graphed.memory(), before, strict=True):
        assert same_bits(tensor, old)
    for _ in range(2):
        cycle(eager, outputs[0])
        graph.replay()
        assert same_bits(*outputs)
        for tensor, expected in zip(graphed.memory(), eager.memory(), strict=True):
            assert same_bits(tensor, expected)
    assert (graphed.layer.flushes - before[0] == 2).all()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, with NaN equal to NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


@every_family
@every_format
@every_form
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_step_neither_allocates_nor_waits(family: str, format: str, rows: int, launch: Launch | None) -> None:
    layer = Layer(family, format, rows=rows, tokens=LENGTH, launch=launch)
    layer.stagger()
    for step in (layer.stored, layer.replay):
        step(0)
        torch.cuda.synchronize()
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for token in range(LENGTH):
                step(token)
            with pytest.raises(RuntimeError, match="synchron"):
                layer.slots[0].item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
        assert layer.out.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_sanitizers_find_nothing(tool: str) -> None:
    if sanitize.find() is None:
        pytest.skip("compute-sanitizer, which a CUDA toolkit brings, was not found")
    command = [sys.executable, "-m", "scripts.sanitize", "--tools", tool]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("operation", ["stored", "replay"])
def test_launches_are_tried_on_the_device(
    operation: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Candidates compile in processes of their own, are right, and have graphs of their own; a table is read back."""
    tried = [Launch(16, 5, 2, 8), Launch(32, 1, 2, 8, stages=1, at_once=True), Launch(8, 1, 1, 16, stages=1)]
    monkeypatch.setattr(launches, "candidates", lambda *asked: tried)
    monkeypatch.setattr(launch_csv, "TABLES", tmp_path)
    launch_table.forget()
    timing = Timing("test", 3, 1, 5.0, 0.1, 1.0, 1, 60.0)
    case = Case(
        "kernel", "test", geometry("mamba2"), 64, LENGTH, "aligned", Precision("fp32", "bf16"), "cuda", 0, 0, timing
    )
    said: list[str] = []
    found = launches.search(case, operation, said.append)
    assert found is not None, said
    assert said == []
    entry, times = found
    assert set(tried) <= set(times)
    assert all(us > 0 for of_launch in times.values() for us in of_launch)
    name = launch_csv.device_name(torch.device(DEVICE))
    launch_table.write(launch_table.path_of(name), name, [entry])
    launch_table.forget()
    assert launches.present(case, operation).launch == entry.launch
    launch_table.forget()
