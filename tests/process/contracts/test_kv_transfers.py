"""Every KV transfer keeps the same promises: what arrives is what was sent, bit for bit, or both sides fail
with the cause; nothing is written once a room has ended; who comes back is served again."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.disagg.transfer.bootstrap import BootstrapServer
from runtime.disagg.transfer.faults import VARIABLE, FaultRates, Faults
from runtime.disagg.transfer.kv_manager import KV_TRANSFERS, KVPoll, TransferOptions
from runtime.disagg.transfer.memory import ArrayMemory, KVLayout, make_memory
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Run
from runtime.protocol.errors import (
    BadRequest,
    RuntimeFault,
    TransferCorrupt,
    TransferError,
    TransferLate,
    TransferPeerLost,
)
from tests.exploring import tries

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "process" / "contracts" / "kv_prefill_process.py"
_spec = importlib.util.spec_from_file_location("kv_prefill_process", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
prefill_process = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(prefill_process)
known = prefill_process.known

LONG_S = 300.0
SLOTS = 256
HEADS = 4
# local: mapped pools; unmapped: the same where they cannot be.
KINDS = ["local", "unmapped", "tcp"]
BETWEEN = ["local", "tcp"]
ROOMS = itertools.count(1)


def layout(first: int = 0, heads: int = HEADS, order: Any = "head") -> KVLayout:
    return KVLayout(3, HEADS, 16, "float32", first, heads, order)


def wait_for(told: Callable[[], Any], what: str = "what was awaited") -> Any:
    deadline = time.monotonic() + LONG_S
    while not (found := told()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.001)
    return found


def ended(*ends: Any) -> list[KVPoll]:
    wait_for(lambda: all(end.poll().ended for end in ends), "the end of a room")
    return [end.poll() for end in ends]


def tokens_at(memory: ArrayMemory, runs: Sequence[Run]) -> np.ndarray[Any, Any]:
    return np.concatenate([memory.view[start : start + length] for start, length in runs])


@dataclass
class Side:
    """One engine's manager and its pool."""

    memory: ArrayMemory
    manager: Any

    @classmethod
    def make(cls, kind: str, memory: ArrayMemory, **options: Any) -> Side:
        options = {"heartbeat": 30.0, **options}  # a loaded machine is not a lost one
        name = "local" if kind == "unmapped" else kind
        made = KV_TRANSFERS.load(name)(memory, TransferOptions(**options).verify())
        return cls(memory, made)


@dataclass
class Pair:
    """Prefill and decode engines, and the bootstrap server between them."""

    kind: str
    prefill: list[Side] = field(default_factory=list)
    decode: list[Side] = field(default_factory=list)
    bootstrap: BootstrapServer = field(default_factory=BootstrapServer)
    files: list[int] = field(default_factory=list)

    def pool(self, part: KVLayout) -> ArrayMemory:
        if self.kind == "unmapped":
            return make_memory(SLOTS, part)
        self.files.append(os.memfd_create("kv"))
        return make_memory(SLOTS, part, file=self.files[-1])

    def add_prefill(self, part: KVLayout | None = None, **options: Any) -> Side:
        side = Side.make(self.kind, known(self.pool(part or layout())), **options)
        self.prefill.append(side)
        side.manager.listen(self.bootstrap.address)
        return side

    def add_decode(self, part: KVLayout | None = None, **options: Any) -> Side:
        side = Side.make(self.kind, self.pool(part or layout(order="token")), **options)
        self.decode.append(side)
        return side

    def receiver(self, room: int, side: int = 0) -> Any:
        return self.decode[side].manager.receiver(self.bootstrap.address, room)

    def close(self) -> None:
        for side in (*self.prefill, *self.decode):
            side.manager.close()
        self.bootstrap.close()
        for file in self.files:
            os.close(file)


@contextlib.contextmanager
def opened(kind: str, ready: bool = True, **options: Any) -> Iterator[Pair]:
    pair = Pair(kind)
    try:
        if ready:
            pair.add_prefill(**options)
            pair.add_decode(**options)
        yield pair
    finally:
        pair.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    with opened(kind) as made:
        yield made


