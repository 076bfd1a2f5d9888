"""Notebooks with `%load_ext sglang_dsl`, executed by nbclient in a kernel of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.process.conftest import Served
from tests.process.patience import PATIENCE_S
from tests.process.terminal import ROOT, terminal


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")


def executed(notebook: Any, folder: Path, **words: Any) -> list[Any]:
    """Its code cells, with their outputs."""
    NotebookClient(
        notebook,
        timeout=PATIENCE_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        **words,
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def data(cell: Any, kind: str) -> str:
    return "".join(str(output.get("data", {}).get(kind, "")) for output in cell.outputs)


def test_cells_of_a_session(tmp_path: Path, shared_server: Served) -> None:
    v4: Any = nbformat.v4
    notebook = v4.new_notebook(
        cells=[
            v4.new_code_cell(source)
            for source in (
                f"%load_ext sglang_dsl\n%sgl backend {shared_server.url}\n%sgl set temperature=0",
                '%%sgl\ns += user("Which river runs through Ostrel?") + assistant(gen("river"))\ns["river"]',
                's["river"]',
                "%%sgl\n:fork 2 Who rules there?",
                "%sgl undo",
                "%sgl vars",
                "%%sgl\n1/0",
            )
        ]
    )
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        executed(notebook, tmp_path)
    begin, river, plain, fork, undo, table, failed = notebook.cells
    assert [one.output_type for one in begin.outputs] in ([], ["display_data"])
    assert "Sarn" in data(river, "text/html")
    assert "<mark" in data(river, "text/html")
    assert "ASSISTANT: " in data(river, "text/plain")
    assert "Sarn" in data(plain, "text/plain")
    assert "branch 1" in data(fork, "text/html")
    assert "taken back" in str(undo.outputs)
    assert "river" in str(table.outputs)
    traceback = "".join(failed.outputs[-1]["traceback"])
    assert "1/0" in traceback
    assert "session.py" not in traceback


def test_what_the_prompt_exports(tmp_path: Path, shared_server: Served) -> None:
    with terminal(tmp_path, "--backend", shared_server.url, "--temperature", "0") as seen:
        seen.shows("on http")
        seen.runs('s += user("Which river runs through Ostrel?")', "^user")
        seen.runs('s += assistant(gen("river"))', "^assistant .*Sarn")
        seen.runs(":export talk.ipynb", "a notebook")
        seen.press(":quit\r")
        assert seen.ends() == 0
    cells = executed(nbformat.read(tmp_path / "talk.ipynb", as_version=4), tmp_path)
    assert "Sarn" in data(cells[-1], "text/html")


def test_states_and_errors_where_nobody_looks_on(tmp_path: Path) -> None:
    """A notebook that a program executes: what runs is waited for and shown whole, and errors are short."""
    v4: Any = nbformat.v4
    notebook = v4.new_notebook(
        cells=[
            v4.new_code_cell(source)
            for source in (
                "import sglang_dsl as sgl\n"
                "from sglang_dsl import MockBackend, gen\n"
                "@sgl.function\n"
                "def asks(s, what='x'):\n"
                "    s += sgl.user(what) + sgl.assistant(gen('answer'))\n"
                "def outer(backend):\n"
                "    return asks.run(backend=backend)['answer']\n"
                "class Broken(MockBackend):\n"
                "    async def generate(self, call):\n"
                "        raise RuntimeError('down')",
                "asks.stream(backend=MockBackend(['one two three'], chunk_delay_s=0.4))",
                "asks.run_batch([{'what': 'a'}, {'what': 'b'}], backend=MockBackend(), progress_bar=True)",
                "await asks.arun(backend=MockBackend(['four']))",
                "outer(Broken())",
            )
        ]
    )
    with pytest.raises(CellExecutionError, match="RuntimeError: down"):
        executed(notebook, tmp_path)
    _, stream, batch, awaited, failed = notebook.cells
    assert "one two three</mark>" in data(stream, "text/html")
    assert "flowchart" in data(stream, "text/vnd.mermaid")
    assert "one two three" in data(stream, "text/plain")
    assert "widget-view" not in str(stream.outputs)
    assert "<td" in data(batch, "text/html")
    assert "Batch(2 results)" in data(batch, "text/plain")
    assert "widget-view" in str(batch.outputs)  # the bar
    assert data(awaited, "text/html")
    lines = "\n".join(failed.outputs[-1]["traceback"]).splitlines()
    assert len(lines) <= 24
    assert not any("sglang_dsl/" in line for line in lines)
    assert any("outer(Broken())" in line for line in lines)
    assert any("at Cell In[1]:5" in line for line in lines)  # and no file that nobody has


STREAM = """
import asyncio, pathlib
import sglang_dsl as sgl
from sglang_dsl import MockBackend, gen

class Gated(MockBackend):
    "Says a piece for each file that there is."
    async def stream(self, call):
        async for delta in super().stream(call):
            while not pathlib.Path(str(self.said)).exists():
                await asyncio.sleep(0.02)
            self.said += 1
            yield delta

@sgl.function
def forked(s):
    forks = s.fork(1)
    forks += sgl.user("<b>") + sgl.assistant(gen("x"))
    groups.append(forks)
    forks.join()

groups, backend = [], Gated(["one two "], split=4)
backend.said = 0
state = forked.stream(backend=backend)
while not groups:
    await asyncio.sleep(0.02)
display(groups[0])
"""
"""What is shown is a group of forks of a running state."""


def test_what_runs_is_shown_live_where_somebody_looks_on(tmp_path: Path) -> None:
    """By the messages that a front end is sent."""
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    told: list[Any] = []

    def hears(kind: str, holds: Callable[[Any], bool]) -> Any:
        """Wait for a message of the kernel."""
        while True:
            message = client.get_iopub_msg(timeout=PATIENCE_S)
            told.append(message)
            if message["msg_type"] == kind and holds(message["content"]):
                return message["content"]

    def page(content: Any) -> str:
        return str(content["data"].get("state", {}).get("value", ""))

    try:
        client.execute(STREAM, allow_stdin=True)
        shown = hears("display_data", lambda content: True)
        assert "<mark" not in shown["data"]["text/html"]  # nothing was said yet
        assert "ProgramStateGroup(1 fork, 1 running)" in shown["data"]["text/plain"]
        assert "application/vnd.jupyter.widget-view+json" in shown["data"]
        hears("status", lambda content: content["execution_state"] == "idle")  # the cell does not wait
        (tmp_path / "0").touch()
        assert "&lt;b&gt;" in page(hears("comm_msg", lambda content: ">one </mark>" in page(content)))
        for number in (1, 2):  # the last delta says why it ends
            (tmp_path / str(number)).touch()
        end = hears("update_display_data", lambda content: True)
        assert end["transient"] == shown["transient"]
        assert ">one two </mark>" in end["data"]["text/html"]
        assert "gen x" in end["data"]["text/vnd.mermaid"]
        assert "application/vnd.jupyter.widget-view+json" not in end["data"]
        assert not [one for one in told if one["msg_type"] == "error"], told
        # Without widgets the cell waits for the whole.
        client.execute("import sys; sys.modules['ipywidgets'] = None", allow_stdin=True)
        again = STREAM.replace("display(groups[0])", "groups[0]")
        client.execute(again, allow_stdin=True)
        whole = hears("execute_result", lambda content: True)
        assert ">one two </mark>" in whole["data"]["text/html"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
