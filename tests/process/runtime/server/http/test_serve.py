"""The server's patience with clients that say nothing, or read nothing; seen from a bare socket."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from runtime.config.serving.server import ServerConfig
from runtime.server.http.serve import MAX_PIPELINED

Serving = Callable[..., contextlib.AbstractContextManager[Any]]
REQUEST = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"


class Flood:
    """Sends for ever, until it hears that the client is gone."""

    def __init__(self) -> None:
        self.sent = 0
        self.gone = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/small":
            await _small(send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watch = asyncio.ensure_future(self._watch(receive))
        while not watch.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.sent += 65536
            await asyncio.sleep(0)
        self.gone.set()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


async def _small(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def small(scope: Scope, receive: Receive, send: Send) -> None:
    await _small(send)


def until_end(link: socket.socket, request: bytes = b"") -> None:
    """Read the small answer, to `request` where there is one."""
    link.sendall(request)
    found = b""
    while not found.endswith(b"ok"):
        part = link.recv(1000)
        assert part, found
        found += part


def set_patience(config: ServerConfig, header_timeout_s: float) -> None:
    """Of a server that is up: a test that stands still must not be cut off before it comes to its point."""
    object.__setattr__(config, "header_timeout_s", header_timeout_s)


def read_all(link: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := link.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_headers_must_come_in_time(serving: Serving) -> None:
    with serving(small, ServerConfig(header_timeout_s=0.2)) as server:
        for beginning in (b"", b"GET / HTTP/1.1\r\nhost:"):
            with server.connect() as link:
                with contextlib.suppress(ConnectionError):  # it may have been told already
                    link.sendall(beginning)
                assert read_all(link).startswith(b"HTTP/1.1 408 ")


def test_headers_of_a_second_request_must_come_in_time(serving: Serving) -> None:
    config = ServerConfig(header_timeout_s=60)
    with serving(small, config) as server, server.connect() as link:
        link.sendall(REQUEST)
        until_end(link)
        set_patience(config, 0.2)
        link.sendall(b"GET / HT")
        assert b"HTTP/1.1 408 " in read_all(link)


def test_an_idle_connection_is_not_told_anything(serving: Serving) -> None:
    config = ServerConfig(header_timeout_s=60, keep_alive_s=60)
    with serving(small, config) as server, server.connect() as link:
        link.sendall(
            REQUEST.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\ncontent-length: 4\r\n\r\nbo")
        )
        until_end(link)
        set_patience(config, 0.1)
        link.sendall(b"dy")
        link.settimeout(0.4)
        with pytest.raises(TimeoutError):
            link.recv(1000)
        set_patience(config, 60)
        link.settimeout(60)
        link.sendall(REQUEST)
        assert link.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_request_that_comes_in_pieces_is_answered(serving: Serving) -> None:
    with serving(small, ServerConfig(header_timeout_s=60)) as server, server.connect() as link:
        for byte in REQUEST:
            link.sendall(bytes([byte]))
        assert link.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_stalled_reader_is_cut_off_and_holds_nobody_else(serving: Serving) -> None:
    flood = Flood()
    with serving(flood, ServerConfig(stall_timeout_s=0.3)) as server, server.connect() as link:
        link.sendall(REQUEST)
        with server.connect() as other:
            other.sendall(REQUEST.replace(b"GET /", b"GET /small"))
            assert other.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert flood.gone.wait(300)
        assert flood.sent < 64 << 20
        assert not read_all(link).endswith(b"0\r\n\r\n")


def test_a_client_that_leaves_is_noticed(serving: Serving) -> None:
    flood = Flood()
    with serving(flood, ServerConfig()) as server:
        with server.connect() as link:
            link.sendall(REQUEST)
            link.recv(1000)
        assert flood.gone.wait(300)


def test_what_is_no_http_is_refused(serving: Serving) -> None:
    with serving(small, ServerConfig()) as server:
        for rubbish in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"):
            with server.connect() as link:
                with contextlib.suppress(ConnectionError):
                    link.sendall(rubbish)
                assert read_all(link)[:13] in (b"HTTP/1.1 400 ", b"")


class Echo:
    """Answers with what was asked: the path, the body, and the names of the headers. `/later` waits for
    `go_on`; `/unread` is answered without its body; `/chunked` in two pieces."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked: list[str] = []
        self.gone = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        body = b""
        while scope["path"] != "/unread":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        while scope["path"] == "/later" and not self.go_on.is_set():
            await asyncio.sleep(0.01)
        if scope["path"] == "/wait":
            assert (await receive())["type"] == "http.disconnect"
            self.gone.set()
            return
        names = b",".join(sorted(name for name, _ in scope["headers"]))
        answer = b"|".join((scope["path"].encode(), body, names))
        if scope["path"] == "/chunked":
            headers = [(b"x-words", b"content-length: 3")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        sized = [(b"content-length", b"%d" % len(answer)), (b"x-words", b"transfer-encoding: chunked")]
        await send({"type": "http.response.start", "status": 200, "headers": sized})
        await send({"type": "http.response.body", "body": answer})


def post(path: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "host: test", *headers, "", "")).encode() + body


