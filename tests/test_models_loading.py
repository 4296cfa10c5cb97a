"""Folders that are not as their configuration says, each refused in one line; layouts that are read; random weights."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, tiny_model

from replayssm.kernels.torch import replay_step, stored_step
from replayssm.models import (
    Decoder,
    ModelError,
    ReplayStates,
    StoredStates,
    check_folder,
    config_from_geometry,
    load_model,
    random_model,
)
from replayssm.models.layers import masked_products, products
from replayssm.models.nemotron_h import NemotronH, NemotronHConfig
from replayssm.models.qwen3_5 import Qwen35

MODEL_CONFIGS = Path(__file__).parents[1] / "configs" / "model"
INDEX = "model.safetensors.index.json"


def geometry(name: str) -> dict[str, Any]:
    return yaml.safe_load((MODEL_CONFIGS / f"{name}.yaml").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``sharded`` is ``nemotron-mlp`` in several files."""
    names = ("nemotron-mlp", "nemotron-moe-latent", "qwen-mlp-tied", "qwen-moe-multimodal")
    folders = {name: tmp_path_factory.mktemp(name) for name in (*names, "sharded")}
    for name in names:
        tiny_model(name).save_pretrained(folders[name])
    tiny_model("nemotron-mlp").save_pretrained(folders["sharded"], max_shard_size="20KB")
    return folders


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy that may be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(saved[name], tmp_path / name))

    return copy


def change_config(folder: Path, **options: Any) -> None:
    """Change options of ``config.json``; None removes one."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | options
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=f"^{re.escape(str(caught.value))}$"):
        check_folder(folder)
    return str(caught.value)


def equal(a: Decoder, b: Decoder) -> bool:
    mine, other = dict(a.named_parameters()), dict(b.named_parameters())
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def test_shards_hold_the_same_model(saved: dict[str, Path]) -> None:
    assert len(list(saved["sharded"].glob("*.safetensors"))) > 2
    assert equal(load_model(saved["sharded"]), load_model(saved["nemotron-mlp"]))


def test_experts_are_read_in_one_tensor_or_apart(folder: Callable[[str], Path]) -> None:
    """Published folders hold a layer's experts in one tensor; transformers saves each apart."""
    apart = folder("qwen-moe-multimodal")
    model = load_model(apart)

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(4):
            experts = f"model.language_model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(8)])
                for part in ("gate", "up", "down")
            )
            tensors[f"{experts}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{experts}.down_proj"] = down

    change_tensors(apart, stack)
    assert equal(load_model(apart), model)


def test_older_spellings_are_read(folder: Callable[[str], Path]) -> None:
    other = folder("nemotron-mlp")
    model = load_model(other)
    older = {"hybrid_override_pattern": "M-M*-MM-", "attention_head_dim": 12, "mamba_d_conv": 4, "mamba_n_groups": 2}
    change_config(other, layers_block_type=None, head_dim=None, conv_kernel=None, n_groups=None, **older)
    assert equal(load_model(other), model)
    kinds = {"M": "mamba", "-": "mlp", "*": "attention"}
    change_config(other, layers_block_type=[kinds[letter] for letter in "M-M*-MM-"], hybrid_override_pattern=None)
    assert load_model(other).config == model.config


def test_weights_take_the_dtype_that_is_asked_for(saved: dict[str, Path]) -> None:
    model = load_model(saved["nemotron-moe-latent"])
    kept = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "D", "dt_bias", "e_score_correction_bias", "weight"}
    wide = [name for name, p in model.named_parameters() if p.dtype == torch.float32 and name.endswith("weight")]
    assert wide
    assert all(name.endswith("mixer.gate.weight") for name in wide)
    assert not any(p.requires_grad for p in model.parameters())


