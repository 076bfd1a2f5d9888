"""Records and replays, seeds, budgets, deadlines of single calls, hooks: what a run leaves behind and may
use."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.budgets import Budget, price_per_million
from sglang_dsl.errors import BadProgram, BudgetExceeded, ProgramError, ReplayMiss, Timeout
from sglang_dsl.hooks import CallEvent, subscribe, subscribed
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.record import Record, key_of, records


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    records.close()


def counting() -> sgl.MockBackend:
    """Every reply is another one."""
    numbers = itertools.count()
    return sgl.MockBackend(lambda call: f"r{next(numbers)}")


@sgl.function
def tale(s: Any, topic: str) -> str:
    s += sgl.user("Tell of " + topic)
    s += sgl.assistant(sgl.gen("intro", max_tokens=8))
    forks = s.fork(2)
    forks += sgl.user("Go on") + sgl.assistant(sgl.gen("more", max_tokens=8))
    forks.join()
    s += sgl.user("Good?" + sgl.select("good", ["yes", "no"]))
    return str(s["intro"]) + "".join(s["more"])


def facts(state: Any) -> Any:
    metas = [state.get_meta_info(name) for name in ("intro", "good")]
    return state["intro"], state["more"], state["good"], state.text(), state.ret_value, metas


# -- record and replay ---------------------------------------------------------------------------------------


@sgl.function
def lots(s: Any) -> None:
    for number in range(12):
        s += sgl.select(f"lot{number}", ["a", "b", "c", "d"], temperature=5.0)


def test_what_was_drawn_by_chance_is_drawn_again(tmp_path: Path) -> None:
    even = sgl.MockBackend(scores=dict.fromkeys("abcd", -1.0))
    once = lots.run(backend=even, cache_dir=tmp_path).text()
    assert len(set(once)) > 1
    assert lots.run(cache="ro", cache_dir=tmp_path).text() == once
    # Only a record makes them alike: 4 ** 12 ways.
    assert lots.run(backend=even).text() != once
    assert lots.run(backend=even, cache_dir=tmp_path / "other").text() != once


def test_drawing_leaves_the_users_own_chance_alone() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    lots.run(backend=sgl.MockBackend()).sync()
    assert random.random() == expected


def test_a_run_replays_byte_for_byte_without_a_backend(tmp_path: Path) -> None:
    live = tale.run("cats", backend=counting(), cache="rw", cache_dir=tmp_path)
    again = counting()
    replayed = tale.run("cats", backend=again, cache="rw", cache_dir=tmp_path)
    offline = tale.run("cats", cache="ro", cache_dir=tmp_path)
    assert facts(live) == facts(replayed) == facts(offline)
    assert again.calls == []
    told = offline.core.run.ledger.records()
    assert [record.replayed for record in told] == [True] * 4
    assert not any(record.replayed for record in live.core.run.ledger.records())
    # Two forks ask the same thing and are drawn each for itself: they stay two.
    assert len(set(live["more"])) == 2


def test_a_changed_program_is_a_miss_and_is_told(tmp_path: Path) -> None:
    tale.run("cats", backend=counting(), cache="rw", cache_dir=tmp_path).sync()
    with pytest.raises(ReplayMiss, match="not in the record") as caught:
        tale.run("dogs", cache="ro", cache_dir=tmp_path)["intro"]
    assert "test_records.py" in str(caught.value)
    with pytest.raises(ReplayMiss):
        tale.run("cats", temperature=0.5, cache="ro", cache_dir=tmp_path)["intro"]
    backend = counting()
    tale.run("dogs", backend=backend, cache="rw", cache_dir=tmp_path).sync()
    assert len(backend.calls) == 3


def test_two_backends_have_records_of_their_own(tmp_path: Path) -> None:
    def other(*replies: str) -> sgl.MockBackend:
        return sgl.MockBackend(list(replies), name="other")

    for backend in (counting(), other(*["x"] * 9)):
        tale.run("cats", backend=backend, cache="rw", cache_dir=tmp_path).sync()
    assert tale.run("cats", backend=counting(), cache="ro", cache_dir=tmp_path)["intro"] == "r0"
    assert tale.run("cats", backend=other(), cache="ro", cache_dir=tmp_path)["intro"] == "x"
    with pytest.raises(ReplayMiss):  # whose answer is meant cannot be told
        tale.run("cats", cache="ro", cache_dir=tmp_path)["intro"]


def test_streams_errors_and_greedy_calls(tmp_path: Path) -> None:
    words: Any = {"cache": "rw", "cache_dir": tmp_path}
    state = tale.stream("cats", backend=counting(), **words)
    assert "".join(state.text_iter("intro")) == "r0"
    state.sync()
    replay = tale.stream("cats", cache="ro", cache_dir=tmp_path)
    assert "".join(replay.text_iter()) == state.text()
    # What failed is asked again.
    failing = sgl.MockBackend(["x"] * 9, errors={0: OSError("down")})
    with pytest.raises(ProgramError, match="down"):
        tale.run("birds", backend=failing, **words)["intro"]
    assert tale.run("birds", backend=failing, **words)["intro"] == "x"

    @sgl.function
    def twice(s: Any) -> None:
        forks = s.fork(3)
        forks += "same" + sgl.gen("x", temperature=0)
        forks.join()

    backend = counting()
    assert len(set(twice.run(backend=backend, **words)["x"])) <= 3
    # Greedy: equal calls have equal answers, wherever they stand.
    assert len(set(twice.run(backend=backend, **words)["x"])) == 1


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3))
def test_keys_depend_on_content_and_not_on_order(request: dict[str, str]) -> None:
    assert key_of(request) == key_of(dict(reversed(list(request.items()))))
    assert key_of(request) != key_of({**request, "more": 1})


def test_wrong_words_and_damaged_records(tmp_path: Path) -> None:
    for words, said in (
        ({"cache": "rw"}, "needs cache_dir"),
        ({"cache": "maybe", "cache_dir": tmp_path}, "cache must be one of"),
        ({"cache": "ro", "cache_dir": tmp_path / "none"}, "there is no record"),
    ):
        with pytest.raises(BadProgram, match=said):
            tale.run("cats", **words)
    (tmp_path / "calls.sqlite").write_bytes(b"not a database, but long enough to be looked at " * 40)
    with pytest.raises(BadProgram, match="cannot be used"):
        tale.run("cats", cache="rw", cache_dir=tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadProgram, match="cannot be used"):
        Record(tmp_path / "file" / "below")


def test_a_record_that_cannot_be_used_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "calls.sqlite"
    file.write_bytes(b"not a database, but long enough to be looked at " * 40)
    with pytest.raises(BadProgram, match="cannot be used") as raised:
        Record(tmp_path)
    opened = [one.path for one in psutil.Process().open_files()]
    assert str(file) not in opened, raised.value  # its frames hold whatever was not closed


def test_an_interrupted_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    @sgl.function
    def one(s: Any, n: int) -> None:
        s += f"number {n}: " + sgl.gen("x", max_tokens=4)
        s += " and " + sgl.gen("y", max_tokens=4)

    items = [{"n": n} for n in range(40)]
    first = sgl.MockBackend(errors={50: OSError("power cut")})
    with pytest.raises(ProgramError, match="power cut"):
        one.run_batch(items, backend=first, num_threads=1, resume=tmp_path)
    second = sgl.MockBackend()
    states = one.run_batch(items, backend=second, resume=tmp_path)
    assert [state.index for state in states] == list(range(40))
    assert len(first.calls) + len(second.calls) <= 80 + 3  # nothing that was answered is asked again
    whole = one.run_batch(items, backend=sgl.MockBackend())
    assert [state.text() for state in states] == [state.text() for state in whole]

    async def main() -> list[str]:
        batch = one.arun_batch(items, resume=tmp_path)
        return [await state.text() async for state in batch]

    assert asyncio.run(main()) == [state.text() for state in whole]


def test_several_processes_share_a_record(tmp_path: Path) -> None:
    script = f"""
