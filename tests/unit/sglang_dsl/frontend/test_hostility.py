"""What once hung, leaked or lost something: backends, bodies and readers that behave badly."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl import MockBackend, gen
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, ChoiceScores, Completion, Delta
from sglang_dsl.concurrency.loop import background
from sglang_dsl.concurrency.threads import Threads
from sglang_dsl.interpreter.record import Record
from tests.unit.sglang_dsl.frontend.faulty import FAULTS, HARMLESS, FaultyBackend


@sgl.function
def one(s: Any) -> None:
    s += "p " + gen("a")


async def never(call: Call) -> str:
    await asyncio.Event().wait()
    return ""


class Queued(Backend):
    """One coroutine answers all calls and hands on what goes wrong with one of them, as clients do that
    gather calls into batches."""

    name = "queued"

    def __init__(self) -> None:
        self.calls: asyncio.Queue[asyncio.Future[Completion]] | None = None
        self.count = 0

    async def _serve(self, calls: asyncio.Queue[asyncio.Future[Completion]]) -> None:
        while True:
            waiting = await calls.get()
            self.count += 1
            try:
                if self.count == 1:
                    raise OSError("the first one fails")
                waiting.set_result(Completion(("fine",), {}))
            except OSError as error:
                waiting.set_exception(error)

    async def generate(self, call: Call) -> Completion:
        if self.calls is None:
            self.calls = asyncio.Queue()
            self.task = asyncio.create_task(self._serve(self.calls))
        waiting: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.calls.put_nowait(waiting)
        return await waiting

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        yield Delta((await self.generate(call)).texts[0], {})

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.task.cancel()


def test_an_error_does_not_end_the_coroutine_that_handed_it_on() -> None:
    backend = Queued()
    assert "the first one fails" in str(one.run(backend=backend, timeout=300).error())
    assert one.run(backend=backend, timeout=300)["a"] == "fine"
    backend.close()


class Awkward(sgl.BackendError):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def circular() -> OSError:
    first, second = OSError("first"), OSError("second")
    first.__cause__, second.__cause__ = second, first
    return first


@pytest.mark.parametrize("error", [Awkward(1, 2), Mute(), circular(), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_any_make_reach_their_readers(error: BaseException, stream: bool) -> None:
    state = one.run(backend=MockBackend(errors={0: error}), stream=stream)
    with pytest.raises(sgl.BackendError) as caught:
        state["a"]
    assert caught.value.__cause__ is error
    # The loop goes on.
    assert one.run(backend=MockBackend(["x"]))["a"] == "x"


def test_a_body_that_exits_ends_its_caller_and_not_the_loop() -> None:
    @sgl.function
    async def leaving(s: Any) -> None:
        sys.exit(7)

    with pytest.raises(SystemExit, match="7"):
        leaving.run()
    state = leaving.stream()
    with pytest.raises(SystemExit, match="7"):
        state.text()
    with pytest.raises(SystemExit, match="7"):
        leaving.run_batch([{}, {}], on_error="return")
    assert one.run(backend=MockBackend(["x"]))["a"] == "x"


class Unending(MockBackend):
    """A stream of one piece, behind which more is to come."""

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        yield Delta("one ")
        await never(call)


def test_a_stream_that_breaks_off_is_an_error_and_is_not_recorded(tmp_path: Path) -> None:
    whole = MockBackend(["one two three"])
    cut = FaultyBackend(whole, rate=1.0, kinds=["truncated"])
    state = one.stream(backend=cut, cache="rw", cache_dir=str(tmp_path))
    with pytest.raises(sgl.BackendError, match="broke off") as caught:
        list(state.text_iter("a"))
    assert caught.value.retryable
    state = one.stream(backend=Unending(), cache="rw", cache_dir=str(tmp_path))
    assert next(state.text_iter("a")) == "one "
    state.cancel()
    with pytest.raises(sgl.ProgramCancelled):
        state["a"]
    record = Record(tmp_path)
    assert len(record) == 0
    record.close()


def test_plain_iterators_are_streams_too() -> None:
    class Pieces:
        def __init__(self) -> None:
            self.left = [Delta("ab"), Delta("c", {"completion_tokens": 2})]

        def __aiter__(self) -> Pieces:
            return self

        async def __anext__(self) -> Delta:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop(0)

    backend = MockBackend()
    backend.stream = lambda call: Pieces()  # type: ignore[method-assign]
    assert "".join(one.stream(backend=backend).text_iter("a")) == "abc"


def test_a_backends_own_timeout_is_not_taken_for_a_budgets() -> None:
    backend = MockBackend(errors={0: TimeoutError("connect")})
    error = one.run(backend=backend, budget=sgl.Budget(seconds=60)).error()
    assert isinstance(error, sgl.Timeout)
    assert "connect" in str(error)
    error = one.run(backend=MockBackend(never), budget=sgl.Budget(seconds=0.02)).error()
    assert isinstance(error, sgl.BudgetExceeded)


def test_going_back_after_a_cancel_begins_anew() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "p "
        for _ in range(30):
            there = s.checkpoint()
            s += gen("a")
            s.cancel()
            s.rollback(there)
        s += gen("b")

    for _ in range(20):
        state = program.run(backend=MockBackend(lambda call: "x"))
        assert state["b"] == "x"
        assert state.text() == "p x"


def test_cancelling_what_is_idle_changes_nothing() -> None:
    for _ in range(200):
        state = one.run(backend=MockBackend(lambda call: "x"))
        assert state["a"] == "x"
        state.cancel()
        state += gen("b")
        assert state["b"] == "x"


def test_an_interrupt_while_a_program_begins_leaves_the_loop_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, interrupts = background()._loop, iter([KeyboardInterrupt()])

    def wake(action: Callable[[], object], *, whole: Any = loop.call_soon_threadsafe) -> Any:
        for interrupt in interrupts:
            raise interrupt
        return whole(action)

    monkeypatch.setattr(loop, "call_soon_threadsafe", wake)
    with pytest.raises(KeyboardInterrupt):
        one.run(backend=MockBackend(["x"]))
    assert one.run(backend=MockBackend(["y"]))["a"] == "y"


# -- bodies beside their callers ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_a_cancelled_program_does_not_go_on(is_async: bool, idle: Callable[[], int]) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    mock = MockBackend(lambda call: "x")
    errors: list[BaseException | None] = []

    @sgl.function
    def program(s: Any) -> None:
        begun.set()
        go_on.wait(300)
        s += gen("late")
        errors.append(s.error())
        errors.append(one.run().error())  # what it calls, too
        ended.set()

    if is_async:

        async def main() -> None:
            task = asyncio.ensure_future(program.arun(backend=mock))
            assert await asyncio.to_thread(begun.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
    else:
        state = program.stream(backend=mock)
        assert begun.wait(300)
        state.cancel()
    go_on.set()
    assert ended.wait(300)
    assert [type(error) for error in errors] == [sgl.ProgramCancelled] * 2
    assert mock.calls == []
    assert idle() == 0


def test_a_batch_that_is_left_stops_the_bodies_that_wait(idle: Callable[[], int]) -> None:
    waiting, seen = threading.Event(), list[BaseException]()

    async def reply(call: Call) -> str:
        waiting.set()
        return await never(call)

    mock = MockBackend(reply)

    @sgl.function
    def program(s: Any, bad: bool) -> None:
        if bad:
            waiting.wait(300)
            raise LookupError("mine")
        s += "slow" + gen("a")
        try:
            s["a"]
        except BaseException as error:
            seen.append(error)
            raise

    with pytest.raises(LookupError):
        program.run_batch([{"bad": True}, {"bad": False}], backend=mock)
    until = time.monotonic() + 60
    while not seen and time.monotonic() < until:
        time.sleep(0.002)
    assert [type(error) for error in seen] == [sgl.ProgramCancelled]
    assert idle() == 0
    assert mock.in_flight == 0


def test_an_async_stream_that_is_cancelled_ends(idle: Callable[[], int]) -> None:
    @sgl.function
    async def program(s: Any) -> None:
        await asyncio.sleep(1000)

    state = program.stream(backend=MockBackend())
    state.cancel()
    with pytest.raises(sgl.ProgramCancelled) as caught:
        state.text()
    assert caught.value.program is not None
    assert idle() == 0


def test_a_pool_drops_what_it_has_not_begun() -> None:
    pool, gate, done = Threads(1, "pool"), threading.Event(), list[int]()
    pool.submit(lambda: gate.wait(300))
    pool.submit(lambda: done.append(1))
    gate.set()
    pool.close(wait=True)
    assert done in ([], [1])
    pool = Threads(2, "pool")
    for number in range(50):
        pool.submit(functools.partial(done.append, number))
        pool.submit(lambda: 1 / 0)
    until = time.monotonic() + 60
    while len(done) < 50 and time.monotonic() < until:
        time.sleep(0.002)
    pool.close(wait=True)
    assert len(done) >= 50


# -- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("stream", [False, True])
def test_every_fault_ends(fault: str, stream: bool, idle: Callable[[], int]) -> None:
    patience = 60 if fault in HARMLESS else 0.05

    @sgl.function
    def program(s: Any) -> None:
        s += "p " + gen("a", timeout=patience) + sgl.select("b", ["x", "yes"], timeout=patience)

    said = "one two three four"
    backend = FaultyBackend(MockBackend([said], split=3), rate=1.0, kinds=[fault], delay_s=0.002)
    state = program.run(backend=backend, stream=stream)
    error = state.error()
    if fault in HARMLESS:
        assert error is None
        assert "".join(state.text_iter()) == state.text()
        assert state["a"] == said
    elif fault == "truncated" or error is not None:
        assert isinstance(error, sgl.ProgramError)
        assert error.source is not None
    if fault not in HARMLESS:
        assert error is not None
    assert backend.met[fault] > 0
    assert idle() == 0
    assert backend.in_flight == 0


def test_the_same_seed_meets_the_same_faults() -> None:
    def errors(seed: int) -> list[str]:
        backend = FaultyBackend(MockBackend(lambda call: "x"), seed=seed, rate=0.5, kinds=["error"])
        return [
            str(error and error.message) for error in (one.run(backend=backend).error() for _ in range(20))
        ]

    assert errors(1) == errors(1) != errors(2)
    with pytest.raises(sgl.BadProgram, match="unknown faults"):
        FaultyBackend(MockBackend(), kinds=["none such"])


# -- the interpreter's end ----------------------------------------------------------------------------------


PRELUDE = """
import asyncio, os, signal, sys, threading, time
import sglang_dsl as sgl
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
async def never(call):
    os.write(1, b"asked\\n")  # whole, where another thread writes too: print() writes text and newline apart
    await asyncio.Event().wait()
