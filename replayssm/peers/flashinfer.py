"""FlashInfer's Mamba-2 decode kernel (Apache-2.0, https://github.com/flashinfer-ai/flashinfer), written for 0.7.

``selective_state_update``: state ``[S,H,P,N]`` in place, slots with a padding value of one's choice, D required. Our dt
has bias and softplus in it already; dt, A and D are broadcast with stride 0 and float32. The kernel is built with nvcc
when it is first called for a shape, which takes minutes; heads of 64 rows only (80 does not build).

Its GDN decode takes gate projections in 16 bits only, so that our float32 gates cannot be given to it: unsupported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

from torch import Tensor

from replayssm.geometry import Geometry
from replayssm.peers import Peer, broadcast
from replayssm.recurrence import mamba2

PEER = Peer(
    name="FlashInfer",
    package="flashinfer",
    distributions=("flashinfer-python",),
    written_for="0.7",
    install="pip install flashinfer-python==0.7.2.post1, with nvcc of CUDA 12.8 or later",
)
MODULE = "flashinfer.mamba"
HEAD_DIM = 64


def unsupported(geometry: Geometry) -> str | None:
    """Why FlashInfer has no such step; None if it has."""
    if geometry.family == "gdn":
        return "FlashInfer's GDN decode takes gate projections in 16 bits only; the case's gates are float32"
    if geometry.family != "mamba2":
        return f"FlashInfer has no stored decode kernel for {geometry.family} that is adapted here"
    if geometry.head_dim != HEAD_DIM:
        return f"FlashInfer builds its kernel for head_dim=64 only; the case has head_dim={geometry.head_dim}"
    reason = PEER.absent()
    if reason is None:
        try:
            _module()
        except ImportError as error:
            return f"FlashInfer {PEER.version()} lacks the kernel: {error}; smallest install: {PEER.install}"
        if not shutil.which("nvcc") and importlib.util.find_spec("flashinfer_jit_cache") is None:
            return f"FlashInfer builds its kernel with nvcc, which is not on PATH; smallest install: {PEER.install}"
    return reason


def stored_step() -> Callable[[Tensor, Tensor, mamba2.Inputs, Tensor], None]:
    """A step like ours, ``step(out, state, inputs, slots)``. Raises ``ImportError`` if the kernel is absent."""
    kernel = _module().selective_state_update

    def step(out: Tensor, state: Tensor, inputs: mamba2.Inputs, slots: Tensor) -> None:
        dt, A, D, _ = broadcast(inputs, state.shape)
        arguments = (state, inputs.x, dt, A, inputs.B, inputs.C, D, inputs.z)
        kernel(*arguments, state_batch_indices=slots, pad_slot_id=-1, out=out)

    return step


@functools.cache
def _module() -> Any:
    return importlib.import_module(MODULE)
