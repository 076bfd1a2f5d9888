"""The messages of two managers, decoded as one of these structs."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from runtime.disagg.transfer.memory import KVLayout, KVMapping
from runtime.ipc.wire import Wire
from runtime.plan import Run

VERSION: Final = 1
MAX_HELLO: Final = 1 << 18
MAX_MESSAGE: Final = 8 << 20


class Challenge(msgspec.Struct, frozen=True):
    """The listening side's first message."""

    nonce: bytes
    version: int = VERSION


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """From the connecting side. proof: see handshake. kind: the purpose of the connection; session: the one
    that a stream belongs to. heartbeat: seconds between expected heartbeats. extra: of the transfer."""

    nonce: bytes
    proof: bytes
    transfer: str
    layout: KVLayout
    kind: Literal["messages", "stream"] = "messages"
    session: str = ""
    heartbeat: float = 5.0
    extra: bytes = b""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """mapping: how the pool lies in the file that follows; None where none does. heartbeat: as in Hello."""

    proof: bytes
    layout: KVLayout
    session: str
    mapping: KVMapping | None = None
    heartbeat: float = 5.0
    extra: bytes = b""


class Refused(msgspec.Struct, frozen=True):
    """error: RuntimeFault.to_dict()."""

    error: dict[str, Any]


class Want(msgspec.Struct, frozen=True, array_like=True):
    """Decode side: so many of this transfer's tokens, from `start` on."""

    bootstrap_id: int
    start: int
    tokens: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Prefill side, where KV is fetched: the tokens from the `first` of those wanted on lie in `runs`."""

    bootstrap_id: int
    first: int
    runs: tuple[Run, ...]


class RowData(msgspec.Struct, frozen=True, array_like=True):
    """Prefill side: the metadata, packed."""

    bootstrap_id: int
    row: bytes


class Received(msgspec.Struct, frozen=True, array_like=True):
    """Decode side: everything has arrived."""

    bootstrap_id: int


class Done(msgspec.Struct, frozen=True, array_like=True):
    """Prefill side, where KV is fetched: the slots were kept until Received came."""

    bootstrap_id: int


class Fail(msgspec.Struct, frozen=True, array_like=True):
    """Either side: this transfer has failed. error: RuntimeFault.to_dict()."""

    bootstrap_id: int
    error: dict[str, Any]


class Ping(msgspec.Struct, frozen=True, array_like=True):
    """A heartbeat."""


GREETING: Final = Wire((Challenge, Hello, Welcome, Refused), MAX_HELLO)
MESSAGES: Final = Wire((Want, Chunk, RowData, Received, Done, Fail, Ping), MAX_MESSAGE)
