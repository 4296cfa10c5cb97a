"""A headless Chromium, driven over HTTP by its own driver: WebDriver (W3C), which needs no package."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

BROWSERS, DRIVER = ("chromium", "chromium-browser", "google-chrome"), "chromedriver"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
LIMIT_S = 60


def missing() -> str:
    """What is not installed; empty when all is."""
    found = [*([] if any(map(shutil.which, BROWSERS)) else ["chromium"]), *([] if shutil.which(DRIVER) else [DRIVER])]
    return f"{' and '.join(found)} not installed (Debian: apt-get install chromium chromium-driver)" if found else ""


class Browser:
    """One session; `close` ends it and its driver. Raises ``RuntimeError`` when the driver does not start."""

    def __init__(self) -> None:
        binary = next(path for path in map(shutil.which, BROWSERS) if path)
        self.driver = subprocess.Popen(
            [str(shutil.which(DRIVER)), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.driver.stdout is not None
        lines = iter(self.driver.stdout.readline, "")
        port = next((line.rstrip(".\n").split()[-1] for line in lines if "started successfully on port" in line), None)
        if port is None:
            raise RuntimeError(f"{DRIVER} ended with {self.driver.wait()} before it told its port")
        self.address = f"http://127.0.0.1:{port}/session"
        options = {"binary": binary, "args": ARGUMENTS}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.address += "/" + self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def open(self, page: Path, fragment: str = "") -> None:
        self._send("POST", "/url", {"url": "about:blank"})  # so that another fragment loads the page anew
        self._send("POST", "/url", {"url": page.resolve().as_uri() + fragment})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns in the page; a promise is awaited."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def errors(self) -> list[str]:
        """What the console was told since the last call, warnings too."""
        told = self._send("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in told if entry["level"] in ("WARNING", "SEVERE")]

    def emulate(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Size of the page, in its own pixels, and the scheme of colours that its reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def tell(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """What is seen, or the whole page, as PNG."""
        found = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        try:
            self._send("DELETE", "", None)
        finally:
            self.driver.terminate()
            self.driver.wait(LIMIT_S)

    def _send(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            told = json.load(error)["value"]
            raise RuntimeError(f"{path}: {told['error']}: {told['message'].splitlines()[0]}") from error