def test_draft_head_and_vision_tower_are_skipped_and_a_copied_head_is_read(folder: Callable[[str], Path]) -> None:
    tied = folder("qwen-mlp-tied")
    model = load_model(tied)
    change_tensors(
        tied,
        lambda tensors: tensors.update(
            {
                "mtp.fc.weight": torch.ones(3, 3),
                "model.visual.blocks.0.norm1.weight": torch.ones(3),
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
            }
        ),
    )
    assert equal(load_model(tied), model)
    change_tensors(tied, lambda tensors: tensors["lm_head.weight"].mul_(2))
    assert "lm_head.weight is not the embedding; accepted: tie_word_embeddings=false" in refusal(tied)
    change_tensors(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].char()}))
    assert "lm_head.weight has dtype I8; accepted: BF16, F16, F32, F64" in refusal(tied)


def test_what_is_no_folder_of_a_model_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    assert "absent is no folder; accepted: a folder with config.json" in refusal(tmp_path / "absent")
    model = folder("nemotron-mlp")
    assert "is no folder" in refusal(model / "config.json")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-10])
    assert re.search(r"model.safetensors cannot be read, truncated or no safetensors \(", refusal(model))
    (model / "model.safetensors").write_bytes(weights[:5])
    assert "truncated or no safetensors" in refusal(model)
    (model / "model.safetensors").unlink()
    assert "holds no weights; accepted: model.safetensors, or model.safetensors.index.json" in refusal(model)
    (model / "config.json").write_text("{")
    assert "config.json is no JSON" in refusal(model)
    (model / "config.json").write_text("[]")
    assert "config.json holds a list; accepted: a JSON object" in refusal(model)
    (model / "config.json").unlink()
    assert "config.json cannot be read (No such file or directory)" in refusal(model)


def test_shards_that_do_not_fit_their_index_are_refused(folder: Callable[[str], Path]) -> None:
    model = folder("sharded")
    index = json.loads((model / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    (model / INDEX).write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"lost.weight": shards[0]}}))
    assert f"lost.weight of {INDEX} in none of its shards" in refusal(model)
    (model / INDEX).write_text(json.dumps({"weight_map": [1]}))
    assert f"{INDEX} lacks weight_map" in refusal(model)
    (model / INDEX).write_text(json.dumps(index))
    (model / shards[1]).unlink()
    assert f"lacks {shards[1]}, a shard that {INDEX} lists" in refusal(model)


