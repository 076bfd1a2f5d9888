"""The tcp transfer: KV pushed over several TCP connections between any two machines.

Every piece has a checksum; both sides prove at the hello that they hold the key. What is sent is not
encrypted: use a network of its own, or a tunnel.
"""

from __future__ import annotations

import socket
from typing import ClassVar
from urllib.parse import urlsplit

from runtime.disagg.transfer.kv_manager import TransferOptions
from runtime.disagg.transfer.net.manager import BACKLOG, HELLO_S, SocketManager
from runtime.ipc.address import is_loopback
from runtime.protocol.errors import BadRequest, TransferError

BUFFER_BYTES = 4 << 20
"""Of each connection's socket: long links hold more of it in flight."""


class TcpManager(SocketManager):
    name: ClassVar[str] = "tcp"

    def open(self) -> tuple[socket.socket, str]:
        return listen(self.options)

    def dial(self, address: str) -> socket.socket:
        return connect(address)


def listen(options: TransferOptions) -> tuple[socket.socket, str]:
    """Raises BadRequest: another interface and no key, or every interface; TransferError."""
    host = "127.0.0.1" if options.host == "localhost" else options.host
    if options.key is None and not is_loopback(host):
        raise BadRequest(
            "a transfer that other machines can reach needs a key",
            where=f"tcp://{host}",
            hint="give both sides the same secret, or listen on 127.0.0.1",
        )
    if host in ("0.0.0.0", "::"):
        raise BadRequest("peers cannot connect to every address at once", where=host, hint="name one")
    try:
        listener = socket.create_server(
            (host, 0),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise TransferError(f"cannot listen: {error.strerror or error}", where=f"tcp://{host}") from error
    _tune(listener)  # accepted connections inherit it
    port = listener.getsockname()[1]
    return listener, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connect(address: str) -> socket.socket:
    """Raises OSError, TransferError."""
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if not address.startswith("tcp://") or host is None or port is None:
        raise TransferError("that is no address of this transfer", where=address[:200])
    end = socket.create_connection((host, port), HELLO_S)
    _tune(end)
    return end


def _tune(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
