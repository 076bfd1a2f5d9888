"""Address: the address of a mailbox, from which both ends are created.

    memory:                between threads of this process
    fd:7                   one end of a socket pair, which a child process inherits
    ipc:///run/x.ipc       a Unix socket in a folder that only its user can enter

The last one takes senders of any number of processes.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from runtime.ipc.mailbox import LINGER_S, SEND_TIMEOUT_S, Inbox, MemoryMailbox, Outbox
from runtime.ipc.socket_mailbox import SocketInbox, SocketOutbox
from runtime.ipc.wire import PIPELINE, Wire
from runtime.ipc.zmq_mailbox import ZmqInbox, ZmqOutbox
from runtime.protocol.errors import InternalFault


@dataclass(frozen=True)
class Address:
    """`url` in one of the forms above."""

    url: str
    _memory: MemoryMailbox | None = field(default=None, repr=False, compare=False)

    @classmethod
    def memory(cls) -> Address:
        """The address of a new mailbox, which lives as long as this address and its ends."""
        return cls("memory:", MemoryMailbox())

    @classmethod
    def fd(cls, number: int) -> Address:
        """A connected stream socket. Each end duplicates the descriptor; the caller closes this one."""
        return cls(f"fd:{number}")

    @classmethod
    def ipc(cls, path: Path) -> Address:
        """Raises InternalFault if the path is too long for the system."""
        size, limit = len(os.fsencode(path)), zmq.IPC_PATH_MAX_LEN
        if size > limit:
            raise InternalFault(
                f"the socket's path has {size} bytes, the system allows {limit}",
                where=str(path),
                hint="set TMPDIR to a folder with a shorter path",
            )
        return cls(f"ipc://{path}")

    def inbox(self, wire: Wire = PIPELINE) -> Inbox:
        """The receiving end, for one thread. Raises InternalFault if it cannot be created."""
        match self.url.partition(":")[0]:
            case "memory" if self._memory is not None:
                return self._memory
            case "fd":
                return SocketInbox(self._socket(), wire)
            case _:
                return ZmqInbox(self.url, wire)

    def outbox(
        self, wire: Wire = PIPELINE, *, timeout_s: float = SEND_TIMEOUT_S, linger_s: float = LINGER_S
    ) -> Outbox:
        """A sending end, for any thread; the other side may connect later. timeout_s: how long `send` waits
        if the queue is full. linger_s: how long `close` waits until sent messages are out. Raises
        InternalFault if it cannot be created."""
        match self.url.partition(":")[0]:
            case "memory" if self._memory is not None:
                return self._memory
            case "fd":
                return SocketOutbox(self._socket(), wire, timeout_s)
            case _:
                return ZmqOutbox(self.url, wire, timeout_s=timeout_s, linger_s=linger_s)

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(int(self.url.removeprefix("fd:"))))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may be any host's
        return False