def test_tensors_that_do_not_fit_the_configuration_are_refused(folder: Callable[[str], Path]) -> None:
    model, name = folder("nemotron-mlp"), "backbone.layers.1.mixer.up_proj.weight"
    original = (model / "model.safetensors").read_bytes()
    for change, message in (
        (lambda t: t.pop(name), f"lacks {name}, which its config.json asks for"),
        (lambda t: [t.pop(n) for n in list(t) if "layers.3." in n], "backbone.layers.3.* and 4 more tensors, which"),
        (lambda t: t.update({"extra": torch.ones(1)}), "holds extra, which its config.json has no place for"),
        (lambda t: t.update({name: t[name].T}), f"{name} has shape [32, 40]; accepted: [40, 32]"),
        (
            lambda t: t.update({name: t[name].to(torch.uint8), f"{name}_scale": torch.ones(1)}),
            f"{name} has dtype U8; accepted: BF16, F16, F32, F64",
        ),
    ):
        change_tensors(model, change)
        assert re.search(re.escape(message).replace(r"\*", ".*"), refusal(model)), message
        (model / "model.safetensors").write_bytes(original)
    change_config(model, vocab_size=VOCABULARY + 1)
    assert "backbone.embeddings.weight has shape [61, 32]; accepted: [62, 32]" in refusal(model)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nemotron-mlp", {"model_type": "llama"}, "model_type='llama' is unknown; accepted: nemotron_h, qwen3_5, "),
        ("nemotron-mlp", {"model_type": None}, "model_type=None is unknown"),
        ("nemotron-mlp", {"quantization_config": {"quant_algo": "NVFP4"}}, "quantised weights (NVFP4), .* vLLM engine"),
        ("nemotron-mlp", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is unsupported; accepted: 'relu2'"),
        ("nemotron-mlp", {"attention_bias": True}, "attention_bias=True is unsupported; accepted: False"),
        ("nemotron-mlp", {"tie_word_embeddings": True}, "tie_word_embeddings=True is unsupported"),
        ("nemotron-mlp", {"sliding_window": 64}, "sliding_window=64 is unsupported; accepted: null"),
        ("nemotron-mlp", {"layers_block_type": ["mlp", "conv"]}, "layers_block_type=.*accepted: a list of linear_att"),
        (
            "nemotron-mlp",
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern='MX' is unsupported; accepted: a string of M * - E",
        ),
        ("nemotron-mlp", {"mamba_num_heads": None}, "mamba_num_heads is missing; accepted: an integer of at least 1"),
        ("nemotron-mlp", {"hidden_size": "32"}, "hidden_size='32' is unsupported"),
        ("nemotron-mlp", {"mamba_num_heads": 5}, "n_groups=2 is unsupported; accepted: a divisor of 5"),
        ("nemotron-mlp", {"num_key_value_heads": 3}, "num_key_value_heads=3 is unsupported; accepted: a divisor of 4"),
        ("nemotron-mlp", {"use_bias": 1}, "use_bias=1 is unsupported; accepted: true or false"),
        ("nemotron-mlp", {"layer_norm_epsilon": "x"}, "layer_norm_epsilon='x' is unsupported; accepted: a number"),
        (
            "nemotron-moe-latent",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok=9 is unsupported; accepted: at most 8",
        ),
        ("nemotron-moe-latent", {"n_group": 3}, "n_group=3 is unsupported; accepted: a divisor of the 8 experts"),
        ("nemotron-moe-latent", {"topk_group": 2}, "topk_group=2 is unsupported; accepted: at most n_group=1"),
        ("nemotron-moe-latent", {"n_shared_experts": 2}, "n_shared_experts=2 is unsupported; accepted: 1"),
        (
            "qwen-mlp-tied",
            {"linear_num_key_heads": 3},
            "linear_num_key_heads=3 is unsupported; accepted: a divisor of 4",
        ),
        ("qwen-mlp-tied", {"hidden_act": "gelu"}, "hidden_act='gelu' is unsupported; accepted: 'silu'"),
        ("qwen-mlp-tied", {"attn_output_gate": False}, "attn_output_gate=False is unsupported"),
        ("qwen-mlp-tied", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is unsupported"),
        ("qwen-mlp-tied", {"rope_scaling": {"factor": 4}}, "rope_scaling=.* is unsupported; accepted: null"),
        ("qwen-mlp-tied", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor=1.5 is unsup"),
        ("qwen-mlp-tied", {"num_hidden_layers": 5}, "num_hidden_layers=5 is unsupported; accepted: 4"),
        ("qwen-mlp-tied", {"tie_word_embeddings": False}, "lacks lm_head.weight"),
        ("qwen-moe-multimodal", {"tie_word_embeddings": True}, "tie_word_embeddings=True is unsupported; accepted: F"),
        ("qwen-moe-multimodal", {"text_config": 3}, "text_config=3 is unsupported; accepted: a mapping"),
        ("nemotron-mlp", {"model_type": ["qwen3_5"]}, "model_type=['qwen3_5'] is unknown; accepted: nemotron_h, qwen"),
        ("nemotron-mlp", {"layers_block_type": [["mamba"]]}, "layers_block_type=[['mamba']] is unsupported; accepted"),
    ],
)
def test_options_are_refused_by_name(
    folder: Callable[[str], Path], name: str, options: dict[str, Any], message: str
) -> None:
    model = folder(name)
    change_config(model, **options)
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), refusal(model))


