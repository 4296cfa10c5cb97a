"""The recurrences against an oracle of other authors: the torch code of whole layers in Hugging Face transformers.

A layer of a tiny configuration gets random weights with every option on, and decodes a prompt (its chunked code) and
then token after token (its recurrent code), in float32. The same layer is written here around `step` in float64: its
projections and convolution, our gates and recurrence, its norm and gate. Outputs and states must agree to 2e-6, some
four times what its float32 leaves.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sequences import relative_error
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from replayssm.recurrence import gdn, kda, mamba2

SINGLE = 2e-6
ROWS, PROMPT, TOKENS, HIDDEN = 2, 7, 12, 24
LINEAR = ["linear_attention"]
FORGETTING, REMEMBERING = 23.0, -9.0
"""Biases of the step size: far above 20, where softplus is linear; and below every usual lower limit."""


def decode(layer: nn.Module, config: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``[B,N,hidden]`` of the layer itself, prompt at once and then token by token, and its last state."""
    cache = DynamicCache(config=config)
    outputs = [layer(hidden[:, :PROMPT], cache=cache)]
    outputs += [layer(hidden[:, t : t + 1], cache=cache) for t in range(PROMPT, hidden.shape[1])]
    return torch.cat(outputs, dim=1), cache.get_recurrent_state(0, state_idx=0)


def convolve(layer: nn.Module, channels: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU over ``[B,N,C]``, from an empty past."""
    padded = F.pad(channels.transpose(1, 2), (layer.conv1d.weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, layer.conv1d.weight, layer.conv1d.bias, groups=padded.shape[1])).transpose(1, 2)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def randomised(layer: nn.Module, seed: int) -> nn.Module:
    """Random weights, large enough that no term of the layer is lost, and none at a neutral value."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in layer.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.data = torch.log(1 + 15 * torch.rand(parameter.shape, generator=generator))
        elif name.endswith("dt_bias"):
            parameter.data = draw - 1
            parameter.data[:2] = torch.tensor([FORGETTING, REMEMBERING])
        else:
            parameter.data = (draw if parameter.dim() < 2 else 2 * draw / parameter[0].numel() ** 0.5).contiguous()
    return layer.eval().requires_grad_(False)


def hidden_states(seed: int) -> Tensor:
    return torch.randn(ROWS, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def mamba2_layer(layer: nn.Module, hidden: Tensor, prompt_limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """A Mamba-2 mixer in float64. The layers limit the step size in the prompt only; decoding has no limits."""
    layer, hidden = copy.deepcopy(layer).double(), hidden.double()
    heads, groups, width = layer.num_heads, layer.n_groups, layer.n_groups * layer.ssm_state_size
    z, channels, raw = layer.in_proj(hidden).split([layer.intermediate_size, layer.conv_dim, heads], dim=-1)
    x, B, C = convolve(layer, channels).split([layer.intermediate_size, width, width], dim=-1)
    x, z = (t.unflatten(-1, (heads, -1)) for t in (x, z))
    B, C = (t.unflatten(-1, (groups, -1)) for t in (B, C))
    A = -torch.exp(layer.A_log)
    state = torch.zeros(ROWS, heads, layer.head_dim, layer.ssm_state_size, dtype=torch.float64)
    outputs = []
    for t in range(TOKENS):
        limits = prompt_limits if t < PROMPT else (0.0, float("inf"))
        dt = mamba2.discretize(raw[:, t], layer.dt_bias, limits)
        y, state = mamba2.step(state, mamba2.Inputs(x[:, t], B[:, t], C[:, t], dt, A, layer.D, z[:, t]))
        # Gated, then normalised in groups of channels.
        normed = rms(y.reshape(ROWS, groups, -1), layer.norm.variance_epsilon).reshape(ROWS, -1)
        outputs.append(layer.out_proj(layer.norm.weight * normed))
    return torch.stack(outputs, dim=1), state


def test_nemotron_h() -> None:
    config = nemotron_h.NemotronHConfig(
        hidden_size=HIDDEN, layers_block_type=LINEAR, ssm_state_size=6, mamba_num_heads=6, mamba_head_dim=5, n_groups=2,
        chunk_size=4, use_bias=True, use_conv_bias=True, time_step_min=0.01, num_attention_heads=2, vocab_size=8,
    )  # fmt: skip
    layer = randomised(nemotron_h.NemotronHMamba2Mixer(config, layer_idx=0), seed=1)
    assert layer.time_step_limit == (0.01, float("inf"))
    check_mamba2(layer, config)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.05, 0.5)])
def test_mamba2(limits: tuple[float, float]) -> None:
    config = modeling_mamba2.Mamba2Config(
        hidden_size=HIDDEN, num_heads=8, head_dim=6, expand=2, state_size=5, n_groups=4, chunk_size=4, use_bias=True,
        use_conv_bias=True, time_step_limit=limits, num_hidden_layers=1, vocab_size=8,
    )  # fmt: skip
    layer = randomised(modeling_mamba2.Mamba2Mixer(config, layer_idx=0), seed=2)
    assert tuple(layer.time_step_limit) == limits
    check_mamba2(layer, config)


