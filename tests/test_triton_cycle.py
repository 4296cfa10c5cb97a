"""The Triton kernels around a step, commit and bandwidth: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    # Read when Triton defines its own functions, so before its first import.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed")

from replayssm.cache import ReplayCache  # noqa: E402
from replayssm.geometry import Geometry  # noqa: E402
from replayssm.kernels.triton import bandwidth  # noqa: E402
from replayssm.kernels.triton.commit import BLOCK, commit  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"


@pytest.mark.parametrize("interval_length", [1, 2, 5, 16])
def test_commit_is_that_of_the_cache(interval_length: int) -> None:
    """Rows at every phase, on scattered slots, rings that start anywhere, some rows padding, over more than a cycle."""
    rows = BLOCK + 3
    cache = ReplayCache(Geometry("gdn", 1, 1, 1, 1), slots=rows + 4, interval_length=interval_length, device=DEVICE)
    cache.allocate(2)  # two slots that no row has
    handles = cache.allocate(rows)
    generator = torch.Generator().manual_seed(interval_length)
    order = torch.randperm(rows, generator=generator).tolist()
    cache.cursor[:] = torch.arange(rows + 4) % interval_length
    cache.origin[:] = torch.randint(cache.capacity, (rows + 4,), generator=generator).to(torch.int32)
    cursor, origin = cache.cursor.clone(), cache.origin.clone()
    for step in range(interval_length + 2):
        batch = cache.batch([None if (i + step) % 7 == 0 else handles[i] for i in order])
        commit(cursor, origin, batch.index, interval_length, cache.capacity)
        cache.commit(batch)
        assert torch.equal(cursor, cache.cursor)
        assert torch.equal(origin, cache.origin)


def test_a_commit_of_nothing_changes_nothing() -> None:
    cursor = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    for slots in (torch.empty(0, dtype=torch.int64, device=DEVICE), torch.tensor([-1, -1], device=DEVICE)):
        commit(cursor, cursor.clone(), slots, 4, 3)
    assert cursor.tolist() == [3, 0]


def test_bandwidth_kernels_move_what_they_count() -> None:
    buffer = torch.ones(3 * 8192 + 20, device=DEVICE)
    found = bandwidth.candidates()
    assert {kind for kind, _, _ in found.values()} == set(bandwidth.KINDS)
    for name, (kind, run, bytes_per_element) in found.items():
        assert run(buffer) == buffer.numel() * bytes_per_element, name
        assert bytes_per_element == bandwidth.BYTES_PER_ELEMENT[kind]
        assert torch.equal(buffer.abs(), torch.ones_like(buffer)), name
    with pytest.raises(ValueError, match=r"^buffer is torch.float32 \[3\]; accepted: contiguous float32 \[n\]"):
        run(torch.ones(3, device=DEVICE))


@pytest.mark.parametrize(("block", "warps"), bandwidth.BLOCKS)
def test_bandwidth_kernels_reach_every_element(block: int, warps: int) -> None:
    buffer = torch.arange(2 * block + 10, dtype=torch.float32, device=DEVICE)
    sums = bandwidth.read(buffer, block, warps)
    assert torch.allclose(sums, torch.stack([part.sum() for part in buffer.split(block)]))
    target = torch.zeros_like(buffer)
    bandwidth.copy(target, buffer, block, warps)
    assert torch.equal(target, buffer)
    bandwidth.scale(buffer, 3.0, block, warps)
    assert torch.equal(buffer, 3 * target)
