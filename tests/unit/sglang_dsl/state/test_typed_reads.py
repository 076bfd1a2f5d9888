"""Reading a variable as what it is: by the node that sets it, and as a value of a type."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import pytest

import sglang_dsl as sgl
from sglang_dsl import AsyncProgramState, BadProgram, InvalidValue, MissingVariable, MockBackend, gen


@dataclass
class Point:
    x: int


def state(*replies: str, form: Any) -> sgl.ProgramState:
    return sgl.function(lambda s: s.__iadd__(form)).run(backend=MockBackend(list(replies)))


def test_a_variable_is_read_by_its_node() -> None:
    age, mood, where = gen("age", int), gen("mood", choices=["a", "b"]), gen("where", Point)
    s = state("41", '{"x": 3}', form=age + " " + mood + " " + where)
    assert s[age] == 41
    assert s[mood] == s["mood"]
    assert s[where] == Point(3)
    assert s.fork(2)[1][age] == 41


def test_only_nodes_that_set_a_variable_can_be_read() -> None:
    s = state("41", form=gen("age", int))
    with pytest.raises(BadProgram, match="has no name"):
        s[gen()]
    with pytest.raises(MissingVariable):
        s[gen("other")]
    for wrong in (3, None, sgl.user("x")):
        with pytest.raises(BadProgram, match="by its name"):
            s[wrong]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("reply", "form", "kind"),
    [
        ("41", gen("v", int), int),
        ("41", gen("v", int), object),
        ("4.5", gen("v", float), float),
        ("True", gen("v", bool), bool),
        ("word", gen("v"), str),
        ("[1, 2]", gen("v", list[int]), list[int]),
        ("[1, 2]", gen("v", list[int]), list),
        ('{"x": 3}', gen("v", Point), Point),
        ("left", gen("v", Literal["left", "right"]), Literal["left", "right"]),
        ("null", gen("v", int | None), int | None),
    ],
)
def test_a_value_of_the_type_is_given(reply: str, form: Any, kind: Any) -> None:
    s = state(reply, form=form)
    assert s.value("v", kind) == s["v"]


@pytest.mark.parametrize(
    ("reply", "form", "kind"),
    [
        ("41", gen("v"), int),
        ("41", gen("v", int), float),
        ("41", gen("v", int), bool),
        ("True", gen("v", bool), int),
        ("[1, 2]", gen("v", list[int]), list[str]),
        ("word", gen("v"), Literal["left", "right"]),
        ("41", gen("v", int), "int"),
    ],
)
def test_another_value_is_not(reply: str, form: Any, kind: Any) -> None:
    s = state(reply, form=form)
    with pytest.raises(InvalidValue, match="v") as caught:
        s.value("v", kind)
    assert caught.value.variable == "v"
    assert s["v"] is not None


def test_where_nothing_was_set_that_is_said() -> None:
    with pytest.raises(MissingVariable):
        state("41", form=gen("v")).value("w", int)


def test_async_programs_read_the_same_way() -> None:
    @sgl.function
    async def program(s: AsyncProgramState) -> tuple[int, int]:
        age = gen("age", int)
        s += age
        with pytest.raises(InvalidValue):
            await s.value("age", str)
        return await s[age], await s.value("age", int)

    assert asyncio.run(program.arun(backend=MockBackend(["41"]))).ret_value == (41, 41)


def test_a_traced_program_reads_what_stands_for_the_value() -> None:
    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        age = gen("age", int)
        s += age
        s += f"{s[age]} {s.value('age', int)}"

    assert "{age} {age}" in program.trace().tree()
