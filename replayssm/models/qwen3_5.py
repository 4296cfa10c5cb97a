"""Qwen3.5, the text model: layers of a token mixer and an MLP, dense or a mixture of experts. Three of four mixers are
Gated DeltaNet, every fourth is full attention with an output gate and rotary positions on a part of each head.

Published folders are multimodal: their text model is ``text_config`` and ``model.language_model.*``, beside a vision
tower (``model.visual.*``) and a draft head (``mtp.*``), which are not read. Text positions are the same on all three
axes of the multimodal rotary embedding, which then is the ordinary one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.geometry import Geometry
from replayssm.models import layers
from replayssm.models.decoder import Decoder, section
from replayssm.models.layers import GatedMLP, RMSNorm, fused, linear, norm_then_gate, project, sigmoid_gated, swiglu
from replayssm.models.options import Options
from replayssm.recurrence import gdn

MIXERS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class Qwen35Config:
    """Options by their names in ``config.json``. ``num_experts`` 0 is a dense MLP."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    attention_bias: bool = False
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    mtp_layers: int = 0
    """Of the draft head; 0 without one."""

    @classmethod
    def from_options(cls, whole: Options) -> Qwen35Config:
        """From ``config.json``, its ``text_config`` where it is multimodal; raises `ModelError` on an option that is
        missing or unsupported."""
        o = whole if whole.get("text_config") is None else whole.section("text_config")
        o.only("hidden_act", "silu")
        o.only("attn_output_gate", True)
        o.only("mlp_only_layers", [])
        tied = o.flag("tie_word_embeddings", whole.flag("tie_word_embeddings", False))
        whole.only("tie_word_embeddings", tied)
        heads, value_heads = o.size("num_attention_heads"), o.size("linear_num_value_heads")
        sizes: dict[str, Any] = {}
        if o.get("num_experts") is None:
            sizes["intermediate_size"] = o.size("intermediate_size")
        else:
            moe = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
            sizes = {name: o.size(name) for name in moe}
            if sizes["num_experts_per_tok"] > sizes["num_experts"]:
                raise o.refusal("num_experts_per_tok", sizes["num_experts_per_tok"], f"at most {sizes['num_experts']}")
        return cls(
            vocab_size=o.size("vocab_size"),
            hidden_size=o.size("hidden_size"),
            layer_types=_layer_types(o),
            num_attention_heads=heads,
            num_key_value_heads=o.divisor("num_key_value_heads", o.size("num_key_value_heads"), heads),
            head_dim=o.size("head_dim", default=256),
            linear_num_key_heads=o.divisor("linear_num_key_heads", o.size("linear_num_key_heads"), value_heads),
            linear_num_value_heads=value_heads,
            linear_key_head_dim=o.size("linear_key_head_dim"),
            linear_value_head_dim=o.size("linear_value_head_dim"),
            linear_conv_kernel_dim=o.size("linear_conv_kernel_dim", default=4),
            attention_bias=o.flag("attention_bias", False),
            tie_word_embeddings=tied,
            rms_norm_eps=o.number("rms_norm_eps", 1e-6),
            mtp_layers=o.size("mtp_num_hidden_layers") if o.get("mtp_num_hidden_layers") else 0,
            **_rotary(o),
            **sizes,
        )

    @classmethod
    def from_geometry(cls, model: Mapping[str, Any], source: str) -> Qwen35Config:
        """From a geometry as in ``configs/model/``, whose other options are the published class's defaults."""
        ssm, attention, moe = section(model, "ssm"), section(model, "attention"), section(model, "moe")
        values = {
            "vocab_size": model.get("vocab_size"),
            "hidden_size": model.get("hidden_size"),
            "num_hidden_layers": model.get("num_layers"),
            "full_attention_interval": model.get("full_attention_interval"),
            "num_attention_heads": attention.get("heads"),
            "num_key_value_heads": attention.get("kv_heads"),
            "head_dim": attention.get("head_dim"),
            "attn_output_gate": attention.get("output_gate"),
            "partial_rotary_factor": attention.get("partial_rotary_factor"),
            "linear_num_key_heads": ssm.get("groups"),
            "linear_num_value_heads": ssm.get("heads"),
            "linear_key_head_dim": ssm.get("state_dim"),
            "linear_value_head_dim": ssm.get("head_dim"),
            "linear_conv_kernel_dim": ssm.get("conv_kernel"),
            "intermediate_size": section(model, "mlp").get("intermediate_size"),
            "num_experts": moe.get("routed_experts"),
            "num_experts_per_tok": moe.get("top_k"),
            "moe_intermediate_size": moe.get("expert_intermediate"),
            "shared_expert_intermediate_size": moe.get("shared_intermediate"),
            "tie_word_embeddings": model.get("tie_word_embeddings"),
        }
        return cls.from_options(Options(values, source))


