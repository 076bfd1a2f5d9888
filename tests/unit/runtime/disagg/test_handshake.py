"""The hello of two managers: a side without the key is refused, and so is a proof that was used before."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

import msgspec
import pytest

from runtime.disagg.transfer.memory import KVLayout
from runtime.disagg.transfer.net import handshake
from runtime.disagg.transfer.net.messages import GREETING, Challenge, Hello, Welcome
from runtime.ipc.socket_mailbox import HEAD, frame
from runtime.protocol.errors import TransferError

PATIENCE_S = 60.0
LAYOUT = KVLayout(2, 4, 8, "bfloat16", 0, 4)
HELLO = Hello(nonce=b"", proof=b"", transfer="tcp", layout=LAYOUT)


@dataclass
class Listening:
    """receive_hello() in a thread; once it returns, the welcome is sent."""

    end: socket.socket
    key: bytes | None

    def __post_init__(self) -> None:
        self.outcome: Future[Hello] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            hello, proof = handshake.receive_hello(self.end, self.key, PATIENCE_S)
            handshake.welcome(self.end, Welcome(proof=proof, layout=LAYOUT, session="s"), PATIENCE_S)
            self.outcome.set_result(hello)
        except TransferError as error:
            self.outcome.set_exception(error)


def sent(end: socket.socket, item: msgspec.Struct) -> None:
    end.sendall(frame(GREETING.encode(item)))


def received(end: socket.socket) -> msgspec.Struct:
    end.settimeout(PATIENCE_S)
    (size,) = HEAD.unpack(end.recv(HEAD.size, socket.MSG_WAITALL))
    item: msgspec.Struct = GREETING.decode(end.recv(size, socket.MSG_WAITALL))
    return item


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_two_sides_with_the_same_key(key: bytes | None) -> None:
    one, other = socket.socketpair()
    with closing(one), closing(other):
        listening = Listening(one, key)
        assert handshake.greet(other, HELLO, key, PATIENCE_S).session == "s"
        assert listening.outcome.result(PATIENCE_S).transfer == "tcp"


@pytest.mark.parametrize(
    "keys", [(b"k" * 32, None), (None, b"k" * 32), (b"k" * 32, b"l" * 32), (b"k" * 32, b"k" * 31)]
)
def test_a_side_without_the_key_is_refused(keys: tuple[bytes | None, bytes | None]) -> None:
    one, other = socket.socketpair()
    with closing(one), closing(other):
        listening = Listening(one, keys[0])
        with pytest.raises(TransferError, match="does not hold the key of the prefill side"):
            handshake.greet(other, HELLO, keys[1], PATIENCE_S)
        with pytest.raises(TransferError, match="does not hold the key of the prefill side"):
            listening.outcome.result(PATIENCE_S)


def test_a_proof_holds_for_one_connection() -> None:
    key = b"k" * 32
    one, middle = socket.socketpair()
    other, far = socket.socketpair()
    with closing(one), closing(middle), closing(other), closing(far):
        first = Listening(one, key)
        greeting = threading.Thread(target=lambda: handshake.greet(far, HELLO, key, PATIENCE_S), daemon=True)
        greeting.start()
        sent(other, received(middle))  # somebody between the two passes everything on, and keeps the hello
        seen = received(other)
        sent(middle, seen)
        sent(other, received(middle))
        assert first.outcome.result(PATIENCE_S).nonce
        greeting.join(PATIENCE_S)
    one, other = socket.socketpair()
    with closing(one), closing(other):
        second = Listening(one, key)
        assert isinstance(received(other), Challenge)
        sent(other, seen)
        with pytest.raises(TransferError, match="does not hold the key"):
            second.outcome.result(PATIENCE_S)


def test_a_listener_without_the_key_is_not_believed() -> None:
    one, other = socket.socketpair()
    with closing(one), closing(other):

        def pretend() -> None:
            sent(one, Challenge(b"n" * handshake.NONCE_BYTES))
            hello = received(one)
            assert isinstance(hello, Hello)
            sent(one, Welcome(proof=hello.proof, layout=LAYOUT, session="s"))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(TransferError, match="the prefill side does not hold the key"):
            handshake.greet(other, HELLO, b"k" * 32, PATIENCE_S)
