"""Models from an ordinary Hugging Face folder, or with random weights at a given geometry.

A folder holds ``config.json`` and ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists. All
names and shapes are checked before a tensor is read. Tokenizers are the caller's matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replayssm.models.decoder import Decoder, draw_steps
from replayssm.models.layers import RMSNorm, join
from replayssm.models.mtp import draft_head
from replayssm.models.nemotron_h import NemotronH, NemotronHConfig
from replayssm.models.options import ModelError, Options
from replayssm.models.qwen3_5 import Qwen35, Qwen35Config

CONFIGS: dict[str, type[NemotronHConfig] | type[Qwen35Config]] = {
    "nemotron_h": NemotronHConfig,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), Qwen35Config),
}
"""By ``model_type``."""
FLOATS = ("BF16", "F16", "F32", "F64")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD = "lm_head.weight"
Config = NemotronHConfig | Qwen35Config


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    head: bool = False,
) -> Decoder:
    """The model in ``folder``, its weights in ``dtype``, with its draft ``head`` where that is asked for. Raises
    `ModelError`, one line, on anything that is not as the configuration says."""
    folder = Path(folder)
    model = empty_model(config_from_folder(folder), dtype, device, head)
    with ExitStack() as stack:
        found = _found(folder, stack)
        tensors = _fitting(model, found, folder)
        with torch.no_grad():
            for name, target in tensors.items():
                target.copy_(found[name].get_tensor(name))
    return model


def check_folder(folder: str | Path, head: bool = False) -> Config:
    """The configuration of the model in ``folder``, whose names, dtypes and shapes of tensors are as `load_model` needs
    them. Raises `ModelError` as it does, but reads no tensor, other than a head beside tied embeddings and these."""
    folder = Path(folder)
    config = config_from_folder(folder)
    with ExitStack() as stack:
        _fitting(empty_model(config, device="meta", head=head), _found(folder, stack), folder)
    return config


def random_model(
    config: Config,
    *,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    head: bool = False,
) -> Decoder:
    """A model of random weights that behaves as a trained one: matrices that keep a unit variance, so that routers have
    logits around one; decays and steps in the ranges of trained layers. The same on every device of one kind."""
    model = empty_model(config, dtype, device, head)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for module_name, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                _draw(f"{module_name}.{name}", module, parameter, model.geometry.family, generator)
    return model


def config_from_geometry(model: Mapping[str, Any]) -> Config:
    """The configuration of a model named in ``configs/model/``: its mapping, as loaded from the file.

    To run fewer layers, ``dataclasses.replace`` its layer list. Raises `ModelError` where the geometry lacks a size or
    is of a model that is not implemented.
    """
    name = str(model.get("name"))
    if model.get("family") == "mamba2" and name.startswith("nemotron_3"):
        return NemotronHConfig.from_geometry(model, f"geometry of {name}")
    if model.get("family") == "gdn" and name.startswith("qwen3_5"):
        return Qwen35Config.from_geometry(model, f"geometry of {name}")
    raise ModelError(f"model {name} is not implemented; accepted: Nemotron-3 and Qwen3.5 models")


def empty_model(
    config: Config, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", head: bool = False
) -> Decoder:
    """A model whose parameters have memory and no values; with ``device="meta"`` no memory either. ``head``: with its
    draft head."""
    with torch.device("meta"):
        model: Decoder = NemotronH(config) if isinstance(config, NemotronHConfig) else Qwen35(config)
        if head:
            model.mtp = draft_head(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, torch.nn.Parameter(parameter.to(dtype), requires_grad=False))
    for name, parameter in list(model.named_parameters()):
        if any(name.endswith(f".{kept}") for kept in model.float32) and dtype != torch.float64:
            owner, _, last = name.rpartition(".")
            kept_wide = torch.nn.Parameter(parameter.to(torch.float32), requires_grad=False)
            model.get_submodule(owner).register_parameter(last, kept_wide)
    model.to_empty(device=device)
    for module in model.modules():
        for names in getattr(module, "joined", ()):
            join(module, *names)
    return model


def config_from_folder(folder: str | Path) -> Config:
    """The configuration of the model in ``folder``. Raises `ModelError` where it is not as `load_model` needs it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; accepted: a folder with config.json and safetensors")
    values = _json(folder / "config.json")
    quantised = values.get("quantization_config") or (folder / "hf_quant_config.json").is_file()
    if quantised:
        method = quantised.get("quant_algo") or quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ModelError(
            f"{folder} holds quantised weights ({method or 'hf_quant_config.json'}), such as NVFP4; accepted: bf16, "
            "fp16 or fp32 weights; run quantised ones with the vLLM engine"
        )
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise ModelError(f"{folder / 'config.json'}: model_type={kind!r} is unknown; accepted: {', '.join(CONFIGS)}")
    return CONFIGS[kind].from_options(Options(values, str(folder / "config.json")))


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}); accepted: a Hugging Face folder") from None
    except ValueError as error:
        raise ModelError(f"{file} is no JSON ({error})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds a {type(values).__name__}; accepted: a JSON object")
    return values


