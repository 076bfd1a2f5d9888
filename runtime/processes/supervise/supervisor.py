"""The supervisor: binds the address, starts the group of processes, watches it, and ends or restarts it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from runtime.config.engine import EngineConfig
from runtime.config.flags import Options, read_options
from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.before_start import check_names, for_children
from runtime.processes.supervise import logs
from runtime.processes.supervise.channel import DETOKENIZER, Leave, Reload, mailbox_of
from runtime.processes.supervise.group import FIRST_PAUSE_S, LONGEST_PAUSE_S, STABLE_S, Group
from runtime.protocol.console import set_title
from runtime.protocol.errors import BadRequest, EngineDead, InternalFault, RuntimeFault
from runtime.protocol.registry import Registry

log = logging.getLogger(__name__)

TICK_S = 0.25
BACKLOG = 2048
SHORT_TEMPORARY = "/tmp"
FOLDER_PREFIX = "sglang-dsl-"
LONGEST_PATH = f"{FOLDER_PREFIX}12345678/10000"

ELSEWHERE: Registry[Callable[[Options, Mapping[str, str]], int]] = Registry(
    "serving engine", {"ray": "runtime.server.replicas.start:start"}
)
"""name -> (options, environment) -> exit code"""


class Supervisor:
    """`run` in the main thread: it handles SIGTERM and SIGINT. The first signal lets requests finish, the
    second does not. With a file of API keys, SIGHUP reads it again."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, environment: Mapping[str, str]) -> None:
        self._engine, self._server = engine, server
        self._environment = for_children(environment)
        self._signals = 0
        self._reload = False
        self._failures = 0
        self._served = False

    def run(self) -> int:
        """The exit code. Raises the errors of a failed start, EngineDead when a process died for good."""
        check_names(self._engine)
        self._engine.locate()
        with self._taking_signals(), listening(self._server) as listener, _private_folder() as folder:
            generation = 0
            while True:
                generation += 1
                try:
                    self._serve(folder / str(generation), listener)
                    return 0
                except RuntimeFault as fault:
                    self._failures += 1
                    if not self._tries_again():
                        raise
                    log.warning("starting again after: %s", fault)
                shutil.rmtree(folder / str(generation), ignore_errors=True)
                if self._pause():
                    return 0

    def _serve(self, folder: Path, listener: socket.socket) -> None:
        """Run one group until it is stopped. Raises the reason of its death."""
        group = Group(self._engine, self._server, folder, listener, self._environment)
        ready_at: float | None = None
        try:
            while not self._signals:
                group.wait(TICK_S)
                if self._reload:
                    self._reload = False
                    group.tell_workers(Reload())
                if ready_at is None and group.ready:
                    ready_at = time.monotonic()
                    self._served = True
                    log.info("ready on %s after %.1f s", url_of(listener), ready_at - group.began)
                    tell_ready(self._server.ready_file, listener)
                if ready_at is not None and time.monotonic() - ready_at > STABLE_S:
                    self._failures = 0
            self._drain(group, listener)
        except RuntimeFault as fault:
            if ready_at is not None:
                log.error("%s", fault)
            group.fail(fault)
            raise
        finally:
            group.end()

    def _drain(self, group: Group, listener: socket.socket) -> None:
        before = self._signals
        if self._server.lame_duck_s:
            log.info("ending; requests are taken for %g s more", self._server.lame_duck_s)
            group.tell_workers(Leave())
            until = time.monotonic() + self._server.lame_duck_s
            while self._signals == before and (left := until - time.monotonic()) > 0:
                group.wait(min(TICK_S, left))
            before = self._signals
        log.info("ending; requests in hand may take %g s", self._server.drain_timeout_s)
        listener.close()
        if not group.drain(self._server.drain_timeout_s, lambda: self._signals > before):
            log.warning("stopped again, ending at once")
            group.fail(EngineDead("the server was told to end at once"))

    def _tries_again(self) -> bool:
        """Whether to start the group again: only if it has served, and within the limit of restarts."""
        restarts = self._server.restart and self._served and not self._signals
        if restarts and self._failures > self._server.restart_limit:
            log.error("%d failures in a row; giving up", self._failures)
            return False
        return restarts

    def _pause(self) -> bool:
        """Wait before the next start, longer after each failure. True when stopped meanwhile."""
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 1))
        deadline = time.monotonic() + pause
        while not self._signals and time.monotonic() < deadline:
            time.sleep(min(TICK_S, pause))
        return bool(self._signals)

    @contextlib.contextmanager
    def _taking_signals(self) -> Iterator[None]:
        def take(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGHUP:
                self._reload = True
            else:
                self._signals += 1

        numbers = [signal.SIGTERM, signal.SIGINT]
        if self._server.api_keys_file is not None:
            numbers.append(signal.SIGHUP)  # without the file it ends the server, as by default
        if self._server.end_with_stdin:
            threading.Thread(target=self._await_end_of_stdin, name="stdin", daemon=True).start()
        before = {number: signal.signal(number, take) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _await_end_of_stdin(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        self._signals += 1


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """The socket that all HTTP workers accept from. Raises BadRequest for an unusable address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise BadRequest(f"cannot be resolved: {error.strerror}", where=f"host {config.host}") from error
    except UnicodeError as error:  # a part that is empty or too long
        raise BadRequest("cannot be resolved: not a valid host name", where=f"host {config.host}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # From here on the address is ours; clients that connect wait until the model is loaded.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise BadRequest(
            "another process is listening there" if taken else f"cannot listen there: {error.strerror}",
            where=f"{config.host}:{config.port}",
            hint="choose another port, or 0 for any free one" if taken else None,
        ) from error
    try:
        log.info("listening on %s", url_of(listener))
        yield listener
    finally:
        listener.close()


def url_of(listener: socket.socket) -> str:
    """Its URL on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def tell_ready(file: str | None, listener: socket.socket) -> None:
    """Write the address for a program that waits for the server; errors are only logged."""
    if file is None:
        return
    ready = json.dumps({"url": url_of(listener), "port": listener.getsockname()[1], "pid": os.getpid()})
    path = Path(file)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.write_text(ready, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        log.warning("the ready file %s cannot be written: %s", path, error.strerror or error)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for the sockets; in /tmp if the usual one has too long a path. Raises InternalFault."""
    base: str | None = None
    try:
        with contextlib.suppress(InternalFault):
            mailbox_of(Path(tempfile.gettempdir()) / LONGEST_PATH, DETOKENIZER)
            base = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base or SHORT_TEMPORARY)
    except OSError as error:
        raise InternalFault(
            f"no directory for the sockets: {error.strerror or error}",
            where=base or SHORT_TEMPORARY,
            hint="TMPDIR",
        ) from error
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(arguments: Sequence[str], environment: Mapping[str, str], prog: str) -> int:
    """`serve`: the exit code. Raises the errors of Supervisor.run, and BadRequest for wrong options."""
    _fill_standard_streams()
    options = read_options(arguments, environment, prog)
    logs.set_up(options.server, "supervisor")
    set_title("supervisor")
    if options.replicas.engine != "local":
        return ELSEWHERE.load(options.replicas.engine)(options, environment)
    return Supervisor(options.engine, options.server, environment).run()


def _fill_standard_streams() -> None:
    """Open the null device for closed ones: else a socket would get the number, and the prints."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
