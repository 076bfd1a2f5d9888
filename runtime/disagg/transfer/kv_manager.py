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
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Run
from runtime.protocol.errors import Aborted, BadRequest, RuntimeFault, TransferLate
from runtime.protocol.registry import Registry

FAKE_BOOTSTRAP_HOST: Final = "2.2.2.2"
"""A request with this bootstrap host has no other side, such as a warm-up: it gets the fake transfer."""
MAX_BOOTSTRAP_ID: Final = (1 << 63) - 1
"""Transfers are numbered from 1 to this."""


class KVPoll(IntEnum):
    """The state of a transfer. It only goes up, except to Failed; Success and Failed are final."""

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

    host               where it listens, and the address for its peers
    key                the secret of both sides; without one it listens on loopback addresses only
    bootstrap_timeout  until the other side of a transfer is connected
    waiting_timeout    from then until all KV has arrived
    heartbeat          between two heartbeats of a peer; it is lost after `heartbeat_misses` missing in a row
    faults             injected faults, in tests
    """

    host: str = "127.0.0.1"
    key: bytes | None = field(default=None, repr=False)
    bootstrap_timeout: float = 300.0
    waiting_timeout: float = 300.0
    heartbeat: float = 5.0
    heartbeat_misses: int = 2
    faults: Faults | None = None

    def verify(self) -> TransferOptions:
        """Raises BadRequest."""
        for name in ("bootstrap_timeout", "waiting_timeout", "heartbeat"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadRequest("must be a positive number of seconds", where=name)
        if self.heartbeat_misses < 1:
            raise BadRequest("must be at least 1", where="heartbeat_misses")
        return self


class Progress:
    """The state of a transfer, shared by the threads that move it: it only goes up, Failed and Success are
    final, and it fails at its deadline. lock: held while KV is written for this transfer, so that nothing is
    written once it has ended."""

    def __init__(self, bootstrap_id: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.bootstrap_id = bootstrap_id
        self.lock = threading.RLock()
        self._clock = clock
        self._poll = KVPoll.Bootstrapping
        self._fault: RuntimeFault | None = None
        self._until: float | None = None
        self._late: str | Callable[[], str] = ""

    @property
    def now(self) -> KVPoll:
        return self._poll

    @property
    def ended(self) -> bool:
        return self._poll.ended

    def advance(self, to: KVPoll) -> bool:
        """Returns whether it is at least `to` now. A transfer that has ended stays as it is."""
        with self.lock:
            if not self._poll.ended and to > self._poll:
                self._poll = to
            return self._poll is not KVPoll.Failed and self._poll >= to

    def fail(self, fault: RuntimeFault) -> bool:
        """Returns whether this ended it."""
        with self.lock:
            if self._poll.ended:
                return False
            self._poll, self._fault = KVPoll.Failed, fault
            return True

    def within(self, seconds: float | None, late: str | Callable[[], str] = "") -> None:
        """Fail with `late` unless it has ended in so many seconds, or within() was called again."""
        with self.lock:
            self._until = None if seconds is None else self._clock() + seconds
            self._late = late

    def overdue(self) -> bool:
        """Fail the transfer if its deadline passed; returns True if it did."""
        with self.lock:
            if self._until is None or self._poll.ended or self._clock() < self._until:
                return False
            late = self._late if isinstance(self._late, str) else self._late()
            return self.fail(TransferLate(late, where=f"room {self.bootstrap_id}"))

    def failure(self) -> RuntimeFault | None:
        return self._fault


class TransferEnd:
    """One side of a transfer. One thread calls it; nothing blocks. After a failure all calls but poll() and
    failure() do nothing."""

    def __init__(self, bootstrap_id: int) -> None:
        if not 1 <= bootstrap_id <= MAX_BOOTSTRAP_ID:
            raise BadRequest(
                f"a room is a number from 1 to {MAX_BOOTSTRAP_ID}, not {bootstrap_id}", where="bootstrap_room"
            )
        self.bootstrap_id = bootstrap_id
        self.progress = Progress(bootstrap_id)

    def poll(self) -> KVPoll:
        """Also checks the deadline. After Success or Failed nothing is read or written any more."""
        fault = self.progress.failure() if self.progress.overdue() else None
        if fault is not None:
            self._failed(fault, True)
        return self.progress.now

    def abort(self, reason: str = "aborted") -> None:
        """End it, and notify the other side. Nothing is written any more when it returns."""
        self.fail(Aborted(reason, where=f"room {self.bootstrap_id}"))

    def fail(self, fault: RuntimeFault, *, notify: bool = True) -> None:
        """Fail it, unless it has ended. notify: the other side does not know of it."""
        if self.progress.fail(fault):
            self._failed(fault, notify)

    def failure(self) -> RuntimeFault | None:
        """Why it failed."""
        return self.progress.failure()

    def _failed(self, fault: RuntimeFault, notify: bool) -> None:
        """It has just failed; `notify` the other side."""


class KVSender(TransferEnd, ABC):
    """The prefill side of a transfer.

    Bootstrapping until the decode side has requested tokens; then `start` is known and init() must be called.
    send() as the prompt is computed, with the metadata behind the last of it. Success once the decode side
    has everything.
    """

    start: int
    """How many tokens of the prompt the decode side has already: the first one to be sent. Known from
    WaitingForInput on."""

    @abstractmethod
    def init(self, tokens: int) -> None:
        """How many tokens will be sent: the prompt's length less `start`. Fails the transfer if the decode
        side has slots for another number."""

    @abstractmethod
    def send(self, runs: Sequence[Run], metadata: Metadata | None = None) -> None:
        """The next tokens' KV, in token order; it is complete in these slots and must stay until the sender
        has ended. metadata: of the whole; passed with the last tokens (whose `runs` may be empty)."""


class KVReceiver(TransferEnd, ABC):
    """The decode side of a transfer.

    Bootstrapping until the prefill side is connected; then init() says where the KV goes. Success once all KV
    is in the pool, and the metadata are known.
    """

    metadata: Metadata | None = None
    """Of a transfer that has succeeded."""

    @abstractmethod
    def init(self, runs: Sequence[Run], start: int) -> None:
        """The slots of the prompt's tokens from `start` on; those before are not requested."""


class KVManager(ABC):
    """One engine's end of all its transfers: creates senders (prefill) and receivers (decode), holds the
    connections. carries: whether KV really moves; if not, nothing may be kept in a prefix cache."""

    carries: ClassVar[bool]

    @abstractmethod
    def __init__(self, memory: KVMemory, options: TransferOptions | None = None) -> None: ...

    @abstractmethod
    def listen(self, bootstrap: str | None = None) -> str:
        """The prefill side: accept connections from now on; returns the address. bootstrap: `host:port` of a
        bootstrap server to register with. Raises TransferError, BadRequest."""

    @abstractmethod
    def sender(self, bootstrap_id: int) -> KVSender:
        """Raises BadRequest: the id is not from 1 to MAX_BOOTSTRAP_ID, or is in use."""

    @abstractmethod
    def receiver(self, bootstrap: str, bootstrap_id: int) -> KVReceiver:
        """bootstrap: `host:port` of the prefill side's bootstrap server. Raises BadRequest, as sender()."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Figures for /metrics: transfers, bytes and seconds so far, failures."""

    @abstractmethod
    def close(self) -> None:
        """All transfers fail, all connections end."""


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
