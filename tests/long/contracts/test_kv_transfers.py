"""process/contracts/test_kv_transfers.py, at length."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from runtime.disagg.transfer.kv_manager import KVPoll
from runtime.disagg.transfer.memory import make_memory
from runtime.plan import Run
from runtime.protocol.errors import TransferError
from tests.process.contracts import test_kv_transfers as contract
from tests.process.contracts.test_kv_transfers import (
    BETWEEN,
    LONG_S,
    ROOMS,
    SLOTS,
    Process,
    Side,
    known,
    layout,
    one_good,
    opened,
    pair,
    tokens_at,
    wait_for,
)


def test_nixl_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_NET_DEVICES", "nothing0")
    with pytest.raises(TransferError, match="NIXL cannot start") as caught, opened("nixl"):
        pass
    assert "UCX_NET_DEVICES" in str(caught.value.hint)


def test_nixl_that_cannot_reach_its_peer_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    with opened("nixl") as pair:
        unknown = msgspec.msgpack.encode({"agent": b"none", "address": 0})
        monkeypatch.setattr(pair.prefill[0].manager, "extra", lambda: unknown)
        receiver = pair.receiver(next(ROOMS))
        wait_for(lambda: receiver.poll() is KVPoll.Failed)
        assert "NIXL cannot reach" in str(receiver.failure())
        assert "--disaggregation-host" in str(receiver.failure().hint)


def test_nixl_takes_no_processor_while_it_has_nothing_to_do() -> None:
    pytest.importorskip("nixl")

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    with opened("nixl") as pair:
        one_good(pair)
    before = threads()  # also what it starts once
    with opened("nixl") as pair:
        one_good(pair)
        spent, since = time.process_time(), time.monotonic()
        time.sleep(2)
        assert time.process_time() - spent < 0.4 * (time.monotonic() - since)
        assert threads() - before
    wait_for(lambda: not threads() - before, "the end of its threads")


SOAK_ROOMS = int(os.environ.get("TRANSFER_SOAK_ROOMS", "1500"))


FAULT_RATES = "corrupt=0.03,cut=0.004,fail=0.02,lose=0.01,delay=0.1,delay_s=0.2,damage=0.02,seed=11"


class Soak:
    """Rooms at random from a process that is killed now and then; slots are scarce and used again at
    once, so that whatever is written too late, or to a wrong place, is found in somebody else's room."""

    AT_ONCE = 12

    def __init__(self, kind: str) -> None:
        self.kind, self.draw = kind, random.Random(9)
        self.source = known(make_memory(SLOTS, layout()))
        file = os.memfd_create("kv")
        self.side = Side.make(
            kind, make_memory(SLOTS, layout(order="token"), file=file), waiting_timeout=10.0
        )
        os.close(file)
        self.free = list(range(SLOTS))
        self.live: dict[int, tuple[Any, list[Run], list[Run]]] = {}
        self.faults = FAULT_RATES
        self.process = Process(kind, faults=self.faults, waiting_timeout=10.0)
        self.ends: dict[str, int] = {}
        self.kills = self.short = 0

    def begin(self) -> bool:
        """One more room, if there are slots for it."""
        count = self.draw.randrange(1, 40)
        if len(self.free) < count:
            self.short += 1
            return False
        target = [Run(self.free.pop(self.draw.randrange(len(self.free))), 1) for _ in range(count)]
        chunks, left = [], count
        while left:
            length = self.draw.randrange(1, left + 1)
            chunks.append([[self.draw.randrange(SLOTS - length), length]])
            left -= length
        room = next(ROOMS)
        receiver = self.side.manager.receiver(self.process.bootstrap, room)
        with contextlib.suppress(OSError):
            self.process.tell(room=room, chunks=chunks)
        self.live[room] = receiver, target, [Run(*run) for chunk in chunks for run in chunk]
        return True

    def look(self) -> None:
        for room, (receiver, target, source) in list(self.live.items()):
            poll = receiver.poll()
            if poll is KVPoll.WaitingForInput:
                receiver.init(target, 0)
            elif self.draw.random() < 0.0005:
                receiver.abort("at random")
            if not receiver.poll().ended:
                continue
            if receiver.poll() is KVPoll.Success:
                assert (tokens_at(self.side.memory, target) == tokens_at(self.source, source)).all(), room
                assert receiver.metadata.output_ids == (room,)
                how = "right"
            else:
                fault = receiver.failure()
                assert fault is not None
                assert fault.message
                how = fault.code
            self.ends[how] = self.ends.get(how, 0) + 1
            del self.live[room]
            self.free += [run.start for run in target]

    def run(self, rooms: int) -> None:
        begun = 0
        deadline = time.monotonic() + 10 * LONG_S
        while begun < rooms or self.live:
            assert time.monotonic() < deadline, self.live
            if begun < rooms and len(self.live) < self.AT_ONCE and self.begin():
                begun += 1
                if self.faults and self.draw.random() < 0.006:
                    self.restart()
            self.look()
            time.sleep(0.0005)

    def restart(self) -> None:
        self.process.end()
        self.kills += 1
        self.process = Process(self.kind, self.process.port, faults=self.faults, waiting_timeout=10.0)

    def close(self) -> None:
        self.process.end()
        self.side.manager.close()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", [*BETWEEN, "nixl"])
def test_every_room_ends_rightly_or_with_a_cause(kind: str) -> None:
    soak = Soak(kind)
    try:
        soak.run(SOAK_ROOMS)
        print(kind, soak.ends, f"{soak.kills} kills, {soak.short} times no room")
        assert len(soak.free) == SLOTS
        assert soak.side.manager.state()["receiving"] == 0
        assert soak.ends["right"] > SOAK_ROOMS // 3
        assert {"transfer_peer_lost", "transfer_corrupt", "transfer_failed"} <= set(soak.ends)
        assert soak.short
        # With the faults gone the pair works as if nothing had been.
        soak.faults = ""
        soak.restart()
        wait_for(lambda: soak.side.manager.state()["links"] == 0)  # of the one before
        soak.ends.clear()
        soak.run(100)
        assert soak.ends["right"] >= 90, soak.ends  # some were aborted at random
        assert set(soak.ends) <= {"right", "aborted"}
    finally:
        soak.close()


# The whole contract over NIXL, whose agents take seconds to start: these are its tests, with other fixtures.


@pytest.fixture(params=["nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lasting() -> Iterator[Any]:
    with opened("nixl") as made:
        yield made


for _name, _test in list(vars(contract).items()):
    if _name.startswith("test_") and {"kind", "pair", "lasting"} & inspect.signature(_test).parameters.keys():
        globals()[_name] = _test


def test_between_processes() -> None:
    contract.test_between_processes("nixl")


def test_a_silent_process_is_lost() -> None:
    contract.test_a_silent_process_is_lost("nixl")