def _found(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor of the folder."""
    if (folder / INDEX).is_file():
        listed = _json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
            raise ModelError(f"{folder / INDEX} lacks weight_map; accepted: an object of tensor and file names")
        shards = sorted(set(listed.values()))
        for shard in shards:
            if not (folder / shard).is_file():
                raise ModelError(f"{folder} lacks {shard}, a shard that {INDEX} lists")
    elif (folder / SINGLE).is_file():
        listed, shards = None, [SINGLE]
    else:
        raise ModelError(f"{folder} holds no weights; accepted: {SINGLE}, or {INDEX} and its shards")
    found: dict[str, Any] = {}
    for shard in shards:
        try:
            file = stack.enter_context(safe_open(folder / shard, framework="pt"))
        except (SafetensorError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"{folder / shard} cannot be read, truncated or no safetensors ({reason})") from None
        found |= dict.fromkeys(file.keys(), file)
    if listed is not None:
        absent = sorted(set(listed) - set(found))
        if absent:
            raise ModelError(f"{folder}: {_some(absent)} of {INDEX} in none of its shards")
    return found


def _fitting(model: Decoder, found: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """The model's tensors by the folder's names, which are all there, in a dtype and a shape that fit."""
    tensors = dict(model.tensors(set(found)))
    _refuse_other_dtypes(tensors, found, folder)
    _refuse_other_names(model, tensors, found, folder)
    _refuse_other_shapes(tensors, found, folder)
    if getattr(model.config, "tie_word_embeddings", False) and HEAD in found:
        _refuse_other_head(model, tensors, found, folder)
    return tensors


def _refuse_other_dtypes(tensors: Mapping[str, Tensor], found: Mapping[str, Any], folder: Path) -> None:
    for name in (tensors.keys() | {HEAD}) & found.keys():
        dtype = found[name].get_slice(name).get_dtype()
        if dtype not in FLOATS:
            raise ModelError(
                f"{folder}: {name} has dtype {dtype}; accepted: {', '.join(FLOATS)}; run quantised weights with the "
                "vLLM engine"
            )


def _refuse_other_names(model: Decoder, tensors: Mapping[str, Tensor], found: Mapping[str, Any], folder: Path) -> None:
    missing = sorted(tensors.keys() - found.keys())
    if missing:
        raise ModelError(f"{folder} lacks {_some(missing)}, which its config.json asks for")
    more = {name for name in found.keys() - tensors.keys() if not name.startswith(model.skipped)}
    if getattr(model.config, "tie_word_embeddings", False):
        more.discard(HEAD)
    if more:
        raise ModelError(f"{folder} holds {_some(sorted(more))}, which its config.json has no place for")


def _refuse_other_shapes(tensors: Mapping[str, Tensor], found: Mapping[str, Any], folder: Path) -> None:
    for name, target in tensors.items():
        shape = list(found[name].get_slice(name).get_shape())
        if shape != list(target.shape):
            raise ModelError(f"{folder}: {name} has shape {shape}; accepted: {list(target.shape)}")


def _refuse_other_head(model: Decoder, tensors: Mapping[str, Tensor], found: Mapping[str, Any], folder: Path) -> None:
    """A head beside tied embeddings may only be a copy of them."""
    name = next(name for name, target in tensors.items() if target is model.embedding)
    head, embedding = found[HEAD].get_tensor(HEAD), found[name].get_tensor(name)
    wide = torch.promote_types(head.dtype, embedding.dtype)
    if not torch.equal(head.to(wide), embedding.to(wide)):
        raise ModelError(f"{folder}: {HEAD} is not the embedding; accepted: tie_word_embeddings=false")


def _some(names: list[str]) -> str:
    """The first of the names, and how many there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def _draw(
    name: str, module: torch.nn.Module, parameter: torch.nn.Parameter, family: str, generator: torch.Generator
) -> None:
    uniform = torch.rand(parameter.shape[:1], generator=generator, device=parameter.device)
    if isinstance(module, RMSNorm):
        parameter.fill_(1.0 - module.offset)
    elif name.endswith(".A_log"):
        parameter.copy_(torch.log(1 + 15 * uniform))
    elif name.endswith(".dt_bias"):
        steps = (1e-3, 1e-1) if family == "mamba2" else (1e-4, 1.0)
        parameter.copy_(draw_steps(*steps, uniform))
    elif name.endswith(".D"):
        parameter.copy_(0.9 + 0.2 * uniform)
    elif parameter.dim() == 1:
        parameter.copy_(0.05 * (2 * uniform - 1))
    else:
        parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
