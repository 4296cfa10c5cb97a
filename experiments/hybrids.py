"""The small hybrids' training forward: chunked, with a carried state, on the parameters of transformers' own classes.

`build("nemotron-h")` and `build("qwen3.5")` make a `Hybrid`: transformers' causal language model (so that the saved
folder loads there) and a one-layer MTP head under the checkpoint's own names. `Hybrid.trunk` computes what the class'
`forward` does, but as matrix products over chunks: transformers' fallback walks the chunks of the gated delta rule one
by one in Python, which at 131,072 tokens is 2,048 steps a layer; here the chunks' affine maps are composed in a tree.
It also takes and returns the recurrent states, and can mask attention beyond a window. Tests hold the logits against
transformers'.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from experiments.assets import vocabulary

MODELS = ("nemotron-h", "qwen3.5")
SIZES = ("tiny", "smoke")
State = tuple[Tensor, Tensor]
"""One layer's memory: the last three inputs of the convolution [B, 3, channels], and the recurrent state, float32:
Mamba-2 [B, H, P, N], GDN [B, H, K, V]."""


def nemotron_config(size: str) -> NemotronHConfig:
    tiny = size == "tiny"
    return NemotronHConfig(
        vocab_size=vocabulary.SIZE,
        hidden_size=192 if tiny else 32,
        hybrid_override_pattern="M-M-M*-M-" if tiny else "M-*M",
        mamba_num_heads=6 if tiny else 2,
        mamba_head_dim=64 if tiny else 16,
        ssm_state_size=128 if tiny else 16,
        n_groups=1,
        intermediate_size=320 if tiny else 32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64 if tiny else 16,
        max_position_embeddings=131072,
        time_step_min=1e-6,  # transformers clamps dt to it in prefill but not in decoding: so low that neither can tell
        num_nextn_predict_layers=1,
        mtp_hybrid_override_pattern="*-",
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,  # a padding row would get no gradient, and the end of text is a token like any other
    )


def qwen_config(size: str) -> Qwen3_5TextConfig:
    tiny = size == "tiny"
    layers = ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2
    return Qwen3_5TextConfig(
        vocab_size=vocabulary.SIZE,
        hidden_size=192 if tiny else 32,
        num_hidden_layers=6 if tiny else 3,
        layer_types=layers if tiny else layers[2:5],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128 if tiny else 16,
        linear_value_head_dim=128 if tiny else 16,
        intermediate_size=224 if tiny else 32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64 if tiny else 16,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        mtp_num_hidden_layers=1,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


class NemotronMTP(nn.Module):
    """Two sublayers as the checkpoint has them: projection and attention, then MLP and the last norm."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        attention, mlp = nn.Module(), nn.Module()
        for name in ("enorm", "hnorm", "norm"):
            setattr(attention, name, nemotron.NemotronHRMSNorm(config.hidden_size, config.layer_norm_epsilon))
        attention.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        attention.mixer = nemotron.NemotronHAttention(config, config.layers_block_type.index("full_attention"))
        for name in ("norm", "final_layernorm"):
            setattr(mlp, name, nemotron.NemotronHRMSNorm(config.hidden_size, config.layer_norm_epsilon))
        mlp.mixer = nemotron.NemotronHMLP(config)
        self.layers = nn.ModuleList([attention, mlp])

    def forward(self, hidden: Tensor, embedded: Tensor, window: int | None) -> Tensor:
        first, second = self.layers
        x = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], -1))
        x = x + nemotron_attention(first.mixer, first.norm(x), window)
        return second.final_layernorm(x + second.mixer(second.norm(x)))


class QwenMTP(nn.Module):
    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm = qwen.Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, embedded: Tensor, window: int | None) -> Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        return self.norm(qwen_block(self.layers[0], x, None, window)[0])


class Hybrid(nn.Module):
    """A causal language model of transformers and its MTP head."""

    def __init__(self, model: nn.Module, mtp: nn.Module) -> None:
        super().__init__()
        self.model, self.mtp = model, mtp
        self.is_nemotron = isinstance(mtp, NemotronMTP)

    def trunk(self, tokens: Tensor, states: list[State | None] | None = None, window: int | None = None):
        """Hidden states after the last norm, and the states after the last token.

        tokens int64 [B, T] -> [B, T, D], a state a layer (None for layers that have none). Attention sees this call's
        tokens alone, and of them the last `window` where one is given.
        """
        body = self.model.model
        x = self.model.get_input_embeddings()(tokens)
        states = states or [None] * len(body.layers)
        after = []
        for layer, state in zip(body.layers, states, strict=True):
            x, state = (nemotron_block if self.is_nemotron else qwen_block)(layer, x, state, window)
            after.append(state)
        return (body.norm_f if self.is_nemotron else body.norm)(x), after

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)

    def ahead(self, hidden: Tensor, following: Tensor, window: int | None = None) -> Tensor:
        """The MTP head's hidden states: at t it foretells t + 2, from the trunk's at t and the token at t + 1."""
        return self.mtp(hidden, self.model.get_input_embeddings()(following), window)


