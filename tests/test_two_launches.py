"""Steps in two launches, of which the second may start before the first has written anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_kernels_triton import AHEAD, DEVICE, FLOAT32, GPU, KERNELS, Step, distance, every_family, geometry

from experiments.inputs import make_inputs, make_state
from replayssm.cache import ReplayCache
from replayssm.geometry import Geometry
from replayssm.kernels.triton import delta_ahead, mamba2_ahead
from replayssm.kernels.triton.ahead import workspace
from replayssm.kernels.triton.launch import Cut, Launch


class Seen:
    """A kernel, and the options of its last launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.options = kernel, dict[str, Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **options: Any) -> None:
            self.options = options
            self.kernel[grid](*given, **options)

        return launch


class Late:
    """In the place of a first launch: of what it writes nothing is there before the second waits for it."""

    def __init__(self, module: Any, step: Step, patch: pytest.MonkeyPatch) -> None:
        self.first, self.place, self.step = module.products_ahead, module.place, step
        self.programs = self.waits = self.announced = 0
        self.late: list[Any] = []
        patch.setattr(module, "overlap", lambda: {"launch_pdl": True})
        patch.setattr(module, "gdc_launch_dependents", self.announce)
        patch.setattr(module, "gdc_wait", self.wait)
        patch.setattr(module, "products_ahead", self)
        self.second = Seen(module.apply_products)
        patch.setattr(module, "apply_products", self.second)

        def place(cut: Any) -> Any:
            self.programs += 1
            for tensor, written, before, _ in self.late:
                tensor[written] = before[written]
            return self.place(cut)

        self.patch = lambda: patch.setattr(module, "place", place)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **options: Any) -> None:
            layer = self.step.layer
            given[3].fill_(torch.nan)
            memory = [self.step.out, layer.state, layer.flushes, *layer.ring.values(), given[3]]
            before = [tensor.clone() for tensor in memory]
            self.first[grid](*given, **options)
            for tensor, old in zip(memory, before, strict=True):
                written = (tensor != old) & ~(tensor.isnan() & old.isnan())
                self.late.append((tensor, written, old, tensor.clone()))
            self.patch()

        return launch

    def announce(self) -> None:
        self.announced += 1

    def wait(self) -> None:
        self.waits += 1
        for tensor, written, _, after in self.late:
            tensor[written] = after[written]


@pytest.mark.skipif(GPU, reason="the interpreter runs one program after another")
@every_family
@pytest.mark.parametrize("launch", AHEAD)
def test_every_program_waits_and_reads_nothing_of_the_first_launch_before(
    family: str, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {} if family == "mamba2" else {"raw": True}
    step = Step(family, [3, None, 1], 4, head_dim=32, **raw)
    late = Late(mamba2_ahead if family == "mamba2" else delta_ahead, step, monkeypatch)
    step.replay(AHEAD[launch])
    assert late.announced == 3 * 2
    assert late.second.options["launch_pdl"]
    assert late.waits == late.programs == 3 * 2 * (2 if launch == "ahead" else 1)


def test_layers_share_workspaces_which_stay_where_graphs_have_them() -> None:
    """Few, however many sizes of a batch there are."""
    cache = ReplayCache(geometry("gdn"), slots=1, layers=2)
    layers = [cache.layer(number) for number in range(2)]
    cut = Cut.of(geometry("gdn"), Launch(16, 1, 1, ahead=True), layers[0].state, layers[0])
    made = [workspace(layers[rows % 2], rows, cut, 32) for rows in (3, 4, 5, 8, 3)]
    assert [len(found) for found in made] == [4, 4, 8, 8, 4]
    assert len({found.data_ptr() for found in made}) == len(layers[0].workspace) == 2
    assert made[0].shape == (4, 2, 36)


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_two_groups_of_heads_do_what_they_do_in_one_launch(family: str) -> None:
    """A cycle of rows that flush one after the other, of inputs that have strides of their own; the memory of both
    caches."""
    shape = Geometry(family, 4, 2, 20, 16)
    launches = Launch(16, 1, 1, 8, at_once=True), Launch(16, 1, 1, 8, eager=True, ahead=True)
    caches = [
        ReplayCache(shape, slots=2, interval_length=3, input_dtype=torch.float32, device=DEVICE) for _ in launches
    ]
    requests = [cache.allocate(2) for cache in caches]
    tokens = make_inputs(shape, 2, 4, dtype=torch.float32, seed=1, device=DEVICE)
    for cache in caches:
        cache.layer(0).state.copy_(make_state(shape, 2, dtype=torch.float32, seed=2, device=DEVICE))
    for number, token in enumerate(tokens):
        outs = []
        if family == "mamba2":
            token = token._replace(z=2 * token.x.flip(0))
        cut_out = (
            t if t is None or t.dim() == 1 else torch.cat([t] * (2 + place), dim=1)[:, : t.shape[1]]
            for place, t in enumerate(token)
        )
        given = token, type(token)(*cut_out)
        for cache, (first, second), launch, token in zip(caches, requests, launches, given, strict=True):
            batch = cache.batch([first, None if number == 0 else second])
            outs.append(torch.zeros(2, 4, 20, device=DEVICE))
            KERNELS[family].replay_step(outs[-1], cache.layer(0), token, cache.index(batch), launch)
            cache.commit(batch)
        assert distance(outs[1], outs[0]) <= FLOAT32
    one, two = (cache.layer(0) for cache in caches)
    for name, written in {"state": one.state, **one.ring}.items():
        found = two.state if name == "state" else two.ring[name]
        assert distance(found.nan_to_num(9.0), written.nan_to_num(9.0)) <= FLOAT32, name
