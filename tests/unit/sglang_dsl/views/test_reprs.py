"""What people see of an object in a terminal, a notebook or a debugger: one line, with what was given."""

from __future__ import annotations

import asyncio
import enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.backends.mock import MockBackend
from sglang_dsl.ir import Sampling


class Mood(enum.Enum):
    GLAD = "glad"
    SAD = "sad"


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        (sgl.gen("a"), "Gen(name='a')"),
        (sgl.gen(), "Gen()"),
        (sgl.gen("a", max_tokens=8, temperature=0), "Gen(name='a', max_tokens=8, temperature=0.0)"),
        (sgl.gen("a", Mood), "Gen(name='a', typed=Mood)"),
        (sgl.gen("a", int, stop=["x"]), "Gen(name='a', stop=('x',), typed=int)"),
        (sgl.select("b", ["p", "q"]), "Select(name='b', choices=('p', 'q'))"),
        ("x\ny" + sgl.gen("a"), "Seq(Text(text='x\\ny'), Gen(name='a'))"),
        (sgl.user("hi"), "Seq(RoleBegin(role='user'), Text(text='hi'), RoleEnd(role='user'))"),
        (sgl.gen("a", max_tokens=3).sampling, "Sampling(max_tokens=3)"),  # type: ignore[union-attr]
        (Sampling(), "Sampling()"),
        (sgl.Budget(tokens=5), "Budget(tokens=5)"),
    ],
)
def test_a_node_shows_what_was_given(node: object, shown: str) -> None:
    assert repr(node) == shown


@given(st.text(max_size=2000), st.lists(st.text(min_size=1, max_size=300), min_size=1, max_size=60))
def test_a_node_is_one_short_line_whatever_it_holds(text: str, choices: list[str]) -> None:
    made = sgl.user(text + sgl.select("c", choices)) + sgl.gen("g", json_schema={"enum": choices})
    for shown in (repr(made), *map(repr, made.nodes)):
        assert len(shown) <= 400
        assert len(shown.splitlines()) <= 1


@sgl.function
def two(s: Any, question: str) -> None:
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("first", max_tokens=4))
    s += sgl.user("And?") + sgl.assistant(sgl.gen("second", max_tokens=4))


def test_a_program_and_a_plan_are_one_line_and_print_as_a_tree() -> None:
    traced = two.trace()
    assert repr(traced) == "Program(two(question): 12 nodes, sets first, second)"
    assert str(traced) == traced.tree()
    plan = two.plan("hi")
    assert repr(plan) == f"Plan({plan.tree().splitlines()[0]})"
    assert "\n" not in repr(plan)
    assert str(plan) == plan.tree()
    assert repr(plan.steps[0]) == f"PlannedCall({plan.steps[0]})"


def test_a_failed_state_says_what_failed() -> None:
    state = two.run("hi", backend=MockBackend(errors={1: RuntimeError("down")}))
    state.error()
    assert repr(state).startswith("ProgramState(failed with BackendError: RuntimeError: down [")
    assert "USER: hi\nASSISTANT: " in repr(state)  # what was said before it
    assert str(state) == repr(state)


def test_a_running_state_says_so_and_is_not_waited_for_to_its_end() -> None:
    state = two.run("hi", backend=MockBackend(delay_s=3600))
    assert repr(state).startswith("ProgramState(running; USER: hi\n")
    state.cancel()
    state.error()
    assert repr(state).startswith("ProgramState(failed with ProgramCancelled: ")


def test_a_running_stream_says_so() -> None:
    state = two.stream("hi", backend=MockBackend(delay_s=3600))
    assert repr(state).startswith("ProgramState(running; ")
    state.cancel()
    state.error()
    assert repr(state).startswith("ProgramState(failed with ProgramCancelled: ")


def test_what_a_streams_body_raised_is_shown() -> None:
    @sgl.function
    def broken(s: Any) -> None:
        s += "a" + sgl.gen("x")
        raise LookupError("no such thing")

    state = broken.stream(backend=MockBackend(["b"]))
    with pytest.raises(LookupError):
        state.sync()
    assert repr(state).startswith("ProgramState(failed with LookupError: no such thing; a")


def test_an_async_state_says_the_same_without_waiting() -> None:
    asyncio.run(_async_states())


async def _async_states() -> None:
    state = await two.arun("hi", backend=MockBackend(delay_s=3600))
    assert repr(state).startswith("AsyncProgramState(running; ")
    state.cancel()
    await state.error()
    assert repr(state).startswith("AsyncProgramState(failed with ProgramCancelled: ")
    done = await two.arun("hi", backend=MockBackend(["a", "b"]))
    await done.sync()
    assert repr(done) == f"AsyncProgramState({await done.text()})"


def test_a_traced_state_shows_its_text() -> None:
    seen: list[str] = []

    @sgl.function
    def looks(s: Any) -> None:
        s += "a" + sgl.gen("x")
        seen.append(repr(s))

    looks.trace()
    assert seen == ["ProgramState(a{x})"]
