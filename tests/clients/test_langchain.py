"""langchain-openai against the real processes, over chat completions and over responses: a call, its result
and an answer; every choice; typed outputs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.process.patience import PATIENCE_S
from tests.process.tools.weather import (
    ANSWER,
    BAD_MODEL_TOLD,
    BAD_SCHEMA,
    BAD_SCHEMA_TOLD,
    JSON_QUESTION,
    QUESTION,
    TIME_QUESTION,
    Tools,
)

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed (the extra `clients`)")
from langchain_core.messages import HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI

CALL = ("get_weather", {"city": "Lisbon"})


class get_time(BaseModel):
    """Local time of a city"""

    city: str


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def words(shared_server: Any, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    with httpx.Client(timeout=PATIENCE_S) as client:
        yield {
            "model": "pocket", "base_url": f"{shared_server.url}/v1", "api_key": "none", "temperature": 0,
            "max_tokens": 120, "max_retries": 0, "http_client": client, "use_responses_api": request.param,
        }  # fmt: skip


@pytest.fixture
def tools() -> list[Any]:
    given = Tools()
    return [StructuredTool.from_function(one) for one in (given.get_weather, given.set_timer)]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    assert message.invalid_tool_calls == []
    return [(call["name"], call["args"]) for call in message.tool_calls]


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_its_result_and_an_answer(words: Any, tools: list[Any], stream: bool, strict: Any) -> None:
    model = ChatOpenAI(**words).bind_tools(tools, strict=strict)

    def said(messages: Any) -> Any:
        if not stream:
            return model.invoke(messages)
        return functools.reduce(operator.add, model.stream(messages))

    history: list[Any] = [HumanMessage(QUESTION)]
    asked = said(history)
    assert calls_of(asked) == [CALL]
    history += [asked, tools[0].invoke(asked.tool_calls[0])]
    answer = said(history)
    assert (calls_of(answer), answer.text) == ([], ANSWER)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("any", {"get_weather", "set_timer"}), ("set_timer", {"set_timer"}), ("none", set()), ("auto", set())],
)
def test_choices(words: Any, tools: list[Any], choice: str, names: set[str]) -> None:
    model = ChatOpenAI(**words).bind_tools(tools, tool_choice=choice, parallel_tool_calls=False)
    made = calls_of(model.invoke([("developer", "Be brief."), ("human", "Good morning!")]))
    assert len(made) == bool(names)
    assert {name for name, _ in made} <= names


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_typed_outputs(words: Any, method: str) -> None:
    typed = ChatOpenAI(**words).with_structured_output(get_time, method=method)
    question = JSON_QUESTION if method == "json_schema" else TIME_QUESTION
    assert typed.invoke(question) == get_time(city="Lisbon")


def test_errors(words: Any) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA}}
    with pytest.raises(Exception, match=BAD_SCHEMA_TOLD) as caught:
        ChatOpenAI(**words).invoke(QUESTION, tools=[bad])
    assert getattr(caught.value, "status_code", None) == 400
    with pytest.raises(Exception, match=BAD_MODEL_TOLD) as caught:
        ChatOpenAI(**{**words, "model": "nope"}).invoke(QUESTION)
    assert getattr(caught.value, "status_code", None) == 404
