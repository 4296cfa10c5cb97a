"""Multi-token-prediction heads: a layer that foretells the token after next, from the model's hidden state at a token
and the token that follows it. Embeddings and output matrix are the model's.

Called with its own output in place of the model's hidden state, and the token that it foretold as the following one, a
head goes on to later tokens. It remembers nothing but keys and values, in a cache of its own with the model's
positions. Published checkpoints have it as ``mtp.*``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from replayssm.models import nemotron_h, qwen3_5
from replayssm.models.layers import RMSNorm, SquaredReluMLP, linear
from replayssm.models.options import ModelError


class NemotronHead(nn.Module):
    """``layers.0.{enorm,hnorm,eh_proj,norm,mixer}`` with attention, ``layers.1.{norm,mixer,final_layernorm}``."""

    def __init__(self, c: nemotron_h.NemotronHConfig) -> None:
        super().__init__()
        attention, mlp = nn.Module(), nn.Module()
        for owner, names in ((attention, ("enorm", "hnorm", "norm")), (mlp, ("norm", "final_layernorm"))):
            for name in names:
                setattr(owner, name, RMSNorm(c.hidden_size, c.layer_norm_epsilon))
        attention.eh_proj = linear(2 * c.hidden_size, c.hidden_size)
        attention.mixer = nemotron_h.Attention(c, 0)
        experts = c.mtp_blocks[1] == "moe"
        mlp.mixer = (
            nemotron_h.MixtureOfExperts(c)
            if experts
            else SquaredReluMLP(c.hidden_size, c.intermediate_size, c.mlp_bias)
        )
        self.layers = nn.ModuleList([attention, mlp])

    def forward(self, hidden: Tensor, embedded: Tensor, past: Any) -> Tensor:
        layers: Any = self.layers
        first, second = layers
        x = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], dim=-1))
        x, normed = second.norm.add(x, first.mixer(first.norm(x), past))
        return second.final_layernorm.add(x, second.mixer(normed))[1]


class QwenHead(nn.Module):
    """``pre_fc_norm_embedding``, ``pre_fc_norm_hidden``, ``fc``, ``layers.0`` of full attention, and ``norm``."""

    def __init__(self, c: qwen3_5.Qwen35Config) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=1.0)
        self.pre_fc_norm_hidden = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=1.0)
        self.fc = linear(2 * c.hidden_size, c.hidden_size)
        self.layers = nn.ModuleList([qwen3_5.Layer(c, c.layer_types.index("full_attention"), number=0)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=1.0)
        self.rotary = qwen3_5.Rotary(c)

    def forward(self, hidden: Tensor, embedded: Tensor, past: Any) -> Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1))
        x, more = self.layers[0](x, None, past, self.rotary(past.positions, x.dtype))
        return self.norm.add(x, more)[1]


def draft_head(config: Any) -> nn.Module:
    """``(hidden [B,T,H], embedded [B,T,H] of the following tokens, past)`` to hidden states ``[B,T,H]`` for the model's
    ``scores``. Raises `ModelError` where the configuration names no head of one layer."""
    if isinstance(config, nemotron_h.NemotronHConfig):
        blocks = config.mtp_blocks
        if len(blocks) == 2 and blocks[0] == "full_attention" and blocks[1] in set(config.layers_block_type) & MLPS:
            return NemotronHead(config)
        raise ModelError(f"an MTP head of {list(blocks)} is not implemented; accepted: attention, then mlp or moe")
    if config.mtp_layers == 1 and "full_attention" in config.layer_types:
        return QwenHead(config)
    raise ModelError(f"mtp_num_hidden_layers={config.mtp_layers} is not implemented; accepted: a head of 1 layer")


MLPS = {"mlp", "moe"}
