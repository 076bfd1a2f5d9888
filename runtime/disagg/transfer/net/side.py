"""What both directions of transfers over sockets share: the live transfers by id, and how each ends."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

from runtime.disagg.transfer.kv_manager import TransferEnd, TransferOptions
from runtime.disagg.transfer.memory import KVMemory
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.messages import Fail
from runtime.protocol.errors import BadRequest, RuntimeFault, TransferError


class SocketEnd(TransferEnd):
    """A sender or a receiver. `_link`: None until the two sides have met."""

    def __init__(self, bootstrap_id: int, side: Side[Any]) -> None:
        super().__init__(bootstrap_id)
        self._side = side
        self._link: Link | None = None

    def reject(self, message: str, hint: str | None = None) -> None:
        """Fail it with a TransferError."""
        self.fail(TransferError(message, where=f"room {self.bootstrap_id}", hint=hint))

    def lost(self, link: Link, fault: RuntimeFault) -> None:
        if link is self._link:
            self.fail(fault, notify=False)

    def _failed(self, fault: RuntimeFault, notify: bool) -> None:
        self._side.ended(self, fault)
        if notify and self._link is not None:
            self._link.send(Fail(self.bootstrap_id, fault.to_dict()))


E = TypeVar("E", bound=SocketEnd)


class Side(Generic[E]):
    """All transfers of one direction. counts: those that succeeded and those that failed, by these names."""

    def __init__(self, memory: KVMemory, options: TransferOptions, succeeded: str, failed: str) -> None:
        self.memory, self.options = memory, options
        self._lock = threading.RLock()
        self._live: dict[int, E] = {}
        self._succeeded, self._failures = succeeded, failed
        self.counts = {succeeded: 0, failed: 0}

    @property
    def live(self) -> int:
        return len(self._live)

    def find(self, bootstrap_id: int) -> E | None:
        return self._live.get(bootstrap_id)

    def lost(self, link: Link, fault: RuntimeFault) -> None:
        """This link has ended by itself."""
        for end in self._ends():
            end.lost(link, fault)

    def close(self, fault: RuntimeFault) -> None:
        for end in self._ends():
            end.fail(fault)

    def ended(self, end: SocketEnd, fault: RuntimeFault | None) -> None:
        with self._lock:
            if self._live.get(end.bootstrap_id) is end:
                del self._live[end.bootstrap_id]
            self.counts[self._succeeded if fault is None else self._failures] += 1

    def _check_unused(self, bootstrap_id: int) -> None:
        if bootstrap_id in self._live:
            raise BadRequest(f"room {bootstrap_id} is in use", where="bootstrap_room")

    def _ends(self) -> list[E]:
        with self._lock:
            return list(self._live.values())
