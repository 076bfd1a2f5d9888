"""Threads and loops that wait for the language's loop: each is woken, whatever the others do meanwhile."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.base import Call, Completion
from sglang_dsl.concurrency.loop import Inbox, Turns, background, in_thread
from sglang_dsl.concurrency.streams import Signal
from sglang_dsl.interpreter.run import Variable

LONG_S = 300.0


class Together(sgl.MockBackend):
    """Answers in rounds: nobody before as many calls as said are there."""

    def __init__(self, round_of: int) -> None:
        super().__init__(lambda call: "yes")
        self._left, self._round, self._all_here = round_of, round_of, asyncio.Event()

    async def generate(self, call: Call) -> Completion:
        self._left -= 1
        here = self._all_here
        if not self._left:
            self._left, self._all_here = self._round, asyncio.Event()
            here.set()
        await asyncio.wait_for(here.wait(), LONG_S)
        return await super().generate(call)


@pytest.mark.parametrize("size", [2, 7, 40])
def test_programs_that_read_after_each_call_all_get_their_own(size: int) -> None:
    @sgl.function
    def program(s: sgl.ProgramState, number: int) -> list[str]:
        said = []
        for turn in range(4):
            s += f"{number}.{turn} " + sgl.gen(f"a{turn}", max_tokens=4)
            said.append(s[f"a{turn}"])
        return said

    states = program.run_batch([(n,) for n in range(size)], backend=Together(size), num_threads=size)
    assert [state.ret_value for state in states] == [["yes"] * 4] * size
    assert all(state.text().startswith(f"{n}.0 yes{n}.1 yes") for n, state in enumerate(states))


def test_a_body_may_wait_for_one_that_is_woken_behind_it() -> None:
    """Whoever is woken first keeps his turn until the others, whose values came with his, have theirs."""
    here = threading.Barrier(6)

    @sgl.function
    def program(s: sgl.ProgramState) -> bool:
        s += "a" + sgl.gen("a", max_tokens=4)
        s["a"]
        here.wait(LONG_S)
        return True

    states = program.run_batch([{}] * 6, backend=Together(6), num_threads=6)
    assert all(state.ret_value for state in states)


def test_a_body_may_wait_for_what_its_own_next_call_does() -> None:
    """A call is made though the thread that asked for it neither reads nor ends."""
    asked = [threading.Event() for _ in range(5)]

    def reply(call: Call) -> str:
        said = str(call.prompt.messages[-1].content)
        if "then" in said:
            asked[int(said[0])].set()
        return "yes"

    @sgl.function
    def program(s: sgl.ProgramState, number: int) -> bool:
        s += f"{number}" + sgl.gen("a", max_tokens=4)
        s["a"]
        s += " then " + sgl.gen("b", max_tokens=4)
        return asked[number].wait(LONG_S)

    backend = sgl.MockBackend(reply, delay_s=0.01)
    states = program.run_batch([(n,) for n in range(5)], backend=backend, num_threads=5)
    assert all(state.ret_value for state in states)


def test_a_body_may_call_an_async_program_and_others_beside_it() -> None:
    @sgl.function
    async def inner(s: sgl.AsyncProgramState) -> str:
        s += "in" + sgl.gen("x", max_tokens=4)
        return str(await s["x"])

    @sgl.function
    def program(s: sgl.ProgramState) -> str:
        s += "a" + sgl.gen("a", max_tokens=4)
        s["a"]
        mapped = s.map(lambda fork, item: inner.run().ret_value + item, ["1", "2"])
        return "".join(mapped)

    backend = sgl.MockBackend(lambda call: "yes", delay_s=0.005)
    states = program.run_batch([{}] * 8, backend=backend, num_threads=8)
    assert {state.ret_value for state in states} == {"yes1yes2"}


def test_threads_of_a_pool_wait_for_no_longer_than_they_say() -> None:
    signal, ended = Signal(), threading.Event()
    found: list[bool] = []

    def work() -> None:
        found.append(signal.wait_for(lambda: False, 0.01))
        ended.set()

    in_thread(work)
    assert ended.wait(LONG_S)
    assert found == [False]
    assert not signal._wakers


class Recorded:
    """A thread that waits for its turn, as often as said, and writes down when it came."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: Turns, log: list[str], name: str) -> None:
        self.woken = threading.Lock()
        self.woken.acquire()
        self._turns, self._log, self._name = turns, log, name
        self.thread = threading.Thread(target=self._go_on)
        self.thread.start()

    def _go_on(self) -> None:
        assert self.woken.acquire(timeout=LONG_S)
        self._log.append(f"{self._name} {self._turns.mine}")
        self._turns.pass_on()
        self._turns.pass_on()  # it has no turn: nobody else loses his


