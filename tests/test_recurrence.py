"""The replay forms of each family against its plain recurrence, and that against its written formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequences import FLAVOURS, Sequence, geometries, make_sequence, relative_error
from torch import Tensor

from replayssm.geometry import Geometry
from replayssm.recurrence import FAMILIES, gdn, kda, mamba2

EXACT = 1e-12
"""Relative error by norm in float64."""
DELTA = ("gdn", "kda")
property_test = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


class Case:
    """A sequence, a ring length for every row (0 to L - 1 tokens), a window behind it, and the truth of all of it."""

    def __init__(self, draw: Any, family: str) -> None:
        interval_length = draw(st.integers(1, 64), label="L")
        rows = draw(st.integers(1, 3), label="rows")
        lengths = draw(st.lists(st.integers(0, interval_length - 1), min_size=rows, max_size=rows), label="lengths")
        self.window = draw(st.integers(1, 8), label="T")
        self.sequence = make_sequence(
            draw(geometries(family), label="geometry"),
            rows,
            max(lengths) + self.window,
            seed=draw(st.integers(0, 2**16), label="seed"),
            flavour=draw(st.sampled_from(FLAVOURS), label="flavour"),
            gate=draw(st.booleans(), label="gate"),
        )
        self.length, self.capacity = torch.tensor(lengths), max(1, interval_length - 1)
        self.outputs, self.states = self.sequence.run()
        self.d = self.sequence.corrected(self.states) if family != "mamba2" else None

    def of_row(self, tensor: Tensor, offset: int = 0) -> Tensor:
        """``[N,B,...] -> [B,...]``: each row's entry ``offset`` tokens behind its ring."""
        return tensor[self.length + offset, torch.arange(len(self.length))]

    def after_ring(self, tensor: Tensor) -> Tensor:
        """``[N,B,...] -> [B,T,...]``: each row's entries of the window behind its ring."""
        return torch.stack([self.of_row(tensor, t) for t in range(self.window)], dim=1)

    def ring(self, **options: Any) -> Any:
        return self.sequence.ring(self.length, self.capacity, self.d, **options)


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_read(family: str, data: st.DataObject) -> None:
    case = Case(data.draw, family)
    inputs = case.sequence.at(case.length)
    result = case.sequence.family.read(case.sequence.state, case.ring(), case.length, inputs)
    output, d = (result, None) if family == "mamba2" else result
    assert relative_error(output, case.of_row(case.outputs)) <= EXACT
    if d is not None:
        assert relative_error(d, case.of_row(case.d)) <= EXACT


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_fold(family: str, data: st.DataObject) -> None:
    case = Case(data.draw, family)
    rates = (case.sequence.inputs.A,) if family == "mamba2" else ()
    folded = case.sequence.family.fold(case.sequence.state, case.ring(), case.length, *rates)
    assert relative_error(folded, case.of_row(case.states)) <= EXACT


@pytest.mark.parametrize("family", DELTA)
@property_test
@given(data=st.data())
def test_fold_raw_needs_no_corrected_values(family: str, data: st.DataObject) -> None:
    case = Case(data.draw, family)
    ring = case.ring(raw=True)
    ring.d.fill_(torch.nan)
    folded = case.sequence.family.fold_raw(case.sequence.state, ring, case.length)
    assert relative_error(folded, case.of_row(case.states)) <= EXACT


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_verify(family: str, data: st.DataObject) -> None:
    case = Case(data.draw, family)
    inputs = case.sequence.window(case.length, case.window)
    result = case.sequence.family.verify(case.sequence.state, case.ring(), case.length, inputs)
    outputs, d = (result, None) if family == "mamba2" else result
    assert relative_error(outputs, case.after_ring(case.outputs)) <= EXACT
    if d is not None:
        assert relative_error(d, case.after_ring(case.d)) <= EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_of_a_token_ignores_what_follows_it(family: str) -> None:
    sequence = make_sequence(Geometry(family, 2, 2, 3, 4), 2, 9, seed=3)
    other = make_sequence(Geometry(family, 2, 2, 3, 4), 2, 9, seed=4)
    length = torch.tensor([2, 3])
    d = None if family == "mamba2" else sequence.corrected(sequence.run()[1])
    ring = sequence.ring(length, 5, d)
    inputs, replaced = sequence.window(length, 5), other.window(length, 5)
    for kept in range(1, 5):
        rejected = type(inputs)(
            *(
                t if t is None or name in ("A", "D") else torch.cat([t[:, :kept], r[:, kept:]], dim=1)
                for name, t, r in zip(inputs._fields, inputs, replaced, strict=True)
            )
        )
        full, cut = (sequence.family.verify(sequence.state, ring, length, i) for i in (inputs, rejected))
        for a, b in zip(*((r,) if family == "mamba2" else r for r in (full, cut)), strict=True):
            assert relative_error(b[:, :kept], a[:, :kept]) <= EXACT
            assert relative_error(b[:, kept:], a[:, kept:]) > EXACT


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_as_good_as_the_recurrence_in_float32(family: str, flavour: str) -> None:
    """Error against float64 at most twice that of `step` in float32 over the same tokens, by norm over the run."""
    share = 1 if family == "kda" else 2
    single = make_sequence(Geometry(family, 2 * share, 2, 16, 16), 3, 72, seed=11, flavour=flavour).to(torch.float32)
    (outputs, states), (honest_outputs, honest_states) = single.to(torch.float64).run(), single.run()
    read, d = _decode(single, 64)
    _within_twice(read, honest_outputs[:64], outputs[:64])

    module, ends = single.family, torch.tensor([1, 3, 7, 15, 31, 63])
    folded, folded_raw, verified = [], [], []
    for length in ends.tolist():
        lengths = torch.full((3,), length)
        ring = single.ring(lengths, 64, d, raw=family != "mamba2")
        result = module.verify(single.state, ring, lengths, single.window(lengths, 8))
        verified.append((result if family == "mamba2" else result[0]).transpose(0, 1))
        if family == "mamba2":
            folded.append(module.fold(single.state, ring, lengths, single.inputs.A))
        else:
            folded.append(module.fold(single.state, ring, lengths))
            folded_raw.append(module.fold_raw(single.state, ring, lengths))
    window = ends[:, None] + torch.arange(8)
    _within_twice(torch.stack(verified), honest_outputs[window], outputs[window])
    for states_at_ends in filter(None, (folded, folded_raw)):
        _within_twice(torch.stack(states_at_ends), honest_states[ends], states[ends])


