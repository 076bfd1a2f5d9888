"""Ctrl-C in a session: KeyboardInterrupt is raised only in code that may be stopped (`stoppable`)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

FORCED = 3
"""After this many unanswered Ctrl-C the exception is raised anywhere, as the running code may hang."""

_pending = 0  # Ctrl-C that were not raised yet


@contextmanager
def held() -> Iterator[None]:
    """Within this block, Ctrl-C is raised in stoppable() alone. Has no effect in a nested block, in other
    threads (they get no signals), and if Ctrl-C is ignored."""
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before is _on_interrupt or not callable(before):
        yield
        return
    clear()
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stoppable(work: Callable[[], T]) -> T:
    """Returns `work()`. Ctrl-C raises KeyboardInterrupt in it, or before it if it was pressed earlier."""
    if _pending:
        clear()
        raise KeyboardInterrupt
    return work()


def clear() -> None:
    """Forget pending Ctrl-C: what they interrupted has been stopped."""
    global _pending
    _pending = 0


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    global _pending
    _pending += 1
    forced = _pending >= FORCED
    # The frames are searched, as a flag would be wrong for a moment before and after the work.
    while not forced and frame is not None and frame.f_code is not stoppable.__code__:
        frame = frame.f_back
    if forced or frame is not None:
        clear()
        raise KeyboardInterrupt
