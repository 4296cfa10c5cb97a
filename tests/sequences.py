"""Random token sequences for the tests of the mathematics, and the plain recurrence run over them.

Sequences come in the ranges that models give (`experiments.inputs`) or with their extremes mixed in: log decays from
-20 to -1e-6, beta of 0, 1 and up to 2, keys that repeat or are zero. A ring is cut out of a sequence with a length of
its own for every row and NaN in every free entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from experiments.inputs import make_inputs, make_state
from replayssm.geometry import Geometry
from replayssm.recurrence import FAMILIES, gdn, mamba2

FLAVOURS = ("model", "mixed", "strong decay", "weak decay", "beta two", "identical keys", "zero keys")
RING_AXIS = 2
"""Rings are ``[B, heads, J, ...]``; sequences are ``[N, B, heads, ...]``."""


@st.composite
def geometries(draw: st.DrawFn, family: str) -> Geometry:
    """Small layers: several groups, fewer groups than heads, odd and single-element dimensions."""
    groups = draw(st.integers(1, 3))
    share = 1 if family == "kda" else draw(st.integers(1, 3))
    head_dim, state_dim = draw(st.sampled_from((1, 2, 3, 5, 8))), draw(st.sampled_from((1, 2, 4, 7, 8)))
    return Geometry(family, groups * share, groups, head_dim, state_dim)


@dataclass(frozen=True)
class Sequence:
    """``inputs`` of N tokens with the tokens in front, ``[N,B,...]`` (A and D of Mamba-2 stay ``[H]``), and a start."""

    geometry: Geometry
    state: Tensor
    inputs: Any

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def family(self) -> Any:
        """The module of the family's recurrence."""
        return FAMILIES[self.geometry.family]

    def at(self, index: int | Tensor) -> Any:
        """One token a row: the same for all rows, or ``[B]`` one for each."""
        rows = torch.arange(len(self.state))
        return _each_token(self.inputs, lambda t: t[index] if isinstance(index, int) else t[index, rows])

    def window(self, first: Tensor, tokens: int) -> Any:
        """``tokens`` consecutive tokens of each row ``[B,T,...]``, from its own first one, ``first [B]``."""
        index = first[:, None] + torch.arange(tokens)
        return _each_token(self.inputs, lambda t: t[index, torch.arange(len(self.state))[:, None]])

    def to(self, dtype: torch.dtype) -> Sequence:
        inputs = type(self.inputs)(*(None if t is None else t.to(dtype) for t in self.inputs))
        return Sequence(self.geometry, self.state.to(dtype), inputs)

    def run(self) -> tuple[Tensor, Tensor]:
        """Plain recurrence: outputs ``[N,B,H,P]`` and states ``[N+1,B,H,P,N]``, the first being the start."""
        outputs, states = [], [self.state]
        for token in range(len(self)):
            output, state = self.family.step(states[-1], self.at(token))
            outputs.append(output)
            states.append(state)
        return torch.stack(outputs), torch.stack(states)

    def corrected(self, states: Tensor) -> Tensor:
        """GDN, KDA: beta (v - S' k) ``[N,B,HV,V]`` from the recurrence's own states ``[N+1,...]``."""
        _, k, v, g, beta = self.inputs
        k = (k * gdn.rnorm(k)[..., None]).repeat_interleave(v.shape[2] // k.shape[2], dim=2)
        decay = torch.exp(g if g.dim() == 4 else g[..., None])[..., None, :]
        return beta[..., None] * (v - (states[:-1] * decay * k[..., None, :]).sum(-1))

    def ring(self, length: Tensor, capacity: int, d: Tensor | None = None, raw: bool = False) -> Any:
        """The family's ring over the first ``length [B]`` tokens of each row; what is free holds NaN."""
        if self.geometry.family == "mamba2":
            entries = {"x": self.inputs.x, "B": self.inputs.B, "dt": self.inputs.dt}
        else:
            entries = {"k": self.inputs.k, "k_rnorm": gdn.rnorm(self.inputs.k), "d": d, "g": self.inputs.g}
            entries |= {"v": self.inputs.v, "beta": self.inputs.beta} if raw else {}
        free = torch.arange(capacity)[:, None] >= length
        rings = {}
        for name, entry in entries.items():
            start = torch.full((capacity, *entry.shape[1:]), torch.nan, dtype=entry.dtype)
            start[~free] = entry[:capacity][~free[: len(entry)]]
            rings[name] = start.movedim(0, RING_AXIS)
        return (mamba2.Ring if self.geometry.family == "mamba2" else gdn.Ring)(**rings)


def _each_token(inputs: Any, choose: Any) -> Any:
    names = zip(inputs._fields, inputs, strict=True)
    return type(inputs)(*(t if t is None or name in ("A", "D") else choose(t) for name, t in names))


def make_sequence(
    geometry: Geometry, rows: int, tokens: int, *, seed: int, flavour: str = "mixed", gate: bool = True
) -> Sequence:
    """A float64 sequence; ``flavour`` is one of `FLAVOURS`, ``gate`` gives Mamba-2 a z and keeps its D."""
    steps = make_inputs(geometry, rows, tokens, dtype=torch.float64, seed=seed)
    inputs = type(steps[0])(*(t[0] if n in ("A", "D") or t[0] is None else torch.stack(t) for n, t in _columns(steps)))
    generator = torch.Generator().manual_seed(seed + 1)
    if geometry.family == "mamba2":
        z = torch.randn(inputs.x.shape, generator=generator, dtype=torch.float64)
        inputs = inputs._replace(D=inputs.D if gate else None, z=z if gate else None)
    if flavour != "model":
        extreme = _extreme_mamba2 if geometry.family == "mamba2" else _extreme_delta
        inputs = extreme(inputs, flavour, generator)
    return Sequence(geometry, make_state(geometry, rows, dtype=torch.float64, seed=seed + 2), inputs)


def _columns(steps: list[Any]) -> Any:
    return zip(steps[0]._fields, zip(*steps, strict=True), strict=True)


def _extreme_mamba2(inputs: mamba2.Inputs, flavour: str, generator: torch.Generator) -> mamba2.Inputs:
    dt = _log_decays(inputs.dt, flavour, generator) / inputs.A
    return inputs._replace(dt=dt, B=_keys(inputs.B, flavour, generator))


def _extreme_delta(inputs: gdn.Inputs, flavour: str, generator: torch.Generator) -> gdn.Inputs:
    some = torch.rand(inputs.beta.shape, generator=generator, dtype=torch.float64)
    kind = torch.randint(4, inputs.beta.shape, generator=generator)
    beta = torch.where(kind == 3, 2 * some, kind.double())
    if flavour == "beta two":
        beta = torch.full_like(beta, 2.0)
    k = _keys(inputs.k, flavour, generator)
    # Asking for a stored key itself reads back its value, with nothing else to hide an error behind.
    same = torch.rand(k.shape[:-1], generator=generator)[..., None] < 0.3
    return inputs._replace(
        q=torch.where(same, k, inputs.q), k=k, g=_log_decays(inputs.g, flavour, generator), beta=beta
    )


def _log_decays(like: Tensor, flavour: str, generator: torch.Generator) -> Tensor:
    """From -20 to -1e-6, uniform in the logarithm, both ends often."""
    uniform = torch.rand(like.shape, generator=generator, dtype=torch.float64)
    if flavour == "strong decay":
        return -20.0 + 0.5 * uniform
    if flavour == "weak decay":
        return torch.full_like(uniform, -1e-6)
    kind = torch.randint(4, like.shape, generator=generator)
    spread = -torch.exp(math.log(1e-6) + uniform * math.log(2e7))
    return torch.where(kind == 0, -20.0, torch.where(kind == 1, -1e-6, spread))


def _keys(k: Tensor, flavour: str, generator: torch.Generator) -> Tensor:
    """Some tokens' keys are the first token's, some are zero; or all of them."""
    if flavour == "identical keys":
        return k[:1].expand_as(k).clone()
    if flavour == "zero keys":
        return torch.zeros_like(k)
    kind = torch.randint(5, k.shape[:-1], generator=generator)[..., None]
    return torch.where(kind == 0, 0.0, torch.where(kind == 1, k[:1], k))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error of a row (axis 0) relative to the norm of its reference; infinite where a NaN is.

    A reference that decayed to nothing is compared with the smallest normal number of ``actual``'s dtype.
    """
    difference = (actual.double() - expected.double()).flatten(1).norm(dim=1)
    scale = expected.double().flatten(1).norm(dim=1).clamp_min(torch.finfo(actual.dtype).tiny / 1e-12)
    return torch.nan_to_num(difference / scale, nan=math.inf, posinf=math.inf).max().item()
