"""Ranks: the one end of a mailbox of one to many. Every rank gets each item; answers are gathered, from all
or from some. A rank that is gone, or late, is an error that names it.

A rank has a mailbox of its own in each direction, of any kind. What the items mean is not its business.
"""

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
    """links: to and from each rank, in the order of their numbers. One thread sends and gathers; any may call
    lost() and close()."""

    def __init__(self, links: Sequence[tuple[Outbox, Inbox]]) -> None:
        self._outboxes = [outbox for outbox, _ in links]
        self._inboxes = [inbox for _, inbox in links]
        self._answers: list[deque[Any]] = [deque() for _ in links]
        self._lost: tuple[int, str] | None = None

    def send(self, item: msgspec.Struct) -> None:
        """To every rank. Raises WireError for what cannot travel (nobody got it), EngineDead and
        DeadlineExceeded for the rank that is gone or takes nothing (others may have got it)."""
        for rank in range(len(self._outboxes)):
            self.send_to(rank, item)

    def send_to(self, rank: int, item: msgspec.Struct) -> None:
        """To this one; raises as send() does."""
        try:
            self._outboxes[rank].send(item)
        except MailboxFull as error:
            raise DeadlineExceeded(f"rank {rank}: {error}", where=f"rank {rank}") from error
        except MailboxClosed as error:
            raise self._gone(rank) from error

    def gather(self, timeout: float | None, ranks: Iterable[int] | None = None) -> list[Any]:
        """The next item of each of these ranks (None: of all), in their order. Raises DeadlineExceeded naming
        the first rank that gave none in time, EngineDead naming one that is gone, and WireError for what
        cannot be read; what the others gave is kept for the next call."""
        wanted = range(len(self._inboxes)) if ranks is None else tuple(ranks)
        deadline = None if timeout is None else time.monotonic() + timeout
        for rank in wanted:
            answers = self._answers[rank]
            while not answers:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    answers += self._inboxes[rank].receive(left)
                except MailboxClosed as error:
                    raise self._gone(rank) from error
                if not answers and left == 0.0:
                    raise DeadlineExceeded(f"rank {rank} gave no answer in time", where=f"rank {rank}")
        return [self._answers[rank].popleft() for rank in wanted]

    def lost(self, rank: int, how: str) -> None:
        """This rank is gone, as whoever watches it found out: gather() ends with that now. What it said last
        can still be read, by remains()."""
        if self._lost is None:
            self._lost = rank, how
        for outbox in self._outboxes:
            outbox.close()
        for number, inbox in enumerate(self._inboxes):
            if number != rank:
                inbox.close()

    def remains(self, rank: int) -> list[Any]:
        """What this rank has said and gather() has not given. Raises nothing: what cannot be read is left
        out."""
        found = list(self._answers[rank])
        self._answers[rank].clear()
        with contextlib.suppress(MailboxClosed, WireError):
            while more := self._inboxes[rank].receive(0):
                found += more
        return found

    @property
    def gone(self) -> int | None:
        """The rank that was first found to be gone."""
        return None if self._lost is None else self._lost[0]

    def close(self) -> None:
        """The ranks' ends are closed, too. Answers that nobody took are thrown away."""
        for outbox in self._outboxes:
            outbox.close()
        for inbox in self._inboxes:
            inbox.close()
            with contextlib.suppress(MailboxClosed, WireError):
                while True:  # an inbox keeps its socket until it is empty
                    inbox.receive(0)

    def _gone(self, rank: int) -> EngineDead:
        if self._lost is None:
            self._lost = rank, "closed its mailbox"
        rank, how = self._lost
        return EngineDead(f"rank {rank} {how}", where=f"rank {rank}")
