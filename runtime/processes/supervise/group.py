"""Group: one generation of child processes, from their start to their end."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.ipc.mailbox import MailboxClosed
from runtime.ipc.socket_mailbox import SocketInbox, SocketOutbox
from runtime.ipc.zmq_mailbox import make_folder
from runtime.processes.pipeline.before_start import describe_exit
from runtime.processes.supervise import channel
from runtime.processes.supervise.channel import DETOKENIZER, SCHEDULER, ChildSpec, Order, Role, mailbox_of
from runtime.protocol.control import AbortReq, GroupFailed
from runtime.protocol.errors import EngineDead, InternalFault, RuntimeFault, WireError, from_dict

log = logging.getLogger(__name__)

PASS_ON_S = 10.0
"""How long HTTP workers may take to answer their requests with the group's failure; longer than a machine is
suspended."""
NOTIFY_S = 8.0
"""How long a live worker may take to receive it."""
SEND_TIMEOUT_S = 5.0
"""How long a child may take to read an order."""
STOP_S = 5.0
"""How long a child may take to end when it has nothing left to do."""
LONGEST_LOOK_S = 1.0
"""The longest silence that one reading of reports may add."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before a recent replacement of an HTTP worker is replaced."""
STABLE_S = 60.0
"""A process that ran so long does not count as another consecutive failure."""


