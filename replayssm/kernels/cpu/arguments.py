"""What a CPU kernel is given: tensors are checked here and handed over as addresses, the work is split into tasks.

An address costs a tenth of a NumPy view, of which a step at batch 1 would need a dozen.

A task is one row and some consecutive heads. A row is split in as many parts as there are threads, so that all threads
have the same share of the rows that flush, and further where the batch is too small to keep the threads busy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba.np.ufunc.parallel import get_thread_id
from torch import Tensor

from replayssm.kernels.cpu.compilation import inlined
from replayssm.kernels.cpu.lanes import FLOAT32, INT32, INT64, LINE, ROW, WIDTH, pointer

PARTS_PER_THREAD = 1
"""A row is split into this many tasks for each thread."""
TASKS_PER_THREAD = 4
"""And into more where the whole batch would give a thread fewer tasks than this."""
SHARED_CONFIG: dict[str, Any] = {
    "lanes": WIDTH,
    "row_in_registers": ROW,
    "parts_per_thread": PARTS_PER_THREAD,
    "tasks_per_thread": TASKS_PER_THREAD,
    "prefetch": "ring and output",
}
"""What all steps of all families share of their launch configuration, as a record keeps it."""
INPUT_DTYPES = (torch.bfloat16, torch.float32)


class Sizes(NamedTuple):
    """Lengths that a kernel runs over, with P, N for V, K too; ``*_padded`` are whole vectors of sixteen.

    ``narrow`` is 1 for bfloat16 activations and ring, ``floats`` a head's scratch.
    """

    rows: int
    state_slots: int
    heads: int
    groups: int
    P: int
    N: int
    p_padded: int
    n_padded: int
    capacity: int
    interval_length: int
    tokens_padded: int
    narrow: int
    heads_per_task: int
    threads: int
    floats: int
    window: int = 1
    """Tokens a row brings."""


class Place(NamedTuple):
    """A head of a row: ``at`` counts heads over the batch's rows, ``at_slot`` over the slots; and its ring's state."""

    head: int
    group: int
    row: int
    slot: int
    at: int
    at_slot: int
    length: int
    oldest: int


def address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Address of a contiguous CPU tensor; raises ``ValueError``, one line, if it is not what a kernel expects."""
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; accepted: {dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; accepted: {list(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; accepted: a contiguous tensor")
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}; accepted: cpu")
    return tensor.data_ptr()


def shape(name: str, tensor: Tensor, letters: str) -> torch.Size:
    """Shape of a tensor with as many axes as letters; raises ``ValueError`` on another number."""
    if tensor.dim() != len(letters):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; accepted: [{', '.join(letters)}]")
    return tensor.shape


def sizes_of(
    state: Tensor, rows: int, groups: int, dtype: torch.dtype, layer: Any = None, *, vectors: tuple[int, int, int]
) -> Sizes:
    """Sizes of a step on ``state [S,H,P,N]``, of a replay step where ``layer`` is given.

    ``vectors`` counts a head's scratch vectors of length P, N and interval length; for each token of the interval one
    of P and one of N come on top. Raises ``ValueError`` for what the kernels do not do.
    """
    if dtype not in INPUT_DTYPES:
        raise ValueError(f"inputs have dtype {dtype}; accepted: {', '.join(map(str, INPUT_DTYPES))}")
    if state.dim() != 4 or state.shape[1] % groups:
        raise ValueError(f"state has shape {list(state.shape)}; accepted: [S, H, P, N] with H a multiple of {groups}")
    ring = (1, 1) if layer is None else _standard_decoding(layer)
    return _sizes(state.shape, rows, groups, dtype is torch.bfloat16, ring, numba.get_num_threads(), vectors)


@lru_cache(maxsize=256)
def _sizes(
    state: tuple[int, ...],
    rows: int,
    groups: int,
    narrow: bool,
    ring: tuple[int, int],
    threads: int,
    vectors: tuple[int, int, int],
) -> Sizes:
    """Kept, since at batch 1 working them out takes a tenth of a step's time outside of the kernel."""
    (*_, P, N), (_, interval_length) = state, ring
    tokens_padded = padded(interval_length)
    floats = (interval_length + vectors[0]) * padded(P) + (interval_length + vectors[1]) * padded(N)
    return new_sizes(state, rows, groups, narrow, ring, threads, tokens_padded, floats + vectors[2] * tokens_padded)


def new_sizes(
    state: tuple[int, ...],
    rows: int,
    groups: int,
    narrow: bool,
    ring: tuple[int, int],
    threads: int,
    tokens_padded: int,
    floats: int,
    **more: int,
) -> Sizes:
    """Of a state ``[S,H,P,N]`` and a ``ring`` of ``(capacity, interval length)``; a head's scratch is ``floats``."""
    (slots, heads, P, N), (capacity, interval_length) = state, ring
    return Sizes(
        rows=rows,
        state_slots=slots,
        heads=heads,
        groups=groups,
        P=P,
        N=N,
        p_padded=padded(P),
        n_padded=padded(N),
        capacity=capacity,
        interval_length=interval_length,
        tokens_padded=tokens_padded,
        narrow=int(narrow),
        heads_per_task=heads_per_task(heads, rows, threads),
        threads=threads,
        floats=floats,
        **more,
    )


def heads_per_task(heads: int, rows: int, threads: int) -> int:
    """How many consecutive heads of a row a task takes."""
    parts = min(heads, max(PARTS_PER_THREAD * threads, -(-TASKS_PER_THREAD * threads // max(1, rows))))
    return -(-heads // parts)


def _standard_decoding(layer: Any) -> tuple[int, int]:
    if layer.window is not None:
        raise ValueError(f"window={layer.window} is speculative decoding; accepted by the CPU kernels: None")
    if "v" in layer.ring:
        raise ValueError("raw_fold=True keeps v and beta; accepted by the CPU kernels: False, the fold from d")
    return layer.capacity, layer.interval_length


def padded(length: int) -> int:
    """``length`` rounded up to whole vectors."""
    return -(-length // WIDTH) * WIDTH


def refuse(fault: int, slots: Tensor, state_slots: int, wanted: str = "a cursor of 0 to interval_length - 1") -> None:
    """Raise the ``ValueError`` of the first faulty row, which a kernel found before it changed anything."""
    if fault >= 0:
        raise ValueError(
            f"slots[{fault}]={int(slots[fault])} is impossible; accepted: -1 (padding) to {state_slots - 1}, with "
            f"{wanted}"
        )


@inlined
def faulty_slot(slots_address: int, rows: int, state_slots: int) -> int:
    """The first row whose slot does not exist, or -1."""
    slots = pointer(slots_address, INT64)
    for row in range(rows):
        if slots[row] < -1 or slots[row] >= state_slots:
            return row
    return -1


@inlined
def faulty_row(slots_address: int, rows: int, state_slots: int, cursor_address: int, interval_length: int) -> int:
    """The first row whose slot does not exist or whose cursor is outside the ring, or -1."""
    slots, cursor = pointer(slots_address, INT64), pointer(cursor_address, INT32)
    for row in range(rows):
        slot = slots[row]
        if slot < -1 or slot >= state_slots:
            return row
        if slot >= 0 and (cursor[slot] < 0 or cursor[slot] >= interval_length):
            return row
    return -1


@inlined
def count_flush(flushes_address: int, slot: int) -> None:
    """Count one of a slot."""
    pointer(flushes_address, INT64)[slot] += 1


@inlined
def tasks_per_row(sizes: Sizes) -> int:
    """Tasks that a row is split into."""
    return (sizes.heads + sizes.heads_per_task - 1) // sizes.heads_per_task


@inlined
def place_of(sizes: Sizes, row: int, slot: int, head: int, length: int, oldest: int) -> Place:
    """A head's place, with its ring's length and the index of its oldest entry."""
    group = head // (sizes.heads // sizes.groups)
    return Place(head, group, row, slot, row * sizes.heads + head, slot * sizes.heads + head, length, oldest)


@inlined
def entry(at: int, j: int, oldest: int, capacity: int) -> int:
    """Ring entry of token j of head or group ``at``, counted over all slots."""
    index = oldest + j
    return at * capacity + (index if index < capacity else index - capacity)


@inlined
def new_scratch(sizes: Sizes, heads_at_a_time: int) -> np.ndarray:
    """Uninitialised float32 for all threads, with room to start at a cache line."""
    return np.empty(heads_at_a_time * sizes.threads * sizes.floats + WIDTH, np.float32)


@inlined
def own_scratch(scratch: np.ndarray, sizes: Sizes, heads_at_a_time: int) -> Any:
    """The calling thread's part, at a cache line; ``scratch`` must outlive its use."""
    first = (scratch.ctypes.data + LINE - 1) // LINE * LINE
    return pointer(first + 4 * heads_at_a_time * sizes.floats * get_thread_id(), FLOAT32)
