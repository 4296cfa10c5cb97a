"""Nemotron-H: one residual stream through Mamba-2, attention, MLP and mixture-of-experts blocks, in the order of a
pattern. A block is a norm and one mixer. Attention has no positional encoding: the state-space layers know the order.

Steps dt of a prompt are at least ``time_step_min``; decoded ones are not bounded. That is how Hugging Face transformers
runs this model; see `replayssm.recurrence.mamba2.discretize`.
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
from replayssm.models.layers import RMSNorm, SquaredReluMLP, gated_norm, linear, project, squared_relu
from replayssm.models.options import Options
from replayssm.recurrence import mamba2

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
SPELLINGS = {**{kind: kind for kind in PATTERN.values()}, "mamba": "linear_attention", "attention": "full_attention"}


@dataclass(frozen=True)
class NemotronHConfig:
    """Options by their names in ``config.json``. Sizes of block kinds that the pattern lacks are 0."""

    vocab_size: int
    hidden_size: int
    layers_block_type: tuple[str, ...]
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    conv_kernel: int = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_min: float = 0.001
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    mlp_bias: bool = False
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    layer_norm_epsilon: float = 1e-5
    mtp_blocks: tuple[str, ...] = ()
    """Blocks of the draft head; empty without one."""

    @classmethod
    def from_options(cls, o: Options) -> NemotronHConfig:
        """From ``config.json``; raises `ModelError` on an option that is missing or unsupported."""
        o.only("mamba_hidden_act", "silu")
        o.only("mlp_hidden_act", "relu2")
        for name in ("attention_bias", "tie_word_embeddings", "residual_in_fp32"):
            o.only(name, False)
        if o.get("sliding_window") is not None:
            raise o.refusal("sliding_window", o.get("sliding_window"), "null")
        blocks = _blocks(o)
        sizes: dict[str, Any] = {}
        if "full_attention" in blocks:
            heads = o.size("num_attention_heads")
            kv_heads = o.divisor("num_key_value_heads", o.size("num_key_value_heads", default=heads), heads)
            head_dim = o.size("head_dim", "attention_head_dim", default=128)
            sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
        if "mlp" in blocks:
            sizes["intermediate_size"] = o.size("intermediate_size")
        if "moe" in blocks:
            o.only("n_shared_experts", 1)
            for name in ("moe_intermediate_size", "moe_shared_expert_intermediate_size"):
                sizes[name] = o.size(name)
            sizes |= _routing(o)
        mamba_heads = o.size("mamba_num_heads")
        return cls(
            vocab_size=o.size("vocab_size"),
            hidden_size=o.size("hidden_size"),
            layers_block_type=blocks,
            mamba_num_heads=mamba_heads,
            mamba_head_dim=o.size("mamba_head_dim"),
            ssm_state_size=o.size("ssm_state_size"),
            n_groups=o.divisor("n_groups", o.size("n_groups", "mamba_n_groups"), mamba_heads),
            conv_kernel=o.size("conv_kernel", "mamba_d_conv", default=4),
            use_conv_bias=o.flag("use_conv_bias", True),
            use_bias=o.flag("use_bias", False),
            mlp_bias=o.flag("mlp_bias", False),
            time_step_min=o.number("time_step_min", 0.001),
            layer_norm_epsilon=o.number("layer_norm_epsilon", 1e-5),
            mtp_blocks=_blocks(o, "mtp_") if o.get("num_nextn_predict_layers") else (),
            **sizes,
        )

    @classmethod
    def from_geometry(cls, model: Mapping[str, Any], source: str) -> NemotronHConfig:
        """From a geometry as in ``configs/model/``, whose other options are the published class's defaults."""
        ssm, attention, moe = section(model, "ssm"), section(model, "attention"), section(model, "moe")
        values = {
            "vocab_size": model.get("vocab_size"),
            "hidden_size": model.get("hidden_size"),
            "hybrid_override_pattern": model.get("pattern"),
            "mamba_num_heads": ssm.get("heads"),
            "mamba_head_dim": ssm.get("head_dim"),
            "ssm_state_size": ssm.get("state_dim"),
            "n_groups": ssm.get("groups"),
            "conv_kernel": ssm.get("conv_kernel"),
            "num_attention_heads": attention.get("heads"),
            "num_key_value_heads": attention.get("kv_heads"),
            "head_dim": attention.get("head_dim"),
            "intermediate_size": section(model, "mlp").get("intermediate_size"),
            "n_routed_experts": moe.get("routed_experts"),
            "num_experts_per_tok": moe.get("top_k"),
            "moe_intermediate_size": moe.get("expert_intermediate"),
            "moe_shared_expert_intermediate_size": moe.get("shared_intermediate"),
            "moe_latent_size": moe.get("latent_size"),
            "routed_scaling_factor": moe.get("routed_scaling"),
        }
        return cls.from_options(Options(values, source))


