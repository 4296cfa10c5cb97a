"""Independent work side by side on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Branches:
    """Call it with runs that do not depend on each other: on a GPU each is queued on a stream of its own, behind what
    was queued before; what is queued next waits for all of them. Captured in a graph they are its branches, which
    matters where kernels are too small to fill a GPU. On a CPU they run one after another.

    A run may read tensors that live until the call returns, and write into them; what it allocates it keeps to itself.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._streams: list[torch.cuda.Stream] = []

    def __call__(self, runs: Sequence[Callable[[], None]]) -> None:
        if self.device.type != "cuda" or len(runs) == 1:
            for run in runs:
                run()
            return
        self._streams += [torch.cuda.Stream(self.device) for _ in range(len(runs) - len(self._streams))]
        here = torch.cuda.current_stream(self.device)
        begun = here.record_event()
        for stream, run in zip(self._streams, runs, strict=False):
            stream.wait_event(begun)
            with torch.cuda.stream(stream):
                run()
        for stream, _ in zip(self._streams, runs, strict=False):
            here.wait_stream(stream)
