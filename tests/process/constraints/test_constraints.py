"""Constraints end to end: programs over an engine and over a server, and the real SDKs with typed formats."""

from __future__ import annotations

import asyncio
import enum
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pydantic
import pytest

from runtime.api import Engine
from runtime.protocol.errors import BadRequest
from sglang_dsl import (
    BackendError,
    ProgramError,
    ProgramState,
    RuntimeEndpoint,
    Unsupported,
    function,
    gen,
)
from sglang_dsl.backends.base import Backend
from sglang_dsl.backends.engine import EngineBackend
from tests.partial_json import is_prefix
from tests.process.patience import PATIENCE_S, in_pieces


class Skill(enum.Enum):
    BOW = "bow"
    SONG = "a song"


class Gear(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    weight: int = pydantic.Field(ge=1, le=9)


class Trade(pydantic.BaseModel):
    town: Literal["Ostrel", "Karsk"]
    skill: Skill
    paid: bool


class Hero(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=10)
    town: Literal["Ostrel", "Karsk"]
    skill: Skill
    gear: list[Gear] = pydantic.Field(min_length=1, max_length=2)
    rank: int | None


@pytest.fixture(params=["engine", "endpoint"])
def backend(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Backend]:
    if request.param == "engine":
        yield EngineBackend(engine)
    else:
        yield RuntimeEndpoint(request.getfixturevalue("shared_server").url)


@function(temperature=0, max_tokens=160)
def ask(s: ProgramState, node: Any) -> None:
    s += "A hero: "
    s += node


def test_typed_values(backend: Backend) -> None:
    state = ask.run(gen("hero", Hero, whitespace="compact"), backend=backend)
    hero = state["hero"]
    assert isinstance(hero, Hero)
    assert hero == Hero.model_validate_json(state.raw("hero"))
    compact = json.dumps(json.loads(state.raw("hero")), separators=(",", ":"), ensure_ascii=False)
    assert state.raw("hero") == compact
    assert state.get_meta_info("hero")["grammar"]["backend"]
    assert isinstance(ask.run(gen("x", Skill), backend=backend)["x"], Skill)
    assert isinstance(ask.run(gen("x", int, 4), backend=backend)["x"], int)
    three = ask.run(gen("x", Literal["up", "down"], n=3, temperature=1), backend=backend)["x"]
    assert len(three) == 3
    assert set(three) <= {"up", "down"}


def test_a_hero_grows_while_it_is_written(backend: Backend) -> None:
    whole: Any = None

    def watch() -> list[Any]:
        nonlocal whole
        state = ask.run(gen("hero", json_schema=Hero), backend=backend, stream=True)
        seen = list(state.object_iter("hero"))
        whole = json.loads(state["hero"])
        assert seen[-1] == whole
        assert all(is_prefix(one, whole) for one in seen)
        return seen

    in_pieces(watch, 6)
    typed = ask.run(gen("hero", Hero), backend=backend, stream=True)

    async def heroes() -> list[Any]:
        return [one async for one in typed.object_async_iter("hero")]

    *growing, last = asyncio.run(heroes())
    assert last == typed["hero"]
    assert last.model_dump(mode="json") == whole
    assert all(isinstance(one, Hero) for one in growing)


CHECKED: list[dict[str, Any]] = [
    {"type": "array", "items": {"enum": [[1], [2], [3], [4], [5]]}, "minItems": 4, "uniqueItems": True},
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 50},
            "b": {"type": "string", "maxLength": 4},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
        "not": {"properties": {"a": {"multipleOf": 2}}},
    },
]


@pytest.mark.parametrize("schema", CHECKED, ids=["unique", "not"])
def test_what_was_shown_is_never_taken_back(engine: Engine, schema: dict[str, Any]) -> None:
    """Though tokens are: where a validator refuses what the text has led to, the generation goes back."""
    backend, rollbacks = EngineBackend(engine), 0
    for seed in range(4):
        node = gen("x", json_schema=schema, temperature=1.2, seed=seed)
        state = ask.run(node, backend=backend, stream=True)
        seen = list(state.object_iter("x"))
        final = json.loads(state["x"])
        jsonschema.validate(final, schema)
        assert seen[-1] == final
        assert all(is_prefix(one, final) for one in seen)
        rollbacks += state.get_meta_info("x")["grammar"]["rollbacks"]
    assert rollbacks > 0


def test_every_word_is_kept(backend: Backend) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<hero>",
            "end": "</hero>",
            "content": {"type": "json_schema", "json_schema": Gear},
        },
    }
    found = ask.run(
        gen("ebnf", ebnf='root ::= "no " [a-c]{3} "."') + gen("tag", structural_tag=tag, whitespace="single"),
        backend=backend,
    )  # fmt: skip
    assert re.fullmatch(r"no [a-c]{3}\.", found["ebnf"])
    inside = re.fullmatch(r"<hero>(.*)</hero>", found["tag"])
    assert inside is not None
    assert Gear.model_validate_json(inside[1])


