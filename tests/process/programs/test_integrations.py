"""Other libraries' models over the engine in this process: a call, its result and an answer; streams; typed
outputs. Each library from its own package."""

from __future__ import annotations

import asyncio
import functools
import json
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

import sglang_dsl as sgl
from runtime.api import Engine
from runtime.protocol.registry import MissingExtra
from sglang_dsl import BackendError, BadProgram, assistant, gen, user
from tests.process.patience import PROGRAM_S
from tests.process.tools.weather import ANSWER, JSON_QUESTION, QUESTION, TIME_QUESTION, Tools

pytest.importorskip("langchain_core", reason="langchain-core is not installed (the extra `langchain`)")
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool

from sglang_dsl.integrations.langchain import LangChainModel

ROOT = Path(__file__).resolve().parents[3]
RIVER_QUESTION, RIVER = "Which river runs through Ostrel?", "The river of Ostrel is Sarn."


class City(BaseModel):
    """A city"""

    city: str


class CityDict(TypedDict):
    """A city"""

    city: str


@pytest.fixture
def model(engine: Engine) -> LangChainModel:
    return LangChainModel(backend=engine, temperature=0, max_tokens=120)


# -- LangChain -------------------------------------------------------------------------------------------


def test_langchain_answers_and_streams(model: LangChainModel, engine: Engine) -> None:
    said = model.invoke(RIVER_QUESTION)
    assert said.text == RIVER
    usage: Any = said.usage_metadata
    assert usage["input_tokens"] == len(engine.prompt_ids(_request(RIVER_QUESTION)))
    assert said.response_metadata["finish_reason"] == "stop"
    pieces = list(model.stream(RIVER_QUESTION))
    whole = functools.reduce(operator.add, pieces)
    assert (whole.text, whole.usage_metadata["output_tokens"]) == (RIVER, usage["output_tokens"])
    assert model.invoke(RIVER_QUESTION, max_tokens=2).response_metadata["finish_reason"] == "length"
    assert model.invoke(RIVER_QUESTION, stop=["Ostrel"]).text == "The river of "
    assert model.invoke(RIVER_QUESTION, regex="[xy]{4}").text.strip("xy") == ""


def _request(question: str) -> Any:
    from runtime.protocol.io_struct import GenerateReqInput
    from runtime.protocol.messages import Message

    return GenerateReqInput(messages=[Message("user", question), Message("assistant", open=True)])


def test_langchain_in_async_code(model: LangChainModel) -> None:
    async def program() -> tuple[str, str, list[str]]:
        pieces = [one.text async for one in model.astream(RIVER_QUESTION)]
        many = await model.abatch([RIVER_QUESTION, QUESTION.replace("Lisbon", "Porto")])
        return (await model.ainvoke(RIVER_QUESTION)).text, "".join(pieces), [one.text for one in many]

    whole, pieces, many = asyncio.run(program())
    assert whole == pieces == many[0] == RIVER


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_calls_tools(model: LangChainModel, stream: bool) -> None:
    given = Tools()
    tools = [StructuredTool.from_function(one) for one in (given.get_weather, given.set_timer)]
    bound = model.bind_tools(tools)

    def said(messages: Any) -> Any:
        return functools.reduce(operator.add, bound.stream(messages)) if stream else bound.invoke(messages)

    history: list[Any] = [HumanMessage(QUESTION)]
    asked = said(history)
    assert [(call["name"], call["args"]) for call in asked.tool_calls] == [
        ("get_weather", {"city": "Lisbon"})
    ]
    assert asked.response_metadata["finish_reason"] == "tool_calls"
    history += [asked, tools[0].invoke(asked.tool_calls[0])]
    answer = said(history)
    assert (answer.tool_calls, answer.text) == ([], ANSWER)
    forced = model.bind_tools(tools, tool_choice="set_timer").invoke(
        [SystemMessage("Be brief."), ("user", "Hi")]
    )
    assert [call["name"] for call in forced.tool_calls] == ["set_timer"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_typed_outputs(model: LangChainModel, method: str) -> None:
    question = JSON_QUESTION if method == "json_schema" else TIME_QUESTION
    assert model.with_structured_output(City, method=method).invoke(question) == City(city="Lisbon")
    assert model.with_structured_output(CityDict, method=method).invoke(question) == {"city": "Lisbon"}
    raw = model.with_structured_output(City, method=method, include_raw=True).invoke(question)
    assert (raw["parsed"], raw["parsing_error"]) == (City(city="Lisbon"), None)


def test_langchain_tells_errors(model: LangChainModel, engine: Engine) -> None:
    with pytest.raises(BadProgram, match="has no parameter temprature"):
        model.invoke(RIVER_QUESTION, temprature=0)
    with pytest.raises(ValueError, match="not in model_kwargs"):
        LangChainModel(backend=engine, model_kwargs={"temperature": 0})
    with pytest.raises(BackendError, match="tokens"):
        model.invoke("word " * 9000)
    with pytest.raises(BadProgram, match="method must be"):
        model.with_structured_output(City, method="json_mode")


def test_a_library_that_is_not_installed_is_named() -> None:
    code = (
        "import sys; sys.modules['langchain_core'] = None\n"
        "from runtime.protocol.registry import MissingExtra\n"
        "try: from sglang_dsl.integrations import LangChainModel\n"
        "except MissingExtra as error: print(error)"
    )
    assert "pip install 'sglang-dsl[langchain]'" in _run(code)
    assert issubclass(MissingExtra, ImportError)
    with pytest.raises(ImportError, match="nothing_such"):
        from sglang_dsl.integrations import nothing_such  # type: ignore[attr-defined] # noqa: F401


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROGRAM_S, cwd=ROOT,
        check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- outlines --------------------------------------------------------------------------------------------


def test_types_of_outlines_on_the_engine(engine: Engine) -> None:
    types = pytest.importorskip("outlines.types")

    @sgl.function
    def read(s: Any, form: Any) -> None:
        s += user("What day is today?") + assistant(gen("x", form, max_tokens=64, temperature=0))

    forms = [types.email, types.date, types.ipv4, types.uuid4, types.either("Monday", "Tuesday")]
    for state, form in zip(
        read.run_batch([{"form": one} for one in forms], backend=engine), forms, strict=True
    ):
        assert form.matches(state["x"]), (form, state["x"])
    schema = types.json_schema(
        {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}
    )
    assert type(json.loads(read(schema, backend=engine)["x"])["day"]) is int
    with pytest.raises(BackendError, match="look-ahead"):
        read(types.isbn, backend=engine).text()


# -- DSPy ------------------------------------------------------------------------------------------------
