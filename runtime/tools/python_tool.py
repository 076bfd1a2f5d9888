"""PythonTool: runs a model's Python code in a process of its own, locked in, with limits."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.formats.tools.types import Tool
from runtime.tools.tool_server import ToolNamespace, ToolResult

_CHILD = Path(__file__).with_name("sandbox_child.py")
_REFUSED = 97
MOST_CODE = 1 << 20
"""Characters of code, at most."""

DESCRIPTION = (
    "Runs Python code and gives what it printed. Each call is a new process; files in the current folder "
    "stay for the session. There is no network."
)
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


@dataclass(frozen=True)
class PythonLimits:
    """Of each call. seconds: of the clock; the CPU's as many. memory_bytes: address space of each process.
    file_bytes: of each file. output: characters that are kept."""

    seconds: float = 20.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 64 << 20
    processes: int = 16
    output: int = 32_000


class PythonTool:
    """The namespace "python": one tool of the same name."""

    def __init__(self, limits: PythonLimits | None = None) -> None:
        self._limits = limits or PythonLimits()
        self.namespace = ToolNamespace("python", DESCRIPTION, (Tool("python", SCHEMA, DESCRIPTION),))

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[PythonSession, None]:
        """With a folder of its own, which is gone afterwards."""
        folder = tempfile.mkdtemp(prefix="sglang-dsl-python-")
        os.chmod(folder, 0o777)  # root gives its code to nobody, who must be able to write here
        try:
            yield PythonSession(folder, self._limits)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)


class PythonSession:
    """Calls one after another in one folder."""

    def __init__(self, folder: str, limits: PythonLimits) -> None:
        self._folder, self._limits = folder, limits

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if name != "python" or not isinstance(code, str):
            return ToolResult('python takes {"code": "..."}', True)
        if len(code) > MOST_CODE:
            return ToolResult(f"the code has {len(code)} characters; at most {MOST_CODE}", True)
        limits = self._limits
        words = (limits.memory_bytes, max(1, round(limits.seconds)), limits.file_bytes, limits.processes)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-X", "utf8", str(_CHILD), self._folder, *map(str, words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", "HOME": self._folder, "TMPDIR": self._folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(limits.seconds):
                text, cut = await self._read(process, code)
                status = await process.wait()
        except TimeoutError:
            return ToolResult(f"the code did not end within {limits.seconds:g} s", True)
        finally:
            _end(process)
            await process.wait()
        if status == _REFUSED:
            return ToolResult(f"this system cannot lock code in, so it was not run: {text.strip()}", True)
        if cut:
            return ToolResult(f"{text}\n[cut: more than {limits.output} characters]", True)
        if status:
            return ToolResult(text or f"the code was ended: status {status}", True)
        return ToolResult(text)

    async def _read(self, process: asyncio.subprocess.Process, code: str) -> tuple[str, bool]:
        """What it prints, and whether that was too much; then it is ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(ConnectionError):
            process.stdin.write(code.encode("utf-8", "replace"))
            await process.stdin.drain()
            process.stdin.close()
        pieces, size = [], 0
        while piece := await process.stdout.read(1 << 16):
            pieces.append(piece)
            size += len(piece)
            if size > 4 * self._limits.output:
                _end(process)
                break
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[: self._limits.output], len(text) > self._limits.output


def _end(process: asyncio.subprocess.Process) -> None:
    """It and all it started: the namespace's first process ends with it."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
