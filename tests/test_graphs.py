"""Captures: Python's garbage collector rests meanwhile. A stand-in takes the place of CUDA graphs."""

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
    """Garbage that only the collector finds, as an engine of before may be."""

    def __init__(self) -> None:
        self.itself = self


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
