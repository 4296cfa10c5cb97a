"""Windows of T = 1 + drafts tokens a row: states that can take some of them back, and the past of such a step.

The tokens that were accepted are known only after all layers have seen the window. What they left behind them is kept
until then by one cursor: ``accepted [S]`` int64, the count of the last window's tokens that were. `VerifyStates` keep a
ring whose own cursor moves by it, `SnapshotStates` a state behind every token, of which the next window reads that one;
the convolutions read their last inputs from there on (see `ModelCache`), and the length of keys and values grows by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.cache import ReplayCache
from replayssm.geometry import Geometry
from replayssm.models.cache import ModelCache, ReplayStates, ReplayStep, contiguous
from replayssm.models.decoding import Decoding

SnapshotsStep = Callable[..., None]
"""``step(family, out, states, inputs, slots, accepted, **more)``, as in `replayssm.kernels.torch.snapshots`."""


class Windows:
    """What states of windows share: their ``window`` T and ``accepted [S]``. A prompt counts as one accepted token."""

    window: int
    accepted: Tensor

    def _begin(self, slots: Sequence[int] | slice) -> None:
        self.accepted[slots if isinstance(slots, slice) else list(slots)] = 1

    def _count(self, slots: Tensor, accepted: Tensor) -> None:
        mine = self.accepted[: len(slots)]
        mine.copy_(torch.where(slots >= 0, accepted, mine))


class VerifyStates(Windows, ReplayStates):
    """Arm ``verify``: checkpoints, rings and cursors of a `ReplayCache` with a window, all of whose slots it takes.

    ``commit(cache, slots, accepted)`` moves the cursors; the default asks the host for the slots.
    """

    def __init__(
        self, cache: ReplayCache, step: ReplayStep, commit: Callable[[ReplayCache, Tensor, Tensor], None] | None = None
    ) -> None:
        if cache.window is None:
            raise ValueError("VerifyStates got a cache with window=None; accepted: a cache made with a window")
        super().__init__(cache, step)
        self.window, self._commit_window = cache.window, commit
        self.accepted = torch.ones(cache.slots, dtype=torch.int64, device=cache.cursor.device)

    def load(self, slots: Sequence[int], states: Tensor) -> None:
        super().load(slots, states)
        self._begin(slots)

    def fill(self, states: Tensor) -> None:
        super().fill(states)
        self._begin(slice(None))

    def commit(self, slots: Tensor, accepted: Tensor | None = None) -> None:
        """``accepted [B]`` int64, 0 to T."""
        assert accepted is not None, "a window's commit says how many of its tokens were accepted"
        if self._commit_window is not None:
            self._commit_window(self.cache, slots, accepted)
        else:
            self.cache.commit(self.batch(slots), accepted)
        self._count(slots, accepted)


class SnapshotStates(Windows):
    """Arm ``snapshots``: ``states [layers,S,T,H,P,N]``, one behind every token of the last window."""

    def __init__(
        self,
        geometry: Geometry,
        step: SnapshotsStep,
        *,
        window: int,
        slots: int,
        layers: int,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.geometry, self.layers, self.slots, self.window = geometry, layers, slots, window
        shape = (layers, slots, window, geometry.heads, geometry.head_dim, geometry.state_dim)
        self.state = torch.full(shape, torch.nan, dtype=state_dtype, device=device)
        self.accepted = torch.ones(slots, dtype=torch.int64, device=device)
        self._step = step

    def load(self, slots: Sequence[int], states: Tensor) -> None:
        self.state[:, list(slots), 0] = states.to(self.state)
        self._begin(slots)

    def fill(self, states: Tensor) -> None:
        self.state[:, :, 0] = states
        self._begin(slice(None))

    def step(self, number: int, out: Tensor, inputs: Any, slots: Tensor, **more: Any) -> None:
        accepted = self.accepted[: len(slots)]
        self._step(self.geometry.family, out, self.state[number], contiguous(inputs), slots, accepted, **more)

    def commit(self, slots: Tensor, accepted: Tensor | None = None) -> None:
        """``accepted [B]`` int64, 1 to T: no state is kept from before a window."""
        assert accepted is not None, "a window's commit says how many of its tokens were accepted"
        self._count(slots, accepted)


class NoStates(Windows):
    """Of a model without state-space layers, such as a draft head, which is attention alone."""

    geometry = Geometry("gdn", 1, 1, 1, 1)
    layers = 0

    def __init__(self, slots: int, window: int, device: torch.device | str) -> None:
        self.slots, self.window = slots, window
        self.accepted = torch.ones(slots, dtype=torch.int64, device=device)

    def load(self, slots: Sequence[int], states: Tensor) -> None:
        self._begin(slots)

    def fill(self, states: Tensor) -> None:
        self._begin(slice(None))

    def step(self, number: int, out: Tensor, inputs: Any, slots: Tensor, **more: Any) -> None:
        raise NotImplementedError("a model without state-space layers has no state to step")

    def commit(self, slots: Tensor, accepted: Tensor | None = None) -> None:
        assert accepted is not None
        self._count(slots, accepted)


class WindowDecoding(Decoding):
    """As `Decoding` with ``tokens`` tokens a row, by default the cache's window, from each row's ``first [B]`` position
    on, by default its length. ``span`` is beyond the last token of every row.

    Nothing of a row is final before `finish`; a step that is not finished can be taken again.
    """

    def __init__(
        self, cache: ModelCache, slots: Tensor, span: int, first: Tensor | None = None, tokens: int | None = None
    ) -> None:
        super().__init__(cache, slots, span)
        if cache.window is None or cache.accepted is None:
            raise ValueError("a window needs a cache whose states take windows; this one's take one token a step")
        if first is not None:
            self.length = torch.where(self.live, first, 0)
        self.tokens = cache.window if tokens is None else tokens
        self.positions = self.length[:, None] + torch.arange(self.tokens, device=slots.device)
        self.accepted = cache.accepted[: len(slots)]

    def convolve(self, number: int, channels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Causal depthwise convolution and SiLU of ``channels [B,T,C]``; ``weight [C,1,K]``."""
        K = weight.shape[-1]
        memory = self.cache.conv[number, : len(self.slots)]
        last = self.accepted[:, None] + torch.arange(K - 1, device=self.slots.device)
        past = memory.gather(1, last[..., None].expand(-1, -1, channels.shape[2]))
        inputs = torch.cat([past, channels], dim=1)
        memory.copy_(torch.where(self.live[:, None, None], inputs, memory))
        out = (inputs.unfold(1, K, 1) * weight[:, 0]).sum(-1)
        return F.silu(out if bias is None else out + bias)

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention ``[B,T,Hq,D]`` of ``q`` to its slot's positions up to its own; ``k, v [B,T,Hkv,D]``."""
        rows, live = len(self.slots), self.live[:, None, None, None]
        keys, values = self.cache.keys[number, :rows], self.cache.values[number, :rows]
        places = self.rows[:, None], slice(None), self.positions
        for memory, new in ((keys, k), (values, v)):
            memory[places] = torch.where(live, new, memory[places])
        keys, values = keys[:, :, : self.span], values[:, :, : self.span]
        seen = (torch.arange(self.span, device=q.device) <= self.positions[..., None])[:, None]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2)

    def recur(self, number: int, inputs: Any, **gates: Tensor) -> Tensor:
        """Outputs ``[B,T,H,P]`` of the recurrence for a family's inputs with a T axis."""
        g = self.cache.states.geometry
        out = inputs[0].new_empty(len(self.slots), self.tokens, g.heads, g.head_dim)
        self.step(number, out, inputs, gates)
        return out

    def finish(self, accepted: Tensor | None = None) -> None:
        """End the window after all layers, the first ``accepted [B]`` int64 tokens of a row having been right."""
        assert accepted is not None, "a window's end says how many of its tokens were accepted"
        self.cache.states.commit(self.slots, accepted)
        self.cache.length[: len(self.slots)] += torch.where(self.live, accepted, 0)
