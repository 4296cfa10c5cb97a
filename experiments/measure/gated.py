"""Steps of our Triton kernels that compute their gates themselves, from raw inputs that give the case's gates.

Others' kernels that do so, vLLM's packed decode of GDN and KDA, get raw inputs made in the same way: g and beta come
from a and b with A_log and a bias of zero (`replayssm.peers.raw_gates`), dt of Mamba-2 from a raw dt and a bias of
zero. All of them are float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.measure.layers import Step
from replayssm.peers import RAW_A_LOG, Prepared, raw_gates


def gated(step: Any) -> Step:
    """``step``, a stored or replay step of ours with ``gates``, called like one without."""
    raw = Prepared(raw_inputs)

    def gated_step(out: Tensor, place: Any, inputs: Any, slots: Tensor) -> None:
        token, gates = raw(inputs)
        step(out, place, token, slots, gates=gates)

    return gated_step


def raw_inputs(inputs: Any) -> tuple[Any, Any]:
    """One token's inputs with raw gates, and the `replayssm.kernels.triton.gates.Gates` that give the ready ones."""
    # Imported here: on a machine without Triton the arm is unsupported, not an error.
    from replayssm.kernels.triton.gates import Gates

    if "dt" in inputs._fields:
        dt = inputs.dt.double()
        raw = torch.where(dt > 20, dt, torch.log(torch.expm1(dt))).float()
        return inputs._replace(dt=raw), Gates(torch.zeros_like(raw[0]))
    g, beta = raw_gates(inputs.g, inputs.beta)
    gates = Gates(torch.zeros_like(g[0]), torch.full_like(beta[0], RAW_A_LOG))
    return inputs._replace(g=g, beta=beta), gates
