"""``replay/vllm``: vLLM's ReplaySSM kernel for Mamba-2, two launches a step, with the ring and cursors it keeps.

vLLM computes cursors on the host and copies them; here one small launch a pass moves them, and counts the flushes,
which the kernel does not. The fold rounds B times its decay to the inputs' dtype, so with bfloat16 inputs a float32
checkpoint holds about 3 digits: the gates judge it against a float32 version that rounds so too (`as_rounded`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.case import Case
from experiments.inputs import DTYPES
from experiments.measure.peer_layers import PeerReplayLayers
from replayssm.peers import vllm
from replayssm.recurrence import mamba2
from replayssm.traffic import Ring, Traffic, replay

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    return vllm.unsupported(case.geometry.family, replay=True)


def prepare(case: Case, copies: int) -> VllmReplayLayers:
    return VllmReplayLayers(case, copies)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    told = {"backend": "triton", "chosen": "by vLLM", "fold": "inputs"} | vllm.PEER.told()
    if unsupported(case):
        return told
    own = {
        "kernel": vllm.REPLAY[1],
        "launch": vllm.replay_launch(case.geometry, case.interval_length),
        "ring": f"{case.interval_length} entries, never wraps",
        "cursor": "moved by one launch a pass of ours, which counts the flushes",
    }
    if case.precision.inputs != "fp32":
        own["budget"] = f"of a version that rounds each update to {case.precision.inputs}, as the kernel's fold does"
    return told | own


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle."""
    ring = Ring(inputs=case.precision.inputs)
    return replay(case.geometry, case.interval_length, case.precision.state, ring=ring, rows=case.batch_size).per_step()


class VllmReplayLayers(PeerReplayLayers):
    """vLLM's: rings of L entries that never wrap, a cursor and a flush flag a row."""

    _step = staticmethod(vllm.replay_step)

    def __init__(self, case: Case, copies: int) -> None:
        super().__init__(case, copies)
        g, rows, length = case.geometry, case.batch_size, case.interval_length
        inputs = DTYPES[case.precision.inputs]
        shapes = {
            "x": ((g.heads, length, g.head_dim), inputs),
            "B": ((g.groups, length, g.state_dim), inputs),
            "dt": ((g.heads, length), torch.float32),
        }
        self._ring = {name: self._filled((copies, rows, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        scratch = self._filled((rows, g.groups, length), torch.float32)
        self.cursor = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._flush = torch.full((rows,), int(length == 1), dtype=torch.int8, device=self.device)
        self._layers = [
            vllm.ReplayLayer(self.state[copy], self._ring_of(copy), scratch, self.cursor, self._flush)
            for copy in range(copies)
        ]
        self._fill_rings()

    def ring(self, copy: int, rows: Tensor) -> mamba2.Ring:
        """The rings of a copy's ``rows`` in time order, free entries included."""
        return mamba2.Ring(**{name: tensor[rows] for name, tensor in self._ring_of(copy).items()})

    def place(self, position: int) -> None:
        """Let every ring hold ``position`` tokens, whatever they are: for timing alone."""
        self.cursor.fill_(position)
        self._flush.fill_(int(position == self.case.interval_length - 1))

    def _advance(self, slots: Tensor) -> None:
        # Imported here: on a machine without Triton the arm is unsupported, not an error.
        from replayssm.peers.cursor import advance

        advance(self.cursor, self._flush, self._flushes, slots, self.case.interval_length)

    def _filled(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)
