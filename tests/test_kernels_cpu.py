"""The CPU kernels against the float64 recurrence: outputs, state, ring, flushes, and all memory they must not touch.

Budgets are twice the error of an honest version: the plain recurrence in float32 with one rounding of the output. Rows
start at different steps in permuted slots with rings that start anywhere, so that they flush at different steps; what
is padding, free or not yet written holds NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import pytest
import torch
from decoding import SENTINEL, corrected, same_bits
from sequences import relative_error
from torch import Tensor

from experiments.inputs import make_inputs, make_state
from replayssm.cache import CacheLayer, ReplayCache
from replayssm.geometry import Geometry
from replayssm.kernels.cpu import KERNELS, bandwidth, compilation, gdn, kda, lanes, mamba2
from replayssm.recurrence import FAMILIES

GEOMETRIES = {
    "mamba2": (Geometry("mamba2", 4, 2, 80, 128), Geometry("mamba2", 6, 3, 13, 19)),
    "gdn": (Geometry("gdn", 4, 2, 80, 128), Geometry("gdn", 6, 2, 5, 35)),
    "kda": (Geometry("kda", 2, 2, 80, 128), Geometry("kda", 3, 3, 7, 19)),
}
ROWS, PADDING = 4, 1
every_family = pytest.mark.parametrize("family", KERNELS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dataclass
class Errors:
    """Relative errors by norm, of a kernel and of the honest version, one a step."""

    kernel: list[float] = field(default_factory=list)
    honest: list[float] = field(default_factory=list)

    def add(self, kernel: Tensor, honest: Tensor, truth: Tensor) -> None:
        self.kernel.append(relative_error(kernel[None], truth[None]))
        self.honest.append(relative_error(honest[None], truth[None]))

    @property
    def within_budget(self) -> bool:
        return bool(self.kernel) and max(self.kernel) <= 2 * max(self.honest)


class Decoding:
    """Rows decoded by both kernels and by the recurrence in float64 and float32; ``states`` by arithmetic and slot."""

    def __init__(self, geometry: Geometry, interval_length: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.geometry, self.dtype, self.L = geometry, dtype, interval_length
        self.kernels, self.recurrence = KERNELS[geometry.family], FAMILIES[geometry.family]
        self.cache = ReplayCache(geometry, slots=ROWS + 2, interval_length=interval_length, input_dtype=dtype)
        slots = self.cache.allocate(ROWS + 2)
        self.slots = [slots[i] for i in (4, 0, 2, 5)]
        free = [slots[i] for i in (1, 3)]
        start = make_state(geometry, ROWS, dtype=torch.float32, seed=seed)
        self.cache.load_state(self.cache.batch(self.slots), start[None])
        self.cache.release([*free, self.slots[PADDING]])
        for number, slot in enumerate(self.slots):
            self.cache.origin[slot.index] = (5 * number + 2) % self.cache.capacity
        self.stored = self.cache.state[0].clone()
        self.exact, self.float32 = self.stored.double(), self.stored.clone()
        self.flushes = [0] * (ROWS + 2)
        self.errors = {name: Errors() for name in ("stored out", "replay out", "stored state", "replay state", "d")}

    def step(self, inputs: Any, live: list[int]) -> None:
        """One token of the rows ``live``; the others are padding, with NaN for inputs."""
        rows, layer = [row for row in range(ROWS) if row in live], self.cache.layer(0)
        batch = self.cache.batch([self.slots[row] if row in live else None for row in range(ROWS)])
        index, due = self.cache.index(batch), self.cache.flush_due(batch)
        inputs = inputs._replace(**{name: poisoned(getattr(inputs, name), rows) for name in per_row(inputs)})
        outs = [torch.full((ROWS, self.geometry.heads, self.geometry.head_dim), SENTINEL).to(self.dtype) for _ in "ab"]
        state, ring = layer.state.clone(), {name: tensor.clone() for name, tensor in layer.ring.items()}
        other = [slot for slot in range(ROWS + 2) if slot not in index.tolist()]
        untouched = self.stored[other].clone()

        self.kernels.stored_step(outs[0], self.stored, inputs, index)
        self.kernels.replay_step(outs[1], layer, inputs, index)

        assert same_bits(self.stored[other], untouched)
        assert all((out[[row for row in range(ROWS) if row not in rows]] == SENTINEL).all() for out in outs)
        self._compare(inputs, rows, index, outs)
        for row in rows:
            slot = int(index[row])
            if due[row]:
                self.flushes[slot] += 1
                self.errors["replay state"].add(layer.state[slot], self.float32[slot], self.exact[slot])
                state[slot] = layer.state[slot]
            else:
                self._check_appended(layer, ring, inputs, row, slot)
        assert same_bits(layer.state, state)
        assert all(same_bits(layer.ring[name], ring[name]) for name in ring)
        assert layer.flushes.tolist() == self.flushes
        self.cache.commit(batch)

    def _compare(self, inputs: Any, rows: list[int], index: Tensor, outs: list[Tensor]) -> None:
        """Outputs and stored state; moves the recurrences one token forward."""
        token = inputs._replace(**{name: getattr(inputs, name)[rows] for name in per_row(inputs)})
        self.before = self.exact.clone(), self.float32.clone()
        truth, self.exact[index[rows]] = self.recurrence.step(self.exact[index[rows]], token)
        honest, self.float32[index[rows]] = self.recurrence.step(self.float32[index[rows]], token)
        for name, out in zip(("stored out", "replay out"), outs, strict=True):
            self.errors[name].add(out[rows], honest.to(self.dtype), truth)
        self.errors["stored state"].add(self.stored[index[rows]], self.float32[index[rows]], self.exact[index[rows]])

    def _check_appended(self, layer: CacheLayer, ring: dict[str, Tensor], inputs: Any, row: int, slot: int) -> None:
        """The token lies behind the committed ones; it is copied into ``ring``, what was there before the step."""
        place = int(layer.origin[slot] + layer.cursor[slot]) % layer.capacity
        for name, tensor in layer.ring.items():
            entry = tensor[slot, :, place]
            if name == "k_rnorm":
                expected = 1 / (inputs.k[row].double().square().sum(-1) + 1e-6).sqrt()
                torch.testing.assert_close(entry.double(), expected, rtol=1e-6, atol=0)
            elif name == "d":
                wide = [
                    corrected(type(inputs)(*(t.to(state.dtype) for t in inputs)), row, state[slot])
                    for state in self.before
                ]
                self.errors["d"].add(entry, wide[1], wide[0])
            else:
                assert torch.equal(entry, getattr(inputs, name)[row]), name
            ring[name][slot, :, place] = entry


def per_row(inputs: Any) -> list[str]:
    return [name for name in inputs._fields if name not in ("A", "D") and getattr(inputs, name) is not None]


def poisoned(tensor: Tensor, rows: list[int]) -> Tensor:
    """A copy with NaN in all other rows."""
    kept = torch.full_like(tensor, torch.nan)
    kept[rows] = tensor[rows]
    return kept


def with_options(inputs: Any, seed: int, D: bool, z: bool) -> Any:
    """Mamba-2 inputs with D and z or without."""
    gate = torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(inputs.x.dtype)
    return inputs._replace(D=inputs.D if D else None, z=gate if z else None)


@every_dtype
@pytest.mark.parametrize(
    ("odd_sizes", "interval_length"), [(False, 1), (False, 16), (True, 1), (True, 3), (True, 16), (True, 33)]
)
@every_family
def test_decoding(family: str, odd_sizes: bool, interval_length: int, dtype: torch.dtype) -> None:
    """Every live row flushes at least twice, each at a phase of its own."""
    geometry, steps = GEOMETRIES[family][odd_sizes], 2 * interval_length + 4
    run = Decoding(geometry, interval_length, dtype, seed=interval_length)
    for number, inputs in enumerate(make_inputs(geometry, ROWS, steps, dtype=dtype, seed=3)):
        if family == "mamba2":
            inputs = with_options(inputs, number, D=odd_sizes, z=not odd_sizes)
        run.step(inputs, [row for row in range(ROWS) if row != PADDING and number >= row])
    over = {name: errors for name, errors in run.errors.items() if errors.kernel and not errors.within_budget}
    assert not over
    assert min(run.flushes[slot.index] for row, slot in enumerate(run.slots) if row != PADDING) >= 2
    assert run.flushes.count(0) == 3
    assert bool(run.errors["d"].kernel) == (family != "mamba2" and interval_length > 1)


@pytest.mark.parametrize("D", [False, True])
@pytest.mark.parametrize("z", [False, True])
def test_skip_and_gate(D: bool, z: bool) -> None:
    geometry = GEOMETRIES["mamba2"][1]
    run = Decoding(geometry, 3, torch.float32)
    for number, inputs in enumerate(make_inputs(geometry, ROWS, 7, dtype=torch.float32, seed=4)):
        run.step(with_options(inputs, number, D, z), [0, 2, 3])
    assert all(errors.within_budget for name, errors in run.errors.items() if name != "d")


@pytest.mark.parametrize(
    "geometry",
    [Geometry("mamba2", 10, 2, 5, 19), Geometry("mamba2", 9, 1, 5, 128), Geometry("gdn", 10, 5, 5, 128)],
    ids=lambda g: f"{g.family} {g.heads}",
)
def test_many_heads_of_a_row_in_one_task(geometry: Geometry) -> None:
    """With one thread a task takes all heads of a row, several at a time, over group borders and with a rest."""
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        run = Decoding(geometry, 4, torch.bfloat16)
        for inputs in make_inputs(geometry, ROWS, 9, dtype=torch.bfloat16, seed=7):
            run.step(inputs, [0, 2, 3])
    finally:
        numba.set_num_threads(threads)
    assert all(errors.within_budget for errors in run.errors.values() if errors.kernel)


@pytest.mark.parametrize("fault", ["zero", "stale", "unrounded sign"])
def test_budget_refuses_wrong_outputs(fault: str) -> None:
    """The comparison itself: what a broken kernel would leave is far outside of the budget."""
    truth = torch.randn(2, 6, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wrong = {"zero": truth[1] * 0, "stale": truth[0], "unrounded sign": -truth[1]}[fault]
    errors = Errors()
    errors.add(wrong.bfloat16(), truth[1].bfloat16(), truth[1])
    assert not errors.within_budget


@every_family
def test_strong_decay_underflows_to_zero(family: str) -> None:
    """Decays far below float32's range, where exp of a positive sum would overflow, and no decay at all."""
    geometry = GEOMETRIES[family][1]
    run = Decoding(geometry, 16, torch.float32)
    decay = {"mamba2": "dt"}.get(family, "g")
    for number, inputs in enumerate(make_inputs(geometry, ROWS, 20, dtype=torch.float32, seed=5)):
        factor = 300.0 if number % 7 == 3 else 0.0 if number % 7 == 5 else 1.0
        run.step(inputs._replace(**{decay: getattr(inputs, decay) * factor}), [0, 2, 3])
    assert all(errors.within_budget for errors in run.errors.values() if errors.kernel)


