"""`ReplayCache`: for every slot a checkpoint of each layer's state, a ring of recent inputs, and one cursor.

A slot is one request's place. Its cursor p counts the committed tokens in the ring and its origin says where the oldest
of them lies: ring token i is at physical index ``(origin + i) % capacity``. Cursor and origin are shared by all layers:
a layer's step reads them, and `ReplayCache.commit` moves them once, after the last layer.

Standard decoding, interval length L: the ring holds at most L - 1 tokens; with p = L - 1 the step folds ring and
current token into the checkpoint (a flush) and appends nothing. L = 1 flushes at every step: the stored recurrence.

Speculative decoding, window T = 1 + drafts: a step appends its T tokens behind the p committed ones and commits the n
that were accepted; rejecting the others is not counting them. A step that starts with p > L - T first folds the p
committed tokens, so a window always fits; where L < T every step does. The ring has max(L, T) + T entries, so that the
tokens being folded and those being appended never share one.

The checkpoint may be packed in a format with scales, and a second, packed copy may be kept for outputs alone: then the
checkpoint is the update copy, which only flushes read, and the other the read copy, which only they write.

Slots are handed out as `Slot`, which knows its cache and its tenancy; a `Batch` maps the rows of a step to slots, and
`ReplayCache.index` refuses one that holds a slot of another cache, or one released since. Free state and free ring
entries hold NaN, so that code which goes around the check shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm.formats import DTYPES
from replayssm.geometry import MAX_INTERVAL_LENGTH, Geometry
from replayssm.packed import Packed, empty, pack
from replayssm.precision import Precision

VECTORS = ("x", "B", "k", "v", "d")
"""Ring entries that a ring's format is for; dt, g, beta and 1/norm, a number or a decay each, are float32."""


class SlotError(ValueError):
    """A slot that is not this cache's, was released, or stands in a batch twice."""


@dataclass(frozen=True)
class Slot:
    """One tenancy of one slot; equal only to itself."""

    cache: int
    index: int
    tenancy: int


@dataclass
class Batch:
    """Rows of a step: ``slots[i]`` is row i's slot or None for padding; ``index [B]`` int64 on the device, -1 there."""

    slots: tuple[Slot | None, ...]
    index: Tensor
    cache: int
    checked: int = field(repr=False)
    """The cache's count of releases when the batch was last found valid."""


@dataclass(frozen=True)
class CacheLayer:
    """What one layer's kernel gets; S slots, R ring entries. ``cursor`` and ``origin`` are read only to it.

    ``state [S,H,P,N]``; ``flushes [S]`` int64, one added by the kernel for each row it folds; ``cursor, origin [S]``
    int32. ``ring`` by family: Mamba-2 ``x [S,H,R,P]``, ``B [S,G,R,N]``, ``dt [S,H,R]``; GDN ``k [S,HK,R,K]`` before its
    norm, ``k_rnorm [S,HK,R]``, ``d [S,HV,R,V]``, ``g [S,HV,R]``, with the raw fold also ``v [S,HV,R,V]`` and
    ``beta [S,HV,R]``; KDA as GDN with ``g [S,H,R,K]``, float32 or bfloat16. In a ring of ``ring_format`` fp8_e4m3 x, B,
    k, v and d are codes in uint8, each with a ``x_scales [S,H,R,blocks]`` beside it.

    ``packed`` is the checkpoint where its format has scales; ``state`` is then its codes. ``read_copy`` is the read
    copy where there is one, both as `Packed` of ``[S,H,P,N]``.
    """

    family: str
    interval_length: int
    window: int | None
    capacity: int
    state: Tensor
    ring: dict[str, Tensor]
    cursor: Tensor
    origin: Tensor
    flushes: Tensor
    packed: Packed | None = None
    read_copy: Packed | None = None
    ring_format: str | None = None
    workspace: dict[Any, Tensor] = field(default_factory=dict)
    """What a kernel leaves to the next within a step; of all layers."""


