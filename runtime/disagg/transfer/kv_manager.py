"""The contract of every KV transfer: KVPoll, KVSender, KVReceiver, KVManager, and their options."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Final

from runtime.disagg.transfer.faults import Faults
from runtime.disagg.transfer.memory import KVMemory
from runtime.disagg.transfer.metadata import Metadata, MetadataBuffers
from runtime.plan import Run
from runtime.protocol.errors import BadRequest, RuntimeFault, TransferLate
from runtime.protocol.registry import Registry

FAKE_BOOTSTRAP_HOST: Final = "2.2.2.2"
"""A request with this bootstrap host has no other side, such as a warm-up: it gets the fake transfer."""
MAX_ROOM: Final = (1 << 63) - 1
"""Rooms are 1 .. MAX_ROOM: 0 marks a metadata row that nothing has landed in."""


class KVPoll(IntEnum):
    """How far a room is. It only ever goes up, but for Failed, which is final as Success is."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4

    @property
    def ended(self) -> bool:
        return self in (KVPoll.Failed, KVPoll.Success)


@dataclass(frozen=True)
class TransferOptions:
    """Settings of a manager. All times in seconds.

    host               where it listens; also what its peers are told, unless `advertise` is given
    key                secret of all who take part; without one only loopback addresses are listened on
    bootstrap_timeout  until the other side of a room has been found and has said hello
    waiting_timeout    from then until all KV has arrived
    heartbeat          between two signs of life of a peer; `heartbeat_misses` in a row, and it is lost
    streams            connections for the KV between two managers
    piece_bytes        bytes of KV sent in one piece, about
    rank, ranks        which of the tensor-parallel ranks of its engine this manager is
    faults             what is to go wrong, in tests
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    key: bytes | None = field(default=None, repr=False)
    bootstrap_timeout: float = 300.0
    waiting_timeout: float = 300.0
    heartbeat: float = 5.0
    heartbeat_misses: int = 2
    streams: int = 2
    piece_bytes: int = 4 << 20
    rank: int = 0
    ranks: int = 1
    faults: Faults | None = None

    def verify(self) -> TransferOptions:
        """Raises BadRequest."""
        for name in ("bootstrap_timeout", "waiting_timeout", "heartbeat"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadRequest("must be a positive number of seconds", where=name)
        for name in ("heartbeat_misses", "streams", "piece_bytes", "ranks"):
            if getattr(self, name) < 1:
                raise BadRequest("must be at least 1", where=name)
        if not 0 <= self.rank < self.ranks:
            raise BadRequest(f"must be 0 to {self.ranks - 1}", where="rank")
        return self


class KVSender(ABC):
    """The prefill side of a room.

    Bootstrapping until the decode side has said what it wants; then `start` is known and init() must be
    called. send() as the prompt is computed, with the metadata behind the last of it. One thread calls it;
    nothing blocks. After a failure all calls but poll() and failure() do nothing.
    """

    room: int
    start: int
    """How many tokens of the prompt the decode side has already: what is sent begins with the next. Known
    from WaitingForInput on."""

    @abstractmethod
    def poll(self) -> KVPoll:
        """Success once the decode side has everything. Also notices deadlines."""

    @abstractmethod
    def init(self, tokens: int) -> None:
        """How many tokens will be sent: the prompt's length less `start`. Fails the room where the decode
        side has made room for another number."""

    @abstractmethod
    def send(self, runs: Sequence[Run], metadata: Metadata | None = None) -> None:
        """The next tokens' KV, in token order; it is complete in these slots and must stay until the sender
        has ended. metadata: of the whole; given with the last (whose `runs` may be empty)."""

    @abstractmethod
    def abort(self, reason: str = "aborted") -> None:
        """End it, and tell the other side. Does nothing where it has ended."""

    @abstractmethod
    def failure(self) -> RuntimeFault | None:
        """Why it failed."""


class KVReceiver(ABC):
    """The decode side of a room.

    Bootstrapping until the prefill side was found; then init() says where the KV is to go. One thread calls
    it; nothing blocks. After a failure all calls but poll() and failure() do nothing.
    """

    room: int

    @abstractmethod
    def poll(self) -> KVPoll:
        """Success once all KV is in the pool and the metadata in its row. Also notices deadlines. Once it has
        said Success or Failed nothing is written any more."""

    @abstractmethod
    def init(self, runs: Sequence[Run], start: int, index: int) -> None:
        """The slots of the prompt's tokens from `start` on; the prompt's tokens before that are not wanted.
        index: a row of the manager's metadata buffers, empty."""

    @abstractmethod
    def abort(self, reason: str = "aborted") -> None:
        """End it, and tell the other side. When it returns nothing is written any more."""

    @abstractmethod
    def failure(self) -> RuntimeFault | None:
        """Why it failed."""


