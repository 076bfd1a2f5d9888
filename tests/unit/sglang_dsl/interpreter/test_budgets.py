"""A budget bounds what calls under way at once use together, and refuses nothing before it is spent."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl import Budget, BudgetExceeded, MockBackend, gen
from sglang_dsl.execution.finished import pack, unpack

LONG = " ".join(["w"] * 300)


def endless(call: Any) -> list[str]:
    return [LONG] * call.n


@sgl.function
def wide(s: Any, forks: int = 50, tokens: int = 100) -> Any:
    s += "p"
    group = s.fork(forks)
    group += gen("x", max_tokens=tokens)
    return [fork.error() for fork in group]


def test_fifty_forks_share_what_there_is() -> None:
    backend = MockBackend(endless, delay_s=0.001)
    errors = wide.run(backend=backend, budget=Budget(tokens=20)).ret_value
    assert backend.usage.completion_tokens <= 20
    assert None in errors  # some of it was used
    assert all(isinstance(error, BudgetExceeded) for error in errors if error is not None)
    assert all("20" in str(error) for error in errors if error is not None)


def test_short_answers_are_not_refused_for_what_they_might_have_been() -> None:
    backend = MockBackend(lambda call: "w w", delay_s=0.001)
    errors = wide.run(backend=backend, budget=Budget(tokens=400)).ret_value
    assert errors == [None] * 50
    assert 1 < backend.most_in_flight <= 4  # as many as surely fit


def test_calls_and_cost_are_bounded_alike() -> None:
    backend = MockBackend(endless, delay_s=0.001)
    errors = wide.run(backend=backend, budget=Budget(calls=7)).ret_value
    assert len(backend.calls) == 7
    assert errors.count(None) == 7
    backend = MockBackend(endless, delay_s=0.001)
    price = sgl.price_per_million(prompt=0, completion=1e6)
    wide.run(backend=backend, budget=Budget(cost=33, price=price))
    assert 30 <= backend.usage.completion_tokens <= 33


def test_a_clamped_answer_says_so() -> None:
    state = sgl.function(lambda s: s.__iadd__(gen("x", max_tokens=100, min_tokens=50))).run(
        backend=MockBackend(endless), budget=Budget(tokens=5)
    )
    assert state["x"].split() == ["w"] * 5
    meta = state.get_meta_info("x")
    assert meta["clamped_max_tokens"] == 5
    assert meta["finish_reason"]["type"] == "length"


def test_samples_share_it_too() -> None:
    one = sgl.function(lambda s: s.__iadd__(gen("x", max_tokens=100, n=4)))
    backend = MockBackend(endless)
    assert [len(text.split()) for text in one.run(backend=backend, budget=Budget(tokens=10))["x"]] == [2] * 4
    with pytest.raises(BudgetExceeded):
        one.run(backend=backend, budget=Budget(tokens=3))["x"]


def test_who_waits_for_room_is_cut_short_by_the_budgets_time() -> None:
    async def never(call: Any) -> str:
        await asyncio.sleep(600)
        return ""

    errors = wide.run(3, backend=MockBackend(never), budget=Budget(tokens=100, seconds=0.1)).ret_value
    assert all(isinstance(error, BudgetExceeded) and "seconds" in error.message for error in errors)


def test_what_failed_or_was_cancelled_gives_its_share_back() -> None:
    backend = MockBackend(["w w"] * 60, errors={at: OSError("no") for at in range(25)}, delay_s=0.001)
    errors = wide.run(backend=backend, budget=Budget(tokens=120)).ret_value
    assert errors.count(None) == 25

    @sgl.function
    def cancels(s: Any) -> Any:
        forks = s.fork(2)
        forks += "p" + gen("x", max_tokens=100)
        next(iter(backend.calls), None)
        forks[0].cancel()
        return forks[1]["x"]

    assert (
        cancels.run(backend=MockBackend(["w"] * 3, delay_s=0.01), budget=Budget(tokens=101)).ret_value == "w"
    )


def test_replays_are_clamped_as_the_run_was(tmp_path: Path) -> None:
    asked = wide.run(9, backend=MockBackend(endless), budget=Budget(tokens=150), cache_dir=tmp_path)
    again = wide.run(9, backend=MockBackend([]), budget=Budget(tokens=150), cache="ro", cache_dir=tmp_path)
    assert again.usage() == asked.usage()


Step = st.one_of(
    st.tuples(st.just("gen"), st.integers(1, 60), st.integers(1, 3)),
    st.tuples(st.just("text"), st.text("ab ", min_size=1, max_size=20)),
    st.tuples(st.just("call"), st.integers(1, 30)),
)
Tree = st.recursive(
    st.lists(Step, max_size=4),
    lambda inner: st.lists(
        st.one_of(Step, st.tuples(st.just("fork"), st.lists(inner, min_size=1, max_size=4))), max_size=4
    ),
    max_leaves=12,
)


@sgl.function
def called(s: Any, tokens: int) -> None:
    s += "called " + gen("x", max_tokens=tokens)


def write(s: Any, steps: list[Any], errors: list[Any]) -> None:
    for step in steps:
        match step:
            case ("gen", most, n):
                s += gen("x", max_tokens=most, n=n)
            case ("text", text):
                s += text
            case ("call", tokens):
                errors.append(called.run(tokens).error())
            case ("fork", branches):
                forks = s.fork(len(branches))
                for fork, inner in zip(forks, branches, strict=True):
                    write(fork, inner, errors)
                errors += [fork.error() for fork in forks]


@given(
    Tree,
    st.sampled_from(["tokens", "cost", "calls"]),
    st.integers(0, 120),
    st.integers(1, 90),
    st.sampled_from([0.0, 0.001]),
)
def test_whatever_a_program_asks_for_at_once(
    tree: list[Any], kind: str, limit: int, size: int, delay: float
) -> None:
    """Answers of `size` tokens at most. Nothing is refused before the limit is reached, but for samples that
    need more than one token each."""
    text = " ".join(["w"] * size)
    backend = MockBackend(lambda call: [text] * call.n, delay_s=delay)
    errors: list[Any] = []
    price = sgl.price_per_million(prompt=0, completion=1e6)
    budget = Budget(**{kind: limit}, price=price)  # type: ignore[arg-type]

    def body(s: Any) -> None:
        write(s, tree, errors)
        errors.append(s.error())

    state = sgl.function(body).run(backend=backend, budget=budget)
    assert state.text is not None
    used = backend.usage
    failed = [error for error in errors if error is not None]
    assert all(isinstance(error, BudgetExceeded) for error in failed)
    if kind == "calls":
        assert len(backend.calls) <= limit
        assert not failed or len(backend.calls) == limit
    elif kind == "tokens":
        assert used.completion_tokens <= limit
        assert not failed or used.completion_tokens + used.prompt_tokens > limit - 3
    else:
        assert used.completion_tokens <= limit + 2  # one token for each of three samples
        assert not failed or used.completion_tokens >= limit


# -- programs that call others, also from threads of their own -----------------------------------------------


@sgl.function
def part(s: Any, topic: str) -> None:
    s += topic + gen("text")


@sgl.function
async def later_part(s: Any, topic: str) -> None:
    s += topic + gen("text")


def ask(topic: str) -> str:
    try:
        return str(part(topic)["text"])
    except BudgetExceeded:
        return "refused"


POOL = ThreadPoolExecutor(4)


def directly(topics: list[str]) -> list[str]:
    return [ask(topic) for topic in topics]


def in_threads(topics: list[str]) -> list[str]:
    found: list[str] = []
    threads = [threading.Thread(target=lambda t=topic: found.append(ask(t))) for topic in topics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def in_subclass(topics: list[str]) -> list[str]:
    class Own(threading.Thread):
        found: str

        def run(self) -> None:
            self.found = ask(self.name)

    threads = [Own(name=topic) for topic in topics]
    for thread in threads:
        thread.start()
        thread.join()
    return [thread.found for thread in threads]


def in_own_pool(topics: list[str]) -> list[str]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(ask, topics))


def in_shared_pool(topics: list[str]) -> list[str]:
    return [future.result() for future in [POOL.submit(ask, topic) for topic in topics]]


def in_a_thread_of_a_thread(topics: list[str]) -> list[str]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(in_threads, topics).result()


WAYS = (directly, in_threads, in_subclass, in_own_pool, in_shared_pool, in_a_thread_of_a_thread)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True], ids=["run", "stream"])
def test_programs_called_from_threads_are_charged_and_counted(way: Any, stream: bool) -> None:
    @sgl.function
    def whole(s: Any) -> list[str]:
        return list(way([f"t{i}" for i in range(6)]))

    backend = MockBackend()
    state = whole.run(backend=backend, budget=Budget(calls=4), stream=stream)
    state.sync()
    assert len(backend.calls) == state.usage()["calls"] == 4
    assert state.ret_value.count("refused") == 2
    # The next run on the same threads is charged to its own budget.
    backend = MockBackend()
    assert whole.run(backend=backend, budget=Budget(calls=6)).ret_value.count("refused") == 0
    assert len(backend.calls) == 6


def test_threads_outside_of_programs_are_as_ever() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(1)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(variable.get()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert POOL.submit(variable.get).result() == 0


def test_usage_counts_called_programs_once() -> None:
    @sgl.function
    async def middle(s: Any) -> None:
        forks = s.fork(2)
        forks += gen("f")
        await later_part("m")
        await s.map(lambda fork, x: later_part(x), ["p", "q"])

    @sgl.function
    def whole(s: Any) -> dict[str, int]:
        s += gen("own")
        own = s.usage()
        part("a")
        part.run_batch([("b",), ("c",)])
        list(part.run_batch([("d",)], generator_style=True))
        middle.run().sync()
        s.fork(3)[0].map(lambda fork, x: part(x), ["e", "f"])
        with part.stream("g") as stream:
            stream.sync()
        return own

    backend = MockBackend()
    state = whole.run(backend=backend)
    usage = state.usage()
    assert usage["calls"] == len(backend.calls) == 1 + 1 + 2 + 1 + 5 + 2 + 1
    assert state.ret_value["calls"] == 1
    for key in ("prompt_tokens", "completion_tokens"):
        assert usage[key] == getattr(backend.usage, key)
    assert state.snapshot().usage == usage
    assert len(state.snapshot().calls) == 1  # its own
    # And as a batch tells it, also of another process.
    (row,) = whole.run_batch([()], backend=MockBackend()).rows()
    assert row["calls"] == usage["calls"]
    assert unpack(pack(state), 0).usage() == usage
