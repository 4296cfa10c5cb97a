"""Make ``.venv`` from Python 3.11 or newer and a package index; ``make reproduce`` and ``make test`` call it.

    python3 scripts/environment.py --extras eval      what the main job needs
    python3 scripts/environment.py --extras dev       the tools of tests and linters as well
    python3 scripts/environment.py --environment gpu  the CUDA set, constraints/gpu.txt, whatever is found
    python3 scripts/environment.py --resolve-gpu      only ask the index whether the CUDA set resolves

``auto`` takes the CUDA set where ``nvidia-smi`` lists a GPU and this is Python 3.12 on Linux, else the CPU set. The CPU
set is looked for on PyTorch's own CPU index first, because the torch of the default index brings gigabytes of CUDA on
Linux. pip keeps its user's configuration: what is given here adds to it. A stamp in ``.venv`` makes repeating quick.
Standard library only.
"""

import sys

# An old Python must get as far as this line, so no __future__ import stands above it.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("python3 is {}.{}; accepted: 3.11 or newer, e.g. `make PYTHON=python3.12`".format(*sys.version_info))

import argparse
import concurrent.futures
import hashlib
import http.client
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "replayssm-environment.json"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_ANSWERS_WITHIN_S = 3.0
IMPORTED = "hydra, matplotlib.pyplot, numba, pandas, rich.progress, scipy.stats, torch"
IMPORTED_WITH = {"eval": "lm_eval.evaluator, tokenizers"}
"""Extra -> what its users import besides."""
GPU_PYTHON = "3.12"
GPU_SET_IS_FOR = f"Linux x86_64, Python {GPU_PYTHON}"
GLIBC_MINOR = 28
"""The wheels of torch for Linux are built for glibc 2.28."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--extras", nargs="*", default=[], help="optional dependencies of pyproject.toml, e.g. dev")
    parser.add_argument("--resolve-gpu", action="store_true")
    asked = parser.parse_args()
    if asked.resolve_gpu:
        resolve_gpu()
        return
    chosen = choose(asked.environment)
    if not is_done(chosen, asked.extras):
        install(chosen, asked.extras)


def fingerprint(chosen: str) -> str:
    """Hash of everything that decides what is installed."""
    digest = hashlib.sha256(f"{chosen} {sys.version_info[:2]} {ROOT}".encode())
    for path in (ROOT / "pyproject.toml", *sorted((ROOT / "constraints").glob("*.txt"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_done(chosen: str, extras: list[str]) -> bool:
    """Whether ``.venv`` holds this environment with these extras, or more."""
    if not STAMP.exists():
        return False
    stamp = json.loads(STAMP.read_text())
    return stamp["fingerprint"] == fingerprint(chosen) and set(extras) <= set(stamp["extras"])


def install(chosen: str, extras: list[str]) -> None:
    """Create ``.venv`` where needed and install into it; the stamp comes last, so a cut-off run is taken up again."""
    constraints = ["-c", str(ROOT / "constraints" / f"{chosen}.txt")]
    kept = json.loads(STAMP.read_text())["extras"] if STAMP.exists() else []
    extras = sorted({*kept, *extras, *(["gpu"] if chosen == "gpu" else [])})
    python = create()
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    # The pip of an old Python downloads whole wheels in a dry run; the pinned one reads their metadata only.
    run([*pip, "install", "--quiet", *constraints, "--upgrade", "pip"], "pip could not be updated")
    index = ["--extra-index-url", CPU_INDEX] if chosen == "cpu" and cpu_index_answers() else []
    project = ["-e", f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)]
    print(f"environment: {chosen} set (constraints/{chosen}.txt), {index_in_words(chosen, index)}")
    print(f"environment: {download_in_words([*pip, 'install', *index, *constraints, *project])}", flush=True)
    STAMP.unlink(missing_ok=True)
    run([*pip, "install", "--no-compile", *index, *constraints, *project], "the installation failed")
    # Compiling only what is imported takes a quarter of the time of compiling every module of every package.
    compiling = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    imported = ", ".join([IMPORTED, *(IMPORTED_WITH[extra] for extra in extras if extra in IMPORTED_WITH)])
    run([str(python), "-c", f"import {imported}"], "the installed packages do not import", compiling)
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(chosen), "extras": extras}))
    print(f"environment: ready in {VENV}", flush=True)


def choose(environment: str) -> str:
    """``cpu`` or ``gpu``; says why where ``auto`` found a GPU that it cannot serve."""
    if environment == "gpu" and here() != GPU_SET_IS_FOR:
        sys.exit(f"--environment gpu is pinned for {GPU_SET_IS_FOR} and this is {here()}; accepted here: cpu, auto")
    if environment != "auto":
        return environment
    if not has_gpu():
        return "cpu"
    if here() != GPU_SET_IS_FOR:
        print(f"environment: a GPU was found, but its set is pinned for {GPU_SET_IS_FOR} and this is {here()}: cpu set")
        return "cpu"
    return "gpu"


def here() -> str:
    """System, architecture and Python version of this machine."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{platform.system()} {platform.machine()}, Python {version}"


