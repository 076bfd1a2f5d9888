"""What a run is made of, apart from the executors themselves: shared facts, the body beside the reader, the
text that forks start from, and the things that wait in a queue."""

from __future__ import annotations

import asyncio
import threading
import weakref
from dataclasses import dataclass, field
from typing import Protocol

from sglang_dsl.backends.base import Backend
from sglang_dsl.feed import Mark, Variable
from sglang_dsl.ir import Node, Sampling, Source
from sglang_dsl.usage import Ledger


class Member(Protocol):
    """An executor, as its run sees it."""

    def mark(self) -> Mark: ...


@dataclass(frozen=True, eq=False)
class RunInfo:
    """What all forks of one run share. `timeout`: seconds per call. `members`: the run's executors that still
    live."""

    program: str
    backend: Backend | None
    defaults: Sampling = field(default_factory=Sampling)
    timeout: float | None = None
    stream: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    members: weakref.WeakSet[Member] = field(default_factory=weakref.WeakSet)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, member: Member) -> None:
        with self.lock:
            self.members.add(member)

    def live(self) -> list[Member]:
        with self.lock:
            return list(self.members)


@dataclass(slots=True)
class Body:
    """The user's function, where it runs beside the reader (stream). `end` is reached when it has returned
    and all it said has been done."""

    end: Mark
    thread: int | None = None
    done: bool = False
    error: BaseException | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether it may still add something, from another thread than the caller's."""
        return not self.done and self.thread != threading.get_ident()


class Prefix:
    """The text that sibling forks start from. With more than one, the backend's cache is warmed with it,
    once, before the first of them generates. The locks are fair: siblings go on in the order in which they
    began."""

    def __init__(self, mark: Mark, size: int) -> None:
        self._mark = mark
        self._turn = asyncio.Lock()
        self._warm_turn = asyncio.Lock()
        self._cold = size > 1
        self._error: Exception | None = None

    async def reached(self) -> Mark:
        """The parent's mark, once it is reached."""
        async with self._turn:
            await self._mark.signal.wait_async(lambda: self._mark.done)
        return self._mark

    async def warm(self, backend: Backend) -> None:
        """Raises what the warm-up raised, to every sibling alike."""
        async with self._warm_turn:
            if self._error is not None:
                raise self._error
            if self._cold and self._mark.transcript.kind != "root":
                try:
                    await backend.commit(self._mark.transcript.prompt())
                except Exception as error:
                    self._error = error
                    raise
            self._cold = False


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to do: a leaf node with the place of its `+=` and the variable it sets, or a mark to
    reach."""

    node: Node | None = None
    src: Source | None = None
    variable: Variable | None = None
    mark: Mark | None = None
