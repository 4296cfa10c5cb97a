"""Precision arms as rows of one batch that all stand at the same token: what comparing them over documents needs.

Every arm has states, rings and caches of its own. Arms of one interval length, ring format and fold make a cohort,
which reads, appends and folds in one go, so that what an arm more costs is hardly more than rounding its copies. At
which token a cohort flushes is known to the host, no ring is looked through by cursor, and the device is asked nothing:
a step can be captured in a CUDA graph, one for each token of `AlignedArms.period`.

The copies are stored packed, as the arms' formats say. What is read lies beside them unpacked, in float32: unpacking
once a flush gives the same numbers as unpacking at every step. Results are those of `replayssm.kernels.torch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from replayssm.cache import CacheLayer, ReplayCache
from replayssm.engine.branches import Branches
from replayssm.formats import random_words
from replayssm.geometry import Geometry
from replayssm.kernels.torch.replay import folded
from replayssm.kernels.torch.ring import as_ring, entries, refuse_other_dtypes
from replayssm.kernels.torch.stored import step
from replayssm.models.decoding import Decoding
from replayssm.packed import Packed, empty, pack, unpack
from replayssm.precision import Precision
from replayssm.recurrence import gdn, kda, mamba2

Arm = tuple[Precision, int]
"""A precision and its interval length."""


@dataclass
class Member:
    """An arm of a cohort: its rows within it, and its copies ``[layers,rows,H,P,N]``; ``update`` is None where float32
    is read as well, and the cohort's states are the copy."""

    precision: Precision
    rows: slice
    update: Packed | None
    read: Packed | None