@every_family
def test_nan_stays_in_its_row(family: str) -> None:
    geometry, kernels = GEOMETRIES[family][0], KERNELS[family]
    inputs = make_inputs(geometry, 3, 1, dtype=torch.bfloat16, seed=6)[0]
    inputs[0][1] = torch.nan
    out = torch.zeros(3, geometry.heads, geometry.head_dim, dtype=torch.bfloat16)
    kernels.stored_step(out, make_state(geometry, 3, dtype=torch.float32, seed=1), inputs, torch.arange(3))
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


@every_family
def test_threads_do_not_change_a_bit(family: str) -> None:
    geometry, kernels = GEOMETRIES[family][0], KERNELS[family]
    inputs = make_inputs(geometry, 3, 1, dtype=torch.bfloat16, seed=6)[0]
    results = []
    before = numba.get_num_threads()
    for threads in {1, before}:
        numba.set_num_threads(threads)
        state, out = make_state(geometry, 3, dtype=torch.float32, seed=1), torch.zeros(3, geometry.heads, 80).bfloat16()
        kernels.stored_step(out, state, inputs, torch.arange(3))
        results.append((out, state))
    numba.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_batch_of_padding_and_empty_batch() -> None:
    geometry = GEOMETRIES["gdn"][1]
    state = make_state(geometry, 2, dtype=torch.float32, seed=1)
    before = state.clone()
    for rows in (2, 0):
        inputs = make_inputs(geometry, rows, 1, dtype=torch.float32, seed=2)[0]
        out = torch.full((rows, geometry.heads, geometry.head_dim), SENTINEL)
        gdn.stored_step(out, state, inputs, torch.full((rows,), -1))
        assert (out == SENTINEL).all()
    assert torch.equal(state, before)


