"""Threads: a bounded pool for ordinary functions. Its threads do not keep the process alive: a program that
waits for an answer which never comes must not hold up the interpreter's end. Knows no programs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Threads:
    """At most `most` threads, each begun when there is work and nobody idle to do it."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._waiting = 0  # work that was given and not ended

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` soon; what it raises is lost."""
        with self._lock:
            self._waiting += 1
            if self._waiting > len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
        self._work.put(work)

    def close(self, *, wait: bool) -> None:
        """Take no more; what was given and not begun is dropped. `wait`: until the threads have ended."""
        with self._lock:
            threads, self._most = self._threads, 0
        while not self._work.empty():
            try:
                self._work.get_nowait()
            except queue.Empty:
                break
        for _ in threads:
            self._work.put(None)
        for thread in threads if wait else ():
            thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            with contextlib.suppress(BaseException):  # whoever gave the work keeps what it raises
                work()
            del work  # it may hold a program
            with self._lock:
                self._waiting -= 1
