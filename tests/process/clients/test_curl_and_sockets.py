"""curl, and a client that is nothing but a socket, against the real processes: bytes as they are on the wire,
and what comes of clients that get them wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.process.patience import PATIENCE_S, in_pieces

SHORT = {"text": "The Queen", "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
ENDLESS = {
    "text": "The Queen",
    "sampling_params": {"max_new_tokens": 1900, "temperature": 0, "ignore_eos": True},
}
CURL = shutil.which("curl")
needs_curl = pytest.mark.skipif(CURL is None, reason="there is no curl")


def curl(url: str, *arguments: str) -> tuple[int, dict[str, str], str]:
    """Status, headers (lower case) and body."""
    done = subprocess.run(
        [str(CURL), "-sS", "-i", "--max-time", str(PATIENCE_S), *arguments, url],
        capture_output=True,
        timeout=2 * PATIENCE_S,
        check=True,
    )
    head, _, body = done.stdout.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, body


# -- curl ----------------------------------------------------------------------------------------------------


@needs_curl
def test_curl_asks_for_health_and_text(shared_server: Any) -> None:
    url = shared_server.url
    assert curl(f"{url}/health")[0::2] == (200, "healthy\n")
    status, headers, body = curl(f"{url}/generate", "--json", json.dumps(SHORT))
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["text"]
    status, _, again = curl(
        f"{url}/generate", "-H", "Content-Type: application/json", "-d", json.dumps(SHORT)
    )
    assert (status, json.loads(again)["text"]) == (200, json.loads(body)["text"])
    assert curl(f"{url}/v1/models")[0] == 200
    assert "sglang_dsl" in curl(f"{url}/metrics")[2]


@needs_curl
def test_curl_reads_events(shared_server: Any) -> None:
    def ask() -> list[Any]:
        status, headers, body = curl(
            f"{shared_server.url}/generate", "-N", "--json", json.dumps({**SHORT, "stream": True})
        )
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        *events, done, rest = body.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        outputs = [json.loads(event.removeprefix("data: ")) for event in events]
        assert len(outputs) <= 6  # what comes at one time may be told at one time
        assert outputs[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
        for before, after in itertools.pairwise(outputs):
            assert after["text"].startswith(before["text"])
        return outputs

    in_pieces(ask)


@needs_curl
def test_curl_without_the_right_header_is_told(shared_server: Any) -> None:
    url = f"{shared_server.url}/generate"
    status, _, body = curl(url, "-d", json.dumps(SHORT))  # says it is a form
    assert status == 415
    assert "Content-Type: application/json" in json.loads(body)["error"]["message"]
    status, _, body = curl(url, "-H", "Content-Type:", "-d", json.dumps(SHORT))
    assert status == 415
    assert "no content type" in json.loads(body)["error"]["message"]
    status, _, body = curl(url, "-F", "text=The Queen")
    assert status == 415
    status, _, body = curl(url, "--json", "{'text': 'x'}")
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_json")


@needs_curl
def test_methods_and_paths(shared_server: Any) -> None:
    url = shared_server.url
    status, headers, body = curl(f"{url}/generate")
    assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in headers["allow"]
    assert curl(f"{url}/generate", "-X", "DELETE")[0] == 405
    assert curl(f"{url}/v1/chat/completions", "-X", "OPTIONS")[0] == 405
    assert curl(f"{url}/no/such/path")[0] == 404
    assert curl(f"{url}/v1/chat/completionsx", "--json", "{}")[0] == 404
    for path, expected in (("/health", 200), ("/v1/models", 200), ("/nothing", 404)):
        status, headers, body = curl(f"{url}{path}", "-I")
        assert (status, body) == (expected, "")


# -- sockets -------------------------------------------------------------------------------------------------


def request(body: Any, *headers: str, path: str = "/generate", method: str = "POST") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json",
        f"Content-Length: {len(data)}", *headers,
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class Line:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._left = b""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self, *, hard: bool = False) -> None:
        if hard:  # a reset instead of an orderly end
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self._socket.close()

    def more(self) -> bytes:
        with contextlib.suppress(ConnectionResetError):
            return self._socket.recv(65536)
        return b""

    def until(self, mark: bytes) -> bytes:
        while mark not in self._left:
            data = self.more()
            assert data, self._left[-500:]
            self._left += data
        found, _, self._left = self._left.partition(mark)
        return found

    def exactly(self, count: int) -> bytes:
        while len(self._left) < count:
            data = self.more()
            assert data
            self._left += data
        found, self._left = self._left[:count], self._left[count:]
        return found

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer on the line, its body put together from its chunks."""
        first, *lines = self.until(b"\r\n\r\n").decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(self.chunks())
        else:
            body = self.exactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, body

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.until(b"\r\n"), 16):
            yield self.exactly(size)
            assert self.exactly(2) == b"\r\n"
        assert self.exactly(2) == b"\r\n"

    def ended(self) -> bool:
        """Whether the server closes the connection, with nothing more to say."""
        return not self._left and not self.more()


@pytest.fixture
def connect(shared_server: Any) -> Iterator[Callable[[], Line]]:
    with contextlib.ExitStack() as stack:

        def made() -> Line:
            one = Line(shared_server.port)
            stack.callback(one.close)
            return one

        yield made