def build(name: str, size: str = "tiny", seed: int = 0) -> Hybrid:
    """A freshly initialised model in float32 on the CPU; the same seed gives the same weights."""
    torch.manual_seed(seed)
    if name == "nemotron-h":
        config = nemotron_config(size)
        hybrid = Hybrid(NemotronHForCausalLM(config), NemotronMTP(config))
    elif name == "qwen3.5":
        config = qwen_config(size)
        hybrid = Hybrid(qwen.Qwen3_5ForCausalLM(config), QwenMTP(config))
    else:
        raise ValueError(f"model is {name!r}; accepted: {', '.join(MODELS)}")
    depth = 2 * config.num_hidden_layers
    with torch.no_grad():
        for key, weight in hybrid.named_parameters():
            if key.endswith(("embeddings.weight", "embed_tokens.weight", "lm_head.weight")):
                weight.normal_(std=0.02)
            elif weight.ndim == 2:
                residual = key.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
                weight.normal_(std=(weight.shape[1] * (depth if residual else 1)) ** -0.5)
        recurrent = [module for module in hybrid.modules() if hasattr(module, "A_log")]
        spread = torch.linspace(0, 1, sum(module.A_log.numel() for module in recurrent))
        for module, at in zip(recurrent, spread.split([module.A_log.numel() for module in recurrent]), strict=True):
            # Memories of 16 to 4,096 tokens: dt = 0.02 (softplus of dt_bias), A = 1 / (dt x length).
            dt, length = 0.02, 16 * 256**at
            module.dt_bias.fill_(math.log(math.expm1(dt)))
            module.A_log.copy_(-torch.log(dt * length))
    return hybrid


def save(hybrid: Hybrid, folder: Path) -> None:
    """`config.json` and `model.safetensors`: the weights in bfloat16, under the names of real checkpoints."""
    tensors = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in _shipped(hybrid).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = hybrid.model.config
    config.architectures, config.dtype = [type(hybrid.model).__name__], "bfloat16"
    config.save_pretrained(folder)


def load(folder: Path) -> tuple[Hybrid, int]:
    """A saved model with its weights in float32, and its seed; `training.json` there says which model it is."""
    run = json.loads((folder / "training.json").read_text())
    hybrid = build(run["model"], run["size"], run["seed"])
    with safe_open(folder / "model.safetensors", "pt") as file, torch.no_grad():
        for name, tensor in _shipped(hybrid).items():
            tensor.copy_(file.get_tensor(name))
    return hybrid, run["seed"]


def _shipped(hybrid: Hybrid) -> dict[str, Tensor]:
    """Each tensor that a folder holds, by its name there."""
    tensors = {f"mtp.{name}": tensor for name, tensor in hybrid.mtp.state_dict().items()}
    for name, tensor in hybrid.model.state_dict().items():
        if hybrid.is_nemotron:
            name = name.replace("model.", "backbone.", 1)
        if name != "lm_head.weight" or not hybrid.model.config.tie_word_embeddings:
            tensors[name] = tensor
    return tensors


def nemotron_block(block: nn.Module, x: Tensor, state: State | None, window: int | None):
    normed = block.norm(x)
    if isinstance(block.mixer, nemotron.NemotronHMamba2Mixer):
        mixed, state = mamba2(block.mixer, normed, state)
    elif isinstance(block.mixer, nemotron.NemotronHAttention):
        mixed = nemotron_attention(block.mixer, normed, window)
    else:
        mixed = block.mixer(normed)
    return x + mixed, state


def qwen_block(block: nn.Module, x: Tensor, state: State | None, window: int | None):
    normed = block.input_layernorm(x)
    if hasattr(block, "linear_attn"):
        mixed, state = gated_delta_net(block.linear_attn, normed, state)
    else:
        mixed = qwen_attention(block.self_attn, normed, window)
    x = x + mixed
    return x + block.mlp(block.post_attention_layernorm(x)), state


