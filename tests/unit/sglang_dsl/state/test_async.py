"""Async programs: the same words, reading awaited; on any event loop, from sync code, in batches,
cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.errors import BadProgram, MissingVariable, ProgramCancelled, ProgramError
from sglang_dsl.state.async_state import AsyncProgramState

NEVER_S = 3600.0


@sgl.function
async def talk(s: Any, question: str) -> str:
    s += sgl.system("Be brief.")
    async with s.user():
        s += question
    s += sgl.assistant(sgl.gen("answer", max_tokens=8))
    answer = await s["answer"]
    async with s.fork(2) as forks:
        forks += lambda index: sgl.user(f"{answer} {index}")
        forks += sgl.assistant(sgl.gen("more", max_tokens=8))
    s += sgl.user("Pick" + sgl.select("pick", ["a", "b"]))
    return str(answer) + str(await s.get("pick"))


@sgl.function
def talk_sync(s: Any, question: str) -> str:
    s += sgl.system("Be brief.")
    with s.user():
        s += question
    s += sgl.assistant(sgl.gen("answer", max_tokens=8))
    answer = s["answer"]
    forks = s.fork(2)
    forks += lambda index: sgl.user(f"{answer} {index}")
    forks += sgl.assistant(sgl.gen("more", max_tokens=8))
    forks.join()
    s += sgl.user("Pick" + sgl.select("pick", ["a", "b"]))
    return str(answer) + str(s.get("pick"))


def facts(state: Any) -> Any:
    return state["answer"], state["more"], state["pick"], state.text(), state.messages(), state.ret_value


async def facts_async(state: AsyncProgramState) -> Any:
    text, messages = await state.text(), await state.messages()
    return await state["answer"], await state["more"], await state["pick"], text, messages, state.ret_value


def test_both_faces_of_both_kinds_say_the_same() -> None:
    wanted = facts(talk_sync.run("Hello", backend=sgl.MockBackend()))
    assert facts(talk.run("Hello", backend=sgl.MockBackend())) == wanted
    for program in (talk, talk_sync):
        assert asyncio.run(run_async(program, "Hello")) == wanted
    assert talk.trace("Hello").body == talk_sync.trace("Hello").body


async def run_async(program: Any, question: str) -> Any:
    state = await program.arun(question, backend=sgl.MockBackend())
    usage = await state.usage()
    assert usage["calls"] == 4
    assert (await state.get_meta_info("answer"))["finish_reason"]
    return await facts_async(state)


def test_the_body_runs_on_the_callers_loop() -> None:
    where: list[Any] = []

    @sgl.function
    async def program(s: Any) -> None:
        where.append((threading.get_ident(), asyncio.get_running_loop()))
        s += "a" + sgl.gen("x", max_tokens=4)
        await asyncio.sleep(0)

    async def main() -> None:
        await program(backend=sgl.MockBackend())
        assert where == [(threading.get_ident(), asyncio.get_running_loop())]

    asyncio.run(main())
    # From sync code it runs on the language's own loop.
    program.run(backend=sgl.MockBackend())
    assert where[1][0] != threading.get_ident()


def test_a_forgotten_await_is_told() -> None:
    @sgl.function
    async def program(s: Any) -> None:
        s += "a" + sgl.gen("x", max_tokens=4)
        s += f"it was {s['x']}"

    with pytest.raises(BadProgram, match=r"s\['x'\] must be awaited"):
        program.run(backend=sgl.MockBackend())

    @sgl.function
    async def other(s: Any) -> None:
        s += "a" + sgl.gen("x", max_tokens=4)
        s += s["x"]

    with pytest.raises(BadProgram, match="must be awaited"):
        other.run(backend=sgl.MockBackend())


def test_nested_programs_inherit_backend_and_defaults() -> None:
    @sgl.function
    async def inner(s: Any) -> None:
        s += "in" + sgl.gen("x")

    @sgl.function
    def plain(s: Any) -> None:
        s += "plain" + sgl.gen("x")

    @sgl.function
    async def outer(s: Any) -> Any:
        one, two, three = await asyncio.gather(inner(), inner(), plain.arun())
        return [await one["x"], await two["x"], await three["x"]]

    backend = sgl.MockBackend()
    state = outer.run(backend=backend, max_tokens=2)
    assert len(state.ret_value) == 3
    assert [call.sampling.max_new_tokens for call in backend.calls] == [2, 2, 2]


def test_errors_are_raised_where_values_are_awaited() -> None:
    backend = sgl.MockBackend(errors={0: RuntimeError("gone")})

    @sgl.function
    async def program(s: Any) -> str:
        s += "a" + sgl.gen("x")
        try:
            await s["x"]
        except ProgramError as error:
            return str(error)
        return "no error"

    assert "gone" in program.run(backend=backend).ret_value
    assert "test_async.py" in program.run(backend=sgl.MockBackend(errors={0: RuntimeError("gone")})).ret_value

    @sgl.function
    async def missing(s: Any) -> None:
        await s["nothing"]

    with pytest.raises(MissingVariable, match="nothing"):
        asyncio.run(missing.arun(backend=backend))

    @sgl.function
    async def broken(s: Any) -> None:
        s += "a" + sgl.gen("x")
        raise ValueError("the body's own")

    with pytest.raises(ValueError, match="the body's own"):
        asyncio.run(broken.arun(backend=sgl.MockBackend()))


def test_streams_in_async_code_lose_nothing_with_several_readers(idle: Callable[[], int]) -> None:
    backend = sgl.MockBackend(["one two three four"] * 8, split=3, chunk_delay_s=0.001)

    @sgl.function
    async def program(s: Any) -> None:
        s += "a: " + sgl.gen("x", max_tokens=20)
        await asyncio.sleep(0.01)
        s += " b: " + sgl.gen("y", max_tokens=20)

    async def read(state: AsyncProgramState, name: str | None) -> str:
        return "".join([piece async for piece in state.text_iter(name)])

    async def main() -> None:
        for _ in range(4):
            state = await program.astream(backend=backend)
            names = [None, "x", "y", "x", None, "y"]
            texts = await asyncio.gather(*(read(state, name) for name in names))
            assert texts[1:4] == ["one two three four"] * 3
            assert texts[0] == texts[4] == await state.text()
            assert await state["y"] == "one two three four"

    asyncio.run(main())
    assert idle() == 0


def test_an_exception_in_an_async_with_cancels_the_forks(idle: Callable[[], int]) -> None:
    backend = sgl.MockBackend(delay_s=NEVER_S)

    @sgl.function
    async def program(s: Any) -> None:
        s += "a"
        async with s.fork(3) as forks:
            forks += sgl.gen("x")
            await asyncio.sleep(0.01)
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        asyncio.run(program.arun(backend=backend))
    assert idle() == 0
    assert backend.in_flight == 0


def test_cancelling_a_program_cancels_what_it_asked_for(idle: Callable[[], int]) -> None:
    backend = sgl.MockBackend(delay_s=NEVER_S)

    @sgl.function
    async def program(s: Any) -> None:
        s += "a" + sgl.gen("x")
        await s["x"]

    async def main() -> None:
        task = asyncio.create_task(program.arun(backend=backend))
        while not backend.in_flight:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await program.arun(backend=backend)

    asyncio.run(main())
    assert idle() == 0
    assert backend.in_flight == 0


def test_cancel_reaches_readers() -> None:
    backend = sgl.MockBackend(delay_s=NEVER_S)

    @sgl.function
    async def program(s: Any) -> None:
        s += "a" + sgl.gen("x")

    async def main() -> None:
        state = await program.arun(backend=backend)
        state.cancel()
        with pytest.raises(ProgramCancelled):
            await state["x"]
        assert isinstance(await state.error(), ProgramCancelled)

    asyncio.run(main())


# -- batches -------------------------------------------------------------------------------------------------


@sgl.function
async def echo(s: Any, text: str) -> str:
    s += text + sgl.gen("x", max_tokens=4)
    return text + await s["x"]


def endless(taken: list[int]) -> Iterator[dict[str, str]]:
    number = 0
    while True:
        taken.append(number)
        yield {"text": f"{number} "}
        number += 1


def test_sync_batches_of_async_programs_use_no_threads(idle: Callable[[], int]) -> None:
    many = asyncio.Event()

    async def reply(call: Any) -> str:
        if backend.in_flight > 50:
            many.set()
        await asyncio.wait_for(many.wait(), 60)  # the first ones, until there are so many at once
        return str(call.prompt.plain_text.strip())

    backend = sgl.MockBackend(reply)
    before = threading.active_count()
    most = 0

    @sgl.function
    async def program(s: Any, text: str) -> None:
        nonlocal most
        s += text + sgl.gen("x", max_tokens=4)
        await s["x"]
        most = max(most, threading.active_count())

    items = [{"text": f"{number} "} for number in range(300)]
    states = program.run_batch(items, num_threads=200, backend=backend)
    assert [state["x"] for state in states] == [str(number) for number in range(300)]
    assert [state.index for state in states] == list(range(300))
    assert most <= before + 2  # the language's loop, and nothing per item
    assert backend.most_in_flight > 50
    assert idle() == 0


@pytest.mark.parametrize("program", [echo, talk_sync])
def test_async_batches_are_lazy_bounded_and_ordered(program: Any, idle: Callable[[], int]) -> None:
    taken: list[int] = []
    name = "text" if program is echo else "question"

    async def main() -> None:
        backend = sgl.MockBackend()
        items = ({name: item["text"]} for item in endless(taken))
        seen = []
        async for state in program.arun_batch(items, num_threads=4, backend=backend):
            seen.append(state.blocking.index)
            if len(seen) == 10:
                break
        assert seen == list(range(10))
        assert len(taken) <= 10 + 4 * 4 + 1

    asyncio.run(main())
    assert idle() == 0


def test_async_batches_take_async_items_and_keep_errors_apart() -> None:
    async def items() -> AsyncIterator[tuple[str]]:
        for text in ("a", "bad", "c"):
            await asyncio.sleep(0)
            yield (text,)

    @sgl.function
    async def program(s: Any, text: str) -> None:
        if text == "bad":
            raise ValueError("this one")
        s += text + sgl.gen("x", max_tokens=4)

    async def main() -> None:
        backend = sgl.MockBackend()
        got = [one async for one in program.arun_batch(items(), on_error="return", backend=backend)]
        assert [type(one).__name__ for one in got] == ["AsyncProgramState", "ValueError", "AsyncProgramState"]
        with pytest.raises(ValueError, match="this one"):
            async for _ in program.arun_batch(items(), backend=backend):
                pass

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_unordered_batches_give_results_as_they_end(kind: str) -> None:
    seen: list[int] = []

    async def reply(call: Any) -> str:
        while call.prompt.plain_text == "0 " and len(seen) < 5:
            await asyncio.sleep(0.002)
        return "x"

    items = [{"text": f"{number} "} for number in range(6)]
    backend = sgl.MockBackend(reply)
    if kind == "sync":
        batch = echo.run_batch(items, ordered=False, generator_style=True, backend=backend)
        for state in batch:
            seen.append(state.index)  # noqa: PERF401 - the reply looks at it meanwhile
    else:

        async def main() -> None:
            async for state in echo.arun_batch(items, ordered=False, backend=backend):
                seen.append(state.blocking.index)  # noqa: PERF401 - as above

        asyncio.run(main())
    assert sorted(seen) == list(range(6))
    assert seen[-1] == 0


def test_tracing_follows_async_bodies_without_a_loop() -> None:
    program = talk.trace()
    assert program.arguments == ("question",)
    assert program.variables == ("answer", "more", "pick")

    @sgl.function
    async def sleeper(s: Any) -> None:
        await asyncio.sleep(0)

    with pytest.raises(BadProgram, match="awaits something other than its state"):
        sleeper.trace()

    @sgl.function
    async def later(s: Any) -> None:
        await asyncio.sleep(1)

    with pytest.raises(BadProgram, match=r"cannot be traced without a run: .* no running event loop"):
        later.trace()


@pytest.mark.parametrize(
    "use",
    [
        lambda v: v == "yes",
        lambda v: "yes" == v,  # noqa: SIM300
        lambda v: v != "yes",
        lambda v: v < "z",
        lambda v: "a" >= v,  # noqa: SIM300
        lambda v: bool(v),
        lambda v: not v,
        lambda v: v and 1,
        lambda v: "ye" in v,
        lambda v: v in ["yes", "no"],
        lambda v: v in {"yes", "no"},
        lambda v: {"yes": 1}.get(v),
        lambda v: {v: 1},
        lambda v: hash(v),
        lambda v: list(v),
        lambda v: v[0],
        lambda v: len(v),
        lambda v: int(v) + float(v),
        lambda v: v + "!",
        lambda v: "!" + v,
        lambda v: v * 2,
        lambda v: v.strip(),
        lambda v: f"{v}",
        lambda v: "%s" % v,  # noqa: UP031
        lambda v: str(v),
        lambda v: range(3)[v],
        lambda v: sgl.gen("x") + str(v),
    ],
)
def test_a_value_that_is_not_awaited_is_told_with_its_line(use: Any) -> None:
    async def program(s: Any) -> None:
        s += sgl.gen("a")
        with pytest.raises(BadProgram, match=r"await s\['a'\], at .*test_async\.py:\d+"):
            use(s["a"])
        assert await s["a"] == "yes"

    assert asyncio.run(sgl.function(program).arun(backend=sgl.MockBackend(["yes"]))) is not None


def test_values_can_be_gathered_and_asked_what_they_are() -> None:
    async def program(s: Any) -> None:
        s += sgl.gen("a") + sgl.gen("b")
        one = s["a"]
        assert await asyncio.gather(one, s["b"], one) == ["yes", "no", "yes"]
        assert [await each for each in asyncio.as_completed([s["a"]])] == ["yes"]
        assert await asyncio.wait_for(s["b"], 60) == "no"
        assert not hasattr(one, "strip")
        assert "to be awaited" in repr(one)

    asyncio.run(sgl.function(program).arun(backend=sgl.MockBackend(["yes", "no"])))
