"""Ranks: one end of a one-to-many mailbox. Errors name the rank that has ended or is late."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from runtime.ipc.mailbox import Inbox, MailboxClosed, MailboxFull, Outbox
from runtime.protocol.errors import DeadlineExceeded, EngineDead, WireError


class Ranks:
    """links: to and from each rank. One thread sends and gathers; any may call lost() and close()."""

    def __init__(self, links: Sequence[tuple[Outbox, Inbox]]) -> None:
        self._outboxes = [outbox for outbox, _ in links]
        self._inboxes = [inbox for _, inbox in links]
        self._answers: list[deque[Any]] = [deque() for _ in links]
        self._lost: tuple[int, str] | None = None

    def send(self, item: msgspec.Struct) -> None:
        """Send to every rank. Raises WireError for an item that cannot be encoded (no rank got it),
        EngineDead and DeadlineExceeded for a rank that has ended or does not read (others may have got
        it)."""
        for rank in range(len(self._outboxes)):
            self.send_to(rank, item)

    def send_to(self, rank: int, item: msgspec.Struct) -> None:
        """Send to one rank; raises like send()."""
        try:
            self._outboxes[rank].send(item)
        except MailboxFull as error:
            raise DeadlineExceeded(f"rank {rank}: {error}", where=f"rank {rank}") from error
        except MailboxClosed as error:
            raise self._ended(rank) from error

    def gather(self, timeout: float | None, ranks: Iterable[int] | None = None) -> list[Any]:
        """The next item of these ranks (None: of all), in order. Raises DeadlineExceeded naming the first
        rank without an answer in time, EngineDead naming one that has ended, and WireError for an unreadable
        message; the answers of other ranks are kept for the next call."""
        selected = range(len(self._inboxes)) if ranks is None else tuple(ranks)
        deadline = None if timeout is None else time.monotonic() + timeout
        for rank in selected:
            answers = self._answers[rank]
            while not answers:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    answers += self._inboxes[rank].receive(left)
                except MailboxClosed as error:
                    raise self._ended(rank) from error
                if not answers and left == 0.0:
                    raise DeadlineExceeded(f"rank {rank} gave no answer in time", where=f"rank {rank}")
        return [self._answers[rank].popleft() for rank in selected]

    def lost(self, rank: int, how: str) -> None:
        """A rank has ended: gather() raises that from now on. remains() still reads its last messages."""
        if self._lost is None:
            self._lost = rank, how
        for outbox in self._outboxes:
            outbox.close()
        for number, inbox in enumerate(self._inboxes):
            if number != rank:
                inbox.close()

    def remains(self, rank: int) -> list[Any]:
        """The messages of this rank that gather() has not returned; unreadable ones are dropped."""
        answers = list(self._answers[rank])
        self._answers[rank].clear()
        with contextlib.suppress(MailboxClosed, WireError):
            while more := self._inboxes[rank].receive(0):
                answers += more
        return answers

    @property
    def first_lost(self) -> int | None:
        return None if self._lost is None else self._lost[0]

    def close(self) -> None:
        """Closes the ranks' ends too. Unread answers are dropped."""
        for outbox in self._outboxes:
            outbox.close()
        for inbox in self._inboxes:
            inbox.close()
            with contextlib.suppress(MailboxClosed, WireError):
                while True:  # an inbox keeps its socket until it is empty
                    inbox.receive(0)

    def _ended(self, rank: int) -> EngineDead:
        if self._lost is None:
            self._lost = rank, "closed its mailbox"
        rank, how = self._lost
        return EngineDead(f"rank {rank} {how}", where=f"rank {rank}")
