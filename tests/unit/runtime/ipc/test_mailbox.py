"""The in-memory mailbox: order, deadlines, closing."""

from __future__ import annotations

import signal
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


def test_a_signal_does_not_make_the_receiver_wait_for_ever() -> None:
    """As it does with some ways to wait, where it comes about when the time is over."""
    done, over = threading.Event(), threading.Event()

    def wait() -> None:
        box = MemoryMailbox()
        if not any(box.receive(timeout=0.0005) for _ in range(200)):
            done.set()
        over.wait(300)  # no signal reaches a thread that has ended

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        assert thread.ident is not None
        for _ in range(50_000):
            if done.is_set():
                break
            signal.pthread_kill(thread.ident, signal.SIGUSR1)
        assert done.wait(300)
    finally:
        over.set()
        signal.signal(signal.SIGUSR1, before)
    thread.join(300)


def test_a_sender_wakes_the_receiver() -> None:
    box = MemoryMailbox()
    threading.Timer(0.05, box.send, [AbortReq(rid="x")]).start()
    assert [item.rid for item in box.receive(timeout=300)] == ["x"]


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