# Refusals ------------------------------------------------------------------------------------------------------------


def broken(what: str, out: Tensor, layer: Any, inputs: Any, slots: Tensor) -> tuple[Tensor, Any, Any, Tensor]:
    """A replay step's arguments with one thing wrong."""
    view = type("Layer", (), vars(layer) | {"ring": dict(layer.ring)})()
    if what == "state float64":
        view.state = layer.state.double()
    elif what == "state strided":
        view.state = layer.state.transpose(2, 3).contiguous().transpose(2, 3)
    elif what == "x strided":
        inputs = inputs._replace(x=inputs.x.transpose(1, 2).contiguous().transpose(1, 2))
    elif what == "inputs float16":
        inputs = inputs._replace(x=inputs.x.half())
    elif what == "B float32":
        inputs = inputs._replace(B=inputs.B.float())
    elif what == "dt bfloat16":
        inputs = inputs._replace(dt=inputs.dt.bfloat16())
    elif what == "C of another group count":
        inputs = inputs._replace(C=inputs.C[:, :1].contiguous())
    elif what == "ring of another dtype":
        view.ring["x"] = layer.ring["x"].float()
    elif what == "out float32":
        out = out.float()
    elif what == "slot too large":
        slots = torch.tensor([0, 2])
    elif what == "slot too small":
        slots = torch.tensor([-2, 0])
    elif what == "cursor outside the ring":
        view.cursor = torch.tensor([0, 3], dtype=torch.int32)
    elif what == "window":
        view.window = 4
    elif what == "raw fold":
        view.ring["v"] = layer.ring["x"]
    return out, view, inputs, slots


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("state float64", "state has dtype torch.float64; accepted: torch.float32"),
        ("state strided", "state has strides .* accepted: a contiguous tensor"),
        ("x strided", "x has strides"),
        ("inputs float16", "inputs have dtype torch.float16; accepted: torch.bfloat16, torch.float32"),
        ("B float32", "B has dtype torch.float32; accepted: torch.bfloat16"),
        ("dt bfloat16", "dt has dtype torch.bfloat16; accepted: torch.float32"),
        ("C of another group count", r"C has shape \[2, 1, 19\]; accepted: \[2, 3, 19\]"),
        ("ring of another dtype", "ring x has dtype torch.float32; accepted: torch.bfloat16"),
        ("out float32", "out has dtype torch.float32; accepted: torch.bfloat16"),
        ("slot too large", r"slots\[1\]=2 is impossible; accepted: -1 \(padding\) to 1"),
        ("slot too small", r"slots\[0\]=-2 is impossible"),
        ("cursor outside the ring", r"slots\[1\]=1 is impossible; .* cursor of 0 to interval_length - 1"),
        ("window", "window=4 is speculative decoding; accepted by the CPU kernels: None"),
        ("raw fold", "raw_fold=True keeps v and beta; accepted by the CPU kernels: False"),
    ],
)
def test_refuses(what: str, message: str) -> None:
    """One line, and nothing is changed."""
    geometry = GEOMETRIES["mamba2"][1]
    cache = ReplayCache(geometry, slots=2, interval_length=3)
    index = cache.index(cache.batch(cache.allocate(2)))
    inputs = make_inputs(geometry, 2, 1, dtype=torch.bfloat16, seed=2)[0]
    out = torch.full((2, geometry.heads, geometry.head_dim), SENTINEL).bfloat16()
    arguments = broken(what, out, cache.layer(0), inputs, index)
    with pytest.raises(ValueError, match=message) as raised:
        mamba2.replay_step(*arguments)
    assert "\n" not in str(raised.value)
    assert (arguments[0] == SENTINEL).all()
    assert (cache.state == 0).all()
    assert all(ring.isnan().all() for ring in cache.ring.values())


