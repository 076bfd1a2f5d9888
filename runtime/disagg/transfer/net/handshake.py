"""The handshake of two managers: each proves that it has the key, and sends its KV layout.

The listening side sends a nonce, the other one a second nonce and an HMAC of both; the first answers with
another HMAC of both. Only this one message is read before the proof is verified, in constant time.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
from msgspec.structs import replace

from runtime.disagg.transfer.net.messages import (
    GREETING,
    MAX_HELLO,
    VERSION,
    Challenge,
    Hello,
    Refused,
    Welcome,
)
from runtime.ipc.socket_mailbox import HEAD, frame
from runtime.protocol.errors import RuntimeFault, TransferError, TransferPeerLost, WireError, from_dict

NONCE_BYTES = 32


def greet(end: socket.socket, hello: Hello, key: bytes | None, timeout: float) -> Welcome:
    """The connecting side; nonce and proof of `hello` are filled in here. Raises TransferError: refused, or
    the other side does not hold the key; TransferPeerLost."""
    until = time.monotonic() + timeout
    challenge = _receive(end, until)
    if not isinstance(challenge, Challenge) or challenge.version != VERSION:
        raise TransferError(
            "the prefill side speaks another version of the transfer protocol",
            where="hello",
            hint="run the same release on both sides",
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = _proof(key, b"decode", challenge.nonce, nonce)
    _send(end, replace(hello, nonce=nonce, proof=proof), until)
    match _receive(end, until):
        case Welcome() as welcome:
            if not hmac.compare_digest(welcome.proof, _proof(key, b"prefill", challenge.nonce, nonce)):
                raise TransferError("the prefill side does not hold the key of this one", where="hello")
            return welcome
        case Refused(error):
            fault = from_dict(error)
            raise fault if isinstance(fault, TransferError) else TransferError(str(fault), where="hello")
        case _:
            raise TransferError("the prefill side answered out of turn", where="hello")


def receive_hello(end: socket.socket, key: bytes | None, timeout: float) -> tuple[Hello, bytes]:
    """The listening side: the hello, and the proof for the answer. Raises TransferError, of which
    a side with another key is notified; TransferPeerLost."""
    until = time.monotonic() + timeout
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send(end, Challenge(nonce), until)
    hello = _receive(end, until)
    if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
        raise TransferError("somebody connected and did not say hello", where="hello")
    if not hmac.compare_digest(hello.proof, _proof(key, b"decode", nonce, hello.nonce)):
        stranger = TransferError(
            "the decode side does not hold the key of the prefill side",
            where="hello",
            hint="give both sides the same key",
        )
        refuse(end, stranger)
        raise stranger
    return hello, _proof(key, b"prefill", nonce, hello.nonce)


def welcome(end: socket.socket, answer: Welcome, timeout: float) -> None:
    _send(end, answer, time.monotonic() + timeout)


def refuse(end: socket.socket, fault: RuntimeFault, timeout: float = 5.0) -> None:
    """Send the reason; it need not arrive."""
    with suppress(TransferError):
        _send(end, Refused(fault.to_dict()), time.monotonic() + timeout)


def receive_exactly(end: socket.socket, target: memoryview, until: float | None = None) -> None:
    """Fill it. Raises TransferPeerLost when the other side ends, OSError."""
    while target:
        if until is not None:
            end.settimeout(max(0.001, until - time.monotonic()))
        count = end.recv_into(target)
        if not count:
            raise TransferPeerLost("the other engine closed the connection", where="transfer")
        target = target[count:]


def _proof(key: bytes | None, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key or b"no key", b"sglang-dsl transfer " + side + first + second, "sha256")


def _send(end: socket.socket, item: msgspec.Struct, until: float) -> None:
    with _in_time(end, until):
        end.sendall(frame(GREETING.encode(item)))


def _receive(end: socket.socket, until: float) -> msgspec.Struct:
    head = bytearray(HEAD.size)
    with _in_time(end, until):
        receive_exactly(end, memoryview(head), until)
        (size,) = HEAD.unpack(head)
        if size > MAX_HELLO:
            raise TransferError(f"a hello of {size} bytes; at most {MAX_HELLO} are taken", where="hello")
        body = bytearray(size)
        receive_exactly(end, memoryview(body), until)
    try:
        return GREETING.decode(body)
    except WireError as error:
        raise TransferError(f"not a hello: {error}", where="hello") from error


@contextmanager
def _in_time(end: socket.socket, until: float) -> Iterator[None]:
    left = until - time.monotonic()
    if left <= 0:
        raise TransferPeerLost("the other engine did not say hello in time", where="hello")
    end.settimeout(left)
    try:
        yield
    except OSError as error:
        late = isinstance(error, TimeoutError)
        cause = "it did not answer in time" if late else error.strerror or str(error)
        raise TransferPeerLost(f"the other engine was lost: {cause}", where="hello") from error
