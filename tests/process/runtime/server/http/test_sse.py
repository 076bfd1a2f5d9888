"""A stream of events: its bytes, its errors, its silences, and what becomes of it when the client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.types import Message

from runtime.protocol.errors import BadRequest, InternalFault, QueueFull, RuntimeFault
from runtime.server.http.sse import DONE, KEEP_ALIVE, EventStream, event, while_connected

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}


class Client:
    """The other end of one ASGI call."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reading.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def run(
    events: Callable[[], AsyncGenerator[bytes, None]],
    act: Callable[[Client], Any] | None = None,
    **options: Any,
) -> Client:
    async def main() -> Client:
        client = Client()
        stream = EventStream(events(), **{"keep_alive_s": 30.0, **options})
        call = asyncio.ensure_future(stream(SCOPE, client.receive, client.send))
        if act is not None:
            await act(client)
        await asyncio.wait_for(call, 60)
        assert len(asyncio.all_tasks()) == 1
        return client

    return asyncio.run(main())


def test_an_event_is_one_line() -> None:
    assert event({"text": "a\nb\r\n\x85"}).count(b"\n") == 2
    assert event([1], "delta") == b"event: delta\ndata: [1]\n\n"


def test_events_in_order_then_the_end() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for index in range(3):
            yield event(index)
        yield DONE

    client = run(events)
    assert client.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert client.sent[0]["status"] == 200
    headers = dict(client.sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert b"content-length" not in headers
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_an_error_before_the_first_event_is_raised() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise QueueFull("full")
        yield b""

    with pytest.raises(QueueFull):
        run(events)


@pytest.mark.parametrize("error", [BadRequest("no", where="text"), ZeroDivisionError("defect")])
def test_a_later_error_is_an_event(error: Exception) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield event(0)
        raise error

    lines = run(events).body.decode().split("\n\n")
    told = json.loads(lines[1].removeprefix("data: "))["error"]
    assert str(error) in told["message"] or error.args[0] in told["message"]
    assert {"message", "type", "code", "retryable"} <= set(told)
    assert lines[2] == "data: [DONE]"


def test_a_custom_shape_of_errors() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield event(0)
        raise InternalFault("broken")

    def shape(fault: RuntimeFault) -> bytes:
        return event({"type": "error", "said": fault.message}, "error")

    assert run(events, on_fault=shape).body.endswith(
        b'event: error\ndata: {"type":"error","said":"broken"}\n\n'
    )


def test_silence_is_broken_with_comments_between_events() -> None:
    broken = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        await broken.wait()
        yield event("after a while")

    async def listen(client: Client) -> None:
        while client.body.count(KEEP_ALIVE) < 3:
            await asyncio.sleep(0.01)
        broken.set()

    body = run(events, listen, keep_alive_s=0.02).body
    assert body.startswith(KEEP_ALIVE)
    assert body.replace(KEEP_ALIVE, b"") == b'data: "after a while"\n\n'


def test_when_the_client_goes_the_events_are_closed_at_once() -> None:
    closed: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield event(0)
            await asyncio.sleep(60)
        finally:
            closed.append("yes")

    async def leave(client: Client) -> None:
        while not client.body:
            await asyncio.sleep(0)
        client.gone.set()

    run(events, leave)
    assert closed == ["yes"]


def test_a_client_that_does_not_read_holds_only_its_own_stream() -> None:
    made: list[int] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for index in range(1000):
            made.append(index)
            yield event(index)

    async def stall_and_leave(client: Client) -> None:
        client.reading.clear()
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(made) <= 2
        client.gone.set()

    run(events, stall_and_leave)


def test_an_answer_is_given_up_when_the_client_goes() -> None:
    cancelled: list[bool] = []

    async def work() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return 1

    class Asked:
        def __init__(self, client: Client) -> None:
            self.receive = client.receive

    async def main() -> None:
        client = Client()
        asyncio.get_running_loop().call_later(0.05, client.gone.set)
        with pytest.raises(RuntimeFault) as caught:
            await while_connected(Asked(client), work())  # type: ignore[arg-type]
        assert caught.value.status == 499

    asyncio.run(main())
    assert cancelled == [True]


def test_no_comment_is_sent_where_none_is_wanted() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield event(1)
        for _ in range(100):
            await asyncio.sleep(0)
        yield DONE

    assert run(events, keep_alive_s=0).body == b"data: 1\n\ndata: [DONE]\n\n"