def check_mamba2(layer: nn.Module, config: Any) -> None:
    hidden = hidden_states(3)
    outputs, state = decode(layer, config, hidden)
    ours, our_state = mamba2_layer(layer, hidden, layer.time_step_limit)
    assert relative_error(outputs, ours) <= SINGLE
    assert relative_error(state, our_state) <= SINGLE
    if layer.time_step_limit[0] > 0:
        assert relative_error(mamba2_layer(layer, hidden, (0.0, float("inf")))[0], ours) > 1e-3, "the limits matter"


def test_selective_state_update() -> None:
    """The one-token function that the Mamba layers call, with the gate z that they apply elsewhere."""
    generator = torch.Generator().manual_seed(4)
    H, G, P, N = 6, 3, 5, 4
    state, x, z = (torch.randn(2, H, P, *n, generator=generator) for n in ((N,), (), ()))
    B, C = (torch.randn(2, G, N, generator=generator) for _ in range(2))
    raw, A, D = (
        torch.randn(2, H, generator=generator),
        -torch.rand(H, generator=generator),
        torch.randn(H, generator=generator),
    )
    bias = torch.tensor([FORGETTING, REMEMBERING, 0.0, 1.0, -1.0, 2.0])
    theirs = state.clone()
    output = nemotron_h.mamba2_selective_state_update(
        theirs, x, raw[..., None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N), B, C,
        D=D[:, None].expand(-1, P), z=z, dt_bias=bias[:, None].expand(-1, P), dt_softplus=True,
    )  # fmt: skip
    wide = [t.double() for t in (x, B, C, mamba2.discretize(raw.double(), bias), A, D, z)]
    ours, our_state = mamba2.step(state.double(), mamba2.Inputs(*wide))
    assert relative_error(output, ours) <= SINGLE
    assert relative_error(theirs, our_state) <= SINGLE


def delta_layer(module: Any, qkv: tuple[Tensor, ...], gates: Any, finish: Any) -> tuple[Tensor, Tensor]:
    """GDN or KDA from ``q, k, v [B,N,heads,...]``: outputs ``[B,N,hidden]`` and the last state ``[B,H,V,K]``.

    ``gates(t)`` gives g and beta; ``finish(o, t)`` is norm, gate and output projection.
    """
    q, k, v = qkv
    state, outputs = torch.zeros(ROWS, *v.shape[2:], q.shape[-1], dtype=torch.float64), []
    for t in range(TOKENS):
        o, state = module.step(state, gdn.Inputs(q[:, t], k[:, t], v[:, t], *gates(t)))
        outputs.append(finish(o, t))
    return torch.stack(outputs, dim=1), state


GDN_SIZES = {
    "hidden_size": HIDDEN, "num_hidden_layers": 1, "layer_types": LINEAR, "linear_num_value_heads": 6,
    "linear_num_key_heads": 3, "linear_key_head_dim": 4, "linear_value_head_dim": 5, "vocab_size": 8,
}  # fmt: skip


def gdn_layer(layer: nn.Module, channels: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Any:
    z = z.reshape(ROWS, TOKENS, layer.num_v_heads, layer.head_v_dim)

    def finish(o: Tensor, t: int) -> Tensor:
        # Normalised, then gated.
        normed = layer.norm.weight * rms(o, layer.norm.variance_epsilon)
        return layer.out_proj((normed * F.silu(z[:, t])).flatten(1))

    def gates(t: int) -> tuple[Tensor, Tensor]:
        return gdn.gates(a[:, t], b[:, t], layer.A_log, layer.dt_bias)

    mixed = convolve(layer, channels).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    heads = (layer.num_k_heads, layer.num_k_heads, layer.num_v_heads)
    return delta_layer(gdn, tuple(t.unflatten(-1, (h, -1)) for t, h in zip(mixed, heads, strict=True)), gates, finish)


def test_qwen3_5() -> None:
    config = qwen3_5.Qwen3_5TextConfig(**GDN_SIZES)
    layer = randomised(qwen3_5.Qwen3_5GatedDeltaNet(config, layer_idx=0), seed=5)
    layer.in_proj_qkv.weight.data[:16] *= 1e-3  # norms near the root of epsilon
    hidden = hidden_states(6)
    wide, h = copy.deepcopy(layer).double(), hidden.double()
    ours = gdn_layer(wide, wide.in_proj_qkv(h), wide.in_proj_z(h), wide.in_proj_b(h), wide.in_proj_a(h))
    _agree(decode(layer, config, hidden), ours)


def test_qwen3_next() -> None:
    config = qwen3_next.Qwen3NextConfig(**GDN_SIZES, num_experts=0)
    layer = randomised(qwen3_next.Qwen3NextGatedDeltaNet(config, layer_idx=0), seed=7)
    hidden = hidden_states(14)
    wide, h = copy.deepcopy(layer).double(), hidden.double()
    q, k, v, z, b, a = wide.fix_query_key_value_ordering(wide.in_proj_qkvz(h), wide.in_proj_ba(h))
    ours = gdn_layer(wide, torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1), z, b, a)
    _agree(decode(layer, config, hidden), ours)