WRONG: list[tuple[dict[str, Any], type[ProgramError], str]] = [
    (
        {"json_schema": {"properties": {"a": {"type": "strin"}}}},
        BackendError,
        "json_schema #/properties/a/type",
    ),
    ({"json_schema": {"$ref": "http://else/where"}}, Unsupported, "leads out of the schema"),
    (
        {"json_schema": {"type": "object", "required": ["a"], "additionalProperties": False}},
        BackendError,
        "nothing",
    ),
    ({"regex": "a(?=b)"}, Unsupported, "regex: look-ahead or look-behind at position 1"),
    ({"ebnf": 'root ::= "a"\n  b'}, BackendError, "ebnf: .*line 2"),
    ({"structural_tag": {"format": {"type": "tags"}}}, BackendError, "structural_tag /format: "),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("words", "kind", "place"), WRONG, ids=lambda case: str(case)[:50])
def test_what_is_wrong_is_told_at_the_read(
    backend: Backend, words: dict[str, Any], kind: type[ProgramError], place: str, stream: bool
) -> None:
    state = ask.run(gen("x", **words), backend=backend, stream=stream)
    with pytest.raises(kind, match=place) as caught:
        state["x"]
    error = caught.value
    assert (error.program, error.variable, error.status) == ("ask", "x", 400)
    assert error.source is not None
    assert error.source.file == __file__
    with pytest.raises(kind, match=place):
        list(state.object_iter("x"))


# -- SDKs ----------------------------------------------------------------------------------------------------

ASKED: Any = [{"role": "user", "content": "Who is the hero?"}]
GREEDY: Any = {"model": "pocket", "max_tokens": 160, "temperature": 0}
WORN = {"type": "object", "properties": {"a": {"type": "strin"}}}


@pytest.fixture(scope="module")
def client(shared_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def test_openai_parses_and_streams_a_model(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(messages=ASKED, response_format=Trade, **GREEDY)
    hero = done.choices[0].message.parsed
    assert isinstance(hero, Trade)

    def watch() -> list[Any]:
        with client.chat.completions.stream(messages=ASKED, response_format=Trade, **GREEDY) as stream:
            partials = [event.parsed for event in stream if event.type == "content.delta"]
            assert stream.get_final_completion().choices[0].message.parsed == hero
        return partials

    in_pieces(watch, 6)
    asked = client.responses.parse(
        input="Who is the hero?", text_format=Trade, model="pocket", max_output_tokens=160, temperature=0
    )
    assert isinstance(asked.output_parsed, Trade)
    with client.responses.stream(
        input="Who is the hero?", text_format=Trade, model="pocket", max_output_tokens=160, temperature=0
    ) as answer:
        for _ in answer:
            pass
        assert answer.get_final_response().output_parsed == asked.output_parsed


def test_openais_async_client_streams_a_model(shared_server: Any) -> None:
    async def run() -> Any:
        made = openai.AsyncOpenAI(
            base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )
        asked = made.chat.completions.stream(messages=ASKED, response_format=Gear, **GREEDY)
        async with made, asked as stream:
            async for _ in stream:
                pass
            return (await stream.get_final_completion()).choices[0].message.parsed

    assert isinstance(asyncio.run(run()), Gear)


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_is_refused_with_the_place_before_the_stream(
    client: openai.OpenAI, stream: bool
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": WORN, "strict": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=ASKED, response_format=form, stream=stream, **GREEDY)
    assert caught.value.code == "bad_constraint"
    assert caught.value.param == "response_format.json_schema.schema #/properties/a/type"
    with pytest.raises(openai.BadRequestError, match="only one constraint"):
        client.chat.completions.create(
            messages=ASKED, response_format=form, stream=stream, extra_body={"regex": "a"}, **GREEDY
        )


def test_anthropic_parses_and_streams_a_model(shared_server: Any) -> None:
    """Its SDK takes lengths and ranges out of a schema, so the model here has none."""
    words: Any = {"model": "pocket", "max_tokens": 60, "messages": ASKED}
    form: Any = {"format": {"type": "json_schema", "schema": WORN}}
    with anthropic.Anthropic(
        base_url=shared_server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        done = made.messages.parse(output_format=Trade, **words)
        assert isinstance(done.parsed_output, Trade)
        with made.messages.stream(output_format=Trade, **words) as stream:
            text = "".join(stream.text_stream)
        assert isinstance(Trade.model_validate_json(text), Trade)
        with pytest.raises(
            anthropic.BadRequestError, match=r"output_config\.format\.schema #/properties/a/type"
        ):
            made.messages.create(output_config=form, **words)


def test_the_grammar_backend_that_was_asked_for_keeps_a_model_and_is_named() -> None:
    pytest.importorskip("xgrammar")
    with Engine("pocket", max_total_tokens=4096, grammar_backend="xgrammar") as running:
        request = {"json_schema": json.dumps(Hero.model_json_schema()), "max_new_tokens": 300}
        out = running.generate("A hero:", request)
        assert out["meta_info"]["grammar"]["backend"] == "xgrammar"
        assert isinstance(Hero.model_validate_json(out["text"]), Hero)
        unkept = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
        with pytest.raises(BadRequest, match="uniqueItems is not kept exactly by xgrammar"):
            running.generate("Numbers:", {"json_schema": json.dumps(unkept)})