def test_turns_go_round_once_and_end_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dsl.concurrency.loop.PATIENCE_S", LONG_S)
    monkeypatch.setattr("sglang_dsl.concurrency.loop.LONGEST_S", LONG_S)
    log: list[str] = []

    async def main() -> None:
        loop, resumed = asyncio.get_running_loop(), asyncio.Event()

        def resume() -> None:
            log.append("loop")
            resumed.set()

        turns = Turns(loop, resume)
        for _ in range(3):
            threads = [Recorded(loop, turns, log, name) for name in "abc"]
            for each in threads:
                ident = each.thread.ident
                assert ident is not None
                turns.add(ident, each.woken)
            await asyncio.wait_for(resumed.wait(), LONG_S)
            resumed.clear()
            for each in threads:
                each.thread.join(LONG_S)

    asyncio.run(main())
    assert log == ["a True", "b True", "c True", "loop"] * 3


def test_who_keeps_his_turn_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dsl.concurrency.loop.PATIENCE_S", 0.001)

    async def main() -> None:
        resumed = asyncio.Event()
        turns = Turns(asyncio.get_running_loop(), resumed.set)
        locks = [threading.Lock() for _ in range(3)]
        for number, lock in enumerate(locks):
            lock.acquire()
            turns.add(-1 - number, lock)  # threads that never come
        await asyncio.wait_for(resumed.wait(), LONG_S)
        assert not any(lock.locked() for lock in locks)
        assert not turns.mine
        # And nobody rests for the next ones.
        late = [threading.Lock() for _ in range(2)]
        for lock in late:
            lock.acquire()
            turns.add(-9, lock)
        while any(lock.locked() for lock in late):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), LONG_S))


def put_all(inbox: Inbox, waiting: list[asyncio.Future[None]]) -> None:
    for one in waiting:
        inbox.put(one)


def test_an_inbox_wakes_many_at_a_time_from_anywhere() -> None:
    async def main(begin: Callable[[Callable[[], None]], None]) -> None:
        loop = asyncio.get_running_loop()
        inbox = Inbox(loop)
        waiting = [loop.create_future() for _ in range(50)]
        waiting[7].cancel()
        begin(functools.partial(put_all, inbox, waiting))
        await asyncio.wait_for(asyncio.wait(waiting), LONG_S)

    asyncio.run(main(lambda work: threading.Thread(target=work).start()))
    asyncio.run(main(lambda work: work()))


def test_a_loop_that_has_gone_is_not_waited_for() -> None:
    """Its reader has gone with it; the others are told."""
    variable = Variable("x")

    loop = asyncio.new_event_loop()
    read = loop.create_task(variable.wait_async(lambda: variable.done))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    background().call(lambda: variable.settle("late"))
    variable.wait(lambda: variable.done)
    assert variable.result() == "late"
    read._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_loop_that_was_left_is_forgotten_with_what_it_waited_for(young: None) -> None:
    """Also where it was left between being woken and going on."""
    variable = Variable("x")
    loop = asyncio.new_event_loop()
    reader = loop.create_task(variable.wait_async(lambda: variable.done))
    loop.run_until_complete(asyncio.sleep(0))
    variable.settle("told")  # the loop does not run
    reader._log_destroy_pending = False  # type: ignore[attr-defined]
    gone = weakref.ref(loop)
    loop.close()
    del loop, reader
    gc.collect()
    assert gone() is None