def test_kimi_linear() -> None:
    config = kimi_linear.KimiLinearConfig(
        hidden_size=HIDDEN, num_hidden_layers=1, layer_types=LINEAR, linear_num_heads=3, linear_head_dim=5, vocab_size=8
    )
    layer = randomised(kimi_linear.KimiLinearDeltaAttention(config, layer_idx=0), seed=9)
    layer.q_proj.weight.data[:5] *= 1e-3
    hidden = hidden_states(10)
    wide, h = copy.deepcopy(layer).double(), hidden.double()
    forget, b = wide.forget_gate.f_b_proj(wide.forget_gate.f_a_proj(h)), wide.b_proj(h)
    gate = wide.g_b_proj(wide.g_a_proj(h)).unflatten(-1, (3, 5))
    A_log, bias = wide.forget_gate.A_log.flatten(), wide.forget_gate.dt_bias.view(3, 5)

    def finish(o: Tensor, t: int) -> Tensor:
        normed = wide.o_norm.weight * rms(o, wide.o_norm.variance_epsilon)
        return wide.o_proj((normed * torch.sigmoid(gate[:, t])).flatten(1))

    def gates(t: int) -> tuple[Tensor, Tensor]:
        return kda.gates(forget[:, t].unflatten(-1, (3, 5)), b[:, t], A_log, bias)

    channels = torch.cat([wide.q_proj(h), wide.k_proj(h), wide.v_proj(h)], dim=-1)
    qkv = convolve(wide, channels).unflatten(-1, (9, 5)).split(3, dim=2)
    _agree(decode(layer, config, hidden), delta_layer(kda, qkv, gates, finish))


def _agree(theirs: tuple[Tensor, Tensor], ours: tuple[Tensor, Tensor]) -> None:
    assert relative_error(theirs[0], ours[0]) <= SINGLE
    # Their state is [K,V], ours is [V,K].
    assert relative_error(theirs[1].transpose(-1, -2), ours[1]) <= SINGLE


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_gate(lower_bound: float | None) -> None:
    """GLM-5.3-Flash has Kimi's gate and the bounded one."""
    sizes = SimpleNamespace(linear_head_dim=5, linear_num_heads=3, hidden_size=HIDDEN, linear_lower_bound=lower_bound)
    gate = randomised(glm5_next.Glm5NextTextForgetGate(sizes), seed=11)
    hidden, b = hidden_states(12), torch.zeros(ROWS * TOKENS, 3)
    theirs = gate(hidden).flatten(0, 1)
    raw = gate.f_b_proj(gate.f_a_proj(hidden)).flatten(0, 1).unflatten(-1, (3, 5))
    ours, _ = kda.gates(raw.double(), b, gate.A_log, gate.dt_bias.view(3, 5), lower_bound)
    assert relative_error(theirs, ours) <= SINGLE
    assert (ours < 0).all()
    assert ours.min() < -5 if lower_bound is None else ours.min() >= -5


@pytest.mark.parametrize("kernel", ["gdn", "kda"])
@pytest.mark.parametrize("tiny", [False, True])
def test_delta_rule(kernel: str, tiny: bool) -> None:
    """The recurrent functions that the layers call, from a state that is not zero; ``tiny`` makes epsilon matter."""
    generator = torch.Generator().manual_seed(13)
    heads, K, V, N = 4, 6, 5, 9
    keys = 2 if kernel == "gdn" else heads
    q, k = (torch.randn(2, N, keys, K, generator=generator) * (1e-3 if tiny else 1.0) for _ in range(2))
    k[:, 3] = 0.0
    k[:, 5] = k[:, 4]
    v, state = torch.randn(2, N, heads, V, generator=generator), torch.randn(2, heads, K, V, generator=generator)
    g = -torch.rand(2, N, heads, *(() if kernel == "gdn" else (K,)), generator=generator) * 3
    beta = 2 * torch.rand(2, N, heads, generator=generator)
    beta[:, 6], beta[:, 7] = 0.0, 1.0
    function = (
        qwen3_5.torch_recurrent_gated_delta_rule if kernel == "gdn" else kimi_linear.recurrent_kimi_delta_attention
    )
    theirs, their_state = function(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    module, ours, outputs = gdn if kernel == "gdn" else kda, state.double().transpose(-1, -2), []
    for t in range(N):
        o, ours = module.step(ours, gdn.Inputs(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t]))
        outputs.append(o)
    assert relative_error(theirs, torch.stack(outputs, dim=1)) <= SINGLE
    assert relative_error(their_state.transpose(-1, -2), ours) <= SINGLE