class Qwen35(Decoder):
    """``model.embed_tokens``, ``model.layers.N.{input_layernorm,linear_attn|self_attn,post_attention_layernorm,mlp}``,
    ``model.norm`` and, where embeddings are not tied, ``lm_head``."""

    float32 = frozenset({"A_log", "dt_bias"})
    skipped = ("mtp.", "model.visual.")

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__()
        self.config = c = config
        self.geometry = Geometry(
            "gdn", c.linear_num_value_heads, c.linear_num_key_heads, c.linear_value_head_dim, c.linear_key_head_dim
        )
        self.state_layers = c.layer_types.count("linear_attention")
        self.attention = (c.layer_types.count("full_attention"), c.num_key_value_heads, c.head_dim)
        keys, values = (
            c.linear_num_key_heads * c.linear_key_head_dim,
            c.linear_num_value_heads * c.linear_value_head_dim,
        )
        self.conv = (2 * keys + values, c.linear_conv_kernel_dim)
        self.model = TextModel(c)
        if not c.tie_word_embeddings:
            self.lm_head = linear(c.hidden_size, c.vocab_size)

    @property
    def embedding(self) -> Tensor:
        return self.model.embed_tokens.weight

    def hidden(self, tokens: Tensor, past: Any) -> Tensor:
        return self.model(tokens, past)

    def scores(self, hidden: Tensor) -> Tensor:
        head = self.embedding if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(hidden, head)

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Multimodal checkpoints have another prefix; experts are one tensor a layer, as here, or each apart."""
        multimodal = any(name.startswith("model.language_model.") for name in names)
        for own_name, parameter in self.named_parameters():
            name = re.sub(r"^model\.", "model.language_model.", own_name) if multimodal else own_name
            stacked = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
            if stacked is None or name in names:
                yield name, parameter
            elif stacked[2] == "down_proj":
                for number, expert in enumerate(parameter):
                    yield f"{stacked[1]}.{number}.down_proj.weight", expert
            else:
                for number, expert in enumerate(parameter):
                    gate, up = expert.chunk(2)
                    yield f"{stacked[1]}.{number}.gate_proj.weight", gate
                    yield f"{stacked[1]}.{number}.up_proj.weight", up


class TextModel(nn.Module):
    """Everything but the head."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.rotary = Rotary(c)
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, index) for index in range(len(c.layer_types)))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=1.0)

    def forward(self, tokens: Tensor, past: Any) -> Tensor:
        x = self.embed_tokens(tokens)
        rotary = self.rotary(past.positions, x.dtype)
        more = None
        for layer in self.layers:
            x, more = layer(x, more, past, rotary)
        return self.norm.add(x, more)[1]


class Rotary:
    """Cosines and sines ``[B,T,1,R/2]`` of positions ``[B,T]`` for the R rotated elements of a head."""

    def __init__(self, c: Qwen35Config) -> None:
        self.rotated, self.rope_theta = int(c.head_dim * c.partial_rotary_factor), c.rope_theta

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exponent = torch.arange(0, self.rotated, 2, dtype=torch.float32, device=positions.device) / self.rotated
        angle = positions[..., None, None].float() * (1.0 / self.rope_theta**exponent)
        return angle.cos().to(dtype), angle.sin().to(dtype)