CLOSE, IN_CHUNKS = "connection: close", "transfer-encoding: chunked"


def exchanged(port: int, *parts: bytes) -> bytes:
    """All that comes for these parts, each sent by itself, until the server closes."""
    with opened(port) as link:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                link.sendall(part)
        return read_all(link)


def test_bodies_are_framed(serving: Serving) -> None:
    """By their length, or in pieces where none is told, whatever other headers say."""
    with serving(Echo(), ServerConfig()) as server:
        sized = exchanged(server.port, post("/", CLOSE, "content-length: 2", body=b"hi"))
        assert sized.endswith(b"\r\n\r\n/|hi|connection,content-length,host")
        pieces = exchanged(server.port, post("/chunked", CLOSE))
        assert b"\r\ntransfer-encoding: chunked\r\n" in pieces
        assert pieces.endswith(b"\r\n\r\n19\r\n/chunked||connection,host\r\n0\r\n\r\n")


def test_what_follows_a_chunked_body_is_no_header(serving: Serving) -> None:
    with serving(Echo(), ServerConfig()) as server:
        body = b"2;note=x\r\nhi\r\n0\r\nx-request-id: mine\r\n\r\n"
        said = exchanged(server.port, post("/", CLOSE, IN_CHUNKS, body=body))
        assert said.endswith(b"/|hi|connection,host,transfer-encoding")