class KVManager(ABC):
    """One rank's end of a transfer: makes senders (prefill) and receivers (decode), holds the connections.

    carries: whether KV really moves; of a transfer that does not, nothing may be kept in a prefix cache.
    """

    carries: ClassVar[bool]

    @abstractmethod
    def __init__(
        self, memory: KVMemory, rows: MetadataBuffers, options: TransferOptions | None = None
    ) -> None: ...

    @abstractmethod
    def listen(self, bootstrap: str | None = None) -> str:
        """The prefill side: take connections from now on; the address where. bootstrap: `host:port` of a
        bootstrap server to register with. Raises TransferError, BadRequest."""

    @abstractmethod
    def sender(self, room: int) -> KVSender:
        """Raises BadRequest: the room is no number from 1 to MAX_ROOM, or is in use."""

    @abstractmethod
    def receiver(self, bootstrap: str, room: int) -> KVReceiver:
        """bootstrap: `host:port` of the prefill side's bootstrap server. Raises BadRequest, as sender()."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Figures for /metrics: rooms, bytes and seconds so far, failures."""

    @abstractmethod
    def close(self) -> None:
        """All rooms fail, all connections end."""


class Progress:
    """Where a room is, for the threads that move it: up only, Failed and Success final, within deadlines.

    lock: held by whoever writes for this room, so that nothing is written once it has ended.
    """

    def __init__(self, room: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.room = room
        self.lock = threading.RLock()
        self._clock = clock
        self._poll = KVPoll.Bootstrapping
        self._fault: RuntimeFault | None = None
        self._until: float | None = None
        self._late = ""

    @property
    def now(self) -> KVPoll:
        return self._poll

    @property
    def ended(self) -> bool:
        return self._poll.ended

    def advance(self, to: KVPoll) -> bool:
        """Whether it is at least there now. A room that has ended stays as it is."""
        with self.lock:
            if not self._poll.ended and to > self._poll:
                self._poll = to
            return self._poll is not KVPoll.Failed and self._poll >= to

    def fail(self, fault: RuntimeFault) -> bool:
        """Whether this was the end of it."""
        with self.lock:
            if self._poll.ended:
                return False
            self._poll, self._fault = KVPoll.Failed, fault
            return True

    def within(self, seconds: float | None, late: str = "") -> None:
        """Fail with `late` unless it has ended, or within() was called again, in so many seconds; None: it
        may take its time."""
        with self.lock:
            self._until = None if seconds is None else self._clock() + seconds
            self._late = late

    def late(self, late: str) -> None:
        """Other words for the same deadline: more is known now."""
        self._late = late

    def overdue(self) -> bool:
        """Fail it if it is late; whether that was its end. Whoever polls asks this."""
        with self.lock:
            if self._until is None or self._poll.ended or self._clock() < self._until:
                return False
            return self.fail(TransferLate(self._late, where=f"room {self.room}"))

    def failure(self) -> RuntimeFault | None:
        return self._fault


def check_room(room: int) -> int:
    """Raises BadRequest."""
    if not 1 <= room <= MAX_ROOM:
        raise BadRequest(f"a room is a number from 1 to {MAX_ROOM}, not {room}", where="bootstrap_room")
    return room


KV_TRANSFERS: Final[Registry[type[KVManager]]] = Registry(
    "kv transfer",
    {
        "fake": "runtime.disagg.transfer.fake:FakeManager",
        "local": "runtime.disagg.transfer.local:LocalManager",
        "nixl": "runtime.disagg.transfer.nixl:NixlManager",
        "tcp": "runtime.disagg.transfer.tcp:TcpManager",
    },
    {"nixl": "nixl"},
)
