"""What only mailboxes over sockets can meet: strangers' bytes, wrong keys, full queues, paths,
permissions."""

from __future__ import annotations

import contextlib
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.ipc.address import Address
from runtime.ipc.mailbox import MailboxClosed
from runtime.ipc.wire import PIPELINE, WIRE_TYPES, Wire
from runtime.ipc.zmq_mailbox import ZmqInbox, ZmqOutbox
from runtime.protocol.control import AbortReq
from runtime.protocol.errors import BadRequest, InternalFault
from tests.exploring import tries


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="box") as made:
        yield Path(made) / "own"


def push(url: str, *frames: bytes) -> None:
    """Send raw frames, as a stranger would."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 20_000)
        socket.connect(url)
        for frame in frames:
            socket.send(frame)


def test_malformed_messages_are_counted_and_dropped(folder: Path) -> None:
    url = f"ipc://{folder}/x.ipc"
    inbox = ZmqInbox(url)
    good = PIPELINE.encode(AbortReq(rid="good"))
    push(url, b"", b"\xc1", b"not msgpack", good[:-1], good + b"x", PIPELINE.encode(AbortReq(rid="a")), good)
    got = []
    deadline = time.monotonic() + 20
    while len(got) < 2 and time.monotonic() < deadline:
        got += inbox.receive(1)
    assert [item.rid for item in got] == ["a", "good"]
    assert inbox.malformed == 5
    inbox.close()


def test_the_receiver_refuses_messages_beyond_its_limit_and_goes_on(folder: Path) -> None:
    url, wire = f"ipc://{folder}/x.ipc", Wire(WIRE_TYPES, 1000)
    inbox = ZmqInbox(url, wire=wire)
    push(url, b"x" * 5000)
    outbox = ZmqOutbox(url, wire=wire)
    outbox.send(AbortReq(rid="ok"))
    assert [item.rid for item in inbox.receive(20)] == ["ok"]
    outbox.close()
    inbox.close()


def test_a_full_queue_is_an_error_after_the_deadline(folder: Path) -> None:
    outbox = ZmqOutbox(f"ipc://{folder}/nobody.ipc", timeout_s=0.2, queue=3, linger_s=0)
    started = time.monotonic()

    def fill() -> None:
        for n in range(100):
            outbox.send(AbortReq(rid=str(n)))

    with pytest.raises(MailboxClosed, match=r"nobody took no message for 0\.2 s"):
        fill()
    assert time.monotonic() - started < 20
    outbox.close()


def test_what_was_sent_before_the_receiver_came_arrives(folder: Path) -> None:
    address = Address.ipc(folder / "x.ipc")
    outbox = address.outbox()
    outbox.send(AbortReq(rid="early"))
    inbox = address.inbox()
    assert [item.rid for item in inbox.receive(20)] == ["early"]
    outbox.close()
    inbox.close()


def test_closing_a_sender_that_nobody_hears_ends_in_time(folder: Path) -> None:
    outbox = ZmqOutbox(f"ipc://{folder}/nobody.ipc", linger_s=0.1)
    outbox.send(AbortReq(rid="x"))
    started = time.monotonic()
    outbox.close()
    assert time.monotonic() - started < 20


def test_a_path_that_is_too_long_is_named(folder: Path) -> None:
    path = folder / ("x" * 120) / "box.ipc"
    with pytest.raises(InternalFault, match="TMPDIR"):
        Address.ipc(path)


def test_sockets_live_in_a_private_folder(folder: Path) -> None:
    address = Address.ipc(folder / "x.ipc")
    inbox = address.inbox()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    inbox.close()
    assert not (folder / "x.ipc").exists()
    folder.chmod(0o755)
    for make in (address.inbox, address.outbox):
        with pytest.raises(InternalFault, match="not be private"):
            make()


def test_a_folder_that_cannot_be_made_is_named(folder: Path) -> None:
    folder.write_text("in the way")
    with pytest.raises(InternalFault, match="own"):
        Address.ipc(folder / "x.ipc").inbox()


def test_over_tcp_nothing_of_a_stranger_is_read() -> None:
    """Neither of one who speaks in the clear nor of one who holds another key."""
    address = Address.tcp()
    inbox = ZmqInbox(address.url, address.key)
    raw = Address.tcp(port=int(inbox.url.rpartition(":")[2]), key=b"k" * 32)
    strangers = [
        ZmqOutbox(inbox.url, raw.key, timeout_s=20, linger_s=0), Unkeyed(inbox.url), Unkeyed(inbox.url),
    ]  # fmt: skip
    strangers[0].send(AbortReq(rid="wrong key"))
    strangers[1].send(PIPELINE.encode(AbortReq(rid="in the clear")))
    strangers[2].send(b"garbage")
    friend = ZmqOutbox(inbox.url, address.key)
    for n in range(50):  # what the others sent came before, if it came at all
        friend.send(AbortReq(rid=str(n)))
    got: list[str] = []
    deadline = time.monotonic() + 60
    while len(got) < 50 and time.monotonic() < deadline:
        got += [item.rid for item in inbox.receive(1)]
    assert got == [str(n) for n in range(50)]
    assert inbox.receive(0.5) == []
    assert inbox.malformed == 0
    for end in (*strangers, friend, inbox):
        end.close()


class Unkeyed:
    """A sender that knows no key."""

    def __init__(self, url: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(url)

    def send(self, data: bytes) -> None:
        # Before the handshake there is no one to take it; afterwards there would be.
        self._socket.poll(500, zmq.POLLOUT)
        with contextlib.suppress(zmq.Again):
            self._socket.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "model.example"])
def test_an_address_that_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(BadRequest, match="needs the key"):
        Address.tcp(host)
    assert Address.tcp(host, 5000, b"k" * 32).key == b"k" * 32


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_an_address_of_this_machine_has_a_key_of_its_own(host: str) -> None:
    one, other = Address.tcp(host), Address.tcp(host)
    assert one.key is not None
    assert len(one.key) == 32
    assert one.key != other.key
    assert one.key.hex() not in repr(one)
    assert repr(one.key) not in repr(one)


def test_a_key_of_another_length_or_none_is_refused() -> None:
    with pytest.raises(BadRequest, match="needs the key"):
        Address.parse("tcp://127.0.0.1:80")
    with pytest.raises(BadRequest, match="32 bytes, not 5"):
        Address.tcp(key=b"short")


@pytest.mark.parametrize("text", ["fd:7", "ipc:///run/x.ipc", "tcp://127.0.0.1:80", "tcp://[::1]:80"])
def test_addresses_read_as_they_are_written(text: str) -> None:
    assert Address.parse(text, b"k" * 32 if text.startswith("tcp") else None).url == text


NO_ADDRESS = ["fd:", "fd:-1", "ipc:", "ipc://x", "tcp:", "tcp://", "tcp://h", "tcp://h:99999", "http://h:80"]


@settings(deadline=None, max_examples=tries(60))
@given(st.sampled_from(NO_ADDRESS) | st.text(max_size=12).filter(lambda text: ":" not in text))
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(BadRequest, match="is no address") as caught:
        Address.parse(text, b"k" * 32)
    assert repr(text) in str(caught.value)
