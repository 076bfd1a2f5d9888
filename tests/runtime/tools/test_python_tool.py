"""The Python tool: what it prints, and that what it may not do is contained."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from runtime.tools.python_tool import PythonLimits, PythonTool
from runtime.tools.tool_server import ToolResult

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and Landlock")
FAST = PythonLimits(seconds=8.0, memory_bytes=400 << 20, file_bytes=1 << 20, processes=12, output=2000)


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


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    ],
)
def test_what_does_not_end(code: str) -> None:
    before = processes()
    [found] = ran(code)
    assert found.is_error
    assert processes() - before == set()


def processes() -> set[str]:
    """Running processes of the sandbox."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"sandbox_child" in (entry / "cmdline").read_bytes():
                    found.add(entry.name)
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = bytearray(10 << 30)", "MemoryError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("import os; os.listdir('/')", "PermissionError"),
        ("open('/tmp/escaped', 'w')", "PermissionError"),
        ("import os; os.symlink('/etc', 'link'); open('link/passwd')", "PermissionError"),
        ("open('big', 'wb').write(bytes(2 << 20))", ""),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "Error"),
        ("import socket; socket.socket().connect(('127.0.0.1', 1))", "Error"),
        ("import os; os.kill(os.getppid(), 9) if os.getppid() else print(1/0)", "ZeroDivisionError"),
        ("import subprocess; subprocess.run(['cat', '/etc/hostname'], check=True)", "Error"),
    ],
)
def test_what_is_contained(code: str, told: str) -> None:
    [found] = ran(code)
    assert found.is_error, found
    assert told in found.text
    assert not os.path.exists("/tmp/escaped")


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
