"""PythonTool: runs a model's Python code in a sandboxed process of its own, with limits."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.formats.tools.types import Tool
from runtime.tools.tool_server import ToolNamespace, ToolResult, ToolSession

log = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("sandbox_child.py")
_REFUSED = 97
UNPRIVILEGED_ID = 65534
MOST_CODE = 1 << 20
"""The most characters of code."""
WATCH_S = 0.2
"""The interval between checks of how much the code wrote."""

DESCRIPTION = (
    "Runs Python code and gives what it printed. Each call is a new process; files in the current folder "
    "stay for the session. There is no network."
)
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


@dataclass(frozen=True)
class PythonLimits:
    """Limits of each call. seconds: elapsed time, and as much CPU time. memory_bytes: address space of each
    process. file_bytes: of each file; folder_bytes, files: of the session's folder. output: characters
    kept."""

    seconds: float = 20.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 64 << 20
    folder_bytes: int = 256 << 20
    files: int = 10_000
    processes: int = 16
    output: int = 32_000


class PythonTool:
    """The namespace "python": one tool of the same name."""

    def __init__(self, limits: PythonLimits | None = None) -> None:
        self._limits = limits or PythonLimits()
        self.namespace = ToolNamespace("python", DESCRIPTION, (Tool("python", SCHEMA, DESCRIPTION),))

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[PythonSession, None]:
        """A session with a temporary folder."""
        folder = tempfile.mkdtemp(prefix="sglang-dsl-python-")
        _give(folder)
        try:
            yield PythonSession(folder, self._limits)
        finally:
            await asyncio.to_thread(_remove, folder)


class PythonSession(ToolSession):
    """Calls run one after another in one folder."""

    def __init__(self, folder: str, limits: PythonLimits) -> None:
        self._folder, self._limits = folder, limits

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if name != "python" or not isinstance(code, str):
            return ToolResult('python takes {"code": "..."}', True)
        if len(code) > MOST_CODE:
            return ToolResult(f"the code has {len(code)} characters; at most {MOST_CODE}", True)
        limits = self._limits
        seconds = max(1, round(limits.seconds))
        of_child = (limits.memory_bytes, seconds, limits.file_bytes, limits.processes)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-X", "utf8", str(_CHILD), self._folder, *map(str, of_child),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", "HOME": self._folder, "TMPDIR": self._folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        )  # fmt: skip
        watch = asyncio.create_task(self._watch(process), name="sglang-dsl-python-watch")
        try:
            async with asyncio.timeout(limits.seconds):
                text, cut = await self._read(process, code)
                status = await process.wait()
        except TimeoutError:
            return ToolResult(f"the code did not end within {limits.seconds:g} s", True)
        finally:
            watch.cancel()
            _end(process)
            await process.wait()
        if not await asyncio.to_thread(self._has_space):
            await asyncio.to_thread(_remove, self._folder)
            os.mkdir(self._folder, 0o700)
            _give(self._folder)
            much = f"more than {limits.folder_bytes} bytes or {limits.files} files"
            return ToolResult(f"the code wrote {much}; they are gone", True)
        if status == _REFUSED:
            return ToolResult(f"this system cannot lock code in, so it was not run: {text.strip()}", True)
        if cut:
            return ToolResult(f"{text}\n[cut: more than {limits.output} characters]", True)
        if status:
            return ToolResult(text or f"the code was ended: status {status}", True)
        return ToolResult(text)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """End the process when its folder is full."""
        while await asyncio.to_thread(self._has_space):
            await asyncio.sleep(WATCH_S)
        _end(process)

    def _has_space(self) -> bool:
        size, count, left = 0, 0, [self._folder]
        while left:
            try:
                with os.scandir(left.pop()) as entries:
                    for entry in entries:
                        count += 1
                        with suppress(FileNotFoundError):
                            size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            left.append(entry.path)
                        if count > self._limits.files or size > self._limits.folder_bytes:
                            return False
            except OSError as error:
                # Folders nested too deeply to be counted, or an unreadable one.
                if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
                    return False
        return True

    async def _read(self, process: asyncio.subprocess.Process, code: str) -> tuple[str, bool]:
        """Its output, and whether that was too long; then the process is ended."""
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


def _give(folder: str) -> None:
    """Give the folder to the user that runs the code, which is an unprivileged one if this process is
    root."""
    if os.geteuid() == 0:
        os.chown(folder, UNPRIVILEGED_ID, UNPRIVILEGED_ID)


def _remove(folder: str) -> None:
    """Remove the folder with its contents. Nested folders are moved up first: shutil.rmtree is limited by
    Python's stack, and paths by the system's maximum length."""
    left = [folder]
    try:
        os.chmod(folder, 0o700)
        while left:
            path = left[-1]
            inner = []
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)
                        inner.append(os.path.join(folder, uuid.uuid4().hex))
                        os.rename(entry.path, inner[-1])
                    else:
                        os.unlink(entry.path)
            if not inner:
                os.rmdir(left.pop())
            left += inner
    except OSError as error:
        log.warning("the folder %s could not be removed: %s", folder, error)


def _end(process: asyncio.subprocess.Process) -> None:
    """End the process and all that it started: the first process of its namespaces is in its group, and the
    others in them end with that one."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
