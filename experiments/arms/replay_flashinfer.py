"""``replay/flashinfer``: FlashInfer's ``checkpointing_ssu`` for Mamba-2, one token a step, run as FlashInfer chooses.

Its flush comes one step later than in the other arms: it folds the L tokens before its own and appends that one. A row
of phase 0 therefore starts with a ring of L tokens: before the first cycle of empty ones, x = B = dt = 0, whose fold
changes nothing. One small launch a pass of ours moves the trackers, which callers keep, and counts the flushes.
Products are of the inputs' dtype: the gates judge it against a float32 version that rounds so too (`as_rounded`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.case import Case
from experiments.inputs import DTYPES
from experiments.measure.layers import phase_offsets
from experiments.measure.peer_layers import PeerReplayLayers
from replayssm.peers import flashinfer
from replayssm.recurrence import mamba2
from replayssm.traffic import Ring, Traffic, replay

DEVICES = ("cuda",)
STATE_FORMATS = ("fp32", "bf16", "fp16")


def unsupported(case: Case) -> str | None:
    """Why this arm cannot run the case; None if it can."""
    if case.precision.inputs == "fp32":
        return "FlashInfer's replay takes 16-bit inputs only; the case has precision.inputs=fp32"
    return flashinfer.unsupported(case.geometry, case.interval_length)


def prepare(case: Case, copies: int) -> FlashInferReplayLayers:
    return FlashInferReplayLayers(case, copies)


def describe(case: Case) -> dict[str, Any]:
    """Launch configuration and how it was chosen, for the record."""
    own = {
        "kernel": "checkpointing_ssu",
        "ring": f"{case.interval_length + 1} entries, circular, 1 to {case.interval_length} tokens",
        "flush": "folds the tokens before its own",
        "cursor": "moved by one launch a pass of ours, which counts the flushes",
        "budget": f"of a version that rounds each update to {case.precision.inputs}",
    }
    return {"backend": "cuda", "chosen": "by FlashInfer", "fold": "inputs"} | own | flashinfer.PEER.told()


def traffic(case: Case) -> Traffic:
    """Bytes and FLOPs of one layer step, mean over the cycle; the token that a flush appends is not counted."""
    ring = Ring(inputs=case.precision.inputs)
    return replay(case.geometry, case.interval_length, case.precision.state, ring=ring, rows=case.batch_size).per_step()


class FlashInferReplayLayers(PeerReplayLayers):
    """FlashInfer's: circular rings of L + 1 entries, their start and their number of tokens a row."""

    folds_current = False
    _step = staticmethod(flashinfer.replay_step)

    def __init__(self, case: Case, copies: int) -> None:
        super().__init__(case, copies)
        g, rows, length = case.geometry, case.batch_size, case.interval_length
        inputs = DTYPES[case.precision.inputs]
        shapes = {
            "x": ((g.heads, length + 1, g.head_dim), inputs),
            "B": ((g.groups, length + 1, g.state_dim), inputs),
            "dt": ((g.heads, length + 1), torch.float32),
        }
        self._ring = {
            name: torch.zeros((copies, rows, *shape), dtype=dtype, device=self.device)
            for name, (shape, dtype) in shapes.items()
        }
        self.cursor = torch.where(phase_offsets(case).to(self.device) == 0, length, 0).to(torch.int32)
        self._start = torch.zeros_like(self.cursor)
        scratch = flashinfer.scratch(rows, g.heads, length, inputs, self.device)
        self._layers = [
            flashinfer.ReplayLayer(self.state[copy], self._ring_of(copy), self._start, self.cursor, scratch)
            for copy in range(copies)
        ]
        self._fill_rings()

    def held(self, offsets: Tensor) -> Tensor:
        return torch.where(offsets == 0, self.case.interval_length if self.passes else 0, offsets)

    def flushing_pass(self, offsets: Tensor) -> Tensor:
        return (self.case.interval_length - offsets) % self.case.interval_length

    def ring(self, copy: int, rows: Tensor) -> mamba2.Ring:
        """The rings of a copy's ``rows`` in time order, free entries included."""
        entries = self.case.interval_length + 1
        order = (self._start[rows, None] + torch.arange(entries, device=self.device)) % entries
        found = {}
        for name, tensor in self._ring_of(copy).items():
            tensor = tensor[rows]
            index = order.view(len(rows), 1, entries, *[1] * (tensor.dim() - 3))
            found[name] = tensor.gather(2, index.expand_as(tensor))
        return mamba2.Ring(**found)

    def place(self, position: int) -> None:
        """Let every ring hold ``position`` tokens besides the one that it always holds: for timing alone."""
        self.cursor.fill_(position + 1)

    def _advance(self, slots: Tensor) -> None:
        # Imported here: on a machine without Triton the arm is unsupported, not an error.
        from replayssm.peers.cursor import advance_ring

        length = self.case.interval_length
        advance_ring(self.cursor, self._start, self._flushes, slots, length, length + 1)
