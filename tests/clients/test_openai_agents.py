"""OpenAI's agents SDK against the real processes, over responses (its default) and over chat completions:
tools are called and their results answered with; typed outputs."""

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
    Tools,
    Use,
    with_models,
)

pytest.importorskip("agents", reason="openai-agents is not installed (the extra `clients`)")
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ToolOutputText,
    function_tool,
)

MODELS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
QUIET = RunConfig(tracing_disabled=True)


class get_time(BaseModel):
    """Local time of a city"""

    city: str


def greedy(**more: Any) -> ModelSettings:
    return ModelSettings(temperature=0, max_tokens=120, **more)


@pytest.fixture(params=MODELS, ids=lambda kind: kind.__name__)
def use(shared_server: Any, request: pytest.FixtureRequest) -> Use:
    """Runs it with what makes models of a name."""

    def model_of(client: openai.AsyncOpenAI) -> Any:
        return lambda name="pocket": request.param(name, openai_client=client)

    return partial(with_models, shared_server.url, model_of)


def agent(model: Any, given: Tools, settings: ModelSettings, **more: Any) -> Agent[Any]:
    tools = [function_tool(given.get_weather), function_tool(given.set_timer)]
    return Agent("weatherman", model=model, tools=tools, model_settings=settings, **more)


def test_a_call_its_result_and_an_answer(use: Use) -> None:
    async def program(model: Any) -> None:
        given = Tools()
        told = await Runner.run(agent(model(), given, greedy()), QUESTION, run_config=QUIET)
        assert (told.final_output, given.called) == (ANSWER, ["Lisbon"])

    use(program)


def test_settings_of_its_own(use: Use) -> None:
    """What applications set; that reasoning comes encrypted is asked for over responses only."""

    async def program(model: Any) -> None:
        given, made = Tools(), model()
        settings = greedy(
            tool_choice="required", parallel_tool_calls=False, store=False, metadata={"a": "b"},
            response_include=(
                ["reasoning.encrypted_content"] if isinstance(made, OpenAIResponsesModel) else None
            ),
        )  # fmt: skip
        one = agent(made, given, settings, instructions="Be brief.")
        told = await Runner.run(one, QUESTION, run_config=QUIET)
        assert (told.final_output, given.called) == (ANSWER, ["Lisbon"])

    use(program)


def test_streamed(use: Use) -> None:
    async def program(model: Any) -> None:
        given = Tools()
        streaming = Runner.run_streamed(agent(model(), given, greedy()), QUESTION, run_config=QUIET)
        events = [event.data async for event in streaming.stream_events() if "raw" in event.type]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert (streaming.final_output, "".join(deltas), given.called) == (ANSWER, ANSWER, ["Lisbon"])

    use(program)


@pytest.mark.parametrize("use", [OpenAIResponsesModel], indirect=True)
def test_a_conversation_that_the_server_keeps(use: Use) -> None:
    async def program(model: Any) -> None:
        given = Tools()
        one = agent(model(), given, greedy())
        told = await Runner.run(one, QUESTION, run_config=QUIET, auto_previous_response_id=True)
        assert (told.final_output, given.called) == (ANSWER, ["Lisbon"])

    use(program)


def test_a_result_in_parts(use: Use) -> None:
    async def program(model: Any) -> None:
        @function_tool
        def get_weather(city: str) -> list[ToolOutputText]:
            """Weather of a city"""
            return [ToolOutputText(text='{"degrees": 21, '), ToolOutputText(text='"sky": "sun"}')]

        one = Agent("weatherman", model=model(), tools=[get_weather], model_settings=greedy())
        told = await Runner.run(one, QUESTION, run_config=QUIET)
        assert told.final_output == ANSWER

    use(program)


def test_typed_outputs(use: Use) -> None:
    async def program(model: Any) -> None:
        one = Agent("clock", model=model(), output_type=get_time, model_settings=greedy())
        told = await Runner.run(one, JSON_QUESTION, run_config=QUIET)
        assert told.final_output == get_time(city="Lisbon")

    use(program)


def test_tools_before_a_typed_output(use: Use) -> None:
    """The schema is for the answer, and calls come before it."""

    async def program(model: Any) -> None:
        given = Tools()
        one = agent(model(), given, greedy(), output_type=get_time, tool_use_behavior="stop_on_first_tool")
        told = await Runner.run(one, QUESTION, run_config=QUIET)
        assert given.called == ["Lisbon"]
        assert "sun" in str(told.final_output)

    use(program)


def test_an_unknown_model(use: Use) -> None:
    async def program(model: Any) -> None:
        with pytest.raises(openai.NotFoundError, match=BAD_MODEL_TOLD):
            await Runner.run(Agent("nobody", model=model("nope")), QUESTION, run_config=QUIET)

    use(program)
