"""The same requests on every way to the engine give the same tokens: alone and together in this process,
through the server's processes whole, streamed, streamed in pieces and as batches.

All in float32: in bfloat16 the products of a row depend on the rows beside it, and so may the choice between
two tokens that are nearly as likely.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import string
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from runtime.api import Engine
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput
from tests.exploring import EXPLORE
from tests.process.patience import PATIENCE_S, until

COUNT, ALL = 120, 500
AT_ONCE = 24
SLOTS = 12_288
Request = dict[str, Any]
Answer = list[dict[str, Any]]
"""One entry per sample: text, output_ids, meta_info."""

STEMS = (
    "Once there was a river called Sarn, and beside it stood a town. Every morning the people of the town ",
    "You answer questions. What is the capital of Thessen? ",
    "1 + 2 = 3\n2 + 3 = 5\n3 + 4 = 7\n",
    '{"name": "Ostrel", "towns": ["Westbarrow", "',
    "한국어 문장과 naïve café 😀 mixed; ",
)
WORDS = "river town king bread capital of the Ostrel Thessen rules eat 12 7 + = . , yes no".split()  # noqa: SIM905
QUESTIONS = ("Which river runs through Ostrel?", "Who rules Thessen?", "What is 3 + 4?", "Say something 😀.")
REGEXES = (
    r"[0-9]{2,6}",
    r"(yes|no|maybe)( indeed)?",
    r"[A-Z][a-z]{2,8}( [a-z]{1,6}){1,4}\.",
    r"[가-힣]{2,5}!",
)
SCHEMAS = (
    {"type": "object", "properties": {"town": {"enum": ["Ostrel", "Thessen"]}, "sunny": {"type": "boolean"}},
     "required": ["town", "sunny"], "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 4},
)  # fmt: skip


# -- requests ------------------------------------------------------------------------------------------------


def requests(count: int, seed: int) -> list[Request]:
    draw = random.Random(seed)
    return [request(draw, number) for number in range(count)]


def request(draw: random.Random, number: int) -> Request:
    made: Request = {"sampling_params": sampling(draw, number), **prompt(draw)}
    if draw.random() < 0.25:
        made |= {"return_logprob": True, "top_logprobs_num": draw.choice([0, 2])}
        if draw.random() < 0.5:
            made["logprob_start_len"] = 0
    if draw.random() < 0.15:
        made["jump_forward"] = False
    if draw.random() < 0.1:
        made["cache_salt"] = f"salt-{draw.randrange(3)}"
    return made


def prompt(draw: random.Random) -> Request:
    text = draw.choice(STEMS) + " ".join(draw.choices(WORDS, k=draw.randrange(0, 40)))
    match draw.randrange(5):
        case 0:
            return {"input_ids": [draw.randrange(3, 1270) for _ in range(draw.randrange(1, 60))]}
        case 1 | 2:
            turns = [{"role": "user", "content": draw.choice(QUESTIONS)}]
            if draw.random() < 0.5:
                turns = [{"role": "system", "content": "Be brief."}, *turns]
            if draw.random() < 0.3:
                turns += [{"role": "assistant", "content": "Hm."}, {"role": "user", "content": text}]
            begun = draw.choice(["", "", "The "])
            return {"messages": [*turns, {"role": "assistant", "content": begun, "open": True}]}
        case _:
            return {"text": text}


def sampling(draw: random.Random, number: int) -> Request:
    made: Request = {"max_new_tokens": draw.choice([1, 4, 12, 24, 40]), "temperature": 0}
    if draw.random() < 0.55:
        made |= {"temperature": draw.choice([0.3, 0.8, 1.0, 1.6]), "seed": draw.randrange(2**40)}
        if draw.random() < 0.4:
            made["top_p"] = draw.choice([0.5, 0.9, 0.99])
        if draw.random() < 0.3:
            made["top_k"] = draw.choice([1, 5, 50])
        if draw.random() < 0.2:
            made["min_p"] = draw.choice([0.01, 0.2])
        if draw.random() < 0.2:
            made["n"] = draw.choice([2, 3])
    if draw.random() < 0.2:
        made["frequency_penalty"] = draw.choice([-0.5, 0.7, 1.5])
    if draw.random() < 0.2:
        made["presence_penalty"] = draw.choice([-1, 0.5, 2])
    if draw.random() < 0.2:
        made["repetition_penalty"] = draw.choice([0.9, 1.1, 1.5])
    if draw.random() < 0.25:
        made["stop"] = draw.sample(
            [*string.ascii_lowercase, " the", ". ", "\n", "St", "é"], k=draw.randrange(1, 4)
        )
        made["no_stop_trim"] = draw.random() < 0.3
    if draw.random() < 0.1:
        made["stop_regex"] = draw.choice([r"[0-9]{2}", r"[aeiou]{2} ", r"\.\s"])
    if draw.random() < 0.1:
        made["stop_token_ids"] = [draw.randrange(1280) for _ in range(20)]
    if draw.random() < 0.15:
        made["logit_bias"] = {str(draw.randrange(1280)): draw.choice([-100, -2.5, 4, 8]) for _ in range(5)}
    if draw.random() < 0.15:
        made["min_new_tokens"] = draw.randrange(made["max_new_tokens"] + 1)
    if draw.random() < 0.15:
        made["ignore_eos"] = True
    if draw.random() < 0.15:
        made["skip_special_tokens"] = False
    match draw.randrange(12):
        case 0 | 1:
            made["regex"] = REGEXES[number % len(REGEXES)]
        case 2:
            made["json_schema"] = json.dumps(SCHEMAS[number % len(SCHEMAS)])
    return made


# -- ways ----------------------------------------------------------------------------------------------------


def inside(engine: Engine, body: Request) -> Answer:
    made = engine.generate(msgspec.convert(body, GenerateReqInput))
    outputs: list[GenerateOutput] = made if isinstance(made, list) else [made]
    return [
        {"text": one.text, "output_ids": list(one.output_ids), "meta_info": msgspec.to_builtins(one.meta)}
        for one in outputs
    ]


async def whole(client: httpx.AsyncClient, body: Request) -> Answer:
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, (body, answer.text)
    found = answer.json()
    return found if isinstance(found, list) else [found]


async def events(client: httpx.AsyncClient, body: Request) -> list[dict[str, Any]]:
    async with client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        # A busy server sends comments meanwhile.
        lines = [line async for line in answer.aiter_lines() if line and not line.startswith(":")]
    assert answer.status_code == 200, (body, lines)
    *outputs, done = lines
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in outputs]


async def streamed(client: httpx.AsyncClient, body: Request) -> Answer:
    """The last event of every sample; what was shown before is the beginning of what comes later."""
    last: dict[int, dict[str, Any]] = {}
    for output in await events(client, body):
        index = output.get("index", 0)
        if index in last:
            assert output["text"].startswith(last[index]["text"]), body
            assert last[index]["meta_info"]["finish_reason"] is None
        last[index] = output
    return [last[index] for index in sorted(last)]


async def in_pieces(client: httpx.AsyncClient, body: Request) -> Answer:
    """The same, where every event has only what is new."""
    made: dict[int, dict[str, Any]] = {}
    for output in await events(client, {**body, "stream_output": True}):
        before = made.get(output.get("index", 0), {"text": "", "output_ids": [], "logprobs": []})
        meta = output["meta_info"]
        logprobs = before["logprobs"] + meta.get("output_token_logprobs", [])
        made[output.get("index", 0)] = {
            "text": before["text"] + output["text"],
            "output_ids": before["output_ids"] + output["output_ids"],
            "meta_info": {**meta, "output_token_logprobs": logprobs} if logprobs else meta,
            "logprobs": logprobs,
        }
    return [made[index] for index in sorted(made)]


async def each(
    url: str, way: Callable[[httpx.AsyncClient, Any], Awaitable[Any]], bodies: list[Any]
) -> list[Any]:
    """All of them, AT_ONCE at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def one(body: Any) -> Any:
            async with gate:
                return await way(client, body)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


