"""The in-memory mailbox: order, deadlines, closing."""

from __future__ import annotations

import threading
import time

import pytest

from runtime.ipc.mailbox import MailboxClosed, MemoryMailbox
from runtime.protocol.io_struct import AbortReq


def test_items_come_in_order_and_together() -> None:
    box = MemoryMailbox()
    items = [AbortReq(rid=str(n)) for n in range(5)]
    for item in items:
        box.send(item)
    assert box.receive(timeout=20) == items
    assert box.receive(timeout=0) == []


def test_receive_keeps_its_deadline() -> None:
    started = time.monotonic()
    assert MemoryMailbox().receive(timeout=0.05) == []
    assert time.monotonic() - started < 20


def test_a_sender_wakes_the_receiver() -> None:
    box = MemoryMailbox()
    threading.Timer(0.05, box.send, [AbortReq(rid="x")]).start()
    assert [item.rid for item in box.receive(timeout=30)] == ["x"]


def test_what_was_sent_before_closing_still_arrives() -> None:
    box = MemoryMailbox()
    box.send(AbortReq(rid="last"))
    box.close()
    assert [item.rid for item in box.receive(timeout=20)] == ["last"]
    for timeout in (0, 1, None):
        with pytest.raises(MailboxClosed):
            box.receive(timeout=timeout)
    with pytest.raises(MailboxClosed):
        box.send(AbortReq(rid="late"))
