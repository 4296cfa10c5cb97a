"""Captures: Python's garbage collector rests meanwhile. Where there is no GPU a stand-in takes the place of graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm.graphs import capture


class Lost:
    """Garbage that only the collector finds, with what it holds."""

    def __init__(self, held: Any = None) -> None:
        self.itself, self.held = self, held


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the captures of a test were given, and what the collector did when they began and ended."""
    found: list[Any] = []

    @contextmanager
    def graph(made: Any, pool: Any) -> Iterator[None]:
        found.append((made, pool, gc.isenabled()))
        try:
            yield
        finally:
            found.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    enabled = gc.isenabled()
    yield found
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_a_graph_is_captured(entered: list[Any], enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    seen: list[bool] = []
    graph = capture(lambda: seen.append(gc.isenabled()), pool="another's")
    assert entered == [(graph, "another's", False), False]
    assert (seen, gc.isenabled()) == ([False], enabled)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_capture_that_fails_leaves_the_collector_as_it_was(entered: list[Any], enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0)
    assert entered[1:] == [False]
    assert gc.isenabled() is enabled


def test_garbage_goes_before_a_capture_or_after_it(entered: list[Any]) -> None:
    gc.disable()
    before = weakref.ref(Lost())
    gc.enable()
    left: list[Any] = []

    def run() -> None:
        left.append(before())
        threshold = gc.get_threshold()
        gc.set_threshold(1)
        during = weakref.ref(Lost())
        left.append(bool([[] for _ in range(100)]) and during() is not None)
        gc.set_threshold(*threshold)

    capture(run)
    assert left == [None, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_that_is_lost_during_a_capture_does_not_spoil_it() -> None:
    x = torch.zeros(1, device="cuda")
    x.add_(1)
    others = [capture(lambda: x.add_(1))]
    threshold = gc.get_threshold()

    def run() -> None:
        gc.set_threshold(1)
        Lost(others.pop())
        assert [[] for _ in range(100)]
        x.add_(1)

    try:
        capture(run).replay()
    finally:
        gc.set_threshold(*threshold)
    assert x.item() == 2
