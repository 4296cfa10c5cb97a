"""FlashInfer's Mamba-2 decode kernels (Apache-2.0, https://github.com/flashinfer-ai/flashinfer), written for 0.7.

- ``selective_state_update``: state ``[S,H,P,N]`` in place, slots with a padding value of one's choice, D required. Our
  dt has bias and softplus in it already; dt, A and D are broadcast with stride 0 and float32.
- ``checkpointing_ssu``, its replay, with one token a step: a row whose ring holds the window's L tokens folds them, not
  its own token, and then appends that one; every step appends. So a flush comes one step later than here, with the same
  contents, and a ring holds 1 to L tokens, in L + 1 entries. Ring start and length of each slot move elsewhere. L is at
  most 16. It may run as one kernel or as two, as its own rule or tuner decides.

The kernels are built with nvcc when they are first called for a shape, which takes minutes; heads of 64 rows only (80
does not build). FlashInfer's GDN decode takes gate projections in 16 bits only, so that our float32 gates cannot be
given to it: unsupported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.geometry import Geometry
from replayssm.peers import Peer, broadcast
from replayssm.peers.modules import taken
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
MAX_WINDOW = 16


class ReplayLayer(NamedTuple):
    """What FlashInfer's replay keeps of a layer: ``state [S,H,P,N]``; ring ``x [S,H,L+1,P]``, ``B [S,G,L+1,N]``, ``dt
    [S,H,L+1]`` float32; ``start, held [S]`` int32 of each slot and ``scratch``, shared by all layers.
    """

    state: Tensor
    ring: dict[str, Tensor]
    start: Tensor
    held: Tensor
    scratch: tuple[Tensor, Tensor, Tensor]


def unsupported(geometry: Geometry, interval_length: int | None = None) -> str | None:
    """Why FlashInfer has no such stored step, or no such replay with ``interval_length``; None if it has."""
    if interval_length is not None and geometry.family != "mamba2":
        return f"FlashInfer's replay is adapted for mamba2 only; the case has {geometry.family}"
    if interval_length is not None and interval_length > MAX_WINDOW:
        return f"FlashInfer's replay holds at most {MAX_WINDOW} tokens; the case has interval_length={interval_length}"
    if geometry.family == "gdn":
        return "FlashInfer's GDN decode takes gate projections in 16 bits only; the case's gates are float32"
    if geometry.family != "mamba2":
        return f"FlashInfer has no stored decode kernel for {geometry.family} that is adapted here"
    if geometry.head_dim != HEAD_DIM:
        return f"FlashInfer builds its kernel for head_dim=64 only; the case has head_dim={geometry.head_dim}"
    reason = PEER.absent()
    if reason is None:
        try:
            taken(_module(), "selective_state_update" if interval_length is None else "checkpointing_ssu")
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


def scratch(rows: int, heads: int, interval_length: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """What the two-kernel form of the replay writes between its kernels, as FlashInfer allocates it."""
    made: tuple[Tensor, ...] = _module().allocate_checkpointing_ssu_scratch(
        rows, heads, 1, interval_length, dtype, device
    )
    return made


def replay_step(out: Tensor, layer: ReplayLayer, inputs: mamba2.Inputs, slots: Tensor) -> None:
    """One token a row by ``checkpointing_ssu``; ``slots [B]``, -1 for padding."""
    dt, A, D, _ = broadcast(inputs, layer.state.shape)
    x, dt, B, C, out = (tensor[:, None] for tensor in (inputs.x, dt, inputs.B, inputs.C, out))
    cb_scaled, cumAdt_vec, cb_old = layer.scratch
    _module().checkpointing_ssu(
        layer.state,
        layer.ring["x"],
        layer.ring["B"],
        layer.ring["dt"],
        layer.start,
        layer.held,
        x,
        dt,
        A,
        B,
        C,
        out,
        D=D,
        z=None if inputs.z is None else inputs.z[:, None],
        state_batch_indices=slots,
        pad_slot_id=-1,
        cb_scaled=cb_scaled,
        cumAdt_vec=cumAdt_vec,
        cb_old=cb_old,
    )


@functools.cache
def _module() -> Any:
    return importlib.import_module(MODULE)
