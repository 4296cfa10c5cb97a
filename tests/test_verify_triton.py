"""The Triton kernels of a window against the plain recurrence in float64: on a GPU if there is one, else interpreted.

A case puts every row at another point of its flush cycle, on scattered slots, in rings that start at different entries;
whatever a step has no business with holds NaN, in inputs of padding rows and behind short windows too, and must be the
same bits afterwards. The recurrence never drafts.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from decoding import SENTINEL, corrected, same_bits
from sequences import Sequence, make_sequence
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU:
    # Read when Triton defines its own functions, so before its first import.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed")

from replayssm.cache import CacheLayer, ReplayCache  # noqa: E402
from replayssm.geometry import Geometry  # noqa: E402
from replayssm.kernels.triton.gates import Gates  # noqa: E402
from replayssm.kernels.triton.launch import Launch  # noqa: E402
from replayssm.kernels.triton.verify_commit import BLOCK, commit_window  # noqa: E402
from replayssm.kernels.triton.verify_families import VERIFY  # noqa: E402
from replayssm.kernels.triton.verify_launch import WindowLaunch  # noqa: E402
from replayssm.kernels.triton.verify_snapshots import snapshots_step  # noqa: E402
from replayssm.recurrence import FAMILIES  # noqa: E402

pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"
SLOTS = 7
ROUNDING = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative error of one rounding."""
FLOAT32 = 4e-6
"""Relative error by norm of sums of a few dozen float32 numbers."""
WIDE = ("dt", "A", "D", "g", "beta")
"""Inputs that are float32 whatever the activations are."""


