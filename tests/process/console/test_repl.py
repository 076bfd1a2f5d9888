"""The prompt in a real terminal: streams, forks, undo, Ctrl-C, files; and what it exports, run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.process.conftest import Served
from tests.process.patience import PATIENCE_S, held
from tests.process.terminal import CTRL_C, CTRL_D, ROOT, TAB, UP, Terminal, terminal

RIVER = 's += user("Which river runs through Ostrel?") + assistant(gen("river", max_tokens=24))'
LONG = 's += user("tell") + assistant(gen("long", regex="([a-z]{9} ){600}", max_tokens=1900))'


def talk(seen: Terminal, url: str) -> None:
    """What can be done in a session, in one."""
    seen.shows("on http")
    seen.prompt()
    seen.runs(RIVER, r"^user +Which river", r"^assistant +.*Sarn.* ⟵ river", r"\d+ tokens")
    assert seen.colour("Sarn") in ("brown", "yellow")  # what the model wrote stands out
    assert seen.colour("Which river runs through Ostrel?\n"[:11]) != "brown"
    seen.runs('len(s["river"]) > 3', "^True")

    seen.runs(":fork 3 What do people eat there?", "^3 branches", "├── 0 .*What do people", "2 .*user")
    seen.runs(":fork take 1", "^assistant .*plum soup")
    seen.runs(":undo 2", "taken back: forks", "taken back: s.adopt")

    seen.press(LONG + "\r")
    seen.shows(r"^assistant +([a-z]{9} ){5}")
    with held(url):
        seen.press(CTRL_C)
        seen.shows("stopped; the text so far stays")
        seen.prompt()
    seen.runs('len(s["long"]) > 50, s.messages()[-1]["role"]', r"\(True, 'assistant'\)")
    seen.runs(":undo", "taken back: .*tell")
    seen.runs('"long" in s', "^False")

    seen.runs("1/0", "ZeroDivisionError")
    seen.runs('s += user("lost") + gen("x", regex="(")', "BadProgram: .*cannot be compiled")
    seen.runs(":vars", r"^river +str")
    seen.runs(":save talk.json", "saved as")


def test_a_session(tmp_path: Path, shared_server: Served) -> None:
    words = ["--backend", shared_server.url, "--temperature", "0"]
    with terminal(tmp_path, *words) as seen:
        talk(seen, shared_server.url)
        seen.runs(":export talk.py", "a program")
        seen.runs(":export talk.ipynb", "a notebook")
        seen.press("for i in range(2):\rprint('line', i)\r\r")
        seen.shows("^line 0\nline 1")
        seen.prompt()
        seen.press("s.mess" + TAB)
        seen.shows(r"s\.messages$")
        seen.press(CTRL_C)  # takes back what was typed
        seen.runs("sum(range(1000))", "^499500")
        seen.press('s["ri' + TAB)
        seen.shows(r's\["river')
        seen.press(CTRL_C)
        seen.runs("%who_ls str", r"^\[")
        seen.press(CTRL_D)
        assert seen.ends() == 0
    assert "Traceback" not in seen.text
    with terminal(tmp_path, *words) as seen:  # another process goes on where this one was
        seen.shows("on http")
        seen.runs(":load talk.json", "1 variables, ", "^assistant .*Sarn")
        seen.runs('s += user("Who rules there?") + assistant(gen("ruler"))', "Queen Ilva")
        seen.press(":quit\r")
        assert seen.ends() == 0

    done = subprocess.run(
        [sys.executable, "-P", "talk.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Sarn" in done.stdout
    assert "plum soup" not in done.stdout  # it was taken back
    cells = json.loads((tmp_path / "talk.ipynb").read_text())["cells"]
    assert [cell["cell_type"] for cell in cells][:3] == ["markdown", "code", "code"]


def test_a_model_that_is_nowhere_ends_it_in_one_line(tmp_path: Path) -> None:
    with terminal(tmp_path, "--model", "/nowhere") as seen:
        assert seen.ends() == 2
    assert "error: " in seen.text
    assert "/nowhere: there is no such directory" in seen.text
    assert "Traceback" not in seen.text


def test_without_ipython_it_reads_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "IPython.py").write_text("raise ImportError('No module named IPython')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with terminal(tmp_path, "--backend", "mock", environment={"PYTHONPATH": path}) as seen:
        seen.shows("^>$")
        seen.press("for i in range(2):\r    print('line', i)\r\r")
        seen.shows("^line 0\nline 1")
        seen.press('s += user("Q") + assistant(gen("answer"))\r')
        seen.shows("^assistant .* ⟵ answer")
        seen.press("s.mess" + TAB)
        seen.shows(r"s\.messages\(")
        seen.press(CTRL_C)
        seen.shows("^> $|^>$")
        seen.press(UP + "\r")  # once more
        seen.shows("^assistant .* ⟵ answer")
        seen.press(":quit\r")
        assert seen.ends() == 0
    assert "Traceback" not in seen.text
