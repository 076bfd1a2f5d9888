"""Finished programs that travelled between processes read as they did where they ran."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.choices import ChoicesDecision
from sglang_dsl.errors import InvalidValue, MissingVariable, ProgramError, StateClosed
from sglang_dsl.execution.finished import instead_of, pack, sendable, unpack
from tests.unit.sglang_dsl.frontend.random_programs import Maker, driven, plain_mock, play


def travelled(state: Any, index: int = 3) -> sgl.ProgramState:
    return unpack(pickle.loads(pickle.dumps(pack(state))), index)  # noqa: S301 - made here


def reading(read: Any) -> Any:
    """What a read gives, or how it fails."""
    try:
        return read()
    except ProgramError as error:
        return type(error), str(error)


def facts(state: Any) -> Any:
    def tree(seen: Any) -> Any:
        branches = [
            (fork.joined, fork.at and fork.at.text(), [*map(tree, fork.branches)]) for fork in seen.forks
        ]
        return seen.text, seen.transcript.text(seen.since), seen.branch, branches

    names = state.core.names()
    return (
        [reading(lambda n=n: (state[n], state.raw(n), state.get_meta_info(n))) for n in names],
        reading(state.text),
        reading(state.messages),
        str(reading(state.error)),
        state.usage(),
        tree(state.snapshot()),
        state.ret_value,
    )


@sgl.function
def asks(s: Any, word: str, size: int = 2) -> str:
    s += sgl.user(word) + sgl.assistant(sgl.gen("a", max_tokens=size))
    return word


class Guide:
    def __init__(self, word: str) -> None:
        self.word = word

    @sgl.function
    def ask(self, s: Any, size: int) -> None:
        s += self.word + sgl.gen("a", max_tokens=size)


def copied(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))  # noqa: S301 - made here


def test_programs_of_a_module_are_pickled_by_name() -> None:
    assert copied(asks) is asks
    for program, arguments in (
        (asks.bind(word="x"), {}),
        (asks.options(temperature=0, budget=sgl.Budget(calls=1)), {"word": "x"}),
        (Guide("x").ask, {"size": 3}),
        (asks.trace(), {"word": "x"}),
    ):
        here, there = sgl.MockBackend(), sgl.MockBackend()
        states = program.run(**arguments, backend=here), copied(program).run(**arguments, backend=there)
        assert states[0].text() == states[1].text()
        assert [call.sampling for call in here.calls] == [call.sampling for call in there.calls]
    assert copied(asks.trace()) == asks.trace()

    @sgl.function
    def local(s: Any) -> None: ...

    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(local)


def test_a_state_is_pickled_as_it_ended() -> None:
    for state in (
        asks.run("x", backend=sgl.MockBackend(delay_s=0.01)),
        asks.stream("x", backend=sgl.MockBackend()),
        asks.run_batch([("x",), ("y",)], backend=sgl.MockBackend())[1],
    ):
        there = copied(state)
        assert facts(there) == facts(state)
        assert there.index == state.index
        with pytest.raises(StateClosed):
            there += "more"


@given(st.integers(0, 2**32))
def test_random_programs_read_alike(seed: int) -> None:
    @sgl.function
    def program(s: Any) -> int:
        driven(play(s, Maker(seed, safe=True).steps()))
        return seed

    state = program.run(backend=plain_mock(seed))
    state.error()
    assert facts(travelled(state)) == facts(state)


@sgl.function
def long_talk(s: Any, turns: int) -> None:
    for number in range(turns):
        s += sgl.user(f"{number}") + sgl.assistant(sgl.gen(f"a{number}"))


def test_a_conversation_deeper_than_the_stack_travels() -> None:
    state = long_talk.run(2000, backend=sgl.MockBackend(lambda call: "r"))
    state.sync()
    read = travelled(state)
    assert read.index == 3
    assert read.text() == state.text()
    assert read.messages()[-1] == {"role": "assistant", "content": "r"}


@sgl.function
def held(s: Any) -> None:
    s += sgl.user("?") + sgl.assistant(sgl.gen("a", regex="[ab]+") + sgl.gen("n", int))
    forks = s.fork(2)
    forks += sgl.gen("x")
    forks.join()
    s += sgl.select("c", ["p", "q"], choices_method=lambda **given: ChoicesDecision("q"))


def test_what_travelled_is_shown_alike() -> None:
    state = held.run(backend=sgl.MockBackend())
    state.sync()
    assert "regex [ab]+" in state._repr_html_()
    assert travelled(state)._repr_html_() == state._repr_html_()


@sgl.function
def rolled_back(s: Any) -> list[Any]:
    s += "one"
    before = s.checkpoint()
    s += sgl.user("two")
    forks = s.fork(2)
    for fork in forks:
        fork += sgl.gen("x")
    forks.join()
    s.rollback(before)
    return []


def test_a_fork_of_what_was_rolled_back_stands_where_it_did() -> None:
    state = rolled_back.run(backend=sgl.MockBackend(lambda call: "r"))
    state.sync()
    assert state.snapshot().forks, "forks that were rolled back are told"
    assert facts(travelled(state)) == facts(state)


DIGITS = "9" * 5000
"""More than Python reads as a number."""


@sgl.function
def number(s: Any) -> None:
    s += sgl.gen("n", int)
    s["set"] = {"plain": [1]}


def test_a_variable_that_failed_fails_as_it_did_and_the_others_are_there() -> None:
    read = travelled(number.run(backend=sgl.MockBackend(lambda call: DIGITS)))
    assert read["set"] == {"plain": [1]}
    assert read.raw("n") == DIGITS
    with pytest.raises(InvalidValue, match="'n'"):
        read["n"]
    assert isinstance(read.error(), InvalidValue)
    with pytest.raises(MissingVariable, match="known: 'n', 'set'"):
        read["other"]


def test_it_can_only_be_read() -> None:
    read = travelled(long_talk.run(1, backend=sgl.MockBackend(lambda call: "r")))
    for write in (
        lambda: read.__iadd__("more"),
        lambda: read.fork(2),
        read.checkpoint,
    ):
        with pytest.raises(StateClosed, match="can only be read"):
            write()
    read["note"] = 1
    assert read["note"] == 1
    read.cancel()


def test_errors_travel_with_their_frames_as_text() -> None:
    @sgl.function
    def failing(s: Any) -> None:
        s += sgl.gen("x")

    def down(call: Any) -> str:
        raise sgl.BackendError("down", status=503, retryable=True)

    with pytest.raises(sgl.BackendError) as caught:
        failing.run(backend=sgl.MockBackend(down)).text()
    sent = pickle.loads(pickle.dumps(sendable(caught.value)))  # noqa: S301 - made here
    assert str(sent) == str(caught.value)
    assert (sent.status, sent.retryable) == (503, True)
    assert "test_finished.py" in sent.full_traceback()
    told = instead_of(OSError("gone"), "p")
    assert "OSError: gone" in str(told)
