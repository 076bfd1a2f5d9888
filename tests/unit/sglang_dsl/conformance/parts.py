"""What the conformance tests are made of: a backend around another one that watches and disturbs, a server on
a socket that answers as told, and a deadline. Knows no test."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_dsl.backends.base import (
    Backend,
    Call,
    ChoiceCall,
    ChoiceScore,
    ChoiceScores,
    Completion,
    Delta,
    Prompt,
)

PATIENCE_S = 300.0
TRIES = 50
"""How often a stream is begun, at most, until it has come in several pieces: what is there when its reader
looks is one."""


def within(work: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """The result of `work`; fails where it hangs."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"hung for {seconds} s"
    if failed:
        raise failed[0]
    return done[0]


class Watched(Backend):
    """`inner`, with its calls written down.

    errors: call number (generations and selects, from 0) -> what it raises, in a stream after `fail_after`
    pieces. texts: what generations say instead, one by one. scores: option -> its log-probabilities, instead
    of the model's. delay_s: before each answer.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        errors: Mapping[int, BaseException] | None = None,
        fail_after: int = 0,
        texts: Sequence[str] = (),
        scores: Mapping[str, Sequence[float]] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.inner, self.errors, self.fail_after = inner, dict(errors or {}), fail_after
        self.texts, self.scores, self.delay_s = list(texts), scores, delay_s
        self.name = inner.name
        self.calls: list[Call | ChoiceCall] = []
        self.commits: list[Prompt] = []

    @property
    def identity(self) -> str:
        return self.inner.identity

    async def _begin(self, call: Call | ChoiceCall, broken: bool = True) -> BaseException | None:
        self.calls.append(call)
        error = self.errors.get(len(self.calls) - 1)
        await asyncio.sleep(self.delay_s)
        if error is not None and broken:
            raise error
        return error

    async def generate(self, call: Call) -> Completion:
        await self._begin(call)
        if not self.texts:
            return await self.inner.generate(call)
        texts = tuple(self.texts.pop(0) for _ in range(call.n))
        return Completion(texts, {"finish_reason": {"type": "stop"}, "completion_tokens": 1})

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        error = await self._begin(call, broken=False)
        if self.texts:
            text = self.texts.pop(0)
            deltas = [Delta(text[at : at + 3]) for at in range(0, len(text), 3)]
            deltas.append(Delta("", {"finish_reason": {"type": "stop"}}))
        else:
            deltas = [delta async for delta in self.inner.stream(call)]
        for index, delta in enumerate(deltas):
            if error is not None and index >= self.fail_after:
                raise error
            yield delta
        if error is not None:
            raise error

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        await self._begin(call)
        if self.scores is None:
            return await self.inner.score(call)
        return ChoiceScores(tuple(ChoiceScore(tuple(self.scores[option])) for option in call.choices))

    async def commit(self, prompt: Prompt) -> None:
        self.commits.append(prompt)
        await self.inner.commit(prompt)

    async def aflush_cache(self) -> bool:
        return await self.inner.aflush_cache()


Answer = tuple[int, Sequence[bytes]]


class Api:
    """What was sent, and what to answer: `say` gets (path, body) and gives a status and the pieces."""

    def __init__(self) -> None:
        self.url = ""
        self.sent: list[tuple[str, Any]] = []
        self.say: Callable[[str, Any], Answer] = lambda path, body: (500, [b"{}"])

    def bodies(self) -> list[Any]:
        return [body for _, body in self.sent]


@contextmanager
def serving() -> Iterator[Api]:
    api = Api()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            api.sent.append((self.path, body))
            status, pieces = api.say(self.path, body)
            self.send_response(status)
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, *args: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}"
    yield api
    server.shutdown()
    server.server_close()
    thread.join(300)


def event(data: Any) -> bytes:
    """One event of a stream, as it stands on the wire."""
    return f"data: {json.dumps(data)}\n\n".encode()


def generated(text: str, end: bool = False) -> dict[str, Any]:
    """The bundled server's answer, or one event of it."""
    reason = {"type": "stop", "matched": None} if end else None
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}
    return {"text": text, "meta_info": {"id": "r1", "finish_reason": reason, **counts}}


def openai_chat(text: str) -> Answer:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return 200, [json.dumps({"id": "r1", "choices": [choice], "usage": usage}).encode()]


def openai_completion(text: str) -> Answer:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    choice = {"index": 0, "text": text, "finish_reason": "stop"}
    return 200, [json.dumps({"id": "r1", "choices": [choice], "usage": usage}).encode()]


def openai_stream(pieces: Sequence[str], field: str = "delta") -> Answer:
    told: list[dict[str, Any]] = []
    for piece in pieces:
        said: dict[str, Any] = {"delta": {"content": piece}} if field == "delta" else {"text": piece}
        told.append({"id": "r1", "choices": [{"index": 0, **said, "finish_reason": None}]})
    last: dict[str, Any] = {"delta": {}} if field == "delta" else {"text": ""}
    told.append({"id": "r1", "choices": [{"index": 0, **last, "finish_reason": "stop"}]})
    told.append({"id": "r1", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
    return 200, [*map(event, told), b"data: [DONE]\n\n"]


def claude(text: str) -> Answer:
    usage = {"input_tokens": 5, "output_tokens": 2}
    blocks = [{"type": "text", "text": text}]
    return 200, [
        json.dumps({"id": "m1", "content": blocks, "stop_reason": "end_turn", "usage": usage}).encode()
    ]
