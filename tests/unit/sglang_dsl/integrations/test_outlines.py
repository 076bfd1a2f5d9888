"""Types and templates of outlines in programs: what a generation is held to, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl import BadProgram, MockBackend, gen

pytest.importorskip("outlines", reason="outlines is not installed (the extra `dev`)")
import outlines
from outlines import types
from outlines.types.dsl import to_regex

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@sgl.function
def ask(s: Any, term: Any, **words: Any) -> None:
    s += gen("x", term, **words)


@pytest.mark.parametrize(
    "term",
    [
        types.email,
        types.ipv4,
        types.digit.exactly(3) + "-" + types.either("a.b", "c"),
        types.Choice(["a.b", "c"]),
    ],
)
def test_terms_are_regular_expressions(term: Any) -> None:
    node: Any = gen("x", term, max_tokens=9)
    assert (node.regex, node.sampling.max_tokens) == (to_regex(term), 9)


def test_a_schema_and_a_grammar_stay_what_they_are() -> None:
    plain: Any = gen("x", types.json_schema(SCHEMA))
    assert json.loads(plain.json_schema) == SCHEMA
    spaced: Any = gen("x", types.JsonSchema(SCHEMA, whitespace_pattern=" "))
    assert re.fullmatch(spaced.regex, '{ "age" : 3 }')
    grammar: Any = gen("x", types.cfg('start: "a" | "b"'))
    assert grammar.ebnf == 'start: "a" | "b"'


def test_the_text_matches() -> None:
    state = ask(types.digit.exactly(3), backend=MockBackend())
    assert re.fullmatch(r"\d{3}", state["x"])
    assert json.loads(ask(types.json_schema(SCHEMA), backend=MockBackend())["x"]).keys() == {"age"}


@pytest.mark.parametrize("words", [{"regex": "a"}, {"choices": ["a"]}, {"json_schema": SCHEMA}])
def test_one_form_alone(words: Any) -> None:
    with pytest.raises(BadProgram, match="gen takes only one of"):
        gen("x", types.email, **words)


def test_what_cannot_be_one_is_refused() -> None:
    with pytest.raises(BadProgram, match="Sequence of outlines cannot be a regular expression"):
        gen("x", "a" + types.cfg('start: "a"'))
    with pytest.raises(BadProgram, match="Template is not one"):
        gen("x", outlines.Template.from_string("a"))


def test_templates_hold_values_and_generations() -> None:
    template = outlines.Template.from_string("""
        {% for name in names %}{{ name }} is {{ age[name] }}.
        {% endfor %}""")

    @sgl.function
    def ages(s: Any, names: list[str]) -> None:
        s += template(names=names, age={name: gen(name, types.integer) for name in names})

    state = ages(["Ann", "Bo"], backend=MockBackend(["31", "4"]))
    assert state.text() == "Ann is 31.\nBo is 4.\n"
    assert (state["Ann"], state["Bo"]) == ("31", "4")
