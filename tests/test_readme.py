"""Every command of the README runs as written: those of Python here, those of make in `.ci/run`."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

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
