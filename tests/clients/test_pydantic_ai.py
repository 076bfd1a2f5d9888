"""pydantic-ai against the real processes, over chat completions and over responses: tools are called and
their results answered with; typed outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.process.tools.weather import (
    ANSWER,
    BAD_MODEL_TOLD,
    JSON_QUESTION,
    QUESTION,
    TIME_QUESTION,
    Tools,
    Use,
    with_models,
)

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed (the extra `clients`)")
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

GREEDY: Any = {"temperature": 0, "max_tokens": 120}
MODELS = (OpenAIChatModel, OpenAIResponsesModel)


class get_time(BaseModel):
    """Local time of a city"""

    city: str


@pytest.fixture(params=MODELS, ids=lambda kind: kind.__name__)
def use(shared_server: Any, request: pytest.FixtureRequest) -> Use:
    """Runs it with what makes models of a name."""

    def model_of(client: openai.AsyncOpenAI) -> Any:
        return lambda name="pocket": request.param(name, provider=OpenAIProvider(openai_client=client))

    return partial(with_models, shared_server.url, model_of)


def test_a_call_its_result_and_an_answer(use: Use) -> None:
    async def program(model: Any) -> None:
        tools = Tools()
        agent = Agent(model(), tools=[tools.get_weather, tools.set_timer], model_settings=GREEDY)
        told = await agent.run(QUESTION)
        assert (told.output, tools.called) == (ANSWER, ["Lisbon"])
        again = await agent.run(QUESTION, message_history=told.all_messages())
        assert (again.output, tools.called) == (ANSWER, ["Lisbon", "Lisbon"])

    use(program)


def test_streamed(use: Use) -> None:
    async def program(model: Any) -> None:
        tools = Tools()
        agent = Agent(model(), tools=[tools.get_weather, tools.set_timer], model_settings=GREEDY)
        async with agent.run_stream(QUESTION) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
            usage = stream.usage
        assert ("".join(pieces), tools.called) == (ANSWER, ["Lisbon"])
        assert usage.output_tokens > 0

    use(program)


def test_typed_outputs(use: Use) -> None:
    """By a tool of the client's, which must be called, and by the server's own schemas."""

    async def program(model: Any) -> None:
        by_tool = await Agent(model(), output_type=get_time, model_settings=GREEDY).run(TIME_QUESTION)
        assert isinstance(by_tool.output, get_time)
        native = await Agent(model(), output_type=NativeOutput(get_time), model_settings=GREEDY).run(
            JSON_QUESTION
        )
        assert native.output == get_time(city="Lisbon")

    use(program)


def test_an_unknown_model(use: Use) -> None:
    async def program(model: Any) -> None:
        with pytest.raises(ModelHTTPError, match=BAD_MODEL_TOLD) as caught:
            await Agent(model("nope")).run(QUESTION)
        assert caught.value.status_code == 404

    use(program)
