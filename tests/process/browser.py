"""A headless Chromium, driven by its DevTools protocol over a WebSocket: pages are opened, clicked and looked
at as a person would."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 40.0


def executable() -> str | None:
    """The browser of this machine; None: there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Refused(AssertionError):
    """A command of the protocol failed, as an evaluation does while the page is being left."""


class Page:
    """`complaints`: errors of scripts, and what the page's own policy has kept it from."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._count = socket, 0
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            told = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if told.get("id") == self._count:
                if "error" in told:
                    raise Refused(f"{method}: {told['error']}")
                result: dict[str, Any] = told["result"]
                return result
            self._hear(told)

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(event["params"]["entry"]["text"])

    def evaluate(self, script: str) -> Any:
        """What an expression of JavaScript gives."""
        value, failed = self._evaluated(script)
        assert failed is None, failed
        return value

    def wait(self, script: str) -> Any:
        """Wait until an expression is true (an element is not: say !== null); what it gives. It may fail at
        first: what it speaks of need not be there yet."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found, failed = self._evaluated(script)
            if found:
                return found
            assert time.monotonic() < deadline, f"{script} did not come true; {failed}; {self.complaints}"
            time.sleep(0.05)

    def _evaluated(self, script: str) -> tuple[Any, Any]:
        """Its value, and how it failed."""
        try:
            told = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        except Refused as error:
            return None, str(error)
        return told["result"].get("value"), told.get("exceptionDetails")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first element that is there."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{found} !== null")
        x, y = self.evaluate(
            f"(() => {{ const one = {found}; one.scrollIntoView({{block: 'nearest'}});"
            "const box = one.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """In place of what stands in a field."""
        self.click(selector)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.send("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """An option of a <select>."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(
            f"(() => {{ const one = {found}; one.value = {json.dumps(value)};"
            "one.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def picture(self, width: int = 1280, height: int = 800) -> bytes:
        """The page as a PNG."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(0.3)  # it is laid out anew
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page in a browser of its own, whose profile is in `folder`."""
    name = executable()
    assert name is not None
    options = ["--headless=new", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu"]
    options += ["--disable-dev-shm-usage", "--window-size=1280,800", f"--user-data-dir={folder}"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # it refuses to start as root with one
    process = subprocess.Popen(
        [name, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        port = _port(folder / "DevToolsActivePort", process)
        [target] = [one for one in _targets(port) if one["type"] == "page"]
        with connect(target["webSocketDebuggerUrl"], max_size=64 << 20, open_timeout=PATIENCE_S) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while not (file.exists() and file.read_text().count("\n")):
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.05)
    return int(file.read_text().split("\n")[0])


def _targets(port: int) -> Any:
    with httpx.Client(trust_env=False) as client:
        return client.get(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE_S).json()
