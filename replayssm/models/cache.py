"""What a model remembers of its requests, by slot: keys and values, convolution states, and the recurrent states.

The recurrent states are behind `States`, which is the arm: where they are kept and which step function reads and
writes them. Everything else of the cache is the same for all arms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from replayssm.cache import Batch, ReplayCache
from replayssm.formats import Rounding
from replayssm.geometry import Geometry

StoredStep = Callable[..., None]
"""``step(out, state, inputs, slots, **more)``, as in `replayssm.kernels`."""
ReplayStep = Callable[..., None]
"""``step(out, layer, inputs, slots, **more)``."""


class States(Protocol):
    """The recurrent states of all state-space layers, and how one token moves them.

    ``number`` counts state-space layers from 0. ``slots [B]`` int64, -1 for padding, as in `replayssm.kernels`.
    """

    geometry: Geometry
    layers: int
    slots: int

    def load(self, slots: Sequence[int], states: Tensor) -> None:
        """Start requests from ``states [layers,B,H,P,N]``, as a prompt leaves them."""

    def fill(self, states: Tensor) -> None:
        """Start every slot from the same ``states [layers,1,H,P,N]``, without a copy of what all of them will hold."""

    def step(self, number: int, out: Tensor, inputs: Any, slots: Tensor, **more: Any) -> None:
        """One token a row of one layer, into ``out [B,H,P]``; ``more`` is for the back end's step."""

    def commit(self, slots: Tensor, accepted: Tensor | None = None) -> None:
        """End the token, after all layers; of a window, whose first ``accepted [B]`` tokens were right."""


class StoredStates:
    """Arm ``stored``: ``state [layers,S,H,P,N]``, read and written at every token by ``step``."""

    def __init__(
        self,
        geometry: Geometry,
        step: StoredStep,
        *,
        slots: int,
        layers: int,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.geometry, self.layers, self.slots = geometry, layers, slots
        shape = (layers, slots, geometry.heads, geometry.head_dim, geometry.state_dim)
        self.state = torch.full(shape, torch.nan, dtype=state_dtype, device=device)
        self._step = step

    def load(self, slots: Sequence[int], states: Tensor) -> None:
        self.state[:, list(slots)] = states.to(self.state)

    def fill(self, states: Tensor) -> None:
        self.state.copy_(states)

    def step(self, number: int, out: Tensor, inputs: Any, slots: Tensor, **more: Any) -> None:
        self._step(out, self.state[number], contiguous(inputs), slots, **more)

    def commit(self, slots: Tensor, accepted: Tensor | None = None) -> None:
        """Nothing: the step wrote the state."""


class ReplayStates:
    """Arm ``replay``: checkpoints, rings and cursors of a `ReplayCache`, all of whose slots it takes.

    ``commit(cache, slots)`` moves the cursors; the default asks the host for the slots, which a CUDA graph may not.
    With a ``seed`` checkpoints are rounded stochastically, a slot being a request.
    """

    def __init__(
        self,
        cache: ReplayCache,
        step: ReplayStep,
        commit: Callable[[ReplayCache, Tensor], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self.geometry, self.layers, self.slots = cache.geometry, cache.layers, cache.slots
        self.cache = cache
        self._handles = sorted(cache.allocate(cache.slots), key=lambda handle: handle.index)
        self._layers = [cache.layer(number) for number in range(cache.layers)]
        self._step, self._commit = step, commit
        self._rounding: list[dict[str, Rounding]] = [
            {} if seed is None else {"rounding": Rounding(seed, number)} for number in range(cache.layers)
        ]

    def load(self, slots: Sequence[int], states: Tensor) -> None:
        self.cache.load_state(self.cache.batch([self._handles[slot] for slot in slots]), states)

    def fill(self, states: Tensor) -> None:
        self.cache.fill(states)

    def step(self, number: int, out: Tensor, inputs: Any, slots: Tensor, **more: Any) -> None:
        self._step(out, self._layers[number], contiguous(inputs), slots, **self._rounding[number], **more)

    def commit(self, slots: Tensor, accepted: Tensor | None = None) -> None:
        if self._commit is not None:
            self._commit(self.cache, slots)
        else:
            self.cache.commit(self.batch(slots))

    def batch(self, slots: Tensor) -> Batch:
        """The rows ``slots [B]``, -1 for padding, as the cache takes them; asks the host."""
        return self.cache.batch([None if slot < 0 else self._handles[slot] for slot in slots.tolist()])


class ModelCache:
    """Keys, values and convolution states of S slots, beside their recurrent ``states``.

    ``keys, values [attention layers,S,KV heads,capacity,head_dim]``, zero where nothing was written; ``conv
    [state-space layers,S,K-1,channels]``, the last inputs of each convolution, oldest first; ``length [S]`` int64, the
    tokens of each slot. Made by `Decoder.new_cache`.

    With states of windows (`replayssm.models.windows`) ``window`` is their T, and ``conv [...,K-1+T,channels]`` are the
    inputs of the last window behind the K - 1 before it: those of the next window begin at ``accepted [S]``, the
    count of the last window's tokens that were, which is the states' own cursor. Keys and values beyond ``length`` are
    those of rejected tokens, and are written again before they are read.
    """

    def __init__(
        self,
        states: States,
        *,
        slots: int,
        capacity: int,
        attention: tuple[int, int, int],
        conv: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """``attention``: layers, KV heads, head_dim; ``conv``: channels, K. Raises ``ValueError`` on sizes below 1."""
        if slots < 1 or capacity < 1 or states.slots != slots:
            raise ValueError(
                f"slots={slots} and capacity={capacity} with states of {states.slots} slots are impossible; "
                "accepted: at least 1 each, and as many slots as the states have"
            )
        layers, heads, head_dim = attention
        self.states, self.slots, self.capacity = states, slots, capacity
        self.keys = torch.zeros(layers, slots, heads, capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.window: int | None = getattr(states, "window", None)
        self.accepted: Tensor | None = getattr(states, "accepted", None)
        inputs = conv[1] - 1 + (self.window or 0)
        self.conv = torch.zeros(states.layers, slots, inputs, conv[0], dtype=dtype, device=device)
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)
        self.all_slots = torch.arange(slots, device=device)

    @property
    def prompt_conv(self) -> Tensor:
        """``[state-space layers,S,K-1,channels]``, a view: where a prompt leaves its last inputs."""
        if self.window is None:
            return self.conv
        return self.conv[:, :, 1 : self.conv.shape[2] - self.window + 1]  # as behind a window of one accepted token


def contiguous(inputs: Any) -> Any:
    """A family's inputs as the CPU's kernels take them; a GPU's take the strided views of the projections."""
    if not inputs[0].is_cpu:
        return inputs
    return type(inputs)(*(None if tensor is None else tensor.contiguous() for tensor in inputs))
