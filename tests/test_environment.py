"""scripts/environment.py: its choices, its time limit, its stamp, and its one line to an old Python."""

from __future__ import annotations

import http.server
import importlib.util
import json
import pathlib
import platform
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "environment.py"


@pytest.fixture
def environment() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("environment_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def index_url() -> Iterator[str]:
    """A server on this machine that answers every HEAD with a length of 5 MB."""

    class Index(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5000000")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_an_old_python_gets_one_line() -> None:
    code = f"import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "python3 is 3.9; accepted: 3.11 or newer, e.g. `make PYTHON=python3.12`\n"


def test_the_cpu_index_is_used_only_if_it_answers_in_time(
    environment: types.ModuleType, index_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "CPU_INDEX", index_url)
    assert environment.cpu_index_answers()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(environment, "CPU_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started_s = time.monotonic()
        assert not environment.cpu_index_answers()
        assert time.monotonic() - started_s < environment.INDEX_ANSWERS_WITHIN_S + 1


@pytest.mark.parametrize(
    ("found", "version", "asked", "chosen"),
    [
        (False, "3.12", "auto", "cpu"),
        (True, "3.12", "auto", "gpu"),
        (True, "3.11", "auto", "cpu"),
        (True, "3.12", "cpu", "cpu"),
        (False, "3.12", "gpu", "gpu"),
    ],
)
def test_the_set_follows_the_machine(
    environment: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: bool,
    version: str,
    asked: str,
    chosen: str,
) -> None:
    monkeypatch.setattr(environment, "has_gpu", lambda: found)
    monkeypatch.setattr(environment, "here", lambda: f"Linux x86_64, Python {version}")
    assert environment.choose(asked) == chosen
    assert ("a GPU was found" in capsys.readouterr().out) == (found and asked == "auto" and chosen == "cpu")


def test_an_impossible_set_is_refused(environment: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "here", lambda: "Darwin arm64, Python 3.12")
    with pytest.raises(SystemExit, match=r"^--environment gpu .* Darwin arm64.*; accepted here: cpu, auto$"):
        environment.choose("gpu")


def test_the_size_is_asked_of_the_index(
    environment: types.ModuleType, index_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [f"{index_url}/a.whl", f"{index_url}/b.whl", "http://127.0.0.1:9/c.whl", "file:///d.whl"]

    def resolve(command: list[str], failure: str) -> None:
        found = [{"download_info": {"url": url, "archive_info": {}}} for url in urls]
        pathlib.Path(command[-1]).write_text(json.dumps({"install": found}))

    monkeypatch.setattr(environment, "run", resolve)
    words = "4 packages, 1 of them on this disk; at most 10 MB to download, and 1 packages of unknown size"
    assert environment.download_in_words([]) == words
    urls[:2] = []
    assert environment.download_in_words([]).endswith("download size unknown, the index does not tell it")


def test_the_stamp_is_void_when_a_pin_changes(
    environment: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "constraints").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "constraints" / "cpu.txt").write_text("numpy==2.0.0\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "STAMP", tmp_path / "stamp.json")
    assert not environment.is_done("cpu", [])
    stamp = {"fingerprint": environment.fingerprint("cpu"), "extras": ["dev"]}
    environment.STAMP.write_text(json.dumps(stamp))
    assert environment.is_done("cpu", [])
    assert environment.is_done("cpu", ["dev"])
    assert not environment.is_done("cpu", ["dev", "eval"])
    assert not environment.is_done("gpu", ["dev"])
    (tmp_path / "constraints" / "cpu.txt").write_text("numpy==2.0.1\n")
    assert not environment.is_done("cpu", ["dev"])


def test_this_machine_is_named_as_the_choice_reads_it(environment: types.ModuleType) -> None:
    assert environment.here() == f"{platform.system()} {platform.machine()}, Python {platform.python_version()[:4]}"
