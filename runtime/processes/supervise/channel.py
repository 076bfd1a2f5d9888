"""Messages between supervisor and child, over the child's stdin and stdout, and the names of processes.

The pipe is also the lifeline: when one side has ended the other reads the end of it. Knows no requests.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import msgspec

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.ipc.address import Address
from runtime.ipc.socket_mailbox import HEAD, frame
from runtime.ipc.wire import Wire
from runtime.protocol.errors import InternalFault, WireError

Role = Literal["scheduler", "detokenizer", "http"]
MAX_BYTES = 16 << 20
SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"
"""Names of processes, and of their sockets."""


def frontend_name(index: int) -> str:
    """The name of an HTTP worker, and the `http_worker_ipc` of its requests."""
    return f"worker-{index}"


def pid_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.pid"


def mailbox_of(folder: Path, name: str) -> Address:
    return Address.ipc(folder / f"{name}.ipc")


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A child's configuration. folder: of the sockets. frontends: names of the HTTP workers. listener: the
    inherited file descriptor of the listening socket. replaces: it replaces a worker that died, while others
    serve."""

    role: Role
    name: str
    folder: str
    engine: EngineConfig
    server: ServerConfig
    frontends: tuple[str, ...] = ()
    listener: int | None = None
    parent: int = 0
    replaces: bool = False


class Go(msgspec.Struct, frozen=True):
    """The scheduler is ready; facts: what it reported (slots: size of the KV pool)."""

    facts: dict[str, Any]


class Stop(msgspec.Struct, frozen=True):
    """End; live requests may take drain_s seconds more."""

    drain_s: float = 0.0


class Leave(msgspec.Struct, frozen=True):
    """The server ends soon: go on, but report it as the health."""


class Reload(msgspec.Struct, frozen=True):
    """Read the file of API keys again."""


class Ready(msgspec.Struct, frozen=True):
    """The child can do its work."""

    facts: dict[str, Any] = {}


class Heartbeat(msgspec.Struct, frozen=True):
    """The child is alive; stalled_s: how long its current work has taken."""

    stalled_s: float = 0.0


class Failed(msgspec.Struct, frozen=True):
    """The child is about to end because of this RuntimeFault."""

    error: dict[str, Any]


Order: TypeAlias = Go | Leave | Stop | Reload
Report: TypeAlias = Ready | Heartbeat | Failed
TO_CHILD = Wire((ChildSpec, Go, Leave, Stop, Reload), MAX_BYTES)
FROM_CHILD = Wire((Ready, Heartbeat, Failed), MAX_BYTES)


class ChildEnd:
    """The child's end. One thread reads, any thread reports."""

    def __init__(self, read: BinaryIO, write: int) -> None:
        self._read, self._write = read, write
        self._lock = threading.Lock()
        os.set_blocking(write, False)

    @classmethod
    def adopt(cls) -> ChildEnd:
        """Take over stdin and stdout: other output goes to stderr, and stdin is empty."""
        read, write = os.fdopen(os.dup(0), "rb", buffering=0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        return cls(read, write)

    def spec(self) -> ChildSpec:
        """The first message. Raises InternalFault if it is no ChildSpec."""
        why = "it is empty"
        try:
            message = self._next()
            if isinstance(message, ChildSpec):
                return message
        except WireError as error:
            why = str(error)
        raise InternalFault(
            f"stdin holds no child's configuration: {why}", hint="python -m runtime serve starts these"
        )

    def order(self) -> Order | None:
        """The next order; None when the supervisor has ended. Raises WireError."""
        message = self._next()
        return message if isinstance(message, Go | Leave | Stop | Reload) else None

    def report(self, report: Report) -> None:
        """Never blocks and never fails: a supervisor that does not read has ended, or will see our end."""
        with self._lock:
            try:
                os.write(self._write, frame(FROM_CHILD.encode(report)))
            except OSError:
                return

    def close(self) -> None:
        self._read.close()
        os.close(self._write)

    def _next(self) -> object:
        head = self._exactly(HEAD.size)
        if head is None:
            return None
        (size,) = HEAD.unpack(head)
        if size > MAX_BYTES:
            raise WireError(f"a message of {size} bytes on stdin; at most {MAX_BYTES} are taken")
        data = self._exactly(size)
        return None if data is None else TO_CHILD.decode(data)

    def _exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            more = self._read.read(size - len(data))
            if not more:
                return None
            data += more
        return data