@dataclass
class Cohort:
    """Arms whose rings are one: ``rows`` of the batch; ``cache.state`` is what they read, in float32."""

    interval_length: int
    rows: slice
    cache: ReplayCache
    members: list[Member]
    requests: Tensor
    """``[rows of an arm]`` int64, the row within its arm: arms draw the same random numbers."""
    layers: list[CacheLayer] = field(init=False)
    nothing: Tensor = field(init=False)
    side_by_side: Branches = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [self.cache.layer(number) for number in range(self.cache.layers)]
        self.nothing = torch.zeros(self.cache.slots, dtype=torch.int64, device=self.cache.state.device)
        self.side_by_side = Branches(self.cache.state.device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {"state": self.cache.state, "flushes": self.cache.flushes} | self.cache.ring
        for number, member in enumerate(self.members):
            for name, copy in (("update", member.update), ("read", member.read)):
                if copy is not None:
                    found |= {f"{number}.{name}.{part}": tensor for part, tensor in copy.parts.items()}
        return found


class AlignedArms:
    """The recurrent states of ``arms``, each of ``rows`` requests, from zero states and empty rings on.

    A `States` of as many slots as there are rows in all. Arms lie in the batch in an order of their own, cohort by
    cohort: `rows_of` says where. ``token`` counts the tokens so far on the host; whoever replays a graph sets it.
    Raises ``ValueError`` on a precision that the geometry does not have.
    """

    def __init__(
        self,
        geometry: Geometry,
        arms: Sequence[Arm],
        *,
        layers: int,
        rows: int,
        input_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.geometry, self.layers, self.slots = geometry, layers, rows * len(arms)
        self.arms, self.rows, self.seed, self.token = list(arms), rows, seed, 0
        self.cohorts: list[Cohort] = []
        self.side_by_side = Branches(device)
        self._member: dict[int, tuple[Cohort, Member]] = {}
        together: dict[tuple[Any, ...], list[int]] = {}
        for number, (precision, length) in enumerate(arms):
            precision.refuse_for(geometry)
            together.setdefault((length, precision.ring, precision.fold), []).append(number)
        first = 0
        for (length, ring, fold), numbers in together.items():
            count = rows * len(numbers)
            cache = ReplayCache(
                geometry,
                slots=count,
                layers=layers,
                interval_length=length,
                input_dtype=input_dtype,
                precision=Precision(ring=ring, fold=fold),
                device=device,
            )
            members = [self._new_member(arms[n][0], at * rows, device) for at, n in enumerate(numbers)]
            cohort = Cohort(length, slice(first, first + count), cache, members, torch.arange(rows, device=device))
            self.cohorts.append(cohort)
            self._member |= {n: (cohort, member) for n, member in zip(numbers, members, strict=True)}
            first += count
        self.reset()

    def _new_member(self, precision: Precision, first: int, device: torch.device | str) -> Member:
        g = self.geometry
        shape = (self.layers, self.rows, g.heads, g.head_dim, g.state_dim)
        read = None if precision.read is None else empty(shape, precision.read, device)
        shared = precision.update == "fp32" and read is None
        update = None if shared else empty(shape, precision.update, device)
        return Member(precision, slice(first, first + self.rows), update, read)

    @property
    def period(self) -> int:
        """Tokens after which steps repeat: every arm stands behind a flush at its multiples."""
        return math.lcm(*(length for _, length in self.arms))

    def rows_of(self, arm: int) -> slice:
        """Where the rows of an arm lie in the batch."""
        cohort, member = self._member[arm]
        first = cohort.rows.start + member.rows.start
        return slice(first, first + self.rows)

    def reset(self) -> None:
        """Zero states, empty rings, no flush counted."""
        self.token = 0
        for cohort in self.cohorts:
            cohort.cache.fill(torch.zeros(1, 1, *cohort.cache.state.shape[2:], device=cohort.cache.state.device))
            cohort.cache.flushes.zero_()
            for member in cohort.members:
                for copy in (member.update, member.read):
                    if copy is not None:
                        zeros = torch.zeros(1, 1, *cohort.cache.state.shape[2:], device=cohort.cache.state.device)
                        copy[:] = pack(zeros, copy.format)

    def step(self, number: int, out: Tensor, inputs: Any, slots: Tensor, **more: Any) -> None:
        """One token of every row of layer ``number``, into ``out [B,H,P]``; ``slots`` are all of them. Raises
        ``ValueError`` for inputs of another dtype than that of a ring which has no format of its own.
        """
        for cohort in self.cohorts:
            refuse_other_dtypes(cohort.layers[number], inputs)
        self.side_by_side([partial(self._step, cohort, number, out, inputs) for cohort in self.cohorts])

    def commit(self, slots: Tensor, accepted: Tensor | None = None) -> None:
        self.token += 1

    def state(self, arm: int) -> tuple[Tensor, Tensor]:
        """Update and read copy ``[layers,rows,H,P,N]`` of an arm in float32; of use where it stands behind a flush."""
        cohort, member = self._member[arm]
        read = cohort.cache.state[:, member.rows]
        return read if member.update is None else unpack(member.update), read

    def flushes(self, arm: int) -> Tensor:
        """``[layers,rows]`` int64, counted where they were written."""
        cohort, member = self._member[arm]
        return cohort.cache.flushes[:, member.rows]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that a step reads and writes, by name: what a checkpoint of a run must hold."""
        for number, cohort in enumerate(self.cohorts):
            for name, tensor in cohort.tensors.items():
                yield f"{number}.{name}", tensor

    def load(self, slots: Sequence[int], states: Tensor) -> None:
        raise NotImplementedError("aligned arms start from zero states and see every token; they take no prompt")

    def fill(self, states: Tensor) -> None:
        raise NotImplementedError("aligned arms start from zero states and see every token; they take no prompt")

    def _step(self, cohort: Cohort, number: int, out: Tensor, inputs: Any) -> None:
        part, held = inputs.rows(cohort.rows), self.token % cohort.interval_length
        flushing = held == cohort.interval_length - 1
        y = self._flush(cohort, number, part, held) if flushing else self._read(cohort, number, part, held)
        out[cohort.rows].copy_(y)

    def _read(self, cohort: Cohort, number: int, inputs: Any, held: int) -> Tensor:
        layer = cohort.layers[number]
        ring, length = self._ring(cohort, number, held)
        if layer.family == "mamba2":
            y, d = mamba2.read(layer.state, ring, length, inputs), None
        else:
            y, d = (gdn if layer.family == "gdn" else kda).read(layer.state, ring, length, inputs)
        for name, value in entries(layer, inputs, d).items():
            layer.ring[name][:, :, held].copy_(value)
        return y

    def _flush(self, cohort: Cohort, number: int, inputs: Any, held: int) -> Tensor:
        layer, flushes = cohort.layers[number], cohort.cache.flushes[number]
        parts = [
            layer.state[member.rows] if member.update is None else unpack(member.update[number])
            for member in cohort.members
        ]
        state = torch.cat(parts)
        if held:
            ring, length = self._ring(cohort, number, held)
            state = folded(layer, state, ring, length, inputs)
        y = step(state, inputs)
        words = None
        if any(member.precision.stochastic for member in cohort.members):
            counter: dict[str, Any] = {"request": cohort.requests, "layer": number, "flush": flushes[: self.rows]}
            words = random_words(state[: self.rows].shape, seed=self.seed, **counter)

        def write(member: Member) -> None:
            own = made = state[member.rows]
            if member.update is not None:
                rounded = pack(own, member.update.format, words if member.precision.stochastic else None)
                member.update[number][:] = rounded
                made = unpack(rounded)
            if member.read is not None:
                rounded = pack(own, member.read.format)
                member.read[number][:] = rounded
                made = unpack(rounded)
            layer.state[member.rows].copy_(made)

        cohort.side_by_side([partial(write, member) for member in cohort.members])
        flushes += 1
        return y

    def _ring(self, cohort: Cohort, number: int, held: int) -> tuple[Any, Tensor | None]:
        """The ``held`` tokens of a ring, all valid; of none the first place, which is not."""
        layer = cohort.layers[number]
        ring = as_ring(layer, {name: tensor[:, :, : max(held, 1)] for name, tensor in layer.ring.items()})
        return ring, None if held else cohort.nothing


def aligned_decoding(cache: Any, slots: Tensor, span: int) -> Decoding:
    """The past of one token a row of a cache whose states are `AlignedArms`, on a GPU with convolution and attention as
    kernels; attention there reads as many positions as there are."""
    if not slots.is_cuda:
        return Decoding(cache, slots, span)
    from replayssm.engine.fused import FusedDecoding

    class AlignedDecoding(FusedDecoding):
        takes_raw = False

        def step(self, number: int, out: Tensor, token: Any, gates: dict[str, Any]) -> None:
            self.cache.states.step(number, out, token, self.slots)

    return AlignedDecoding(cache, slots, span)
