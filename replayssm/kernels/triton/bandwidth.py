"""Plain kernels over one float32 buffer on a GPU: the fastest of each kind in a run says what its memory gives.

Several, since none is fastest on every card: PyTorch's own and Triton's with blocks of different size. Reads count
every byte once, updates in place and copies twice, once each way. A buffer of equal values keeps them, up to sign.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

READ, READ_MODIFY_WRITE, COPY = "read", "read_modify_write", "copy"
KINDS = (READ, READ_MODIFY_WRITE, COPY)
BYTES_PER_ELEMENT = {READ: 4, READ_MODIFY_WRITE: 8, COPY: 4}
"""A copy goes from one half of the buffer to the other, so that an element is read or written."""
BLOCKS = ((2048, 4), (4096, 4), (8192, 8))
"""Elements and warps of a program."""


def candidates() -> dict[str, tuple[str, Callable[[Tensor], int], int]]:
    """Kernels by name: kind, a call that runs the kernel over a contiguous float32 buffer ``[n]``, n even, and returns
    the bytes it moved, and the bytes it moves an element.
    """
    operations: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
        "torch.sum": (READ, torch.sum),
        "torch.amax": (READ, torch.amax),
        "torch.mul_": (READ_MODIFY_WRITE, lambda buffer: buffer.mul_(1.0)),
        "torch.neg_": (READ_MODIFY_WRITE, lambda buffer: buffer.neg_()),
        "torch.copy_": (COPY, lambda buffer: _halves(buffer)[1].copy_(_halves(buffer)[0])),
    }
    for block, warps in BLOCKS:
        cut = f"{block} a program, {warps} warps"
        operations[f"triton.sum {cut}"] = (READ, _run(_launch_sum, block, warps))
        operations[f"triton.scale {cut}"] = (READ_MODIFY_WRITE, _run(_launch_scale, block, warps))
        operations[f"triton.copy {cut}"] = (COPY, _run(_launch_copy, block, warps))
    return {name: (kind, _counted(run, kind), BYTES_PER_ELEMENT[kind]) for name, (kind, run) in operations.items()}


def read(buffer: Tensor, block: int, warps: int) -> Tensor:
    """Sums of consecutive blocks of ``buffer [n]``, ``[ceil(n / block)]``."""
    sums = torch.empty(triton.cdiv(buffer.numel(), block), dtype=torch.float32, device=buffer.device)
    _sum_kernel[(len(sums),)](sums, buffer, buffer.numel(), BLOCK=block, num_warps=warps)
    return sums


def scale(buffer: Tensor, factor: float, block: int, warps: int) -> None:
    """Multiply ``buffer [n]`` by ``factor``, in place."""
    size = buffer.numel()
    _scale_kernel[(triton.cdiv(size, block),)](buffer, size, factor, BLOCK=block, num_warps=warps)


def copy(target: Tensor, source: Tensor, block: int, warps: int) -> None:
    """Copy ``source [n]`` to ``target [n]``."""
    size = source.numel()
    _copy_kernel[(triton.cdiv(size, block),)](target, source, size, BLOCK=block, num_warps=warps)


def _launch_sum(buffer: Tensor, block: int, warps: int) -> None:
    read(buffer, block, warps)


def _launch_scale(buffer: Tensor, block: int, warps: int) -> None:
    scale(buffer, 1.0, block, warps)


def _launch_copy(buffer: Tensor, block: int, warps: int) -> None:
    source, target = _halves(buffer)
    copy(target, source, block, warps)


def _halves(buffer: Tensor) -> tuple[Tensor, Tensor]:
    half = buffer.numel() // 2
    return buffer[:half], buffer[half:]


def _run(launch: Callable[[Tensor, int, int], None], block: int, warps: int) -> Callable[[Tensor], None]:
    return lambda buffer: launch(buffer, block, warps)


def _counted(operation: Callable[[Tensor], Any], kind: str) -> Callable[[Tensor], int]:
    def run(buffer: Tensor) -> int:
        if buffer.dtype != torch.float32 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() % 2:
            raise ValueError(f"buffer is {buffer.dtype} {list(buffer.shape)}; accepted: contiguous float32 [n], n even")
        operation(buffer)
        return buffer.numel() * BYTES_PER_ELEMENT[kind]

    return run


@triton.jit
def _sum_kernel(sums, buffer, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + program, tl.sum(tl.load(buffer + at, mask=at < size, other=0.0), axis=0))


@triton.jit
def _scale_kernel(buffer, size, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(buffer + at, tl.load(buffer + at, mask=at < size) * factor, mask=at < size)


@triton.jit
def _copy_kernel(target, source, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)
