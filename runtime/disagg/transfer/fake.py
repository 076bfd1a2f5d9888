"""The fake transfer: no other side, no KV. For warm-up and health checks of one side alone, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from runtime.disagg.transfer.kv_manager import (
    KVManager,
    KVPoll,
    KVReceiver,
    KVSender,
    Progress,
    TransferOptions,
    check_room,
)
from runtime.disagg.transfer.memory import KVMemory, tokens_of
from runtime.disagg.transfer.metadata import Metadata, MetadataBuffers
from runtime.plan import Run
from runtime.protocol.errors import Aborted, RuntimeFault, TransferError

FIRST_TOKEN = 0
"""What a fake receiver says was sampled."""


class _End:
    def __init__(self, room: int) -> None:
        self.room = check_room(room)
        self._progress = Progress(room)
        self._progress.advance(KVPoll.WaitingForInput)

    def poll(self) -> KVPoll:
        return self._progress.now

    def abort(self, reason: str = "aborted") -> None:
        self._progress.fail(Aborted(reason, where=f"room {self.room}"))

    def failure(self) -> RuntimeFault | None:
        return self._progress.failure()


class FakeSender(_End, KVSender):
    """Success with the last send()."""

    def __init__(self, room: int, rows: MetadataBuffers) -> None:
        super().__init__(room)
        self.start = 0
        self._rows = rows
        self._left = 0

    def init(self, tokens: int) -> None:
        self._left = tokens
        self._progress.advance(KVPoll.Transferring)

    def send(self, runs: Sequence[Run], metadata: Metadata | None = None) -> None:
        if self._progress.ended:
            return
        self._left -= tokens_of(runs)
        if self._left < 0 or (metadata is not None and self._left):
            self._progress.fail(
                TransferError(
                    f"sent {'more' if self._left < 0 else 'fewer'} tokens than announced",
                    where=f"room {self.room}",
                )
            )
        elif metadata is not None:
            try:
                self._rows.pack(self.room, metadata)
            except TransferError as error:
                self._progress.fail(error)
            else:
                self._progress.advance(KVPoll.Success)


class FakeReceiver(_End, KVReceiver):
    """Success with init(): the slots keep what they had, the metadata are those of FIRST_TOKEN."""

    def __init__(self, room: int, rows: MetadataBuffers) -> None:
        super().__init__(room)
        self._rows = rows

    def init(self, runs: Sequence[Run], start: int, index: int) -> None:
        if self._progress.ended:
            return
        made = Metadata(output_ids=(FIRST_TOKEN,), logprobs=(0.0,))
        self._rows.land(index, self._rows.pack(self.room, made))
        self._progress.advance(KVPoll.Success)


class FakeManager(KVManager):
    carries: ClassVar[bool] = False

    def __init__(
        self, memory: KVMemory, rows: MetadataBuffers, options: TransferOptions | None = None
    ) -> None:
        self._rows = rows
        self._made = 0

    def listen(self, bootstrap: str | None = None) -> str:
        return "fake:"

    def sender(self, room: int) -> FakeSender:
        self._made += 1
        return FakeSender(room, self._rows)

    def receiver(self, bootstrap: str, room: int) -> FakeReceiver:
        self._made += 1
        return FakeReceiver(room, self._rows)

    def state(self) -> dict[str, Any]:
        return {"rooms_total": self._made}

    def close(self) -> None:
        """It holds nothing."""
