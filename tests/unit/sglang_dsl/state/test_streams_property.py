"""Streams under any chunking, with any number of readers of any kind, some of which leave or are cancelled:
each one that stays gets the whole text, once."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl import MockBackend, gen
from sglang_dsl.concurrency.loop import background
from tests.exploring import tries

CUTS = st.one_of(
    st.integers(1, 7),
    st.lists(st.integers(0, 40), max_size=8),
    st.integers(0, 10_000).map(lambda seed: lambda text: broken(text, random.Random(seed))),
)
NAMES = st.sampled_from([None, "a", "b", "c"])
LIVES = st.sampled_from(["whole", "leaves", "cancelled"])


def broken(text: str, rng: random.Random) -> list[str]:
    """Pieces of any size, empty ones too."""
    pieces, at = [], 0
    while at < len(text):
        size = rng.randint(0, 5)
        pieces.append(text[at : at + size])
        at += size
    return pieces


@dataclass(frozen=True)
class Reader:
    """Reads `name` (None: the whole text) in a thread or on an event loop; one that leaves, or is cancelled,
    does so after so many pieces, or turns of its loop."""

    name: str | None
    kind: str
    life: str
    after: int


READERS = st.lists(
    st.builds(Reader, NAMES, st.sampled_from(["thread", "loop"]), LIVES, st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


@sgl.function
def said(s: Any) -> None:
    s += "intro " + sgl.user("q")
    with s.assistant():
        s += "So: " + gen("a") + " and " + gen("b")
    with s.var_scope("c"):
        s += "[" + gen("d") + "]"


@sgl.function
async def said_async(s: Any) -> None:
    s += "intro " + sgl.user("q")
    with s.assistant():
        s += "So: " + gen("a") + " and " + gen("b")
    with s.var_scope("c"):
        s += "[" + gen("d") + "]"


def in_thread(state: Any, reader: Reader, found: list[Any]) -> None:
    pieces = []
    for piece in state.text_iter(reader.name):
        assert piece
        pieces.append(piece)
        if reader.life != "whole" and len(pieces) > reader.after:
            return
    found.append((reader, "".join(pieces)))


async def on_loop(state: Any, reader: Reader, found: list[Any]) -> None:
    async def read(text: list[str]) -> None:
        async for piece in state.text_async_iter(reader.name):
            assert piece
            text.append(piece)
            if reader.life == "leaves" and len(text) > reader.after:
                return

    pieces: list[str] = []
    task = asyncio.ensure_future(read(pieces))
    if reader.life == "cancelled":
        for _ in range(reader.after):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return
    await task
    if reader.life == "whole":
        found.append((reader, "".join(pieces)))


def begin(state: Any, readers: list[Reader], found: list[Any]) -> list[threading.Thread]:
    """Those of an event loop have one each."""

    def read(reader: Reader) -> None:
        if reader.kind == "thread":
            in_thread(state, reader, found)
        else:
            asyncio.run(on_loop(state, reader, found))

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    return threads


@settings(max_examples=tries(60))
@given(st.text(max_size=40), st.text(max_size=20), CUTS, READERS, READERS, st.booleans())
def test_every_reader_gets_everything_once(
    a: str, b: str, cuts: Any, early: list[Reader], late: list[Reader], is_async: bool
) -> None:
    program = said_async if is_async else said
    found: list[Any] = []
    state = program.stream(backend=MockBackend([a, b, "end"], split=cuts))
    threads = begin(state, early, found)
    threads += begin(state, late, found)
    whole = f"intro USER: q\nASSISTANT: So: {a} and {b}\n[end]"
    assert state.text() == whole
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    expected = {None: whole, "a": a, "b": b, "c": "[end]"}
    for reader, text in found:
        assert text == expected[reader.name], reader
    staying = [reader for reader in early + late if reader.life == "whole"]
    # One that would leave may have come to the end first.
    assert len([reader for reader, _ in found if reader.life == "whole"]) == len(staying)
    # Who comes last gets the same.
    assert "".join(state.text_iter()) == whole


@settings(max_examples=tries(40))
@given(st.text(min_size=3, max_size=60), st.integers(1, 3), st.integers(0, 12), READERS, st.booleans())
def test_what_was_read_before_a_cancel_is_a_beginning(
    a: str, size: int, after: int, readers: list[Reader], is_async: bool
) -> None:
    program = said_async if is_async else said
    mock = MockBackend([a, "b", "c"], split=size)
    state = program.stream(backend=mock)
    read, failed = dict[int, str](), list[BaseException]()

    def reader(index: int) -> None:
        read[index] = ""
        try:
            for piece in state.text_iter("a"):
                read[index] += piece
                if index == 0 and len(read[index]) > after:
                    state.cancel()
        except sgl.ProgramError as error:
            failed.append(error)

    threads = [threading.Thread(target=reader, args=(index,)) for index in range(len(readers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    # All readers stop at the same place, with the same outcome.
    assert len(set(read.values())) == 1
    assert a.startswith(read[0])
    assert len(failed) in (0, len(readers))
    if not failed:
        assert read[0] == a
    assert all(isinstance(error, sgl.ProgramCancelled) for error in failed)
    state.error()
    background().run(asyncio.sleep(0))
    assert mock.in_flight == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=tries(40))
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), CUTS, st.integers(1, 3))
def test_objects_grow_for_every_reader(value: dict[str, Any], cuts: Any, count: int) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += gen("x", json_schema={"type": "object"})

    state = program.stream(backend=MockBackend([json.dumps(value)], split=cuts))
    ends: list[Any] = []

    def read() -> None:
        *_, last = state.object_iter("x")
        ends.append(last)

    async def read_async() -> None:
        ends.append([value async for value in state.object_async_iter("x")][-1])

    work: list[Callable[[], Any]] = [read] * count + [lambda: asyncio.run(read_async())]
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert [json.dumps(end) for end in ends] == [json.dumps(value)] * (count + 1)


@settings(max_examples=tries(60))
@given(st.text("ab</think>\n ", max_size=30), st.text("cd<think> ", max_size=30), CUTS)
def test_thoughts_and_answers_are_split_alike_however_they_are_cut(
    thought: str, answer: str, cuts: Any
) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("q")
        s += sgl.assistant(sgl.separate_reasoning(gen("x"), model_type="deepseek-r1"))

    reply = f"<think>{thought}</think>{answer}"
    whole = program.run(backend=MockBackend([reply]))
    state = program.stream(backend=MockBackend([reply], split=cuts))
    for name in ("x", "x_reasoning_content"):
        assert state[name] == whole[name]
        assert "".join(state.text_iter(name)) == state[name]
    assert "".join(state.text_iter()) == state.text() == whole.text()