def batches(bodies: list[Request]) -> list[list[int]]:
    """Indices of requests that can be one: prompts of one kind, as many samples each."""
    groups: dict[Any, list[int]] = {}
    for index, body in enumerate(bodies):
        kind = "text" if "text" in body else "input_ids" if "input_ids" in body else None
        if kind is None:
            continue  # a request has one conversation
        key = (kind, body["sampling_params"].get("n", 1), body.get("jump_forward", True))
        groups.setdefault(key, []).append(index)
    return [group[at : at + 16] for group in groups.values() for at in range(0, len(group), 16)]


def as_batch(bodies: list[Request]) -> Request:
    """One request for several prompts, every field a list."""
    names = {name for body in bodies for name in body} - {"jump_forward"}
    made: Request = {name: [body.get(name) for body in bodies] for name in names}
    return made | {"jump_forward": bodies[0].get("jump_forward", True)}


async def batched(client: httpx.AsyncClient, bodies: list[Request]) -> list[Answer]:
    found = await whole(client, as_batch(bodies))
    count = len(bodies)
    return [found[at::count] for at in range(count)]


# -- the same? -----------------------------------------------------------------------------------------------


def tied(engine: Engine, body: Request, one: Answer, other: Answer) -> bool:
    """Whether an answer with other tokens comes of a tie in the last bits: the engine alone gives it, too,
    when the temperature, top_p, or the weight of all ids up to the one where they part is another by a
    50,000th. A request in some 100,000 draws such a number."""
    drawn = body["sampling_params"]
    if not drawn["temperature"]:
        return False
    ids = [answer["output_ids"] for answer in other]
    pairs = zip(
        itertools.chain(*[answer["output_ids"] for answer in one]), itertools.chain(*ids), strict=False
    )
    parted = next((min(pair) for pair in pairs if pair[0] != pair[1]), -1)
    for shift in (-2e-5, 2e-5):
        bias = {str(token): shift for token in range(parted + 1)} | drawn.get("logit_bias", {})
        changes: list[Request] = [{"logit_bias": bias}]
        changes += [{name: drawn[name] * (1 + shift)} for name in ("temperature", "top_p") if name in drawn]
        for change in changes:
            near = body | {"sampling_params": drawn | change}
            if [answer["output_ids"] for answer in inside(engine, near)] == ids:
                return True
    return False


