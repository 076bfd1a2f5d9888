"""Requests that a prefill and a decode server answer together: real servers, played answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from runtime.server.router.merge import CompletionMerge, NativeMerge
from tests.process.runtime.server.router.playing import Behaviour, Call, Cut, Played, play, scene, until

SCORED = {"return_logprob": True, "logprob_start_len": 0}
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def stands(worker: Played, call: Call) -> dict[str, Any]:
    """What a worker answers: who it is, and what it knows of the prompt and of the output."""
    mine = [[-0.5, 7, None]] if worker.name.startswith("p") else []
    meta = {
        "finish_reason": {"type": "length"},
        "input_token_logprobs": mine,
        "output_token_logprobs": [[-1, 8]],
    }
    return {"text": worker.name, "meta_info": meta, "room": call.json.get("bootstrap_room")}


async def answers(worker: Played, call: Call) -> None:
    if call.path == "/server_info":
        await call.answer({"internal_states": [{"bootstrap": "0.0.0.0:4321"}]})
    elif call.json.get("stream"):
        await call.start()
        for number in (1, 2, 3):
            made = stands(worker, call)
            made["text"] += str(number)
            made["meta_info"]["finish_reason"] = {"type": "length"} if number == 3 else None
            await call.piece(b"data: " + json.dumps(made).encode() + b"\n\n")
        await call.piece(b"data: [DONE]\n\n", last=True)
    else:
        await call.answer(stands(worker, call))


def fails(how: Behaviour) -> Behaviour:
    """As `how`, but it tells of itself like the others."""

    async def does(worker: Played, call: Call) -> None:
        await (answers if call.path == "/server_info" else how)(worker, call)

    return does


@fails
async def dies(worker: Played, call: Call) -> None:
    raise Cut


@fails
async def loses_kv(worker: Played, call: Call) -> None:
    error = {"message": "no KV came", "code": "transfer_late", "retryable": True}
    await call.answer({"error": error}, 504)


@fails
async def ends(worker: Played, call: Call) -> None:
    await call.answer({"error": {"message": "the server is ending", "code": "engine_dead"}}, 503)


@fails
async def waits(worker: Played, call: Call) -> None:
    await call.gone()


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def pair() -> tuple[Played, Played]:
    return Played("p", answers), Played("d", answers)


def generations(worker: Played) -> list[Call]:
    return [call for call in worker.got if call.path != "/server_info"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_both_get_the_same_and_decode_answers(path: str) -> None:
    async def work() -> None:
        async with scene(*pair(), prefill=1) as here:
            for number in range(2):
                answer = await here.post(path, text="one", stream=number == 1, stream_options={"x": 1})
                assert "d" in answer.text
                assert answer.headers["content-type"].startswith(
                    "text/event-stream" if number else "application/json"
                )
            rooms = []
            for left, right in zip(*(generations(one) for one in here.workers), strict=True):
                assert left.path == right.path == path
                same = {**right.json}
                del same["stream"], same["stream_options"]
                assert left.json == same, "nobody reads a stream of the prefill side"
                assert (right.json["bootstrap_host"], right.json["bootstrap_port"]) == ("127.0.0.1", 4321)
                rooms.append(right.json["bootstrap_room"])
                assert 0 < rooms[-1] < 2**63
            assert len(set(rooms)) == 2
            told = (await here.client.get("/workers")).json()["workers"]
            assert told[0]["bootstrap"] == "127.0.0.1:4321"

    play(work())


def test_a_bootstrap_port_that_is_given_counts() -> None:
    async def work() -> None:
        prefill, decode = pair()
        async with (
            scene(prefill, decode),
            scene(urls_as={"prefill": [prefill.url, "5000"], "decode": [decode.url]}) as here,
        ):
            await until(lambda: all(worker.available for worker in here.router.workers))
            await here.post(text="one")
            assert generations(decode)[-1].json["bootstrap_port"] == 5000

    play(work())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", [dies, ends, loses_kv], ids=["dies", "ends", "loses_kv"])
@pytest.mark.parametrize("side", ["p", "d"])
def test_another_pair_answers_when_one_of_the_two_fails(side: str, failing: Any, stream: bool) -> None:
    async def work() -> None:
        workers = [Played(name, answers) for name in ("p1", "p2", "d1", "d2")]
        bad = workers[0 if side == "p" else 2]
        # The other one of its pair hears nothing more.
        bad.does, workers[2 if side == "p" else 0].does = failing, waits
        async with scene(*workers, prefill=2, cooldown_s=60.0) as here:
            answer = await here.post(text="one", stream=stream)
            assert answer.status_code == 200, answer.text
            assert "d2" in answer.text
            assert len(generations(bad)) == 1
            pool = here.router.workers
            await until(lambda: [one.active for one in pool] == [0] * 4)
            rooms = {call.json["bootstrap_room"] for one in workers for call in generations(one)}
            assert len(rooms) == 2, "each pair has a room of its own"

    play(work())


def test_only_who_failed_is_left_out() -> None:
    """With one prefill server, a decode server that died is replaced by the other."""

    async def work() -> None:
        workers = [Played("p", answers), Played("d1", dies), Played("d2", answers)]
        async with scene(*workers, prefill=1) as here:
            assert (await here.post(text="one")).json()["text"] == "d2"
            assert len(generations(workers[1])) == 1

    play(work())


def test_what_no_pair_can_do_is_an_error_that_names_the_cause() -> None:
    async def work() -> None:
        async with scene(Played("p", dies), Played("d", waits), prefill=1) as here:
            answer = await here.post(text="one")
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_failed")
            assert here.workers[0].url in answer.json()["error"]["message"]
        async with scene(Played("p", waits), Played("d", loses_kv), prefill=1) as here:
            answer = await here.post(text="one")
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "transfer_late")
            assert [one.state for one in here.router.workers] == ["available"] * 2, "who is to blame?"
        async with scene(Played("p", answers), Played("d", ready=False), prefill=1, wait=False) as here:
            await until(lambda: here.router.workers[0].available and bool(here.router.workers[1].reason))
            answer = await here.post(text="one")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
            assert "no decode server can take the request" in answer.json()["error"]["message"]
            assert generations(here.workers[0]) == []
            assert (await here.client.get("/ready")).status_code == 503

    play(work())


def test_a_wrong_request_is_answered_at_once_and_once() -> None:
    @fails
    async def refuses(worker: Played, call: Call) -> None:
        await call.answer({"error": {"message": "temperature: too hot", "code": "bad_request"}}, 400)

    async def work() -> None:
        async with scene(Played("p", refuses), Played("d", waits), prefill=1) as here:
            for _ in range(5):
                answer = await here.post(text="one")
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")
            assert len(generations(here.workers[0])) == 5
            await until(lambda: here.router.workers[1].active == 0)
            answer = await here.client.post("/generate", content=b'{"text": ')
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")

    play(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_that_broke_off_and_a_client_that_left(stream: bool) -> None:
    async def work() -> None:
        entered = asyncio.Event()
        left: list[str] = []

        @fails
        async def watches(worker: Played, call: Call) -> None:
            if stream and worker.name == "d":
                await call.start()
                await call.piece(b'data: {"text": "a"}\n\n')
                entered.set()
            if worker.name == "d":
                entered.set()
            await call.gone()
            left.append(worker.name)

        async with scene(Played("p", watches), Played("d", watches), prefill=1) as here:
            client = asyncio.create_task(here.post(text="one", stream=stream))
            await entered.wait()
            await until(lambda: bool(generations(here.workers[0])))
            client.cancel()
            await until(lambda: sorted(left) == ["d", "p"])
            await until(lambda: [one.active for one in here.router.workers] == [0, 0])
            assert [one.state for one in here.router.workers] == ["available"] * 2

    play(work())


def test_what_cannot_be_split_is_for_a_decode_server_alone() -> None:
    async def work() -> None:
        async with scene(*pair(), prefill=1) as here:
            for fields in ({"session_id": "s"}, {"choices": ["a", "b"]}, {"return_hidden_states": True}):
                assert (await here.post(text="one", **fields)).json()["text"] == "d"
                assert not set(BOOTSTRAP) & set(generations(here.workers[1])[-1].json)
            for path in ("/v1/responses", "/tokenize", "/v1/embeddings"):
                await here.post(path, input="x")
                assert generations(here.workers[1])[-1].path == path
            assert generations(here.workers[0]) == []

    play(work())


# -- log-probabilities ---------------------------------------------------------------------------------------


def test_the_prompts_log_probabilities_come_from_the_prefill_side() -> None:
    async def work() -> None:
        async with scene(*pair(), prefill=1) as here:
            prompt, output = [[-0.5, 7, None]], [[-1, 8]]
            meta = (await here.post(text="one", **SCORED)).json()["meta_info"]
            assert (meta["input_token_logprobs"], meta["output_token_logprobs"]) == (prompt, output)
            meta = (await here.post(text="one", return_logprob=True)).json()["meta_info"]
            assert meta["input_token_logprobs"] == [], "not asked for"
            none = {"max_new_tokens": 0}
            for params in (none, [{}, none]):
                fields = {"text": "one", "return_logprob": True, "sampling_params": params}
                meta = (await here.post(**fields)).json()["meta_info"]
                assert meta["input_token_logprobs"] == prompt, "what else could a request for no tokens want"
            events = events_of((await here.post(text="one", stream=True, **SCORED)).text)
            assert [one["text"] for one in events] == ["d1", "d2", "d3"]
            found = [one["meta_info"]["input_token_logprobs"] for one in events]
            assert found == [prompt, [], prompt], "of the first and the last"

    play(work())


def test_a_prefill_side_that_fails_before_they_came_fails_the_request() -> None:
    @fails
    async def cuts_its_answer(worker: Played, call: Call) -> None:
        await call.start(200, "application/json", 1000)
        await call.piece(b"{")
        raise Cut

    async def work() -> None:
        workers = [Played("p1", cuts_its_answer), Played("p2", answers), Played("d", answers)]
        async with scene(*workers, prefill=2) as here:
            for stream in (False, True):
                answer = await here.post(text="one", stream=stream, **SCORED)
                assert answer.status_code == 200
                assert "-0.5" in answer.text
            workers[0].does = answers

    play(work())


def test_batches_and_samples_are_merged_one_by_one() -> None:
    prefill = [{"meta_info": {"input_token_logprobs": [[-n, n, None]], "id": n}} for n in range(3)]
    merge = NativeMerge(prefill)
    items = [{"text": str(n), "meta_info": {"id": n + 10}} for n in range(2)]
    failed = {"text": "", "meta_info": {}, "error": {}}
    merged = json.loads(merge.whole(json.dumps([*items, failed]).encode()))
    assert [one["meta_info"].get("input_token_logprobs") for one in merged] == [
        [[-n, n, None]] for n in range(3)
    ]
    assert [one["meta_info"].get("id") for one in merged] == [10, 11, None]
    stream = NativeMerge(prefill)
    event = {"index": 2, "text": "c", "meta_info": {"finish_reason": None}}
    data = b": comment\n\ndata: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
    first = stream.events(data)
    assert first.startswith(b": comment\n\ndata: {")
    assert first.endswith(b"\n\ndata: [DONE]\n\n")
    assert events_of(first.decode())[0]["meta_info"]["input_token_logprobs"] == [[-2, 2, None]]
    assert stream.events(data) == data


def test_completions_with_echo() -> None:
    def logprobs(tokens: str, start: int) -> dict[str, Any]:
        numbers = range(len(tokens))
        return {
            "tokens": list(tokens),
            "token_logprobs": [-float(n) for n in numbers],
            "text_offset": [start + n for n in numbers],
            "top_logprobs": [{"x": -float(n)} for n in numbers],
        }

    prefill = {
        "choices": [{"index": n, "text": "prox", "logprobs": logprobs("prox", 0)} for n in range(2)],
        "usage": {"completion_tokens": 2},
    }
    whole = {"choices": [{"index": n, "text": "proxyz", "logprobs": logprobs("xyz", 0)} for n in range(2)]}
    merged = json.loads(CompletionMerge(prefill).whole(json.dumps(whole).encode()))
    for choice in merged["choices"]:
        assert choice["logprobs"]["tokens"] == list("proxyz")
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert choice["logprobs"]["token_logprobs"] == [0.0, -1.0, -2.0, 0.0, -1.0, -2.0]
        assert len(choice["logprobs"]["top_logprobs"]) == 6
    merge, tokens, offsets = CompletionMerge(prefill), [], []
    for at, letter in enumerate("xyz"):
        event = {"choices": [{"index": 1, "text": letter, "logprobs": logprobs(letter, at)}]}
        [choice] = events_of(merge.events(b"data: " + json.dumps(event).encode() + b"\n\n").decode())[0][
            "choices"
        ]
        tokens += choice["logprobs"]["tokens"]
        offsets += choice["logprobs"]["text_offset"]
    assert (tokens, offsets) == (list("proxyz"), [0, 1, 2, 3, 4, 5])
