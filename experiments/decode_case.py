"""The case of the decode experiment: `experiments.case.Case` with a whole model around the layer.

Standard library only, but for `case_from_config`, which reads the model's configuration as the run will.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.case import (
    OPTIONS,
    Case,
    arms_from_config,
    check_run_options,
    choice,
    model_from_config,
    shared_from_config,
)
from experiments.measure import nvidia
from experiments.options import get, integer, only, refuse, text
from experiments.weights import digest, refuse_incomplete, refused_by
from replayssm.arms import ARMS
from replayssm.geometry import Geometry

RANDOM = "random"
MAX_CONTEXT = 1 << 20
LAYERS = ("layers_block_type", "layer_types")
"""The field of a configuration that lists its layers, by architecture."""


@dataclass(frozen=True)
class DecodeCase(Case):
    """``weights``: ``random``, or a Hugging Face folder, told from others by ``weights_digest``. ``context``: tokens of
    the prompt. ``steps``: by how many tokens the two generations differ. ``blocks``: the first so many layers of the
    model, 0 for all. ``architecture``: the model's file in ``configs/model``, where weights are random.
    """

    weights: str = RANDOM
    weights_digest: str = ""
    context: int = 16
    steps: int = 128
    blocks: int = 0
    architecture: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def forced(self) -> bool:
        """Whether all arms are forced on one stream of tokens."""
        return self.weights == RANDOM

    @property
    def head(self) -> bool:
        """Whether the model is loaded with its draft head."""
        return False

    def capacity(self, window: int | None) -> int:
        """Tokens that a row of an arm's cache has room for."""
        return self.longest

    @property
    def longest(self) -> int:
        """Tokens that a row is given at most: both generations, the tokens that stagger rows, and a checked cycle."""
        return self.context + self.steps + 4 * self.interval_length


def case_from_config(config: Mapping[str, Any]) -> DecodeCase:
    """Check the whole config, arms and run options too, and build the case. Raises ``ConfigError``."""
    only(config, (*OPTIONS, "weights", "context", "steps", "blocks"))
    choice(config, "experiment", ["decode"])
    case = DecodeCase(experiment="decode", **decode_fields(config))
    decode_arms(config)
    check_run_options(config)
    if not config["dry_run"]:
        nvidia.refuse_without(case.device)
    return with_geometry(case)  # imports torch


def decode_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a case of whole models, but for ``experiment``; the geometry of a folder's model is read later."""
    shared = shared_from_config(config)
    folder = text(config, "weights", "random, or a folder with config.json and safetensors")
    blocks = 0 if get(config, "blocks", "an integer, or null") is None else integer(config, "blocks", 1, 1000)
    context, steps = integer(config, "context", 1, MAX_CONTEXT), integer(config, "steps", 1, 100_000)
    if steps % shared["interval_length"]:
        accepted = f"a multiple of interval_length={shared['interval_length']}, whole flush cycles"
        raise refuse("steps", steps, accepted)
    weights = folder if folder == RANDOM else str(Path(folder).resolve())
    return _model(config, folder) | shared | {"weights": weights, "context": context, "steps": steps, "blocks": blocks}


def with_geometry(case: Any) -> Any:
    """The case with the layer geometry of its model. Raises ``ConfigError`` on a folder that cannot be loaded."""
    from replayssm.models import check_folder

    if case.weights != RANDOM:
        with refused_by("weights", case.weights):
            check_folder(case.weights)
    return replace(case, geometry=_geometry(model_config(case)))


def decode_arms(config: Mapping[str, Any]) -> tuple[str, ...]:
    """As `arms_from_config`, of the arms that the engine has."""
    return arms_from_config(config, ARMS)


def model_config(case: DecodeCase) -> Any:
    """The model's configuration, cut to the first ``blocks`` layers. Raises ``ConfigError`` on one that cannot be."""
    from replayssm.models import config_from_folder, config_from_geometry

    random = case.weights == RANDOM
    with refused_by("model", case.model) if random else refused_by("weights", case.weights):
        whole = config_from_geometry(case.architecture) if random else config_from_folder(case.weights)
    if not case.blocks:
        return whole
    if case.weights != RANDOM:
        raise refuse("blocks", case.blocks, "null with weights from a folder")
    name = next(name for name in LAYERS if hasattr(whole, name))
    layers = getattr(whole, name)
    if case.blocks not in (allowed := whole_periods(layers)):
        accepted = ", ".join(["null", *map(str, allowed)])
        raise refuse("blocks", case.blocks, f"{accepted}, where each kind of layer has its share as in the model")
    return replace(whole, **{name: layers[: case.blocks]})


def whole_periods(layers: tuple[str, ...]) -> list[int]:
    """Numbers of first layers, fewer than all, in which each kind has the same share as in all of them."""
    kinds = set(layers)
    return [
        n
        for n in range(1, len(layers))
        if all(layers[:n].count(kind) * len(layers) == layers.count(kind) * n for kind in kinds)
    ]


def _model(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Name, geometry and source of the model; a folder's geometry is read later."""
    if folder == RANDOM:
        name, geometry = model_from_config(config)
        return {"model": name, "geometry": geometry, "architecture": dict(config["model"])}
    path, accepted = Path(folder), "random, or a folder with config.json and safetensors"
    if not path.is_dir():
        raise refuse("weights", folder, accepted, "is no folder")
    refuse_incomplete("weights", folder, path, "config.json", accepted=accepted)
    return {"model": path.resolve().name, "geometry": Geometry("mamba2", 1, 1, 1, 1), "weights_digest": digest(path)}


def _geometry(config: Any) -> Geometry:
    from replayssm.models import empty_model

    return empty_model(config, device="meta").geometry
