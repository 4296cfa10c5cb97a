"""Capturing CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def capture(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what ``run()`` launches, none of which runs before the first ``replay()``. It takes its memory from
    another graph's ``pool()``, if given: such graphs are replayed one after another, and leave nothing to each other
    there.

    Kernels must have run before, since they cannot be loaded meanwhile. Nor may Python's garbage collector find another
    graph then: destroying one is not permitted while a stream is capturing, and makes this capture fail later on. It
    is run before, and held off until the capture has ended, however that ends.
    """
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with _garbage_kept(), torch.cuda.graph(graph, pool=pool):
        run()
    return graph


@contextmanager
def _garbage_kept() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
