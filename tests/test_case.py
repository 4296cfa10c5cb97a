"""Every impossible option is refused with one line; a case is identified by what it is, and by nothing else."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import experiments.case as case_module
from experiments import kernel
from experiments.case import arms_from_config, case_from_config, case_hash, known_arms
from experiments.options import ConfigError
from replayssm.geometry import Geometry

CONFIG: dict[str, Any] = {
    "experiment": "kernel",
    "model": {
        "name": "small",
        "family": "gdn",
        "ssm": {"heads": 8, "groups": 4, "head_dim": 16, "state_dim": 32, "conv_kernel": 4},
    },
    "batch_size": 64,
    "interval_length": 16,
    "phase": "aligned",
    "precision": {"state": "fp32", "inputs": "bf16"},
    "timing": {
        "name": "default",
        "rounds": 20,
        "cycles_per_sample": 1,
        "cold_factor": 5.0,
        "warmup_limit_s": 30.0,
        "warmup_tolerance": 0.01,
        "replicates": 3,
        "timeout_s": 600.0,
        "phase_rounds": 0,
    },
    "tracker": {"name": "none"},
    "arms": ["stored/slow", "replay/very-fast"],
    "device": "cpu",
    "threads": 1,
    "seed": 0,
    "dry_run": False,
    "repeat": False,
    "records": "results/local/records",
}
ABSENT = object()


@pytest.fixture(autouse=True)
def arms(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four arms whose files would fail if they were imported."""
    folder = tmp_path_factory.mktemp("arms")
    (folder / "__init__.py").touch()
    (folder / "stored_slow.py").write_text("raise AssertionError('imported')\n")
    (folder / "replay_very_fast.py").write_text("STATE_FORMATS = ('fp32', 'fp16')\nraise AssertionError\n")
    (folder / "stored_card.py").write_text("DEVICES = ('cuda',)\nSTATE_FORMATS = ('fp32', 'bf16')\n")
    (folder / "replay_half.py").write_text("STATE_FORMATS: tuple[str, ...] = ('fp16',)\n")
    monkeypatch.setattr(case_module, "ARMS", folder)


