"""Address: the address of a mailbox, from which both ends are created.

    memory:                between threads of this process
    fd:7                   one end of a socket pair, which a child process inherits
    ipc:///run/x.ipc       a Unix socket in a folder that only its user can enter
    tcp://127.0.0.1:5600   encrypted, for those who hold the key of the run

The first two are one-to-one or among threads; the last two take any number of senders.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from runtime.ipc.mailbox import LINGER_S, SEND_TIMEOUT_S, Inbox, MemoryMailbox, Outbox
from runtime.ipc.socket_mailbox import SocketInbox, SocketOutbox
from runtime.ipc.wire import PIPELINE, Wire
from runtime.ipc.zmq_mailbox import ZmqInbox, ZmqOutbox
from runtime.protocol.errors import BadRequest, InternalFault

KEY_BYTES = 32


@dataclass(frozen=True)
class Address:
    """`url` in one of the forms above. key: of tcp addresses, KEY_BYTES secret bytes, not part of the url."""

    url: str
    key: bytes | None = field(default=None, repr=False)
    _memory: MemoryMailbox | None = field(default=None, repr=False, compare=False)

    @classmethod
    def memory(cls) -> Address:
        """The address of a new mailbox, which lives as long as this address and its ends."""
        return cls("memory:", None, MemoryMailbox())

    @classmethod
    def fd(cls, number: int) -> Address:
        """The address of a connected stream socket. Each end duplicates the descriptor; the caller closes
        this one."""
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

    @classmethod
    def tcp(cls, host: str = "127.0.0.1", port: int = 0, key: bytes | None = None) -> Address:
        """port 0: any free one, shown by the inbox's `url`. Without a key a new one is generated, for this
        machine only. Raises BadRequest for another interface without a key, or a key of another length."""
        host = "127.0.0.1" if host == "localhost" else host
        if key is None:
            if not is_loopback(host):
                raise BadRequest(
                    "an address that other machines can reach needs the key of the run",
                    where=f"tcp://{host}:{port}",
                    hint=f"give all who take part the same {KEY_BYTES} secret bytes",
                )
            key = secrets.token_bytes(KEY_BYTES)
        if len(key) != KEY_BYTES:
            raise BadRequest(f"a key has {KEY_BYTES} bytes, not {len(key)}", where=f"tcp://{host}:{port}")
        return cls(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", key)

    @classmethod
    def parse(cls, text: str, key: bytes | None = None) -> Address:
        """Parse a fd, ipc or tcp `url`; tcp needs its key. Raises BadRequest for anything else."""
        scheme, _, rest = text.partition(":")
        host, _, port = rest.removeprefix("//").rpartition(":")
        match scheme:
            case "fd" if rest.isdecimal():
                return cls.fd(int(rest))
            case "ipc" if rest.startswith("///"):
                return cls.ipc(Path(rest[2:]))
            case "tcp" if rest.startswith("//") and host and port.isdecimal() and int(port) < 1 << 16:
                if key is None:
                    raise BadRequest("this address needs the key of the run", where=text)
                return cls.tcp(host.removeprefix("[").removesuffix("]"), int(port), key)
        raise BadRequest(
            f"{text!r} is no address", where="address", hint="fd:7, ipc:///path or tcp://host:port"
        )

    @property
    def descriptor(self) -> int | None:
        """The descriptor of an fd address."""
        return int(self.url.removeprefix("fd:")) if self.url.startswith("fd:") else None

    def inbox(self, wire: Wire = PIPELINE) -> Inbox:
        """The receiving end, for one thread. Raises InternalFault if it cannot be created."""
        match self.url.partition(":")[0]:
            case "memory" if self._memory is not None:
                return self._memory
            case "fd":
                return SocketInbox(self._socket(), wire)
            case _:
                return ZmqInbox(self.url, self.key, wire)

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
                return ZmqOutbox(self.url, self.key, wire, timeout_s=timeout_s, linger_s=linger_s)

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(int(self.url.removeprefix("fd:"))))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may be any host's
        return False
