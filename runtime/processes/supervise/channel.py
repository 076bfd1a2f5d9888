"""Messages between supervisor and child, over a socket pair, and the names of processes.

The pair is also the lifeline: when one side has ended, the other's mailbox is closed. Knows no requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.ipc.address import Address
from runtime.ipc.wire import Wire

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
