"""Checks of what a kernel of a window is given, on the host, without looking at any value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm.cache import CacheLayer
from replayssm.kernels.triton.arguments import INPUTS, STATES, WIDE, check, check_parameter, check_place, check_slots
from replayssm.kernels.triton.gates import Gates
from replayssm.kernels.triton.verify_launch import MAX_WINDOW
from replayssm.recurrence.gdn import Inputs as DeltaInputs
from replayssm.recurrence.mamba2 import Inputs as Mamba2Inputs


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides sizes and a launch."""

    CHANNELS: bool
    """One decay a key channel: KDA."""
    GATED: bool
    """Gates from raw inputs; KDA's with a LOWER_BOUND or without."""
    LOWER_BOUND: float | None

    @classmethod
    def of(cls, family: str, gates: Gates | None) -> Form:
        bound = None if gates is None or gates.lower_bound is None else float(gates.lower_bound)
        return cls(family == "kda", gates is not None, bound)


def check_window_layer(layer: CacheLayer, family: str, tokens: int) -> None:
    """Raises ``ValueError`` for a layer of another family, without a window or with another than ``tokens``, or one
    that keeps raw inputs, from which these kernels do not fold.
    """
    if layer.family != family:
        raise ValueError(f"layer is of family {layer.family}; accepted: {family}")
    if layer.window is None:
        raise ValueError("verify_step needs a cache made with a window; this one decodes one token a step")
    if layer.window > MAX_WINDOW:
        raise ValueError(f"verify_step got a cache with window={layer.window}; accepted: at most {MAX_WINDOW}")
    if tokens != layer.window:
        raise ValueError(f"inputs hold {tokens} tokens a row; accepted: window={layer.window}")
    if "v" in layer.ring:
        raise ValueError("verify_step got a cache with raw_fold=True; accepted: False, a fold from d")


def check_counts(name: str, counts: Tensor | None, rows: int, device: torch.device) -> None:
    """``counts [B]`` of contiguous integers, or None."""
    if counts is None:
        return
    if counts.dtype not in (torch.int32, torch.int64) or tuple(counts.shape) != (rows,):
        raise ValueError(f"{name} has shape {list(counts.shape)} of {counts.dtype}; accepted: [{rows}] int32 or int64")
    if rows > 1 and counts.stride(0) != 1:
        raise ValueError(f"{name} has strides {list(counts.stride())}; accepted: contiguous")
    check_place({name: counts}, device)


def check_mamba2(
    out: Tensor, state: Tensor, inputs: Mamba2Inputs, slots: Tensor, gates: Gates | None
) -> dict[str, Any]:
    """Strides of all axes but the last, of dt ``[B,T,H]`` all, by name; ``state [...,H,P,N]``."""
    H, P, N = state.shape[-3:]
    rows, tokens, G = inputs.B.shape[:3]
    kind, wide = (inputs.x.dtype,), (rows, tokens)
    strides = {
        "state": check("state", state, tuple(state.shape), STATES),
        "out": check("out", out, (*wide, H, P), INPUTS),
        "x": check("x", inputs.x, (*wide, H, P), INPUTS),
        "B": check("B", inputs.B, (*wide, G, N), kind),
        "C": check("C", inputs.C, (*wide, G, N), kind),
        "dt": check("dt", inputs.dt, (*wide, H), INPUTS if gates else WIDE, scalars=True),
        "z": None if inputs.z is None else check("z", inputs.z, (*wide, H, P), kind),
    }
    if gates and gates.dt_bias is not None:
        check_parameter("gates.dt_bias", gates.dt_bias, (H,), state.device)
    if gates and (gates.A_log is not None or gates.lower_bound is not None):
        raise ValueError("gates.A_log and gates.lower_bound are for GDN and KDA; accepted: None, with A in the inputs")
    check("A", inputs.A, (H,), WIDE)
    if inputs.D is not None:
        check("D", inputs.D, (H,), WIDE)
    check_slots(slots, rows)
    check_place({"out": out, "slots": slots, **inputs._asdict()}, state.device)
    return strides


def check_delta(
    family: str, out: Tensor, state: Tensor, inputs: DeltaInputs, slots: Tensor, gates: Gates | None
) -> dict[str, Any]:
    """As `check_mamba2`, for GDN and KDA; of GDN's g all strides."""
    H, V, K = state.shape[-3:]
    rows, tokens, HK = inputs.k.shape[:3]
    kind, wide = (inputs.v.dtype,), (rows, tokens)
    decays = (*wide, H, K) if family == "kda" else (*wide, H)
    strides = {
        "state": check("state", state, tuple(state.shape), STATES),
        "out": check("out", out, (*wide, H, V), INPUTS),
        "q": check("q", inputs.q, (*wide, HK, K), kind),
        "k": check("k", inputs.k, (*wide, HK, K), kind),
        "v": check("v", inputs.v, (*wide, H, V), INPUTS),
        "g": check("g", inputs.g, decays, INPUTS if gates else WIDE, scalars=family == "gdn"),
        "beta": check("beta", inputs.beta, (*wide, H), INPUTS if gates else WIDE, scalars=True),
    }
    if gates:
        check_parameter("gates.dt_bias", gates.dt_bias, decays[2:], state.device)
        check_parameter("gates.A_log", gates.A_log, (H,), state.device)
        if family == "gdn" and gates.lower_bound is not None:
            raise ValueError(f"gates.lower_bound={gates.lower_bound} is for KDA; accepted for GDN: None")
    check_slots(slots, rows)
    check_place({"out": out, "slots": slots, **inputs._asdict()}, state.device)
    return strides