def test_refuses_decays_in_bfloat16() -> None:
    geometry = GEOMETRIES["kda"][0]
    cache = ReplayCache(geometry, slots=1, interval_length=3, decay_dtype=torch.bfloat16)
    index = cache.index(cache.batch(cache.allocate()))
    inputs = make_inputs(geometry, 1, 1, dtype=torch.bfloat16, seed=2)
    out = torch.full((1, geometry.heads, geometry.head_dim), SENTINEL).bfloat16()
    with pytest.raises(ValueError, match=r"^ring g has dtype torch.bfloat16; accepted: torch.float32$"):
        kda.replay_step(out, cache.layer(0), inputs[0], index)
    assert (out == SENTINEL).all()


# Lanes, cache of machine code, bandwidth -----------------------------------------------------------------------------


@numba.njit(error_model="numpy", fastmath=compilation.FASTMATH)
def exp_of(target: int, source: int, count: int) -> None:
    for i in range(0, count, lanes.WIDTH):
        x = lanes.load_input(source, i, count - i, 0)
        lanes.store_input(target, i, count - i, lanes.exp(x), 0)


@numba.njit(error_model="numpy", fastmath=compilation.FASTMATH)
def narrow(target: int, source: int, count: int) -> None:
    for i in range(0, count, lanes.WIDTH):
        lanes.store_input(target, i, count - i, lanes.load_input(source, i, count - i, 0), 1)


