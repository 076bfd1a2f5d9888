"""The fake transfer: no other side, no KV. For warm-up and health checks of one side alone, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from runtime.disagg.transfer.kv_manager import KVManager, KVPoll, KVReceiver, KVSender, TransferOptions
from runtime.disagg.transfer.memory import KVMemory, tokens_of
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Run
from runtime.protocol.errors import TransferError

FIRST_TOKEN = 0
"""The first token of a fake receiver."""


class FakeSender(KVSender):
    """Success with the last send()."""

    def __init__(self, bootstrap_id: int) -> None:
        super().__init__(bootstrap_id)
        self.progress.advance(KVPoll.WaitingForInput)
        self.start = self._left = 0

    def init(self, tokens: int) -> None:
        self._left = tokens
        self.progress.advance(KVPoll.Transferring)

    def send(self, runs: Sequence[Run], metadata: Metadata | None = None) -> None:
        if self.progress.ended:
            return
        self._left -= tokens_of(runs)
        if self._left < 0 or (metadata is not None and self._left):
            self.progress.fail(
                TransferError(
                    f"sent {'more' if self._left < 0 else 'fewer'} tokens than announced",
                    where=f"room {self.bootstrap_id}",
                )
            )
        elif metadata is not None:
            self.progress.advance(KVPoll.Success)


class FakeReceiver(KVReceiver):
    """Success with init(): the slots keep their contents, the metadata are those of FIRST_TOKEN."""

    def __init__(self, bootstrap_id: int) -> None:
        super().__init__(bootstrap_id)
        self.progress.advance(KVPoll.WaitingForInput)

    def init(self, runs: Sequence[Run], start: int) -> None:
        self.metadata = Metadata(output_ids=(FIRST_TOKEN,), logprobs=(0.0,))
        self.progress.advance(KVPoll.Success)


class FakeManager(KVManager):
    carries: ClassVar[bool] = False

    def __init__(self, memory: KVMemory, options: TransferOptions | None = None) -> None:
        self._count = 0

    def listen(self, bootstrap: str | None = None) -> str:
        return "fake:"

    def sender(self, bootstrap_id: int) -> FakeSender:
        self._count += 1
        return FakeSender(bootstrap_id)

    def receiver(self, bootstrap: str, bootstrap_id: int) -> FakeReceiver:
        self._count += 1
        return FakeReceiver(bootstrap_id)

    def state(self) -> dict[str, Any]:
        return {"rooms_total": self._count}

    def close(self) -> None:
        """It holds nothing."""
