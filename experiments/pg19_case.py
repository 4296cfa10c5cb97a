"""The case of the drift experiment, checked before anything heavy is imported. Standard library and OmegaConf only.

The arms are no part of the case, but for the interval length of those that do not name their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.case import (
    DEVICES,
    INPUT_FORMATS,
    check_run_options,
    interval_length_from_config,
    threads_from_config,
)
from experiments.measure.sources import ROOT
from experiments.options import choice, get, integer, only, refuse, text
from experiments.places import recorded
from experiments.precisions import PrecisionArm, named
from experiments.weights import (
    DOCUMENTS,
    digest,
    digest_of_documents,
    refuse_incomplete,
    refused_by,
    weights_folder,
)

MODELS = ROOT / "experiments" / "assets" / "models"
OPTIONS = (
    *("experiment", "model", "documents", "count", "tokens", "interval_length", "inputs", "arms", "device"),
    *("threads", "seed", "checkpoint_tokens", "tracker", "dry_run", "repeat", "records"),
)
REFERENCE, CONTROL = "shared_fp32@1", "shared_fp32"
AGAIN = "shared_fp32@1/again"
"""The reference a second time: A/A."""
DEFAULT_ARMS = "default"


@dataclass(frozen=True)
class DriftCase:
    """``weights``: a Hugging Face folder, relative to the checkout where it lies in it; ``weights_digest`` tells what
    it holds, of large weights names, shapes and sizes only. ``count`` documents of ``tokens`` tokens each from the
    source ``documents``, a folder of them told from others by ``documents_digest``. ``inputs``: the format of weights
    and activations. ``threads`` is 0 on a GPU, where it means nothing.
    """

    experiment: str
    model: str
    weights: str
    weights_digest: str
    family: str
    documents: str
    count: int
    tokens: int
    interval_length: int
    inputs: str
    device: str
    threads: int
    seed: int
    documents_digest: str = ""


def case_hash(case: DriftCase) -> str:
    """16 hex digits that identify the case; where the weights lie is left out."""
    data = {name: value for name, value in recorded(case).items() if name != "weights"}
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def case_from_config(config: Mapping[str, Any]) -> DriftCase:
    """Check the whole config, arms and run options too, and build the case. Raises ``ConfigError``."""
    only(config, OPTIONS)
    folder = weights_folder(config)
    refuse_incomplete("model.path", config["model"]["path"], folder, "config.json", "tokenizer.json")
    source = text(config, "documents", DOCUMENTS)
    case = DriftCase(
        experiment=choice(config, "experiment", ["pg19"]),
        model=folder.name,
        weights=str(folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder),
        weights_digest=digest(folder),
        family="",
        documents=source if source in ("books", "hub") else str(Path(source).resolve()),
        documents_digest="" if source in ("books", "hub") else digest_of_documents(Path(source)),
        count=integer(config, "count", 1, 1000),
        tokens=integer(config, "tokens", 16, 1 << 20),
        interval_length=interval_length_from_config(config),
        inputs=choice(config, "inputs", INPUT_FORMATS),
        device=choice(config, "device", DEVICES),
        threads=threads_from_config(config),
        seed=integer(config, "seed", 0, 2**63 - 1),
    )
    arms_from_config(config, case)
    integer(config, "checkpoint_tokens", 1)
    check_run_options(config)
    case = dataclasses.replace(case, family=_family(folder, config["model"]["path"]))  # imports torch
    arms_from_config(config, case)
    return case


def arms_from_config(config: Mapping[str, Any], case: DriftCase) -> tuple[PrecisionArm, ...]:
    """Reference, A/A and control, then the arms asked for, in their order; ``default`` are the paper's two and the one
    with rounded flushes."""
    arms = get(config, "arms", "default, or a list of precisions")
    if arms == DEFAULT_ARMS:
        arms = ["shared_nvfp4", "dual_fp32_nvfp4", "dual_fp16_sr_nvfp4"]
    if not isinstance(arms, list) or not arms:
        raise refuse("arms", arms, "default, or a list of precisions such as '[shared_nvfp4,dual_fp32_nvfp4]'")
    found = [named(arm, case.interval_length) for arm in (REFERENCE, CONTROL, *arms)]
    found.insert(1, dataclasses.replace(found[0], name=AGAIN))
    for arm in found:
        if [other.name for other in found].count(arm.name) > 1:
            raise refuse("arms", arm.name, f"each arm once; {REFERENCE} and {CONTROL} are run anyway", "is repeated")
        if arm.precision.fold == "raw" and case.family == "mamba2":
            raise refuse("arms", arm.name, "arms that fold from d", f"is for GDN and KDA, not for {case.model}")
    return tuple(found)


def _family(folder: Path, asked: str) -> str:
    from replayssm.models import check_folder, empty_model

    with refused_by("model.path", asked):
        return empty_model(check_folder(folder), device="meta").geometry.family
