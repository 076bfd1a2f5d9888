"""The bootstrap server over real HTTP: its routes, what it refuses, and who may ask."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from runtime.disagg.transfer.bootstrap import MAX_BODY, BootstrapServer, RankInfo, register, resolve
from runtime.disagg.transfer.memory import KVLayout
from runtime.protocol.errors import BadRequest, TransferError, TransferPeerLost

LAYOUT = KVLayout(2, 4, 64, "float32", 0, 2)


def info(rank: int = 0, ranks: int = 2, **more: Any) -> RankInfo:
    return RankInfo(
        address=f"tcp://h:{rank}", transfer="tcp", layout=LAYOUT, row_bytes=64, rank=rank, ranks=ranks, **more
    )


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    made = BootstrapServer()
    yield made
    made.close()


def ask(server: BootstrapServer, method: str, path: str, **more: Any) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=300) as client:
        return client.request(method, f"http://{server.address}{path}", **more)


def test_ranks_register_and_are_found(server: BootstrapServer) -> None:
    assert ask(server, "GET", "/health").status_code == 200
    assert ask(server, "GET", "/route").status_code == 503
    with pytest.raises(TransferPeerLost, match="not ready: no rank has registered"):
        resolve(server.address, None, 60)
    register(server.address, info(1), None, 60)
    assert "1 of 2 ranks" in ask(server, "GET", "/route").json()["error"]["message"]
    assert ask(server, "GET", "/route?engine_rank=1").status_code == 503
    register(server.address, info(0), None, 60)
    found = resolve(server.address, None, 60)
    assert (found.transfer, found.tp_size, found.dp_size, found.pp_size) == ("tcp", 2, 1, 1)
    assert found.ranks == [info(0), info(1)]
    one = ask(server, "GET", "/route?bootstrap_room=3&engine_rank=1&target_dp_group=0&target_pp_rank=0")
    assert msgspec.json.decode(one.content, type=RankInfo) == info(1)
    assert ask(server, "GET", "/route?engine_rank=2").status_code == 404
    assert ask(server, "GET", "/route?engine_rank=x").status_code == 400
    # started again, with one rank
    register(server.address, info(0, 1), None, 60)
    assert resolve(server.address, None, 60).ranks == [info(0, 1)]


def test_rooms_of_data_parallel_ranks(server: BootstrapServer) -> None:
    for rank in range(3):
        register(server.address, info(0, 1, dp_rank=rank, dp_ranks=3), None, 60)
    answer = ask(server, "POST", "/register_dp_rank", json={"bootstrap_room": 5, "dp_rank": 0})
    assert answer.status_code == 200
    answer = ask(server, "POST", "/query_dp_ranks", json={"bootstrap_rooms": [5, 6, 8]})
    assert answer.json() == {"5": 0, "6": 0, "8": 2}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/route", b"{", 400),
        ("PUT", "/route", b"[]", 400),
        ("PUT", "/route", json.dumps({"rank": "\ud800"}).encode(), 400),
        ("PUT", "/route", msgspec.json.encode(info(2, 2)), 400),
        ("PUT", "/route", msgspec.json.encode(info(0, 1 << 40)), 400),
        ("POST", "/query_dp_ranks", b'{"bootstrap_rooms": "x"}', 400),
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
                register(server.address, info(0, 1), key, 60)
            with pytest.raises(TransferError, match="another key"):
                resolve(server.address, key, 60)
        assert ask(server, "GET", "/health").status_code == 401
        register(server.address, info(0, 1), b"secret", 60)
        assert resolve(server.address, b"secret", 60).ranks == [info(0, 1)]
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