def changed(options: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    for option, value in options.items():
        *path, last = option.split(".")
        node = config
        for part in path:
            node = node[part]
        if value is ABSENT:
            del node[last]
        else:
            node[last] = value
    return config


def test_a_good_config_becomes_its_case() -> None:
    case = case_from_config(CONFIG)
    assert (case.model, case.batch_size, case.interval_length, case.phase) == ("small", 64, 16, "aligned")
    assert case.geometry == Geometry("gdn", 8, 4, 16, 32)
    assert dataclasses.asdict(case.precision) == CONFIG["precision"]
    assert dataclasses.asdict(case.timing) == CONFIG["timing"]
    assert arms_from_config(CONFIG) == ("stored/slow", "replay/very-fast")


def test_all_cores_are_resolved() -> None:
    assert case_from_config(changed({"threads": 0})).threads == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, ["batch_size=0", "from 1 to 1000000"]),
        ({"batch_size": 1_000_001}, ["batch_size=1000001", "from 1 to 1000000"]),
        ({"batch_size": "8"}, ['batch_size="8" is text', "integer"]),
        ({"timing.timeout_s": "8"}, ['timing.timeout_s="8" is text', "a number"]),
        ({"dry_run": "true"}, ['dry_run="true"', "true, false"]),
        ({"batch_size": True}, ["batch_size=true", "integer"]),
        ({"batch_size": 2.0}, ["batch_size=2.0", "integer"]),
        ({"batch_size": "two\nlines"}, ['batch_size="two\\nlines"', "integer"]),
        ({"batch_size": ABSENT}, ["batch_size is missing", "integer"]),
        ({"interval_length": 0}, ["interval_length=0", "from 1 to 64", "ring limit"]),
        ({"interval_length": 65}, ["interval_length=65", "from 1 to 64"]),
        ({"phase": "both"}, ["phase=both", "aligned, staggered"]),
        (
            {"precision.state": "fp7"},
            ["precision.state=fp7", "fp32, bf16, fp16, fp8_e4m3, "],
        ),
        ({"precision.state": "fp16"}, ["precision.state=fp16", "arm stored/slow", "accepted: fp32"]),
        ({"precision.inputs": "nvfp4"}, ["precision.inputs=nvfp4", "bf16, fp32"]),
        ({"precision": 3}, ["precision=3", "group of options"]),
        ({"arms": []}, ["arms=[]", "at least one", "'arms=[stored/cpu,replay/cpu]'"]),
        ({"device": "cuda", "threads": 0, "arms": []}, ["arms=[]", "'arms=[stored/triton,replay/triton]'"]),
        ({"arms": "stored/slow"}, ["arms=stored/slow", "a list"]),
        ({"arms": ["stored/gpu"]}, ["arms=stored/gpu", "replay/half, replay/very-fast, stored/slow"]),
        ({"arms": ["stored/slow", "stored/slow"]}, ["arms=stored/slow", "repeated", "once"]),
        ({"arms": ["replay/half"]}, ["precision.state=fp32", "arm replay/half", "accepted: fp16"]),
        ({"device": "tpu"}, ["device=tpu", "cpu, cuda"]),
        (
            {"device": "cuda", "threads": 0},
            ["arms=stored/slow runs on cpu, not on device=cuda", "stored/card"],
        ),
        ({"arms": ["stored/card"]}, ["arms=stored/card runs on cuda, not on device=cpu", "a list of replay/half"]),
        ({"device": "cuda", "arms": ["stored/card"]}, ["threads=1", "accepted: 0 with device=cuda"]),
        ({"arms": "default", "precision.state": "bf16"}, ["bf16 is held by no arm of device=cpu", "fp32, fp16"]),
        ({"arms": "all"}, ["arms=all", "default, or a list of"]),
        ({"threads": -1}, ["threads=-1", "from 0 to"]),
        ({"threads": 10**6}, ["threads=1000000", "from 0 to"]),
        ({"seed": -1}, ["seed=-1", "from 0"]),
        ({"dry_run": "yes"}, ["dry_run=yes", "true, false"]),
        ({"records": " "}, ['records=" "', "a folder"]),
        ({"records": __file__}, ["test_case.py is not a folder", "a folder that can be written"]),
        ({"records": f"{__file__}/a/b"}, ["test_case.py is not a folder", "can be made"]),
        ({"records": "/proc/nowhere/at/all"}, ["records=/proc/nowhere/at/all", "/proc cannot be written"]),
        ({"records": "/proc/nowhere", "dry_run": True}, ["records=/proc/nowhere", "/proc cannot be written"]),
        ({"records": "a" * 300}, ["records=aaa", "File name too long"]),
        ({"experiment": "decode"}, ["experiment=decode", "kernel"]),
        ({"tracker.name": "mlflow"}, ["tracker.name=mlflow", "none, wandb"]),
        ({"tracker.mode": "offline"}, ["tracker.mode=offline", "not an option"]),
        ({"timing.rounds": 0}, ["timing.rounds=0", "from 1 to 10000"]),
        ({"timing.rounds": 10_001}, ["timing.rounds=10001", "from 1 to 10000"]),
        ({"timing.cycles_per_sample": 1001}, ["timing.cycles_per_sample=1001", "from 1 to 1000"]),
        ({"timing.replicates": 1001}, ["timing.replicates=1001", "from 1 to 1000"]),
        ({"timing.cold_factor": 101}, ["timing.cold_factor=101", "at most 100"]),
        ({"timing.timeout_s": 86401}, ["timing.timeout_s=86401", "at most 86400"]),
        ({"timing.cold_factor": 4.9}, ["timing.cold_factor=4.9", "at least 5"]),
        ({"timing.cold_factor": float("inf")}, ["timing.cold_factor=Infinity", "at least 5"]),
        ({"timing.warmup_limit_s": 31}, ["timing.warmup_limit_s=31", "at most 30"]),
        ({"timing.warmup_tolerance": 0}, ["timing.warmup_tolerance=0", "above 0"]),
        ({"timing.phase_rounds": -1}, ["timing.phase_rounds=-1", "from 0 to 1000"]),
        ({"timing.timeout_s": 0}, ["timing.timeout_s=0", "above 0"]),
        ({"timing.extra": 1}, ["timing.extra=1", "rounds"]),
        ({"batch_sise": 1}, ["batch_sise=1", "batch_size"]),
        ({"model.ssm": ABSENT}, ["model=small has no published layer geometry", "nemotron_3_nano_4b"]),
        ({"model.ssm.heads": 7}, ["model.ssm.heads=7", "model.ssm.groups=4", "a multiple"]),
        ({"model.ssm.heads": 0}, ["model.ssm.heads=0", "from 1 to 65536"]),
        ({"model.ssm.head_dim": 65_537}, ["model.ssm.head_dim=65537", "from 1 to 65536"]),
        ({"model.ssm": None}, ["model.ssm=null", "the group of numbers heads, groups, head_dim, state_dim"]),
        ({"model.ssm.widht": 1}, ["model.ssm.widht=1", "head_dim"]),
        ({"model.ssm.state_dim": ABSENT}, ["model.ssm.state_dim is missing", "integer"]),
        ({"window": 4}, ["window=4 needs accepted", "accepted: accepted=1 to 4"]),
        ({"window": 4, "accepted": 5}, ["accepted=5", "from 1 to 4"]),
        ({"window": None, "accepted": 2}, ["accepted=2", "a window as well"]),
        ({"window": 17, "accepted": 2}, ["window=17", "from 1 to 16"]),
        ({"model.family": "kda"}, ["model.ssm.groups=4", "accepted: 8"]),
        ({"model.family": "rwkv"}, ["model.family=rwkv", "mamba2, gdn, kda"]),
        ({"model.colour": "red"}, ["model.colour=red", "hidden_size"]),
        ({"model": ABSENT}, ["model is missing"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_refusals_name_option_value_and_accepted(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        case_from_config(changed(options))
    line = str(refusal.value)
    assert "\n" not in line
    assert all(words in line for words in said), line
    assert "accepted: " in line


def test_a_refused_folder_of_records_is_not_made(tmp_path: Path) -> None:
    records = tmp_path / "a" / "b"
    case_from_config(changed({"records": str(records)}))
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="link is not a folder"):
        case_from_config(changed({"records": str(tmp_path / "link")}))
    assert [f.name for f in tmp_path.iterdir()] == ["link"]


def test_a_dry_run_does_without_the_default_folder_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").touch()
    monkeypatch.chdir(tmp_path)
    case_from_config(changed({"dry_run": True}))
    with pytest.raises(ConfigError, match="results is not a folder"):
        case_from_config(CONFIG)


@pytest.mark.parametrize("text", ["def f(:\n", "a\0b", "STATE_FORMATS = formats()\n", "STATE_FORMATS = 3\n"])
def test_an_arm_that_cannot_be_read_is_named(text: str) -> None:
    (case_module.ARMS / "stored_broken.py").write_text(text)
    with pytest.raises(ConfigError, match=r"^[^\n]*stored_broken\.py cannot be read: [^\n]*; accepted: Python[^\n]*$"):
        case_from_config(changed({"arms": ["stored/broken"]}))


def test_only_plain_file_names_are_arms() -> None:
    for name in ("stored_Fast", "stored_a-b", "stored_a b", "stored_é", "Stored_a", "stored", "stored_"):
        (case_module.ARMS / f"{name}.py").touch()
    assert known_arms() == ("replay/half", "replay/very-fast", "stored/card", "stored/slow")


def test_default_arms_are_those_of_the_device_that_hold_the_state() -> None:
    def default(**options: str) -> tuple[str, ...]:
        return arms_from_config(changed({"arms": "default"} | {k.replace("_", "."): v for k, v in options.items()}))

    assert default() == ("stored/slow", "replay/very-fast")
    assert default(precision_state="fp16") == ("replay/half", "replay/very-fast")
    assert default(device="cuda", precision_state="bf16") == default(device="cuda") == ("stored/card",)


def test_arms_without_kernels_of_the_family_are_left_out_and_refused() -> None:
    (case_module.ARMS / "verify_two.py").write_text("FAMILIES = ('mamba2', 'gdn')\n")
    (case_module.ARMS / "verify_all.py").touch()
    windows = {"window": 4, "accepted": 2, "model.ssm.groups": 8, "arms": "default"}
    for family, arms in {"gdn": ("verify/all", "verify/two"), "kda": ("verify/all",)}.items():
        config = changed(windows | {"model.family": family})
        assert arms_from_config(config) == arms
        case = case_from_config(config)
        assert set(case_module.without_kernels(case)) == {"verify/all", "verify/two"} - set(arms)
        assert ("; no kernels of kda have verify/two" in kernel.dry_run_line(case, arms)) == (family == "kda")
    asked = changed(windows | {"model.family": "kda", "arms": ["verify/two"]})
    told = r"^arms=verify/two has kernels of mamba2, gdn, not of kda; accepted: a list of verify/all$"
    with pytest.raises(ConfigError, match=told):
        arms_from_config(asked)


def test_threads_mean_nothing_on_a_gpu() -> None:
    case = case_from_config(changed({"device": "cuda", "arms": "default", "threads": 0}))
    assert (case.device, case.threads) == ("cuda", 0)


def leaves(config: dict[str, Any], prefix: str = "") -> list[str]:
    names = [leaves(v, f"{prefix}{k}.") if isinstance(v, dict) else [prefix + k] for k, v in config.items()]
    return [name for group in names for name in group]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from([*leaves(CONFIG), "model", "model.ssm", "timing", "precision", "tracker", "extra"]), anything)
def test_any_value_of_any_option_gives_a_case_or_one_line(option: str, value: Any) -> None:
    try:
        case_from_config(changed({option: value}))
    except ConfigError as error:
        line = str(error)
    else:
        return
    assert line.isprintable()
    assert "accepted: " in line


DIFFERENT = {
    "model.name": "other",
    "model.family": "mamba2",
    "model.ssm.heads": 16,
    "model.ssm.groups": 8,
    "model.ssm.head_dim": 17,
    "model.ssm.state_dim": 33,
    "batch_size": 65,
    "interval_length": 17,
    "phase": "staggered",
    "precision.inputs": "fp32",
    "seed": 1,
    "timing.name": "other",
    "timing.rounds": 21,
    "timing.cycles_per_sample": 2,
    "timing.cold_factor": 6,
    "timing.warmup_limit_s": 29,
    "timing.warmup_tolerance": 0.02,
    "timing.phase_rounds": 1,
}
SAME = {"timing.replicates": 4, "timing.timeout_s": 1, "arms": ["stored/slow"], "dry_run": True, "records": "elsewhere"}


def test_hash_tells_different_cases_apart_and_equal_ones_together() -> None:
    original = case_hash(case_from_config(CONFIG))
    assert original == "2361b1090a79de17"  # a changed hash would orphan every record there is
    hashes = {option: case_hash(case_from_config(changed({option: v}))) for option, v in DIFFERENT.items()}
    assert len({original, *hashes.values()}) == len(DIFFERENT) + 1, hashes
    for option, value in SAME.items():
        assert case_hash(case_from_config(changed({option: value}))) == original, option
    shuffled = json.loads(json.dumps(CONFIG, sort_keys=True))
    assert case_hash(case_from_config(shuffled)) == original


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, experiments.case, replayssm.traffic;"
        "top = {name.partition('.')[0] for name in sys.modules} - {'experiments', 'replayssm'};"
        "print(sorted(top - set(sys.stdlib_module_names) - {'__main__', '__mp_main__'}))"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
