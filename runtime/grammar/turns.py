"""Short turns: how long a thread may hold the interpreter while another waits for it.

A thread that runs Python only, as one that reads a schema, gives the interpreter up when somebody has waited
sys.getswitchinterval() for it, 5 ms by default. A forward pass gives it up and wants it back at every
operator: beside such a thread each of them would wait so long. The interval is one per process; so is this.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType

SHORT_S = 1e-3


class ShortTurns:
    """While any thread is within, the interval is at most SHORT_S; then it is what it was before."""

    _lock = threading.Lock()
    _within = 0
    _before = 0.0
    _set = 0.0

    def __enter__(self) -> None:
        kind = ShortTurns
        with kind._lock:
            kind._within += 1
            if kind._within == 1 and sys.getswitchinterval() > SHORT_S:
                kind._before = sys.getswitchinterval()
                sys.setswitchinterval(SHORT_S)
                kind._set = sys.getswitchinterval()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mine = ShortTurns
        with mine._lock:
            mine._within -= 1
            # Somebody may have set another one meanwhile: that stays.
            if mine._within == 0 and mine._before and sys.getswitchinterval() == mine._set:
                sys.setswitchinterval(mine._before)
                mine._before = 0.0
