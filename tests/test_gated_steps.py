"""Steps that compute their gates themselves, against the same steps with ready-made ones: on a GPU, or interpreted.

The ready-made ones are those of the recurrences in float64, rounded to float32; `test_gates_triton` has the functions.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from experiments.inputs import make_inputs, make_state
from replayssm.cache import ReplayCache
from replayssm.geometry import Geometry
from replayssm.kernels.triton import gdn, kda, mamba2
from replayssm.kernels.triton.gates import Gates
from replayssm.kernels.triton.launch import Launch
from replayssm.recurrence import FAMILIES

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"
KERNELS: dict[str, Any] = {"mamba2": mamba2, "gdn": gdn, "kda": kda}
ROWS, LENGTH = 2, 3
ERROR = 2e-6
"""Relative, by norm: a gate's own error, a few units in the last place, over three steps."""
CASES = {
    "mamba2": ("mamba2", torch.float32, None),
    "mamba2 in bf16": ("mamba2", torch.bfloat16, None),
    "gdn": ("gdn", torch.float32, None),
    "gdn in bf16": ("gdn", torch.bfloat16, None),
    "kda": ("kda", torch.float32, None),
    "kda bounded, in bf16": ("kda", torch.bfloat16, -5.0),
}


class Layer:
    """Tokens with raw gate inputs of ``dtype``, beside them ready-made ones."""

    def __init__(self, family: str, dtype: torch.dtype, bound: float | None) -> None:
        self.geometry = Geometry(family, 2, 2 if family == "kda" else 1, 20, 24)
        g = self.geometry
        generator = torch.Generator().manual_seed(3)
        channels = (g.heads, g.state_dim) if family == "kda" else (g.heads,)
        bias = (math.log(1e-2) + 3 * torch.rand(channels, generator=generator)).to(dtype)
        A_log = torch.log(1 + 15 * torch.rand(g.heads, generator=generator)).to(dtype)
        self.gates = Gates(bias.to(DEVICE), None if family == "mamba2" else A_log.to(DEVICE), bound)
        self.ready = make_inputs(g, ROWS, LENGTH, dtype=torch.float32, seed=1)
        self.raw = []
        for i, token in enumerate(self.ready):
            first = torch.randn(ROWS, *channels, generator=generator).to(dtype)
            second = torch.randn(ROWS, g.heads, generator=generator).to(dtype)
            if family == "mamba2":
                made = {"dt": mamba2_gates(first.double(), bias.double())}
                raw = {"dt": first}
            else:
                raw = {"g": first, "beta": second}
                bounded = {} if bound is None else {"lower_bound": bound}
                given = (first.double(), second.double(), A_log.double(), bias.double())
                made = dict(zip(("g", "beta"), FAMILIES[family].gates(*given, **bounded), strict=True))
            self.ready[i] = token._replace(**{name: tensor.float() for name, tensor in made.items()})
            self.raw.append(token._replace(**raw))

    def replay(self, tokens: list[Any], **gates: Any) -> tuple[Tensor, ReplayCache]:
        """All outputs, and the cache after a whole cycle, with the ring as the step before the flush left it."""
        cache = ReplayCache(self.geometry, slots=ROWS, interval_length=LENGTH, input_dtype=torch.float32, device=DEVICE)
        batch = cache.batch(cache.allocate(ROWS))
        cache.load_state(batch, make_state(self.geometry, ROWS, dtype=torch.float32, seed=2, device=DEVICE)[None])
        outputs = []
        for token in tokens:
            out = torch.empty(ROWS, self.geometry.heads, self.geometry.head_dim, device=DEVICE)
            kernels = KERNELS[self.geometry.family]
            kernels.replay_step(out, cache.layer(0), placed(token), cache.index(batch), **gates)
            cache.commit(batch)
            outputs.append(out)
        return torch.stack(outputs), cache


def mamba2_gates(dt: Tensor, bias: Tensor | None) -> Tensor:
    return FAMILIES["mamba2"].discretize(dt, bias)


def placed(token: Any) -> Any:
    return type(token)(*(None if t is None else t.to(DEVICE) for t in token))


def close(actual: Tensor, expected: Tensor) -> bool:
    error = (actual - expected).double().norm() / expected.double().norm()
    return bool(error <= ERROR)


@pytest.mark.parametrize("launch", [None, Launch(16, 2, 2, 8, ahead=True)], ids=["one launch", "two launches"])
@pytest.mark.parametrize("case", CASES)
def test_a_cycle_is_that_of_ready_made_gates(case: str, launch: Launch | None) -> None:
    layer = Layer(*CASES[case])
    outputs, cache = layer.replay(layer.raw, gates=layer.gates, launch=launch)
    expected, wanted = layer.replay(layer.ready)
    assert close(outputs, expected)
    assert close(cache.state, wanted.state)
    assert cache.flushes.tolist() == [[1] * ROWS]
    for name, ring in wanted.ring.items():
        assert close(cache.ring[name], ring), name


@pytest.mark.parametrize("case", CASES)
def test_a_stored_step_is_that_of_ready_made_gates(case: str) -> None:
    layer = Layer(*CASES[case])
    results = []
    for token, gates in ((layer.raw[0], layer.gates), (layer.ready[0], None)):
        state = make_state(layer.geometry, ROWS, dtype=torch.float32, seed=2, device=DEVICE)
        out = torch.empty(ROWS, layer.geometry.heads, layer.geometry.head_dim, device=DEVICE)
        slots = torch.arange(ROWS, device=DEVICE)
        KERNELS[layer.geometry.family].stored_step(out, state, placed(token), slots, gates=gates)
        results.append((out, state))
    assert all(close(found, expected) for found, expected in zip(*results, strict=True))


def test_a_bias_may_be_missing() -> None:
    layer = Layer("mamba2", torch.float32, None)
    ready = [
        r._replace(dt=mamba2_gates(t.dt.double(), None).float()) for r, t in zip(layer.ready, layer.raw, strict=True)
    ]
    assert close(layer.replay(layer.raw, gates=Gates(None))[0], layer.replay(ready)[0])


def test_bad_gates_are_refused() -> None:
    narrow = Layer("kda", torch.bfloat16, None)
    with pytest.raises(ValueError, match=r"^g has dtype torch.bfloat16; accepted: torch.float32$"):
        narrow.replay(narrow.raw)
    with pytest.raises(ValueError, match=r"^gates.A_log is None; accepted: contiguous \[2\] of torch.float32, "):
        narrow.replay(narrow.raw, gates=Gates(narrow.gates.dt_bias))
    with pytest.raises(ValueError, match=r"^gates.dt_bias is \[2\] of torch.bfloat16; accepted: contiguous \[2, 24\] "):
        narrow.replay(narrow.raw, gates=narrow.gates._replace(dt_bias=narrow.gates.A_log))
    scalar = Layer("gdn", torch.float32, None)
    with pytest.raises(ValueError, match=r"^gates.lower_bound=-5.0 is for KDA; accepted for GDN: None$"):
        scalar.replay(scalar.raw, gates=scalar.gates._replace(lower_bound=-5.0))
    steps = Layer("mamba2", torch.float32, None)
    with pytest.raises(ValueError, match=r"^gates.A_log and gates.lower_bound are for GDN and KDA; accepted: None, "):
        steps.replay(steps.raw, gates=steps.gates._replace(A_log=torch.zeros(2)))
