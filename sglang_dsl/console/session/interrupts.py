"""Ctrl-C while a session works. It raises KeyboardInterrupt only in code that may be stopped (`stoppable`).
Everything else, such as taking a cell back, is finished first.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

INSISTS = 3
"""After so many Ctrl-C without an answer it is raised anywhere: what is being finished may hang."""

_waiting = 0  # Ctrl-C that nobody has answered yet


@contextmanager
def held() -> Iterator[None]:
    """Inside this block, Ctrl-C is raised in stoppable() alone. Does nothing where it is held already, in
    other threads (they get no signals), and where Ctrl-C is ignored."""
    before = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread()
    if not mine or before is _heard or not callable(before):
        yield
        return
    answered()
    signal.signal(signal.SIGINT, _heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stoppable(work: Callable[[], T]) -> T:
    """What `work()` returns. Ctrl-C raises KeyboardInterrupt in it, at its start if it came before."""
    if _waiting:
        answered()
        raise KeyboardInterrupt
    return work()


def answered() -> None:
    """What was interrupted has been stopped."""
    global _waiting
    _waiting = 0


def _heard(number: int, frame: FrameType | None) -> None:
    global _waiting
    _waiting += 1
    while frame is not None:
        # By its frame, not by a flag: a flag would be wrong for a moment at either end of the work.
        if frame.f_code is stoppable.__code__:
            answered()
            raise KeyboardInterrupt
        frame = frame.f_back
    if _waiting >= INSISTS:
        answered()
        raise KeyboardInterrupt