def mamba2(mixer: nn.Module, x: Tensor, state: State | None) -> tuple[Tensor, State]:
    batch, length, _ = x.shape
    inner, n = mixer.intermediate_size, mixer.ssm_state_size
    gate, mixed, dt = mixer.in_proj(x).split([inner, mixer.conv_dim, mixer.num_heads], -1)
    mixed, tail = convolve(mixed, mixer.conv1d, None if state is None else state[0])
    values, b, c = mixed.float().split([inner, n, n], -1)
    dt = F.softplus(dt.float() + mixer.dt_bias).clamp(min=mixer.time_step_limit[0])
    with torch.autocast(x.device.type, enabled=False):
        values = values.reshape(batch, length, mixer.num_heads, mixer.head_dim)
        y, last = scan_mamba2(values, dt, -mixer.A_log.float().exp(), b, c, None if state is None else state[1])
        y = (y + mixer.D[:, None] * values).reshape(batch, length, inner)
    return mixer.out_proj(mixer.norm(y, gate)), (tail, last)


def gated_delta_net(mixer: nn.Module, x: Tensor, state: State | None) -> tuple[Tensor, State]:
    batch, length, _ = x.shape
    mixed, tail = convolve(mixer.in_proj_qkv(x), mixer.conv1d, None if state is None else state[0])
    q, k, v = mixed.float().split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    repeats = mixer.num_v_heads // mixer.num_k_heads
    q, k = (t.reshape(batch, length, -1, mixer.head_k_dim).repeat_interleave(repeats, 2) for t in (q, k))
    v = v.reshape(batch, length, -1, mixer.head_v_dim)
    beta = mixer.in_proj_b(x).sigmoid().float()
    g = -mixer.A_log.float().exp() * F.softplus(mixer.in_proj_a(x).float() + mixer.dt_bias)
    with torch.autocast(x.device.type, enabled=False):
        y, last = scan_delta(q, k, v, g, beta, None if state is None else state[1])
    z = mixer.in_proj_z(x).reshape(batch, length, -1, mixer.head_v_dim)
    return mixer.out_proj(mixer.norm(y, z).reshape(batch, length, -1)), (tail, last)


def convolve(x: Tensor, conv: nn.Conv1d, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution and SiLU. x [B, T, C] -> the same, and its last three inputs."""
    taps = conv.weight.shape[-1]
    tail = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if tail is None else tail.to(x.dtype)
    joined = torch.cat([tail, x], 1)
    weight = conv.weight[:, 0].to(x.dtype)
    y = sum(weight[:, tap] * joined[:, tap : tap + x.shape[1]] for tap in range(taps))
    return F.silu(y if conv.bias is None else y + conv.bias.to(x.dtype)), joined[:, -(taps - 1) :]


def chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, T / size, size, ...], padded with zeros at the end."""
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size)).movedim(3, 1)


def decays(cumulative: Tensor) -> Tensor:
    """exp(c_i - c_j) for i >= j, else 0. [..., C] -> [..., C, C]."""
    difference = cumulative[..., :, None] - cumulative[..., None, :]
    future = torch.ones_like(difference[(0,) * (difference.ndim - 2)], dtype=torch.bool).triu(1)
    return difference.masked_fill(future, -torch.inf).exp()


def scan_mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, size: int = 128):
    """x [B,T,H,P], dt [B,T,H], a [H], b c [B,T,N], state [B,H,P,N], float32 -> y [B,T,H,P], the last state."""
    length = x.shape[1]
    cumulative = chunks(dt * a, size).cumsum(-1)  # [B,H,n,C]
    x = chunks(x * dt[..., None], size)
    b, c = (chunks(t[:, :, None], size) for t in (b, c))  # [B,1,n,C,N]
    within = (c @ b.mT * decays(cumulative)) @ x
    added = (x * (cumulative[..., -1:] - cumulative).exp()[..., None]).mT @ b  # [B,H,n,P,N]
    state = torch.zeros_like(added[:, :, 0]) if state is None else state
    across = decays(F.pad(cumulative[..., -1], (1, 0)).cumsum(-1))  # [B,H,n+1,n+1]
    states = across @ torch.cat([state[:, :, None], added], 2).flatten(3)
    states = states.unflatten(3, added.shape[3:])
    y = within + cumulative.exp()[..., None] * (c @ states[:, :, :-1].mT)
    return y.movedim(1, 3).flatten(1, 2)[:, :length], states[:, :, -1]


