"""What only mailboxes over a socket pair can meet: pieces of messages, a reader that stands still, an end
that is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from runtime.ipc.address import Address
from runtime.ipc.mailbox import Inbox, MailboxClosed, MailboxFull
from runtime.ipc.socket_mailbox import frame
from runtime.ipc.wire import PIPELINE
from runtime.protocol.control import AbortReq, ControlOutput
from runtime.protocol.errors import WireError

LONG_S = 300.0
GOOD = frame(PIPELINE.encode(AbortReq(rid="good")))


@pytest.fixture
def ends() -> Iterator[tuple[Inbox, socket.socket]]:
    """A receiving end, and the socket on the other side."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        inbox = Address.fd(mine.fileno()).inbox()
        mine.close()
        yield inbox, theirs
        inbox.close()


def rids(inbox: Inbox) -> list[str]:
    return [item.rid for item in inbox.receive(LONG_S)]


def test_messages_come_out_whole_however_they_are_cut(ends: tuple[Inbox, socket.socket]) -> None:
    inbox, theirs = ends
    theirs.sendall(GOOD + GOOD[:9])
    assert rids(inbox) == ["good"]
    assert inbox.receive(0.01) == []
    theirs.sendall(GOOD[9:])
    assert rids(inbox) == ["good"]


def test_large_ones_pass_while_the_other_side_reads() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        outbox, inbox = (
            Address.fd(mine.fileno()).outbox(timeout_s=LONG_S),
            Address.fd(theirs.fileno()).inbox(),
        )
    sent = [
        ControlOutput(rid=str(n), ok=True, message="x" * size) for n, size in enumerate((0, 3_000_000, 5))
    ]
    thread = threading.Thread(target=lambda: [outbox.send(item) for item in sent])
    thread.start()
    got, until = [], time.monotonic() + LONG_S
    while len(got) < len(sent) and time.monotonic() < until:
        got += inbox.receive(1)
    thread.join()
    assert got == sent
    outbox.close()
    with pytest.raises(MailboxClosed):
        inbox.receive(LONG_S)
    inbox.close()


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", frame(b"garbage"), frame(b"")])
def test_what_cannot_be_read_is_an_error_behind_what_came_before(
    ends: tuple[Inbox, socket.socket], garbage: bytes
) -> None:
    inbox, theirs = ends
    theirs.sendall(GOOD + garbage)
    assert rids(inbox) == ["good"]
    with pytest.raises(WireError):
        inbox.receive(LONG_S)


def test_a_reader_that_stands_still_has_a_deadline() -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        with mine:
            outbox = Address.fd(mine.fileno()).outbox(timeout_s=0.05)
        with pytest.raises(MailboxFull, match=r"0\.05 s"):
            outbox.send(ControlOutput(ok=True, message="x" * 10_000_000))
        # The rest of it would be taken for the next message.
        with pytest.raises(MailboxClosed):
            outbox.send(AbortReq(rid="next"))
        outbox.close()


def test_the_end_of_one_side_is_the_end_of_the_other(ends: tuple[Inbox, socket.socket]) -> None:
    inbox, theirs = ends
    theirs.sendall(GOOD)
    theirs.close()
    assert rids(inbox) == ["good"]
    with pytest.raises(MailboxClosed):
        inbox.receive(None)
    mine, gone = socket.socketpair()
    with mine:
        outbox = Address.fd(mine.fileno()).outbox()
    gone.close()
    with pytest.raises(MailboxClosed):
        outbox.send(AbortReq(rid="x"))
    outbox.close()
