"""The router's HTTP client against servers that write bytes by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from runtime.config.serving.router import RouterConfig
from runtime.protocol.errors import WorkerFailed
from runtime.server.router.pool import Worker
from runtime.server.router.upstream import SilentWorker, Upstream
from tests.process.runtime.server.router.playing import play, until

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-Mine: 1\r\n\r\nok"
UNFINISHED = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"


class Server:
    """`connections`: how many were opened; `requests`: the head and body of each."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        self.requests.append(head + await reader.readexactly(length))
        return self.requests[-1]


@contextlib.asynccontextmanager
async def serving(*answers: bytes, ends: bool = False) -> AsyncIterator[Server]:
    """Gives these answers, one after another on each connection; `ends`: then closes it."""
    made, before = Server(), len(asyncio.all_tasks())

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.connections += 1
        try:
            for answer in answers:
                await made.request(reader)
                writer.write(answer)
                await writer.drain()
            if not ends:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client cut it
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await until(lambda: len(asyncio.all_tasks()) == before)


class Client:
    """`async with` it: requests of a router to one worker."""

    def __init__(self, url: str, silence_s: float = 60.0) -> None:
        config = RouterConfig(worker=(url,), connect_timeout_s=60.0, silence_timeout_s=silence_s)
        self.worker, self.upstream = Worker(url, "worker", config), Upstream(config)

    async def __aenter__(self) -> Client:
        await self.upstream.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.upstream.__aexit__()

    def asking(self, method: str, target: str, body: bytes = b"{}") -> Any:
        headers = {"content-type": "application/json"}
        return self.upstream.asking(self.worker, method, target, headers=headers, body=body)


async def get(client: Client, body: bytes = b"{}") -> bytes:
    async with client.asking("POST", "/x?y=1", body) as response:
        assert response.status == 200
        return b"".join([piece async for piece in response.content.iter_any()])


def client_of(server: Server, silence_s: float = 60.0) -> Client:
    return Client(server.url, silence_s)


def test_a_connection_is_used_again() -> None:
    async def work() -> None:
        async with serving(OK, OK, OK) as server, client_of(server) as client:
            for _ in range(3):
                assert await get(client, b"body") == b"ok"
            assert server.connections == 1
            host = server.url.removeprefix("http://").encode()
            assert server.requests[2].startswith(b"POST /x?y=1 HTTP/1.1\r\n")
            assert b"Host: " + host in server.requests[2].replace(b"host:", b"Host:")
            assert server.requests[2].endswith(b"\r\n\r\nbody")

    play(work())


def test_a_connection_that_the_server_closed_is_not() -> None:
    async def work() -> None:
        async with serving(OK, ends=True) as server, client_of(server) as client:
            for number in range(3):
                assert await get(client) == b"ok"
                await asyncio.sleep(0.05)
                assert server.connections == number + 1

    play(work())


@pytest.mark.parametrize("left", ["unread", "raised"])
def test_an_answer_that_is_not_read_cuts_its_connection(left: str) -> None:
    async def work() -> None:
        async with serving(UNFINISHED, OK) as server, client_of(server) as client:
            with contextlib.suppress(KeyError):
                async with client.asking("GET", "/"):
                    if left == "raised":
                        raise KeyError
            async with client.asking("GET", "/") as response:
                assert response.status == 200
            assert server.connections == 2

    play(work())


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil its end", b"until its end"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil its end", b"until its end"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
def test_bodies(answer: bytes, body: bytes) -> None:
    async def work() -> None:
        async with serving(answer, ends=True) as server, client_of(server) as client:
            assert await get(client) == body

    play(work())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        UNFINISHED,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno number\r\n",
        b"this is no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 20),
    ],
)
def test_answers_that_break_off(answer: bytes) -> None:
    async def work() -> None:
        async with serving(answer, ends=True) as server, client_of(server) as client:
            with pytest.raises(WorkerFailed, match="broke off"):
                await get(client)

    play(work())


def test_who_says_nothing_and_who_is_not_there() -> None:
    async def work() -> None:
        async with serving() as server, client_of(server, 0.05) as client:
            with pytest.raises(SilentWorker, match="said nothing for"):
                await get(client)
        async with serving(UNFINISHED) as server, client_of(server, 0.05) as client:
            with pytest.raises(SilentWorker, match="said nothing for"):
                await get(client)
        async with client_of(server) as client:
            with pytest.raises(WorkerFailed, match="cannot be reached"):
                await get(client)

    play(work())


def test_what_is_cancelled_is_cut() -> None:
    async def work() -> None:
        gone = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    asked.set()
            gone.set()
            writer.close()

        asked = asyncio.Event()
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        made = Server()
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with client_of(made) as client:
            task = asyncio.create_task(get(client))
            await asked.wait()
            task.cancel()
            await gone.wait()
        server.close()

    play(work())