def check(engine: Engine, body: Request, one: Answer, other: Answer, way: str) -> None:
    if [a["output_ids"] for a in one] != [b["output_ids"] for b in other] and tied(engine, body, one, other):
        return
    assert len(one) == len(other) == body["sampling_params"].get("n", 1)
    for first, second in zip(one, other, strict=True):
        told = (way, body)
        assert second["output_ids"] == first["output_ids"], told
        assert second["text"] == first["text"], told
        meta, again = first["meta_info"], second["meta_info"]
        for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
            assert again[name] == meta[name], told
        for name in ("output_token_logprobs", "input_token_logprobs"):
            assert (meta.get(name) is None) == (again.get(name) is None), told
            for (value, token, _), (value2, token2, _) in zip(
                meta.get(name) or (), again.get(name) or (), strict=True
            ):
                assert token == token2, told
                assert value2 == (None if value is None else pytest.approx(value, abs=5e-3)), told


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    with Engine("pocket", dtype="float32", threads=1, max_total_tokens=SLOTS) as engine:
        yield engine


@pytest.fixture
def url(start_server: Callable[..., Any]) -> str:
    found: str = start_server("--dtype", "float32", "--max-total-tokens", str(SLOTS)).wait_ready().url
    return found


def compare(engine: Engine, url: str, bodies: list[Request]) -> None:
    expected = [inside(engine, body) for body in bodies]  # one by one

    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = list(pool.map(lambda body: inside(engine, body), bodies))
    ways: dict[str, list[Answer]] = {"together": together}
    for name, way in (("whole", whole), ("streamed", streamed), ("in pieces", in_pieces)):
        ways[name] = asyncio.run(each(url, way, bodies))
    for name, answers in ways.items():
        for body, first, second in zip(bodies, expected, answers, strict=True):
            check(engine, body, first, second, name)
    groups = batches(bodies)
    found = asyncio.run(each(url, batched, [[bodies[at] for at in group] for group in groups]))
    assert sum(map(len, groups)) > len(bodies) // 3
    for group, answers in zip(groups, found, strict=True):
        for at, answer in zip(group, answers, strict=True):
            check(engine, bodies[at], expected[at], answer, "batched")

    def state() -> dict[str, Any]:
        told = httpx.get(f"{url}/server_info", timeout=PATIENCE_S).json()
        return dict(told["internal_states"][0])

    until(lambda: (now := state())["slots"] == now["free"] + now["evictable"], state)
    assert state()["repairs"] == 0


def test_every_way_gives_the_same_tokens(alone: Engine, url: str) -> None:
    compare(alone, url, requests(COUNT, seed=1))


@pytest.mark.timeout(1800)
def test_every_way_gives_the_same_tokens_at_length(alone: Engine, url: str) -> None:
    compare(alone, url, requests(ALL, seed=EXPLORE + 2))
