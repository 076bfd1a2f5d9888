"""The pipe between supervisor and child: frames, whatever pieces they come in, and strangers' bytes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.ipc.socket_mailbox import Frames, frame
from runtime.processes.supervise.channel import (
    FROM_CHILD,
    MAX_BYTES,
    TO_CHILD,
    ChildEnd,
    ChildSpec,
    Failed,
    Go,
    Heartbeat,
    Order,
    Ready,
    Report,
    Stop,
)
from runtime.protocol.errors import BadRequest, InternalFault, WireError
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
def pipes() -> tuple[ChildEnd, int, int]:
    """A child's end, where to write its orders, and where to read its reports."""
    orders, write = os.pipe()
    read, reports = os.pipe()
    return ChildEnd(os.fdopen(orders, "rb", buffering=0), reports), write, read


def test_the_childs_end(pipes: tuple[ChildEnd, int, int]) -> None:
    end, write, read = pipes
    os.write(write, b"".join(frame(TO_CHILD.encode(item)) for item in (SPEC, *ORDERS)))
    assert end.spec() == SPEC
    assert [end.order(), end.order()] == ORDERS
    for report in REPORTS:
        end.report(report)
    told = Frames(MAX_BYTES).feed(os.read(read, 1 << 16))
    assert [FROM_CHILD.decode(data) for data in told] == REPORTS
    os.close(write)
    assert end.order() is None
    os.close(read)
    end.report(Heartbeat())  # nobody reads: no error
    end.close()


def test_a_supervisor_that_does_not_read_stops_no_child(pipes: tuple[ChildEnd, int, int]) -> None:
    end, write, read = pipes
    for _ in range(20_000):
        end.report(Heartbeat(1.0))
    os.close(write)
    os.close(read)
    end.close()


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x00\x00\x00\x01x", b"hello there, child", frame(FROM_CHILD.encode(Heartbeat()))]
)
def test_a_stdin_without_a_configuration_is_an_error(pipes: tuple[ChildEnd, int, int], data: bytes) -> None:
    end, write, read = pipes
    os.write(write, data)
    os.close(write)
    with pytest.raises(InternalFault):
        end.spec()
    os.close(read)
    end.close()


def test_a_spec_does_not_show_its_key() -> None:
    assert "secret" not in repr(SPEC)
