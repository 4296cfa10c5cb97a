"""What a whole model's step does beside its states: the matrix products alone, and the bytes that are moved between
them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from experiments.decode_case import DecodeCase
from experiments.measure import devices
from replayssm.models import Decoder


def products(model: Decoder, rows: int) -> devices.Run:
    """All matrix products of one step but those of routed experts, one after the other: the step's own floor, with
    weights that no cache holds."""
    embedding = model.embedding
    matrices = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    if getattr(model.config, "tie_word_embeddings", False):
        matrices.append(embedding)
    widths = {matrix.shape[1] for matrix in matrices}
    inputs = {width: torch.randn(rows, width, dtype=embedding.dtype, device=embedding.device) for width in widths}

    def run() -> None:
        for matrix in matrices:
            F.linear(inputs[matrix.shape[1]], matrix)

    run()
    return run


def bytes_between(case: DecodeCase, model: Decoder) -> int:
    """What a step moves beside its states and products: the convolutions' memory, read and written; keys and values,
    at the mean length of what is timed; the outputs and inputs of products, which what lies between them reads and
    writes."""
    layers, heads, size = model.attention
    element, rows = model.embedding.element_size(), case.batch_size
    conv = 2 * model.state_layers * rows * model.conv[0] * (model.conv[1] - 1) * element
    length = case.context + case.interval_length + case.steps // 2
    keys_values = 2 * layers * rows * heads * size * length * element
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return conv + keys_values + rows * element * sum(m.in_features + m.out_features for m in linears)
