"""What an error of an arm is called in its record."""

from __future__ import annotations

import torch


class LostError(Exception):
    """The device answers no more; nothing can run in this process."""


def status_of(error: BaseException | None) -> str:
    """PyTorch's CPU allocator raises a plain RuntimeError."""
    oom = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
    return "oom" if oom else "error"


def told(error: BaseException | None) -> str:
    """The first lines of CUDA's errors say what happened, the others how to find out more."""
    text = str(error).partition("\nCUDA kernel errors might")[0]
    return f"{type(error).__name__}: {text}"
