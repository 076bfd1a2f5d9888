"""One to many, with real processes: every rank gets each plan; one that dies, or is late, is named."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runtime.ipc.address import Address
from runtime.ipc.mailbox import Inbox, MailboxClosed, Outbox
from runtime.ipc.plans import ANSWERS, ORDERS, Done, Launch, call
from runtime.ipc.ranks import Ranks
from runtime.ipc.wire import Wire
from runtime.plan import Row, Run, StepPlan
from runtime.protocol.errors import DeadlineExceeded, EngineDead, WireError
from runtime.protocol.sampling import SamplingParams

LONG_S = 300.0
TO_RANK, FROM_RANK = Wire(ORDERS), Wire(ANSWERS)
ROOT = Path(__file__).parents[4]
RANK = """
import sys
from runtime.ipc.address import Address
from runtime.ipc.plans import ANSWERS, ORDERS, Done, Launch
from runtime.ipc.wire import Wire

rank, orders, answers = int(sys.argv[1]), sys.argv[2], sys.argv[3]
inbox = Address(orders).inbox(Wire(ORDERS))
print(inbox.url, flush=True)
outbox = Address(answers).outbox(Wire(ANSWERS))
while True:
    for order in inbox.receive(60):
        if isinstance(order, Launch):
            outbox.send(Done({"rank": rank, "number": order.number, "rows": len(order.plan.rows)}))
