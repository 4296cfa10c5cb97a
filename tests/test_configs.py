"""Every config file composes; every model gives its geometry, or the line that says it has none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from analysis.bearing import PROFILES
from experiments import precisions, traffic
from experiments.app import CONFIGS, to_plain
from experiments.case import (
    DEFAULT_RECORDS,
    arms_from_config,
    case_from_config,
    case_hash,
    model_from_config,
    models_with_geometry,
    without_kernels,
)
from experiments.options import ConfigError
from replayssm.geometry import Geometry
from replayssm.precision import Precision

FILES = sorted(CONFIGS.rglob("*.yaml"))
CHOICES = [f.relative_to(CONFIGS).with_suffix("") for f in FILES if f.parent != CONFIGS]
MODELS = {f.stem: OmegaConf.to_container(OmegaConf.load(f)) for f in sorted((CONFIGS / "model").glob("*.yaml"))}

GEOMETRIES = {
    "nemotron_3_nano_4b": Geometry("mamba2", 96, 8, 80, 128),
    "nemotron_3_super_120b": Geometry("mamba2", 128, 8, 64, 128),
    "nemotron_3_ultra_550b": Geometry("mamba2", 256, 8, 64, 128),
    "nemotron_3_nano_30b": Geometry("mamba2", 64, 8, 64, 128),
    "qwen3_5_4b": Geometry("gdn", 32, 16, 128, 128),
    "qwen3_5_122b": Geometry("gdn", 64, 16, 128, 128),
    "qwen3_next_80b": Geometry("gdn", 32, 16, 128, 128),
    "qwen3_5_35b": Geometry("gdn", 32, 16, 128, 128),
    "qwen3_5_397b": Geometry("gdn", 64, 16, 128, 128),
    "kimi_linear_48b": Geometry("kda", 32, 32, 128, 128),
    "kimi_k3": Geometry("kda", 96, 96, 128, 128),
}
WITHOUT_GEOMETRY = ["glm_5_3_flash", "nemotron_3_5_lightning_30b", "tiny_nemotron_h", "tiny_qwen3_5"]


@pytest.fixture(autouse=True)
def configs() -> Iterator[None]:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def compose(primary: str, *overrides: str) -> dict[str, Any]:
    return to_plain(hydra.compose(primary, list(overrides)))


def test_every_named_model_has_a_file() -> None:
    assert sorted(MODELS) == sorted([*GEOMETRIES, *WITHOUT_GEOMETRY])
    assert models_with_geometry() == sorted(GEOMETRIES)


def test_the_default_folder_of_records_is_known_as_such() -> None:
    assert compose("kernel")["records"] == DEFAULT_RECORDS


@pytest.mark.parametrize("model", GEOMETRIES)
def test_every_model_gives_its_geometry(model: str) -> None:
    config = compose("kernel", f"model={model}")
    assert model_from_config(config) == (model, GEOMETRIES[model])
    assert traffic.question_from_config(compose("traffic", f"model={model}")).geometry == GEOMETRIES[model]


@pytest.mark.parametrize("model", WITHOUT_GEOMETRY)
def test_a_model_without_geometry_says_so(model: str) -> None:
    with pytest.raises(ConfigError, match=f"^model={model} has no published layer geometry; accepted: kimi_k3, "):
        model_from_config(compose("kernel", f"model={model}"))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_choice_of_every_group_composes(choice: Path) -> None:
    config = compose("accuracy" if choice.parent.name == "task" else "kernel", f"{choice.parent}={choice.name}")
    if choice.parent.name == "precision" and choice.name in precisions.names():
        assert precisions.named(choice.name).precision == Precision(**config["precision"])
        with pytest.raises(ConfigError, match=r"^precision.update=\w+ is not an option; accepted: state, inputs$"):
            case_from_config(config)
    elif choice.parent.name in ("precision", "timing") or choice.name in GEOMETRIES:
        where = {} if config["precision"]["state"] == "fp32" else {"device": "cuda"}  # CPU arms hold fp32 only
        case = case_from_config(config | where)
        assert choice.name in (case.model, case.timing.name, f"{case.precision.state}_{case.precision.inputs}")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_config_files_are_small_data_that_cite_public_sources(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert "_target_" not in text
    assert "${" not in text
    assert text.startswith("#")
    assert not re.search(r"#\d{6,}", text)  # an id that nobody else can look up
    if file.parent.name == "model" and "\npath: " not in text:
        assert re.search(r"https?://|github\.com/|Published config", text)


@pytest.mark.parametrize("model", MODELS)
def test_model_files_state_only_what_is_known_and_agree_with_themselves(model: str) -> None:
    data = MODELS[model]
    assert data["name"] == model
    assert "null" not in OmegaConf.to_yaml(OmegaConf.create(data))
    counts = data.get("counts", {})
    if "pattern" in data:
        letters = Counter(data["pattern"])
        assert len(data["pattern"]) == data["num_blocks"]
        assert counts == {"ssm": letters["M"], "attention": letters["*"], "mlp": letters["-"], "moe": letters["E"]}
    if "num_layers" in data:
        assert counts["ssm"] + counts["attention"] == counts["mlp"] + counts["moe"] == data["num_layers"]
    if "full_attention_interval" in data:
        assert counts["attention"] == data["num_layers"] // data["full_attention_interval"]
    if "num_blocks" in data:
        assert sum(counts.values()) == data["num_blocks"]


def test_an_overridden_timing_changes_the_name() -> None:
    def name(*overrides: str) -> str:
        return case_from_config(compose("kernel", "device=cuda", *overrides)).timing.name

    assert name("timing=gpu", "timing.rounds=15", "timing.warmup_limit_s=10") == "gpu+rounds=15+warmup_limit_s=10"
    assert name("timing=gpu", "timing.rounds=10", "timing.warmup_limit_s=1.5") == "gpu"
    beside = ("timing.replicates=1", "timing.timeout_s=9", "timing.phase_rounds=5")
    assert name("timing=gpu", *beside) == "gpu"
    assert name("timing=smoke", "timing.name=gpu") == "gpu+rounds=3+warmup_limit_s=0.5+warmup_tolerance=0.1"
    assert name("timing=smoke", "timing.name=mine", "timing.rounds=9") == "mine"


def test_no_two_precisions_are_the_same() -> None:
    assert len({precisions.named(name).precision for name in precisions.names()}) == len(precisions.names()) == 27


def test_a_precision_is_named_with_its_interval_length() -> None:
    arm = precisions.named("shared_nvfp4@4")
    assert (arm.precision.update, arm.interval_length) == ("nvfp4", 4)
    assert precisions.named("shared_nvfp4", 8).interval_length == 8
    for wrong in ("shared_nvfp4@0", "shared_nvfp4@x", "fp32_bf16", "nvfp4"):
        with pytest.raises(ConfigError, match=rf"^arms={wrong} .*; accepted: .*(nvfp4|fp32)"):
            precisions.named(wrong)


def test_claims_rest_on_timings_that_exist() -> None:
    assert set(PROFILES) < {file.stem for file in (CONFIGS / "timing").glob("*.yaml")}


def test_an_overridden_geometry_changes_the_name() -> None:
    config = compose("kernel", "model.ssm.heads=104", "model.ssm.head_dim=64")
    assert model_from_config(config) == (
        "nemotron_3_nano_4b+heads=104+head_dim=64",
        Geometry("mamba2", 104, 8, 64, 128),
    )
    assert model_from_config(compose("kernel", "model.ssm.heads=96"))[0] == "nemotron_3_nano_4b"
    named = compose("kernel", "model=qwen3_5_4b", "model.name=mine", "model.ssm.heads=48")
    assert model_from_config(named) == ("mine", Geometry("gdn", 48, 16, 128, 128))
    given = compose("kernel", "model=glm_5_3_flash", "+model.ssm={heads: 4, groups: 4, head_dim: 8, state_dim: 8}")
    assert model_from_config(given)[0] == "glm_5_3_flash+heads=4+groups=4+head_dim=8+state_dim=8"


def test_an_ablation_runs_when_it_is_named() -> None:
    named = "arms=[replay/triton-decay-bf16]"
    kda = ("device=cuda", "model=kimi_linear_48b")
    assert arms_from_config(compose("kernel", *kda, named)) == ("replay/triton-decay-bf16",)
    assert "replay/triton" in arms_from_config(compose("kernel", *kda))
    assert "replay/triton-decay-bf16" not in arms_from_config(compose("kernel", *kda))
    of_all_families = case_from_config(compose("kernel", "device=cuda"))
    assert "replay/triton-decay-bf16" not in without_kernels(of_all_families)
    with pytest.raises(ConfigError, match=r"^arms=replay/triton-decay-bf16 has kernels of kda, not of mamba2; "):
        arms_from_config(compose("kernel", "device=cuda", named))


def test_a_window_makes_another_case_with_arms_of_its_own() -> None:
    windows = {"window": 4, "accepted": 3}
    case = case_from_config(compose("kernel") | windows)
    assert (case.experiment, case.steps_per_cycle) == ("window", 5)
    assert case_hash(case) != case_hash(case_from_config(compose("kernel")))
    kda = compose("kernel", "window=4", "accepted=2", "model=kimi_linear_48b", "arms=[]")
    with pytest.raises(ConfigError, match=r"^arms=\[\] .*, such as 'arms=\[snapshots/torch,verify/torch\]'$"):
        case_from_config(kda)
    with pytest.raises(ConfigError, match=r"^arms=stored/cpu is for no window; accepted: a list of snapshots/cpu"):
        case_from_config(compose("kernel", "arms=[stored/cpu]") | windows)
    with pytest.raises(ConfigError, match=r"^arms=verify/torch is for a window, such as window=4; accepted: a list of"):
        case_from_config(compose("kernel", "arms=[verify/torch]"))
    on_gpu = compose("kernel", "device=cuda") | windows
    assert {"verify/triton", "snapshots/triton"} <= set(arms_from_config(on_gpu))
    assert not any(arm.startswith("oracle/") for arm in arms_from_config(on_gpu))  # an ablation
    assert arms_from_config(on_gpu | {"arms": ["oracle/triton"]}) == ("oracle/triton",)
    with pytest.raises(ConfigError, match=r"^arms=oracle/triton is for a window, such as window=4; accepted: "):
        case_from_config(compose("kernel", "device=cuda", "arms=[oracle/triton]"))
    with pytest.raises(ConfigError, match=r"^arms=oracle/triton runs on cuda, not on device=cpu; accepted: "):
        case_from_config(compose("kernel", "arms=[oracle/triton]") | windows)
    with pytest.raises(ConfigError, match=r"^accepted=3 is impossible; accepted: null, or a window as well"):
        case_from_config(compose("kernel") | {"accepted": 3})
    with pytest.raises(ConfigError, match=r"^window=5 is impossible; accepted: an integer from 1 to 4 "):
        case_from_config(compose("kernel", "interval_length=4") | {"window": 5, "accepted": 1})
    with pytest.raises(ConfigError, match=r"^accepted=0 is impossible; accepted: an integer from 1 to 4 "):
        case_from_config(compose("kernel") | {"window": 4, "accepted": 0})
