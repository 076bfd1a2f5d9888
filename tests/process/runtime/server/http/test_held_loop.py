"""How long one body holds the event loop, in processor time of this process: what other loads a machine has
does not count. The server is an application that reads bodies as the routes do."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline
from runtime.protocol.errors import BodyTooLarge, RuntimeFault
from runtime.server.app import build_app, describe
from runtime.server.http.body import admit, decode_json, decode_long

MOST_S = 0.5
"""Of processor time between two turns of the loop. Without the limits it is 2 to 20 s; 0.05 to 0.2 s with
them, and 0.3 s where the core's other thread is busy."""
SIZE = 30 << 20
ANSWERS = {200, 400, 404, 413, 501, 504}
"""504: a request took longer than it may."""
STRINGS = ServerConfig().max_body_strings * 3 // 4
NUMBERS = ServerConfig().max_body_values * 3 // 4
TEXT = 2 << 20


def body(item: bytes, count: int | None = None) -> bytes:
    return b'{"input_ids":[' + item * (SIZE // len(item) if count is None else count) + b"1]}"


BODIES: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: body(b"50123,"),
    "lists": lambda: body(b"[],"),
    "objects": lambda: body(b"{},"),
    "texts": lambda: body(b'"",'),
    "as many numbers as may be": lambda: body(b"50123,", 1_000_000),
    "one text": lambda: b'{"text":"' + b"hello, world " * (SIZE // 13) + b'"}',
    "cut emojis": lambda: b'{"text":"' + rb"\ud83d" * (SIZE // 6) + b'"}',
    "names": lambda: b"{" + b",".join(b'"%d":0' % number for number in range(SIZE // 11)) + b"}",
}


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """What is there already is not looked through by the collector, as in the server's processes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def worst(
    app: Any,
    content: bytes,
    times: int,
    clock: Callable[[], float] = time.process_time,
    path: str = "/generate",
    every_s: float = 0.001,
) -> float:
    """The most processor time that passed between two turns of the loop while the body was answered."""
    most, done = 0.0, False

    async def tick() -> None:
        nonlocal most
        last = clock()
        while not done:
            await asyncio.sleep(every_s)
            now = clock()
            most, last = max(most, now - last), now

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:
        ticking = asyncio.create_task(tick())
        headers = {"content-type": "application/json"}
        posts = [client.post(path, content=pieces(content), headers=headers) for _ in range(times)]
        answers = await asyncio.gather(*posts)
        done = True
        await ticking
    assert {answer.status_code for answer in answers} <= ANSWERS, answers[0].text[:400]
    return most


async def pieces(content: bytes) -> Any:
    for at in range(0, len(content), 1 << 16):
        yield content[at : at + (1 << 16)]
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("numbers", "more than 1048576 values, most of them in input_ids"),
        ("lists", "more than 50000 strings, names, lists and objects, most of them in input_ids"),
        ("objects", "more than 50000 strings, names, lists and objects, most of them in input_ids"),
        ("texts", "more than 50000 strings, names, lists and objects, most of them in input_ids"),
        ("names", "more than 50000 strings"),
    ],
)
def test_bodies_of_many_values_are_refused_unread(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr("runtime.server.http.body.json.loads", never)
    config = ServerConfig(max_body_strings=50_000)
    with pytest.raises(BodyTooLarge, match=says) as refused:
        decode_long(BODIES[name](), config, ("input_ids", "text"))
    assert refused.value.where == ("body" if name == "names" else "input_ids")


def test_separators_within_texts_are_no_values() -> None:
    text = r"a,b:c[d{e\",f\\" * 20_000
    content = ('{"a":"' + text + '","b":[1,2]}').encode()
    few = ServerConfig(max_body_values=1000, max_body_strings=1000)
    assert decode_long(content, few)[0]["b"] == [1, 2]
    with pytest.raises(BodyTooLarge, match="more than 3 values"):
        decode_long(content, ServerConfig(max_body_values=3))


JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text('a",:[{\\]}\n')),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text('a",:[{\\]}\n'), inner)),
)


def strings_in(value: Any) -> int:
    match value:
        case str():
            return 1
        case list():
            return 1 + sum(map(strings_in, value))
        case dict():
            return 1 + len(value) + sum(map(strings_in, value.values()))
    return 0


@given(JSON, st.integers(1, 9))
def test_strings_are_counted_wherever_a_piece_ends(value: Any, step: int) -> None:
    content = json.dumps({"a": value}).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.server.http.body._STEP", step)
        count = strings_in({"a": value})
        admit(content, ServerConfig(max_body_strings=count))
        with pytest.raises(BodyTooLarge):
            admit(content, ServerConfig(max_body_strings=count - 1))


def many_numbers(item: str, last: str = "1]") -> str:
    return f'{{"input_ids": [{item * 200}{last}, "text": "{"7" * 300}"}}'


@pytest.mark.parametrize(
    "text",
    [
        many_numbers("5, "),
        many_numbers("-1.5e-3,\n"),
        many_numbers("0.1,"),
        many_numbers("[1,2],[3],"),
        many_numbers("5,", '{"a": [1], "b": "\\ud83d"}]'),
        many_numbers("18446744073709551615,"),
    ],
)
def test_lists_of_numbers_are_read_as_any_other(text: str) -> None:
    assert decode_long(text.encode(), ServerConfig())[0] == decode_json(text.encode(), 64)


@pytest.mark.parametrize(
    "text",
    [
        many_numbers("5,,"),
        many_numbers("05,"),
        many_numbers("5,", "NaN]"),
        many_numbers("5,", "1e999]"),
        many_numbers("5,", '{"a": 1, "a": 2}]'),
        many_numbers("5,").replace("text", "input_ids"),
        many_numbers("5,", "99999999999999999999]"),
        many_numbers("5,", "[" * 70 + "]" * 71),
        many_numbers("5,", "1"),
        many_numbers("5,", "1]") + "5",
    ],
)
def test_lists_of_numbers_are_refused_as_any_other(text: str) -> None:
    says, content = [], text.encode()
    for decode in (lambda: decode_long(content, ServerConfig())[0], lambda: decode_json(content, 64)):
        try:
            says.append(str(decode()))
        except RuntimeFault as fault:
            says.append(repr(fault))
    assert says[0] == says[1]


# -- every field of every route ------------------------------------------------------------------------------

DOCUMENT: dict[str, Any] = json.loads(msgspec.json.encode(describe()))
ORDERS = {"/update_weights_from_disk", "/release_memory_occupation", "/resume_memory_occupation", "/sleep",
          "/wake_up", "/start_profile", "/configure_logging"}  # fmt: skip
"""Of an operator, that change this process or the engine for the other tests. All of them take few fields."""
NEEDED: dict[str, Any] = {
    "model": "pocket", "text": "a", "prompt": "a", "input": "a", "query": "a", "documents": ["a"],
    "messages": [{"role": "user", "content": "a"}], "tokens": [1], "session_id": "a", "server_args": {},
    "lora_name": "a", "lora_path": "a", "constraints": [], "max_tokens": 1,
}  # fmt: skip
SHORT_OUTPUT: dict[str, Any] = {
    "max_tokens": 1, "max_output_tokens": 1, "sampling_params": {"max_new_tokens": 1},
    "options": {"num_predict": 1},
}  # fmt: skip


def referred(schema: Any) -> Any:
    while isinstance(schema, dict) and "$ref" in schema:
        found: Any = DOCUMENT
        for step in schema["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        schema = found
    return schema


def bodies_of_routes() -> dict[str, Any]:
    """Path -> the schema of its body, one path for each kind of body."""
    found: dict[str, Any] = {}
    for path, item in DOCUMENT["paths"].items():
        if path not in ORDERS and "requestBody" in (entry := item.get("post", {})):
            schema = referred(entry["requestBody"]["content"]["application/json"]["schema"])
            if schema not in found.values():
                found[path] = schema
    return found


def types_of(schema: Any) -> set[str]:
    """What a value may be: "string", "object", "array of" what its items may be; all where it is not said."""
    schema = referred(schema)
    if not schema:
        return {
            "string",
            "object",
            *(f"array of {kind}" for kind in ("string", "object", "integer", "array")),
        }
    parts = [types_of(part) for word in ("anyOf", "oneOf") for part in schema.get(word, ())]
    named = schema.get("type", [])
    own = {named} if isinstance(named, str) else set(named)
    if "array" in own:
        own = own - {"array"} | {f"array of {kind.split()[0]}" for kind in types_of(schema.get("items", {}))}
    return own.union(*parts)


def tool(number: int) -> dict[str, Any]:
    """As all APIs have it."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "a+"}, "b": {"enum": ["c"]}},
    }
    facts = {"name": f"tool_{number}", "description": "d", "parameters": schema, "input_schema": schema}
    return {"type": "function", "function": facts, **facts}


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"a": 1}
    for _ in range(depth):
        made = {"a": made, "b": [{"c": "d"}] * (STRINGS // depth // 4)}
    return made


def largest(kind: str) -> Iterator[Any]:
    """Values of about as much as a body may hold."""
    part, image = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,a"}}
    match kind:
        case "string":
            yield "word, " * (TEXT // 6)
        case "array of integer" | "array of number":
            yield [5] * NUMBERS
        case "array of string":
            yield ["a"] * 1000
            yield ["a"] * STRINGS
        case "array of array":
            yield [[1]] * STRINGS
        case "array of object":
            yield [tool(number) for number in range(STRINGS // 64)]
            yield [{"role": "user", "content": "a"}] * (STRINGS // 5)
            yield [{"role": "user", "content": [part] * (STRINGS // 5)}]
            yield [{"role": "user", "content": [image] * (STRINGS // 7)}]
        case "object":
            yield {str(number): 1 for number in range(STRINGS)}
            yield nested(50)
            yield {"a" * TEXT: 1}
            yield {
                "type": "object",
                "properties": {f"p{number}": {"type": "string"} for number in range(STRINGS // 10)},
            }


def largest_bodies(path: str, schema: Any) -> Iterator[tuple[str, bytes]]:
    fields = {**schema["properties"], "no_such_field": {}, "n" * TEXT: {"type": "null"}}
    base = {name: NEEDED[name] for name in schema.get("required", ()) if name in NEEDED}
    short = {name: value for name, value in SHORT_OUTPUT.items() if name in fields}
    prompts = [name for name in ("text", "prompt", "messages", "input") if name in fields]
    for name, inner in fields.items():
        for kind in sorted(types_of(inner)):
            for value in largest(kind) if kind != "null" else [1]:
                whole = {**short, **base, name: value}
                if prompts and not any(one in whole for one in (*prompts, "input_ids", "input_embeds")):
                    whole[prompts[0]] = NEEDED[prompts[0]]
                yield f"{path} {name[:80]} {kind}", json.dumps(whole).encode()


def test_every_route_with_a_body_is_sent_its_largest() -> None:
    """No route is forgotten: what the document does not describe takes no body."""
    assert {"/generate", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/v1/rerank",
            "/v1/embeddings", "/tokenize", "/parse_function_call"} <= bodies_of_routes().keys()  # fmt: skip
    for path, schema in bodies_of_routes().items():
        assert sum(1 for _ in zip(largest_bodies(path, schema), range(3), strict=False)) == 3, path


def test_many_tools_do_not_hold_the_loop(pipeline: Pipeline) -> None:
    app = build_app(pipeline.manager, ServerConfig())
    tools = [tool(number) for number in range(STRINGS // 64)]
    whole = {"model": "pocket", "messages": NEEDED["messages"], "tools": tools, "tool_choice": "required"}
    path = "/v1/chat/completions"
    assert asyncio.run(worst(app, json.dumps(whole).encode(), 1, time.thread_time, path)) < MOST_S
