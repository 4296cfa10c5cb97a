"""What only a GPU can show of windows: drift over 4,096 tokens, CUDA graphs, no allocation and no waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from experiments.case import Precision, Timing, WindowCase
from experiments.inputs import make_inputs, make_state
from experiments.measure import launches
from replayssm.cache import ReplayCache
from replayssm.formats import DTYPES, nearest_round
from replayssm.geometry import Geometry
from replayssm.graphs import capture
from replayssm.kernels.torch.replay import ordered_ring
from replayssm.kernels.triton import launch_csv, verify_launch_table
from replayssm.kernels.triton.launch import Launch
from replayssm.kernels.triton.verify_commit import commit_window
from replayssm.kernels.triton.verify_families import VERIFY
from replayssm.kernels.triton.verify_launch import WindowLaunch
from replayssm.recurrence import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"),
]

DEVICE = "cuda"
LENGTH, WINDOW = 16, 4
STEPS, LAST = 4096, 256
"""Tokens of a drift test, and the last ones of them, over which outputs are compared."""

every_family = pytest.mark.parametrize("family", FAMILIES)
every_format = pytest.mark.parametrize("format", DTYPES)


class Layer:
    """One layer of a cache whose rows use every slot, and a stream of tokens a row, ``[N,B,...]``."""

    def __init__(self, family: str, format: str, *, rows: int, tokens: int) -> None:
        geometry = Geometry(family, 4, 4 if family == "kda" else 2, 80, 128)
        self.family, self.rows = family, rows
        self.cache = ReplayCache(
            geometry, slots=rows, interval_length=LENGTH, window=WINDOW, state_dtype=DTYPES[format], device=DEVICE
        )
        batch = self.cache.batch(sorted(self.cache.allocate(rows), key=lambda slot: slot.index))
        self.slots, self.layer = self.cache.index(batch), self.cache.layer(0)
        self.start = make_state(geometry, rows, dtype=torch.float32, seed=1, device=DEVICE)
        self.cache.load_state(batch, self.start[None])
        steps = make_inputs(geometry, rows, tokens, dtype=torch.bfloat16, seed=0, device=DEVICE)
        columns = zip(steps[0]._fields, zip(*steps, strict=True), strict=True)
        self.stream = type(steps[0])(*(t[0] if n in ("A", "D") or t[0] is None else torch.stack(t) for n, t in columns))
        self.out = torch.full((rows, WINDOW, geometry.heads, geometry.head_dim), torch.nan, device=DEVICE)

    def at(self, index: Any) -> Any:
        """Tokens of the stream; A and D belong to the layer."""
        names = zip(self.stream._fields, self.stream, strict=True)
        return type(self.stream)(*(t if t is None or n in ("A", "D") else t[index] for n, t in names))

    def window(self, first: Tensor) -> Any:
        """The next tokens of each row from its own ``first [B]``, ``[B,T,...]``."""
        index = first[:, None] + torch.arange(WINDOW, device=DEVICE)
        return self.at((index, torch.arange(self.rows, device=DEVICE)[:, None]))

    def step(self, window: Any, accepted: Tensor) -> None:
        layer = self.layer
        VERIFY[self.family](self.out, layer, window, self.slots)
        commit_window(layer.cursor, layer.origin, self.slots, accepted, LENGTH, WINDOW, layer.capacity)

    def state(self) -> Tensor:
        """What checkpoint and committed ring stand for, in float64."""
        A = (self.stream.A,) if self.family == "mamba2" else ()
        ring = ordered_ring(self.layer, self.slots)
        return FAMILIES[self.family].fold(self.layer.state.double(), ring, self.layer.cursor, *A)

    def memory(self) -> list[Tensor]:
        """Everything that a step may change."""
        layer = self.layer
        return [layer.flushes, layer.cursor, layer.origin, layer.state, *layer.ring.values()]


def recurrence(of: Layer, format: str | None, steps: int) -> tuple[Tensor, Tensor]:
    """The last outputs and the state of the plain recurrence: in float64, or in float32 and rounded at every token."""
    state, outputs = nearest_round(of.start, format or "fp32").float(), []
    state = state.double() if format is None else state
    for token in range(steps):
        inputs = of.at(token)
        wide = inputs if format else type(inputs)(*(None if t is None else t.double() for t in inputs))
        output, state = FAMILIES[of.family].step(state, wide)
        state = nearest_round(state, format).float() if format else state
        outputs.append(output)
    return torch.stack(outputs[-LAST:]), state


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@every_family
@every_format
def test_drift_with_random_acceptance_is_within_twice_that_of_an_honest_stored_recurrence(
    family: str, format: str
) -> None:
    """Each row accepts 0 to T of its next tokens and drafts the others again, until all have decoded the stream."""
    of = Layer(family, format, rows=3, tokens=STEPS + WINDOW)
    of.start = of.layer.state.float().clone()  # as the format holds it
    generator = torch.Generator().manual_seed(2)
    position = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    outputs = torch.full((STEPS, *of.out.shape[:1], *of.out.shape[2:]), torch.nan, device=DEVICE)
    while (position < STEPS).any():
        accepted = torch.randint(WINDOW + 1, (3,), generator=generator).to(DEVICE)
        accepted = torch.minimum(accepted, STEPS - position)
        of.step(of.window(position.clamp_max(STEPS)), accepted)
        for t in range(WINDOW):
            rows = (accepted > t).nonzero()[:, 0]
            outputs[position[rows] + t, rows] = of.out[rows, t]
        position += accepted
    truth, state = recurrence(of, None, STEPS)
    honest_outputs, honest_state = recurrence(of, format, STEPS)
    assert of.layer.flushes.min() >= STEPS // (LENGTH + WINDOW)
    assert distance(outputs[-LAST:], truth) <= 2 * distance(honest_outputs, truth)
    assert distance(of.state(), state) <= 2 * distance(honest_state, state)


@every_family
@every_format
def test_a_graph_does_what_its_steps_do(family: str, format: str) -> None:
    """Bit for bit, over several replays, with rows that flush at different steps and accept other counts."""
    eager, graphed = (Layer(family, format, rows=5, tokens=2 * WINDOW) for _ in range(2))
    accepted = torch.arange(5, device=DEVICE) % (WINDOW + 1)
    windows = [of.window(torch.zeros(5, dtype=torch.int64, device=DEVICE)) for of in (eager, graphed)]
    for of, window in zip((eager, graphed), windows, strict=True):
        of.step(window, accepted)
    before = [tensor.clone() for tensor in graphed.memory()]
    graph = capture(lambda: graphed.step(windows[1], accepted))
    assert all(same_bits(*pair) for pair in zip(graphed.memory(), before, strict=True))
    for _ in range(7):
        eager.step(windows[0], accepted)
        graph.replay()
        assert same_bits(eager.out, graphed.out)
        assert all(same_bits(*pair) for pair in zip(graphed.memory(), eager.memory(), strict=True))
    assert len(graphed.layer.flushes.unique()) > 1


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, with NaN equal to NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


@every_family
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_a_step_neither_allocates_nor_waits(family: str, rows: int) -> None:
    """With launches for few heads and for many."""
    of = Layer(family, "fp32", rows=rows, tokens=WINDOW)
    window = of.window(torch.zeros(rows, dtype=torch.int64, device=DEVICE))
    accepted = torch.full((rows,), WINDOW - 1, device=DEVICE)
    of.step(window, accepted)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(LENGTH):
            of.step(window, accepted)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    assert of.out.isfinite().all()


TRIED: dict[str, tuple[str, list[Any]]] = {
    "snapshots": ("gdn", [Launch(16, 1, 1, 16, stages=1), Launch(8, 10, 1, 16, stages=2)]),
    "verify": ("mamba2", [WindowLaunch(16, 5, 2, 1, registers=168, chunks=2), WindowLaunch(32, warps=2, eager=True)]),
}
"""By operation, a family and launches of it."""
TOO_LARGE = WindowLaunch(16, 5, stages=64)
"""Half a megabyte of shared memory."""


@pytest.mark.parametrize("operation", TRIED)
def test_launches_of_windows_are_tried_on_the_device(
    operation: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As tests/test_gpu.py has it of other steps; one that the device does not take is told and left out."""
    family, tried = TRIED[operation]
    refused = [TOO_LARGE] if operation == "verify" else []
    monkeypatch.setattr(launches, "candidates", lambda *asked: [*refused, *tried])
    monkeypatch.setattr(launch_csv, "TABLES", tmp_path)
    verify_launch_table.forget()
    timing, geometry = Timing("test", 3, 1, 5.0, 0.1, 1.0, 1, 60.0), Geometry(family, 4, 2, 80, 128)
    shared = ("window", "test", geometry, 64, LENGTH, "aligned", Precision("fp32", "bf16"), "cuda", 0, 0, timing)
    case = WindowCase(*shared, window=WINDOW, accepted=3)
    said: list[str] = []
    found = launches.search(case, operation, said.append)
    assert found is not None, said
    assert len(said) == len(refused)
    assert all("stages=64" in line and "out of resource: shared memory" in line for line in said)
    entry, times = found
    assert set(tried) <= set(times)
    assert all(us > 0 for of_launch in times.values() for us in of_launch)
    name = launch_csv.device_name(torch.device(DEVICE))
    verify_launch_table.write(verify_launch_table.path_of(name), name, [entry])
    verify_launch_table.forget()
    assert launches.present(case, operation).launch == entry.launch
    verify_launch_table.forget()