def has_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def create() -> pathlib.Path:
    """The Python of ``.venv``, which is made anew when it is missing, broken, or of another Python version."""
    python = VENV / "bin" / "python"
    question = "import pip, sys; print(sys.version_info[:2])"
    try:
        answer = subprocess.run([str(python), "-c", question], capture_output=True, text=True).stdout.strip()
    except OSError:
        answer = ""
    if answer != str(sys.version_info[:2]):
        print(f"environment: making {VENV} with Python {platform.python_version()}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(VENV)], "python3 could not make a virtual environment")
    return python


def cpu_index_answers() -> bool:
    """Whether PyTorch's CPU index answers in time, the look-up of its name included."""
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(f"{CPU_INDEX}/torch/", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=INDEX_ANSWERS_WITHIN_S):
                answered.set()
        except (OSError, http.client.HTTPException):
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(INDEX_ANSWERS_WITHIN_S)
    return answered.is_set()


def index_in_words(chosen: str, index: list[str]) -> str:
    if index:
        return f"with PyTorch's CPU index {CPU_INDEX}"
    if chosen == "cpu":
        return f"default index, because {CPU_INDEX} did not answer within {INDEX_ANSWERS_WITHIN_S:.0f} s"
    return "default index"


def download_in_words(install_command: list[str]) -> str:
    """How many packages and megabytes the command would fetch, as the index tells; pip may have some in its cache."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        run([*install_command, "--quiet", "--dry-run", "--report", str(report)], "the packages do not resolve")
        found = json.loads(report.read_text())["install"]
    urls = [item["download_info"]["url"] for item in found if "archive_info" in item["download_info"]]
    remote = [url for url in urls if urllib.parse.urlsplit(url).scheme != "file"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(size_bytes, remote))
    known = [size for size in sizes if size is not None]
    words = f"{len(urls)} packages, {len(urls) - len(remote)} of them on this disk; "
    if remote and not known:
        return words + "download size unknown, the index does not tell it"
    unknown = f", and {len(remote) - len(known)} packages of unknown size" if len(known) < len(remote) else ""
    return words + f"at most {sum(known) / 1e6:.0f} MB to download{unknown}"


def size_bytes(url: str) -> int | None:
    """Size of the file behind the URL, ``None`` where the server does not tell."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, http.client.HTTPException, TypeError, ValueError):
        return None


def resolve_gpu() -> None:
    """Resolve constraints/gpu.txt for Linux and Python 3.12 from the index's metadata; run with a recent pip.

    pip resolves for another platform only from wheels. antlr4-python3-runtime, which Hydra needs, has none: it is built
    here first (it is pure Python).
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC_MINOR + 1)]
    platforms += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
    constraints = ROOT / "constraints" / "gpu.txt"
    pins = [line for line in constraints.read_text().splitlines() if line and not line.startswith("#")]
    antlr = next(pin for pin in pins if pin.startswith("antlr4-python3-runtime=="))
    with tempfile.TemporaryDirectory() as folder:
        run([*pip, "wheel", "--quiet", "--no-deps", "-w", folder, antlr], f"{antlr} could not be built")
        report = pathlib.Path(folder, "report.json")
        command = [*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        command += ["--python-version", GPU_PYTHON, "--implementation", "cp", "--only-binary", ":all:"]
        command += [word for name in platforms for word in ("--platform", name)]
        command += ["--target", str(pathlib.Path(folder, "target")), "--find-links", folder]
        run([*command, "-c", str(constraints), f"{ROOT}[gpu,dev]"], "constraints/gpu.txt does not resolve")
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    versions = {canonical(item["name"]): item["version"] for item in found}
    del versions["replayssm"]
    loose = sorted(set(versions) - {canonical(pin.split("==")[0]) for pin in pins})
    if loose:
        sys.exit(f"constraints/gpu.txt lacks pins: {', '.join(f'{name}=={versions[name]}' for name in loose)}")
    print(f"constraints/gpu.txt resolves for {GPU_SET_IS_FOR}: {len(versions)} packages")


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run(command: list[str], failure: str, variables: dict[str, str] | None = None) -> None:
    """Run to the end; on a failure stop with one line (the command has printed its own reasons before it)."""
    if subprocess.run(command, stdin=subprocess.DEVNULL, env=variables).returncode != 0:
        sys.exit(f"environment: {failure}: {' '.join(command)}")


if __name__ == "__main__":
    main()