import sys
from sglang_dsl.interpreter.record import Record
record = Record({str(tmp_path)!r})
for number in range(200):
    record.keep(f"k{{number}}", "me", {{"n": number}}, {{"r": sys.argv[1]}})
print(len(record))
"""
    workers = [
        subprocess.Popen([sys.executable, "-c", script, str(n)], stdout=subprocess.PIPE) for n in range(3)
    ]
    # Each has all answers before it ends, whoever wrote them.
    assert [worker.communicate(timeout=300)[0] for worker in workers] == [b"200\n"] * 3
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    base = sqlite3.connect(tmp_path / "calls.sqlite")
    assert base.execute("SELECT count(*) FROM calls").fetchone() == (200,)
    replies = {json.loads(row[0])["r"] for row in base.execute("SELECT reply FROM calls")}
    assert replies <= {"0", "1", "2"}
    base.close()


def test_many_records_are_made_by_several_processes_at_once(tmp_path: Path) -> None:
    script = f"""
import sys
from sglang_dsl.interpreter.record import Record
print(flush=True)
sys.stdin.readline()
for number in range(50):
    Record({str(tmp_path)!r} + f"/{{number}}").keep("k", "me", {{}}, {{}})
"""
    makers = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(6)
    ]
    for maker in makers:
        assert maker.stdout is not None
        maker.stdout.readline()
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.write(b"\n")
        maker.stdin.flush()
    for maker in makers:
        maker.communicate(timeout=300)
    assert [maker.returncode for maker in makers] == [0] * 6


# -- seeds ---------------------------------------------------------------------------------------------------


def seeds(backend: sgl.MockBackend) -> list[int | None]:
    return [call.sampling.seed for call in backend.calls]


def test_seeds_are_derived_per_program_branch_and_step() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x") + sgl.gen("y") + sgl.gen("z", seed=7)
        forks = s.fork(2)
        forks += "b" + sgl.gen("w")
        forks.join()

    @sgl.function
    def other(s: Any) -> None:
        s += "a" + sgl.gen("x")

    def run(what: Any, **words: Any) -> list[int | None]:
        backend = sgl.MockBackend()
        what.run(backend=backend, **words).sync()
        return sorted(seed or 0 for seed in seeds(backend))

    first = run(program, seed=1)
    assert run(program, seed=1) == first
    assert run(program, seed=2) != first
    assert len(set(first)) == 5
    assert 7 in first
    assert run(program) == [0, 0, 0, 0, 7]  # without a seed the backend draws one
    assert run(other, seed=1)[0] not in first


def test_items_of_a_batch_draw_differently_and_again_the_same() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "same" + sgl.gen("x")

    def run() -> list[int | None]:
        backend = sgl.MockBackend(delay_s=0.001)
        states = program.run_batch([{}] * 20, seed=3, backend=backend)
        assert [state.index for state in states] == list(range(20))
        return sorted(seed or 0 for seed in seeds(backend))

    first = run()
    assert len(set(first)) == 20
    assert run() == first


def test_drawn_choices_follow_the_seed() -> None:
    @sgl.function
    def program(s: Any) -> None:
        for index in range(12):
            s += f"{index}" + sgl.select(f"c{index}", ["a", "b"], temperature=1.0)

    def run(seed: int) -> list[str]:
        state = program.run(seed=seed, backend=sgl.MockBackend(scores={"a": -1.0, "b": -1.0}))
        return [state[f"c{index}"] for index in range(12)]

    assert run(5) == run(5)
    assert len({tuple(run(seed)) for seed in range(6)}) > 1
    assert set(run(5)) == {"a", "b"}  # each step draws for itself


# -- budgets and deadlines -----------------------------------------------------------------------------------


@sgl.function
def chatty(s: Any, count: int) -> None:
    for index in range(count):
        s += f" {index} " + sgl.gen(f"x{index}", max_tokens=4)


def test_a_program_stops_when_its_budget_is_spent() -> None:
    backend = sgl.MockBackend(["one two"] * 20)
    state = chatty.run(6, backend=backend, budget=Budget(calls=3))
    assert state["x2"] == "one two"
    with pytest.raises(BudgetExceeded, match=r"3 of 3 calls") as caught:
        state["x3"]
    assert caught.value.variable == "x3"
    assert len(backend.calls) == 3
    tokens = chatty.run(9, backend=sgl.MockBackend(["one two"] * 20), budget=Budget(tokens=10))
    assert isinstance(tokens.error(), BudgetExceeded)
    used = tokens.usage()
    assert used["prompt_tokens"] - used["cached_tokens"] + used["completion_tokens"] >= 10
    free = chatty.run(3, backend=sgl.MockBackend(), budget=Budget(calls=0))
    assert isinstance(free.error(), BudgetExceeded)


def test_time_and_money() -> None:
    slow = chatty.run(2, backend=sgl.MockBackend(delay_s=3600), budget=Budget(seconds=0.05))
    with pytest.raises(BudgetExceeded, match=r"all of its 0\.05 seconds"):
        slow["x0"]
    price = price_per_million(prompt=1.0, completion=10.0, cached=0.1)
    assert price({"prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": 5}) == pytest.approx(
        (60 + 4 + 50) / 1e6
    )
    backend = sgl.MockBackend(["one two"] * 20)
    dear = chatty.run(9, backend=backend, budget=Budget(cost=25.0, price=lambda meta: 10.0))
    assert isinstance(dear.error(), BudgetExceeded)
    assert len(backend.calls) == 3


def test_branches_and_called_programs_have_their_share() -> None:
    @sgl.function
    def inner(s: Any) -> None:
        s += "in" + sgl.gen("x") + sgl.gen("y")

    @sgl.function
    def outer(s: Any) -> Any:
        s += "out"
        forks = s.fork(2, budget=Budget(calls=1))
        forks += sgl.gen("a") + sgl.gen("b")
        errors = [fork.error() for fork in forks]
        return errors, inner().error()

    backend = sgl.MockBackend()
    (one, two), called = outer.run(backend=backend, budget=Budget(calls=3)).ret_value
    assert isinstance(one, BudgetExceeded)
    assert isinstance(two, BudgetExceeded)
    assert isinstance(called, BudgetExceeded)  # two calls went to the forks, one is left for two
    assert len(backend.calls) == 3


def test_single_calls_have_deadlines() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x", timeout=0.05)

    @sgl.function
    def choosing(s: Any) -> None:
        s += "a" + sgl.select("x", ["b", "c"], timeout=0.05)

    for what in (program, choosing):
        with pytest.raises(Timeout, match=r"no answer within 0\.05 s"):
            what.run(backend=sgl.MockBackend(delay_s=3600))["x"]
    for wrong in (0, -1, "1", True, float("nan")):
        with pytest.raises(BadProgram, match="timeout must be a positive"):
            sgl.gen("x", timeout=wrong)  # type: ignore[call-overload]


def test_wrong_budgets() -> None:
    for words in ({"tokens": -1}, {"calls": "3"}, {"seconds": float("nan")}, {"cost": True}):
        with pytest.raises(BadProgram, match="a budget's"):
            Budget(**words)  # type: ignore[arg-type]
    with pytest.raises(BadProgram, match="cost needs price"):
        Budget(cost=1.0)
    with pytest.raises(BadProgram, match="budget takes a Budget"):
        chatty.run(1, budget=3)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=8),
    st.integers(0, 40),
)
def test_a_meter_refuses_from_the_limit_on(calls: list[tuple[int, int, int]], limit: int) -> None:
    meter, used = Meter(Budget(tokens=limit)), 0
    for said, cached, made in calls:
        if used >= limit:
            with pytest.raises(BudgetExceeded):
                meter.check()
            return
        meter.check()
        meter.charge({"prompt_tokens": said, "cached_tokens": min(said, cached), "completion_tokens": made})
        used += said - min(said, cached) + made
        assert meter.tokens == used


# -- hooks ---------------------------------------------------------------------------------------------------


def test_hooks_see_every_call_begin_and_end(idle: Callable[[], int]) -> None:
    events: list[CallEvent] = []
    assert idle() == 0  # calls that others have left would be seen, too
    with subscribed(events.append):
        tale.run("cats", backend=sgl.MockBackend()).sync()
        with pytest.raises(ProgramError, match="down"):
            tale.run("cats", backend=sgl.MockBackend(errors={0: OSError("down")}))
        streamed = chatty.stream(1, backend=sgl.MockBackend(["one two"], split=2))
        streamed.sync()
    tale.run("cats", backend=sgl.MockBackend()).sync()  # nobody listens any more
    begun = [event.number for event in events if event.phase == "begin"]
    ended = [event.number for event in events if event.phase != "begin"]
    assert sorted(begun) == sorted(ended)
    assert len(set(begun)) == len(begun) == 6
    first = next(event for event in events if event.phase == "end")
    assert (first.kind, first.name, first.branch, first.step, first.backend) == (
        "gen",
        "intro",
        (),
        0,
        "mock",
    )
    assert first.source is not None
    assert first.source.file.endswith("test_records.py")
    assert first.meta["completion_tokens"] > 0
    assert {event.branch for event in events} == {(), (0,), (1,)}
    [error] = [event for event in events if event.phase == "error"]
    assert "down" in str(error.error)
    assert events[-1].first_token_s is not None
    assert 0 <= events[-1].first_token_s <= events[-1].seconds


def test_a_hook_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: CallEvent) -> None:
        raise ValueError("my mistake")

    end = subscribe(broken)
    try:
        assert chatty.run(1, backend=sgl.MockBackend(["x"]))["x0"] == "x"
    finally:
        end()
        end()
    assert "a hook failed" in caplog.text


def test_the_place_of_a_call_does_not_depend_on_when_another_was_cancelled(tmp_path: Path) -> None:
    """In one run the cancelled call has begun, in the other it has not."""
    backend = sgl.MockBackend(lambda call: str(next(numbers)))
    numbers, replayed = itertools.count(), [False]

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        there = s.checkpoint()
        s += "a" + sgl.gen("lost", max_tokens=4)
        while not replayed[0] and not backend.calls:
            pass  # until it has begun
        s.cancel()
        s.rollback(there)
        s += "b" + sgl.gen("kept", max_tokens=4)

    backend.delay_s = 0.2
    first = program.run(backend=backend, cache="rw", cache_dir=str(tmp_path))["kept"]
    replayed[0] = True
    assert program.run(cache="ro", cache_dir=str(tmp_path))["kept"] == first
