"""Link: the connection for messages between two managers. Sends without blocking, detects that the other side
is lost or silent, and reports that once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from runtime.disagg.transfer.net.messages import MAX_MESSAGE, MESSAGES, Ping
from runtime.disagg.transfer.net.streams import PieceSender
from runtime.ipc.socket_mailbox import Frames, frame
from runtime.protocol.errors import RuntimeFault, TransferError, TransferPeerLost, WireError

log = logging.getLogger(__name__)

QUEUED_MESSAGES = 100_000
"""Messages that the other side has not received yet; with more it counts as lost."""
READ_BYTES = 1 << 16
PING_S = 0.05
"""Between two heartbeats, at least."""


class Link:
    """end: connected, after the handshake; the link closes it. pulls: the decode side fetches KV; streams:
    where the prefill side pushes it otherwise. Each message is passed to `take`; `lost` is called once, if
    the link ends by itself. silence: seconds until a peer without heartbeats is lost; ping: between two
    heartbeats of this side."""

    def __init__(
        self, end: socket.socket, peer: str, session: str, *, silence: float, ping: float, pulls: bool
    ) -> None:
        self.pulls = pulls
        self.streams: PieceSender | None = None
        self.peer, self.session = peer, session
        self._end, self._silence, self._ping_s = end, silence, max(PING_S, ping)
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(QUEUED_MESSAGES)
        self._lock = threading.Lock()
        self.closed = False
        self._fault: RuntimeFault | None = None
        self._closing: list[Callable[[], None]] = []

    def start(self, take: Callable[[Link, Any], None], lost: Callable[[Link, RuntimeFault], None]) -> None:
        self._take, self._lost = take, lost
        self._end.settimeout(self._silence)
        for act in (self._read, self._write):
            threading.Thread(target=act, name=f"transfer {self.peer}", daemon=True).start()

    def on_close(self, act: Callable[[], None]) -> None:
        """Call it when the link ends; at once if it has."""
        with self._lock:
            if not self.closed:
                self._closing.append(act)
                return
        act()

    def send(self, item: msgspec.Struct) -> None:
        """Never blocks; a link that has ended drops it. Raises WireError if it cannot be encoded."""
        data = frame(MESSAGES.encode(item))
        if self.closed:
            return
        try:
            self._outgoing.put_nowait(data)
        except queue.Full:
            self.break_off(TransferPeerLost("the other engine takes no messages", where=self.peer))

    def close(self) -> None:
        """End it without a report. Queued messages are still sent, if that does not block."""
        self.break_off(None)

    def _read(self) -> None:
        """Until it ends. `lost` is called from this thread, which holds no lock of others."""
        self.break_off(self._read_all())
        if self._fault is not None:
            self._lost(self, self._fault)

    def _read_all(self) -> RuntimeFault:
        frames = Frames(MAX_MESSAGE)
        try:
            while data := self._end.recv(READ_BYTES):
                for message in frames.feed(data):
                    item = MESSAGES.decode(message)
                    if not isinstance(item, Ping):
                        self._take(self, item)
            return TransferPeerLost("the other engine closed the connection", where=self.peer)
        except TimeoutError:
            lost = f"the other engine gave no sign of life for {self._silence:g} s"
            return TransferPeerLost(lost, where=self.peer)
        except OSError as error:
            return TransferPeerLost(f"the connection was lost: {error.strerror or error}", where=self.peer)
        except WireError as error:
            return TransferPeerLost(f"the other engine sent what cannot be read: {error}", where=self.peer)
        except Exception as error:
            log.exception("a message from %s could not be handled", self.peer)
            return TransferError(f"a message could not be handled: {error}", where=self.peer)

    def _write(self) -> None:
        ping = frame(MESSAGES.encode(Ping()))
        while True:
            try:
                data = self._outgoing.get(timeout=self._ping_s)
            except queue.Empty:
                data = ping
            if data is None:
                break
            try:
                self._end.sendall(data)
            except OSError as error:
                self.break_off(
                    TransferPeerLost(f"the connection was lost: {error.strerror or error}", where=self.peer)
                )
                break
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def break_off(self, fault: RuntimeFault | None) -> None:
        """End it as if it had ended by itself, with this fault; None: without a report."""
        with self._lock:
            if self.closed:
                return
            self.closed, self._fault = True, fault
            closing, self._closing = self._closing, []
        for act in closing:
            act()
        if fault is not None:
            # Wakes the reader, which reports it, and a writer that is stuck.
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(queue.Full):
            self._outgoing.put_nowait(None)
