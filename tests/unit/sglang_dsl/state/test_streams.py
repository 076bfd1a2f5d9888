"""Streaming: nothing lost, nothing repeated, every end reached."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl import BackendError, MissingVariable, MockBackend, gen, select
from sglang_dsl.concurrency import loop
from sglang_dsl.concurrency.loop import background
from sglang_dsl.settings import global_config


@sgl.function
def chat(s: Any, question: str = "q") -> str:
    s += "intro " + sgl.user(question)
    s += sgl.assistant("So: " + gen("a") + " and " + gen("b"))
    s += select("c", ["yes", "no"])
    return "returned"


CUTS = st.one_of(st.integers(1, 7), st.lists(st.integers(0, 40), max_size=8))


@given(st.text(max_size=40), st.text(max_size=40), CUTS)
def test_pieces_add_up_however_the_text_is_cut(a: str, b: str, cuts: Any) -> None:
    state = chat.run(backend=MockBackend([a, b], split=cuts, scores={"yes": -1.0, "no": -2.0}), stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text()
    assert all(pieces)
    assert state.text() == f"intro USER: q\nASSISTANT: So: {a} and {b}\nyes"
    assert "".join(state.text_iter("a")) == a == state["a"]
    assert "".join(state.text_iter("b")) == b == state["b"]
    assert list(state.text_iter("c")) == ["yes"]
    # A second reader starts from the beginning.
    assert list(state.text_iter()) == pieces


@given(st.text(min_size=1, max_size=30), CUTS)
def test_streaming_says_what_running_says(text: str, cuts: Any) -> None:
    streamed = chat.run(backend=MockBackend([text, "x"], split=cuts), stream=True)
    whole = chat.run(backend=MockBackend([text, "x"]))
    assert streamed.text() == whole.text()
    assert streamed.messages() == whole.messages()
    assert streamed.usage() == whole.usage()
    assert streamed.get_meta_info("a") == whole.get_meta_info("a")


def test_pieces_come_while_the_text_is_still_written() -> None:
    seen = threading.Event()

    def split(text: str) -> Iterator[str]:
        yield text[:4]
        # The rest is only written once somebody has the beginning.
        assert seen.wait(300)
        yield text[4:]

    mock = MockBackend(["one two three four"], split=split)

    @sgl.function
    def program(s: Any) -> None:
        s += "p: " + gen("a")

    state = program.stream(backend=mock)
    pieces = state.text_iter("a")
    assert next(pieces) == "one "
    seen.set()
    assert "".join(pieces) == "two three four"


def test_without_stream_there_is_one_piece() -> None:
    state = chat.run(backend=MockBackend(["long text here", "b"], split=1))
    assert list(state.text_iter("a")) == ["long text here"]
    assert list(state.text_iter()) == [state.text()]


def test_async_readers_on_another_loop() -> None:
    replies, go_on = iter(["abc def", "x"]), threading.Event()

    async def reply(call: Any) -> str:
        while not go_on.is_set():
            await asyncio.sleep(0.001)
        return next(replies)

    async def read() -> tuple[str, list[Any], str, Any]:
        state = chat.run(backend=MockBackend(reply, split=2, chunk_delay_s=0.001), stream=True)

        async def tick() -> None:
            for _ in range(4):
                await asyncio.sleep(0)
            go_on.set()  # nothing is said before the reader's loop was free for others

        ticker = asyncio.create_task(tick())
        one = [piece async for piece in state.text_async_iter("a", return_meta_data=True)]
        all_pieces = [piece async for piece in state.text_async_iter()]
        await ticker
        return "".join(all_pieces), one, state.text(), state.get_meta_info("a")

    whole, one, text, meta = asyncio.run(asyncio.wait_for(read(), 60))
    assert whole == text
    assert "".join(piece for piece, _ in one) == "abc def"
    assert all(piece for piece, _ in one), "what is said after the last text is no piece"
    assert meta["completion_tokens"] == 2
    assert one[0] == ("ab", {})

    async def plain() -> list[Any]:
        state = chat.run(backend=MockBackend(["abc", "x"]))
        return [p async for p in state.text_async_iter()] + [p async for p in state.text_async_iter("a")]

    assert asyncio.run(plain())[1] == "abc"


def test_an_error_in_the_body_reaches_every_reader() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "text " + gen("a")
        assert s["a"] == "fine"
        raise LookupError("mine")

    for read in (
        lambda s: list(s.text_iter()),
        lambda s: list(s.text_iter("never")),
        lambda s: s["never"],
        lambda s: s.text(),
        lambda s: s.sync(),
    ):
        state = program.run(backend=MockBackend(["fine"], chunk_delay_s=0.01), stream=True)
        with pytest.raises(LookupError, match="mine"):
            read(state)
        assert state["a"] == "fine"


def test_an_error_of_the_backend_ends_the_iteration() -> None:
    for fail_after in (0, 2):
        mock = MockBackend(["abcdefgh", "x"], split=2, errors={0: OSError("cut")}, fail_after=fail_after)
        state = chat.run(backend=mock, stream=True)
        got: list[str] = []
        with pytest.raises(BackendError, match="cut") as caught:
            got.extend(state.text_iter("a"))
        assert caught.value.variable == "a"
        whole: list[str] = []
        with pytest.raises(BackendError, match="cut"):
            whole.extend(state.text_iter())
        assert "".join(whole).startswith("intro USER: q\nASSISTANT: So: ")
        with pytest.raises(BackendError, match="cut"):
            list(state.text_iter("b"))


def test_a_reader_of_a_name_waits_for_it_and_ends_when_nobody_sets_it() -> None:
    gate = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        gate.wait(300)
        s += gen("late")

    state = program.run(backend=MockBackend(["here"]), stream=True)
    threading.Timer(0.05, gate.set).start()
    assert "".join(state.text_iter("late")) == "here"
    with pytest.raises(MissingVariable):
        state["nothing"]


def test_a_body_may_read_its_own_stream() -> None:
    seen: list[str] = []

    @sgl.function
    def program(s: Any) -> None:
        s += "p " + gen("a")
        seen.extend(s.text_iter("a"))
        seen.append("|")
        seen.extend(s.text_iter())
        s += gen("b")

    state = program.run(backend=MockBackend(["xy", "z"], split=1), stream=True)
    assert "".join(state.text_iter()) == "p xyz"
    assert "".join(seen) == "xy|p xy"


def test_a_streamed_state_can_be_continued() -> None:
    state = chat.run(backend=MockBackend(["a", "b", "more text"], split=2), stream=True)
    assert state["c"]
    before = state.text()
    state += " then " + gen("d")
    assert list(state.text_iter("d")) == ["mo", "re", " t", "ex", "t"]
    assert "".join(state.text_iter()) == before + " then more text"


def test_forks_stream_their_own_text() -> None:
    @sgl.function
    def program(s: Any) -> Any:
        s += "p "
        forks = s.fork(2)
        forks += lambda i: f"{i}: " + gen("x")
        return forks

    state = program.run(backend=MockBackend(["left", "right"], split=2), stream=True)
    state.sync()
    assert ["".join(f.text_iter()) for f in state.ret_value] == ["p 0: left", "p 1: right"]
    assert list(state.ret_value[0].text_iter("x")) == ["le", "ft"]


def test_several_samples_in_a_stream_come_whole() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "p " + gen("x", n=2)

    state = program.run(backend=MockBackend([["one", "two"]]), stream=True)
    assert list(state.text_iter()) == ["p ", "one"]
    assert state["x"] == ["one", "two"]


def test_run_returns_at_once_and_wrong_arguments_are_refused_there() -> None:
    returned = threading.Event()

    @sgl.function
    def program(s: Any) -> bool:
        return returned.wait(300)

    state = program.run(stream=True)
    returned.set()
    state.sync()
    assert state.ret_value is True
    with pytest.raises(TypeError):
        chat.run(wrong=1, stream=True)


def test_nested_streams_do_not_starve_the_bounded_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    # Pools of this test alone: the small ones serve no other test, nor theirs this one.
    monkeypatch.setattr(
        "sglang_dsl.concurrency.loop._make_pool", functools.cache(loop._make_pool.__wrapped__)
    )
    global_config.max_threads = 2

    @sgl.function
    def program(s: Any, depth: int) -> None:
        if depth:
            s += "".join(program.run(depth - 1, stream=True).text_iter()) + str(depth)

    states = [program.run(3, stream=True) for _ in range(8)]
    assert [s.text() for s in states] == ["123"] * 8
    for depth in range(4):
        pool = loop._make_pool(depth)
        assert len(pool._threads) <= 2
        pool.close(wait=True)


def test_a_reader_that_leaves_stops_nothing(idle: Callable[[], int]) -> None:
    mock = MockBackend(["a b c d", "x"], split=1, chunk_delay_s=0.001)
    state = chat.run(backend=mock, stream=True)
    pieces = state.text_iter("a")
    next(pieces)
    del pieces
    assert state["b"] == "x"
    assert idle() == 0
    assert background().task_count == 0


def test_a_reader_who_comes_late_gets_what_the_function_raised() -> None:
    @sgl.function
    def breaks(s: Any) -> None:
        s += "text"
        raise LookupError("of the function")

    state = breaks.stream(backend=MockBackend())
    with pytest.raises(LookupError):
        state.sync()
    for read in (lambda: list(state.text_iter()), lambda: asyncio.run(_all(state))):
        with pytest.raises(LookupError):
            read()


async def _all(state: sgl.ProgramState) -> list[str]:
    return [piece async for piece in state.text_async_iter()]
