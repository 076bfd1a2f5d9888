"""What a user's sampling_params become, and what is said of wrong ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest
from runtime.protocol.sampling import MAX_STOP_REGEX_BYTES, MAX_STOPS, SamplingParams
from tests.exploring import tries

WRONG: list[tuple[Any, str, str]] = [
    ({"tempreature": 0}, "sampling_params", "'tempreature'"),
    ({"tempreature": 0}, "sampling_params", "did you mean 'temperature'?"),
    ({"max_new_tokens": -1}, "sampling_params.max_new_tokens", "at least 0"),
    ({"max_new_tokens": "many"}, "sampling_params.max_new_tokens", "int"),
    ({"max_new_tokens": 5, "min_new_tokens": 6}, "sampling_params.min_new_tokens", "max_new_tokens(5)"),
    ({"min_new_tokens": -1}, "sampling_params.min_new_tokens", "must be in"),
    ({"temperature": -0.1}, "sampling_params.temperature", "at least 0"),
    ({"temperature": float("nan")}, "sampling_params.temperature", "finite"),
    ({"temperature": True}, "sampling_params.temperature", "float"),
    ({"top_p": 0}, "sampling_params.top_p", "(0, 1]"),
    ({"top_p": 1.01}, "sampling_params.top_p", "(0, 1]"),
    ({"min_p": 1.1}, "sampling_params.min_p", "[0, 1]"),
    ({"top_k": -2}, "sampling_params.top_k", "-1 (off) or at least 1"),
    ({"frequency_penalty": 2.1}, "sampling_params.frequency_penalty", "[-2, 2]"),
    ({"presence_penalty": -2.1}, "sampling_params.presence_penalty", "[-2, 2]"),
    ({"repetition_penalty": 0}, "sampling_params.repetition_penalty", "(0, 2]"),
    ({"repetition_penalty": 2.1}, "sampling_params.repetition_penalty", "(0, 2]"),
    ({"stop": [f"s{n}" for n in range(MAX_STOPS + 1)]}, "sampling_params.stop", "at most 32"),
    ({"stop": ""}, "sampling_params.stop", "empty"),
    ({"stop": ["a", 5]}, "sampling_params.stop[1]", "str"),
    ({"stop": "\ud83d"}, "sampling_params.stop", "surrogates"),
    ({"stop_regex": ["a"] * (MAX_STOPS + 1)}, "sampling_params.stop_regex", "at most 32"),
    ({"stop_regex": "a" * (MAX_STOP_REGEX_BYTES + 1)}, "sampling_params.stop_regex[0]", "1 to 256 bytes"),
    ({"stop_regex": ["a", "한" * 86]}, "sampling_params.stop_regex[1]", "has 258"),
    ({"stop_regex": ["a", "(b"]}, "sampling_params.stop_regex[1]", "regular expression"),
    ({"stop_regex": ""}, "sampling_params.stop_regex[0]", "has 0"),
    ({"stop_token_ids": [-1]}, "sampling_params.stop_token_ids", "0 or greater"),
    ({"seed": -1}, "sampling_params.seed", "2**63"),
    ({"sampling_seed": 2**63}, "sampling_params.seed", "2**63"),
    ({"sampling_seed": 1, "seed": 2}, "sampling_params.seed", "the same field"),
    ({"n": 0}, "sampling_params.n", "[1, 4096]"),
    ({"logit_bias": {"-5": 1.0}}, "sampling_params.logit_bias", "'-5'"),
    ({"logit_bias": {"five": 1.0}}, "sampling_params.logit_bias", "'five'"),
    ({"logit_bias": {"5": 1.0, 5: 2.0}}, "sampling_params.logit_bias", "twice"),
    ({"logit_bias": {"5": "x"}}, "sampling_params.logit_bias", "float"),
    ({"logit_bias": {"5": float("inf")}}, "sampling_params.logit_bias", "finite"),
    ({"logit_bias": [5]}, "sampling_params.logit_bias", "list"),
    ({"stream_interval": 0}, "sampling_params.stream_interval", "at least 1"),
    ({"custom_logit_processor": ""}, "sampling_params.custom_logit_processor", "name"),
    ({"regex": "a", "ebnf": "root ::= 'a'"}, "sampling_params", "regex and ebnf"),
    ({"regex": 5}, "sampling_params.regex", "text"),
    ("hot", "sampling_params", "str"),
    (SamplingParams(temperature="hot"), "sampling_params.temperature", "float"),  # type: ignore[arg-type]
    (SamplingParams(top_p=2.0), "sampling_params.top_p", "2.0"),
]


@pytest.mark.parametrize(("given", "where", "says"), WRONG)
def test_what_is_wrong_is_named(given: Any, where: str, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams.from_user(given)
    assert str(caught.value.where).startswith(where)
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_an_empty_constraint_is_a_constraints_error() -> None:
    with pytest.raises(BadConstraint):
        SamplingParams.from_user({"regex": ""})


def test_short_forms() -> None:
    params, constraint = SamplingParams.from_user(
        {
            "stop": "x", "stop_regex": "a+", "stop_token_ids": 7, "logit_bias": {"5": 1, 6: -2.5},
            "sampling_seed": 3, "temperature": 0, "top_k": None, "seed": None,
        }
    )  # fmt: skip
    assert constraint is None
    assert params == SamplingParams(
        stop=("x",), stop_regex=("a+",), stop_token_ids=(7,), logit_bias={5: 1.0, 6: -2.5}, seed=3,
        temperature=0.0,
    )  # fmt: skip
    assert params.greedy
    assert SamplingParams.from_user({})[0] == SamplingParams()
    assert SamplingParams.from_user({"temperature": 5e-7})[0].greedy


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"ebnf": "root ::= 'a'"}, Constraint("ebnf", "root ::= 'a'")),
        ({"json_schema": '{"type":"object"}'}, Constraint("json_schema", '{"type":"object"}')),
        ({"json_schema": {"type": "object"}}, Constraint("json_schema", '{"type":"object"}')),
        ({"json_schema": True}, Constraint("json_schema", "true")),
        ({"structural_tag": {"structures": []}}, Constraint("structural_tag", '{"structures":[]}')),
        ({"regex": None, "ebnf": None}, None),
    ],
)
def test_constraints_among_the_parameters(given: dict[str, Any], expected: Constraint | None) -> None:
    params, constraint = SamplingParams.from_user(given)
    assert constraint == expected
    assert params == SamplingParams()


@settings(deadline=None, max_examples=tries(100))
@given(
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), max_size=4),
    bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(0, 2**63 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
)
def test_what_is_in_range_comes_through_json(
    stop: list[str], bias: dict[int, float], seed: int | None, top_p: float
) -> None:
    given = {"stop": stop, "logit_bias": bias, "seed": seed, "top_p": top_p}
    through = msgspec.json.decode(msgspec.json.encode(given))
    params, _ = SamplingParams.from_user(through)
    assert params == SamplingParams(stop=tuple(stop), logit_bias=bias, seed=seed, top_p=top_p)
    assert SamplingParams.from_user(params)[0] == params