def test_nvfp4_folders_are_refused_by_their_own_file(folder: Callable[[str], Path]) -> None:
    model = folder("nemotron-mlp")
    (model / "hf_quant_config.json").write_text("{}")
    assert "such as NVFP4; accepted: bf16, fp16 or fp32 weights; run quantised ones with the vLLM" in refusal(model)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("nemotron_3_nano_4b", 4),
        ("nemotron_3_nano_30b", 31.6),
        ("nemotron_3_super_120b", 120),
        ("qwen3_5_4b", 4.2),
        ("qwen3_5_35b", 35),
        ("qwen3_5_122b", 122),
        ("qwen3_5_397b", 397),
    ],
)
def test_named_geometries_have_as_many_weights_as_their_name_says(name: str, billions: float) -> None:
    """No geometry says how many weights it makes: a wrong block, or one that is missing, would show."""
    config = config_from_geometry(geometry(name))
    with torch.device("meta"):
        model = NemotronH(config) if isinstance(config, NemotronHConfig) else Qwen35(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.012)
    assert model.state_layers == geometry(name)["counts"]["ssm"]
    assert model.attention[0] == geometry(name)["counts"]["attention"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kimi_linear_48b", "model kimi_linear_48b is not implemented; accepted: Nemotron-3 and Qwen3.5 models"),
        ("qwen3_next_80b", "model qwen3_next_80b is not implemented"),
        ("nemotron_3_ultra_550b", "geometry of nemotron_3_ultra_550b: hybrid_override_pattern is missing"),
    ],
)
def test_geometries_that_make_no_model_are_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_geometry(geometry(name))


SMALLER = {
    "nemotron_3_super_120b": {
        "layers_block_type": ("linear_attention", "moe", "full_attention", "moe"),
        "vocab_size": 512,
        "hidden_size": 64,
        "n_routed_experts": 32,
        "moe_intermediate_size": 32,
        "moe_latent_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "mamba_num_heads": 8,
    },
    "qwen3_5_4b": {
        "layer_types": ("linear_attention",) * 3 + ("full_attention",),
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
    },
}


@pytest.mark.parametrize("name", SMALLER)
def test_random_weights_behave_as_trained_ones(name: str) -> None:
    """In the model's bf16: logits of one order and not all alike, decays in range, experts used evenly."""
    config = replace(config_from_geometry(geometry(name)), **SMALLER[name])
    model = random_model(config, seed=3)
    assert equal(model, random_model(config, seed=3))
    assert not equal(model, random_model(config, seed=4))
    assert all(p.isfinite().all() for p in model.parameters())
    for parameter, value in model.named_parameters():
        if parameter.endswith("A_log"):
            assert 0 <= float(value.min()) <= float(value.max()) <= math.log(16)
        elif parameter.endswith("dt_bias"):
            low, high = (1e-3, 1e-1) if model.geometry.family == "mamba2" else (1e-4, 1.0)
            steps = torch.nn.functional.softplus(value)
            assert 0.99 * low <= float(steps.min()) <= float(steps.max()) <= 1.01 * high

    chosen: list[torch.Tensor] = []
    for module_name, module in model.named_modules():
        if module_name.endswith("gate") and model.geometry.family == "mamba2":
            module.register_forward_hook(lambda module, inputs, out: chosen.append(out[0]))
    stored = StoredStates(model.geometry, stored_step, slots=2, layers=model.state_layers)
    replayed = ReplayStates(model.new_replay_cache(slots=2, interval_length=3), replay_step)
    caches = [model.new_cache(states, slots=2, capacity=136) for states in (stored, replayed)]
    tokens = torch.randint(512, (2, 136), generator=torch.Generator().manual_seed(0))
    logits, _ = (model.prefill(tokens[:, :128], cache, every=True) for cache in caches)
    assert logits.dtype == torch.float32
    assert 0.3 < float(logits.std()) < 3
    assert len(logits.argmax(-1).unique()) > 64
    assert len(chosen) == (4 if model.geometry.family == "mamba2" else 0)
    if chosen:
        shares = torch.bincount(torch.cat(chosen).flatten(), minlength=32) / (4 * 2 * 128 * 22)
        assert 0.2 / 32 < float(shares.min()) <= float(shares.max()) < 2 / 32
    for t in range(128, 136):
        a, b = (model.decode(tokens[:, t], cache) for cache in caches)
        assert float((a - b).norm() / a.norm()) < 0.02


def test_rows_take_their_own_matrix_where_the_host_does_not_know_whose_they_are() -> None:
    """The second matrix has no row, the last ends with them all."""
    generator = torch.Generator().manual_seed(0)
    rows, matrices = torch.randn(5, 4, generator=generator), torch.randn(3, 6, 4, generator=generator)
    end = torch.tensor([2, 2, 5])
    assert torch.equal(masked_products(rows, matrices, end), products(rows, matrices, end))
