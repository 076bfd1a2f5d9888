"""HTTP of remote backends against a real socket server that misbehaves as told: splits, stalls, refusals."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsl.backends.common.transport import EventDecoder, HttpFault, Limits, Transport
from sglang_dsl.errors import BackendError, Timeout
from tests.exploring import tries

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
PATIENT = Limits(connect_s=60, read_s=60, retries=2, connections=8)


@asynccontextmanager
async def serving(handle: Handler, limits: Limits = PATIENT) -> Any:
    """A server that reads one request per connection and lets `handle` answer; counts them from 0."""
    count = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        number, count = count, count + 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.decode().split("\r\n"):
                if line.lower().startswith("content-length:"):
                    await reader.readexactly(int(line.split(":")[1]))
            await handle(reader, writer, number)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    transport = Transport(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", limits=limits)
    try:
        yield transport
    finally:
        await transport.aclose()
        server.close()
        await server.wait_closed()


def whole(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def streamed(body: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + body


LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
TEXTS = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(deadline=None, max_examples=tries(200))
@given(st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=5), LINE_ENDS, st.data())
def test_events_come_out_whole_however_the_bytes_are_cut(
    events: list[list[str]], end: str, data: st.DataObject
) -> None:
    wire = "".join(
        ": a comment" + end + "event: x" + end + "".join(f"data: {line}{end}" for line in event) + end
        for event in events
    ).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(wire)), max_size=12)))
    decoder, found = EventDecoder(), []
    for start, stop in zip([0, *cuts], [*cuts, len(wire)]):
        found += decoder.feed(wire[start:stop])
    found += decoder.end()
    assert found == ["\n".join(event) for event in events]


def test_a_last_event_without_its_empty_line_is_not_lost() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: one\n\ndata: tw") == ["one"]
    assert [*decoder.feed(b"o"), *decoder.end()] == ["two"]


def test_an_answer_and_its_pooled_client() -> None:
    async def handle(_: Any, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(whole("200 OK", json.dumps({"number": number}).encode()))
        await writer.drain()

    async def main() -> None:
        async with serving(handle) as transport:
            assert await transport.get("/x") == {"number": 0}
            client = transport.client()
            assert await transport.post("/x", b"{}") == {"number": 1}
            assert transport.client() is client

    asyncio.run(main())


def test_a_busy_server_is_asked_again_and_an_error_is_not() -> None:
    async def busy(_: Any, writer: asyncio.StreamWriter, number: int) -> None:
        if number < 2:
            writer.write(whole("503 Busy", b'{"error": {"message": "full"}}', "Retry-After: 0"))
        else:
            writer.write(whole("200 OK", b'"in"'))

    async def wrong(_: Any, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(whole("400 Bad", json.dumps({"error": {"message": f"no {number}"}}).encode()))

    async def main() -> None:
        async with serving(busy) as transport:
            assert await transport.post("/generate", b"{}") == "in"
        async with serving(wrong) as transport:
            with pytest.raises(HttpFault) as caught:
                await transport.post("/generate", b"{}")
            assert caught.value.status == 400
            assert caught.value.body == {"error": {"message": "no 0"}}

    asyncio.run(main())


def test_a_server_that_stays_busy_is_an_error_in_the_end() -> None:
    async def busy(_: Any, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(whole("503 Busy", b"full", "Retry-After: 0"))

    async def main() -> None:
        async with serving(busy) as transport:
            with pytest.raises(HttpFault) as caught:
                await transport.get("/x")
            assert caught.value.status == 503

    asyncio.run(main())


def test_no_server_is_an_error_that_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        port = taken.getsockname()[1]

        async def main() -> None:
            transport = Transport(f"http://127.0.0.1:{port}", limits=Limits(connect_s=60, retries=1))
            with pytest.raises(BackendError, match="no connection") as caught:
                await transport.get("/x")
            assert caught.value.retryable
            await transport.aclose()

        asyncio.run(main())


@pytest.mark.parametrize("begin", [b"", streamed(), streamed(b"data: one\n\n")])
def test_a_stalled_server_runs_into_the_deadline(begin: bytes) -> None:
    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(begin)
        await writer.drain()
        await reader.read()  # until the client goes

    async def main() -> None:
        async with serving(stall) as transport:
            with pytest.raises(Timeout):
                async for _ in transport.events("/x", b"{}", 0.2):
                    pass
            with pytest.raises(Timeout):
                await transport.post("/x", b"{}", 0.2)

    asyncio.run(main())


def test_a_connection_that_breaks_is_an_error_not_an_end() -> None:
    cut = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\ndata: one\n\n\r\n20\r\ndata"

    async def breaks(_: Any, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(cut)
        await writer.drain()

    async def main() -> None:
        async with serving(breaks) as transport:
            events = transport.events("/x", b"{}")
            assert await anext(events) == "one"
            with pytest.raises(BackendError, match="broke"):
                await anext(events)

    asyncio.run(main())


def test_leaving_a_stream_closes_its_connection() -> None:
    async def main() -> None:
        gone = asyncio.Event()

        async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
            writer.write(streamed(b"data: one\n\n"))
            await writer.drain()
            await reader.read()
            gone.set()

        async with serving(endless) as transport:
            events = transport.events("/x", b"{}")
            assert await anext(events) == "one"
            await events.aclose()
            await asyncio.wait_for(gone.wait(), 60)

    asyncio.run(main())


def test_a_cancellation_is_not_lost_when_a_chunk_comes_with_it() -> None:
    """Of a reader that chunks come for all the time, after any number of turns of the loop."""

    async def main() -> None:
        async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
            writer.write(streamed())
            with suppress(ConnectionError):
                while not writer.is_closing():
                    writer.write(b"data: one\n\n")
                    await writer.drain()
                    await asyncio.sleep(0)
            with suppress(ConnectionError):
                await writer.wait_closed()

        async def read(began: asyncio.Event) -> None:
            async for _ in transport.events("/x", b"{}", 60):
                began.set()

        async with serving(endless) as transport:
            for turns in range(10):
                began = asyncio.Event()
                reading = asyncio.create_task(read(began))
                await began.wait()
                for _ in range(turns):
                    await asyncio.sleep(0)
                assert reading.cancel()
                await asyncio.wait({reading}, timeout=300)
                assert reading.cancelled(), f"it reads on after {turns} turns"

    asyncio.run(main())


def test_keys_are_never_shown() -> None:
    transport = Transport("http://127.0.0.1:1", {"Authorization": "Bearer secret"})
    assert "secret" not in repr(transport)
