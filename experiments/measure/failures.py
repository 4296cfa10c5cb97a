"""What becomes of an arm when something raises, and what the error is called in its record."""

from __future__ import annotations

from typing import Any

import torch

from experiments.case import Case
from experiments.measure import devices


class LostError(Exception):
    """The device answers no more; nothing can run in this process."""


def fail(arm: Any, case: Case, error: BaseException | None, when: str = "") -> None:
    """The arm's status after an error. Raises ``LostError`` if nothing else can run either."""
    arm.fail(status_of(error), f"{when}{told(error)}")
    refuse_lost(arm, case, error)


def refuse_lost(arm: Any, case: Case, error: BaseException | None) -> None:
    if not devices.of(case).works():
        raise LostError(f"the device was lost with {arm.name}: {told(error)}")


def status_of(error: BaseException | None) -> str:
    """PyTorch's CPU allocator raises a plain RuntimeError."""
    oom = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
    return "oom" if oom else "error"


def told(error: BaseException | None) -> str:
    """The first lines of CUDA's errors say what happened, the others how to find out more."""
    text = str(error).partition("\nCUDA kernel errors might")[0]
    return f"{type(error).__name__}: {text}"
