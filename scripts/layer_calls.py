"""Calls of the kernels between a model's products, for `scripts.compile_triton`: norms, activations, convolutions and
attention, of one token a row and, where their kernels differ, of a window.

Tensors have no memory. Those that a model cuts out of a joined projection are cut out of one here too, since kernels
are compiled for their strides' divisors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm.kernels.triton import pointwise
from replayssm.kernels.triton.attention import attend

KERNEL_WIDTH, EPS = 4, 1e-6
CAPACITY = 4096
"""Positions of a slot; a window's slots have as many more."""


@dataclass(frozen=True)
class Layers:
    """Sizes of a model's layers; with ``rotary``, the elements of a head that are turned, those of a Qwen3.5, else of a
    Nemotron-H, whose ``key_heads`` are the groups of B and C."""

    hidden: int
    intermediate: int
    value_heads: int
    value_dim: int
    key_heads: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int = 0
    key_dim: int = 128

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.values + 2 * self.key_heads * self.key_dim


TINY = (Layers(192, 320, 6, 64, 1, 2, 1, 64), Layers(192, 224, 2, 128, 1, 2, 1, 64, rotary=16))
LAYERS: dict[str, tuple[tuple[Layers, ...], str, int]] = {
    "nano_4b_layers": ((Layers(3136, 12544, 96, 80, 8, 40, 8, 128),), "bf16", 256),
    "qwen_4b_layers": ((Layers(2560, 9216, 32, 128, 16, 16, 4, 256, rotary=64),), "bf16", 1),
    "tiny_layers": (TINY, "fp32", 1),
}
"""The models, their dtype, and a batch size: with 256 rows a past is read in one piece, with one row in many. The two
tiny models, of one attention, are taken together."""
ELSEWHERE = "qwen_4b_layers"
ONE_A_KERNEL = ("norm_then_gate", "norm_rotate", "swiglu", "convolve", "convolve_window", "attend_window")
"""What of ELSEWHERE is compiled for other architectures than the first."""


def layer_calls(model: str, dtype: torch.dtype, rows: int, window: int) -> dict[str, Any]:
    """By name, a call of each of the kernels that the model's steps launch."""
    found: dict[str, Any] = {}
    for layers in LAYERS[model][0]:

        def new(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        found |= _qwen(layers, rows, new) if layers.rotary else _nemotron(layers, rows, new)
        found |= _past(layers, rows, window, new)
    return found


def _nemotron(c: Layers, rows: int, new: Callable[..., Tensor]) -> dict[str, Any]:
    x, y, up = new(rows, 1, c.hidden), new(rows, 1, c.values), new(rows, 1, c.intermediate)
    gate = new(rows, 1, c.values + c.channels + c.value_heads)[..., : c.values]
    return {
        "add_norm": lambda: pointwise.add_norm(x, x, new(c.hidden), EPS),
        "gated_norm": lambda: pointwise.gated_norm(y, gate, new(c.values), EPS, c.key_heads),
        "squared_relu": lambda: pointwise.squared_relu(up),
    }


def _qwen(c: Layers, rows: int, new: Callable[..., Tensor]) -> dict[str, Any]:
    x, y = new(rows, 1, c.hidden), new(rows, 1, c.value_heads, c.value_dim)
    joined = new(rows, 1, c.channels + c.values + 2 * c.value_heads)
    z = joined[..., c.channels : c.channels + c.values].unflatten(-1, (c.value_heads, -1))
    gate, up = new(rows, 1, 2 * c.intermediate).split(c.intermediate, dim=-1)
    queries = new(rows, 1, 2 * (c.heads + c.kv_heads) * c.head_dim)[..., : 2 * c.heads * c.head_dim]
    q, q_gate = queries.unflatten(-1, (c.heads, -1)).chunk(2, dim=-1)
    rotary = new(rows, 1, 1, c.rotary // 2), new(rows, 1, 1, c.rotary // 2)
    return {
        "rms_norm": lambda: pointwise.rms_norm(x, new(c.hidden), EPS, 1.0),
        "norm_then_gate": lambda: pointwise.norm_then_gate(y, z, new(c.value_dim), EPS),
        "norm_rotate": lambda: pointwise.norm_rotate(q, new(c.head_dim), rotary, EPS, 1.0),
        "swiglu": lambda: pointwise.swiglu(gate, up),
        "sigmoid_gated": lambda: pointwise.sigmoid_gated(new(rows, 1, c.heads, c.head_dim), q_gate),
    }


def _past(c: Layers, rows: int, window: int, new: Callable[..., Tensor]) -> dict[str, Any]:
    """What reads and writes a slot's past: convolutions, with a bias in Nemotron-H alone, and attention."""
    slots, count = (torch.empty(rows, dtype=torch.int64, device="meta") for _ in range(2))
    weight, bias = new(c.channels, 1, KERNEL_WIDTH), None if c.rotary else new(c.channels)
    before = c.values if not c.rotary else 0
    rest = c.value_heads if not c.rotary else c.values + 2 * c.value_heads

    def channels(tokens: int) -> Tensor:
        return new(rows, tokens, before + c.channels + rest)[..., before : before + c.channels]

    def attention(tokens: int) -> Tensor:
        queries = c.heads * c.head_dim * (2 if c.rotary else 1)
        joined = new(rows, tokens, queries + 2 * c.kv_heads * c.head_dim)
        of_kv = joined[..., queries:].unflatten(-1, (-1, c.head_dim))
        q, k, v = joined[..., : c.heads * c.head_dim].unflatten(-1, (c.heads, -1)), *of_kv.chunk(2, dim=2)
        if c.rotary:  # behind `norm_rotate`
            q, k = q.contiguous(), k.contiguous()
        keys = new(rows, c.kv_heads, CAPACITY + (tokens if tokens > 1 else 0), c.head_dim)
        return attend(q, k, v, keys, keys, count, slots)

    past, windows = (new(rows, KERNEL_WIDTH - 1 + more, c.channels) for more in (0, window))
    return {
        "convolve": lambda: pointwise.convolve(past, channels(1)[:, 0], weight, bias, slots),
        "convolve_window": lambda: pointwise.convolve_window(windows, channels(window), weight, bias, slots, count),
        "attend": lambda: attention(1),
        "attend_window": lambda: attention(window),
    }
