"""Lifecycle of a child process: the supervisor's orders, heartbeats, and the end after the supervisor."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from runtime.ipc.mailbox import Inbox, MailboxClosed, Outbox
from runtime.processes.supervise import channel
from runtime.processes.supervise.channel import ChildSpec, Order, Stop
from runtime.protocol.errors import DeadlineExceeded, EngineDead, WireError

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
ORPHAN_S = 10.0
"""How long a child may go on after its supervisor to answer its requests; longer than a machine is
suspended."""
EARLY_S = 0.5
"""The same for a child that is stopped while it loads."""
EXIT_S = 10.0
"""How much longer than its time to drain a child may take to end."""


class Lifecycle:
    """The role may replace `stalled_s`: how long the current work has taken; and `reload`: read the API keys
    again, called from another thread. `leaving`: the server ends, soon or now. orders: came already."""

    def __init__(self, inbox: Inbox, outbox: Outbox, spec: ChildSpec, orders: Iterable[Order] = ()) -> None:
        self._inbox, self._outbox, self._spec, self._early = inbox, outbox, spec, orders
        self.stalled_s: Callable[[], float] = lambda: 0.0
        self.reload: Callable[[], None] = lambda: None
        self.stopping: Stop | None = None
        self.orphaned = False
        self.leaving = False
        self._ready = False
        self._facts: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._on_stop: list[Callable[[Stop], None]] = []

    def start(self) -> None:
        for name, work in (("lifeline", self._listen), ("heartbeat", self._send_heartbeats)):
            threading.Thread(target=work, name=name, daemon=True).start()

    # -- for the role ----------------------------------------------------------------------------------------

    def ready(self, facts: dict[str, Any] | None = None) -> None:
        """Report to the supervisor that the work can begin."""
        gc.collect()
        gc.freeze()  # loaded objects stay: collecting them again would stop all threads
        self._ready = True
        self.report(channel.Ready(facts or {}))

    def report(self, report: channel.Report) -> None:
        """Never fails: a supervisor that does not read has ended, or will see our end."""
        with contextlib.suppress(MailboxClosed):
            self._outbox.send(report)

    def facts(self, timeout: float) -> dict[str, Any]:
        """The scheduler's facts, once it is ready. Raises DeadlineExceeded; EngineDead when stopped first."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._facts is not None or self.stopping, timeout):
                raise DeadlineExceeded(
                    f"the scheduler was not ready within {timeout:g} s", hint="load_timeout_s"
                )
            if self._facts is None:
                raise EngineDead("stopped while starting")
            return self._facts

    def on_stop(self, act: Callable[[Stop], None]) -> None:
        """Call `act` when the child is to end, from another thread; at once if it was stopped already."""
        with self._changed:
            self._on_stop.append(act)
            stopping = self.stopping
        if stopping is not None:
            act(stopping)

    # -- the threads -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            orders = self._early
            while True:
                for order in orders:
                    self._take(order)
                orders = self._inbox.receive(None)
        except WireError as error:
            log.error("the supervisor cannot be understood: %s", error)
        except MailboxClosed:
            pass
        self._orphan()

    def _take(self, order: Order) -> None:
        match order:
            case channel.Go(facts):
                with self._changed:
                    self._facts = facts
                    self._changed.notify_all()
            case channel.Leave():
                self.leaving = True
            case Stop():
                self.leaving = True
                self._stop(order)
            case channel.Reload():
                self.reload()

    def _send_heartbeats(self) -> None:
        stalled_s = 0.0
        while True:
            # It grows with the beats only: the time of a suspended process does not count.
            stalled_s = min(self.stalled_s(), stalled_s + 2 * HEARTBEAT_S)
            self.report(channel.Heartbeat(stalled_s))
            if self._spec.parent and os.getppid() != self._spec.parent:
                self._orphan()
                return
            time.sleep(HEARTBEAT_S)

    def _stop(self, order: Stop) -> None:
        with self._changed:
            first, self.stopping = self.stopping is None, order
            acts = list(self._on_stop)
            self._changed.notify_all()
        if first:
            end_after(order.drain_s + EXIT_S if self._ready else EARLY_S)
        for act in acts:
            act(order)

    def _orphan(self) -> None:
        """The supervisor has ended: stop, and end this process soon, whatever the role does."""
        with self._changed:
            if self.orphaned:
                return
            self.orphaned = True
            stopping = self.stopping is not None
        end_after(ORPHAN_S, self.tidy)
        if not stopping:
            log.error("the supervisor is gone; ending")
            self._stop(Stop(0.0))

    def tidy(self) -> None:
        """Remove the sockets if the supervisor has ended."""
        if not self.orphaned:
            return
        folder = Path(self._spec.folder)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # only when it is empty


def end_after(seconds: float, before: Callable[[], None] = lambda: None) -> None:
    """End this process after that time, whatever its threads do."""

    def end() -> None:
        time.sleep(seconds)
        before()
        os._exit(1)

    threading.Thread(target=end, name="end", daemon=True).start()
