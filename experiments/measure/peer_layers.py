"""What the replay layers of other projects have in common: a Mamba-2 ring of their own shape, trackers a row and not a
slot, which one small launch a pass moves, and a fold that rounds its products to the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.case import Case
from experiments.measure.layers import Layers, initial_state, phase_offsets
from replayssm.recurrence import mamba2


class PeerReplayLayers(Layers):
    """Copies of a replay layer as the peer lays them out; row r is slot r. Otherwise like `ReplayLayers`.

    A subclass fills ``_ring`` and ``_layers``, one a copy, and gives the peer's ``_step`` and, as ``_advance``, the
    launch that moves its trackers and counts into ``_flushes [B]``.
    """

    flushes_per_cycle = 1
    _ring: dict[str, Tensor]
    _layers: list[Any]
    _step: Callable[..., None]

    def __init__(self, case: Case, copies: int) -> None:
        super().__init__(case, copies)
        self.positions = case.interval_length
        self.state = initial_state(case, copies).clone()
        self._flushes = torch.zeros(case.batch_size, dtype=torch.int64, device=self.device)
        self._slots = torch.arange(case.batch_size, device=self.device)

    @property
    def flushes(self) -> Tensor:
        """``[copies,B]`` folds, counted once a pass for all copies from what the kernels get."""
        return self._flushes.expand(self.copies, -1)

    def as_rounded(self, inputs: mamba2.Inputs) -> mamba2.Inputs:
        """``inputs`` whose update dt x B has one factor rounded to their dtype, as in the kernel's fold."""
        dt = inputs.dt[..., None].double()
        update = (dt * inputs.x).to(inputs.x.dtype).double()
        return inputs._replace(x=update / dt)

    def run_pass(self, passes: int) -> None:
        self.passes += 1
        self._pass(passes, self._slots)

    def run_steps(self) -> None:
        """The steps of a pass with the rings as they are, and no commit: for timing alone."""
        self._steps(0, self._slots)

    def _fill_rings(self) -> None:
        """Passes before the first cycle, which put each row at its phase."""
        offsets = phase_offsets(self.case).to(self.device)
        for passes in range(-int(offsets.max()), 0):
            self._pass(passes, torch.where(offsets >= -passes, self._slots, -1))

    def _pass(self, passes: int, slots: Tensor) -> None:
        self._steps(passes, slots)
        self._advance(slots)

    def _steps(self, passes: int, slots: Tensor) -> None:
        out = self.out_of(passes)
        for copy, layer in enumerate(self._layers):
            self._step(out[copy], layer, self.tokens.at(passes, copy), slots)

    def _advance(self, slots: Tensor) -> None:
        raise NotImplementedError

    def _ring_of(self, copy: int) -> dict[str, Tensor]:
        return {name: tensor[copy] for name, tensor in self._ring.items()}
