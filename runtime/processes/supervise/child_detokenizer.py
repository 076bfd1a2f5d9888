"""The detokeniser's process: deltas in ids in, text out, each to the frontend that its request came from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.ipc.mailbox import Inbox, MailboxClosed, Outbox, send_one_by_one
from runtime.processes.checkpoint.model import load_tokenizer
from runtime.processes.pipeline.detokenizer import DetokenizerManager
from runtime.processes.supervise.channel import DETOKENIZER, ChildSpec, mailbox_of
from runtime.processes.supervise.lifecycle import Lifecycle
from runtime.protocol import io_struct
from runtime.protocol.errors import WireError
from runtime.protocol.io_struct import EmbeddingOutput, TokenOutput

log = logging.getLogger(__name__)

IDLE_S = 5.0

T = TypeVar("T", TokenOutput, EmbeddingOutput)


def run(spec: ChildSpec, lifecycle: Lifecycle) -> None:
    """Raises the errors of loading, and MailboxClosed when a frontend does not read."""
    folder = Path(spec.folder)
    inbox = mailbox_of(folder, DETOKENIZER).inbox()
    frontends = {name: mailbox_of(folder, name).outbox() for name in spec.frontends}
    lifecycle.on_stop(lambda _: inbox.close())
    try:
        tokenizer = load_tokenizer(*spec.engine.locate())
        process = DetokenizerProcess(DetokenizerManager(tokenizer.text_table), inbox, frontends)
        lifecycle.stalled_s = lambda: process.stalled_s
        lifecycle.ready()
        process.run()
    finally:
        inbox.close()
        for frontend in frontends.values():
            frontend.close()


class DetokenizerProcess:
    """frontends: mailboxes by name; a request without `http_worker_ipc` belongs to the only one."""

    def __init__(
        self,
        manager: DetokenizerManager,
        inbox: Inbox,
        frontends: Mapping[str, Outbox],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._inbox, self._frontends, self._clock = manager, inbox, dict(frontends), clock
        if len(self._frontends) == 1:
            self._frontends[""] = next(iter(self._frontends.values()))
        self._working_since: float | None = None
        self.lost = 0

    @property
    def stalled_s(self) -> float:
        """Seconds since the current work began; 0 while waiting for messages."""
        since = self._working_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def run(self) -> None:
        while True:
            self._working_since = None
            try:
                mail = self._inbox.receive(IDLE_S)
            except MailboxClosed:
                return
            self._working_since = self._clock()
            self.handle(mail)

    def handle(self, mail: list[Any]) -> None:
        """Send the mail on, ids as text."""
        batches: list[io_struct.BatchTokenIDOutput] = []
        for item in mail:
            match item:
                case io_struct.BatchTokenIDOutput():
                    batches.append(item)
                case io_struct.BatchEmbeddingOutput():
                    self._spread(item.outputs, io_struct.BatchEmbeddingOutput.of, EmbeddingOutput.failed)
                case io_struct.BatchStrOutput():
                    self._spread(item.outputs, io_struct.BatchStrOutput.of, _failed)
                case io_struct.ControlOutput():
                    self._answer(item)
        texts = self._manager.handle(batches) if batches else None
        if texts is not None:
            self._spread(texts.outputs, io_struct.BatchStrOutput.of, _failed)

    def _spread(
        self, outputs: list[T], pack: Callable[[list[T]], msgspec.Struct], failed: Callable[[T, WireError], T]
    ) -> None:
        """Send each frontend its outputs, in one message."""
        by_frontend: dict[str | None, list[T]] = {}
        for output in outputs:
            by_frontend.setdefault(output.http_worker_ipc, []).append(output)
        for name, some in by_frontend.items():
            if (frontend := self._frontend(name)) is None:
                continue
            try:
                frontend.send(pack(some))
            except WireError as error:
                log.error("an answer cannot travel: %s", error)
                send_one_by_one(frontend, some, pack, failed)

    def _answer(self, item: io_struct.ControlOutput) -> None:
        if (frontend := self._frontend(item.http_worker_ipc)) is None:
            return
        try:
            frontend.send(item)
        except WireError as error:
            item.ok, item.message, item.data = False, str(error), error.to_dict()
            frontend.send(item)

    def _frontend(self, name: str | None) -> Outbox | None:
        frontend = self._frontends.get(name or "")
        if frontend is None:
            self.lost += 1
            if self.lost == 1 or self.lost % 1000 == 0:
                log.warning("outputs for a frontend that is not there: %r (%d so far)", name, self.lost)
        return frontend


def _failed(output: TokenOutput, error: WireError) -> TokenOutput:
    return TokenOutput.failed(output.rid, error, output.http_worker_ipc)
