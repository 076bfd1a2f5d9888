"""A pair of schedulers on fake runners, and a transfer between them that a test moves step by step. Nothing
here knows time or threads: what fails when is up to the dice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from runtime.disagg.decode import DecodeStage
from runtime.disagg.peers import Hosts, Peers
from runtime.disagg.prefill import PrefillStage
from runtime.disagg.transfer.fake import FakeManager
from runtime.disagg.transfer.kv_manager import KVManager, KVPoll, KVReceiver, KVSender, Progress
from runtime.disagg.transfer.memory import KVLayout, Order, tokens_of
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Run
from runtime.protocol.errors import Aborted, TransferCorrupt, TransferPeerLost
from runtime.protocol.io_struct import Bootstrap
from tests.unit.runtime.scheduler.conftest import Bench
from tests.unit.runtime.scheduler.fake import FakeRunner

LAYOUT = KVLayout(layers=1, total_heads=1, head_bytes=8, dtype="fake", heads=1)
NEVER = (1 << 64) - 1


class HashMemory:
    """The "KV" of a fake runner: of each token the hash of the history before it, and after it."""

    def __init__(self, runner: FakeRunner) -> None:
        self.layout, self.slots, self._runner = LAYOUT, runner.slots, runner

    def read(self, runs: Sequence[Run], heads: range, order: Order) -> memoryview:
        found = np.empty((tokens_of(runs), 2), dtype=np.uint64)
        for row, slot in enumerate(slots_of(runs)):
            found[row] = self._runner._before[slot] & NEVER, self._runner._after[slot] & NEVER
        return memoryview(found.tobytes())

    def write(self, runs: Sequence[Run], heads: range, order: Order, data: memoryview) -> None:
        values = np.frombuffer(data, dtype=np.uint64).reshape(-1, 2).tolist()
        for slot, (before, after) in zip(slots_of(runs), values, strict=True):
            self._runner._before[slot] = -1 if before == NEVER else before
            self._runner._after[slot] = -1 if after == NEVER else after


def slots_of(runs: Sequence[Run]) -> list[int]:
    return [slot for run in runs for slot in range(run.start, run.start + run.length)]


class Link:
    """What is under way between the two sides."""

    def __init__(self) -> None:
        self.moves: list[Callable[[], None]] = []
        self.senders: dict[int, SimSender] = {}
        self.receivers: dict[int, SimReceiver] = {}
        self.up = True
        self.corrupt = 0  # so many of the next pieces arrive damaged
        self.late_metadata: random.Random | None = None

    def pump(self, count: int = 1 << 30) -> None:
        """Let so many moves happen, in order."""
        while self.moves and count and self.up:
            count -= 1
            self.moves.pop(0)()

    def cut(self) -> None:
        """Whatever is in hand fails on both sides."""
        self.moves.clear()
        for end in [*self.senders.values(), *self.receivers.values()]:
            end.progress.fail(TransferPeerLost("the link was cut", where=f"room {end.bootstrap_id}"))


class _End:
    def __init__(self, room: int, manager: SimManager) -> None:
        self.bootstrap_id, self.manager, self.link = room, manager, manager.link
        self.progress = Progress(room)

    def poll(self) -> KVPoll:
        return self.progress.now

    def failure(self) -> Any:
        return self.progress.failure()

    def abort(self, reason: str = "aborted") -> None:
        if self.progress.fail(Aborted(reason)):
            self.tell_peer(reason)

    def tell_peer(self, reason: str) -> None:
        raise NotImplementedError


class SimSender(_End, KVSender):
    start = 0

    def meet(self) -> None:
        receiver = self.link.receivers.get(self.bootstrap_id)
        if receiver is not None and receiver.runs is not None:
            self.start = receiver.start
            self.progress.advance(KVPoll.WaitingForInput)

    def init(self, tokens: int) -> None:
        receiver = self.link.receivers.get(self.bootstrap_id)
        if receiver is not None and not receiver.progress.ended:
            assert receiver.runs is not None
            assert tokens == tokens_of(receiver.runs)
        self.left = tokens
        self.progress.advance(KVPoll.Transferring)

    def send(self, runs: Sequence[Run], metadata: Metadata | None = None) -> None:
        self.left -= tokens_of(runs)
        assert self.left >= 0
        assert metadata is None or not self.left

        def move() -> None:
            receiver = self.link.receivers.get(self.bootstrap_id)
            if self.progress.ended or receiver is None or receiver.progress.ended:
                return
            # Read only now: the slots must have been kept until here.
            data = self.manager.memory.read(runs, LAYOUT.span, "token")
            if self.link.corrupt and runs:
                self.link.corrupt -= 1
                fault = TransferCorrupt("a piece is damaged", where=f"room {self.bootstrap_id}")
                receiver.progress.fail(fault)
                self.progress.fail(fault)
                return
            receiver.take(runs, data)
            if metadata is not None:
                self.link.moves.append(partial(self.end, receiver, metadata))

        self.link.moves.append(move)

    def end(self, receiver: SimReceiver, metadata: Metadata) -> None:
        if receiver.progress.ended or self.progress.ended:
            return
        dice = self.link.late_metadata
        if dice is not None and dice.random() < 0.7:
            self.link.moves.append(partial(self.end, receiver, metadata))
            return
        receiver.metadata = metadata
        receiver.progress.advance(KVPoll.Success)
        self.link.moves.append(lambda: self.progress.advance(KVPoll.Success) and None)

    def tell_peer(self, reason: str) -> None:
        receiver = self.link.receivers.get(self.bootstrap_id)
        if receiver is not None:
            self.link.moves.append(lambda: receiver.progress.fail(TransferPeerLost(reason)) and None)


class SimReceiver(_End, KVReceiver):
    runs: Sequence[Run] | None = None
    start = filled = 0

    def init(self, runs: Sequence[Run], start: int) -> None:
        self.runs, self.start = list(runs), start
        self.progress.advance(KVPoll.Transferring)

    def take(self, runs: Sequence[Run], data: memoryview) -> None:
        assert self.runs is not None
        mine = slots_of(self.runs)[self.filled : self.filled + tokens_of(runs)]
        self.filled += len(mine)
        self.manager.memory.write([Run(slot, 1) for slot in mine], LAYOUT.span, "token", data)

    def tell_peer(self, reason: str) -> None:
        sender = self.link.senders.get(self.bootstrap_id)
        if sender is not None:
            self.link.moves.append(lambda: sender.progress.fail(TransferPeerLost(reason)) and None)


class SimManager(KVManager):
    carries: ClassVar[bool] = True

    def __init__(self, memory: HashMemory, link: Link) -> None:
        self.memory, self.link = memory, link

    def sender(self, room: int) -> SimSender:
        made = self.link.senders[room] = SimSender(room, self)
        return made

    def receiver(self, bootstrap: str, room: int) -> SimReceiver:
        made = self.link.receivers[room] = SimReceiver(room, self)
        return made

    def listen(self, bootstrap: str | None = None) -> str:
        return "simulated:"

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """It holds nothing."""


class Side:
    """One engine of the pair: a bench, and how many transfers it has at once."""

    def __init__(
        self, link: Link, mode: str, slots: int, rows: int, reserved: int, grammar: Any, **config: Any
    ) -> None:
        self.link, self.rows = link, rows
        stage: Any = None

        def make(*parts: Any) -> Any:
            return stage(*parts)

        runner = FakeRunner(slots, 41)
        memory = HashMemory(runner)
        self.peers = Peers(
            SimManager(memory, link), FakeManager(memory), rows,
            memory, Hosts(),
        )  # fmt: skip
        if mode == "prefill":
            stage = partial(PrefillStage, peers=self.peers)
        else:
            stage = partial(DecodeStage, peers=self.peers, reserved=reserved)
        self.bench = Bench(config, slots, grammar, lambda: 0.0, make)
        self.bench.runner = runner

    def full(self) -> None:
        """Everything is free again."""
        self.bench.empty()
        assert not self.bench.scheduler.manager.transfers
        assert self.bench.scheduler.state()["num_free_metadata_rows"] == self.rows
        assert not self.bench.scheduler.state().get("num_host_copies")


class Pair:
    """Both sides and the link between them. `dice`: who moves when."""

    def __init__(
        self,
        dice: random.Random,
        grammars: Callable[[], Any],
        *,
        slots: tuple[int, int] = (512, 512),
        rows: tuple[int, int] = (64, 64),
        reserved: int = 8,
        **config: Any,
    ) -> None:
        self.dice, self._make = dice, lambda: self._sides(grammars, slots, rows, reserved, config)
        self.link = Link()
        self.prefill, self.decode = self._make()
        self.lost: set[str] = set()
        self.ticks = 0

    def _sides(
        self,
        grammars: Callable[[], Any],
        slots: tuple[int, int],
        rows: tuple[int, int],
        reserved: int,
        config: dict[str, Any],
    ) -> tuple[Side, Side]:
        return (
            Side(self.link, "prefill", slots[0], rows[0], reserved, grammars(), **config),
            Side(self.link, "decode", slots[1], rows[1], reserved, grammars(), **config),
        )

    def add(self, rid: str, prompt: Sequence[int], room: int, **fields: Any) -> None:
        for side in self.dice.sample([self.prefill, self.decode], 2):
            side.bench.add(rid, prompt, bootstrap=Bootstrap("127.0.0.1", 1, room), **fields)
            if self.dice.random() < 0.3:
                self.step()

    def step(self) -> None:
        self.ticks += 1
        for sender in list(self.link.senders.values()):
            sender.meet()
        for room, receiver in self.link.receivers.items():
            if self.link.up and room in self.link.senders:
                receiver.progress.advance(KVPoll.WaitingForInput)
        self.link.pump(self.dice.randrange(4))
        self.dice.choice([self.prefill, self.decode]).bench.tick()

    def run(self, limit: int = 60_000) -> None:
        for _ in range(limit):
            if not (self.prefill.bench.scheduler.busy or self.decode.bench.scheduler.busy):
                return
            self.step()
        raise AssertionError(
            f"not done: {self.prefill.bench.scheduler.state()} {self.decode.bench.scheduler.state()}"
        )

    def kill(self, side: str) -> None:
        """It is gone with all that it had, and a new one stands in its place."""
        self.link.cut()
        made = dict(zip(("prefill", "decode"), self._make()))[side]
        self.lost |= set(getattr(self, side).bench.scheduler._live)
        made.bench.news = getattr(self, side).bench.news
        setattr(self, side, made)