class NemotronH(Decoder):
    """``backbone.embeddings``, ``backbone.layers.N.{norm,mixer}``, ``backbone.norm_f`` and ``lm_head``."""

    float32 = frozenset({"A_log", "D", "dt_bias", "e_score_correction_bias", "gate.weight"})
    skipped = ("mtp.",)

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.config = c = config
        self.geometry = Geometry("mamba2", c.mamba_num_heads, c.n_groups, c.mamba_head_dim, c.ssm_state_size)
        blocks = c.layers_block_type
        self.state_layers = blocks.count("linear_attention")
        self.attention = (blocks.count("full_attention"), c.num_key_value_heads, c.head_dim)
        self.conv = (c.mamba_num_heads * c.mamba_head_dim + 2 * c.n_groups * c.ssm_state_size, c.conv_kernel)
        self.backbone = Backbone(c)
        self.lm_head = linear(c.hidden_size, c.vocab_size)

    @property
    def embedding(self) -> Tensor:
        return self.backbone.embeddings.weight

    def hidden(self, tokens: Tensor, past: Any) -> Tensor:
        return self.backbone(tokens, past)

    def scores(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """A checkpoint holds each expert's matrices apart; here they are one tensor a layer."""
        for name, parameter in self.named_parameters():
            stacked = re.fullmatch(r"(.*\.experts)\.(up_proj|down_proj)", name)
            if stacked:
                for number, expert in enumerate(parameter):
                    yield f"{stacked[1]}.{number}.{stacked[2]}.weight", expert
            else:
                yield name, parameter


class Backbone(nn.Module):
    """Everything but the head."""

    def __init__(self, c: NemotronHConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, index) for index in range(len(c.layers_block_type)))
        self.norm_f = RMSNorm(c.hidden_size, c.layer_norm_epsilon)

    def forward(self, tokens: Tensor, past: Any) -> Tensor:
        x, more = self.embeddings(tokens), None
        for block in self.layers:
            x, more = block(x, more, past)
        return self.norm_f.add(x, more)[1]


class Block(nn.Module):
    """Residual, norm, mixer. ``number`` of a mixer counts those of its kind."""

    def __init__(self, c: NemotronHConfig, index: int) -> None:
        super().__init__()
        kind = c.layers_block_type[index]
        number = c.layers_block_type[:index].count(kind)
        self.norm = RMSNorm(c.hidden_size, c.layer_norm_epsilon)
        self.mixer: nn.Module
        if kind == "linear_attention":
            self.mixer = Mamba2(c, number)
        elif kind == "full_attention":
            self.mixer = Attention(c, number)
        elif kind == "moe":
            self.mixer = MixtureOfExperts(c)
        else:
            self.mixer = SquaredReluMLP(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.needs_past = kind in ("linear_attention", "full_attention")

    def forward(self, x: Tensor, more: Tensor | None, past: Any) -> tuple[Tensor, Tensor]:
        """The stream with ``more``, what the last block adds to it; and what this one adds."""
        x, normed = self.norm.add(x, more)
        return x, self.mixer(normed, past) if self.needs_past else self.mixer(normed)


class Mamba2(nn.Module):
    """Projection to gate, convolved channels x, B, C and dt; recurrence; norm by groups of the gated output."""

    def __init__(self, c: NemotronHConfig, number: int) -> None:
        super().__init__()
        self.number, self.heads, self.groups, self.eps = number, c.mamba_num_heads, c.n_groups, c.layer_norm_epsilon
        self.inner, self.bc = c.mamba_num_heads * c.mamba_head_dim, c.n_groups * c.ssm_state_size
        self.dt_min = c.time_step_min
        channels = self.inner + 2 * self.bc
        self.in_proj = linear(c.hidden_size, self.inner + channels + self.heads, c.use_bias)
        self.conv1d = nn.Conv1d(channels, channels, c.conv_kernel, groups=channels, bias=c.use_conv_bias)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(self.inner, self.eps)
        self.out_proj = linear(self.inner, c.hidden_size, c.use_bias)

    def forward(self, x: Tensor, past: Any) -> Tensor:
        gate, channels, dt = self.in_proj(x).split([self.inner, self.inner + 2 * self.bc, self.heads], dim=-1)
        channels = past.convolve(self.number, channels, self.conv1d.weight, self.conv1d.bias)
        v, B, C = channels.split([self.inner, self.bc, self.bc], dim=-1)
        limits = (self.dt_min if past.is_prompt else 0.0, float("inf"))
        inputs = mamba2.Inputs(
            x=v.unflatten(-1, (self.heads, -1)),
            B=B.unflatten(-1, (self.groups, -1)),
            C=C.unflatten(-1, (self.groups, -1)),
            dt=dt if past.takes_raw else mamba2.discretize(dt, self.dt_bias, limits),
            A=past.rates(self.number, self.A_log),
            D=self.D,
        )
        y = past.recur(self.number, inputs, dt_bias=self.dt_bias).flatten(-2)
        return self.out_proj(gated_norm(y, gate, self.norm.weight, self.eps, self.groups))


class Attention(nn.Module):
    joined = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, c: NemotronHConfig, number: int) -> None:
        super().__init__()
        self.number, self.head_dim = number, c.head_dim
        self.q_proj = linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)

    def forward(self, x: Tensor, past: Any) -> Tensor:
        parts = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return self.o_proj(past.attend(self.number, q, k, v).flatten(-2))


