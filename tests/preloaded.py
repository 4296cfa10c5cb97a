"""A Python that has imported PyTorch and the other packages once, and forks for each command that a test runs.

A command is ``python -m module ...`` in a process of its own, with its own folder, environment and streams. It imports
the project anew, from that folder, and so does a worker that it starts with `subprocess.Popen`, which is its child as
ever: all that a new interpreter would do besides is to load the same packages again, which takes most of a test's time.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

PACKAGES = ("torch", "numba", "hydra", "rich.progress", "pandas", "scipy.stats", "matplotlib.pyplot", "jinja2")
PACKAGES += ("pytest", "hypothesis")


class Preloaded:
    """The Python that forks. It ends with the process that has made it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="preloaded-")  # a socket's path may have 100 characters
        self._path = str(Path(self._folder.name) / "socket")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        pipes["env"] = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ  # read when PyTorch is loaded
        self._server = subprocess.Popen([sys.executable, __file__, self._path], **pipes)
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"
        atexit.register(self._end)

    def _end(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def start(self, *arguments: str, cwd: Path, env: dict[str, str], stderr: IO[str] | None = None) -> Process:
        """``python -m`` with these arguments; its output, and its errors unless they go to a file, are read as text."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        out, err = os.pipe(), os.pipe() if stderr is None else (None, os.dup(stderr.fileno()))
        with open(os.devnull) as nothing:
            socket.send_fds(connection, [b"."], [nothing.fileno(), out[1], err[1]])
        os.close(out[1])
        os.close(err[1])
        request = {"arguments": arguments, "cwd": str(cwd), "env": env}
        connection.sendall(json.dumps(request).encode() + b"\n")
        return Process(connection, out[0], err[0])


class Process:
    """A command that was started, with what of `subprocess.Popen` the tests use."""

    def __init__(self, connection: socket.socket, stdout: int, stderr: int | None) -> None:
        self._told = connection.makefile("r")
        self._connection = connection
        self._streams = [None if fd is None else os.fdopen(fd) for fd in (stdout, stderr)]
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises ``TimeoutError``."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            self.returncode = int(self._told.readline())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Output and errors, when it has ended. Raises ``TimeoutError``."""
        texts = ["", ""]

        def read(number: int) -> None:
            stream = self._streams[number]
            if stream is not None:
                with stream:
                    texts[number] = stream.read()

        readers = [threading.Thread(target=read, args=(number,), daemon=True) for number in (0, 1)]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forking(subprocess.Popen):
    """In a command's process: ``[sys.executable, "-m", ...]`` is forked too, everything else is as it was."""

    def __init__(self, args: Any, **options: Any) -> None:
        if isinstance(args, list) and args[:2] == [sys.executable, "-m"]:
            env = dict(options.get("env") or os.environ)
            options["preexec_fn"] = lambda: in_place(args[2:], env)  # streams, folder and session are set by then
            sys.stdout.flush()  # what waits here is not the child's to print
            sys.stderr.flush()
        super().__init__(args, **options)


def in_place(arguments: list[str], env: dict[str, str]) -> None:
    """Run a module of the current folder as a new interpreter would, after a fork; ends the process."""
    code = 1
    try:
        os.closerange(3, 1024)  # among them the pipe by whose end the parent knows that the program runs
        become(arguments, env)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become(arguments: list[str], env: dict[str, str]) -> None:
    """Run ``python -m`` with these arguments here, from the current folder, with modules of the project new."""
    import runpy

    folder = os.getcwd()
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if name != "__main__" and path.startswith(f"{folder}/") and not path.startswith(f"{sys.prefix}/"):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(env)
    sys.modules["numba"].config.reload_config()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[0], sys.argv = folder, list(arguments)
    subprocess.Popen = Forking  # type: ignore[misc]
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def main() -> None:
    """Fork for every request, until standard input ends."""
    for name in PACKAGES:
        importlib.import_module(name)
    sys.modules["numba"].njit("int64(int64)")(lambda number: number)  # loads what compiled code is linked with
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    print("ready", flush=True)
    while 0 not in select.select([0, listener], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def answer(connection: socket.socket) -> None:
    """Start the command that is asked for, tell its process id, wait for it, tell its exit code."""
    _, streams, *_ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile("r").readline())
    pid = os.fork()
    if pid == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(request["cwd"])
        in_place(request["arguments"], request["env"])
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(f"{code}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