@sgl.function
def reads(s):
    s += sgl.gen("a")
    s["a"]
@sgl.function
def says(s):
    s += sgl.gen("a")
mock = sgl.MockBackend(never)
def tell_when(main=threading.main_thread().ident):
    while sys._current_frames()[main].f_code.co_name != "_acquired":
        time.sleep(0.001)
    os.write(1, b"waits\\n")
"""
ENDS = {
    "a stream whose body waits": "state = reads.stream(backend=mock); time.sleep(0.1); print('bye')",
    "a run": "state = says.run(backend=mock); time.sleep(0.1); print('bye')",
    "forks": "state = says.run(backend=mock); f = state.fork(3); f += sgl.gen('b'); print('bye')",
    "a fork of the process": (
        "print(says.run(backend=sgl.MockBackend(['x']))['a'], flush=True)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print(says.run(backend=sgl.MockBackend(['y']))['a'], flush=True); sys.exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0; print('bye')"
    ),
}


def script(body: str) -> list[str]:
    return [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(body)]


@pytest.mark.parametrize("what", sorted(ENDS))
def test_the_interpreter_ends_whatever_is_under_way(what: str) -> None:
    done = subprocess.run(script(ENDS[what]), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "bye" in done.stdout
    assert done.stderr == ""


def test_an_interrupt_while_waiting_ends_the_program() -> None:
    for call in ("reads.run(backend=mock)", "reads.run_batch([{}] * 3, backend=mock)"):
        # Not earlier: an interrupt inside of a callback of the interpreter's is told, and lost.
        code = script(f"threading.Thread(target=tell_when, daemon=True).start(); {call}")
        process = subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            said = {process.stdout.readline()}
            while said != {"asked\n", "waits\n"}:
                said.add(process.stdout.readline())
                assert "" not in said  # it has ended
            os.kill(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGINT or process.returncode == 130, errors
        assert "KeyboardInterrupt" in errors
        assert "never retrieved" not in errors
        assert "destroyed" not in errors