@pytest.fixture
def line(connect: Callable[[], Line]) -> Line:
    return connect()


def test_one_connection_serves_many_requests(line: Line) -> None:
    texts = set()
    for _ in range(3):
        line.send(request(SHORT))
        status, headers, body = line.answer()
        assert status == 200
        assert headers.get("connection", "keep-alive") != "close"
        texts.add(json.loads(body)["text"])
    assert len(texts) == 1
    line.send(request({"text": 5}))
    assert line.answer()[0] == 400  # a mistake in the body does not end the connection
    line.send(request(SHORT, "Connection: close"))
    assert line.answer()[0] == 200
    assert line.ended()


def test_requests_sent_ahead_are_answered_in_order(line: Line) -> None:
    bodies = [{**SHORT, "rid": f"ahead-{n}"} for n in range(5)]
    line.send(b"".join(request(body) for body in bodies))
    answers = [line.answer() for _ in bodies]
    assert [status for status, _, _ in answers] == [200] * 5
    assert [json.loads(body)["meta_info"]["id"] for _, _, body in answers] == [body["rid"] for body in bodies]


def test_a_request_may_come_byte_by_byte_and_in_chunks(line: Line) -> None:
    for byte in request(SHORT):
        line.send(bytes([byte]))
    status, _, body = line.answer()
    assert status == 200
    data = json.dumps(SHORT).encode()
    line.send(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    for start in range(0, len(data), 7):
        piece = data[start : start + 7]
        line.send(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    line.send(b"0\r\n\r\n")
    status, _, chunked = line.answer()
    assert (status, json.loads(chunked)["text"]) == (200, json.loads(body)["text"])


def test_every_chunk_of_a_stream_is_whole_events(line: Line) -> None:
    def ask() -> list[bytes]:
        line.send(request({**SHORT, "stream": True}))
        head = line.until(b"\r\n\r\n")
        assert b"text/event-stream" in head
        assert b"content-length" not in head.lower()
        chunks = list(line.chunks())
        for chunk in chunks:
            assert chunk.startswith(b"data: ")
            assert chunk.endswith(b"\n\n")
        assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
        return chunks

    in_pieces(ask, 3)  # as they come, not all at the end; [DONE] is one by itself
    line.send(request(SHORT))  # and the connection can be used again
    assert line.answer()[0] == 200


@pytest.mark.parametrize(
    "wrong",
    [
        b"this is not HTTP\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nno colon here\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",  # TLS, on the wrong port
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_and_hurts_nobody(
    connect: Callable[[], Line], line: Line, wrong: bytes
) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        line.send(wrong)
    said = b""
    while data := line.more():
        said += data
    assert not said or said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 414", b"HTTP/1.1 431")), said[:200]
    other = connect()
    other.send(request(SHORT))
    assert other.answer()[0] == 200


@pytest.mark.parametrize("hard", [False, True])
def test_who_hangs_up_in_the_middle_is_forgotten(
    shared_server: Any, connect: Callable[[], Line], wait_idle: Callable[..., None], hard: bool
) -> None:
    whole = request(ENDLESS)
    streamed = request({**ENDLESS, "stream": True})
    lines = [connect() for _ in range(6)]
    lines[0].send(whole[: len(whole) // 2])  # in the middle of the body
    lines[1].send(whole[:30])  # in the middle of the headers
    lines[2].send(whole)
    lines[3].send(streamed)
    lines[3].until(b"data: ")
    lines[4].send(request({**ENDLESS, "text": ["a", "b", "c"], "stream": True}))
    lines[4].until(b"data: ")
    lines[5].send(whole + whole)  # and sent ahead
    time.sleep(0.1)
    for one in lines:
        one.close(hard=hard)
    wait_idle(shared_server)


def test_a_slow_reader_gets_everything(shared_server: Any, wait_idle: Callable[..., None]) -> None:
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(PATIENCE_S)
        slow.connect(("127.0.0.1", shared_server.port))
        body = {**ENDLESS, "sampling_params": {**ENDLESS["sampling_params"], "max_new_tokens": 60}}
        slow.sendall(request({**body, "stream": True, "return_logprob": True}, "Connection: close"))
        got = b""
        for pause in (0.2, 0.1, 0.1):
            got += slow.recv(1000)
            time.sleep(pause)
        while data := slow.recv(65536):
            got += data
    assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    events = [json.loads(line[6:]) for line in got.split(b"\n") if line.startswith(b"data: {")]
    assert events[-1]["meta_info"]["completion_tokens"] == 60
    assert len(events[-1]["meta_info"]["output_token_logprobs"]) == 60
    wait_idle(shared_server)


def test_the_head_of_a_stream_waits_for_its_first_word(line: Line) -> None:
    line.send(request({**SHORT, "text": "river " * 4000, "stream": True}))
    status, headers, body = line.answer()
    assert (status, headers["content-type"]) == (400, "application/json")
    assert json.loads(body)["error"]["code"] == "prompt_too_long"


def test_options_and_head_on_the_wire(line: Line) -> None:
    line.send(b"OPTIONS /generate HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n")
    status, headers, _ = line.answer()
    assert status == 405
    assert "access-control-allow-origin" not in headers
    line.send(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = line.until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    line.send(request(SHORT))  # no body came with the answer to HEAD, so the line is in step
    assert line.answer()[0] == 200
