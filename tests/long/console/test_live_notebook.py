"""JupyterLab in a real browser: a running state streams into its cell, beside the cells that follow."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nbformat
import pytest

from tests.process.patience import PATIENCE_S, until
from tests.process.terminal import ROOT

pytest.importorskip("websockets", reason="the browser is driven by the package websockets")
from tests.process.browser import Page, browser, executable

pytestmark = [pytest.mark.timeout(900)]

BEGIN = """
import pathlib, asyncio
import sglang_dsl as sgl
from sglang_dsl import MockBackend, gen

class Told(MockBackend):
    "Says a word for each file that there is."
    async def stream(self, call):
        async for delta in super().stream(call):
            while not pathlib.Path("go", str(self.said)).exists():
                await asyncio.sleep(0.02)
            self.said += 1
            yield delta

@sgl.function
def tells(s):
    s += sgl.user("<b>Tell.</b>") + sgl.assistant(gen("words"))

def told():
    backend = Told(["first <i>second</i> third"], split=6)
    backend.said = 0
    return backend
"""
LIVE = "state = tells.stream(backend=told())\nstate"
AFTER = 'print("this ran " + "while it spoke" if state.snapshot().running else "too late")'
STOPPED = "stopped = tells.stream(backend=MockBackend(['a b c'], chunk_delay_s=3600))\nstopped"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a server with live.ipynb, %s for the notebook's name."""
    for package in ("jupyterlab", "ipywidgets"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if executable() is None:
        pytest.skip("no browser is installed: apt-get install chromium")
    (tmp_path / "go").mkdir()
    v4: Any = nbformat.v4
    for name, cells in (("live", (BEGIN, LIVE, AFTER)), ("stop", (BEGIN, STOPPED))):
        notebook = v4.new_notebook(cells=[v4.new_code_cell(cell.strip()) for cell in cells])
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    token = secrets.token_hex(8)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = {
        name: str(tmp_path / name.lower())
        for name in (
            "HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR",
        )
    }  # fmt: skip
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **places, "PYTHONPATH": path, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
        "--LabApp.expose_app_in_browser=True", f"--ServerApp.root_dir={tmp_path}",
    ]  # fmt: skip
    with (tmp_path / "lab.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
    try:
        address = f"http://127.0.0.1:{port}"
        _answers(f"{address}/api?token={token}", process, tmp_path / "lab.log")
        yield f"{address}/lab/tree/%s.ipynb?token={token}"
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


PANEL = "window.jupyterapp && [...window.jupyterapp.shell.widgets('main')].find(one => one.sessionContext)"
READY = f"""(() => {{ const panel = {PANEL}, session = panel && panel.sessionContext.session;
  return !!(session && session.kernel && session.kernel.status === 'idle'); }})()"""
MARKS = "[...document.querySelectorAll('.jp-OutputArea mark')].map(one => one.innerText).join('|')"
BUTTON = ".jp-OutputArea button.jupyter-button"
BUTTONS = f"document.querySelectorAll('{BUTTON}').length"
TEXT = "document.body.innerText"


def shows(page: Page, script: str) -> None:
    """Wait until an expression is true of the page."""
    until(lambda: page.evaluate(script), lambda: f"{script}; it shows {page.evaluate(TEXT)[-3000:]}")


def begun(page: Page, url: str) -> None:
    """A notebook opened, its kernel there, and all cells begun."""
    page.send("Page.navigate", url=url)  # it goes on to an address without the token
    shows(page, READY)
    page.evaluate(f"window.jupyterapp.shell.activateById(({PANEL}).id)")
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")


def test_a_running_state_streams_into_its_cell(lab: str, tmp_path: Path) -> None:
    with browser(tmp_path / "browser") as page:
        begun(page, lab % "live")
        shows(page, f"{TEXT}.includes('this ran while it spoke')")  # the next cell, before the first word
        shows(page, f"{TEXT}.includes('<b>Tell.</b>')")
        for number, words in enumerate(["first ", "first <i>sec", "first <i>second</i"]):
            (tmp_path / "go" / str(number)).touch()
            shows(page, f"{MARKS} === {words.rstrip()!r} || {MARKS} === {words!r}")
            assert page.evaluate(BUTTONS) == 1
        for number in range(3, 9):
            (tmp_path / "go" / str(number)).touch()
        shows(page, f"{MARKS} === 'first <i>second</i> third'")
        shows(page, f"{BUTTONS} === 0")  # the page itself stays, without the widget
        assert page.evaluate(MARKS) == "first <i>second</i> third"
        assert "tells: 1 call" in page.evaluate(TEXT)
        page.evaluate(f"({PANEL}).context.save().then(() => 1)")
    saved = nbformat.read(tmp_path / "live.ipynb", as_version=4)
    [output] = saved.cells[1].outputs
    assert "third" in output["data"]["text/html"]
    assert "flowchart" in output["data"]["text/vnd.mermaid"]
    assert "ProgramState(" in output["data"]["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" not in output["data"]


def test_the_button_stops_it(lab: str, tmp_path: Path) -> None:
    with browser(tmp_path / "browser") as page:
        begun(page, lab % "stop")
        shows(page, f"{BUTTONS} === 1")
        page.click(BUTTON)
        shows(page, f"{TEXT}.includes('ProgramCancelled')")
        shows(page, f"{BUTTONS} === 0")
