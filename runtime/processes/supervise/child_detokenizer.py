"""The detokeniser's process: deltas in ids in, text out, each to the frontend that its request came from.

It loads the tokenizer and no torch. What travels to a frontend that is not one of the group's is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.ipc.mailbox import Inbox, MailboxClosed, Outbox
from runtime.processes.checkpoint.model import load_tokenizer
from runtime.processes.pipeline.detokenizer import DetokenizerManager
from runtime.processes.supervise.channel import ChildSpec
from runtime.processes.supervise.lifecycle import Lifecycle
from runtime.processes.supervise.names import DETOKENIZER, mailbox_of
from runtime.protocol.errors import WireError
from runtime.protocol.io_struct import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenIDOutput,
    ControlOutput,
    EmbeddingOutput,
    FinishReason,
    StrOutput,
    TokenOutput,
)

log = logging.getLogger(__name__)

IDLE_S = 5.0

T = TypeVar("T", StrOutput, EmbeddingOutput)


def run(spec: ChildSpec, lifecycle: Lifecycle) -> None:
    """Raises what loading raises, and MailboxClosed when a frontend takes nothing."""
    folder = Path(spec.folder)
    inbox = mailbox_of(folder, DETOKENIZER).inbox()
    frontends = {name: mailbox_of(folder, name).outbox() for name in spec.frontends}
    lifecycle.on_stop(lambda _: inbox.close())
    try:
        path, shape = spec.engine.locate()
        tokenizer = load_tokenizer(path, shape)
        process = DetokenizerProcess(DetokenizerManager(tokenizer.text_table), inbox, frontends)
        lifecycle.stalled_s = lambda: process.stalled_s
        lifecycle.ready()
        process.run()
    finally:
        inbox.close()
        for frontend in frontends.values():
            frontend.close()


class DetokenizerProcess:
    """`run()` until the inbox is closed. frontends: name -> mailbox of each frontend; a request without
    `http_worker_ipc` belongs to the only one there is."""

    def __init__(
        self,
        manager: DetokenizerManager,
        inbox: Inbox,
        frontends: Mapping[str, Outbox],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._inbox, self._frontends, self._clock = manager, inbox, dict(frontends), clock
        self._only = next(iter(self._frontends)) if len(self._frontends) == 1 else None
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
        """Turn everything that came into text, and send it off."""
        batches: list[BatchTokenIDOutput] = []
        for item in mail:
            match item:
                case BatchTokenIDOutput():
                    batches.append(item)
                case BatchEmbeddingOutput():
                    self._spread(item.outputs, _vectors, _failed_vector)
                case BatchStrOutput():
                    self._spread(item.outputs, _texts, _failed_text)
                case _:
                    # Answers to questions need no text and wait for none.
                    self._send(item.http_worker_ipc, item)
        made = self._manager.handle(batches) if batches else None
        if made is not None:
            self._spread(made.outputs, _texts, _failed_text)

    def _spread(
        self,
        outputs: list[T],
        pack: Callable[[list[T]], msgspec.Struct],
        failed: Callable[[T, WireError], T],
    ) -> None:
        """Each frontend's own outputs, in one message."""
        by_frontend: dict[str | None, list[T]] = {}
        for output in outputs:
            by_frontend.setdefault(output.http_worker_ipc, []).append(output)
        for name, own in by_frontend.items():
            try:
                self._send(name, pack(own))
                continue
            except WireError as error:
                log.error("an answer cannot travel: %s", error)
            # One by one; the one that cannot travel becomes an error that can.
            for output in own:
                try:
                    self._send(name, pack([output]))
                except WireError as error:
                    self._send(name, pack([failed(output, error)]))

    def _send(self, name: str | None, item: Any) -> None:
        frontend = self._frontends.get(name or self._only or "")
        if frontend is None:
            self.lost += 1
            if self.lost == 1 or self.lost % 1000 == 0:
                log.warning("outputs for a frontend that is not there: %r (%d so far)", name, self.lost)
            return
        try:
            frontend.send(item)
        except WireError as error:
            if not isinstance(item, ControlOutput):
                raise
            frontend.send(
                ControlOutput(
                    rid=item.rid,
                    http_worker_ipc=item.http_worker_ipc,
                    ok=False,
                    message=str(error),
                    data=error.to_dict(),
                )
            )


def _texts(outputs: list[StrOutput]) -> BatchStrOutput:
    return BatchStrOutput(rids=[output.rid for output in outputs], outputs=outputs)


def _vectors(outputs: list[EmbeddingOutput]) -> BatchEmbeddingOutput:
    return BatchEmbeddingOutput(rids=[output.rid for output in outputs], outputs=outputs)


def _failed_text(output: StrOutput, error: WireError) -> StrOutput:
    reason = FinishReason(type="abort", error=error.to_dict())
    delta = TokenOutput(rid=output.rid, new_ids=[], finish=reason, http_worker_ipc=output.http_worker_ipc)
    return StrOutput(rid=output.rid, text="", delta=delta)


def _failed_vector(output: EmbeddingOutput, error: WireError) -> EmbeddingOutput:
    reason = FinishReason(type="abort", error=error.to_dict())
    return EmbeddingOutput(
        rid=output.rid, embedding=[], finish=reason, http_worker_ipc=output.http_worker_ipc
    )
