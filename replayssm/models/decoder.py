"""What both models are: embeddings, blocks, norm, head; a prompt in chunks, and one token a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from replayssm.cache import ReplayCache
from replayssm.geometry import Geometry
from replayssm.models.cache import ModelCache, States
from replayssm.models.decoding import Decoding
from replayssm.models.options import ModelError
from replayssm.models.prompt import Prompt
from replayssm.models.windows import NoStates
from replayssm.precision import Precision

Follow = Callable[[Tensor, Prompt], None]
"""``follow(hidden [B,T,hidden], past)``: what a prompt's chunk gave, as `Prompt` has announced it."""


class Decoder(nn.Module):
    """Base of the models. A subclass sets the attributes below, and has ``hidden`` and ``scores``.

    Parameters are named as the checkpoint's tensors are, but for what `tensors` says, and need no gradient unless asked
    to have one. Those in ``float32`` by their last name stay float32 in every precision.
    """

    float32: ClassVar[frozenset[str]]
    skipped: ClassVar[tuple[str, ...]]
    """Beginnings of tensor names of a checkpoint that belong to other models: vision tower, draft head."""
    config: Any
    geometry: Geometry
    state_layers: int
    attention: tuple[int, int, int]
    """Layers, KV heads, head_dim."""
    conv: tuple[int, int]
    """Channels and K of a convolution."""
    mtp: nn.Module | None
    """The draft head, where it was loaded: see `replayssm.models.mtp`."""

    def __init__(self) -> None:
        super().__init__()
        self.mtp = None

    def hidden(self, tokens: Tensor, past: Any) -> Tensor:
        """Normed output ``[B,T,hidden]`` of the last block."""
        raise NotImplementedError

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits ``[...,vocabulary]`` of ``[...,hidden]``, in the model's dtype as the product gives them."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """`scores` in float32."""
        return self.scores(hidden).float()

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's name of every parameter or part of one; ``names`` says which spelling it uses."""
        yield from self.named_parameters()

    @property
    def embedding(self) -> Tensor:
        raise NotImplementedError

    def new_cache(self, states: States, *, slots: int, capacity: int) -> ModelCache:
        """A cache for ``slots`` requests of up to ``capacity`` tokens; ``states`` must fit this model's layers."""
        if (states.geometry, states.layers) != (self.geometry, self.state_layers):
            raise ValueError(
                f"states of {states.layers} layers of {states.geometry} do not fit this model; accepted: "
                f"{self.state_layers} layers of {self.geometry}"
            )
        dtype, device = self.embedding.dtype, self.embedding.device
        return ModelCache(
            states,
            slots=slots,
            capacity=capacity,
            attention=self.attention,
            conv=self.conv,
            dtype=dtype,
            device=device,
        )

    def new_head_cache(self, *, slots: int, capacity: int, window: int) -> ModelCache:
        """Keys and values of the draft head's layer."""
        states = NoStates(slots, window, self.embedding.device)
        sizes: dict[str, Any] = {"attention": (1, *self.attention[1:]), "conv": (1, 1)}
        dtype, device = self.embedding.dtype, self.embedding.device
        return ModelCache(states, slots=slots, capacity=capacity, dtype=dtype, device=device, **sizes)

    def new_replay_cache(
        self,
        *,
        slots: int,
        interval_length: int = 16,
        window: int | None = None,
        state_dtype: torch.dtype = torch.float32,
        precision: Precision | None = None,
    ) -> ReplayCache:
        """A `ReplayCache` for this model's state-space layers, its ring in the model's dtype unless ``precision`` says
        another, which takes the place of ``state_dtype``; with a ``window`` for so many tokens a step."""
        return ReplayCache(
            self.geometry,
            slots=slots,
            layers=self.state_layers,
            interval_length=interval_length,
            window=window,
            state_dtype=state_dtype,
            precision=precision,
            input_dtype=self.embedding.dtype,
            device=self.embedding.device,
        )

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        cache: ModelCache,
        slots: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        *,
        chunk: int = 512,
        every: bool = False,
        shared: int = 0,
        follow: Follow | None = None,
    ) -> Tensor:
        """Read prompts ``tokens [B,T]`` int64 into ``slots``, ``chunk`` tokens of all rows at a time.

        Row i is a new request of ``lengths[i]`` tokens, padded on the right; by default slots 0 to B - 1 and T tokens
        each. What the slots held is forgotten. Returns float32 logits behind each row's last token, ``[B,vocabulary]``,
        or behind every token, ``[B,T,vocabulary]``, where padding means nothing. The first ``shared`` tokens, fewer
        than any row has, are the same in all rows and are read once. Chunk and sharing change rounding only. ``follow``
        is shown every chunk, and nothing may be shared then. Raises `ModelError` on slots, lengths, tokens or a shared
        beginning that are impossible.
        """
        rows, total = tokens.shape
        slots = list(range(rows) if slots is None else slots)
        lengths = list([total] * rows if lengths is None else lengths)
        if len(slots) != rows or len(set(slots)) != rows or any(not 0 <= slot < cache.slots for slot in slots):
            raise ModelError(f"slots={slots} is impossible; accepted: {rows} different ones of 0 to {cache.slots - 1}")
        if len(lengths) != rows or any(not 1 <= length <= min(total, cache.capacity) for length in lengths):
            raise ModelError(
                f"lengths={lengths} is impossible; accepted: {rows} of 1 to {min(total, cache.capacity)} tokens"
            )
        if chunk < 1:
            raise ModelError(f"chunk={chunk} is impossible; accepted: at least 1")
        tokens = tokens[:, : max(lengths)].to(self.embedding.device)
        if ((tokens < 0) | (tokens >= len(self.embedding))).any():
            raise ModelError(f"a token lies outside the vocabulary; accepted: 0 to {len(self.embedding) - 1}")
        if (
            not 0 <= shared < (min(lengths) if follow is None else 1)
            or (tokens[:, :shared] != tokens[:1, :shared]).any()
        ):
            raise ModelError(f"shared={shared} is impossible; accepted: fewer tokens than a row has, equal in all rows")
        past, outputs = Prompt(cache, slots[:1], [shared]), []
        for first in range(0, shared, chunk):
            part = tokens[:1, first : min(first + chunk, shared)]
            past.begin(first, part.shape[1])
            hidden = self.hidden(part, past)
            if every:
                outputs.append(self.logits(hidden).expand(rows, -1, -1))
        past.fork(slots, lengths)
        last = past.lengths - 1
        final = torch.zeros(rows, self.embedding.shape[1], dtype=self.embedding.dtype, device=self.embedding.device)
        for first in range(shared, tokens.shape[1], chunk):
            part = tokens[:, first : first + chunk]
            past.begin(first, part.shape[1])
            hidden = self.hidden(part, past)
            if every:
                outputs.append(self.logits(hidden))
            if follow is not None:
                follow(hidden, past)
            here = ((last >= first) & (last < past.end)).nonzero()[:, 0]
            final[here] = hidden[here, last[here] - first]
        past.hand_over()
        return torch.cat(outputs, dim=1) if every else self.logits(final)

    @torch.no_grad()
    def decode(
        self, tokens: Tensor, cache: ModelCache, slots: Tensor | None = None, *, span: int | None = None
    ) -> Tensor:
        """One token a row, ``tokens [B]`` int64: float32 logits of the next, ``[B,vocabulary]``.

        Row i is slot i: ``slots [B]`` int64 holds i, or -1 where the row is padding (its slot is not touched, its
        logits mean nothing); by default all B live. ``span`` bounds the positions that attention looks at: more than
        every live row's length; by default the capacity. On a CPU raises `ModelError` where a live row is full or does
        not fit the span; on a GPU nothing is asked of the device, and the caller must know its rows' lengths.
        """
        slots = cache.all_slots[: len(tokens)] if slots is None else slots
        span = cache.capacity if span is None else span
        if not len(tokens) == len(slots) <= cache.slots or not 1 <= span <= cache.capacity:
            raise ModelError(
                f"{len(tokens)} tokens for {len(slots)} slots with span={span} are impossible; accepted: as many, "
                f"at most {cache.slots}, and a span of 1 to {cache.capacity}"
            )
        past = Decoding(cache, slots, span)
        if slots.is_cpu:
            if (past.live & (slots != past.rows)).any():
                raise ModelError(f"slots={slots.tolist()} is impossible; accepted: row i holds i, or -1 for padding")
            if (past.length >= span).any():
                raise ModelError(f"a slot holds {int(past.length.max())} tokens already; accepted: fewer than {span}")
        logits = self.logits(self.hidden(tokens[:, None], past))[:, 0]
        past.finish()
        return logits


def draw_steps(low: float, high: float, uniform: Tensor) -> Tensor:
    """Biases behind which softplus gives steps from ``low`` to ``high``, even in the logarithm."""
    steps = low * (high / low) ** uniform
    return steps + torch.log(-torch.expm1(-steps))


def section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A sub-mapping of a model's geometry, empty where it has none."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}
