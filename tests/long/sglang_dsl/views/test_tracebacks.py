"""A failure shows the user's own lines: in a script, and in the shell that notebooks run their cells in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.mock import MockBackend

MOST = 15
"""Lines. IPython shows up to five for each of the user's own frames, and six for a cause."""
PROGRAMS = """
import asyncio
import sglang_dsl as sgl
from sglang_dsl.backends.base import Completion

class Backend(sgl.MockBackend):
    async def generate(self, call):
        return self.answered_by_the_user(call)
    def answered_by_the_user(self, call):
        raise OSError("no answer today")

@sgl.function
def asks(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("a", int, max_tokens=4))

@sgl.function
def reads(s, question):
    s += question + sgl.gen("a", int, max_tokens=4)
    return s["a"] + 1

@sgl.function
def breaks(s, question):
    s += question
    raise LookupError("of the user's own")

@sgl.function
async def breaks_async(s, question):
    s += question
    raise LookupError("of the user's own")

class Odd(sgl.MockBackend):
    async def generate(self, call):
        return Completion(("no number",))

MOCK = sgl.MockBackend(["1"])
ODD = Odd()
DOWN = sgl.MockBackend(errors={0: RuntimeError("it is down")})
ITEMS = [{"question": "x"}]

async def streamed(program):
    state = await program.astream("x", backend=MOCK)
    await state.sync()

async def awaited(program):
    state = await program.arun("x", backend=REFUSED)
    return await state["a"]

async def batched(program):
    async for state in program.arun_batch(ITEMS, backend=ODD):
        pass
"""
# What is run -> what its last line says.
FAILURES = {
    'asks("x", backend=REFUSED)["a"]': "BackendError: no connection to",
    'reads("x", backend=REFUSED)': "BackendError: no connection to",
    'asks("x", backend=REFUSED).text()': "BackendError: no connection to",
    "asks.run_batch(ITEMS, backend=REFUSED)": "BackendError: no connection to",
    'list(asks.stream("x", backend=REFUSED).text_iter("a"))': "BackendError: no connection to",
    'asks("x", backend=ODD)["a"]': "InvalidValue: the text is not a valid int",
    'reads("x", backend=ODD)': "InvalidValue: the text is not a valid int",
    "reads.run_batch(ITEMS, backend=ODD)": "InvalidValue: the text is not a valid int",
    'asks("x", backend=DOWN).messages()': "BackendError: RuntimeError: it is down",
    'breaks("x", backend=MOCK)': "LookupError: of the user's own",
    "breaks.run_batch(ITEMS, backend=MOCK)": "LookupError: of the user's own",
    "list(breaks.run_batch(ITEMS, backend=MOCK, generator_style=True))": "LookupError: of the user's own",
    'breaks.stream("x", backend=MOCK).sync()': "LookupError: of the user's own",
    "asyncio.run(streamed(breaks))": "LookupError: of the user's own",
    "asyncio.run(streamed(breaks_async))": "LookupError: of the user's own",
    "asyncio.run(batched(breaks_async))": "LookupError: of the user's own",
    "asyncio.run(batched(reads))": "InvalidValue: the text is not a valid int",
    'asyncio.run(breaks_async("x", backend=MOCK))': "LookupError: of the user's own",
    "asyncio.run(awaited(asks))": "BackendError: no connection to",
    'breaks_async.run("x", backend=MOCK)': "LookupError: of the user's own",
    "asks(backend=MOCK)": "TypeError: asks: missing a required argument: 'question'",
    'asks("x", temperature=-1)': "BadProgram: temperature must be",
    'asks("x", backend=3)': "TypeError: backend takes",
    'asks("x")': "NoBackend: program 'asks' generates but has no backend",
    'asks.options(color="red")': "BadProgram: unknown option color",
    "asks.run_batch([3], backend=MOCK)": "BadProgram: an item of a batch is",
    'asks("x", backend=MOCK)["b"]': "MissingVariable: no variable 'b'",
    'sgl.gen("a", regex="(")': "BadProgram: regex '(' cannot be compiled",
    'sgl.gen("a", json_schema="{")': "BadProgram: json_schema is not JSON",
    'sgl.select("a", [])': "BadProgram: choices is empty",
    'sgl.gen("a", colour=3)': "TypeError: gen() got an unexpected keyword argument 'colour'",
    "breaks.trace()": "BadProgram: breaks cannot be traced without a run",
}
RUN_CELLS = """
import contextlib, io, json, sys
from IPython.core.interactiveshell import InteractiveShell
programs, cells = json.load(sys.stdin)
shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell(programs)
said = []
for cell in cells:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        shell.run_cell(cell)
    said.append(out.getvalue())
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def programs() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"{PROGRAMS}\nREFUSED = 'http://127.0.0.1:{unused.getsockname()[1]}'\n"


def python(*arguments: str, said: str = "", whole: bool = False) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"SGLANG_DSL_FULL_TRACEBACK": "1" if whole else ""}
    return subprocess.run(
        [sys.executable, *arguments], input=said, capture_output=True, text=True, timeout=300, env=env
    )


def check(shown: str, ends: str) -> None:
    """Without those that asyncio.run() adds itself, above all others, and the note of an item of a batch."""
    lines = [line for line in shown.strip().splitlines() if line.strip(" ^")]
    own = [number for number, line in enumerate(lines) if f"{os.sep}asyncio{os.sep}" in line]
    lines = [line for number, line in enumerate(lines) if number not in own and number - 1 not in own]
    if lines[-1].startswith("item 0 of "):
        lines.pop()
    assert lines[-1].removeprefix("sglang_dsl.errors.").startswith(ends), shown
    assert len(lines) <= MOST, shown
    assert f"{os.sep}sglang_dsl{os.sep}" not in "".join(line for line in lines if "line " in line), shown


def test_every_failure_is_a_few_lines_in_a_notebooks_shell(programs: str) -> None:
    pytest.importorskip("IPython")
    cells = [cell.replace("asyncio.run(", "await (") for cell in FAILURES]
    done = python("-c", RUN_CELLS, said=json.dumps([programs, cells]))
    assert done.returncode == 0, done.stderr
    for shown, ends in zip(json.loads(done.stdout.splitlines()[-1]), FAILURES.values(), strict=True):
        check(shown, ends)


def test_every_failure_is_a_few_lines_in_a_script(programs: str, tmp_path: Path) -> None:
    """As the interpreter prints them: with the stack of the program alone."""
    script = tmp_path / "script.py"
    shown = "    sys.excepthook(type(error), error, error.__traceback__)\nprint('====', file=sys.stderr)\n"
    tried = "".join(f"try:\n    {cell}\nexcept Exception as error:\n{shown}" for cell in FAILURES)
    script.write_text(f"{programs}\nimport sys\n{tried}", encoding="utf-8")
    done = python(str(script))
    assert done.returncode == 0, done.stderr
    for shown, ends in zip(done.stderr.split("====\n")[:-1], FAILURES.values(), strict=True):
        check(shown, ends)


def test_a_users_own_lines_are_all_there(programs: str, tmp_path: Path) -> None:
    """Those of a body, of a program that it calls, and of a backend of one's own."""
    script = tmp_path / "script.py"
    outer = "\n@sgl.function\ndef outer(s):\n    reads('x')\n"
    script.write_text(f"{programs}{outer}\nouter(backend=Backend())\n", encoding="utf-8")
    shown = python(str(script)).stderr
    for line in (
        "outer(backend=Backend())", "reads('x')", 'return s["a"] + 1', 'raise OSError("no answer today")',
        "return self.answered_by_the_user(call)",
    ):  # fmt: skip
        assert line in shown, shown
    assert "concurrent" not in shown


