"""Every command of the README runs as written: those of Python here, those of make in `.ci/run`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert re.search(rf"^step {re.escape(command)}$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("command", PYTHON)
def test_the_python_commands_run(command: str) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(shlex.split(command), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_inline_commands_name_options_that_exist() -> None:
    inline = re.findall(r"`(python -m experiments\.[^`]*)`", TEXT)
    assert inline
    for command in inline:
        if "replay/mine" in command:  # the arm that the reader is about to write
            continue
        done = subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)h][^)]*)\)", TEXT))))
def test_links_and_pictures_exist(path: str) -> None:
    assert (ROOT / path).exists()
