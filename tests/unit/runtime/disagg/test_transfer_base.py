"""The state of a room: up only, Failed and Success final, deadlines kept. The fake transfer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.disagg.transfer.fake import FIRST_TOKEN, FakeManager
from runtime.disagg.transfer.kv_manager import (
    KV_TRANSFERS,
    MAX_BOOTSTRAP_ID,
    KVPoll,
    Progress,
    TransferOptions,
)
from runtime.disagg.transfer.memory import KVLayout, make_memory
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Run
from runtime.protocol.errors import Aborted, BadRequest, TransferError, TransferLate

POLLS = st.sampled_from(list(KVPoll))


@given(st.lists(POLLS))
def test_a_room_only_goes_up(steps: list[KVPoll]) -> None:
    progress = Progress(1)
    ended: KVPoll | None = None
    for step in steps:
        before = progress.now
        if step is KVPoll.Failed:
            assert progress.fail(TransferError("x")) == (ended is None)
        else:
            progress.advance(step)
        assert progress.now == (ended or progress.now)
        assert progress.now is KVPoll.Failed or progress.now >= before
        ended = progress.now if progress.now.ended else None
    assert (progress.failure() is not None) == (progress.now is KVPoll.Failed)


def test_deadlines() -> None:
    time = [0.0]
    progress = Progress(5, clock=lambda: time[0])
    progress.within(10, "nobody came")
    time[0] = 9.9
    assert not progress.overdue()
    progress.within(10, "nothing came")
    time[0] = 19.0
    assert not progress.overdue()
    time[0] = 19.9
    assert progress.overdue()
    assert not progress.overdue()  # that was its end
    fault = progress.failure()
    assert isinstance(fault, TransferLate)
    assert str(fault) == "room 5: nothing came"
    done = Progress(6, clock=lambda: time[0])
    done.within(1, "late")
    done.advance(KVPoll.Success)
    time[0] = 100
    assert not done.overdue()
    assert done.now is KVPoll.Success


@pytest.mark.parametrize("room", [0, -1, MAX_BOOTSTRAP_ID + 1])
def test_rooms_that_are_none(room: int) -> None:
    with pytest.raises(BadRequest, match="room"):
        fake().sender(room)


@pytest.mark.parametrize(
    "bad", [{"heartbeat": 0}, {"waiting_timeout": float("inf")}, {"heartbeat_misses": 0}]
)
def test_options_that_are_none(bad: dict[str, float]) -> None:
    with pytest.raises(BadRequest, match=next(iter(bad))):
        TransferOptions(**bad).verify()  # type: ignore[arg-type]
    assert "secret" not in repr(TransferOptions(key=b"secret"))


def fake() -> FakeManager:
    kind = KV_TRANSFERS.load("fake")
    manager = kind(make_memory(4, KVLayout(1, 1, 8, "float32", 0, 1)))
    assert isinstance(manager, FakeManager)
    assert not manager.carries
    return manager


def test_fake_ends_at_once() -> None:
    manager = fake()
    sender, receiver = manager.sender(1), manager.receiver("2.2.2.2:1", 1)
    assert (sender.poll(), receiver.poll()) == (KVPoll.WaitingForInput,) * 2
    sender.init(3)
    sender.send([Run(0, 2)])
    assert sender.poll() is KVPoll.Transferring
    sender.send([Run(2, 1)], Metadata(output_ids=(5,)))
    assert sender.poll() is KVPoll.Success
    receiver.init([Run(0, 3)], 0)
    assert receiver.poll() is KVPoll.Success
    assert receiver.metadata is not None
    assert receiver.metadata.output_ids == (FIRST_TOKEN,)
    sender.abort()
    assert sender.poll() is KVPoll.Success
    assert manager.state() == {"rooms_total": 2}


def test_fake_sender_counts() -> None:
    manager = fake()
    few, many, gone = manager.sender(1), manager.sender(2), manager.sender(3)
    few.init(3)
    few.send([Run(0, 2)], Metadata(output_ids=(5,)))
    many.init(1)
    many.send([Run(0, 2)])
    gone.abort("not wanted")
    gone.abort("again")
    gone.send([Run(0, 1)])
    assert "fewer" in str(few.failure())
    assert "more" in str(many.failure())
    assert isinstance(gone.failure(), Aborted)
    assert "not wanted" in str(gone.failure())
    with pytest.raises(BadRequest):
        manager.sender(0)
