"""Every kind of mailbox keeps the same promises: order, deadlines, any number of senders, closing."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.ipc.address import Address
from runtime.ipc.mailbox import Inbox, MailboxClosed, MemoryMailbox, Outbox
from runtime.ipc.wire import PIPELINE, WIRE_TYPES, Wire
from runtime.ipc.zmq_mailbox import ZmqInbox
from runtime.protocol.control import AbortReq, ControlOutput
from runtime.protocol.errors import WireError
from tests.exploring import tries

LONG_S = 300.0
KINDS = ["memory", "fd", "ipc"]


@dataclass
class Pair:
    """Both ends of one mailbox, and a way to make one more sending end; over a pair there is only one."""

    inbox: Inbox
    more: Callable[[], Outbox]
    outbox: Outbox = field(init=False)
    ends: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outbox = self.sender()

    def sender(self) -> Outbox:
        try:
            made = self.more()
        except OSError:
            return self.outbox
        self.ends.append(made)
        return made

    def take(self, count: int) -> list[Any]:
        items: list[Any] = []
        deadline = time.monotonic() + LONG_S
        while len(items) < count and time.monotonic() < deadline:
            items += self.inbox.receive(1)
        return items


@contextlib.contextmanager
def opened(kind: str, wire: Wire = PIPELINE) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="box") as folder:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            here = there = {
                "memory": Address.memory,
                "fd": lambda: Address.fd(mine.fileno()),
                "ipc": lambda: Address.ipc(Path(folder) / "own" / "box.ipc"),
            }[kind]()
            inbox = here.inbox(wire)
            if kind == "fd":
                there = Address.fd(theirs.fileno())
            pair = Pair(inbox, lambda: there.outbox(wire, timeout_s=LONG_S))
        try:
            yield pair
        finally:
            for end in (*pair.ends, pair.inbox):
                end.close()


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with opened(request.param) as made:
        yield made


def test_items_come_in_order(pair: Pair) -> None:
    items = [AbortReq(rid=str(n)) for n in range(200)]
    for item in items:
        pair.outbox.send(item)
    assert pair.take(200) == items
    assert pair.inbox.receive(0) == []


def test_all_that_waits_comes_at_once(pair: Pair) -> None:
    for n in range(50):
        pair.outbox.send(AbortReq(rid=str(n)))
    found = pair.inbox.receive(LONG_S)
    assert len(found) == 50 or not isinstance(pair.inbox, MemoryMailbox)
    deadline = time.monotonic() + LONG_S
    while len(found) < 50 and time.monotonic() < deadline:
        time.sleep(0.02)  # what is on its way arrives
        found += pair.inbox.receive(0)
    assert [item.rid for item in found] == [str(n) for n in range(50)]


def test_receive_keeps_its_deadline(pair: Pair) -> None:
    started = time.monotonic()
    assert pair.inbox.receive(0.05) == []
    assert time.monotonic() - started > 0.04
    assert pair.inbox.receive(0) == []


def test_a_sender_wakes_the_receiver(pair: Pair) -> None:
    timer = threading.Timer(0.05, pair.outbox.send, [AbortReq(rid="x")])
    timer.start()
    assert [item.rid for item in pair.inbox.receive(LONG_S)] == ["x"]
    timer.join()


def test_many_threads_send_through_one_end_and_through_their_own(pair: Pair) -> None:
    ends = [pair.outbox, pair.outbox, pair.sender(), pair.sender()]

    def work(at: int) -> None:
        for n in range(100):
            ends[at].send(AbortReq(rid=f"{at}-{n}"))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    got = [item.rid for item in pair.take(400)]
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(f"{at}-{n}" for at in range(4) for n in range(100))
    for at in range(4):
        assert [rid for rid in got if rid.startswith(f"{at}-")] == [f"{at}-{n}" for n in range(100)]


def test_closing_wakes_the_receiver(pair: Pair) -> None:
    timer = threading.Timer(0.1, pair.inbox.close)
    timer.start()
    with pytest.raises(MailboxClosed):
        pair.inbox.receive(LONG_S)
    timer.join()
    for timeout in (0, 1, None):
        with pytest.raises(MailboxClosed):
            pair.inbox.receive(timeout)


def test_a_receiver_that_sees_the_end_takes_nothing_from_under_the_closer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closer stands still between saying so and waking the receiver: its pipe is not another file yet."""
    inbox, write, open_then = ZmqInbox(f"ipc://{tmp_path}/own/box.ipc"), os.write, []

    def receive() -> None:
        with pytest.raises(MailboxClosed):
            inbox.receive(LONG_S)

    receiver = threading.Thread(target=receive)

    def late(end: int, data: bytes) -> int:
        if end == inbox._wake_write:
            receiver.start()
            receiver.join(0.2)
            open_then.append(os.fstat(end).st_ino > 0)
        return write(end, data)

    monkeypatch.setattr("runtime.ipc.zmq_mailbox.os.write", late)
    inbox.close()
    receiver.join(LONG_S)
    assert open_then == [True]
    assert not receiver.is_alive()


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_arrived_before_closing_is_still_received(kind: str) -> None:
    rids = ["first", "second", "last"]
    until, attempt = time.monotonic() + LONG_S, 0
    while time.monotonic() < until:
        attempt += 1
        with opened(kind) as pair:
            for rid in rids:
                pair.outbox.send(AbortReq(rid=rid))
            time.sleep(0.1 * attempt)
            pair.inbox.close()
            found: list[str] = []
            with contextlib.suppress(MailboxClosed):
                while len(found) <= len(rids):
                    found += [item.rid for item in pair.inbox.receive(5)]
        assert found == rids[: len(found)]
        if found == rids:
            return
    pytest.fail("nothing of it had ever arrived")


def test_a_closed_end_does_not_send(pair: Pair) -> None:
    pair.outbox.close()
    pair.outbox.close()
    with pytest.raises(MailboxClosed):
        pair.outbox.send(AbortReq(rid="late"))


def test_large_items_travel(pair: Pair) -> None:
    item = ControlOutput(ok=True, data={"text": "ü" * 2_000_000})
    sender = threading.Thread(target=pair.outbox.send, args=(item,))  # over a pair it waits for its reader
    sender.start()
    assert pair.take(1) == [item]
    sender.join()


@pytest.mark.parametrize("kind", KINDS)
def test_any_data_arrives_as_it_was(kind: str) -> None:
    plain = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
    with opened(kind) as pair:

        @settings(deadline=None, max_examples=tries(40))
        @given(st.dictionaries(st.text(max_size=5), plain, max_size=3), st.booleans(), st.text(min_size=1))
        def check(data: dict[str, Any], ok: bool, rid: str) -> None:
            item = ControlOutput(rid=rid, ok=ok, data=data)
            pair.outbox.send(item)
            [got] = pair.take(1)
            assert msgspec.structs.asdict(got) == msgspec.structs.asdict(item)

        check()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_sizes_are_checked_before_anything_is_sent(kind: str) -> None:
    with opened(kind, Wire(WIRE_TYPES, 1000)) as pair:
        with pytest.raises(WireError, match="at most 1000"):
            pair.outbox.send(AbortReq(rid="r" * 2000))
        pair.outbox.send(AbortReq(rid="ok"))
        assert [item.rid for item in pair.take(1)] == ["ok"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_is_no_struct_of_the_wire_does_not_travel(kind: str) -> None:
    with opened(kind, Wire((AbortReq,))) as pair, pytest.raises(WireError, match="known: AbortReq"):
        pair.outbox.send(ControlOutput(ok=True))
