"""What tells folders of weights apart, and that a wrong option is refused before they are opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experiments import weights

ROOT = Path(__file__).parents[1]


def folder(path: Path, value: float) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"w": torch.full((4, 4), value)}, path / "model.safetensors")
    return path


def test_weights_of_the_same_shapes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = folder(tmp_path / "one", 1.0), folder(tmp_path / "other", 2.0)
    assert weights.digest(one) != weights.digest(other)
    monkeypatch.setattr(weights, "WHOLE_BYTES", 0)  # of large ones names, shapes and sizes are looked at
    assert weights.digest(one) == weights.digest(other)
    (other / "config.json").write_text("[]")
    assert weights.digest(one) != weights.digest(other)


@pytest.mark.parametrize(
    ("experiment", "option", "message"),
    [
        ("pg19", "tokens=0", "tokens=0 is impossible; accepted: an integer from 16 to 1048576"),
        ("pg19", "checkpoint_tokens=0", "checkpoint_tokens=0 is impossible"),
        ("decode", "arms=[replay/nope]", "arms=replay/nope has no such arm; accepted: a list of replay/cpu"),
        ("decode", "repeat=maybe", "repeat=maybe is impossible"),
    ],
)
def test_a_wrong_option_is_refused_before_torch_is_imported(experiment: str, option: str, message: str) -> None:
    code = (
        "import importlib, sys\n"
        f"import experiments.{experiment}_case as case\nimport hydra\nfrom experiments.app import *\n"
        "with hydra.initialize_config_dir(str(CONFIGS), version_base=VERSION_BASE, job_name='test'):\n"
        f"    config = to_plain(hydra.compose('{experiment}', ['{option}']))\n"
        "try:\n    case.case_from_config(config)\nexcept Exception as error:\n    print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, imported = done.stdout.splitlines()
    assert told.startswith(message)
    assert imported == "False"
