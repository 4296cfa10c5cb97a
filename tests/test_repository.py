"""The repository keeps its own rules: which package may import which, versions, sizes, the Makefile's help."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MIB = 1024 * 1024
MB = 1000 * 1000

NEVER = {
    "replayssm": ("experiments", "analysis", "hydra", "omegaconf", "wandb", "pandas", "matplotlib", "rich"),
    "replayssm/recurrence": ("replayssm.cache", "replayssm.kernels", "replayssm.engine", "replayssm.models"),
    "analysis": ("torch", "numba", "replayssm.cache", "replayssm.kernels", "replayssm.recurrence"),
}
"""Folder -> modules that no file in it may import, their submodules included."""

SCHEMAS = ("record", "record.*", "drift_record.*", "accuracy_record.*")
ONLY = {
    "analysis": (
        "experiments",
        tuple(f"experiments.measure.{name}" for name in SCHEMAS),
    ),
    "replayssm/kernels/cpu": ("replayssm.recurrence", ("replayssm.recurrence.*.Inputs",)),
    "replayssm/kernels/triton": ("replayssm.recurrence", ("replayssm.recurrence.*.Inputs",)),
    "replayssm/kernels/cuda": ("replayssm.recurrence", ("replayssm.recurrence.*.Inputs",)),
}
"""Folder -> a module, and the full names that files in the folder may import from it."""


def imported_names(path: pathlib.Path, root: pathlib.Path) -> Iterator[str]:
    """Full name of everything the file imports, inside functions and by ``import_module("...")`` too."""
    package = path.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def forbidden_imports(root: pathlib.Path) -> list[str]:
    """Every import below ``root`` that goes against the arrows, as ``file imports name``."""
    found = []
    for folder in sorted({*NEVER, *ONLY}):
        never = NEVER.get(folder, ())
        module, allowed = ONLY.get(folder, ("", ()))
        for path in sorted((root / folder).rglob("*.py")):
            for name in imported_names(path, root):
                outside = module and is_within(name, module) and not any(matches(name, a) for a in allowed)
                if outside or any(is_within(name, n) for n in never):
                    found.append(f"{path.relative_to(root)} imports {name}")
    return found


def matches(name: str, pattern: str) -> bool:
    """Whether the dotted name fits the pattern, in which ``*`` stands for one part."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\w+"), name) is not None


def test_imports_follow_the_arrows() -> None:
    assert list((ROOT / "replayssm" / "kernels" / "cpu").glob("*.py"))
    assert forbidden_imports(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("replayssm/cache.py", "from experiments.measure import record"),
        ("replayssm/cache.py", "def f():\n    import analysis.tables"),
        ("replayssm/kernels/cpu/gdn.py", "from ....analysis import load"),
        ("replayssm/traffic.py", "import importlib\nimportlib.import_module('hydra')"),
        ("replayssm/recurrence/gdn.py", "from ..cache import ReplayCache"),
        ("replayssm/recurrence/gdn.py", "from replayssm.kernels.torch import replay"),
        ("replayssm/kernels/cpu/gdn.py", "from replayssm.recurrence.gdn import Inputs, step"),
        ("replayssm/kernels/cpu/gdn.py", "from replayssm.recurrence import gdn"),
        ("replayssm/kernels/cpu/gdn.py", "from ...recurrence.gdn import *"),
        ("replayssm/kernels/triton/gdn.py", "import replayssm.recurrence.gdn"),
        ("analysis/load.py", "import torch"),
        ("analysis/load.py", "from experiments.measure import timing"),
        ("analysis/load.py", "import experiments"),
        ("analysis/load.py", "from replayssm import cache"),
    ],
)
def test_a_planted_import_is_caught(tmp_path: pathlib.Path, file: str, source: str) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text("from experiments.measure.record import Record\n" if file.startswith("analysis") else "")
    assert forbidden_imports(tmp_path) == []
    planted.write_text(source)
    assert len(forbidden_imports(tmp_path)) == 1


