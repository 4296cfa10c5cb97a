"""The Triton kernels between a model's products against their plain forms: on a GPU, or else interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from replayssm.kernels.triton import attention, pointwise
from replayssm.kernels.triton.attention import attend
from replayssm.models.cache import ModelCache, StoredStates
from replayssm.models.decoding import Decoding
from replayssm.models.layers import RMSNorm, join, linear, project, rms
from replayssm.models.qwen3_5 import norm_rotate, rotate
from replayssm.models.windows import WindowDecoding

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda" if GPU else "cpu"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("width", [12, 64, 3136])
def test_a_norm_is_the_plain_one(width: int) -> None:
    x, weight = draw(3, 1, 2 * width)[..., :width], draw(width, seed=1)
    close(pointwise.rms_norm(x, weight, 1e-5, 1.0), rms(x, 1e-5) * (weight + 1.0))
    heads = draw(2, 1, 5, 2 * width)[..., :width]
    close(pointwise.rms_norm(heads, weight, 1e-5), rms(heads, 1e-5) * weight)


def test_gated_norms_are_the_plain_ones() -> None:
    y, gate, weight = draw(3, 1, 60), draw(3, 1, 100, seed=1)[..., :60], draw(60, seed=2)
    expected = rms((y * F.silu(gate)).unflatten(-1, (4, -1)), 1e-5).flatten(-2) * weight
    close(pointwise.gated_norm(y, gate, weight, 1e-5, 4), expected)
    y, gate, weight = draw(3, 1, 4, 12), draw(3, 1, 48, seed=1).unflatten(-1, (4, -1)), draw(12, seed=2)
    close(pointwise.norm_then_gate(y, gate, weight, 1e-6), rms(y, 1e-6) * weight * F.silu(gate))


def test_a_sum_and_its_norm_are_the_plain_ones() -> None:
    x, more, weight = draw(3, 1, 50), draw(3, 1, 90, seed=1)[..., :50], draw(50, seed=2)
    total, normed = pointwise.add_norm(x, more, weight, 1e-5, 1.0)
    close(total, x + more)
    close(normed, rms(x + more, 1e-5) * (weight + 1.0))


@pytest.mark.parametrize(("turned", "tokens"), [(4, 1), (12, 1), (12, 3)])
def test_turned_heads_are_the_plain_ones(turned: int, tokens: int) -> None:
    x, weight = draw(3, tokens, 5, 24)[..., :12], draw(12, seed=1)
    angle = draw(3, tokens, 1, turned // 2, seed=2)
    rotary = (angle.cos(), angle.sin())
    norm = RMSNorm(12, 1e-6, 1.0).to(DEVICE)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    expected = rotate(rms(x, 1e-6) * (weight + 1.0), rotary)
    close(pointwise.norm_rotate(x, weight, rotary, 1e-6, 1.0), expected)
    close(norm_rotate(x, norm, rotary), expected)


def test_activations_are_the_plain_ones() -> None:
    x, up = draw(3, 1500)[:, :1300], draw(3, 1300, seed=1)
    close(pointwise.squared_relu(x), F.relu(x).square())
    close(pointwise.swiglu(x, up), F.silu(x) * up)
    heads, gate = draw(3, 1, 4, 12), draw(3, 1, 4, 40, seed=1)[..., :12]
    close(pointwise.sigmoid_gated(heads, gate), heads * torch.sigmoid(gate))


def test_matrices_side_by_side_are_one_product() -> None:
    module = torch.nn.ModuleDict({name: linear(12, width) for name, width in (("a", 5), ("b", 3), ("c", 7))})
    x = draw(2, 1, 12).cpu()
    join(module, "a", "b")
    for seed, layer in enumerate(module.values()):
        layer.weight.data.copy_(draw(*layer.weight.shape, seed=seed))
    apart = [layer(x) for layer in module.values()]
    for layer in module.values():
        layer.requires_grad_(False)
    joined = project(x, module["a"], module["b"])
    assert joined[0]._base is not None
    assert joined[0]._base is joined[1]._base
    assert all(part._base is None for part in project(x, module["b"], module["c"]))
    for found, expected in zip((*joined, *project(x, module["b"], module["c"])), (*apart[:2], *apart[1:]), strict=True):
        torch.testing.assert_close(found, expected)
    module["a"].weight.requires_grad_(True)
    project(x, module["a"], module["b"])[0].sum().backward()
    assert module["a"].weight.grad is not None


class Past:
    """A plain `Decoding` of one attention layer and one convolution, row 1 of three being padding."""

    def __init__(self, capacity: int = 8, heads: int = 2, size: int = 12, channels: int = 300, K: int = 4) -> None:
        from replayssm.geometry import Geometry

        states = StoredStates(Geometry("gdn", 1, 1, 1, 1), lambda *a: None, slots=4, layers=1, device=DEVICE)
        sizes: Any = {"attention": (1, heads, size), "conv": (channels, K), "dtype": torch.float32, "device": DEVICE}
        self.cache = ModelCache(states, slots=4, capacity=capacity, **sizes)
        for seed, tensor in enumerate((self.cache.keys, self.cache.values, self.cache.conv)):
            tensor.copy_(draw(*tensor.shape, seed=10 + seed))
        self.slots = torch.tensor([0, -1, 2], device=DEVICE)

    def decoding(self, *lengths: int) -> Decoding:
        self.cache.length.copy_(torch.tensor([*lengths, 0]))
        return Decoding(self.cache, self.slots, self.cache.capacity)

    def window(self, *lengths: int, tokens: int, accepted: tuple[int, int, int] = (1, 1, 1)) -> WindowDecoding:
        """As `decoding`; memory of the convolution is drawn anew, as wide as windows need it."""
        self.cache.window, self.cache.accepted = tokens, torch.tensor([*accepted, 1], device=DEVICE)
        _, slots, inputs, channels = self.cache.conv.shape
        self.cache.conv = draw(1, slots, inputs + tokens, channels, seed=12)
        self.cache.length.copy_(torch.tensor([*lengths, 0]))
        return WindowDecoding(self.cache, self.slots, self.cache.capacity)


@pytest.mark.parametrize("bias", [None, 1])
def test_a_convolution_step_is_the_plain_one(bias: int | None) -> None:
    past, channels, weight = Past(), draw(3, 1, 400)[..., :300], draw(300, 1, 4, seed=1)
    offset = None if bias is None else draw(300, seed=2)
    ours = past.cache.conv[0].clone()
    expected = past.decoding(1, 1, 1).convolve(0, channels, weight, offset)
    found = pointwise.convolve(ours, channels[:, 0], weight, offset, past.slots)
    close(found[[0, 2]], expected[[0, 2], 0])
    assert torch.equal(ours, past.cache.conv[0])


@pytest.mark.parametrize(("capacity", "lengths"), [(8, (0, 3, 7)), (200, (63, 64, 199)), (700, (699, 5, 301))])
@pytest.mark.parametrize(("queries", "heads", "size"), [(2, 2, 12), (5, 1, 16), (6, 2, 128)])
def test_attention_is_the_plain_one(
    capacity: int, lengths: tuple[int, int, int], queries: int, heads: int, size: int
) -> None:
    past = Past(capacity, heads, size)
    q, k, v = (
        draw(3, 1, queries, 2 * size)[..., :size],
        draw(3, 1, heads, size, seed=1),
        draw(3, 1, heads, size, seed=2),
    )
    decoding = past.decoding(*lengths)
    keys, values = past.cache.keys[0].clone(), past.cache.values[0].clone()
    expected = decoding.attend(0, q, k, v)
    found = attend(q, k, v, keys, values, decoding.length, past.slots)
    close(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(keys, past.cache.keys[0])
    assert torch.equal(values, past.cache.values[0])


def test_attention_that_reads_fewer_positions_at_a_time_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "POSITIONS", (16,))
    test_attention_is_the_plain_one(200, (15, 16, 199), 5, 1, 16)
    test_attention_is_the_plain_one(700, (699, 5, 301), 2, 2, 12)


@pytest.mark.parametrize(("capacity", "lengths"), [(10, (0, 3, 7)), (600, (596, 0, 301))])
@pytest.mark.parametrize(("queries", "heads", "size", "tokens"), [(2, 2, 12, 3), (6, 1, 16, 2)])
def test_attention_of_a_window_is_the_plain_one(
    capacity: int, lengths: tuple[int, int, int], queries: int, heads: int, size: int, tokens: int
) -> None:
    past = Past(capacity, heads, size)
    q = draw(3, tokens, queries, 2 * size)[..., :size]
    k, v = (draw(3, tokens, heads, size, seed=seed) for seed in (1, 2))
    window = past.window(*lengths, tokens=tokens)
    keys, values = past.cache.keys[0].clone(), past.cache.values[0].clone()
    expected = window.attend(0, q, k, v)
    close(attend(q, k, v, keys, values, window.length, past.slots)[[0, 2]], expected[[0, 2]])
    assert torch.equal(keys, past.cache.keys[0])
    assert torch.equal(values, past.cache.values[0])


@pytest.mark.parametrize("bias", [None, 1])
def test_a_convolution_of_a_window_is_the_plain_one(bias: int | None) -> None:
    """Behind none, some and all of the last window's tokens."""
    past, channels, weight = Past(), draw(3, 3, 400)[..., :300], draw(300, 1, 4, seed=1)
    offset = None if bias is None else draw(300, seed=2)
    for accepted in ((0, 1, 2), (3, 1, 1)):
        window = past.window(1, 1, 1, tokens=3, accepted=accepted)
        ours = past.cache.conv[0].clone()
        expected = window.convolve(0, channels, weight, offset)
        found = pointwise.convolve_window(ours, channels, weight, offset, past.slots, window.accepted)
        close(found[[0, 2]], expected[[0, 2]])
        assert torch.equal(ours, past.cache.conv[0])
        past = Past()
