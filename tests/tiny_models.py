"""Tiny random models of Hugging Face transformers, every option of the published configurations on in one of them, and
their folders. Weights are scaled so that every block moves the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.nemotron_h import NemotronHConfig, NemotronHForCausalLM
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import Qwen3_5ForConditionalGeneration as Qwen3_5Multimodal
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeForConditionalGeneration as Qwen3_5MoeMultimodal

VOCABULARY = 61

NEMOTRON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 40,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "time_step_min": 0.01,
}
NEMOTRON_MOE = NEMOTRON | {
    "hybrid_override_pattern": "MEM*EME",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "routed_scaling_factor": 2.5,
}
QWEN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
QWEN_MOE = QWEN | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "nemotron-mlp": lambda: NemotronHForCausalLM(NemotronHConfig(**NEMOTRON, hybrid_override_pattern="M-M*-MM-")),
    "nemotron-moe-latent": lambda: NemotronHForCausalLM(NemotronHConfig(**NEMOTRON_MOE, moe_latent_size=16)),
    "nemotron-moe-groups-biases": lambda: NemotronHForCausalLM(
        NemotronHConfig(
            **NEMOTRON_MOE,
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            use_bias=True,
            mlp_bias=True,
            use_conv_bias=False,
        )
    ),
    "qwen-mlp-tied": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(**QWEN, intermediate_size=40, tie_word_embeddings=True)
    ),
    "qwen-mlp-biases": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(**QWEN, intermediate_size=40, attention_bias=True, full_attention_interval=2)
    ),
    "qwen-moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**QWEN_MOE)),
    "qwen-mlp-multimodal": lambda: Qwen3_5Multimodal(
        Qwen3_5Config(
            text_config=QWEN | {"intermediate_size": 40, "tie_word_embeddings": True},
            vision_config=VISION,
            tie_word_embeddings=True,
        )
    ),
    "qwen-moe-multimodal": lambda: Qwen3_5MoeMultimodal(Qwen3_5MoeConfig(text_config=QWEN_MOE, vision_config=VISION)),
}


def tiny_model(name: str, seed: int = 0) -> Any:
    """A float32 model whose weights are random, each term large enough to show, and none at a neutral value."""
    model = MODELS[name]()
    model.config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("correction_bias"))]
    for name, tensor in tensors:
        draw = torch.randn(tensor.shape, generator=generator)
        if name.endswith("A_log"):
            tensor.data = torch.log(1 + 15 * torch.rand(tensor.shape, generator=generator))
        elif name.endswith("dt_bias"):
            tensor.data = draw - 3
            tensor.data[:2] = torch.tensor([-9.0, -5.0])
        elif tensor.dim() == 1:
            tensor.data = 0.3 * draw + (1.0 if name.endswith((".D", "norm.weight", "norm_f.weight")) else 0.0)
        else:
            tensor.data = 1.5 * draw * tensor.shape[-1] ** -0.5
    return model.eval().requires_grad_(False)
