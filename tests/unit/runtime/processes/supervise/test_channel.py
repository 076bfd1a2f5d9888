"""The socket pair between supervisor and child: frames, whatever pieces they come in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.ipc.address import Address
from runtime.ipc.mailbox import MemoryMailbox
from runtime.ipc.socket_mailbox import Frames, frame
from runtime.processes.supervise.channel import (
    FROM_CHILD,
    MAX_BYTES,
    TO_CHILD,
    ChildSpec,
    Failed,
    Go,
    Heartbeat,
    Order,
    Ready,
    Report,
    Stop,
)
from runtime.processes.supervise.lifecycle import Lifecycle
from runtime.protocol.errors import BadRequest, WireError
from tests.exploring import tries

REPORTS: list[Report] = [Ready({"slots": 5}), Heartbeat(1.5), Failed(BadRequest("no", where="x").to_dict())]
ORDERS: list[Order] = [Go({"slots": 5}), Stop(2.0)]
SPEC = ChildSpec(
    role="http",
    name="worker-0",
    folder="/tmp/x",
    engine=EngineConfig(chat_template={"default": "x"}, seed=None),
    server=ServerConfig(api_key="secret", cors_origins=("a", "b")),
    frontends=("worker-0",),
    listener=5,
)


@settings(deadline=None, max_examples=tries(50))
@given(st.lists(st.sampled_from(REPORTS), max_size=6), st.data())
def test_frames_come_out_whole_however_they_are_cut(reports: list[Report], data: st.DataObject) -> None:
    stream = b"".join(frame(FROM_CHILD.encode(report)) for report in reports)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames = Frames(MAX_BYTES)
    got: list[Any] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += [FROM_CHILD.decode(one) for one in frames.feed(stream[start:end])]
    assert got == reports


def test_a_frame_that_cannot_be_one_is_refused() -> None:
    frames = Frames(MAX_BYTES).feed(frame(b"good") + (MAX_BYTES + 1).to_bytes(4, "big"))
    assert next(frames) == b"good"
    with pytest.raises(WireError, match=f"{MAX_BYTES + 1} bytes"):
        next(frames)


@pytest.fixture
def ends() -> Iterator[tuple[Address, Address]]:
    """The supervisor's end of a socket pair, and the child's."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield Address.fd(mine.fileno()), Address.fd(theirs.fileno())


def test_orders_and_reports_arrive(ends: tuple[Address, Address]) -> None:
    supervisor, child = ends
    orders, got = supervisor.outbox(TO_CHILD), child.inbox(TO_CHILD)
    told, reports = child.outbox(FROM_CHILD), supervisor.inbox(FROM_CHILD)
    for item in (SPEC, *ORDERS):
        orders.send(item)
    assert got.receive(5) == [SPEC, *ORDERS]
    lifecycle = Lifecycle(got, told, SPEC)
    for report in REPORTS:
        lifecycle.report(report)
    assert reports.receive(5) == REPORTS
    for end in (orders, got, told, reports):
        end.close()


def test_a_supervisor_that_does_not_read_stops_no_child(ends: tuple[Address, Address]) -> None:
    _, child = ends
    told = child.outbox(FROM_CHILD, timeout_s=0.0)
    lifecycle = Lifecycle(MemoryMailbox(), told, SPEC)
    for _ in range(20_000):
        lifecycle.report(Heartbeat(1.0))
    told.close()


def test_a_spec_does_not_show_its_key() -> None:
    assert "secret" not in repr(SPEC)