def _decode(sequence: Sequence, tokens: int) -> tuple[Tensor, Tensor | None]:
    """Outputs ``[N,B,H,P]`` of reading token after token, each GDN or KDA read behind the d of those before it."""
    outputs, module = [], sequence.family
    d = None if sequence.geometry.family == "mamba2" else torch.full_like(sequence.inputs.v, torch.nan)
    for token in range(tokens):
        length = torch.full((len(sequence.state),), token)
        result = module.read(sequence.state, sequence.ring(length, tokens, d), length, sequence.at(token))
        if d is None:
            outputs.append(result)
        else:
            outputs.append(result[0])
            d[token] = result[1]
    return torch.stack(outputs), d


def _within_twice(actual: Tensor, honest: Tensor, truth: Tensor) -> None:
    error, honest_error = ((t.double() - truth).norm() for t in (actual, honest))
    assert error <= 2 * honest_error, f"error {error:.2e}, honest {honest_error:.2e} of {truth.norm():.2e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_arithmetic_runs_in_the_dtype_of_the_state(family: str) -> None:
    half = make_sequence(Geometry(family, 2, 2, 3, 4), 2, 4, seed=5, flavour="model").to(torch.bfloat16)
    module, state, length = half.family, half.state.float(), torch.tensor([1, 3])
    ring = half.ring(length, 3, None if family == "mamba2" else half.inputs.v)

    def widened(t: Any) -> Any:
        return type(t)(*(None if c is None else c.float() for c in t))

    for method, inputs in (("read", half.at(length)), ("verify", half.window(torch.tensor([0, 1]), 3))):
        narrow = getattr(module, method)(state, ring, length, inputs)
        wide = getattr(module, method)(state, widened(ring), length, widened(inputs))
        for a, b in zip(*((r,) if family == "mamba2" else r for r in (narrow, wide)), strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)
    for a, b in zip(module.step(state, half.at(0)), module.step(state, widened(half.at(0))), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_are_not_changed(family: str) -> None:
    sequence = make_sequence(Geometry(family, 2, 2, 3, 4), 2, 6, seed=6)
    length = torch.tensor([2, 4])
    d = None if family == "mamba2" else sequence.corrected(sequence.run()[1])
    ring = sequence.ring(length, 5, d, raw=family != "mamba2")
    before = [t.clone() for t in (sequence.state, *ring)]
    module, rates = sequence.family, [sequence.inputs.A] if family == "mamba2" else []
    module.step(sequence.state, sequence.at(0))
    module.read(sequence.state, ring, length, sequence.at(length))
    module.verify(sequence.state, ring, length, sequence.window(torch.tensor([0, 1]), 3))
    module.fold(sequence.state, ring, length, *rates)
    if family != "mamba2":
        module.fold_raw(sequence.state, ring, length)
    for old, new in zip(before, (sequence.state, *ring), strict=True):
        assert torch.equal(old.nan_to_num(7.5), new.nan_to_num(7.5))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ring_without_entries(family: str) -> None:
    sequence = make_sequence(Geometry(family, 2, 2, 3, 4), 2, 3, seed=7)
    outputs, states = sequence.run()
    d = None if family == "mamba2" else sequence.corrected(states)
    length = torch.zeros(2, dtype=torch.int64)
    ring = sequence.ring(length, 0, d)
    read = sequence.family.read(sequence.state, ring, length, sequence.at(0))
    verified = sequence.family.verify(sequence.state, ring, length, sequence.window(length, 3))
    assert relative_error(read if family == "mamba2" else read[0], outputs[0]) <= EXACT
    verified = verified if family == "mamba2" else verified[0]
    assert relative_error(verified, outputs.transpose(0, 1)) <= EXACT


@pytest.mark.parametrize("family", DELTA)
def test_fold_raw_refuses_a_ring_without_raw_inputs(family: str) -> None:
    sequence = make_sequence(Geometry(family, 2, 2, 3, 4), 1, 2, seed=8)
    ring = sequence.ring(torch.tensor([1]), 2, sequence.corrected(sequence.run()[1]))
    with pytest.raises(ValueError, match="needs a ring with v and beta"):
        sequence.family.fold_raw(sequence.state, ring, torch.tensor([1]))


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("family", FAMILIES)
def test_step_is_the_written_formula(family: str, flavour: str) -> None:
    """Number by number in numpy, head by head: shared groups, scale, epsilon and the order of the operations."""
    geometry = Geometry(family, *((3, 3) if family == "kda" else (6, 3)), 5, 4)
    sequence = make_sequence(geometry, 2, 5, seed=9, flavour=flavour)
    outputs, states = sequence.run()
    written = _mamba2_formula if family == "mamba2" else _delta_formula
    for row in range(2):
        for head in range(geometry.heads):
            state = sequence.state[row, head].numpy()
            for token in range(5):
                output, state = written(state, sequence.at(token), row, head, head // geometry.heads_per_group)
                assert np.allclose(outputs[token, row, head], output, rtol=1e-12, atol=1e-13)
                assert np.allclose(states[token + 1, row, head], state, rtol=1e-12, atol=1e-13)


def _mamba2_formula(state: np.ndarray, inputs: mamba2.Inputs, row: int, head: int, group: int) -> Any:
    x, z = inputs.x[row, head].numpy(), inputs.z[row, head].numpy()
    B, C = inputs.B[row, group].numpy(), inputs.C[row, group].numpy()
    dt, A, D = inputs.dt[row, head].item(), inputs.A[head].item(), inputs.D[head].item()
    state = math.exp(dt * A) * state + dt * np.outer(x, B)
    return (state @ C + D * x) * z / (1 + np.exp(-z)), state


def _delta_formula(state: np.ndarray, inputs: gdn.Inputs, row: int, head: int, group: int) -> Any:
    q, k, v = (t.numpy() for t in (inputs.q[row, group], inputs.k[row, group], inputs.v[row, head]))
    q = q / math.sqrt((q**2).sum() + 1e-6) / math.sqrt(len(q))
    k = k / math.sqrt((k**2).sum() + 1e-6)
    state = state * np.exp(inputs.g[row, head].numpy())
    state = state + np.outer(inputs.beta[row, head].item() * (v - state @ k), k)
    return state @ q, state


def test_discretize() -> None:
    raw = torch.tensor([[-9.0, 0.5, 3.0, 25.0]], dtype=torch.float64)
    bias = torch.tensor([1.0, -2.0, 0.0, 2.0], dtype=torch.float64)
    dt = mamba2.discretize(raw, bias)
    expected = [math.log1p(math.exp(x)) for x in (-8.0, -1.5, 3.0)] + [27.0]
    assert dt.dtype == torch.float64
    assert torch.allclose(dt, torch.tensor([expected], dtype=torch.float64), rtol=1e-15, atol=0)
    assert dt[0, 3] == 27.0, "linear above 20"
    assert mamba2.discretize(raw, bias, (0.01, 2.5)).tolist() == dt.clamp(0.01, 2.5).tolist()
    assert mamba2.discretize(raw.bfloat16(), bias.bfloat16()).dtype == torch.float32
    assert mamba2.discretize(raw.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("module", [gdn, kda])
def test_gates(module: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    channels = (3, 4) if module is kda else (3,)
    f, b = torch.randn(2, *channels, generator=generator).double(), torch.randn(2, 3, generator=generator).double()
    A_log, bias = torch.tensor([0.0, 1.0, 2.5]).double(), torch.randn(channels, generator=generator).double()
    f[0, 0] = 30.0
    g, beta = module.gates(f, b, A_log, bias)
    raw = (f + bias).numpy()
    rate = A_log.exp().numpy().reshape(3, *[1] * (len(channels) - 1))
    assert np.allclose(g, -rate * np.where(raw > 20, raw, np.log1p(np.exp(raw))), rtol=1e-14, atol=0)
    assert np.allclose(beta, 1 / (1 + np.exp(-b.numpy())), rtol=1e-14, atol=0)
    assert g.dtype == beta.dtype == torch.float64
    assert all(t.dtype == torch.float32 for t in module.gates(f.bfloat16(), b.bfloat16(), A_log, bias))