class ReplayCache:
    """Checkpoints, rings and cursors of ``slots`` requests over ``layers`` layers of one geometry.

    ``window`` None is standard decoding; a number is speculative decoding with that many tokens a step. ``input_dtype``
    is the ring's dtype for what arrives in activation precision (x, B, k, v); dt, g, 1/norm, beta and the corrected
    value d are float32 (float64 with a float64 state). ``raw_fold`` keeps v and beta for the fold from raw inputs.
    ``decay_dtype`` of KDA in standard decoding may be bfloat16: g is rounded to it in the ring, and nowhere else.
    ``precision`` takes the place of ``state_dtype`` and ``raw_fold``. Raises ``ValueError`` on impossible sizes.
    """

    _made = 0

    def __init__(
        self,
        geometry: Geometry,
        *,
        slots: int,
        layers: int = 1,
        interval_length: int = 16,
        window: int | None = None,
        state_dtype: torch.dtype = torch.float32,
        input_dtype: torch.dtype = torch.bfloat16,
        raw_fold: bool = False,
        decay_dtype: torch.dtype = torch.float32,
        precision: Precision | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("slots", slots), ("layers", layers), ("window", 1 if window is None else window)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value} is impossible; accepted: an integer of at least 1")
        if not isinstance(interval_length, int) or not 1 <= interval_length <= MAX_INTERVAL_LENGTH:
            raise ValueError(
                f"interval_length={interval_length} is impossible; accepted: an integer from 1 to {MAX_INTERVAL_LENGTH}"
            )
        if precision is not None:
            precision.refuse_for(geometry)
            state_dtype, raw_fold = DTYPES.get(precision.update, torch.float32), precision.fold == "raw"
        if raw_fold and geometry.family == "mamba2":
            raise ValueError("raw_fold=True is for GDN and KDA; a Mamba-2 ring holds raw inputs already")
        accepted = (torch.float32, torch.bfloat16) if geometry.family == "kda" else (torch.float32,)
        if decay_dtype not in accepted:
            told = ", ".join(map(str, accepted))
            raise ValueError(f"decay_dtype={decay_dtype} is impossible for {geometry.family}; accepted: {told}")
        if decay_dtype is not torch.float32 and window is not None:
            raise ValueError(f"decay_dtype={decay_dtype} is impossible with window={window}; accepted: torch.float32")
        self.geometry, self.layers, self.slots = geometry, layers, slots
        self.interval_length, self.window = interval_length, window
        self.capacity = max(1, interval_length - 1) if window is None else max(interval_length, window) + window
        g = geometry
        shape = (layers, slots, g.heads, g.head_dim, g.state_dim)
        self.packed = self.read_copy = None
        if precision is not None and precision.update not in DTYPES:
            self.packed = empty(shape, precision.update, device)
        if precision is not None and precision.read is not None:
            self.read_copy = empty(shape, precision.read, device)
        if self.packed is not None:
            self.state = self.packed.parts["codes"]
        else:
            self.state = torch.full(shape, torch.nan, dtype=state_dtype, device=device)
        self.ring_format = None if precision is None else precision.ring
        self._workspace: dict[Any, Tensor] = {}
        by_token = self.state.device.type != "cpu"
        self.ring = {
            name: _filled((layers, slots, *shape), dtype, device, by_token)
            for name, (shape, dtype) in _ring_layout(
                g, self.capacity, input_dtype, state_dtype, raw_fold, decay_dtype, self.ring_format
            ).items()
        }
        self.cursor = torch.zeros(slots, dtype=torch.int32, device=device)
        self.origin = torch.zeros(slots, dtype=torch.int32, device=device)
        self.flushes = torch.zeros(layers, slots, dtype=torch.int64, device=device)
        self._tenancy = [0] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._releases = 0
        ReplayCache._made += 1
        self._identity = ReplayCache._made

    def layer(self, number: int) -> CacheLayer:
        """Layer ``number``'s views; they share memory with the cache."""
        return CacheLayer(
            family=self.geometry.family,
            interval_length=self.interval_length,
            window=self.window,
            capacity=self.capacity,
            state=self.state[number],
            ring={name: tensor[number] for name, tensor in self.ring.items()},
            cursor=self.cursor,
            origin=self.origin,
            flushes=self.flushes[number],
            packed=None if self.packed is None else self.packed[number],
            read_copy=None if self.read_copy is None else self.read_copy[number],
            ring_format=self.ring_format,
            workspace=self._workspace,
        )

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one request: checkpoints, read copies and rings of all layers."""
        return sum(t.element_size() * t[:, 0].numel() for t in (*self._state_tensors(), *self.ring.values()))

    def allocate(self, count: int = 1) -> list[Slot]:
        """``count`` free slots, with a zero state and an empty ring. Raises ``SlotError`` if there are fewer."""
        if not 0 <= count <= len(self._free):
            raise SlotError(f"{count} slots wanted, {len(self._free)} of {self.slots} are free")
        taken = [self._free.pop() for _ in range(count)]
        handles = [Slot(self._identity, index, self._tenancy[index]) for index in taken]
        self.reset(self.batch(handles))
        return handles

    def release(self, slots: Sequence[Slot]) -> None:
        """Give slots back; every batch that holds one of them is refused from now on."""
        indices = self._indices(slots)
        for index in indices:
            self._tenancy[index] += 1
        self._free.extend(indices)
        self._releases += 1
        for copy in self._copies():
            copy.poison((slice(None), indices))
        for tensor in self.ring.values():
            _poison(tensor, indices)

    def batch(self, slots: Sequence[Slot | None]) -> Batch:
        """Map the rows of a step to slots; None is a padding row, which no kernel reads or writes."""
        self._indices([slot for slot in slots if slot is not None])
        index = [-1 if slot is None else slot.index for slot in slots]
        rows = torch.tensor(index, dtype=torch.int64, device=self.state.device)
        return Batch(tuple(slots), rows, self._identity, self._releases)

    def index(self, batch: Batch) -> Tensor:
        """The batch's ``[B]`` slot numbers for a kernel, -1 for padding. Raises ``SlotError`` on a stale or foreign
        slot; costs nothing while no slot of the cache has been released since the last check.
        """
        if batch.cache != self._identity or batch.checked != self._releases:
            self._indices([slot for slot in batch.slots if slot is not None])
            batch.checked = self._releases
        return batch.index

    def reset(self, batch: Batch) -> None:
        """Zero state and empty ring for the batch's slots, in all layers."""
        self._start(batch)
        live = self._live(batch)
        self._put(live, torch.zeros(1, 1, *self._shape, device=self.state.device))

    def load_state(self, batch: Batch, state: Tensor) -> None:
        """Start from a state ``[layers,B,H,P,N]``, as a prefill leaves it, and an empty ring."""
        wanted = (self.layers, len(batch.slots), *self._shape)
        if tuple(state.shape) != wanted:
            raise ValueError(f"state has shape {tuple(state.shape)}; accepted: {wanted}")
        self._start(batch)
        live = batch.index >= 0
        self._put(batch.index[live], state[:, live])

    def fill(self, state: Tensor) -> None:
        """Start every slot from one ``state [layers,1,H,P,N]``, allocated or not, with an empty ring."""
        self._put(slice(None), state)
        for tensor in self.ring.values():
            _poison(tensor, slice(None))
        self.cursor.zero_()
        self.origin.zero_()

    def flush_due(self, batch: Batch) -> Tensor:
        """``[B]`` bool: the next step folds the row's ring into its checkpoint. False for padding."""
        index = self.index(batch)
        return self._due(self.cursor[index.clamp_min(0)]) & (index >= 0)

    def commit(self, batch: Batch, accepted: int | Tensor = 1) -> None:
        """Move the cursors after a step of all layers; the only place where they move.

        ``accepted`` is the number of the step's tokens that count, one for all rows or ``[B]``: 1 in standard decoding,
        0 to T after a window. The others are thereby rejected. Raises ``ValueError`` outside that range.
        """
        index = self.index(batch)
        live = self._live(batch)
        if isinstance(accepted, int):
            accepted = torch.full_like(index, accepted)
        if not isinstance(accepted, Tensor) or accepted.dtype.is_floating_point:
            raise ValueError(f"accepted={accepted!r} is impossible; accepted: an integer or [{len(index)}] integers")
        if accepted.shape != index.shape:
            raise ValueError(f"accepted has shape {tuple(accepted.shape)}; accepted: one number or [{len(index)}]")
        count = accepted.to(self.cursor.device)[index >= 0].to(torch.int32)
        lowest, highest = (1, 1) if self.window is None else (0, self.window)
        if ((count < lowest) | (count > highest)).any():
            raise ValueError(f"accepted={count.tolist()} is impossible; accepted: {lowest} to {highest} tokens a row")
        cursor = self.cursor[live]
        due = self._due(cursor)
        self.origin[live] = torch.where(due, (self.origin[live] + cursor) % self.capacity, self.origin[live])
        after_flush = torch.zeros_like(count) if self.window is None else count
        self.cursor[live] = torch.where(due, after_flush, cursor + count)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.geometry.heads, self.geometry.head_dim, self.geometry.state_dim

    def _put(self, slots: Tensor | slice, state: Tensor) -> None:
        """Both copies of some slots, from ``state [layers,B,H,P,N]``, rounded to nearest."""
        if self.packed is None:
            self.state[:, slots] = state.to(self.state)
        for copy in (self.packed, self.read_copy):
            if copy is not None:
                copy[:, slots] = pack(state.to(self.state.device, torch.float32), copy.format)

    def _copies(self) -> list[Packed]:
        """The checkpoint and, where there is one, the read copy."""
        plain = Packed("fp32", self.geometry.state_dim, {"codes": self.state})
        return [plain if self.packed is None else self.packed, *([] if self.read_copy is None else [self.read_copy])]

    def _state_tensors(self) -> list[Tensor]:
        return [part for copy in self._copies() for part in copy.parts.values()]

    def _due(self, cursor: Tensor) -> Tensor:
        if self.window is None:
            return cursor == self.interval_length - 1
        return (cursor > self.interval_length - self.window) | (self.interval_length < self.window)

    def _start(self, batch: Batch) -> None:
        self.index(batch)
        live = self._live(batch)
        self.cursor[live] = 0
        self.origin[live] = 0
        for tensor in self.ring.values():
            _poison(tensor, live)

    def _live(self, batch: Batch) -> Tensor:
        return batch.index[batch.index >= 0]

    def _indices(self, slots: Sequence[Slot]) -> list[int]:
        for slot in slots:
            if slot.cache != self._identity:
                raise SlotError(f"slot {slot.index} belongs to another cache")
            if self._tenancy[slot.index] != slot.tenancy:
                raise SlotError(f"slot {slot.index} was released; the batch is stale")
        indices = [slot.index for slot in slots]
        if len(set(indices)) != len(indices):
            raise SlotError("a slot stands in the batch twice")
        return indices


