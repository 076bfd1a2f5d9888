"""instructor in all its modes for OpenAI's and Anthropic's interfaces, against the real processes; in tools
mode values of models whole, in pieces and several, and a value that is asked for again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import anthropic
import openai
import pytest
from pydantic import AfterValidator, BaseModel

from tests.process.patience import PATIENCE_S
from tests.process.tools.weather import BAD_MODEL_TOLD, JSON_QUESTION, QUESTION

pytest.importorskip("instructor", reason="instructor is not installed (the extra `clients`)")
import instructor
from instructor.core.exceptions import InstructorRetryException

ASKED: Any = {
    "model": "pocket", "temperature": 0, "max_tokens": 100,
    "messages": [{"role": "user", "content": QUESTION}],
}  # fmt: skip


class get_weather(BaseModel):
    """Weather of a city"""

    city: str


@contextmanager
def through_openai(server: Any, mode: str) -> Iterator[Any]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield instructor.from_openai(made, mode=instructor.Mode[mode])


@pytest.fixture(scope="module")
def client(shared_server: Any) -> Iterator[Any]:
    with through_openai(shared_server, "TOOLS") as made:
        yield made


class Anything(BaseModel, extra="allow"):
    """Where no schema holds, the model says which fields there are."""


class Answer(BaseModel):
    yes: bool


@pytest.mark.parametrize("mode", ["TOOLS", "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"])
def test_modes_with_tools(shared_server: Any, mode: str) -> None:
    with through_openai(shared_server, mode) as client:
        assert client.chat.completions.create(**ASKED, response_model=get_weather).city == "Lisbon"


def test_a_schema(shared_server: Any) -> None:
    with through_openai(shared_server, "JSON_SCHEMA") as client:
        assert isinstance(client.chat.completions.create(**ASKED, response_model=Answer).yes, bool)


@pytest.mark.parametrize("mode", ["JSON", "MD_JSON"])
def test_modes_with_any_json(shared_server: Any, mode: str) -> None:
    with through_openai(shared_server, mode) as client:
        words = {**ASKED, "messages": [{"role": "user", "content": JSON_QUESTION}]}
        assert client.chat.completions.create(**words, response_model=Anything).model_extra


def test_parallel_tools(shared_server: Any) -> None:
    with through_openai(shared_server, "PARALLEL_TOOLS") as client:
        made = client.chat.completions.create(**ASKED, response_model=Iterable[get_weather])
        assert [one.city for one in made] == ["Lisbon"]


@pytest.mark.parametrize("mode", ["TOOLS", "PARALLEL_TOOLS", "JSON"])
def test_modes_of_anthropic(shared_server: Any, mode: str) -> None:
    words = {name: value for name, value in ASKED.items() if name != "temperature"}
    words["extra_body"] = {"temperature": 0}
    with anthropic.Anthropic(
        base_url=shared_server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        create = instructor.from_anthropic(made, mode=instructor.Mode[mode]).chat.completions.create
        match mode:
            case "PARALLEL_TOOLS":
                [value] = create(**words, response_model=Iterable[get_weather])
                assert value.city == "Lisbon"
            case "JSON":
                words["messages"] = [{"role": "user", "content": JSON_QUESTION}]
                assert create(**words, response_model=Anything).model_extra
            case _:
                assert create(**words, response_model=get_weather).city == "Lisbon"


def test_a_value(client: Any) -> None:
    value, reply = client.chat.completions.create_with_completion(**ASKED, response_model=get_weather)
    assert value.city == "Lisbon"
    assert reply.choices[0].finish_reason == "tool_calls"


def test_a_value_in_pieces(client: Any) -> None:
    pieces = [one.city for one in client.chat.completions.create_partial(**ASKED, response_model=get_weather)]
    assert pieces[-1] == "Lisbon"
    assert all("Lisbon".startswith(piece or "") for piece in pieces)


def test_several(client: Any) -> None:
    made = client.chat.completions.create(**ASKED, response_model=Iterable[get_weather], stream=True)
    assert [one.city for one in made] == ["Lisbon"]


def test_it_asks_again(client: Any) -> None:
    """A value that the model's class refuses goes back as the tool's result."""
    refused: list[str] = []

    def first_not(city: str) -> str:
        if not refused:
            refused.append(city)
            raise ValueError("say it again")
        return city

    class get_time(BaseModel):
        """Local time of a city"""

        city: Annotated[str, AfterValidator(first_not)]

    made = client.chat.completions.create(**ASKED, response_model=get_time, max_retries=2)
    assert refused == ["Lisbon"]
    assert isinstance(made.city, str)


def test_an_unknown_model(client: Any) -> None:
    with pytest.raises(InstructorRetryException, match=BAD_MODEL_TOLD):
        client.chat.completions.create(
            **{**ASKED, "model": "nope"}, response_model=get_weather, max_retries=0
        )
