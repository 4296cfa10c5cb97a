"""Every command of the README runs as written: those of Python here, those of make in `.ci/run`."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from planted import LIMIT_S, Tree, preloaded

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
PYTHON = [command for command in COMMANDS if command.startswith("python ")]


def test_the_commands_are_of_known_kinds() -> None:
    others = [c for c in COMMANDS if c not in PYTHON and not c.startswith("make ")]
    assert others == ["source .venv/bin/activate"]
    assert len(PYTHON) >= 5


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_ci_runs_the_make_commands(command: str) -> None:
    assert re.search(
        rf"^step {re.escape(command)}( [A-Z]+=.*)?$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.slow
def test_the_python_commands_run_one_after_another(tmp_path: Path) -> None:
    """In a copy of the project, so that no record of a test joins those of the user; the last reads those before it."""
    tree = Tree(tmp_path / "tree", tmp_path / "kernels")
    for command in PYTHON:
        done = tree.run(*shlex.split(command.removeprefix("python -m ")))
        assert done.code == 0, f"{command}\n{done.err}"
        assert done.out.strip(), command


def test_a_shell_takes_lists_as_they_are() -> None:
    """zsh, the shell of a Mac, takes a bare bracket for a pattern of file names."""
    lists = re.findall(r".?[a-z_]+=\[", "\n".join((*COMMANDS, *re.findall(r"`(python [^`]*)`", TEXT))))
    assert len(lists) >= 2
    assert all(start.startswith("'") for start in lists)


def test_inline_commands_name_options_that_exist() -> None:
    inline = re.findall(r"`(python -m experiments\.[^`]*)`", TEXT)
    assert inline
    for command in inline:
        if "replay/mine" in command:  # the arm that the reader is about to write
            continue
        if "experiments.upload" in command:  # needs an account at Weights & Biases
            command = "python -m experiments.upload --help"
        arguments = shlex.split(command.removeprefix("python -m "))
        process = preloaded().start(*arguments, cwd=ROOT, env=dict(os.environ))
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)h][^)]*)\)", TEXT))))
def test_links_and_pictures_exist(path: str) -> None:
    assert (ROOT / path).exists()


def table(name: str, **at: object) -> pd.DataFrame:
    found = pd.read_csv(ROOT / "results" / "tables" / f"{name}.csv")
    for column, wanted in at.items():
        found = found[found[column] == wanted]
    assert len(found)
    return found


def test_measured_figures_are_those_of_the_committed_tables() -> None:
    """The table of what an NVIDIA H200 gives, cell by cell as it is rounded there."""
    card, models = {"device": "NVIDIA H200"}, {"nemotron_3_nano_4b": "Nemotron-3-Nano-4B", "qwen3_5_4b": "Qwen3.5-4B"}
    order = ["nemotron_3_nano_4b", "nemotron_3_super_120b", "qwen3_5_122b", "qwen3_5_4b", "kimi_linear_48b"]
    plain = {"arm": "replay/triton", "phase": "aligned", "interval_length": 16} | card
    layers = table("kernel_speedups", **plain).sort_values("processes").set_index(["model", "state", "batch_size"])
    layers = layers["speedup"].groupby(level=[0, 1, 2]).last()
    told = re.findall(r"[\d.]+(?=x)", re.findall(r"\| a layer's step at .* \| (.*) \|", TEXT)[0])
    assert told == [f"{layers[model, 'fp32', 256]:.2f}" for model in order]
    told = re.findall(r"[\d.]+(?=x)", re.findall(r"\| the same at batch 1 .* \| (.*) \|", TEXT)[0])
    assert told == [f"{layers[model, 'fp32', 1]:.2f}" for model in order]
    narrow = ", ".join(f"{layers[model, 'fp16', 256]:.2f}x" for model in order)
    assert narrow in TEXT.replace(" and", ",")
    windows = table("window_speedups", arm="verify/triton", batch_size=256, window=4, phase="aligned", **card)
    windows = windows.set_index("model")["speedup"]
    told = re.findall(r"[\d.]+(?=x)", re.findall(r"\| a layer's step that verifies .* \| (.*) \|", TEXT)[0])
    assert told == [f"{windows[model]:.2f}" for model in order[:4]]
    steps = table("decode_speedups", batch_size=256, context=16, **card)
    steps = steps[steps["blocks"].isna()].set_index("model")["speedup"]
    drafts = table("speculative_throughput", arm="verify/triton", batch_size=256, window=4, **card).set_index("model")
    fit = table("speculative_throughput", batch_size=256, window=4, **card).set_index(["arm", "model"])
    fit = fit["requests_in_100_gb"]
    for values in (steps, drafts["over_snapshots"]):
        assert ", ".join(f"{label} {values[model]:.2f}x" for model, label in models.items()) in TEXT
    ratios = [fit["verify/triton", model] / fit["snapshots/triton", model] for model in models]
    assert "{:.2f} and {:.2f} times as many".format(*ratios) in TEXT
    kl = table("drift_ratios", arm="shared_nvfp4", over="dual_fp32_nvfp4", tokens=131072, **card).set_index("model")
    told = [f"{model} {float(f'{kl.ratio[model]:.2g}'):g} times" for model in ("tiny-nemotron-h", "tiny-qwen3.5")]
    assert ", ".join(told) in TEXT
