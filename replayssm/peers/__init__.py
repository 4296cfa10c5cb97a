"""Decode kernels of other projects, called as they are installed: nothing of theirs is copied here.

| module | project, written for | kernels |
| --- | --- | --- |
| ``vllm`` | vLLM 0.33 | stored Mamba-2, GDN, KDA; replay Mamba-2 |
| ``fla`` | flash-linear-attention 0.6 | stored GDN, KDA |
| ``mamba_ssm`` | mamba-ssm 2.3 | stored Mamba-2 |
| ``flashinfer`` | FlashInfer 0.7 | stored and replay Mamba-2 |

A stored step is called like ours: ``step(out, state, inputs, slots)``, see `replayssm.kernels`. What a peer wants in
another form is prepared once per object and kept with it (`Prepared`), so that a step consists of the peer's launches
and nothing else; the object must not change afterwards. Their kernels have no float64 and are not checked here: the
gates of the experiment do that.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from replayssm.peers.modules import folder
from replayssm.recurrence import mamba2

Form = TypeVar("Form")


@dataclass(frozen=True)
class Peer:
    """A project whose kernels are called: ``package`` is imported, ``distributions`` are what may have installed it."""

    name: str
    package: str
    distributions: tuple[str, ...]
    written_for: str
    install: str

    def version(self) -> str | None:
        """The installed version; None if absent, ``unknown`` if the package is there but was not installed by name."""
        if folder(self.package) is None:
            return None
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "unknown"

    def absent(self) -> str | None:
        """Why no kernel of the peer can be called; None if the package is there."""
        return None if self.version() else f"{self.name} is not installed; smallest install: {self.install}"

    def told(self) -> dict[str, Any]:
        """Name and version for a record, with a warning if the adapter was written for another one."""
        version = self.version()
        told = {"peer": self.name, "version": version, "written_for": self.written_for}
        if version is not None and version != self.written_for and not version.startswith(f"{self.written_for}."):
            told["warning"] = f"the adapter was written for {self.name} {self.written_for}, not {version}"
        return told


class Prepared(Generic[Form]):
    """What a peer needs of an object, made when it is first asked for and kept as long as this lives. Another object of
    the same contents, as a view made anew for each step, is another object; whole numbers are told by their value.
    """

    def __init__(self, make: Callable[..., Form]) -> None:
        self._make = make
        self._made: dict[tuple[int, ...], tuple[tuple[Any, ...], Form]] = {}

    def __call__(self, *objects: Any) -> Form:
        """Raises ``RuntimeError`` if it would have to be made while a CUDA graph is captured."""
        key = tuple(each if isinstance(each, int) else id(each) for each in objects)
        if key not in self._made:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("inputs that the peer has not seen in a CUDA graph; step once with them before")
            self._made[key] = objects, self._make(*objects)
        return self._made[key][1]


def broadcast(inputs: mamba2.Inputs, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dt ``[B,H,P]``, A ``[H,P,N]``, D ``[H,P]`` and a dt bias of zero ``[H,P]`` for Mamba-2 kernels that descend from
    the one of mamba-ssm, broadcast with stride 0: they see from it that a head has one dt and one A. D is 0 without D.
    """
    _, heads, head_dim, state_dim = shape
    dt = inputs.dt[..., None].expand(-1, heads, head_dim)
    A = inputs.A[:, None, None].expand(heads, head_dim, state_dim)
    zero = _zeros(heads, str(inputs.A.device))
    D = zero if inputs.D is None else inputs.D
    return dt, A, D[:, None].expand(heads, head_dim), zero[:, None].expand(heads, head_dim)


@functools.lru_cache(maxsize=64)
def _zeros(count: int, device: str) -> Tensor:
    return torch.zeros(count, dtype=torch.float32, device=device)


RAW_A_LOG = -2.0
"""A_log that goes with `raw_gates`. With 0 what the softplus of a kernel rounds would reach the decay undiminished."""


def raw_gates(g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Projections ``(a, b)`` from which a kernel that computes gates itself gets these: with A_log = `RAW_A_LOG` and no
    bias g = -exp(A_log) softplus(a), linear above 20, and beta = sigmoid(b). float32, shapes as given; the round trip
    costs up to 1e-7 in exp(g).
    """
    softplus = -g.double() * math.exp(-RAW_A_LOG)
    a = torch.where(softplus > 20, softplus, torch.log(torch.expm1(softplus)))
    return a.float(), torch.logit(beta.double()).float()


def null_slot_in_front(state: Tensor) -> Tensor:
    """A copy of ``state [...,S,H,P,N]`` with a slot's space in front of each S, for kernels that keep slot 0 for
    padding.
    """
    *layers, slots, H, P, N = state.shape
    space = torch.zeros(*layers, slots + 1, H, P, N, dtype=state.dtype, device=state.device)
    return space[..., 1:, :, :, :].copy_(state)


def with_null_slot(state: Tensor) -> Tensor:
    """``state [S,H,P,N]`` and the slot's space in front of it, ``[S+1,H,P,N]``, in the same memory. Raises
    ``ValueError`` where there can be none; whose space it is cannot be seen.
    """
    slot = state.stride(0)
    if state.storage_offset() < slot:
        raise ValueError("state starts where its memory does; accepted: space in front, as null_slot_in_front gives")
    return state.as_strided((len(state) + 1, *state.shape[1:]), state.stride(), state.storage_offset() - slot)


def shifted(slots: Tensor) -> Tensor:
    """Slots for a state with a null slot in front: int32, padding becomes 0."""
    return (slots + 1).to(torch.int32)
