"""``oracle/triton``: `snapshots/triton` that is told beforehand which tokens will be accepted, in Triton.

It writes one state a window, behind the last token that will be accepted, in place. No engine can know that: the arm is
an ablation. What it gains on ``snapshots/triton`` is what T - 1 writes cost; what ``verify/triton`` gains on it is the
rest, a state written once an interval, and tensor cores. Runs only where it is asked for by name.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from experiments.arms import snapshots_triton
from experiments.case import WindowCase
from experiments.measure.window_layers import OracleLayers
from replayssm.traffic import Traffic

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: WindowCase) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return snapshots_triton.unsupported(case)


def prepare(case: WindowCase, copies: int) -> OracleLayers:
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.verify_snapshots import snapshots_step

    return OracleLayers(case, copies, functools.partial(snapshots_step, known=True))


def describe(case: WindowCase) -> dict[str, Any]:
    """Launch configuration, that of ``snapshots/triton``, and what the arm is told."""
    return snapshots_triton.describe(case) | {"told": "accepted tokens, before the window"}


def traffic(case: WindowCase) -> Traffic:
    """Bytes and FLOPs of one layer step: the state read once and written once."""
    all_written = snapshots_triton.traffic(case)
    state = all_written.state_bytes_read
    return replace(all_written, state_bytes_written=state, rmw_bytes=2 * state)