class Child:
    """One process. `fault`: the reason of its end that it reported. `stalled_s`: how long its current work
    has taken; `silent_s`: how long it has reported nothing."""

    def __init__(self, spec: ChildSpec, environment: Mapping[str, str]) -> None:
        self.spec, self.name = spec, spec.name
        self.ready = False
        self.facts: dict[str, Any] = {}
        self.fault: RuntimeFault | None = None
        self.stalled_s = self.silent_s = 0.0
        self.began = time.monotonic()
        mine, theirs = socket.socketpair()
        with mine, theirs:
            end = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.processes.supervise.child", str(end)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # lines that libraries print go to the log
                env=dict(environment),
                pass_fds=(end,) if spec.listener is None else (end, spec.listener),
            )
            self._orders = SocketOutbox(mine.dup(), channel.TO_CHILD, SEND_TIMEOUT_S)
            self._reports = SocketInbox(mine.dup(), channel.FROM_CHILD)
        channel.pid_file(Path(spec.folder), spec.name).write_text(str(self.process.pid))
        self.order(spec)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def order(self, item: Order | ChildSpec) -> None:
        with contextlib.suppress(MailboxClosed):  # it has ended, which ended() reports
            self._orders.send(item)

    def fileno(self) -> int:
        """Of its reports, for a selector."""
        return self._reports.fileno()

    def read_reports(self) -> bool:
        """Whether there may be more. Raises InternalFault for one that cannot be read."""
        try:
            while reports := self._reports.receive(0):
                self.silent_s = 0.0
                for report in reports:
                    self._take(report)
        except MailboxClosed:
            return False
        except WireError as error:
            raise InternalFault(f"a report cannot be read: {error}", where=self.name) from error
        return True

    def _take(self, report: object) -> None:
        match report:
            case channel.Ready(facts):
                self.ready, self.facts = True, facts
            case channel.Heartbeat(stalled_s):
                self.stalled_s = stalled_s
            case channel.Failed(error):
                self.fault = from_dict(error)

    def ended(self) -> EngineDead | None:
        code = self.process.poll()
        if code is None:
            return None
        self.read_reports()
        why = "" if self.fault is None else f": {self.fault}"
        return EngineDead(f"the {self.name} process {describe_exit(code)}{why}", where=self.name)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()

    def release(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self._orders.close()
        self._reports.close()


class Group:
    """scheduler, detokeniser and HTTP workers; without a listener no workers, and `frontends` names frontends
    of others. Its owner calls `wait` repeatedly, which raises when the group cannot go on.
    """

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        folder: Path,
        listener: socket.socket | None,
        environment: Mapping[str, str],
        frontends: tuple[str, ...] = (),
    ) -> None:
        self.engine, self.folder = engine, make_folder(folder)
        self._server, self._listener, self._environment = server, listener, dict(environment)
        self.began = self._looked = time.monotonic()
        count = 0 if listener is None else server.http_workers
        workers = tuple(map(channel.frontend_name, range(count)))
        self._frontends = (*workers, *frontends)
        self._released = self._served = False
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._selector = selectors.PollSelector()
        self.children: list[Child] = []
        roles: list[tuple[Role, str]] = [("scheduler", SCHEDULER), ("detokenizer", DETOKENIZER)]
        roles += [("http", name) for name in workers]
        if server.http_workers > 1:
            # Shared counters, which survive a worker.
            counts = make_folder(self.folder / "metrics")
            self._environment["PROMETHEUS_MULTIPROC_DIR"] = str(counts)
        try:
            for role, name in roles:
                self.children.append(self._start(role, name))
        except OSError as error:
            self.end()
            raise InternalFault(f"a process cannot be started: {error}") from error

    @property
    def ready(self) -> bool:
        return all(child.ready for child in self.children)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the scheduler reported when it was ready."""
        return self.children[0].facts

    def wait(self, timeout: float) -> None:
        """Read the children's reports for at most `timeout` seconds, and replace HTTP workers that ended or
        hang. Raises EngineDead naming another process that did, or that was not ready in time, and its own
        reason when it could not start."""
        self._read_reports(timeout)
        self._served = self._served or self.ready
        for child in self.children:
            fault = child.ended()
            if fault is not None and not self._replaces(child, fault):
                # A failed start keeps its own error: a missing model is no dead engine.
                raise child.fault if child.fault is not None and not self._served else fault
        if self.children[0].ready and not self._released:
            self._released = True
            for child in self.children[1:]:
                child.order(channel.Go(self.facts))
        self._check_progress()

    def tell_workers(self, order: Order) -> None:
        for child in self._workers():
            child.order(order)

    def drain(self, seconds: float, hurry: Callable[[], bool]) -> bool:
        """Stop the HTTP workers and wait until they have finished their requests. False as soon as `hurry()`
        is true. Raises EngineDead when the scheduler or detokeniser dies meanwhile."""
        workers = self._workers()
        self.tell_workers(channel.Stop(seconds))
        deadline = time.monotonic() + seconds + STOP_S
        while any(child.alive for child in workers) and time.monotonic() < deadline:
            self._read_reports(0.1)
            if hurry():
                return False
            for child in self.children:
                if child not in workers and (fault := child.ended()) is not None:
                    raise fault
        return True

    def fail(self, fault: RuntimeFault) -> None:
        """Notify all frontends of the failure, and wait until they have answered their requests with it."""
        notice = GroupFailed(message=fault.message, where=fault.where)
        ended = {child.name for child in self.children if not child.alive}
        boxes = [
            mailbox_of(self.folder, name).outbox(timeout_s=0.2, linger_s=NOTIFY_S)
            for name in self._frontends
            if name not in ended
        ]
        for box in boxes:
            with contextlib.suppress(MailboxClosed):
                box.send(notice)
        for box in boxes:
            box.close()
        self.tell_workers(channel.Stop(PASS_ON_S))
        self._await_end(self._workers(), PASS_ON_S + 1.0)

    def end(self) -> None:
        """End all children, by force if necessary, and release everything."""
        for child in self.children:
            child.order(channel.Stop(0.0))
        self._await_end(self.children, STOP_S)
        for child in self.children:
            if child.alive:
                log.warning("the %s process does not end and is killed", child.name)
                child.kill()
            child.release()
        self._selector.close()

    def _start(self, role: Role, name: str, replaces: bool = False) -> Child:
        listener = self._listener if role == "http" else None
        spec = ChildSpec(
            role=role,
            name=name,
            folder=str(self.folder),
            engine=self.engine,
            server=self._server,
            frontends=self._frontends,
            listener=None if listener is None else listener.fileno(),
            parent=os.getpid(),
            replaces=replaces,
        )
        child = Child(spec, self._environment)
        self._selector.register(child, selectors.EVENT_READ)
        return child

    def _replaces(self, child: Child, fault: EngineDead) -> bool:
        """Whether an ended child is replaced: an HTTP worker, not too often in a row, and after a pause."""
        if child.spec.role != "http" or not self._served:
            return False
        name, now = child.name, time.monotonic()
        if name not in self._due:
            row = 0 if now - child.began > STABLE_S else self._failures.get(name, 0)
            if row > self._server.restart_limit:
                return False
            log.error("%s; another takes its place", fault)
            self._give_up(child, fault)
            pause = 0.0 if row == 0 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (row - 1))
            self._failures[name], self._due[name] = row + 1, now + pause
        if now >= self._due[name]:
            del self._due[name]
            try:
                worker = self._start("http", name, replaces=True)
            except OSError as error:
                raise InternalFault(f"a process cannot be started: {error}") from error
            worker.order(channel.Go(self.facts))
            self.children[self.children.index(child)] = worker
        return True

    def _give_up(self, child: Child, fault: EngineDead) -> None:
        with contextlib.suppress(KeyError, ValueError):  # its end was read
            self._selector.unregister(child)
        child.release()
        for left in self.folder.glob(f"metrics/gauge_live*_{child.process.pid}.db"):
            left.unlink(missing_ok=True)
        outbox = mailbox_of(self.folder, SCHEDULER).outbox(timeout_s=0.2, linger_s=NOTIFY_S)
        with contextlib.suppress(MailboxClosed):
            outbox.send(AbortReq(frontend=child.name, message=str(fault)))
        outbox.close()

    def _workers(self) -> list[Child]:
        return [child for child in self.children if child.spec.role == "http"]

    def _read_reports(self, timeout: float) -> None:
        # If this process did not run either, the machine was suspended: that is no silence of the children.
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, LONGEST_LOOK_S), now
        for child in self.children:
            child.silent_s += passed
        for key, _ in self._selector.select(timeout):
            assert isinstance(key.fileobj, Child)
            if not key.fileobj.read_reports():
                self._selector.unregister(key.fileobj)

    def _await_end(self, children: list[Child], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(child.alive for child in children) and time.monotonic() < deadline:
            self._read_reports(0.05)

    def _check_progress(self) -> None:
        """Raise EngineDead for a child that makes no progress; kill it if it can be replaced."""
        patience, steps = self.engine.load_timeout_s, self.engine.step_timeout_s
        beats = self._server.heartbeat_timeout_s
        for child in self.children:
            if not child.alive:
                continue
            # Only the scheduler's work is forward passes.
            passes = child.spec.role == "scheduler"
            hung_s = max(child.silent_s, 0.0 if passes else child.stalled_s)
            if not child.ready and time.monotonic() - child.began > patience:
                what, option = f"was not ready within {patience:g} s", "load_timeout_s"
            elif self._served and passes and max(child.silent_s, child.stalled_s) > steps:
                what, option = f"made no progress for {steps:g} s", "step_timeout_s"
            elif self._served and hung_s > beats:
                what, option = f"gave no sign of life for {beats:g} s", "heartbeat_timeout_s"
            else:
                continue
            fault = EngineDead(f"the {child.name} process {what}", where=child.name, hint=option)
            if self._served:
                child.kill()  # it would not end by itself
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(STOP_S)  # so that no message waits for it
            if not self._replaces(child, fault):
                raise fault
