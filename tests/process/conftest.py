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
from tests.process.patience import PATIENCE_S

if TYPE_CHECKING:
    from sglang_dsl.backends.engine import EngineBackend

HERE = Path(__file__).parent
LONG_S = 900
"""For a test of this folder: most wait for processes that start, load and end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_S))


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """In float32: in bfloat16, which some processors compute in, a row depends a little on the rows beside
    it, and these on who comes when."""
    with Engine("pocket", max_total_tokens=8192, dtype="float32") as running:
        yield running


@pytest.fixture(scope="session")
def plain_engine() -> Iterator[Engine]:
    """The same without jump-forward and without the radix cache."""
    with Engine(
        "pocket", max_total_tokens=8192, dtype="float32", jump_forward=False, radix_cache=False
    ) as running:
        yield running


@pytest.fixture
def backend(engine: Engine) -> EngineBackend:
    from sglang_dsl.backends.engine import EngineBackend

    return EngineBackend(engine)


class Served:
    """`python -m runtime serve` on a free port, and what it said. Nothing of it outlives the test."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        within: tuple[str, ...] = (),
    ) -> None:
        """within: a command that runs it, such as one that enters a namespace."""
        self._ready, self._log = folder / "ready.json", folder / "log.txt"
        command = [
            *within, sys.executable, "-m", "runtime", "serve",
            "--ready-file", str(self._ready), "--port", "0",
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

    def wait_ready(self, timeout: float = PATIENCE_S) -> Served:
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
        # Times of creation are told in hundredths of a second.
        found.sort(key=lambda one: (one.create_time(), one.pid))
        now = dict(zip(names, found, strict=True))
        self.seen.update({f"{name} {one.pid}": one for name, one in now.items()})
        return now

    def end(self, number: int = signal.SIGTERM, timeout: float = PATIENCE_S) -> int:
        """Its exit code, after that signal (0: only wait)."""
        if number:
            self.process.send_signal(number)
        code = self.process.wait(timeout)
        self.check_nothing_left()
        return code

    def check_nothing_left(self, timeout: float = PATIENCE_S) -> None:
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
        self.process.wait(PATIENCE_S)
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

    def wait(server: Served, timeout: float = PATIENCE_S, **headers: str) -> None:
        deadline = time.monotonic() + timeout
        while True:
            answer = httpx.get(f"{server.url}/server_info", headers=headers, timeout=PATIENCE_S)
            told = answer.json()
            if answer.status_code == 503:  # as many as it takes are still under way
                busy = told
            else:
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

    def wait(server: Served, count: int, timeout: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout
        while True:
            told = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
            if told["internal_states"][0]["live"] == count:
                return
            assert time.monotonic() < deadline, told
            time.sleep(0.02)

    return wait


@pytest.fixture
def loads_when_told(tmp_path: Path) -> tuple[dict[str, str], Callable[[], None]]:
    """An environment in which the process that loads the model waits before it does, and what lets it go on.
    It waits for as long as its parent lives, at most."""
    folder, gate = tmp_path / "waits", tmp_path / "waits" / "go on"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(LOADS_WHEN_TOLD.format(gate=str(gate)))
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH")) if part)
    return {"PYTHONPATH": path}, gate.touch


LOADS_WHEN_TOLD = """
import os, sys, time

if "runtime.engine.follower" in sys.orig_argv:
    parent = os.getppid()
    while not os.path.exists({gate!r}):
        if os.getppid() != parent:
            os._exit(1)
        time.sleep(0.02)
"""


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