class Layer(nn.Module):
    """Token mixer and MLP, each behind a norm and around a residual. ``number`` of a mixer counts those of its kind."""

    def __init__(self, c: Qwen35Config, index: int, number: int | None = None) -> None:
        super().__init__()
        kind = c.layer_types[index]
        number = c.layer_types[:index].count(kind) if number is None else number
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=1.0)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=1.0)
        self.is_linear = kind == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(c, number)
        else:
            self.self_attn = Attention(c, number)
        self.mlp = MixtureOfExperts(c) if c.num_experts else GatedMLP(c.hidden_size, c.intermediate_size)

    def forward(
        self, x: Tensor, more: Tensor | None, past: Any, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The stream with ``more``, what the last layer's MLP adds to it, and with the mixer; and what the MLP adds."""
        x, normed = self.input_layernorm.add(x, more)
        mixed = self.linear_attn(normed, past) if self.is_linear else self.self_attn(normed, past, rotary)
        x, normed = self.post_attention_layernorm.add(x, mixed)
        return x, self.mlp(normed)


class GatedDeltaNet(nn.Module):
    """Projections to convolved q, k, v, to gate z, and to decay a and step b; recurrence; norm of each head, gated."""

    joined = (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),)

    def __init__(self, c: Qwen35Config, number: int) -> None:
        super().__init__()
        self.number, self.eps = number, c.rms_norm_eps
        self.key_heads, self.value_heads = c.linear_num_key_heads, c.linear_num_value_heads
        self.keys = c.linear_num_key_heads * c.linear_key_head_dim
        self.values = c.linear_num_value_heads * c.linear_value_head_dim
        channels = 2 * self.keys + self.values
        self.in_proj_qkv = linear(c.hidden_size, channels)
        self.in_proj_z = linear(c.hidden_size, self.values)
        self.in_proj_b = linear(c.hidden_size, self.value_heads)
        self.in_proj_a = linear(c.hidden_size, self.value_heads)
        self.conv1d = nn.Conv1d(channels, channels, c.linear_conv_kernel_dim, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.norm = RMSNorm(c.linear_value_head_dim, self.eps)
        self.out_proj = linear(self.values, c.hidden_size)

    def forward(self, x: Tensor, past: Any) -> Tensor:
        channels, z, beta, g = project(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        channels = past.convolve(self.number, channels, self.conv1d.weight, None)
        q, k, v = channels.split([self.keys, self.keys, self.values], dim=-1)
        if not past.takes_raw:
            g, beta = gdn.gates(g, beta, self.A_log, self.dt_bias)
        inputs = gdn.Inputs(
            q=q.unflatten(-1, (self.key_heads, -1)),
            k=k.unflatten(-1, (self.key_heads, -1)),
            v=v.unflatten(-1, (self.value_heads, -1)),
            g=g,
            beta=beta,
        )
        o = past.recur(self.number, inputs, dt_bias=self.dt_bias, A_log=self.A_log)
        z = z.unflatten(-1, (self.value_heads, -1))
        return self.out_proj(norm_then_gate(o, z, self.norm.weight, self.eps).flatten(-2))


class Attention(nn.Module):
    """Grouped-query attention; the query projection holds, head by head, the query and the gate of the output."""

    joined = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, c: Qwen35Config, number: int) -> None:
        super().__init__()
        self.number, self.head_dim, bias = number, c.head_dim, c.attention_bias
        self.q_proj = linear(c.hidden_size, 2 * c.num_attention_heads * c.head_dim, bias)
        self.k_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias)
        self.v_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias)
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, offset=1.0)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, offset=1.0)

    def forward(self, x: Tensor, past: Any, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))
        q, k = norm_rotate(q, self.q_norm, rotary), norm_rotate(k, self.k_norm, rotary)
        return self.o_proj(sigmoid_gated(past.attend(self.number, q, k, v), gate).flatten(-2))


class MixtureOfExperts(nn.Module):
    """Routed experts and a shared one behind a gate of its own."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.gate = Router(c)
        self.experts = Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size)
        self.shared_expert = GatedMLP(c.hidden_size, c.shared_expert_intermediate_size)
        self.shared_expert_gate = linear(c.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        index, weights = self.gate(rows)
        routed = self.experts(rows, index, weights)
        shared = torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return (routed + shared).view_as(x)


class Experts(layers.Experts):
    """SwiGLU MLPs: ``gate_up_proj [E,2I,H]``, gates first, ``down_proj [E,H,I]``."""

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.gate_up_proj, self.down_proj

    def between(self, x: Tensor) -> Tensor:
        return swiglu(*x.chunk(2, dim=-1))


class Router(nn.Module):
    """``(index, weights)``, each ``[N,k]``: the experts of highest probability, weighted by it among themselves."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.top_k = c.num_experts_per_tok

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probability, index = F.linear(x, self.weight).float().softmax(-1).topk(self.top_k, dim=-1)
        return index, (probability / probability.sum(-1, keepdim=True)).to(x.dtype)


def norm_rotate(x: Tensor, norm: RMSNorm, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """`rotate` behind the norm of each head of ``x [B,T,H,D]``."""
    if fused(x) and x.shape[:2] == rotary[0].shape[:2]:
        from replayssm.kernels.triton import pointwise

        return pointwise.norm_rotate(x, norm.weight, rotary, norm.eps, norm.offset)
    return rotate(norm(x), rotary)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """``x [B,T,H,D]`` with its first R elements turned, element i with element i + R/2."""
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _layer_types(o: Options) -> tuple[str, ...]:
    """Layer i is full attention where (i + 1) divides by ``full_attention_interval``, unless the types are listed."""
    if o.get("layer_types") is None:
        interval = o.size("full_attention_interval", default=4)
        return tuple(MIXERS[(i + 1) % interval == 0] for i in range(o.size("num_hidden_layers")))
    types = o.names("layer_types", MIXERS)
    o.only("num_hidden_layers", len(types))
    return types


def _rotary(o: Options) -> dict[str, Any]:
    """The ordinary rotary embedding; its options are in ``rope_parameters`` or, in older files, beside the others."""
    if o.get("rope_scaling") is not None:
        raise o.refusal("rope_scaling", o.get("rope_scaling"), "null")
    rope = o.section("rope_parameters")
    rope.only("rope_type", "default")
    factor = rope.number("partial_rotary_factor", o.number("partial_rotary_factor", 0.25))
    if not 0 < factor <= 1 or int(o.size("head_dim", default=256) * factor) % 2:
        raise rope.refusal("partial_rotary_factor", factor, "0 to 1, giving an even part of head_dim")
    return {"rope_theta": rope.number("rope_theta", o.number("rope_theta", 10000.0)), "partial_rotary_factor": factor}
