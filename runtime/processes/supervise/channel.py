"""Messages between supervisor and child, over the child's stdin and stdout: small messages.

The pipe is also the lifeline: when the supervisor is gone the child reads its end, when the child is gone the
supervisor does. It knows no requests.
"""

from __future__ import annotations

import os
import threading
from typing import Any, BinaryIO, Literal, TypeAlias

import msgspec

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.ipc.frames import HEAD, frame
from runtime.ipc.wire import Wire
from runtime.protocol.errors import InternalFault, WireError

Role = Literal["scheduler", "detokenizer", "http"]
MAX_BYTES = 16 << 20


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A child's configuration. folder: of the sockets. frontends: names of the HTTP workers, which are their
    sockets' names. listener: the inherited file descriptor of the listening socket. replaces: it takes the
    place of one that died, and others serve meanwhile."""

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
    """End; what is in hand may take drain_s seconds more."""

    drain_s: float = 0.0


class Leave(msgspec.Struct, frozen=True):
    """The server ends soon: go on as before, but say so to whoever asks for its health."""


class Reload(msgspec.Struct, frozen=True):
    """Read again what may change while the server runs: the file of API keys."""


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
        """Take over stdin and stdout: whatever else is printed goes to stderr, and nothing reads."""
        read, write = os.fdopen(os.dup(0), "rb", buffering=0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        return cls(read, write)

    def spec(self) -> ChildSpec:
        """The first message. Raises InternalFault when it is none."""
        found: object = None
        why = "it is empty"
        try:
            found = self._next()
        except WireError as error:
            why = str(error)
        if isinstance(found, ChildSpec):
            return found
        raise InternalFault(
            f"stdin holds no child's configuration: {why}", hint="python -m runtime serve starts these"
        )

    def order(self) -> Order | None:
        """The next order; None when the supervisor is gone. Raises WireError."""
        found = self._next()
        return found if isinstance(found, Go | Leave | Stop | Reload) else None

    def report(self, report: Report) -> None:
        """Never blocks and never fails: a supervisor that does not read is gone, or will see our end."""
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
        found = b""
        while len(found) < size:
            data = self._read.read(size - len(found))
            if not data:
                return None
            found += data
        return found
