"""Plain kernels over one float32 buffer: the fastest of them in a run says what the memory gives, the roof.

Several, since no single one is fastest on every machine: PyTorch's own, and loops over `lanes` with one, two or four
sequential streams a thread, in long stretches or in tasks of the size that a layer's heads have. Reads count every byte
once; read-modify-writes count it twice, once each way, and leave the buffer's values as they are up to sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import torch
from torch import Tensor

from replayssm.kernels.cpu.arguments import address
from replayssm.kernels.cpu.compilation import compiled, inlined
from replayssm.kernels.cpu.lanes import FLOAT32, ONE, WIDTH, add, advance, load, mul, pointer, splat, store, total

READ, READ_MODIFY_WRITE = "read", "read_modify_write"
BYTES_PER_ELEMENT = {READ: 4, READ_MODIFY_WRITE: 8}
TASK_FLOATS = 491520
"""1.9 MiB: half of the heads of a row of Nemotron-3-Nano-4B."""


def candidates() -> dict[str, tuple[str, Callable[[Tensor], int], int]]:
    """Kernels by name: kind (``read`` or ``read_modify_write``), a call that runs the kernel over a contiguous float32
    buffer ``[n]`` and returns the bytes it moved, and the bytes it moves an element.
    """
    operations: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
        "torch.sum": (READ, torch.sum),
        "torch.amax": (READ, torch.amax),
        "torch.dot": (READ, lambda buffer: torch.dot(buffer, buffer)),
        "torch.mul_": (READ_MODIFY_WRITE, lambda buffer: buffer.mul_(1.0)),
        "torch.add_": (READ_MODIFY_WRITE, lambda buffer: buffer.add_(0.0)),
        "torch.neg_": (READ_MODIFY_WRITE, lambda buffer: buffer.neg_()),
    }
    runs = {
        name: (kind, _whole(operation, kind), BYTES_PER_ELEMENT[kind]) for name, (kind, operation) in operations.items()
    }
    for kind, kernel, name in ((READ, _read, "sum"), (READ_MODIFY_WRITE, _scale, "scale")):
        for streams in (1, 2, 4):
            for tasks in (False, True):
                label = f"cpu.{name} {streams} stream{'s' if streams > 1 else ''}{', tasks' if tasks else ''}"
                runs[label] = (kind, _split(kernel, kind, streams, tasks), BYTES_PER_ELEMENT[kind])
    return runs


def _whole(operation: Callable[[Tensor], Any], kind: str) -> Callable[[Tensor], int]:
    def run(buffer: Tensor) -> int:
        address("buffer", buffer, torch.float32, (buffer.numel(),))
        operation(buffer)
        return buffer.numel() * BYTES_PER_ELEMENT[kind]

    return run


def _split(kernel: Callable[..., Any], kind: str, streams: int, tasks: bool) -> Callable[[Tensor], int]:
    """A Numba kernel over equal parts of the buffer; the few floats behind the last part are not counted."""

    def run(buffer: Tensor) -> int:
        start = address("buffer", buffer, torch.float32, (buffer.numel(),))
        parts = max(numba.get_num_threads(), buffer.numel() // TASK_FLOATS if tasks else 0)
        floats = buffer.numel() // (parts * streams) // WIDTH * WIDTH
        # An argument, since the compiler would drop a multiplication by a constant 1.
        kernel(start, parts, streams, floats, FLOAT32 if kind == READ else ONE)
        return parts * streams * floats * BYTES_PER_ELEMENT[kind]

    return run


@compiled
def _read(start: int, parts: int, streams: int, floats: int, zero: float) -> float:
    result = zero
    for part in numba.prange(parts):
        memory = advance(pointer(start, FLOAT32), part * streams * floats)
        result += total(_sum(memory, streams, floats))
    return result


@compiled
def _scale(start: int, parts: int, streams: int, floats: int, factor: float) -> int:
    for part in numba.prange(parts):
        memory = advance(pointer(start, FLOAT32), part * streams * floats)
        if streams == 4:
            _scale_four(memory, floats, splat(factor))
        elif streams == 2:
            _scale_two(memory, floats, splat(factor))
        else:
            _scale_one(memory, floats, splat(factor))
    return parts


@inlined
def _sum(memory: Any, streams: int, floats: int) -> Any:
    """Lane sums of 1, 2 or 4 streams of ``floats`` that follow each other."""
    a, b = splat(FLOAT32), splat(FLOAT32)
    c, d = a, b
    if streams == 4:
        for i in range(0, floats, WIDTH):
            a, b = add(a, load(memory, i)), add(b, load(memory, floats + i))
            c, d = add(c, load(memory, 2 * floats + i)), add(d, load(memory, 3 * floats + i))
    elif streams == 2:
        for i in range(0, floats, WIDTH):
            a, b = add(a, load(memory, i)), add(b, load(memory, floats + i))
    else:
        for i in range(0, floats, WIDTH):
            a = add(a, load(memory, i))
    return add(add(a, b), add(c, d))


@inlined
def _scale_one(memory: Any, floats: int, factor: Any) -> None:
    for i in range(0, floats, WIDTH):
        store(memory, i, mul(load(memory, i), factor))


@inlined
def _scale_two(memory: Any, floats: int, factor: Any) -> None:
    for i in range(0, floats, WIDTH):
        store(memory, i, mul(load(memory, i), factor))
        store(memory, floats + i, mul(load(memory, floats + i), factor))


@inlined
def _scale_four(memory: Any, floats: int, factor: Any) -> None:
    for i in range(0, floats, WIDTH):
        a, b = load(memory, i), load(memory, floats + i)
        c, d = load(memory, 2 * floats + i), load(memory, 3 * floats + i)
        store(memory, i, mul(a, factor))
        store(memory, floats + i, mul(b, factor))
        store(memory, 2 * floats + i, mul(c, factor))
        store(memory, 3 * floats + i, mul(d, factor))
