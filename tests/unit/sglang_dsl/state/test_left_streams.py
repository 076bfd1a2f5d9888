"""Streams that nobody can read any more are stopped, function and generations; and in a stream every reader
gets what the function raised."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl import MockBackend, ProgramCancelled, ProgramState, gen
from sglang_dsl.concurrency.loop import background

MANY = 100_000


class Endless:
    """A model whose answer takes far longer than any test; counts the pieces that it told."""

    def __init__(self) -> None:
        self.told = 0
        self.backend = MockBackend(["x" * MANY] * 8, split=self._split, tokens="bytes", chunk_delay_s=0.001)

    def _split(self, text: str) -> Iterator[str]:
        for at in range(len(text)):
            self.told += 1
            yield text[at]


@sgl.function
def talk(s: Any) -> None:
    s += "p " + gen("a", max_tokens=MANY) + gen("b", max_tokens=MANY)


@sgl.function
async def talk_async(s: Any) -> None:
    s += "p " + gen("a", max_tokens=MANY)
    await s["a"]
    s += gen("b", max_tokens=MANY)


def breaks(backend: Any) -> None:
    for _ in talk.stream(backend=backend).text_iter("a"):
        break


def reads_once(backend: Any) -> None:
    state = talk.stream(backend=backend)
    assert next(state.text_iter())
    assert next(state.text_iter("a"))


def leaves_the_block(backend: Any) -> ProgramState:
    with talk.stream(backend=backend) as state:
        assert next(state.text_iter("a"))
    return state


def runs_in_a_block(backend: Any) -> ProgramState:
    with talk.run(backend=backend, stream=True) as state:
        assert next(state.text_iter("a"))
    return state


def fails_in_the_block(backend: Any) -> None:
    with contextlib.suppress(LookupError), talk.stream(backend=backend) as state:
        assert next(state.text_iter("a"))
        raise LookupError


def forks_are_dropped(backend: Any) -> None:
    forks = talk.stream(backend=backend).fork(2)
    forks += gen("c", max_tokens=MANY)


def in_a_circle(backend: Any) -> None:
    state = talk.stream(backend=backend)
    assert next(state.text_iter("a"))
    circle: list[Any] = [state]
    circle.append(circle)


async def breaks_async(backend: Any) -> None:
    async for _ in (await talk_async.astream(backend=backend)).text_iter("a"):
        break


async def leaves_the_block_async(backend: Any) -> Any:
    async with talk_async.astream(backend=backend) as state:
        async for _ in state.text_iter("a"):
            break
    return state


async def awaits_and_leaves_the_block(backend: Any) -> Any:
    async with await talk_async.astream(backend=backend) as state:
        assert await anext(state.text_iter())
    return state


async def blocks_on_any_loop(backend: Any) -> Any:
    async with talk.stream(backend=backend) as state:
        assert await anext(state.text_async_iter())
    return state


async def is_cancelled(backend: Any) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        state = await talk_async.astream(backend=backend)
        async for _ in state.text_iter("a"):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def times_out(backend: Any) -> None:
    state = await talk_async.astream(backend=backend)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            async for _ in state.text_iter("b"):  # which is not begun: "a" takes for ever
                pass


WAYS = [
    breaks,
    reads_once,
    leaves_the_block,
    runs_in_a_block,
    fails_in_the_block,
    forks_are_dropped,
    in_a_circle,
    breaks_async,
    leaves_the_block_async,
    awaits_and_leaves_the_block,
    blocks_on_any_loop,
    is_cancelled,
    times_out,
]


def leave(way: Callable[[Any], Any], backend: Any) -> Any:
    return asyncio.run(way(backend)) if asyncio.iscoroutinefunction(way) else way(backend)


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_is_left_is_stopped(way: Callable[[Any], Any], idle: Callable[[], int]) -> None:
    model = Endless()
    state = leave(way, model.backend)
    assert idle() == 0
    assert model.backend.in_flight == 0
    assert model.told < MANY
    if state is not None:  # it says why it has no more to say
        error = state.blocking.error() if isinstance(state, sgl.AsyncProgramState) else state.error()
        assert isinstance(error, ProgramCancelled)


def test_a_stream_whose_state_is_held_goes_on(idle: Callable[[], int]) -> None:
    state = talk.stream(backend=MockBackend(["one two three", "x"], split=1, chunk_delay_s=0.001))
    for _ in state.text_iter("a"):
        break
    gc.collect()
    assert state["a"] == "one two three"
    assert state["b"] == "x"


def test_a_stream_goes_on_while_an_iterator_or_a_fork_of_it_is_held() -> None:
    pieces = talk.stream(backend=MockBackend(["one two", "x"], split=1, chunk_delay_s=0.001)).text_iter()
    gc.collect()
    assert "".join(pieces) == "p one twox"
    fork = talk.stream(backend=MockBackend(["one", "x", "c"], split=1, chunk_delay_s=0.001)).fork(2)[0]
    gc.collect()
    fork += gen("c")
    assert fork["c"] in ("one", "x", "c")


def test_what_the_function_asks_for_after_that_is_not_done(idle: Callable[[], int]) -> None:
    left, ended = threading.Event(), threading.Event()
    seen: list[BaseException] = []

    @sgl.function
    def program(s: Any) -> None:
        s += gen("a", max_tokens=2)
        assert s["a"]
        left.wait(300)
        try:
            s += gen("b", max_tokens=2)
            inner = talk.run()
            s["b"], inner["a"]
        except ProgramCancelled as error:
            seen.append(error)
        finally:
            ended.set()

    backend = MockBackend()
    assert program.stream(backend=backend)["a"]
    background().run(asyncio.sleep(0), 60)  # the finalizer's order has been heard
    left.set()
    assert ended.wait(300)
    assert idle() == 0
    assert len(backend.calls) == 1
    assert len(seen) == 1


def test_what_a_finished_stream_said_stays_after_its_block() -> None:
    with talk.stream(backend=MockBackend(["a", "b"])) as state:
        assert state["b"] == "b"
        state.sync()
    assert state["a"] == "a"
    assert state.text() == "p ab"


def test_the_functions_result_is_there() -> None:
    program = sgl.function(lambda s: "returned")
    state = program.stream(backend=MockBackend())
    state.sync()
    assert state.ret_value == "returned"


def raises(s: Any) -> None:
    s += "text " + gen("a", max_tokens=MANY)
    next(s.text_iter("a"))
    raise LookupError("mine")


async def raises_async(s: Any) -> None:
    s += "text " + gen("a", max_tokens=MANY)
    async for _ in s.text_iter("a"):
        break
    raise LookupError("mine")


@pytest.mark.parametrize("body", [raises, raises_async])
@pytest.mark.parametrize(
    "read",
    [
        lambda s: s["a"],
        lambda s: s.raw("a"),
        lambda s: list(s.text_iter("a")),
        lambda s: list(s.text_iter()),
        lambda s: list(s.object_iter("a")),
        lambda s: s["never"],
        lambda s: s.text(),
        lambda s: s.sync(),
        lambda s: s.get_meta_info("a"),
    ],
)
def test_readers_get_what_the_function_raised(body: Any, read: Any, idle: Callable[[], int]) -> None:
    """Also those of a generation that was under way then."""
    model = Endless()
    state = sgl.function(body).stream(backend=model.backend)
    with pytest.raises(LookupError, match="mine"):
        read(state)
    error = state.error()
    assert isinstance(error, LookupError)
    assert str(error) == "mine"
    assert idle() == 0
    assert model.told < MANY


def test_readers_on_an_event_loop_get_it_too() -> None:
    async def main() -> None:
        model = Endless()
        state = await sgl.function(raises_async).astream(backend=model.backend)
        with pytest.raises(LookupError, match="mine"):
            await state["a"]
        with pytest.raises(LookupError, match="mine"):
            [piece async for piece in state.text_iter()]
        with pytest.raises(LookupError, match="mine"):
            [piece async for piece in state.text_iter("a")]
        assert isinstance(await state.error(), LookupError)

    asyncio.run(main())


def test_what_was_said_before_is_there() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += gen("a")
        assert s["a"] == "done"
        s += gen("b", max_tokens=MANY)
        raise SystemExit("bye")

    state = program.stream(backend=MockBackend(["done", "x" * MANY], split=1, chunk_delay_s=0.001))
    assert isinstance(state.error(), SystemExit)
    assert state["a"] == "done"
    with pytest.raises(SystemExit, match="bye"):
        state["b"]


@sgl.function
def asks(s: Any) -> None:
    s += gen("a")


def test_a_second_cancel_lets_the_first_one_end(idle: Callable[[], int]) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def reply(call: Any) -> str:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            for _ in range(20):  # as a connection takes its time to close
                await asyncio.sleep(0.001)
            ended.set()
        return ""

    for start in (asks.run, asks.stream):
        state = start(backend=MockBackend(reply))
        assert begun.wait(300)
        for _ in range(5):
            state.cancel()
            background().run(asyncio.sleep(0), 60)
        del state
        assert idle() == 0
        assert ended.wait(0)
        begun.clear(), ended.clear()
