"""The bootstrap server over real HTTP: its routes, what it refuses, and who may ask."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.disagg.transfer.bootstrap import MAX_BODY, BootstrapServer, EngineInfo, register, resolve
from runtime.protocol.errors import BadRequest, TransferError, TransferPeerLost

INFO = EngineInfo("tcp://h:1", "tcp")


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    made = BootstrapServer()
    yield made
    made.close()


def ask(server: BootstrapServer, method: str, path: str, **more: Any) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=300) as client:
        return client.request(method, f"http://{server.address}{path}", **more)


def test_an_engine_registers_and_is_found(server: BootstrapServer) -> None:
    assert ask(server, "GET", "/health").status_code == 200
    assert ask(server, "GET", "/route").status_code == 503
    with pytest.raises(TransferPeerLost, match="not ready: no engine has registered"):
        resolve(server.address, None, 60)
    register(server.address, INFO, None, 60)
    assert resolve(server.address, None, 60) == INFO
    # started again, at another address
    again = EngineInfo("tcp://h:2", "tcp")
    register(server.address, again, None, 60)
    assert resolve(server.address, None, 60) == again


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/route", b"{", 400),
        ("PUT", "/route", b"[]", 400),
        ("PUT", "/route", json.dumps({"address": "\ud800"}).encode(), 400),
        ("PUT", "/route", b'{"address": 1}', 400),
        ("PUT", "/route", b"x" * (MAX_BODY + 1), 413),
        ("GET", "/nothing", b"", 404),
        ("POST", "/route", b"{}", 404),
    ],
)
def test_what_is_refused(server: BootstrapServer, method: str, path: str, body: bytes, status: int) -> None:
    with socket.create_connection((server.host, server.port), 60) as end:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        end.sendall(head.encode() + body[: 1 << 10 if status == 413 else None])
        answer = end.recv(1 << 16)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert ask(server, "GET", "/health").status_code == 200


def test_a_body_of_unknown_length(server: BootstrapServer) -> None:
    with socket.create_connection((server.host, server.port), 60) as end:
        end.sendall(b"PUT /route HTTP/1.1\r\nHost: x\r\n\r\n")
        assert end.recv(1 << 16).startswith(b"HTTP/1.1 411 ")


def test_with_a_key() -> None:
    server = BootstrapServer(key=b"secret")
    try:
        for key in (None, b"other"):
            with pytest.raises(TransferError, match="another key"):
                register(server.address, INFO, key, 60)
            with pytest.raises(TransferError, match="another key"):
                resolve(server.address, key, 60)
        assert ask(server, "GET", "/health").status_code == 401
        register(server.address, INFO, b"secret", 60)
        assert resolve(server.address, b"secret", 60) == INFO
    finally:
        server.close()
    with pytest.raises(BadRequest, match="needs a key"):
        BootstrapServer("0.0.0.0")


def test_addresses_where_there_is_none(server: BootstrapServer) -> None:
    with pytest.raises(TransferError, match="host:port"):
        resolve("nowhere", None, 60)
    with pytest.raises(TransferError, match="host:port"):
        resolve("h:port", None, 60)
    with pytest.raises(TransferPeerLost, match="not reached"):
        resolve("127.0.0.1:1", None, 60)
    with pytest.raises(TransferError, match="cannot listen"):
        BootstrapServer(port=server.port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(TransferPeerLost, match="no answer in time"):
            resolve(f"127.0.0.1:{port}", None, 0.2)