def _poison(tensor: Tensor, slots: Any) -> None:
    """NaN in every entry of a ring's slots; 255 is E4M3's."""
    tensor[:, slots] = torch.nan if tensor.is_floating_point() else 255


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, by_token: bool) -> Tensor:
    """A ring ``[layers,S,H,R,...]`` of NaN. ``by_token``: in memory R lies before H, so that what a step appends for
    all heads is one run; a GPU's memory takes few long writes better than many short ones. A CPU's core walks along R.
    """
    if by_token:
        layers, slots, heads, capacity, *rest = shape
        made = torch.empty(layers, slots, capacity, heads, *rest, dtype=dtype, device=device).transpose(2, 3)
    else:
        made = torch.empty(shape, dtype=dtype, device=device)
    _poison(made, slice(None))
    return made


def _ring_layout(
    g: Geometry,
    capacity: int,
    inputs: torch.dtype,
    state: torch.dtype,
    raw_fold: bool,
    decay: torch.dtype,
    format: str | None,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape behind ``[layers, slots]`` and dtype of each ring tensor."""
    wide = torch.float64 if state == torch.float64 else torch.float32
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "x": ((g.heads, capacity, g.head_dim), inputs),
        "B": ((g.groups, capacity, g.state_dim), inputs),
        "dt": ((g.heads, capacity), wide),
    }
    if g.family == "mamba2":
        return _narrowed(layout, format)
    layout = {
        "k": ((g.groups, capacity, g.state_dim), inputs),
        "k_rnorm": ((g.groups, capacity), wide),
        "d": ((g.heads, capacity, g.head_dim), wide),
        "g": ((g.heads, capacity), wide),
    }
    if g.family == "kda":
        layout["g"] = ((g.heads, capacity, g.state_dim), wide if decay is torch.float32 else decay)
    if raw_fold:
        layout["v"] = ((g.heads, capacity, g.head_dim), inputs)
        layout["beta"] = ((g.heads, capacity), wide)
    return _narrowed(layout, format)


def _narrowed(
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]], format: str | None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """With x, B, k, v and d in ``format``, where it is not None."""
    vectors = {name: shape for name, (shape, _) in layout.items() if name in VECTORS}
    if format is None:
        return layout
    if format in DTYPES:
        return layout | {name: (shape, DTYPES[format]) for name, shape in vectors.items()}
    for name, shape in vectors.items():
        parts = empty(shape, format, "meta").parts
        layout = layout | {name: (tuple(parts["codes"].shape), parts["codes"].dtype)}
        layout[f"{name}_scales"] = (tuple(parts["scales"].shape), parts["scales"].dtype)
    return layout