def test_the_whole_is_there_on_request(programs: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{programs}\nasks('x', backend=REFUSED)['a']\n", encoding="utf-8")
    shown = python(str(script), whole=True).stderr
    assert len(shown.splitlines()) > 40
    assert "transport.py" in shown
    assert "httpcore" in shown
    told = "try:\n    asks('x', backend=REFUSED)['a']\nexcept sgl.SglError as error:\n"
    script.write_text(f"{programs}\n{told}    print(error.full_traceback())\n", encoding="utf-8")
    shown = python(str(script)).stdout
    for part in ("transport.py", "httpcore", "which led to:", "script.py", "BackendError: no connection to"):
        assert part in shown, shown


def test_each_reader_can_ask_for_the_whole_and_the_cause_stays() -> None:
    @sgl.function
    def asks(s: Any) -> None:
        s += sgl.gen("a")

    cause = RuntimeError("it is down")
    state = asks.run(backend=MockBackend(errors={0: cause}))
    for read in (lambda: state["a"], state.text, lambda: state.raw("a")):
        with pytest.raises(sgl.BackendError) as caught:
            read()
        assert caught.value.__cause__ is cause
        assert "mock.py" in caught.value.full_traceback()
        assert "stacks" not in caught.value.fields()


def test_what_a_user_was_handling_is_still_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sglang_dsl as sgl\ntry:\n    int('x')\nexcept ValueError:\n    sgl.select('a', [])\n",
        encoding="utf-8",
    )
    shown = python(str(script)).stderr
    assert "int('x')" in shown
    assert "During handling of the above exception" in shown