def test_exp() -> None:
    """Within two units in the last place, and exact where it matters: at 0, at -inf, for NaN, and at both ends."""
    x = torch.cat([torch.linspace(-87, 0, 20011), torch.linspace(0, 88, 5003), -torch.logspace(-30, 1.9, 999)])
    out = torch.empty_like(x)
    exp_of(out.data_ptr(), x.data_ptr(), len(x))
    assert ((out.double() / x.double().exp() - 1).abs() <= 2**-22).all()
    x = torch.tensor([0.0, -0.0, -torch.inf, torch.nan, -87.5, -1e30, 1e30, torch.inf])
    out = torch.full((9,), SENTINEL)
    exp_of(out.data_ptr(), x.data_ptr(), len(x))
    limit = float(np.float32(np.exp(np.float64(88.0))))
    expected = torch.tensor([1.0, 1.0, 0.0, torch.nan, 0.0, 0.0, limit, limit, SENTINEL])
    torch.testing.assert_close(out, expected, rtol=2**-22, atol=0, equal_nan=True)


def test_bfloat16_rounding() -> None:
    """All bits as PyTorch rounds them: ties, subnormals, infinities, overflow; a NaN stays a NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (40001,), generator=generator, dtype=torch.int64).to(torch.int32)
    bits[:20000] &= -0x8000  # ties and exact values
    special = torch.tensor([0x7F800000, 0x7F7FFFFF, 0x7F800001, 0x7FFFFFFF, 1, 0x8000, 0x18000], dtype=torch.int32)
    x = torch.cat([bits, special, special - 2**31]).view(torch.float32)
    out = torch.zeros(len(x) + 1, dtype=torch.bfloat16)
    narrow(out.data_ptr(), x.data_ptr(), len(x))
    nan = x.isnan()
    assert out[:-1][nan].isnan().all()
    assert torch.equal(out[:-1][~nan].view(torch.int16), x.bfloat16()[~nan].view(torch.int16))
    assert out[-1] == 0


def test_machine_code_is_kept_by_the_hash_of_all_sources(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba itself would look at the file of the kernel only; an unwritable place is passed over."""
    (tmp_path / "lanes.py").write_text("a = 1\n")
    first = compilation.source_hash(tmp_path)
    (tmp_path / "lanes.py").write_text("a = 2\n")
    assert compilation.source_hash(tmp_path) != first
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compilation.numba.config, "CACHE_DIR", str(tmp_path / "file"))
    used = compilation.cache_directory()
    assert used is not None
    assert tmp_path not in used.parents
    monkeypatch.setattr(compilation.numba.config, "CACHE_DIR", str(tmp_path / "wanted"))
    assert compilation.cache_directory() == tmp_path / "wanted" / f"kernels-cpu-{compilation.source_hash()}"


def test_bandwidth_kernels() -> None:
    """They say what they move, keep the buffer up to sign, and cover both kinds with PyTorch's and our own."""
    buffer = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    before, kinds = buffer.abs(), []
    for name, (kind, run, bytes_per_element) in bandwidth.candidates().items():
        kinds.append((kind, name.split(".")[0]))
        moved = run(buffer)
        assert 0.8 * buffer.numel() * bytes_per_element <= moved <= buffer.numel() * bytes_per_element, name
        assert torch.equal(buffer.abs(), before), name
    assert (
        min(kinds.count((kind, origin)) for kind in ("read", "read_modify_write") for origin in ("torch", "cpu")) >= 3
    )
    with pytest.raises(ValueError, match=r"buffer has dtype torch.float64"):
        run(buffer.double())


def test_scale_reaches_every_float() -> None:
    """A read-modify-write kernel that skipped memory would make the roof too high."""
    for parts, streams, floats in ((2, 1, 64), (1, 2, 64), (3, 2, 32), (2, 4, 48)):
        buffer = torch.ones(parts * streams * floats + 1)
        bandwidth._scale(buffer.data_ptr(), parts, streams, floats, np.float32(3))
        assert (buffer[:-1] == 3).all()
        assert buffer[-1] == 1
        total = bandwidth._read(buffer.data_ptr(), parts, streams, floats, np.float32(0))
        assert total == 3 * parts * streams * floats