def scan_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, size: int = 64):
    """q k [B,T,H,K], v [B,T,H,V], g beta [B,T,H], state [B,H,K,V], float32 -> y [B,T,H,V], the last state."""
    length, scale = q.shape[1], q.shape[-1] ** -0.5
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k, v, cumulative, beta = (chunks(t, size) for t in (q * scale, k, v, g, beta[..., None]))
    cumulative = cumulative.cumsum(-1)
    decay, gain = decays(cumulative), cumulative.exp()[..., None]
    system = (k * beta) @ k.mT * decay  # its diagonal counts as ones below
    solved = torch.cat([v * beta, k * beta * gain], -1)
    solved = torch.linalg.solve_triangular(system, solved, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    kept = (k * (cumulative[..., -1:] - cumulative).exp()[..., None]).mT  # [B,H,n,K,C]
    identity = torch.eye(k.shape[-1], device=k.device)
    maps = cumulative[..., -1, None, None].exp() * identity - kept @ w, kept @ u
    state = torch.zeros_like(maps[1][:, :, 0]) if state is None else state
    before = compose(*maps, state)
    y = (q @ k.mT * decay) @ (u - w @ before) + (q * gain) @ before
    last = maps[0][:, :, -1] @ before[:, :, -1] + maps[1][:, :, -1]
    return y.movedim(1, 3).flatten(1, 2)[:, :length], last


def compose(m: Tensor, n: Tensor, state: Tensor) -> Tensor:
    """States before each of the maps S -> m S + n, by halves. m [B,H,c,K,K], n [B,H,c,K,V], state [B,H,K,V]."""
    count = m.shape[2]
    if count == 1:
        return state[:, :, None]
    even_m, even_n = m[:, :, 0 : count - 1 : 2], n[:, :, 0 : count - 1 : 2]
    odd_m, odd_n = m[:, :, 1::2], n[:, :, 1::2]
    pair_m, pair_n = odd_m @ even_m, odd_m @ even_n + odd_n
    if count % 2:  # the last map has no partner, and only the state before it is wanted
        pair_m, pair_n = torch.cat([pair_m, m[:, :, -1:]], 2), torch.cat([pair_n, n[:, :, -1:]], 2)
    even = compose(pair_m, pair_n, state)
    odd = even_m @ even[:, :, : count // 2] + even_n
    joined = torch.stack([even[:, :, : count // 2], odd], 3).flatten(2, 3)
    return torch.cat([joined, even[:, :, -1:]], 2) if count % 2 else joined


def nemotron_attention(mixer: nn.Module, x: Tensor, window: int | None) -> Tensor:
    q, k, v = (heads(project(x), mixer.head_dim) for project in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    return mixer.o_proj(attend(q, k, v, window))


def qwen_attention(mixer: nn.Module, x: Tensor, window: int | None) -> Tensor:
    q, gate = heads(mixer.q_proj(x), 2 * mixer.head_dim).chunk(2, -1)
    k, v = heads(mixer.k_proj(x), mixer.head_dim), heads(mixer.v_proj(x), mixer.head_dim)
    q, k = (rotate(t, mixer.config) for t in (mixer.q_norm(q), mixer.k_norm(k)))
    gate = gate.transpose(1, 2).flatten(2)
    return mixer.o_proj(attend(q, k, v, window) * gate.sigmoid())


def heads(x: Tensor, dim: int) -> Tensor:
    """[B, T, H dim] -> [B, H, T, dim]."""
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


def rotate(x: Tensor, config: Qwen3_5TextConfig) -> Tensor:
    """Rotary position embedding of the first quarter of each head, positions from 0. x [B, H, T, dim]."""
    dim = int(x.shape[-1] * config.rope_parameters["partial_rotary_factor"])
    exponent = torch.arange(0, dim, 2, device=x.device) / dim
    angle = torch.arange(x.shape[2], device=x.device)[:, None] * config.rope_parameters["rope_theta"] ** -exponent
    cos, sin = (f(angle).to(x.dtype) for f in (torch.cos, torch.sin))
    first, second, rest = x.split([dim // 2, dim // 2, x.shape[-1] - dim], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention, to the last `window` tokens where one is given.

    q [B, H, T, d], k v the same with fewer heads -> [B, T, H d].
    """
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if window is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        length = q.shape[2]
        q, k, v = (F.pad(t, (0, 0, 0, -length % window)).unflatten(2, (-1, window)) for t in (q, k, v))
        k, v = (torch.cat([F.pad(t[:, :, :-1], (0, 0, 0, 0, 1, 0)), t], 3) for t in (k, v))
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
        age = torch.arange(window, device=q.device)[:, None] - torch.arange(2 * window, device=q.device) + window
        hidden = (age < 0) | (age >= window)
        absent = torch.arange(scores.shape[2], device=q.device)[:, None, None] == 0
        hidden = hidden | (absent & (torch.arange(2 * window, device=q.device) < window))
        y = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ v
        y = y.flatten(2, 3)[:, :, :length]
    return y.transpose(1, 2).flatten(2)