WRONG = {
    "no host": (b"GET / HTTP/1.1\r\n\r\n",),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",),
    "both lengths": (post("/", IN_CHUNKS, "content-length: 4", body=b"0\r\n\r\n"),),
    "two lengths": (post("/", "content-length: 1", "content-length: 2", body=b"ab"),),
    "lines without CR": (b"GET / HTTP/1.1\nhost: a\n\n",),
    "space before a colon": (b"GET / HTTP/1.1\r\nhost : a\r\n\r\n",),
    "a chunk's size": (post("/", IN_CHUNKS, body=b"zz\r\nhi\r\n"),),
    "a tunnel": (b"CONNECT host:80 HTTP/1.1\r\nhost: a\r\n\r\n",),
    "many headers": (b"GET / HTTP/1.1\r\nhost: a\r\n", *[b"a: " + b"b" * 997 + b"\r\n"] * 70),
    "a long header": (b"GET / HTTP/1.1\r\nhost: a\r\nb: ", *[b"c" * 1000] * 270),
    "a long chunk header": (post("/", IN_CHUNKS), b"2;", *[b"c" * 1000] * 270),
    "a long trailer": (post("/", IN_CHUNKS), b"0\r\nb: ", *[b"c" * 1000] * 270),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_get_a_400(serving: Serving, name: str) -> None:
    echo = Echo()
    with serving(echo, ServerConfig()) as server:
        # A reset can overtake the answer where the client still sends.
        assert exchanged(server.port, *WRONG[name])[:13] in (b"HTTP/1.1 400 ", b"")
        assert exchanged(server.port, post("/", CLOSE)).endswith(b"/||connection,host")
    assert echo.asked.count("/") <= 2


def test_requests_sent_ahead_are_answered_in_their_order(serving: Serving) -> None:
    echo = Echo()
    with serving(echo, ServerConfig()) as server, opened(server.port) as link:
        others = b"".join(post(f"/{number}") for number in range(20))
        link.sendall(post("/later") + others + post("/last", CLOSE))
        while not echo.asked:
            time.sleep(0.01)
        echo.go_on.set()
        said = read_all(link)
    paths = ["/later", *(f"/{number}" for number in range(20)), "/last"]
    assert echo.asked == paths
    assert re.findall(rb"\r\n\r\n(/\w+)\|", said) == [path.encode() for path in paths]


def answers(said: bytes) -> list[bytes]:
    """Status, and the path where the application answered."""
    return re.findall(rb"HTTP/1.1 (\d+)(?:(?!HTTP/1.1).)*?\r\n\r\n(/\w*)?", said, re.DOTALL)


@pytest.mark.parametrize("more", [0, 1, 400])
def test_what_is_sent_too_far_ahead_is_refused_once_the_rest_is_answered(serving: Serving, more: int) -> None:
    echo = Echo()
    with serving(echo, ServerConfig()) as server, opened(server.port) as link:
        behind = [f"/{number}" for number in range(MAX_PIPELINED + 1 + more)]
        link.sendall(post("/later") + b"".join(map(post, behind)))
        while not echo.asked:
            time.sleep(0.01)
        link.sendall(post("/never"))  # is not looked at
        echo.go_on.set()
        said = answers(read_all(link))
    answered = ["/later", *behind[:MAX_PIPELINED]]
    assert echo.asked == answered
    assert said == [*((b"200", path.encode()) for path in answered), (b"503", b"")]


WRONG_BEHIND = {
    "no request": b"rubbish\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a body that breaks off": post("/broken", IN_CHUNKS, body=b"2\r\nhi\r\nrubbish\r\n"),
}


@pytest.mark.parametrize("name", WRONG_BEHIND)
def test_a_wrong_request_costs_those_before_it_nothing(serving: Serving, name: str) -> None:
    echo = Echo()
    with serving(echo, ServerConfig()) as server, opened(server.port) as link:
        link.sendall(post("/later") + post("/chunked") + WRONG_BEHIND[name])
        while not echo.asked:
            time.sleep(0.01)
        echo.go_on.set()
        said = read_all(link)
    assert echo.asked == ["/later", "/chunked"]
    assert [status for status, _ in answers(said)] == [b"200", b"200", b"400"]
    assert b"/chunked|" in said


def test_who_sends_too_far_ahead_and_leaves_is_noticed(serving: Serving) -> None:
    echo = Echo()
    with serving(echo, ServerConfig()) as server:
        with opened(server.port) as link:
            link.sendall(post("/wait") + post("/") * 500)
            while not echo.asked:
                time.sleep(0.01)
        assert echo.gone.wait(300)
    assert echo.asked == ["/wait"]


def test_what_is_answered_hears_of_the_end_before_those_behind_it(serving: Serving) -> None:
    echo = Echo()
    with serving(echo, ServerConfig()) as server:
        with opened(server.port) as link:
            link.sendall(post("/wait"))
            while not echo.asked:
                time.sleep(0.01)
            link.sendall(post("/"))
        assert echo.gone.wait(300)
    assert echo.asked == ["/wait"]


def test_a_wrong_end_of_a_body_reaches_who_waits_for_it(serving: Serving) -> None:
    echo = Echo()
    with serving(echo, ServerConfig()) as server, opened(server.port) as link:
        link.sendall(post("/", IN_CHUNKS, body=b"2\r\nhi\r\n"))
        while not echo.asked:
            time.sleep(0.01)
        link.sendall(b"rubbish\r\n")
        assert read_all(link).startswith(b"HTTP/1.1 400 ")
        assert echo.gone.wait(300)


def test_an_upgrade_is_not_made_and_harms_nothing(serving: Serving) -> None:
    """Java's client and curl --http2 ask for one with each request."""
    wish = ("connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAA", "content-length: 2")
    asked = post("/", *wish, body=b"hi")
    with serving(Echo(), ServerConfig()) as server:
        said = exchanged(server.port, asked, asked * 3 + asked[:-1], b"i" + post("/last", CLOSE))
    names = rb"connection,content-length,host,http2-settings"
    assert re.findall(rb"\r\n\r\n(/[^H]+?)(?=HTTP|$)", said) == [
        *[b"/|hi|" + names] * 5,
        b"/last||connection,host",
    ]


def opened(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 60)


def asked(link: socket.socket) -> bytes:
    link.sendall(REQUEST)
    return link.recv(1000)


def test_idle_connections_keep_nobody_out(serving: Serving) -> None:
    """The one that was idle for longest is closed for a new one; those that are used stay."""
    config = ServerConfig(max_connections=8, header_timeout_s=60)
    with serving(small, config) as server, contextlib.ExitStack() as stack:
        used = stack.enter_context(opened(server.port))
        until_end(used, REQUEST)
        idle = [stack.enter_context(opened(server.port)) for _ in range(7)]
        for link in (*idle, used):
            until_end(link, REQUEST)  # now it is known that they are there, and in this order
        for at in range(7):
            new = stack.enter_context(opened(server.port))
            until_end(new, REQUEST)
            assert idle[at].recv(1000).startswith(b"HTTP/1.1 503")
            assert idle[at].recv(1000) == b""
        until_end(used, REQUEST)


def test_what_is_being_answered_is_not_closed_for_others(serving: Serving) -> None:
    flood = Flood()
    with serving(flood, ServerConfig(max_connections=2, stall_timeout_s=60)) as server:
        with opened(server.port) as one, opened(server.port) as two:
            for link in (one, two):
                assert asked(link).startswith(b"HTTP/1.1 200")
            with opened(server.port) as three:
                assert three.recv(1000).startswith(b"HTTP/1.1 503")
            assert one.recv(1000)
            assert two.recv(1000)
        assert flood.gone.wait(300)


def test_the_limit_of_open_files_is_raised_or_told() -> None:
    """In a process of its own: it cannot be raised again."""
    code = """
import logging, resource, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from runtime.config.serving.server import ServerConfig
from runtime.server.http.serve import MAX_PIPELINED
from runtime.server.http.serve import connection_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (512, min(hard, 2000)))
print(connection_limit(ServerConfig(max_connections=600)), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(connection_limit(ServerConfig(max_connections=4096)), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    first, told, second = made.stdout.splitlines()
    assert first == "600 856"
    assert second == "1744 2000"
    assert "at most 1744 connections" in told
    assert "ulimit -n 4352" in told