class MixtureOfExperts(nn.Module):
    """Routed experts, in a narrower latent space where the model has one, and a shared expert on the block's input."""

    def __init__(self, c: NemotronHConfig) -> None:
        super().__init__()
        latent = c.moe_latent_size or c.hidden_size
        self.gate = Router(c)
        self.experts = Experts(c.n_routed_experts, latent, c.moe_intermediate_size)
        self.shared_experts = SquaredReluMLP(c.hidden_size, c.moe_shared_expert_intermediate_size, c.mlp_bias)
        self.latent = c.moe_latent_size is not None
        if self.latent:
            self.fc1_latent_proj = linear(c.hidden_size, latent, c.mlp_bias)
            self.fc2_latent_proj = linear(latent, c.hidden_size, c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        index, weights = self.gate(rows)
        routed = self.fc1_latent_proj(rows) if self.latent else rows
        routed = self.experts(routed, index, weights)
        routed = self.fc2_latent_proj(routed) if self.latent else routed
        return routed.view_as(x) + self.shared_experts(x)


class Experts(layers.Experts):
    """Squared-ReLU MLPs: ``up_proj [E,I,H]``, ``down_proj [E,H,I]``."""

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.up_proj, self.down_proj

    def between(self, x: Tensor) -> Tensor:
        return squared_relu(x)


class Router(nn.Module):
    """``(index, weights)``, each ``[N,k]``: the experts of highest biased sigmoid score, within the best groups where
    experts are in groups; weights are the scores without the bias."""

    def __init__(self, c: NemotronHConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.empty(c.n_routed_experts))
        self.top_k, self.groups, self.top_groups = c.num_experts_per_tok, c.n_group, c.topk_group
        self.normalised, self.scaling = c.norm_topk_prob, c.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight).sigmoid()
        biased = scores + self.e_score_correction_bias
        if self.groups > 1:
            groups = biased.unflatten(-1, (self.groups, -1))
            best = groups.topk(2, dim=-1)[0].sum(-1).topk(self.top_groups, dim=-1)[1]
            outside = torch.ones(groups.shape[:2], dtype=torch.bool, device=x.device).scatter(1, best, False)
            biased = groups.masked_fill(outside[..., None], -torch.inf).flatten(1)
        index = biased.topk(self.top_k, dim=-1)[1]
        weights = scores.gather(1, index)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return index, weights * self.scaling


def _blocks(o: Options, of: str = "") -> tuple[str, ...]:
    """The kinds of blocks, of the model or of what the options beginning with ``of`` are about."""
    if o.get(f"{of}layers_block_type") is not None:
        return tuple(SPELLINGS[name] for name in o.names(f"{of}layers_block_type", SPELLINGS))
    pattern = o.get(f"{of}hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(PATTERN):
        raise o.refusal(f"{of}hybrid_override_pattern", pattern, f"a string of {' '.join(PATTERN)}")
    return tuple(PATTERN[letter] for letter in pattern)


def _routing(o: Options) -> dict[str, Any]:
    """Options of the router, which must leave enough experts to choose from."""
    experts, top_k = o.size("n_routed_experts"), o.size("num_experts_per_tok")
    groups, top_groups = o.size("n_group", default=1), o.size("topk_group", default=1)
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise o.refusal("n_group", groups, f"a divisor of the {experts} experts, with at least two in each")
    if top_groups > groups:
        raise o.refusal("topk_group", top_groups, f"at most n_group={groups}")
    if top_k > experts // groups * top_groups:
        raise o.refusal("num_experts_per_tok", top_k, f"at most {experts // groups * top_groups}")
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "n_group": groups,
        "topk_group": top_groups,
        "moe_latent_size": None if o.get("moe_latent_size") is None else o.size("moe_latent_size"),
        "routed_scaling_factor": o.number("routed_scaling_factor", 1.0),
        "norm_topk_prob": o.flag("norm_topk_prob", True),
    }
