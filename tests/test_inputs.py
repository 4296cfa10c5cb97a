"""The factory of layer inputs: seeded, of the dtypes asked for, and in the ranges that models produce."""

from __future__ import annotations

import pytest
import torch

from experiments.inputs import DTYPES, make_inputs, make_state
from replayssm.geometry import FAMILIES, Geometry

GEOMETRIES = {family: Geometry(family, 6, 6 if family == "kda" else 3, 5, 8) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return GEOMETRIES[request.param]


def test_a_seed_fixes_every_number(geometry: Geometry) -> None:
    first, again, other = (make_inputs(geometry, 2, 3, dtype=torch.float32, seed=s) for s in (1, 1, 2))
    for a, b, c in zip(first, again, other, strict=True):
        for name, x, y, z in zip(a._fields, a, b, c, strict=True):
            if name != "z":
                assert torch.equal(x, y), name
                assert not torch.equal(x, z), name
    assert torch.equal(*(make_state(geometry, 2, dtype=torch.float32, seed=1) for _ in range(2)))
    assert not torch.equal(*(make_state(geometry, 2, dtype=torch.float32, seed=s) for s in (1, 2)))


def test_rows_and_tokens_differ(geometry: Geometry) -> None:
    first, second = make_inputs(geometry, 2, 2, dtype=torch.float64, seed=1)
    for name, x, y in zip(first._fields, first, second, strict=True):
        if name in ("A", "D"):
            assert x is y
        elif name != "z":
            assert not torch.equal(x, y), name
            assert not torch.equal(x[0], x[1]), name


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_and_shapes(geometry: Geometry, name: str) -> None:
    g, wide = geometry, torch.float64 if name == "fp64" else torch.float32
    (inputs,) = make_inputs(g, 2, 1, dtype=DTYPES[name], seed=1)
    if g.family == "mamba2":
        shapes = {"x": (2, 6, 5), "B": (2, 3, 8), "C": (2, 3, 8), "dt": (2, 6), "A": (6,), "D": (6,)}
        narrow = ("x", "B", "C")
    else:
        keys = (2, g.groups, 8)
        decay = (2, 6, 8) if g.family == "kda" else (2, 6)
        shapes = {"q": keys, "k": keys, "v": (2, 6, 5), "g": decay, "beta": (2, 6)}
        narrow = ("q", "k", "v")
    for field, shape in shapes.items():
        tensor = getattr(inputs, field)
        assert tuple(tensor.shape) == shape, field
        assert tensor.dtype == (DTYPES[name] if field in narrow else wide), field
    assert make_state(g, 2, dtype=wide, seed=1).shape == (2, 6, 5, 8)
    assert make_state(g, 2, dtype=wide, seed=1).dtype == wide


def test_ranges(geometry: Geometry) -> None:
    tokens = make_inputs(geometry, 8, 64, dtype=torch.float32, seed=1)
    if geometry.family == "mamba2":
        A, dt = tokens[0].A, torch.stack([t.dt for t in tokens])
        assert A.min() >= -16
        assert A.max() <= -1
        assert dt.min() > 0
        assert 1e-3 < dt.median() < 1e-1
        log_decay = A * dt
    else:
        log_decay, beta = (torch.stack([getattr(t, name) for t in tokens]) for name in ("g", "beta"))
        assert beta.min() > 0
        assert beta.max() < 1
        assert beta.std() > 0.1
    assert log_decay.max() <= 0
    decay = torch.exp(log_decay)
    assert decay.max() > 0.99, "some heads remember"
    assert decay.min() < 0.5, "some tokens make a head forget"
    for name in ("x", "B", "C") if geometry.family == "mamba2" else ("q", "k", "v"):
        values = torch.stack([getattr(t, name) for t in tokens])
        assert values.isfinite().all()
        assert values.min() >= -0.2785, "the least value of a SiLU"
        assert 0.3 < values.std() < 3
    state = make_state(geometry, 8, dtype=torch.float32, seed=1)
    assert 0.05 < state.std() < 0.2
    assert (state != 0).all()
