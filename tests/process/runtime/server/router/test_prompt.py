"""What the router reads of a body: prompts with a common beginning have one there too, and nothing raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.server.router.pool import MOST_PROMPT, RequestFacts, read_facts

TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


def asked(**body: Any) -> RequestFacts:
    return read_facts(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"text": "a long story"}, {"text": "a long story that goes on"}),
        ({"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3, 4]}),
        ({"messages": TURNS[:1]}, {"messages": TURNS}),
        ({"tools": [{"name": "f"}], "messages": TURNS[:1]}, {"messages": TURNS, "tools": [{"name": "f"}]}),
        ({"prompt": ["a long"]}, {"prompt": ["a longer"]}),
    ],
)
def test_a_common_beginning_is_one(short: dict[str, Any], long: dict[str, Any]) -> None:
    one, other = asked(**short, stream=True).prompt, asked(temperature=1, **long).prompt
    assert other.startswith(one[:-3])  # without the end of the text or list


def test_caches_that_share_nothing_begin_otherwise() -> None:
    made = {
        asked(text="x" * 500, **other).prompt[:20] for other in ({}, {"lora_path": "l"}, {"cache_salt": "s"})
    }
    assert len(made) == 3


@pytest.mark.parametrize(
    ("given", "found"), [(3, 3.0), (0.5, 0.5), (0, None), (True, None), ("3", None), (None, None)]
)
def test_a_deadline(given: Any, found: float | None) -> None:
    assert asked(text="x", timeout_s=given).timeout_s == found


def test_a_prompt_is_cut() -> None:
    assert len(asked(text="x" * (2 * MOST_PROMPT)).prompt) == MOST_PROMPT


@pytest.mark.parametrize(
    ("body", "held", "program"),
    [
        ({"session_id": "s"}, "s", None),
        ({"session_id": [None, "s"]}, "s", None),
        ({"session_params": {"id": "s", "offset": 1}}, "s", None),
        ({"session_params": [None, {"id": "s"}]}, "s", None),
        ({"previous_response_id": "resp_1"}, "resp_1", None),
        ({"routing_key": "p"}, None, "p"),
        ({"prompt_cache_key": "p"}, None, "p"),
        ({"session_id": "", "routing_key": 3}, None, None),
    ],
)
def test_what_is_held(body: dict[str, Any], held: str | None, program: str | None) -> None:
    found = asked(**body)
    assert (found.held, found.program) == (held, program)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
NAMES = st.sampled_from(
    ["text", "messages", "session_id", "session_params", "routing_key", "input_ids", "other"]
)


@given(st.dictionaries(NAMES, JSON) | JSON)
def test_any_json_is_read(body: Any) -> None:
    assert isinstance(read_facts(json.dumps(body).encode()), RequestFacts)


@given(st.binary())
def test_any_bytes_are_read(body: bytes) -> None:
    assert isinstance(read_facts(body), RequestFacts)
