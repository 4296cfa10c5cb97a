"""Tiny random models that the engine's tests decode with, their prompts, and plain decoding of these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from replayssm.engine import Engine, Request
from replayssm.kernels.torch import stored_step
from replayssm.models import Decoder, StoredStates, config_from_geometry, random_model

VOCABULARY, CAPACITY = 61, 48
GEOMETRIES: dict[str, dict[str, Any]] = {
    "nemotron": {
        "name": "nemotron_3_tiny",
        "family": "mamba2",
        "hidden_size": 32,
        "pattern": "M-M*-ME",
        "ssm": {"heads": 4, "groups": 2, "head_dim": 8, "state_dim": 16, "conv_kernel": 4},
        "attention": {"heads": 4, "kv_heads": 2, "head_dim": 16},
        "mlp": {"intermediate_size": 40},
        "moe": {"routed_experts": 4, "top_k": 2, "expert_intermediate": 16, "shared_experts": 1}
        | {"shared_intermediate": 24, "latent_size": 16},
        "vocab_size": VOCABULARY,
    },
    "qwen": {
        "name": "qwen3_5_tiny",
        "family": "gdn",
        "hidden_size": 32,
        "num_layers": 4,
        "full_attention_interval": 2,
        "ssm": {"heads": 4, "groups": 2, "head_dim": 16, "state_dim": 16, "conv_kernel": 4},
        "attention": {"heads": 4, "kv_heads": 2, "head_dim": 16, "output_gate": True, "partial_rotary_factor": 0.5},
        "moe": {"routed_experts": 4, "top_k": 2, "expert_intermediate": 16, "shared_intermediate": 24},
        "vocab_size": VOCABULARY,
    },
}


@cache
def model_of(name: str) -> Decoder:
    return random_model(config_from_geometry(GEOMETRIES[name]), seed=3, dtype=torch.float32)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Ragged ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def plainly(model: Decoder, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy tokens of one prompt by the model's own prompt and decoding, with the stored state in torch."""
    states = StoredStates(model.geometry, stored_step, slots=1, layers=model.state_layers)
    kept = model.new_cache(states, slots=1, capacity=CAPACITY)
    made = [int(model.prefill(torch.tensor([prompt]), kept).argmax())]
    while len(made) < tokens:
        made.append(int(model.decode(torch.tensor(made[-1:]), kept).argmax()))
    return made


def by_request(tokens: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for token in tokens:
        found[token.request].append(token.token)
    return dict(found)


def tokens_of(engine: Engine, asked: list[Request], padded: bool) -> dict[int, list[int]]:
    """Of each request; ``padded``, every step of theirs is followed by one in which all rows are padding."""
    tokens = []
    for token in engine.generate(asked):
        tokens.append(token)
        if padded and engine._rows:
            live = engine._live.clone()
            engine._live.fill_(-1)
            engine._steps[False].run(CAPACITY)
            engine._live.copy_(live)
    return by_request(tokens)
