"""gen and other nodes formatted into texts: the node again where the text is added, an error elsewhere."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl import BadProgram, MockBackend, assistant, gen, select, system, user
from sglang_dsl.ir import Seq, Text, concat, syntax

WAYS: list[Callable[[str, Any, str], str]] = [
    lambda a, node, b: f"{a}{node}{b}",
    lambda a, node, b: a + f"{node}" + b,
    lambda a, node, b: a + "%s" % node + b,  # noqa: UP031
    lambda a, node, b: a + "{0}".format(node) + b,  # noqa: UP030, UP032
    lambda a, node, b: "".join([a, str(node), b]),
    lambda a, node, b: string.Template("${a}${node}${b}").substitute(a=a, node=node, b=b),
    lambda a, node, b: f"{f'{a}{node}'}{b}",
]


@given(st.sampled_from(WAYS), st.text(max_size=20), st.text(max_size=20), st.integers(1, 99))
def test_a_formatted_node_is_the_node(
    way: Callable[[str, Any, str], str], before: str, behind: str, most: int
) -> None:
    """In every way that text is formatted and added; with text that looks like anything around it."""
    node = gen("x", max_tokens=most) + select("y", ["a", "b"])
    text, plain = way(before, node, behind), before + node + behind

    def shape(made: Any) -> list[Any]:
        return [one for one in concat(made).nodes if one != Text("")]

    assert shape(concat(text)) == shape(plain)
    assert shape(user(text)) == shape(user(plain))
    assert shape(assistant("a" + text)) == shape(assistant("a" + plain)) or before
    state = sgl.function(lambda s: s.__iadd__(text)).run(backend=MockBackend(["made"]))
    assert state.text() == f"{before}made{state['y']}{behind}"


def test_in_programs_of_every_kind() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += system(f"{gen('a')}.")
        s += user("Q: %s?" % gen("b"))  # noqa: UP031
        s += sgl.role("tool", f"<{gen('c')}>")
        s.assistant(f"It is {gen('d')}")
        forks = s.fork(2)
        forks += f" {gen('e')}"
        forks += lambda index: f"{index}{gen('f')}"
        forks.join()

    backend = MockBackend(["a", "b", "c", "d", "e", "e", "f", "f"])
    state = program.run(backend=backend)
    assert [state[name] for name in "abcdef"] == ["a", "b", "c", "d", ["e", "e"], ["f", "f"]]
    assert state.text() == "SYSTEM: a.\nUSER: Q: b?\nTOOL: <c>\nASSISTANT: It is d\n"
    assert program.trace().variables == ("a", "b", "c", "d", "e", "f")

    async def main(s: Any) -> None:
        s += f"[{gen('a')}]"
        assert await s["a"] == "x"

    assert asyncio.run(sgl.function(main).arun(backend=MockBackend(["x"]))).blocking.text() == "[x]"


def test_a_text_is_added_as_often_as_one_likes() -> None:
    text = f"{gen('x')};"
    state = sgl.function(lambda s: s.__iadd__(f"{text}{text}").__iadd__(text)).run(
        backend=MockBackend(["1", "2", "3"])
    )
    assert state.text() == "1;2;3;"
    assert state["x"] == "3"


def test_text_that_is_only_changed_around_it() -> None:
    made = json.dumps({"name": f"{gen('x')}"}).upper().strip()
    state = sgl.function(lambda s: s.__iadd__(made)).run(backend=MockBackend(["Bo"]))
    assert state.text() == '{"NAME": "Bo"}'


def test_a_repr_stays_one() -> None:
    assert repr(gen("x")).startswith("Gen(")
    assert f"{gen('x')!r}" == repr(gen("x"))


@pytest.mark.parametrize(
    "use",
    [
        lambda text: gen(text),
        lambda text: gen("x", regex=text),
        lambda text: gen("x", stop=text),
        lambda text: gen("x", stop=["a", text]),
        lambda text: gen("x", stop_regex=text),
        lambda text: gen("x", choices=["a", text]),
        lambda text: gen("x", json_schema={"const": text}),
        lambda text: gen("x", json_schema=json.dumps({"const": text})),
        lambda text: gen("x", ebnf=text),
        lambda text: gen("x", structural_tag={"type": text}),
        lambda text: select(text, ["a"]),
        lambda text: select("x", [text]),
        lambda text: sgl.role(text, "a"),
        lambda text: "a" + gen("x") + text[:-3],
        lambda text: user(text[3:]),
        lambda text: assistant(text.replace("[", "")),
    ],
)
def test_it_is_an_error_elsewhere_with_the_line(use: Callable[[str], Any]) -> None:
    with pytest.raises(BadProgram, match=r"test_interpolation\.py:\d+"):
        use(f"{gen('inner')}")


def test_a_format_is_refused() -> None:
    for make in (lambda: f"{gen('x'):>10}", lambda: "{:d}".format(gen("x"))):
        with pytest.raises(BadProgram, match=r"cannot be formatted with .*test_interpolation\.py:\d+"):
            make()


def test_none_reaches_a_backend() -> None:
    backend = MockBackend()
    made = Seq((Text(f"{gen('x')}"), gen("y")))
    state = sgl.function(lambda s: s.__iadd__(made)).run(backend=backend)
    assert "add the text itself" in str(state.error())
    assert backend.calls == []


def test_what_a_model_or_a_user_writes_is_text() -> None:
    """Marks of other processes, too."""
    theirs = f"[[{'7' * 24}:0:{'7' * 24}]]"
    f"{gen('x')}"
    assert user(theirs).nodes[1] == Text(theirs)
    state = sgl.function(lambda s: s.__iadd__(theirs + gen("x"))).run(backend=MockBackend([theirs]))
    assert state.text() == theirs * 2


def test_marks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syntax, "MOST_KEPT", len(syntax.KEPT) + 10)
    node = gen("kept", stop=["a"])
    first, used = f"{gen('old', stop=['a'])}", f"{node}"
    for index in range(50):
        f"{gen(f'x{index}', stop=['a'])}{node}"
    assert len(syntax.KEPT) <= syntax.MOST_KEPT
    assert len(syntax._numbers) == len(syntax.KEPT)
    assert concat(used).nodes == (node,)
    if first not in (f"{one}" for one in list(syntax.KEPT.values())):
        with pytest.raises(BadProgram, match="too long ago"):
            user(first)


def test_thoughts_of_a_formatted_gen_are_taken_apart() -> None:
    made = sgl.separate_reasoning(f"A: {gen('x')}")
    assert made == Seq((Text("A: "), sgl.separate_reasoning(gen("x"))))


def test_a_turn_of_a_state_is_no_text() -> None:
    def program(s: Any) -> None:
        s += f"{s.user('hi')}"

    with pytest.raises(BadProgram, match=r"cannot be used as text, at .*test_interpolation\.py:\d+"):
        sgl.function(program).run(backend=MockBackend())

    async def program_async(s: Any) -> None:
        s += f"{s.user('hi')}"

    with pytest.raises(BadProgram, match="cannot be used as text"):
        asyncio.run(sgl.function(program_async).arun(backend=MockBackend()))
