"""What only mailboxes over sockets can meet: strangers' bytes, full queues, paths,
permissions."""

from __future__ import annotations

import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from runtime.ipc.address import Address
from runtime.ipc.mailbox import MailboxClosed
from runtime.ipc.wire import PIPELINE, WIRE_TYPES, Wire
from runtime.ipc.zmq_mailbox import ZmqInbox, ZmqOutbox
from runtime.protocol.control import AbortReq
from runtime.protocol.errors import InternalFault


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
