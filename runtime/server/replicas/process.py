"""A server as a process of this machine: started, queried over HTTP, ended. It ends with its parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from runtime.config.flags import ENV_PREFIX
from runtime.processes.pipeline.before_start import for_children
from runtime.protocol.errors import EngineDead, NotReady

TICK_S = 0.1
STOP_S = 15.0
"""How long its processes may take to end without requests."""
MOST_LOG = 2000
"""Characters of its log in an error."""


class ServerProcess:
    """`options`: of the command `serve`, by name; address and ready file are added. It listens on any free
    port of `host`. `wait` for it."""

    def __init__(self, options: Mapping[str, Any], host: str, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-dsl-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._ready, self._log = folder / "ready.json", folder / "server.log"
        self._key = options.get("api_key")
        added = {"host": host, "port": 0, "ready_file": str(self._ready), "end_with_stdin": True}
        config = folder / "options.yaml"
        config.write_text(json.dumps({**options, **added}), encoding="utf-8")  # JSON is YAML
        # The driver's environment variables would override the file.
        inherited = {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX)}
        self.url = ""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime", "serve", "--config", str(config)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=for_children(inherited),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> None:
        """Until it is ready and has a `url`. Raises EngineDead with the end of its log."""
        deadline = time.monotonic() + seconds
        while not self._ready.exists():
            self.check()
            if time.monotonic() > deadline:
                raise EngineDead(f"the server was not ready within {seconds:g} s: {self.log_end()}")
            time.sleep(TICK_S)
        self.url = str(json.loads(self._ready.read_text(encoding="utf-8"))["url"])

    def check(self) -> None:
        """Raises EngineDead if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineDead(f"the server ended with code {code}: {self.log_end()}")

    async def ask(self, path: str, seconds: float) -> httpx.Response:
        """GET. Raises EngineDead without an answer in time, or for one that is not a success; NotReady if
        that is temporary."""
        self.check()
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
        try:
            async with httpx.AsyncClient(timeout=seconds, trust_env=False) as client:
                answer = await client.get(self.url + path, headers=headers)
        except httpx.HTTPError as error:
            raise EngineDead(f"{path} did not answer: {str(error) or type(error).__name__}") from error
        if not answer.is_success:
            waits = answer.status_code == NotReady.status and f'"{NotReady.code}"' in answer.text
            raise (NotReady if waits else EngineDead)(
                f"{path} answers {answer.status_code}: {answer.text[:MOST_LOG]}"
            )
        return answer

    async def check_health(self, seconds: float) -> None:
        """Raises EngineDead if it is unhealthy. A pause does not count."""
        with contextlib.suppress(NotReady):
            await self.ask("/health", seconds)

    def log_end(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace")[-MOST_LOG:].strip()
        return ""

    def stop(self, drain_s: float) -> None:
        """End it; running requests have `drain_s` seconds. Remaining processes are killed."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(drain_s + STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._folder.cleanup()