class Window:
    """One window of rows at different points of their cycle, with its truth.

    ``cursors`` gives each row's committed tokens, None makes the row padding; ``lengths`` what each window holds.
    Tensors are cut out of larger ones where ``strided``, so that no axis but the last is contiguous.
    """

    def __init__(
        self,
        family: str,
        cursors: list[int | None],
        interval_length: int,
        window: int,
        *,
        lengths: list[int] | None = None,
        heads: int = 2,
        head_dim: int = 20,
        state_dim: int = 16,
        state_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        flavour: str = "mixed",
        strided: bool = False,
        seed: int = 0,
    ) -> None:
        self.cursors, self.length, self.window, self.strided = cursors, interval_length, window, strided
        self.lengths, self.counts = lengths, torch.tensor(lengths or [window] * len(cursors))
        geometry = Geometry(family, heads, heads if family == "kda" else 1, head_dim, state_dim)
        drawn = make_sequence(geometry, len(cursors), max(interval_length, window) + window, seed=seed, flavour=flavour)
        wide = drawn.to(dtype).inputs
        wide = wide._replace(**{n: getattr(drawn.inputs, n).float() for n in WIDE if hasattr(drawn.inputs, n)})
        self.sequence = Sequence(geometry, drawn.state.to(state_dtype), wide)
        exact = type(wide)(*(None if t is None else t.double() for t in wide))
        self.truth = Sequence(geometry, self.sequence.state.double(), exact)
        self.outputs, self.states = self.truth.run()
        self.held = torch.tensor([cursor or 0 for cursor in cursors])
        self.live = torch.tensor([cursor is not None for cursor in cursors])
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[: len(cursors)]
        self.slots = torch.where(self.live, order, -1)
        self.capacity = max(interval_length, window) + window
        self.origin = torch.arange(SLOTS, dtype=torch.int32) * 5 % self.capacity
        self.inputs = self._place_inputs()
        self.layer = self._place_layer(dtype, state_dtype)
        self.out = self._place(torch.full((len(cursors), window, heads, head_dim), SENTINEL, dtype=dtype))

    def _place(self, tensor: Tensor) -> Tensor:
        if not self.strided or tensor.dim() == 1:
            return tensor.to(DEVICE)
        room = [size + 1 if axis < tensor.dim() - 1 else size for axis, size in enumerate(tensor.shape)]
        larger = torch.full(room, torch.nan, dtype=tensor.dtype, device=DEVICE)
        view = larger[tuple(slice(0, size) for size in tensor.shape)]
        view.copy_(tensor)
        return view

    def _place_inputs(self) -> Any:
        window, placed = self.sequence.window(self.held, self.window), {}
        nothing = (torch.arange(self.window) >= self.counts[:, None]) | ~self.live[:, None]
        for name, tensor in zip(window._fields, window, strict=True):
            if tensor is not None and name not in ("A", "D"):
                tensor[nothing] = torch.nan
            placed[name] = None if tensor is None else self._place(tensor)
        return type(window)(**placed)

    def _place_layer(self, dtype: torch.dtype, state_dtype: torch.dtype) -> CacheLayer:
        d = None if self.truth.geometry.family == "mamba2" else self.truth.corrected(self.states)
        filled, ring = self.truth.ring(self.held, self.capacity, d), {}
        for name, tensor in zip(filled._fields, filled, strict=True):
            if tensor is None:
                continue
            wide = name in ("dt", "k_rnorm", "d", "g")
            entries = torch.full((SLOTS, *tensor.shape[1:]), torch.nan, dtype=torch.float32 if wide else dtype)
            for row, slot in self.rows():
                entries[slot] = tensor[row].roll(int(self.origin[slot]), dims=1)
            ring[name] = self._place(entries)
        state = torch.full((SLOTS, *self.sequence.state.shape[1:]), torch.nan, dtype=state_dtype)
        cursor = torch.zeros(SLOTS, dtype=torch.int32)
        for row, slot in self.rows():
            state[slot], cursor[slot] = self.sequence.state[row], self.held[row]
        return CacheLayer(
            family=self.truth.geometry.family,
            interval_length=self.length,
            window=self.window,
            capacity=self.capacity,
            state=self._place(state),
            ring=ring,
            cursor=cursor.to(DEVICE),
            origin=self.origin.to(DEVICE),
            flushes=torch.arange(SLOTS, device=DEVICE),
        )

    def rows(self) -> list[tuple[int, int]]:
        return [(row, int(slot)) for row, slot in enumerate(self.slots) if slot >= 0]

    def verify(self, launch: WindowLaunch | None = None) -> None:
        """Run the step and check all of the memory."""
        layer = self.layer
        state, out = layer.state.clone(), self.out.clone()
        ring = {name: tensor.clone() for name, tensor in layer.ring.items()}
        flushes = layer.flushes.clone()
        lengths = None if self.lengths is None else self.counts.to(DEVICE, torch.int32)
        VERIFY[layer.family](self.out, layer, self.inputs, self.slots.to(DEVICE), launch, lengths=lengths)
        for row, slot in self.rows():
            p, count = int(self.held[row]), int(self.counts[row])
            for t in range(count):
                error = distance(self.out[row, t], self.outputs[p + t][row])
                assert error <= FLOAT32 + ROUNDING[self.out.dtype], (row, t, error)
                self._check_appended(ring, row, slot, p, t)
            out[row, :count] = self.out[row, :count]
            if self.length < self.window or p + self.window > self.length:
                assert distance(layer.state[slot], self.states[p][row]) <= FLOAT32 + ROUNDING[state.dtype]
                state[slot] = layer.state[slot]
                flushes[slot] += 1
        assert same_bits(self.out, out)
        assert same_bits(layer.state, state)
        assert all(same_bits(layer.ring[name], ring[name]) for name in ring)
        assert torch.equal(layer.flushes, flushes)
        assert torch.equal(layer.origin.cpu(), self.origin)

    def _check_appended(self, ring: dict[str, Tensor], row: int, slot: int, p: int, t: int) -> None:
        place = (int(self.origin[slot]) + p + t) % self.capacity
        token = self.truth.at(p + t)
        for name, tensor in self.layer.ring.items():
            entry = tensor[slot, :, place]
            if name == "k_rnorm":
                assert distance(entry, 1 / (token.k[row].square().sum(-1) + 1e-6).sqrt()) <= 4e-7
            elif name == "d":
                assert distance(entry, corrected(token, row, self.states[p + t][row])) <= FLOAT32
            else:
                assert torch.equal(entry.cpu().double(), getattr(token, name)[row]), name
            ring[name][slot, :, place] = entry


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative error by norm; infinite where a NaN is."""
    actual, expected = actual.cpu().double(), expected.double()
    error = (actual - expected).norm() / expected.norm().clamp_min(1e-30)
    return torch.nan_to_num(error, nan=torch.inf).item()


every_family = pytest.mark.parametrize("family", FAMILIES)
LAUNCHES = {
    "one tile": WindowLaunch(rows=32),
    "two tiles": WindowLaunch(rows=16, tiles=2, warps=2),
    "heads of a group": WindowLaunch(rows=16, tiles=2, heads=2, warps=4, chunks=2),
    "eager": WindowLaunch(rows=16, eager=True),
}


@every_family
@pytest.mark.parametrize(("interval_length", "window", "launch"), [
    (16, 4, "heads of a group"), (5, 1, "one tile"), (9, 6, "two tiles"), (3, 5, None), (17, 16, "one tile"),
    (16, 3, "eager"),
])  # fmt: skip
def test_verify_at_every_phase(family: str, interval_length: int, window: int, launch: str | None) -> None:
    """Rings that are empty, leave room for exactly this window, and for one token less; the fullest that can be."""
    L, T = interval_length, window
    fullest = max(L, T)
    cursors = [max(0, L - T), None, 0, min(fullest, max(0, L - T) + 1), fullest]
    Window(family, cursors, L, T, seed=L).verify(LAUNCHES.get(launch or ""))


@every_family
def test_windows_of_different_lengths(family: str) -> None:
    """Down to none, ordinary rows and those that flush."""
    Window(family, [3, 5, 2, None, 6, 7], 8, 4, lengths=[4, 1, 0, 3, 0, 3]).verify(LAUNCHES["two tiles"])


@every_family
@pytest.mark.parametrize(("head_dim", "state_dim"), [(1, 1), (3, 7), (80, 24)])
def test_shapes_that_fit_no_tile(family: str, head_dim: int, state_dim: int) -> None:
    Window(family, [3, 1], 4, 2, head_dim=head_dim, state_dim=state_dim).verify()
    Window(family, [3], 4, 2, head_dim=head_dim, state_dim=state_dim).verify(WindowLaunch(16, 5, warps=1))


@every_family
def test_strided_tensors(family: str) -> None:
    Window(family, [2, None, 3], 4, 2, strided=True).verify(LAUNCHES["heads of a group"])


@every_family
@pytest.mark.parametrize("flavour", ["strong decay", "weak decay", "beta two", "identical keys", "zero keys"])
def test_extreme_inputs(family: str, flavour: str) -> None:
    Window(family, [7, 4], 8, 4, flavour=flavour).verify(LAUNCHES["one tile"])


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_formats(family: str, dtype: torch.dtype) -> None:
    """Activations and ring in the format, with a state in float32, in it, and in the other one of 16 bits."""
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    for state_dtype in (torch.float32, dtype, other):
        Window(family, [3, 2, None], 4, 2, dtype=dtype, state_dtype=state_dtype, flavour="model").verify()


@every_family
def test_a_batch_of_padding_changes_nothing(family: str) -> None:
    step = Window(family, [None, None], 3, 2)
    step.verify()
    assert (step.out == SENTINEL).all()


@every_family
def test_decoding_with_random_acceptance(family: str) -> None:
    """0 to T tokens accepted, again and again, rows out of step with each other, several flushes of every row."""
    geometry = Geometry(family, 2, 2 if family == "kda" else 1, 4, 16)
    rows, L, T, steps = 3, 6, 3, 12
    cache = ReplayCache(geometry, slots=rows, interval_length=L, window=T, input_dtype=torch.float32, device=DEVICE)
    batch, layer = cache.batch(cache.allocate(rows)), cache.layer(0)
    sequence = make_sequence(geometry, rows, steps * T, seed=4, flavour="model").to(torch.float32)
    truth, generator = sequence.to(torch.float64), torch.Generator().manual_seed(5)
    states, slots = torch.zeros(rows, 2, 4, 16, dtype=torch.float64), cache.index(batch)
    cache.origin[:] = torch.tensor([0, 4, 7], dtype=torch.int32)
    for step in range(steps):
        first = torch.full((rows,), step * T)
        inputs = sequence.window(first, T)
        inputs = type(inputs)(*(None if t is None else t.to(DEVICE) for t in inputs))
        out = torch.full((rows, T, 2, 4), torch.nan, device=DEVICE)
        VERIFY[family](out, layer, inputs, slots)
        accepted = torch.randint(T + 1, (rows,), generator=generator)
        state = states
        for t in range(T):
            output, state = truth.family.step(state, truth.at(step * T + t))
            assert distance(out[:, t], output) <= 4 * FLOAT32
            states = torch.where((accepted > t)[:, None, None, None], state, states)
        commit_window(cache.cursor, cache.origin, slots, accepted.to(DEVICE), L, T, cache.capacity)
    assert cache.flushes.min() >= 2


@pytest.mark.parametrize(("interval_length", "window"), [(1, 1), (5, 2), (16, 4), (3, 6)])
def test_commit_is_that_of_the_cache(interval_length: int, window: int) -> None:
    """Every accepted count at any cursor, on scattered slots, rings that start anywhere, some rows padding."""
    rows, L, T = BLOCK + 3, interval_length, window
    cache = ReplayCache(Geometry("gdn", 1, 1, 1, 1), slots=rows + 4, interval_length=L, window=T, device=DEVICE)
    cache.allocate(2)  # two slots that no row has
    handles, generator = cache.allocate(rows), torch.Generator().manual_seed(L)
    order = torch.randperm(rows, generator=generator).tolist()
    cache.cursor[:] = torch.arange(rows + 4) % (max(L, T) + 1)
    cache.origin[:] = torch.randint(cache.capacity, (rows + 4,), generator=generator).to(torch.int32)
    cursor, origin = cache.cursor.clone(), cache.origin.clone()
    for step in range(4):
        batch = cache.batch([None if (i + step) % 7 == 0 else handles[i] for i in order])
        accepted = torch.randint(T + 1, (rows,), generator=generator).to(DEVICE)
        commit_window(cursor, origin, batch.index, accepted, L, T, cache.capacity)
        cache.commit(batch, accepted)
        assert torch.equal(cursor, cache.cursor)
        assert torch.equal(origin, cache.origin)


@every_family
def test_bad_arguments_are_refused_before_anything_changes(family: str) -> None:
    step = Window(family, [0], 3, 2, head_dim=4)
    verify, before, slots = VERIFY[family], step.layer.state.clone(), step.slots.to(DEVICE)
    standard = ReplayCache(step.truth.geometry, slots=1).layer(0)
    with pytest.raises(ValueError, match=r"^verify_step needs a cache made with a window"):
        verify(step.out, standard, step.inputs, slots)
    with pytest.raises(ValueError, match=r"^out has shape \[1, 2, 2, 3\]; accepted: \[1, 2, 2, 4\]$"):
        verify(step.out[..., :3], step.layer, step.inputs, slots)
    with pytest.raises(ValueError, match=r"^lengths has shape \[2\] of torch.int64; accepted: \[1\] int32 or int64$"):
        verify(step.out, step.layer, step.inputs, slots, lengths=torch.zeros(2, dtype=torch.int64))
    long = ReplayCache(step.truth.geometry, slots=1, window=17).layer(0)
    with pytest.raises(ValueError, match=r"^verify_step got a cache with window=17; accepted: at most 16$"):
        verify(step.out, long, step.inputs, slots)
    three = ReplayCache(step.truth.geometry, slots=1, window=3).layer(0)
    with pytest.raises(ValueError, match=r"^inputs hold 2 tokens a row; accepted: window=3$"):
        verify(step.out, three, step.inputs, slots)
    with pytest.raises(ValueError, match=r"^accepted has shape \[2\] of torch.int64; accepted: \[1\] contiguous"):
        commit_window(step.layer.cursor, step.layer.origin, slots, torch.ones(2, dtype=torch.int64), 3, 2, 5)
    assert same_bits(step.layer.state, before)


@every_family
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_snapshots(family: str, state_dtype: torch.dtype) -> None:
    """Two windows, the second from whichever state was accepted; slots of no row and rows of padding stay as they are.
    A state of 16 bits is rounded when it is stored.
    """
    T, rows, P, launch = 3, 3, 20, Launch(rows=8, tiles=2, warps=1, lanes=4)
    geometry = Geometry(family, 2, 2 if family == "kda" else 1, P, 16)
    sequence = make_sequence(geometry, rows, 2 * T, seed=3, flavour="model").to(torch.float32)
    truth, slots = sequence.to(torch.float64), torch.tensor([4, -1, 2])
    states = torch.full((5, T, 2, P, 16), torch.nan, dtype=state_dtype, device=DEVICE)
    first, accepted = torch.tensor([2, 1, 3]), torch.tensor([3, 1, 1])
    for row in (0, 2):
        states[slots[row], first[row] - 1] = sequence.state[row].to(DEVICE, state_dtype)
    for step, counts in enumerate((first, accepted)):
        out = torch.full((rows, T, 2, P), SENTINEL, device=DEVICE)
        window = sequence.window(torch.full((rows,), step * T), T)
        inputs = type(window)(*(None if t is None else t.to(DEVICE) for t in window))
        state = torch.stack([states[slots[row], counts[row] - 1].cpu().double() for row in range(rows)])
        snapshots_step(family, out, states, inputs, slots.to(DEVICE), counts.to(DEVICE), launch)
        for t in range(T):
            output, state = truth.family.step(state, truth.at(step * T + t))
            for row in (0, 2):
                assert distance(out[row, t], output[row]) <= FLOAT32
                assert distance(states[slots[row], t], state[row]) <= FLOAT32 + ROUNDING[state_dtype]
        assert (out[1] == SENTINEL).all()
    assert states[[0, 1, 3]].isnan().all()
    with pytest.raises(ValueError, match=r"^inputs hold 3 tokens a row; accepted: 2, the states of a slot$"):
        snapshots_step(family, out, states[:, :2], inputs, slots.to(DEVICE), counts.to(DEVICE))


@every_family
def test_acceptance_that_is_known_leaves_one_state(family: str) -> None:
    """The state behind the last accepted token, in place of the one before the window; all outputs; nothing else."""
    T, rows, P, launch = 3, 4, 5, Launch(rows=4, tiles=2, warps=1, lanes=4)
    geometry = Geometry(family, 2, 2 if family == "kda" else 1, P, 16)
    sequence = make_sequence(geometry, rows, T, seed=3, flavour="model").to(torch.float32)
    truth, slots, accepted = sequence.to(torch.float64), torch.tensor([4, -1, 2, 0]), torch.tensor([1, 1, 3, 2])
    states = torch.full((5, 1, 2, P, 16), torch.nan, device=DEVICE)
    states[slots[[0, 2, 3]], 0] = sequence.state[[0, 2, 3]].to(DEVICE)
    out = torch.full((rows, T, 2, P), SENTINEL, device=DEVICE)
    window = sequence.window(torch.zeros(rows, dtype=torch.int64), T)
    inputs = type(window)(*(None if t is None else t.to(DEVICE) for t in window))
    given = (inputs, slots.to(DEVICE), accepted.to(DEVICE), launch)
    snapshots_step(family, out, states, *given, known=True)
    state = truth.state
    for t in range(T):
        output, state = truth.family.step(state, truth.at(t))
        for row in (0, 2, 3):
            assert distance(out[row, t], output[row]) <= FLOAT32
            if accepted[row] == t + 1:
                assert distance(states[slots[row], 0], state[row]) <= FLOAT32
    assert (out[1] == SENTINEL).all()
    assert states[[1, 3]].isnan().all()
    with pytest.raises(ValueError, match=r"^known got 3 states a slot and 3 tokens a row; accepted: 1 state, and 1 to"):
        snapshots_step(family, out, states.expand(-1, T, -1, -1, -1), *given, known=True)


@pytest.mark.parametrize(("family", "bound"), [("mamba2", None), ("gdn", None), ("kda", None), ("kda", -5.0)])
def test_gates_from_raw_inputs(family: str, bound: float | None) -> None:
    """Raw inputs in bfloat16 give what ready gates do, in outputs, ring, flush and snapshots; with a short window."""
    window = Window(family, [3, 5], 6, 2, lengths=[2, 1], flavour="model")
    again = Window(family, [3, 5], 6, 2, lengths=[2, 1], flavour="model")
    shape, H, N = window.inputs[0].shape, 2, 16
    generator = torch.Generator().manual_seed(3)
    channels = (H, N) if family == "kda" else (H,)
    first, second = (torch.randn(*shape[:2], *size, generator=generator).bfloat16() for size in (channels, (H,)))
    bias = torch.randn(*channels, generator=generator).bfloat16()
    A_log = torch.rand(H, generator=generator)
    if family == "mamba2":
        made = {"dt": FAMILIES[family].discretize(first.double(), bias.double())}
        raw, gates = {"dt": first}, Gates(bias.to(DEVICE))
    else:
        given = (first.double(), second.double(), A_log.double(), bias.double())
        told = (*given, bound) if family == "kda" else given
        made = dict(zip(("g", "beta"), FAMILIES[family].gates(*told), strict=True))
        raw, gates = {"g": first, "beta": second}, Gates(bias.to(DEVICE), A_log.to(DEVICE), bound)
    ready = window.inputs._replace(**{name: tensor.float().to(DEVICE) for name, tensor in made.items()})
    given = window.inputs._replace(**{name: tensor.to(DEVICE) for name, tensor in raw.items()})
    slots, lengths = window.slots.to(DEVICE), window.counts.to(DEVICE)
    VERIFY[family](window.out, window.layer, ready, slots, lengths=lengths)
    VERIFY[family](again.out, again.layer, given, slots, lengths=lengths, gates=gates)
    live = window.out != SENTINEL
    assert torch.equal(live, again.out != SENTINEL)
    assert distance(again.out[live], window.out[live].double().cpu()) <= FLOAT32
    kept = [[of.layer.state, *of.layer.ring.values()] for of in (again, window)]
    for found, wanted in zip(*kept, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert distance(found.nan_to_num(), wanted.nan_to_num().double().cpu()) <= FLOAT32
    inputs = [type(ready)(*(t if t is None else t.nan_to_num() for t in i)) for i in (ready, given)]
    results = []
    for of, more in zip(inputs, ({}, {"gates": gates}), strict=True):
        states = torch.ones(SLOTS, 2, 2, 20, N, device=DEVICE)
        out = torch.empty_like(window.out)
        snapshots_step(family, out, states, of, slots, torch.ones_like(lengths), **more)
        results.append((out, states))
    for found, wanted in zip(*results, strict=True):
        assert distance(found, wanted.double().cpu()) <= FLOAT32