"""


@dataclass
class World:
    """Ranks, their processes, and what is to be closed."""

    links: list[tuple[Outbox, Inbox]] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def add(self, kind: str, folder: Path) -> None:
        rank = len(self.processes)
        mine, theirs = socket.socketpair()
        with mine, theirs:
            if kind == "fd":
                orders = answers = Address.fd(theirs.fileno())
                back = Address.fd(mine.fileno()).inbox(FROM_RANK)
            else:
                orders = Address.ipc(folder / "own" / f"to-{rank}.ipc")
                answers = Address.ipc(folder / "own" / f"from-{rank}.ipc")
                back = answers.inbox(FROM_RANK)
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), orders.url, answers.url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(theirs.fileno(),) if kind == "fd" else (),
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            self.processes.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.flush()
            url = process.stdout.readline().strip()
            here = Address.fd(mine.fileno()) if kind == "fd" else Address(url)
            self.links.append((here.outbox(TO_RANK), back))


@contextlib.contextmanager
def world(*kinds: str) -> Iterator[tuple[Ranks, list[subprocess.Popen[str]]]]:
    made = World()
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        try:
            for kind in kinds:
                made.add(kind, Path(folder))
            ranks = Ranks(made.links)
            yield ranks, made.processes
            ranks.close()
        finally:
            for process in made.processes:
                process.kill()
                process.wait(LONG_S)
                for pipe in (process.stdin, process.stdout):
                    assert pipe is not None
                    pipe.close()


def plan(number: int, rows: int) -> Launch:
    made = tuple(Row(seq, (5,), 0, (Run(0, 1),), SamplingParams()) for seq in range(rows))
    return Launch(number, StepPlan(made, ()), (), at_once=True)


def test_an_answer_that_nobody_took_keeps_no_socket_open(tmp_path: Path) -> None:
    path = tmp_path / "own" / "answers.ipc"
    there, back = Address.memory(), Address.ipc(path)
    inbox = back.inbox(FROM_RANK)
    ranks = Ranks([(there.outbox(), inbox)])
    rank = back.outbox(FROM_RANK)
    rank.send(Done({}))
    rank.close()  # all is out
    while not inbox._socket.poll(1000):  # type: ignore[attr-defined]
        pass
    ranks.close()
    assert not path.exists()


@pytest.mark.parametrize("kind", ["fd", "ipc"])
def test_every_rank_gets_each_plan_and_answers_in_the_order_of_ranks(kind: str) -> None:
    with world(kind, kind, kind) as (ranks, _):
        for number in range(20):
            ranks.send(plan(number, number % 5))
            got = [answer.data for answer in ranks.gather(LONG_S)]
            assert got == [{"rank": rank, "number": number, "rows": number % 5} for rank in range(3)]


def test_answers_of_rank_0_alone_and_of_the_others_later() -> None:
    with world("fd", "ipc") as (ranks, _):
        ranks.send(plan(1, 1))
        ranks.send(plan(2, 1))
        assert [answer.data["number"] for answer in ranks.gather(LONG_S, (0,))] == [1]
        assert [(one.data["rank"], one.data["number"]) for one in ranks.gather(LONG_S)] == [(0, 2), (1, 1)]


@pytest.mark.parametrize("kind", ["fd", "ipc"])
def test_a_rank_that_answers_late_is_named_and_what_others_said_is_kept(kind: str) -> None:
    with world(kind, kind) as (ranks, processes):
        ranks.send(plan(1, 1))
        ranks.gather(LONG_S)
        os.kill(processes[1].pid, signal.SIGSTOP)
        ranks.send(plan(2, 1))
        with pytest.raises(DeadlineExceeded, match="rank 1") as caught:
            ranks.gather(0.5)
        assert caught.value.where == "rank 1"
        os.kill(processes[1].pid, signal.SIGCONT)
        assert [one.data["number"] for one in ranks.gather(LONG_S)] == [2, 2]


@pytest.mark.parametrize("kind", ["fd", "ipc"])
def test_a_rank_that_died_is_named(kind: str) -> None:
    with world(kind, kind, kind) as (ranks, processes):
        ranks.send(plan(1, 1))
        ranks.gather(LONG_S)
        processes[2].kill()
        processes[2].wait(LONG_S)

        def step() -> None:
            ranks.send(plan(2, 1))
            ranks.gather(1.0)

        with pytest.raises((EngineDead, DeadlineExceeded), match="rank 2") as caught:
            step()
        assert caught.value.where == "rank 2"
        assert isinstance(caught.value, EngineDead) or kind != "fd"


def test_whoever_watches_a_rank_ends_the_wait_for_another() -> None:
    with world("ipc", "ipc") as (ranks, processes):
        os.kill(processes[0].pid, signal.SIGSTOP)
        ranks.send(plan(1, 1))
        processes[1].kill()
        watch = threading.Thread(target=lambda: (processes[1].wait(LONG_S), ranks.lost(1, "was killed")))
        watch.start()
        with pytest.raises(EngineDead, match="rank 1 was killed"):
            ranks.gather(LONG_S, (0,))
        watch.join()
        with pytest.raises(EngineDead, match="rank 1 was killed"):
            ranks.send(plan(2, 1))


def test_what_cannot_travel_reaches_nobody() -> None:
    boxes = [(Address.memory(), Address.memory()) for _ in range(2)]
    ranks = Ranks([(there.outbox(), back.inbox()) for there, back in boxes])
    with world("fd", "fd") as (others, _):
        with pytest.raises(WireError):
            others.send(Done())
        others.send(plan(1, 2))
        assert len(others.gather(LONG_S)) == 2
    ranks.send(call("stop_profile"))
    assert [there.inbox().receive(0) for there, _ in boxes] == [[call("stop_profile")]] * 2


def test_what_a_lost_rank_said_last_can_be_read_and_the_others_are_let_go() -> None:
    links, ends = [], []
    for _ in range(2):
        mine, theirs = socket.socketpair()
        with mine, theirs:
            here, there = Address.fd(mine.fileno()), Address.fd(theirs.fileno())
            links.append((here.outbox(TO_RANK), here.inbox(FROM_RANK)))
            ends.append((there.inbox(TO_RANK), there.outbox(FROM_RANK)))
    ranks = Ranks(links)
    assert ranks.first_lost is None
    with pytest.raises(DeadlineExceeded, match="rank 0"):
        ranks.gather(0)
    ends[1][1].send(Done({"rank": 1}))
    ends[1][1].close()
    ends[1][0].close()
    ranks.lost(1, "has ended")
    for act in (lambda: ranks.gather(LONG_S), lambda: ranks.send_to(0, plan(1, 1))):
        with pytest.raises(EngineDead, match="rank 1 has ended"):
            act()
    assert ranks.first_lost == 1
    assert ranks.remains(1) == [Done({"rank": 1})]
    assert ranks.remains(1) == []
    with pytest.raises(MailboxClosed):
        ends[0][0].receive(LONG_S)
    ranks.close()
    for inbox, outbox in ends:
        inbox.close()
        outbox.close()
