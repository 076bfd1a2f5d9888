"""A text that is no value of its type is an error of its variable alone; with retries the model is shown it
and asked again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator

import sglang_dsl as sgl
from sglang_dsl import BadProgram, Budget, BudgetExceeded, InvalidValue, MockBackend, assistant, gen, user
from sglang_dsl.backends.base import Call


def even(value: int) -> int:
    if value % 2:
        raise ValueError("it is odd")
    return value


Even = Annotated[int, AfterValidator(even)]


def test_after_an_invalid_value_the_state_goes_on() -> None:
    @sgl.function
    def program(s: Any) -> Any:
        s += "n: " + gen("n", Even)
        try:
            return s["n"]
        except InvalidValue:
            s += " again: " + gen("m", Even) + gen("free")
            return s["m"], s["free"]

    for stream in (False, True):
        state = program.run(backend=MockBackend(["3", "4", "more"]), stream=stream)
        assert state["m"] == 4
        assert state["free"] == "more"
        assert state.text() == "n: 3 again: 4more"
        assert state.ret_value == (4, "more")
        assert state.raw("n") == "3"
        with pytest.raises(InvalidValue, match="it is odd"):
            state["n"]
        assert isinstance(state.error(), InvalidValue)


def test_a_name_that_is_set_anew_is_no_error_any_more() -> None:
    def program(s: Any) -> None:
        while True:
            s += gen("n", Even) + "\n"
            try:
                assert s["n"] == 4
            except InvalidValue:
                continue
            return

    state = sgl.function(program).run(backend=MockBackend(["1", "3", "4"]))
    assert state.error() is None
    assert state.text() == "1\n3\n4\n"


def test_in_async_programs_too() -> None:
    async def program(s: Any) -> None:
        s += gen("n", Even) + gen("m", Even)
        with pytest.raises(InvalidValue):
            await s["n"]
        assert await s["m"] == 2

    state = asyncio.run(sgl.function(program).arun(backend=MockBackend(["1", "2"])))
    assert isinstance(asyncio.run(state.error()), InvalidValue)


def test_a_branch_with_an_invalid_value_has_failed() -> None:
    def program(s: Any) -> Any:
        forks = s.fork(3)
        for index, fork in enumerate(forks):
            fork += f"{index}" + gen("n", Even)
        return forks.vote("n"), forks.race()["n"]

    replies = {"^0": "1", "^1": "2", "^2": "2"}
    vote, won = sgl.function(program).run(backend=MockBackend(replies)).ret_value
    assert (vote.value, vote.count, vote.failed, won) == (2, 2, 1, 2)


def test_a_turn_is_asked_for_again_with_what_was_wrong() -> None:
    backend = MockBackend(["3", "5", "4"])
    program = sgl.function(
        lambda s: s.__iadd__(user("Even?") + assistant("It is " + gen("n", Even, retries=2)))
    )
    state = program.run(backend=backend)
    assert state["n"] == 4
    assert state.text() == "USER: Even?\nASSISTANT: It is 4\n"
    assert state.messages()[-1]["content"] == "It is 4"
    assert state.error() is None
    prompts = [call.prompt.messages for call in backend.calls]
    assert [len(one) for one in prompts] == [2, 4, 6]
    roles = [message.role for message in prompts[-1]]
    assert roles == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert prompts[1][1].content == "It is 3"
    assert not prompts[1][1].open
    assert "it is odd" in str(prompts[1][2].content)
    assert prompts[1][3] == prompts[0][1]  # the turn that was begun
    assert state.get_meta_info("n")["rejected"] == [
        {"text": "3", "error": "the whole: Value error, it is odd"},
        {"text": "5", "error": "the whole: Value error, it is odd"},
    ]
    assert state.usage()["calls"] == 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Even, "int"), (list[Even], "list[Annotated[int, AfterValidator(func=<function even>)]]")],
)
def test_a_model_is_asked_again_in_words_that_are_the_same_everywhere(kind: Any, name: str) -> None:
    backend = MockBackend(["3", "4"] if kind is Even else ["[3]", "[4]"])
    sgl.function(lambda s: s.__iadd__(user("?") + assistant(gen("n", kind, retries=1)))).run(
        backend=backend
    ).sync()
    again = str(backend.calls[1].prompt.messages[2].content)
    assert f" valid {name}: " in again


def test_a_plain_text_is_asked_for_again() -> None:
    backend = MockBackend(["3", "4"])
    program = sgl.function(lambda s: s.__iadd__("Numbers.\nAn even one: " + gen("n", Even, retries=1) + "."))
    state = program.run(backend=backend)
    assert state["n"] == 4
    assert state.text() == "Numbers.\nAn even one: 4."
    again = backend.calls[1].prompt.plain_text
    assert again is not None
    assert again.startswith("Numbers.\nAn even one: 3\n\n(")
    assert "it is odd" in again
    assert again.endswith("\n\nAn even one: ")


def test_the_last_try_is_what_stays_when_none_fits() -> None:
    program = sgl.function(lambda s: s.__iadd__("p " + gen("n", Even, retries=1) + gen("free")))
    state = program.run(backend=MockBackend(["1", "3", "x"]))
    with pytest.raises(InvalidValue, match="it is odd"):
        state["n"]
    assert state.raw("n") == "3"
    assert state["free"] == "x"
    assert state.text() == "p 3x"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 4), st.booleans(), st.booleans())
def test_as_many_tries_as_are_needed(tries: list[int], retries: int, chat: bool, stream: bool) -> None:
    """And in a stream pieces add up to what stays."""
    backend = MockBackend([f"{value}" for value in tries] + ["8"] * 9, split=1)
    node = gen("n", Even, retries=retries)
    program = sgl.function(lambda s: s.__iadd__(assistant("a" + node) if chat else "a" + node))
    state = program.run(backend=backend, stream=stream)
    first = next((at for at, value in enumerate(tries) if value % 2 == 0), len(tries))
    needed = min(first, retries)
    assert "".join(state.text_iter()) == state.text()
    assert len(backend.calls) == needed + 1 == state.usage()["calls"]
    said = [*tries, 8][needed] if needed < len(tries) else 8
    assert "".join(state.text_iter("n") if said % 2 == 0 else [state.raw("n")]) == str(said)
    assert (state.error() is None) == (said % 2 == 0)


def test_samples_and_a_text_that_was_cut() -> None:
    backend = MockBackend([["2", "3"], ["2", "6"]])
    program = sgl.function(lambda s: s.__iadd__(gen("n", Even, n=2, retries=1)))
    assert program.run(backend=backend)["n"] == [2, 6]
    backend = MockBackend(["[1, 2, 3, 4, 5, 6]", "[1]"])
    program = sgl.function(lambda s: s.__iadd__(gen("n", list[int], max_tokens=3, retries=1)))
    assert program.run(backend=backend)["n"] == [1]
    assert "write less" in str(backend.calls[1].prompt.plain_text)


def test_retries_count_for_budgets_and_are_replayed(tmp_path: Path) -> None:
    program = sgl.function(lambda s: s.__iadd__(gen("n", Even, retries=3)))
    state = program.run(backend=MockBackend(["1", "3", "5", "4"]), budget=Budget(calls=2))
    assert isinstance(state.error(), BudgetExceeded)
    asked = program.run(backend=MockBackend(["1", "3", "4"]), cache_dir=tmp_path, seed=3)
    assert asked["n"] == 4
    again = program.run(backend=MockBackend([]), cache="ro", cache_dir=tmp_path, seed=3)
    assert again["n"] == 4
    assert again.text() == asked.text() == "4"


def test_each_try_has_a_seed_of_its_own() -> None:
    backend = MockBackend(["1", "3", "4"])
    assert (
        sgl.function(lambda s: s.__iadd__(gen("n", Even, retries=3))).run(backend=backend, seed=3)["n"] == 4
    )
    assert len({call.sampling.seed for call in backend.calls}) == 3


def test_retries_need_a_type() -> None:
    for words in ({}, {"regex": "a"}, {"choices": ["a", "b"]}, {"dtype": int}):
        with pytest.raises(BadProgram, match="retries requires a type"):
            gen("x", retries=1, **words)
        assert gen("x", retries=0, **words) == gen("x", retries=None, **words)  # nothing is asked for
    for value in (-1, True, 1.0, "2"):
        with pytest.raises(BadProgram, match="retries must be at least"):
            gen("x", int, retries=value)  # type: ignore[call-overload]


def test_options_and_whole_numbers() -> None:
    """The constraint keeps to them, but what is cut is neither."""

    def reply(call: Call) -> str:
        return {0: "seventeen", 1: "seven"}[len(backend.calls) - 1]

    backend = MockBackend(reply, tokens="bytes")
    kind = Literal["seventeen", "seven"]
    program = sgl.function(lambda s: s.__iadd__(gen("x", kind, max_tokens=6, retries=1)))
    assert program.run(backend=backend)["x"] == "seven"


def test_a_plan_counts_them() -> None:
    program = sgl.function(lambda s: s.__iadd__(gen("n", Even, max_tokens=5, retries=2)))
    assert program.plan().completion_tokens == 15
    assert [node.retries for node in program.trace().nodes if isinstance(node, sgl.ir.Gen)] == [2]
    assert sgl.Program.from_json(program.trace().to_json()).body == program.trace().body
