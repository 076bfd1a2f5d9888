"""One engine on the bundled checkpoint for the whole folder, and a way to start real servers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from runtime.api import Engine

if TYPE_CHECKING:
    from sglang_dsl.backends.engine import EngineBackend


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine("pocket", max_total_tokens=8192) as running:
        yield running


@pytest.fixture(scope="session")
def plain_engine() -> Iterator[Engine]:
    """The same without jump-forward and without the radix cache."""
    with Engine("pocket", max_total_tokens=8192, jump_forward=False, radix_cache=False) as running:
        yield running


@pytest.fixture
def backend(engine: Engine) -> EngineBackend:
    from sglang_dsl.backends.engine import EngineBackend

    return EngineBackend(engine)


class Served:
    """`python -m runtime serve` on a free port, and what it said. Nothing of it outlives the test."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._ready, self._log = folder / "ready.json", folder / "log.txt"
        command = [
            sys.executable, "-m", "runtime", "serve", "--ready-file", str(self._ready), "--port", "0",
            "--max-total-tokens", "8192", "--threads", "1", "--runner-process", *arguments,
        ]  # fmt: skip
        self.folder = Path(tempfile.mkdtemp(prefix="served-"))  # short, as paths of sockets must be
        given = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), **(environment or {})}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=given
            )
        self.url = ""
        self.seen: dict[str, psutil.Process] = {}

    def wait_ready(self, timeout: float = 60) -> Served:
        """Also after a restart, of which the old file must be gone."""
        deadline = time.monotonic() + timeout
        while not self._ready.is_file():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.url = str(json.loads(self._ready.read_text())["url"])
        return self

    def forget_ready(self) -> None:
        self._ready.unlink(missing_ok=True)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def children(self) -> dict[str, psutil.Process]:
        """Name -> process: scheduler, detokenizer, worker-0 ..., in the order in which they were started."""
        found = psutil.Process(self.process.pid).children()
        names = ["scheduler", "detokenizer", *(f"worker-{n}" for n in range(len(found) - 2))]
        now = dict(zip(names, sorted(found, key=lambda one: one.create_time()), strict=True))
        self.seen.update({f"{name} {one.pid}": one for name, one in now.items()})
        return now

    def end(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Its exit code, after that signal (0: only wait)."""
        if number:
            self.process.send_signal(number)
        code = self.process.wait(timeout)
        self.check_nothing_left()
        return code

    def check_nothing_left(self, timeout: float = 30) -> None:
        """No process that was seen lives, and no socket is left."""
        deadline = time.monotonic() + timeout
        while True:
            alive = [name for name, one in self.seen.items() if _lives(one)]
            sockets = [str(path) for path in self.folder.glob("sglang-dsl-*")]
            if not alive and not sockets:
                return
            assert time.monotonic() < deadline, (alive, sockets, self.log)
            time.sleep(0.05)

    def kill(self) -> None:
        for one in self.seen.values():
            with contextlib.suppress(psutil.Error):
                one.kill()
        if self.process.poll() is None:
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    one.kill()
            self.process.kill()
        self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that leave it as they found it. It computes in float32: in bfloat16 a row
    depends a little on the rows beside it, and tests of it on each other."""
    made = Served(tmp_path_factory.mktemp("shared"), "--log-level", "warning", "--dtype", "float32")
    try:
        yield made.wait_ready()
        assert "Traceback" not in made.log, made.log
    finally:
        made.kill()


KEY = "k3y-nobody-may-see"


@pytest.fixture(scope="session")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """One that asks for a key and takes two requests at once; and the key."""
    made = Served(
        tmp_path_factory.mktemp("guarded"),
        "--max-concurrent-requests", "2", "--enable-cache-report", "--log-level", "warning",
        environment={"SGLANG_DSL_API_KEY": KEY},
    )  # fmt: skip
    try:
        yield made.wait_ready(), KEY
        assert KEY not in made.log
    finally:
        made.kill()


@pytest.fixture(scope="session")
def wait_idle() -> Callable[..., None]:
    """Wait until a server has nothing in hand and all its KV pages are free, or kept for later."""

    def wait(server: Served, timeout: float = 60.0, **headers: str) -> None:
        deadline = time.monotonic() + timeout
        while True:
            told = httpx.get(f"{server.url}/server_info", headers=headers, timeout=30).json()
            state = told["internal_states"][0]
            busy = {
                "live": told["live_requests"],
                **{name: state[name] for name in ("running", "waiting", "compiling")},
                "held": state["slots"] - state["free"] - state["evictable"],
            }
            if not any(busy.values()):
                return
            assert time.monotonic() < deadline, busy
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def wait_live() -> Callable[..., None]:
    """Wait until the scheduler of a server has that many requests in hand."""

    def wait(server: Served, count: int, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while True:
            told = httpx.get(f"{server.url}/server_info", timeout=30).json()
            if told["internal_states"][0]["live"] == count:
                return
            assert time.monotonic() < deadline, told
            time.sleep(0.02)

    return wait


StartServer = Callable[..., Served]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers with these arguments (and `environment=`) and waits for none of them."""
    started: list[Served] = []

    def start(*arguments: str, environment: dict[str, str] | None = None) -> Served:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        made = Served(folder, *arguments, environment=environment)
        started.append(made)
        return made

    yield start
    for one in started:
        one.kill()
