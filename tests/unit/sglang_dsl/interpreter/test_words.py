"""The words and what they lower to."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dsl import (
    BadProgram,
    assistant,
    gen,
    gen_int,
    gen_string,
    greedy_token_selection,
    select,
    system,
    user,
)
from sglang_dsl import patterns as patterns_module
from sglang_dsl.interpreter.lower import lower
from sglang_dsl.ir import Gen, RoleBegin, RoleEnd, Sampling, Select, Seq, Text, from_dict, to_dict


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"regex": "(a"}, "cannot be compiled"),
        ({"regex": ""}, "empty"),
        ({"regex": 3}, "takes text"),
        ({"regex": re.compile("a", re.IGNORECASE)}, "flags"),
        ({"choices": []}, "choices is empty"),
        ({"choices": "yes"}, "takes a list"),
        ({"choices": ["a", ""]}, "not empty"),
        ({"choices": ["a"], "regex": "a"}, "regex and choices"),
        ({"choices": ["a"], "max_tokens": -4}, "max_new_tokens"),
        ({"choices": ["a"], "choices_method": "best"}, "token_length_normalized"),
        (
            {"choices": ["a", "b"], "choices_method": greedy_token_selection, "temperature": 0.5},
            "temperature",
        ),
        ({"dtype": dict}, "dtype must be"),
        ({"dtype": int, "json_schema": "{}"}, "dtype and json_schema"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[1]"}, "JSON object"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "takes a number"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_tokens": -1}, "max_new_tokens"),
        ({"max_tokens": 2.5}, "whole number"),
        ({"max_tokens": True}, "whole number"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_new_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n must be"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "str values"),
        ({"stop_regex": "("}, "cannot be compiled"),
        ({"ignore_eos": 1}, "True or False"),
        ({"name": 3}, "name must be a string"),
    ],
)
def test_a_wrong_word_is_refused_where_it_is_written(words: dict[str, object], said: str) -> None:
    with pytest.raises(BadProgram, match=re.escape(said)):
        gen(**words)  # type: ignore[arg-type]


def test_select_needs_choices() -> None:
    with pytest.raises(BadProgram, match="needs choices"):
        select("x")


def test_choices_make_a_select_that_keeps_its_words() -> None:
    node = gen("c", choices=iter(["a", "b"]), temperature=0.5, seed=3)
    assert node == Select("c", ("a", "b"), "token_length_normalized", 0.5, 3)


def test_roles_wrap_text_and_nodes() -> None:
    assert user("hi").nodes == (RoleBegin("user"), Text("hi"), RoleEnd("user"))
    assert system().nodes == (RoleBegin("system"), RoleEnd("system"))
    nested = assistant("a " + gen("x") + " b").nodes
    assert [type(n) for n in nested] == [RoleBegin, Text, Gen, Text, RoleEnd]
    with pytest.raises(TypeError, match="expected text or a node"):
        user(3)  # type: ignore[arg-type]


def test_stop_lists_are_copied_and_template_stops_never_reach_them() -> None:
    stops = ["\n"]
    for _ in range(3):
        node = gen("x", stop=stops, dtype=int)
        assert isinstance(node, Gen)
        assert lower(node, Sampling()).sampling.stop == ("\n", " ")
    assert stops == ["\n"]


def test_dtype_with_a_single_stop_text() -> None:
    node = gen_int("x", stop="!")
    assert lower(node, Sampling()).sampling.stop == ("!", " ", "\n")


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (int, ["0", "-12", "+7", "3 "], ["", "1.5", "a"]),
        ("float", ["1", "-1.5", ".5", "2.25\n"], ["", "1.", "x"]),
        (bool, ["True", "False"], ["true", "1"]),
        (str, ['""', '"St. Louis"', '"a \\"b\\" \\\\"', '"é, ok!"'], ["a", '"a', '"a"b"', '"a\nb"']),
    ],
)
def test_dtype_lowers_to_a_regex_of_its_values(dtype: object, good: list[str], bad: list[str]) -> None:
    constraint = lower(gen("x", dtype=dtype), Sampling()).constraint  # type: ignore[arg-type]
    assert constraint is not None
    assert constraint.kind == "regex"
    assert all(re.fullmatch(constraint.spec, text) for text in good)
    assert not any(re.fullmatch(constraint.spec, text) for text in bad)


def test_gen_string_values_are_json_strings() -> None:
    spec = lower(gen_string("x"), Sampling()).constraint.spec  # type: ignore[union-attr]
    text = json.dumps('a "quoted" \\ line')
    assert re.fullmatch(spec, text)


def test_json_schema_takes_text_mapping_and_models() -> None:
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, object]:
            return {"type": "integer"}

    for given_schema in ('{"type": "integer"}', {"type": "integer"}, Model):
        constraint = lower(gen("x", json_schema=given_schema), Sampling()).constraint  # type: ignore[arg-type]
        assert constraint is not None
        assert constraint.kind == "json_schema"
        assert json.loads(constraint.spec) == {"type": "integer"}


def test_words_no_request_has_travel_as_options() -> None:
    lowered = lower(gen("x", stop_regex=["a+"], return_text_in_logprobs=True), Sampling())
    assert lowered.options == {"return_text_in_logprobs": True}
    assert lowered.sampling.stop_regex == ("a+",)


def test_patterns_compile() -> None:
    found = {k: v for k, v in vars(patterns_module).items() if k.startswith("REGEX_")}
    assert len(found) >= 4
    for pattern in found.values():
        re.compile(pattern)
    assert re.fullmatch(patterns_module.REGEX_IPV4, "192.168.0.255")
    assert not re.fullmatch(patterns_module.REGEX_IPV4, "256.1.1.1")


LEVELS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 500),
        "temperature": st.floats(0, 2),
        "top_k": st.integers(1, 50),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3).map(tuple),
        "seed": st.integers(0, 9),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 3),
    },
)


@given(LEVELS, LEVELS, LEVELS)
def test_defaults_program_and_call_merge_in_that_order(
    defaults: dict[str, object], program: dict[str, object], call: dict[str, object]
) -> None:
    merged = {**defaults, **program, **call}
    level = Sampling(**program).over(Sampling(**defaults))  # type: ignore[arg-type]
    node = gen("x", **call)  # type: ignore[arg-type]
    assert isinstance(node, Gen)
    lowered = lower(node, level)
    reference = lower(Gen(sampling=Sampling(**merged)), Sampling())  # type: ignore[arg-type]
    assert lowered == reference
    if "max_tokens" in merged:
        assert lowered.sampling.max_new_tokens == merged["max_tokens"]
    if "stop" in merged:
        assert lowered.sampling.stop == merged["stop"]


NODES = st.one_of(
    st.text().map(Text),
    st.builds(lambda n, t: gen(n, temperature=t, stop=["a"]), st.text(min_size=1), st.floats(0, 2)),
    st.lists(st.text(min_size=1), min_size=1).map(lambda c: select("c", c)),
    st.text().map(user),
)


@given(st.lists(NODES, max_size=5))
def test_nodes_go_to_json_and_back(nodes: list[object]) -> None:
    tree = Seq(tuple(nodes))  # type: ignore[arg-type]
    assert from_dict(json.loads(json.dumps(to_dict(tree)))) == tree


def test_unknown_node_kind() -> None:
    with pytest.raises(ValueError, match="known: text"):
        from_dict({"kind": "nothing"})


def test_a_label_says_only_what_was_said() -> None:
    assert gen("x", max_tokens=3).label() == "Gen(name='x', max_tokens=3)"


def test_a_node_is_remembered_by_its_place_and_its_words_types_included() -> None:
    def node(value: Any) -> Any:
        return gen("x", max_tokens=value)

    first, again, other = node(1), node(1), node(2)
    assert first == again
    assert (first.sampling.max_tokens, other.sampling.max_tokens) == (1, 2)
    with pytest.raises(BadProgram, match="whole number"):
        node(True)
    assert node(1.0) == first
    here = gen("x")
    there = gen("x")
    assert here == there
    assert here.src is not None
    assert there.src is not None
    assert here.src.line == there.src.line - 1
