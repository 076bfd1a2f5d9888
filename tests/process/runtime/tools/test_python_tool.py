"""The Python tool: what it prints, and that what it may not do is contained."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.tools.python_tool import PythonLimits, PythonTool
from runtime.tools.tool_server import ToolResult

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and Landlock are Linux's")
FAST = PythonLimits(
    seconds=8.0, memory_bytes=400 << 20, file_bytes=1 << 20, folder_bytes=8 << 20, files=200, processes=12,
    output=2000,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _locked_in() -> None:
    """Containers often allow neither namespaces nor Landlock: code is refused there, and nothing is to be
    seen of what it may not do."""
    [found] = ran("print('in')")
    if "cannot lock code in" in found.text:
        pytest.skip(found.text)


def ran(*codes: str, limits: PythonLimits = FAST) -> list[ToolResult]:
    async def run() -> list[ToolResult]:
        async with PythonTool(limits).session() as session:
            return [await session.call("python", {"code": code}) for code in codes]

    return asyncio.run(asyncio.wait_for(run(), 110))


def test_what_it_prints() -> None:
    [one, two, three, kept] = ran(
        "print(sum(range(5)))",
        "import json, math, statistics; open('a.txt', 'w').write('kept'); print(json.dumps(math.pi))",
        "1/0",
        "print(open('a.txt').read())",
    )
    assert one == ToolResult("10\n")
    assert two.text.startswith("3.14159")
    assert three.is_error
    assert "ZeroDivisionError" in three.text
    assert kept.text == "kept\n", "a session keeps its files"
    assert ran("import os; print(os.listdir('.'))") == [ToolResult("[]\n")]
    assert ran("import asyncio; asyncio.run(asyncio.sleep(0)); print('slept')") == [ToolResult("slept\n")]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        # Asks to outlive its parents, and leaves their group.
        "import ctypes, os, time; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); os.setsid(); time.sleep(600)",
    ],
)
def test_what_does_not_end(code: str) -> None:
    [where, found] = ran("import os; print(os.getcwd())", code)
    assert found.is_error
    assert processes(where.text.strip()) == []


def processes(folder: str) -> list[str]:
    """Those of the sandbox that work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if folder.encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found


def test_a_folder_is_gone_in_the_end() -> None:
    where, deep = ran(
        "import os; print(os.getcwd())",
        "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\nopen('end', 'w')",
        limits=replace(FAST, files=10_000),
    )
    assert not os.path.exists(where.text.strip()), deep


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = bytearray(10 << 30)", "MemoryError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("import os; os.listdir('/')", "PermissionError"),
        ("open('/tmp/escaped', 'w')", "PermissionError"),
        ("import os; os.symlink('/etc', 'link'); open('link/passwd')", "PermissionError"),
        ("open('big', 'wb').write(bytes(2 << 20))", ""),
        ("n = 0\nwhile True: open(f'n{n}', 'wb').write(bytes(1 << 20)); n += 1", "files; they are gone"),
        ("n = 0\nwhile True: open(f'n{n}', 'wb'); n += 1", "files; they are gone"),
        ("import os\nwhile True: os.mkdir('d' * 90); os.chdir('d' * 90)", "files; they are gone"),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "Error"),
        ("import socket; socket.socket().connect(('127.0.0.1', 1))", "Error"),
        ("import os\ntry: os.kill(os.getppid(), 9)\nfinally: 1/0", "ZeroDivisionError"),
        ("import subprocess; subprocess.run(['cat', '/etc/hostname'], check=True)", "Error"),
    ],
)
def test_what_is_contained(code: str, told: str) -> None:
    [found] = ran(code)
    assert found.is_error, found
    assert told in found.text
    assert not os.path.exists("/tmp/escaped")


def test_sockets_in_files_are_not_reached() -> None:
    """Landlock lets who knows the path connect."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as made:
        path = f"{folder}/s"
        made.bind(path)
        made.listen()
        os.chmod(folder, 0o755)
        os.chmod(path, 0o777)
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(path)
        [found] = ran(f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})")
    assert "PermissionError" in found.text


def test_a_folder_that_hides_its_files_is_full() -> None:
    """Where the server is not root, the code's user is its own, and the code may close a folder to it."""
    program = """
import os, sys, tempfile
from runtime.tools.python_tool import PythonLimits, PythonSession, _remove
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
folder = tempfile.mkdtemp(prefix="closed-")
session = PythonSession(folder, PythonLimits())
for closed in (f"{folder}/inner", folder):
    os.makedirs(closed, exist_ok=True)
    assert session._has_space()
    open(f"{closed}/file", "w").close()
    os.chmod(closed, 0o300)
    assert not session._has_space(), closed
    os.chmod(closed, 0o700 if closed != folder else 0o300)
_remove(folder)
assert not os.path.exists(folder)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_session_goes_on_after_too_much() -> None:
    full, after = ran("for n in range(9): open(f'n{n}', 'wb').write(bytes(1 << 20))",
                      "import os; open('a', 'w'); print(os.listdir('.'))")  # fmt: skip
    assert full.is_error
    assert after == ToolResult("['a']\n")


def test_the_environment_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    [found] = ran("import os; print(sorted(os.environ))")
    assert "SECRET" not in found.text
    assert "PATH" in found.text


def test_much_output_is_cut() -> None:
    [found] = ran("while True: print('x' * 1000)")
    assert found.is_error
    assert len(found.text) < 2100


def test_what_is_no_code() -> None:
    async def run() -> list[ToolResult]:
        async with PythonTool(FAST).session() as session:
            return [await session.call("python", {}), await session.call("other", {"code": "1"})]

    assert all(found.is_error for found in asyncio.run(run()))