def loaded_modules(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_every_imported_package_is_a_requirement() -> None:
    distributions = {"pynvml": ["nvidia-ml-py"]} | importlib.metadata.packages_distributions()  # absent without a GPU
    modules = {
        name.split(".")[0]
        for folder in ("replayssm", "experiments", "analysis")
        for path in (ROOT / folder).rglob("*.py")
        for name in imported_names(path, ROOT)
    }
    foreign = modules - set(sys.stdlib_module_names) - {"replayssm", "experiments", "analysis"}
    imported = {canonicalize_name(distributions.get(module, [module])[0]) for module in foreign}
    declared = {canonicalize_name(r.name) for r in requirements(*PROJECT["optional-dependencies"])}
    assert {"torch", "numba", "hydra-core"} <= imported
    assert imported <= declared


def test_the_record_needs_only_the_standard_library() -> None:
    added = loaded_modules("import experiments.measure.record") - loaded_modules("import json")
    assert added - set(sys.stdlib_module_names) == {"experiments"}


def test_analysis_runs_without_torch() -> None:
    walk = "[importlib.import_module(m.name) for m in pkgutil.walk_packages(analysis.__path__, 'analysis.')"
    loaded = loaded_modules(f"import analysis, importlib, pkgutil\n{walk} if not m.name.endswith('__main__')]")
    assert {"analysis", "pandas"} <= loaded
    assert not {"torch", "numba", "hydra"} & loaded


def pins(path: pathlib.Path) -> dict[str, str]:
    """Package -> exact version of a constraints file; anything but one exact version a package is an error."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, version = re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups()
            assert canonicalize_name(name) not in found, f"{path.name} pins {name} twice"
            found[canonicalize_name(name)] = version
    return found


def requirements(*extras: str) -> list[Requirement]:
    optional = PROJECT["optional-dependencies"]
    return [Requirement(r) for r in [*PROJECT["dependencies"], *(r for extra in extras for r in optional[extra])]]


def out_of_range(pinned: dict[str, str], ranges: list[Requirement]) -> list[str]:
    """Pins that the ranges do not allow; a package without a pin passes."""
    names = [(canonicalize_name(requirement.name), requirement) for requirement in ranges]
    return [f"{n}=={pinned[n]} is not {r}" for n, r in names if n in pinned and pinned[n] not in r.specifier]


@pytest.mark.parametrize(("file", "extras"), [("cpu.txt", ["dev"]), ("gpu.txt", ["gpu", "dev"])])
def test_constraints_pin_every_requirement(file: str, extras: list[str]) -> None:
    pinned = pins(ROOT / "constraints" / file)
    assert {canonicalize_name(requirement.name) for requirement in requirements(*extras)} <= set(pinned)


def test_pins_lie_within_the_ranges() -> None:
    ranges = requirements(*PROJECT["optional-dependencies"])
    assert {f.name: out_of_range(pins(f), ranges) for f in (ROOT / "constraints").glob("*.txt")} == {
        "cpu.txt": [],
        "gpu.txt": [],
    }
    assert out_of_range({"torch": "2.10.0"}, ranges) == [f"torch==2.10.0 is not {ranges[0]}"]


def test_environment_yml_agrees_with_the_constraints() -> None:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip_lines = next(entry["pip"] for entry in conda if isinstance(entry, dict))
    assert "-c constraints/gpu.txt" in pip_lines
    assert any(line.startswith("-e .[") for line in pip_lines)
    written = [line.replace("=", "==", 1) for line in conda if isinstance(line, str) and not line.startswith("python=")]
    written += [line for line in pip_lines if not line.startswith("-")]
    assert {"pip", "torch", "triton"} <= {line.split("==")[0] for line in written}
    pinned = pins(ROOT / "constraints" / "gpu.txt")
    assert {line: pinned[line.split("==")[0]] for line in written} == {line: line.split("==")[1] for line in written}
    assert "python=3.12" in conda


def test_hooks_fetch_nothing() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {repository["repo"] for repository in hooks} == {"local"}
    assert {hook["language"] for repository in hooks for hook in repository["hooks"]} == {"system"}


def test_the_tracked_tree_stays_small() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file()}
    books_bytes = sum(size for name, size in sizes.items() if "/books/" in name)
    assert sizes["LICENSE"] > 0
    assert sum(sizes.values()) < 22 * MIB
    assert books_bytes <= 7 * MB
    assert [name for name, size in sizes.items() if size > 5.5 * MB and "/books/" not in name] == []


def test_make_lists_every_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    printed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"reproduce", "test", "lint", "format", "check", "clean"} <= targets
    assert {line.split()[1] for line in printed.splitlines() if line.startswith("make ")} == targets


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_test_gpu_does_not_pass_without_one() -> None:
    """Else every test would be skipped, with exit status 0."""
    here = ("PYTHON=true", f"BIN={pathlib.Path(sys.executable).parent}", "PYTEST_ARGS=--collect-only")
    made = subprocess.run(["make", "-s", "test-gpu", *here], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode != 0
    assert "no NVIDIA GPU" in made.stderr
    assert made.stdout == ""