@pytest.fixture(scope="module", params=KINDS)
def lasting(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with opened(request.param) as made:
        yield made


def begin(pair: Pair, runs: Sequence[Run], start: int = 0) -> tuple[Any, Any]:
    """Sender and receiver of a new room, ready for its KV."""
    room = next(ROOMS)
    sender, receiver = pair.prefill[0].manager.sender(room), pair.receiver(room)
    wait_for(lambda: receiver.poll() is not KVPoll.Bootstrapping)
    assert receiver.poll() is KVPoll.WaitingForInput, receiver.failure()
    receiver.init(runs, start)
    wait_for(lambda: sender.poll() is not KVPoll.Bootstrapping)
    return sender, receiver


def one_good(pair: Pair) -> None:
    """The pair works."""
    source, target = [Run(3, 9), Run(40, 2)], [Run(200, 11)]
    sender, receiver = begin(pair, target)
    sender.init(11)
    sender.send(source, Metadata(output_ids=(77,)))
    assert ended(sender, receiver) == [KVPoll.Success] * 2, (sender.failure(), receiver.failure())
    assert (tokens_at(pair.decode[0].memory, target) == tokens_at(pair.prefill[0].memory, source)).all()
    assert receiver.metadata == Metadata(output_ids=(77,))


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[list[Run]], list[Run]]:
    """Chunks of source runs, and target runs for as many tokens."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    slots, source = 0, []
    for length in lengths:
        slots += draw(st.integers(0, 15))
        source.append(Run(slots, length))
        slots += length
    source = draw(st.permutations(source))
    cuts = sorted(draw(st.sets(st.integers(1, len(source)), max_size=3)) | {len(source)})
    chunks = [list(source[a:b]) for a, b in zip([0, *cuts], cuts)]
    total, target, slots = sum(lengths), [], 0
    while total:
        length = draw(st.integers(1, total))
        slots += draw(st.integers(0, 8))
        target.append(Run(slots, length))
        slots += length
        total -= length
        if slots + total > SLOTS - 8 * (total + 1):
            if total:
                target.append(Run(slots, total))
            break
    return chunks, target


@given(moves(), st.integers(0, 10_000), st.booleans())
@settings(max_examples=tries(25), deadline=None)
def test_what_arrives_is_what_was_sent(
    lasting: Pair, move: tuple[list[list[Run]], list[Run]], start: int, ahead: bool
) -> None:
    chunks, target = move
    [prefill], [decode] = lasting.prefill, lasting.decode
    decode.memory.view[...] = 255
    room = next(ROOMS)
    if ahead:  # whichever side comes first
        sender = prefill.manager.sender(room)
        receiver = lasting.receiver(room)
    else:
        receiver = lasting.receiver(room)
    wait_for(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.init(target, start)
    if not ahead:
        sender = prefill.manager.sender(room)
    wait_for(lambda: sender.poll() is KVPoll.WaitingForInput)
    assert sender.start == start
    sender.init(sum(run.length for run in target))
    metadata = Metadata(output_ids=(start,), logprobs=(-0.5,), top_logprobs=(((3, -0.1),),))
    seen = []
    for chunk in chunks:
        sender.send(chunk)
        seen.append(sender.poll())
    assert receiver.metadata is None
    assert not receiver.poll().ended
    sender.send([], metadata)
    assert ended(sender, receiver) == [KVPoll.Success] * 2
    assert set(seen) == {KVPoll.Transferring}
    source = [run for chunk in chunks for run in chunk]
    assert (tokens_at(decode.memory, target) == tokens_at(prefill.memory, source)).all()
    beside = np.ones(SLOTS, dtype=bool)
    for first, length in target:
        beside[first : first + length] = False
    assert (decode.memory.view[beside] == 255).all()
    assert receiver.metadata == metadata


# -- what goes wrong -----------------------------------------------------------------------------------------


def test_an_abort_ends_both_sides_and_nothing_is_written_any_more(pair: Pair) -> None:
    memory = pair.decode[0].memory
    sender, receiver = begin(pair, [Run(0, 20)])
    sender.init(20)
    sender.send([Run(100, 5)])
    wait_for(lambda: memory.view[:5].any())
    receiver.abort("the client is gone")
    assert receiver.poll() is KVPoll.Failed
    memory.view[...] = 9
    sender.send([Run(105, 15)], Metadata(output_ids=(1,)))
    assert ended(sender) == [KVPoll.Failed]
    assert "the client is gone" in str(sender.failure())
    one_good(pair)  # behind it on the same connections
    assert (memory.view[:200] == 9).all()
    sender, receiver = begin(pair, [Run(0, 4)])
    sender.init(4)
    sender.send([Run(0, 2)])
    sender.abort("no longer wanted")
    assert ended(sender, receiver) == [KVPoll.Failed] * 2
    assert "no longer wanted" in str(receiver.failure())
    assert receiver.metadata is None
    sender.abort("again")
    receiver.abort("again")
    assert "again" not in str(receiver.failure())


def test_who_comes_late_is_told_of_a_failure(pair: Pair) -> None:
    one_good(pair)
    first, second = next(ROOMS), next(ROOMS)
    sender = pair.prefill[0].manager.sender(first)
    sender.abort("too long a prompt")
    receiver = pair.receiver(first)
    wait_for(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.init([Run(0, 1)], 0)
    assert ended(receiver) == [KVPoll.Failed]
    assert "too long a prompt" in str(receiver.failure())
    receiver = pair.receiver(second)
    wait_for(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.abort("no room left")
    wait_for(lambda: pair.prefill[0].manager.sending._failed.get(second))
    assert "no room left" in str(pair.prefill[0].manager.sender(second).failure())
    one_good(pair)


@pytest.mark.parametrize("said", [3, 5])
def test_another_number_of_tokens(pair: Pair, said: int) -> None:
    sender, receiver = begin(pair, [Run(0, 4)])
    sender.init(said)
    assert ended(sender, receiver) == [KVPoll.Failed] * 2
    assert f"has {said} tokens from 0 on, the decode side made room for 4" in str(receiver.failure())
    for runs, words in (([Run(0, 5)], "5 tokens were sent of 4"), ([Run(0, 3)], "3 tokens were sent of 4")):
        sender, receiver = begin(pair, [Run(0, 4)])
        sender.init(4)
        sender.send(runs, Metadata(output_ids=(1,)))
        assert ended(sender, receiver) == [KVPoll.Failed] * 2
        assert words in str(receiver.failure())
    one_good(pair)


def test_slots_and_metadata_that_cannot_be(pair: Pair) -> None:
    sender, receiver = begin(pair, [Run(0, 4)])
    sender.init(4)
    sender.send([Run(SLOTS - 2, 4)])
    assert ended(sender, receiver) == [KVPoll.Failed] * 2
    assert "slots" in str(receiver.failure())
    sender, receiver = begin(pair, [Run(SLOTS - 2, 4)])
    assert ended(sender, receiver) == [KVPoll.Failed] * 2
    sender, receiver = begin(pair, [Run(0, 4)])
    sender.init(4)
    sender.send([Run(0, 4)], Metadata(output_ids=(1,), token_ids=((0.5,) * 1_000_000,)))
    assert ended(sender, receiver) == [KVPoll.Failed] * 2
    assert "bytes" in str(receiver.failure())
    one_good(pair)


def test_rooms_that_cannot_be(pair: Pair) -> None:
    manager = pair.prefill[0].manager
    for room in (0, -1, 1 << 63):
        with pytest.raises(BadRequest, match="room"):
            manager.sender(room)
        with pytest.raises(BadRequest, match="room"):
            pair.receiver(room)
    room = next(ROOMS)
    manager.sender(room)
    pair.receiver(room)
    with pytest.raises(BadRequest, match="in use"):
        manager.sender(room)
    with pytest.raises(BadRequest, match="in use"):
        pair.receiver(room)


def test_who_cannot_be_connected_to_is_given_up_soon(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.disagg.transfer.net.receiving.UNREACHED_S", 0.2)
    with opened(kind) as pair:
        nobody = pair.decode[0].manager.receiver("127.0.0.1:1", next(ROOMS))
        assert ended(nobody) == [KVPoll.Failed]
        assert isinstance(nobody.failure(), TransferPeerLost)
        assert "127.0.0.1:1: the bootstrap server was not reached" in str(nobody.failure())


def test_deadlines_name_what_did_not_come(kind: str) -> None:
    with opened(kind, bootstrap_timeout=3.0) as pair:
        alone = pair.prefill[0].manager.sender(next(ROOMS))
        assert ended(alone) == [KVPoll.Failed]
        assert isinstance(alone.failure(), TransferLate)
        assert "did not ask" in str(alone.failure())
        nobody = pair.decode[0].manager.receiver("127.0.0.1:1", next(ROOMS))
        assert ended(nobody) == [KVPoll.Failed]
        assert isinstance(nobody.failure(), TransferLate)
        assert "not reached within 3 s: 127.0.0.1:1: the bootstrap server" in str(nobody.failure())
    with opened(kind, waiting_timeout=0.3) as pair:
        sender, receiver = begin(pair, [Run(0, 4)])
        sender.init(4)
        assert ended(sender, receiver) == [KVPoll.Failed] * 2
        assert isinstance(receiver.failure(), TransferLate)


def test_sides_that_do_not_fit_are_told_at_once(kind: str) -> None:
    other = KVLayout(3, HEADS, 8, "bfloat16", 0, HEADS)
    for options, part, words in (
        ({"key": b"another key"}, None, "key"),
        ({}, other, "head_bytes 16, this one's 8"),
        ({}, layout(heads=2), "heads 4, this one's 2"),
    ):
        with opened(kind, ready=False) as pair:
            pair.add_prefill()
            pair.add_decode(part, **options)
            receiver = pair.receiver(next(ROOMS))
            assert ended(receiver) == [KVPoll.Failed]
            assert words in str(receiver.failure())
    with opened(kind, ready=False) as pair:
        pair.add_prefill()
        pair.kind = "local" if kind == "tcp" else "tcp"
        pair.add_decode()
        receiver = pair.receiver(next(ROOMS))
        if kind != "unmapped":
            assert ended(receiver) == [KVPoll.Failed]
            assert "transfer" in str(receiver.failure())


def test_with_a_key(kind: str) -> None:
    key = b"k" * 32
    pair = Pair(kind, bootstrap=BootstrapServer(key=key))
    with contextlib.closing(pair):
        pair.add_prefill(key=key)
        pair.add_decode(key=key)
        one_good(pair)


FAULTS: list[tuple[dict[str, float], type[RuntimeFault], str]] = [
    ({"damage": 1}, TransferCorrupt, "metadata"),
    ({"lose": 1}, TransferLate, "within 0.5 s"),
    ({"fail": 1}, TransferError, "injected"),
    ({"cut": 1}, RuntimeFault, "injected|lost|closed"),
    ({"corrupt": 1}, TransferCorrupt, "checksum"),
]


@pytest.mark.parametrize(
    ("rates", "error", "words"), FAULTS, ids=lambda one: str(one) if isinstance(one, dict) else ""
)
def test_injected_faults_are_found(
    kind: str, rates: dict[str, float], error: type[RuntimeFault], words: str
) -> None:
    if kind in ("local", "nixl") and "corrupt" in rates:
        pytest.skip("nothing of it is sent in pieces that could be damaged")
    with opened(kind, ready=False) as pair:
        wait = 0.5 if "lose" in rates else 300.0
        pair.add_prefill(faults=Faults(FaultRates(**rates)), waiting_timeout=wait)  # type: ignore[arg-type]
        side = pair.add_decode()
        room = next(ROOMS)
        sender, receiver = pair.prefill[0].manager.sender(room), pair.receiver(room)
        wait_for(lambda: receiver.poll() is not KVPoll.Bootstrapping)
        receiver.init([Run(0, 40)], 0)
        wait_for(lambda: sender.poll() is not KVPoll.Bootstrapping)
        sender.init(40)
        sender.send([Run(100, 40)], Metadata(output_ids=(1,)))
        assert ended(sender, receiver) == [KVPoll.Failed] * 2
        fault = receiver.failure()
        assert isinstance(fault, error)
        assert any(word in str(fault) for word in words.split("|")), fault
        # another prefill side, without faults, in its place
        pair.prefill.pop().manager.close()
        wait_for(lambda: side.manager.state()["links"] == 0)
        pair.add_prefill()
        one_good(pair)


def test_metadata_that_come_late_are_awaited(kind: str) -> None:
    with opened(kind, ready=False) as pair:
        pair.add_prefill(faults=Faults(FaultRates(delay=1, delay_s=0.3)))
        pair.add_decode()
        one_good(pair)
        assert pair.prefill[0].manager.options.faults.counts == {"delay": 1}


def test_strangers_do_not_disturb(pair: Pair) -> None:
    """Garbage, half a hello, nothing at all, and too many of these, at the address where peers connect."""
    one_good(pair)
    manager = pair.prefill[0].manager
    family, address = manager._listener.family, manager._listener.getsockname()
    draw = random.Random(5)
    with contextlib.ExitStack() as stack:
        for count in range(70):
            end = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            end.connect(address)
            if count % 3:
                with contextlib.suppress(OSError):
                    end.sendall(draw.randbytes(draw.randrange(1, 3000)))
        one_good(pair)
        assert not {link.closed for link in manager._links.values()} - {False}
    one_good(pair)


def test_ports_are_of_loopback_only(kind: str) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}

    before = listening()
    with opened(kind) as pair:
        one_good(pair)
        assert {host for host, _ in listening() - before} == {"127.0.0.1"}
    assert "UCX_NET_DEVICES" not in os.environ


def test_closing_fails_what_is_left_and_leaves_nothing_behind(kind: str) -> None:
    me, before = psutil.Process(), set(threading.enumerate())

    def once() -> None:
        with opened(kind) as pair:
            one_good(pair)
            sender, receiver = begin(pair, [Run(0, 4)])
            pair.prefill[0].manager.close()
            assert ended(sender, receiver) == [KVPoll.Failed] * 2
            assert "ending" in str(sender.failure())
            with pytest.raises(RuntimeFault, match="ending"):
                pair.prefill[0].manager.sender(next(ROOMS))

    def quiet() -> bool:
        return not [
            one for one in threading.enumerate() if one.name.startswith("transfer") and one not in before
        ]

    def files() -> int:
        gc.collect()  # a mapping's file is open as long as its object lives
        return me.num_fds()

    def open_now() -> str:
        return f"{[one.path for one in me.open_files()]} {me.net_connections('all')}"

    once()
    wait_for(quiet, "the end of its threads")
    first = files()
    for _ in range(4):  # what it left behind would be there each time; what others open meanwhile, once
        once()
        wait_for(quiet, "the end of its threads")
    deadline = time.monotonic() + 20  # a thread of the bootstrap server may end later than its answer came
    while (now := files()) >= first + 4:
        assert time.monotonic() < deadline, f"{first} files were open, {now} are: {open_now()}"
        time.sleep(0.1)


# -- a prefill side in a process of its own ------------------------------------------------------------------


class Process:
    """kv_prefill_process.py, and what it says."""

    def __init__(self, kind: str, port: int = 0, faults: str = "", **options: Any) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: faults}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        part = {
            "layers": 3,
            "total_heads": HEADS,
            "head_bytes": 16,
            "dtype": "float32",
            "heads": HEADS,
            "order": "head",
        }
        options = {"heartbeat": 30.0, **options}
        self.tell(slots=SLOTS, layout=part, transfer=kind, options=options, port=port)
        told = self.hear()
        self.bootstrap, self.port = told["bootstrap"], told["port"]

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        return self._lines.get(timeout=LONG_S)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))


def wanted(side: Side, bootstrap: str, target: list[Run]) -> Any:
    room = next(ROOMS)
    receiver = side.manager.receiver(bootstrap, room)
    wait_for(lambda: receiver.poll() is not KVPoll.Bootstrapping)
    receiver.init(target, 0)
    return receiver


@pytest.mark.parametrize("kind", BETWEEN)
def test_between_processes(kind: str) -> None:
    """Also with its peer killed in the middle of a room, and started anew."""
    source = known(make_memory(SLOTS, layout()))
    side = Side.make(kind, make_memory(SLOTS, layout(order="token")))
    process = Process(kind)
    try:
        for target in ([Run(0, 64)], [Run(200, 30), Run(10, 34)]):
            receiver = wanted(side, process.bootstrap, target)
            process.tell(room=receiver.bootstrap_id, chunks=[[[7, 20]], [[100, 30], [90, 4]], [[200, 10]]])
            assert ended(receiver) == [KVPoll.Success], receiver.failure()
            said = wait_for(lambda: [one for one in [process.hear()] if "room" in one])[0]
            assert said == {"room": receiver.bootstrap_id, "poll": KVPoll.Success, "failure": "None"}
            expected = tokens_at(source, [Run(7, 20), Run(100, 30), Run(90, 4), Run(200, 10)])
            assert (tokens_at(side.memory, target) == expected).all()
            assert receiver.metadata.output_ids == (receiver.bootstrap_id,)

        receiver = wanted(side, process.bootstrap, [Run(0, 64)])
        process.tell(room=receiver.bootstrap_id, chunks=[[[0, 40]], [[40, 24]]], never=True)
        assert process.hear() == {"sent": receiver.bootstrap_id}
        process.signal(signal.SIGKILL)
        assert ended(receiver) == [KVPoll.Failed]
        assert isinstance(receiver.failure(), TransferPeerLost)
        process.end()

        again = side.manager.receiver(process.bootstrap, next(ROOMS))  # waits for it
        process = Process(kind, process.port)
        process.tell(room=again.bootstrap_id, chunks=[[[5, 2]], [[9, 1]]])
        wait_for(lambda: again.poll() is KVPoll.WaitingForInput)
        again.init([Run(30, 3)], 0)
        assert ended(again) == [KVPoll.Success]
        assert (side.memory.view[30:33] == tokens_at(source, [Run(5, 2), Run(9, 1)])).all()
    finally:
        process.end()
        side.manager.close()


@pytest.mark.parametrize("kind", BETWEEN)
def test_a_silent_process_is_lost(kind: str) -> None:
    """And one that only has nothing to say is not, though it expects signs of life less often itself."""
    side = Side.make(kind, make_memory(SLOTS, layout()), heartbeat=1.0, heartbeat_misses=5)
    process = Process(kind)
    try:
        receiver = wanted(side, process.bootstrap, [Run(0, 8)])
        process.tell(room=receiver.bootstrap_id, chunks=[[[0, 4]], [[4, 4]]], never=True)
        assert process.hear() == {"sent": receiver.bootstrap_id}
        time.sleep(7)
        assert receiver.poll() is KVPoll.Transferring
        process.signal(signal.SIGSTOP)
        assert ended(receiver) == [KVPoll.Failed]
        assert isinstance(receiver.failure(), TransferPeerLost)
        assert "no sign of life for 5 s" in str(receiver.failure())
        process.signal(signal.SIGCONT)
    finally:
        process.end()
        side.manager.close()


# -- thousands of rooms, and whatever can go wrong -----------------------------------------------------------
