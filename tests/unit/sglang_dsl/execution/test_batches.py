"""run_batch: order, bounds, laziness, errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl import BackendError, BadProgram, MockBackend, ProgramState, gen
from sglang_dsl.concurrency.streams import Signal
from sglang_dsl.execution.batch import Job, Work
from sglang_dsl.settings import global_config


@sgl.function
def echo(s: Any, x: Any, y: Any = 0) -> Any:
    s += f"{x} {y} " + gen("a")
    return x, y


def together(count: int) -> Callable[[Any], Awaitable[str]]:
    """A script whose first answers come only when `count` calls are under way at once."""
    arrived = 0
    all_there = asyncio.Event()

    async def reply(call: Any) -> str:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 60)
        return "r"

    return reply


def test_a_thousand_programs_in_input_order() -> None:
    mock = MockBackend(lambda call: "got " + str(call.prompt.plain_text))
    threads = threading.active_count()
    states = echo.run_batch([{"x": i} for i in range(1000)], backend=mock, temperature=0)
    assert [s["a"] for s in states] == [f"got {i} 0 " for i in range(1000)]
    assert [s.ret_value for s in states] == [(i, 0) for i in range(1000)]
    assert all(call.sampling.temperature == 0 for call in mock.calls)
    assert len(mock.calls) == 1000
    assert threading.active_count() <= threads + 1


def test_items_are_dicts_tuples_or_lists() -> None:
    states = echo.run_batch(({"x": 1, "y": 2}, (3, 4), [5]), backend=MockBackend())
    assert [s.ret_value for s in states] == [(1, 2), (3, 4), (5, 0)]
    assert echo.run_batch([]) == []
    given = [{"x": 1}]
    echo.bind(y=9).run_batch(given, backend=MockBackend())
    assert given == [{"x": 1}]
    for wrong in ("text", {"x": 1}):
        with pytest.raises(BadProgram, match="list of items"):
            echo.run_batch(wrong)
    with pytest.raises(BadProgram, match="a dict or a tuple"):
        echo.run_batch(["text"])
    with pytest.raises(TypeError, match="missing"):
        echo.run_batch([{}])


@pytest.mark.parametrize("words", [{"on_error": "store"}, {"num_threads": 0}, {"stream": True}])
def test_wrong_words(words: Any) -> None:
    with pytest.raises(BadProgram):
        echo.run_batch([], **words)
    with pytest.raises(TypeError, match="nothing"):
        echo.run_batch([], nothing=1)


def test_failed_items_by_policy(idle: Callable[[], int]) -> None:
    def reply(call: Any) -> str:
        if str(call.prompt.plain_text).startswith("3 "):
            raise ConnectionError("three")
        return "ok"

    @sgl.function
    def program(s: Any, x: int) -> None:
        if x == 5:
            raise LookupError("five")
        s += f"{x} " + gen("a")

    items = [{"x": i} for i in range(8)]
    results = program.run_batch(items, backend=MockBackend(reply), on_error="return")
    assert [type(r) for r in results] == [ProgramState] * 3 + [BackendError, ProgramState, LookupError] + [
        ProgramState
    ] * 2
    assert results[3].variable == "a"
    assert results[7]["a"] == "ok"
    with pytest.raises(BackendError, match="three"):
        program.run_batch(items, backend=MockBackend(reply))
    assert idle() == 0


def test_raising_cancels_what_is_under_way(idle: Callable[[], int]) -> None:
    async def reply(call: Any) -> str:
        if str(call.prompt.plain_text).startswith("0 "):
            raise ConnectionError("first")
        await asyncio.sleep(3600)
        return ""

    mock = MockBackend(reply)
    with pytest.raises(BackendError, match="first"):
        echo.run_batch([{"x": i} for i in range(20)], backend=mock)
    assert idle() == 0
    assert mock.in_flight == 0


def test_at_most_so_many_at_once() -> None:
    mock = MockBackend(together(3))
    echo.run_batch([{"x": i} for i in range(30)], backend=mock, num_threads=3)
    assert mock.most_in_flight == 3
    mock = MockBackend(delay_s=0.002)
    echo.run_batch([{"x": i} for i in range(5)], backend=mock, num_threads=1)
    assert mock.most_in_flight == 1


def test_more_items_than_threads_generate_at_once() -> None:
    global_config.max_threads = 4
    mock = MockBackend(together(100))
    echo.run_batch([{"x": i} for i in range(100)], backend=mock)
    assert mock.most_in_flight == 100


def test_items_are_taken_as_there_is_room_and_given_as_they_are_done() -> None:
    taken: list[int] = []

    def items() -> Iterator[dict[str, int]]:
        for i in range(10_000):
            taken.append(i)
            yield {"x": i}

    results = echo.run_batch(items(), backend=MockBackend(), generator_style=True, num_threads=5)
    assert taken == []
    assert [next(results).ret_value[0] for _ in range(3)] == [0, 1, 2]
    assert len(taken) < 40
    results.close()
    after = len(taken)
    time.sleep(0.02)
    assert len(taken) == after


def test_a_slow_first_item_does_not_hold_up_the_others() -> None:
    gate = threading.Event()
    done: list[int] = []

    @sgl.function
    def program(s: Any, x: int) -> int:
        if x == 0:
            assert gate.wait(300)
        done.append(x)
        if len(done) == 19:
            gate.set()
        return x

    states = program.run_batch([{"x": i} for i in range(20)], num_threads=4)
    assert [s.ret_value for s in states] == list(range(20))
    assert done[-1] == 0


def test_bodies_that_read_and_fork() -> None:
    @sgl.function
    def program(s: Any, x: int) -> str:
        s += f"{x}: " + gen("a", max_tokens=1)
        forks = s.fork(2)
        forks += " " + gen("b", max_tokens=1)
        forks.join()
        return str(s["a"]) + "".join(s["b"])

    mock = MockBackend(["r"] * 300, delay_s=0.001)
    states = program.run_batch([{"x": i} for i in range(100)], backend=mock)
    assert {s.ret_value for s in states} == {"rrr"}
    assert [s.usage()["calls"] for s in states] == [3] * 100


def test_nested_batches() -> None:
    @sgl.function
    def outer(s: Any, x: int) -> Any:
        inner = echo.run_batch([{"x": x, "y": i} for i in range(3)])
        s += " ".join(str(state.ret_value) for state in inner)

    states = outer.run_batch([{"x": i} for i in range(40)], backend=MockBackend())
    assert states[39].text() == "(39, 0) (39, 1) (39, 2)"


def test_a_progress_bar_counts_the_items(capsys: pytest.CaptureFixture[str]) -> None:
    echo.run_batch([{"x": i} for i in range(7)], backend=MockBackend(), progress_bar=True)
    assert "7/7" in capsys.readouterr().err


def test_an_item_is_counted_before_it_is_given_out() -> None:
    done: list[bool] = []

    class Ended(deque[Job]):
        def append(self, job: Job) -> None:
            done.append(job.done)
            super().append(job)

    ended = Ended()
    job = Job(Work(lambda: None, 0, ()), Signal(), ended)
    job._finish(None)
    assert (done, job.done, list(ended)) == ([False], True, [job])


async def gathered(states: Any) -> list[Any]:
    return [state async for state in states]


def by_list(program: Any, items: list[Any], **words: Any) -> list[Any]:
    return list(program.run_batch(items, **words))


def by_iterator(program: Any, items: list[Any], **words: Any) -> list[Any]:
    return list(program.run_batch(items, generator_style=True, ordered=False, **words))


def by_async(program: Any, items: list[Any], **words: Any) -> list[Any]:
    return asyncio.run(gathered(program.arun_batch(items, **words)))


@sgl.function
async def later(s: Any, x: Any, y: Any = 0) -> Any:
    s += f"{x} {y} " + gen("a")
    s += gen("b")


WAYS = (by_list, by_iterator, by_async)


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("program", [echo, later], ids=["plain", "async"])
def test_a_budget_is_for_the_whole_batch_and_options_give_each_item_one(run: Any, program: Any) -> None:
    items = [(i,) for i in range(7)]
    mock = MockBackend()
    results = run(program, items, backend=mock, budget=sgl.Budget(calls=3), on_error="return")
    assert len(mock.calls) == 3
    assert sum(isinstance(one, sgl.BudgetExceeded) for one in results) >= 4
    each = MockBackend()
    limited = program.options(budget=sgl.Budget(calls=1))
    run(limited, items, backend=each, on_error="return")
    assert len(each.calls) == 7
    both = MockBackend()
    run(limited, items, backend=both, budget=sgl.Budget(calls=5), on_error="return")
    assert len(both.calls) == 5


def test_a_batch_inside_a_program_has_its_own_budget_and_the_programs() -> None:
    @sgl.function
    def outer(s: Any, most: int) -> int:
        budget = sgl.Budget(calls=most)
        return sum(
            isinstance(one, ProgramState)
            for one in echo.run_batch([(i,) for i in range(6)], budget=budget, on_error="return")
        )

    for most, whole in ((2, 4), (4, 2)):
        mock = MockBackend()
        assert outer.run(most, backend=mock, budget=sgl.Budget(calls=whole)).ret_value == 2
        assert len(mock.calls) == 2


def failing(call: Any) -> str:
    if "bad" in str(call.prompt.plain_text):
        raise ConnectionError("no answer")
    return "fine"


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_an_error_says_of_which_item_it_is(run: Any, on_error: str) -> None:
    @sgl.function
    def divides(s: Any, word: str, by: int = 1) -> None:
        s += f"{word} {1 / by}" + gen("a")

    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"word": "bad"}, BackendError, "word='bad'"),
        (("fine", 0), ZeroDivisionError, "('fine', 0)"),
        ({"word": "x" * 100_000, "by": 0}, ZeroDivisionError, "word='xxx"),
        ({"wrod": "fine"}, TypeError, "wrod='fine'"),
        ("fine", BadProgram, "'fine'"),
    ]
    for item, kind, shown in wrong:
        items = [("fine",)] * 4 + [item]
        try:
            found = run(divides, items, backend=MockBackend(failing), on_error=on_error)
            error = next(one for one in found if isinstance(one, Exception))
            assert on_error == "return"
        except kind as raised:
            error = raised
        assert type(error) is kind
        assert (error.item_index, error.item) == (4, item)
        (note,) = error.__notes__
        assert note.startswith(f"item 4 of the batch of {divides.name!r}: {shown}"[:60])
        assert len(note) < 1100
        assert "\n" not in note


def test_an_error_of_a_batch_in_a_batch_names_both_items() -> None:
    @sgl.function
    def outer(s: Any, word: str) -> None:
        echo.run_batch([("fine",), (word,)])

    with pytest.raises(BackendError) as caught:
        outer.run_batch([("fine",), ("fine",), ("bad",)], backend=MockBackend(failing))
    first, second = caught.value.__notes__
    assert first == "item 1 of the batch of 'echo': ('bad',)"
    assert second.startswith("item 2 of the batch of ")
    assert all(note in caught.value.full_traceback() for note in (first, second))


def test_an_error_of_map_says_of_which_item_it_is() -> None:
    @sgl.function
    def plain(s: Any) -> None:
        s.map(lambda fork, x: 1 / x, [1, 2, 0])

    @sgl.function
    async def beside(s: Any) -> None:
        async def work(fork: Any, x: int) -> float:
            return 1 / x

        await s.map(work, [1, 2, 0])

    for program in (plain, beside):
        with pytest.raises(ZeroDivisionError) as caught:
            program.run(backend=MockBackend())
        assert caught.value.__notes__ == ["item 2 of map: 0"]
        assert (caught.value.item_index, caught.value.item) == (2, 0)
