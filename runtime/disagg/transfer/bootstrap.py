"""The bootstrap server of a prefill engine, which knows the addresses of its ranks, and its clients.

    PUT  /route                a rank registers: RankInfo
    GET  /route                all ranks (?engine_rank=N&target_dp_group=N&target_pp_rank=N: one of them)
    POST /register_dp_rank     {"bootstrap_room", "dp_rank"}: which data-parallel rank computes this transfer
    POST /query_dp_ranks       {"bootstrap_rooms"}: their ranks, by transfer
    GET  /health

503 until all ranks have registered, 404 for an unknown one. With a key, clients must have the same.
"""

from __future__ import annotations

import hmac
import http.client
import logging
import socket
import threading
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec

from runtime.disagg.transfer.memory import KVLayout
from runtime.ipc.address import is_loopback
from runtime.protocol.errors import BadRequest, TransferError, TransferPeerLost

log = logging.getLogger(__name__)

MAX_BODY: Final = 1 << 20
MAX_ANSWER: Final = 16 << 20
REQUEST_S: Final = 10.0
IDS_KEPT: Final = 100_000


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a prefill engine. address: in the form of its transfer."""

    address: str
    transfer: str
    layout: KVLayout
    row_bytes: int
    role: str = "prefill"
    rank: int = 0
    ranks: int = 1
    dp_rank: int = 0
    dp_ranks: int = 1
    pp_rank: int = 0
    pp_ranks: int = 1


class EngineInfo(msgspec.Struct, frozen=True):
    """All of them, in the order of dp_rank, pp_rank, rank."""

    transfer: str
    tp_size: int
    dp_size: int
    pp_size: int
    ranks: list[RankInfo]


class IdRank(msgspec.Struct, frozen=True, rename={"bootstrap_id": "bootstrap_room"}):
    bootstrap_id: int
    dp_rank: int


class Ids(msgspec.Struct, frozen=True, rename={"bootstrap_ids": "bootstrap_rooms"}):
    bootstrap_ids: list[int]


class _Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class _Registry:
    """The state of the server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[tuple[int, int, int], RankInfo] = {}
        self._rank_of: OrderedDict[int, int] = OrderedDict()  # bootstrap id -> dp rank

    def register(self, info: RankInfo) -> None:
        sizes = (info.dp_ranks, info.pp_ranks, info.ranks)
        position = (info.dp_rank, info.pp_rank, info.rank)
        if not all(0 <= one < size <= 4096 for one, size in zip(position, sizes)):
            raise _Refusal(400, f"rank {position} of {sizes}")
        with self._lock:
            known = next(iter(self._ranks.values()), None)
            if known is not None and sizes != (known.dp_ranks, known.pp_ranks, known.ranks):
                self._ranks.clear()  # another engine than before
            self._ranks[position] = info

    def all(self) -> EngineInfo:
        with self._lock:
            ranks = [info for _, info in sorted(self._ranks.items())]
        if not ranks:
            raise _Refusal(503, "no rank has registered yet")
        one = ranks[0]
        total = one.dp_ranks * one.pp_ranks * one.ranks
        if len(ranks) < total:
            raise _Refusal(503, f"{len(ranks)} of {total} ranks have registered")
        return EngineInfo(one.transfer, one.ranks, one.dp_ranks, one.pp_ranks, ranks)

    def one(self, position: tuple[int, int, int]) -> RankInfo:
        self.all()
        with self._lock:
            info = self._ranks.get(position)
        if info is None:
            raise _Refusal(404, f"there is no rank (dp, pp, tp) {position}")
        return info

    def assign(self, bootstrap_id: int, rank: int) -> None:
        with self._lock:
            self._rank_of[bootstrap_id] = rank
            while len(self._rank_of) > IDS_KEPT:
                self._rank_of.popitem(last=False)

    def ranks_of(self, bootstrap_ids: list[int]) -> dict[str, int]:
        """Ids without a registered rank are distributed by their number."""
        size = self.all().dp_size
        with self._lock:
            return {str(one): self._rank_of.get(one, one % size) for one in bootstrap_ids}


class BootstrapServer:
    """Runs until close(). port 0: any free one, then in `port`. Raises BadRequest: another interface than
    loopback and no key; TransferError: it cannot listen."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, key: bytes | None = None) -> None:
        if key is None and host != "localhost" and not is_loopback(host):
            raise BadRequest(
                "a bootstrap server that other machines can reach needs a key",
                where=host,
                hint="give both sides the same secret, or listen on 127.0.0.1",
            )

        class Handler(_Handler):
            registry, token = _Registry(), _token(key)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise TransferError(
                f"the bootstrap server cannot listen: {error.strerror or error}",
                where=f"{host}:{port}",
                hint="choose another --disaggregation-bootstrap-port",
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="bootstrap", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(REQUEST_S)


class _Handler(BaseHTTPRequestHandler):
    registry: _Registry
    token: str | None
    timeout = REQUEST_S
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _answer(self) -> None:
        try:
            status, body = 200, msgspec.json.encode(self._act())
        except _Refusal as refusal:
            status, body = refusal.status, msgspec.json.encode({"error": {"message": str(refusal)}})
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            status, body = 400, msgspec.json.encode({"error": {"message": f"the body is wrong: {error}"}})
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = _answer

    def _act(self) -> Any:
        url = urlsplit(self.path)
        if self.token is not None:
            header = self.headers.get("Authorization") or ""
            if not hmac.compare_digest(header.encode("utf-8", "replace"), f"Bearer {self.token}".encode()):
                raise _Refusal(401, "the key is another one")
        match self.command, url.path:
            case "GET", "/health":
                return {}
            case "GET", "/route":
                return self._route(url.query)
            case "PUT", "/route":
                self.registry.register(msgspec.json.decode(self._body(), type=RankInfo))
                return {}
            case "POST", "/register_dp_rank":
                one = msgspec.json.decode(self._body(), type=IdRank)
                self.registry.assign(one.bootstrap_id, one.dp_rank)
                return {}
            case "POST", "/query_dp_ranks":
                return self.registry.ranks_of(msgspec.json.decode(self._body(), type=Ids).bootstrap_ids)
        raise _Refusal(404, f"there is no {self.command} {url.path[:80]}")

    def _route(self, query: str) -> EngineInfo | RankInfo:
        parameters = parse_qs(query, max_num_fields=16)
        position = []
        for name in ("target_dp_group", "target_pp_rank", "engine_rank"):
            try:
                position.append(int(parameters.get(name, ["-1"])[0]))
            except ValueError:
                raise _Refusal(400, f"{name} must be a number") from None
        dp, pp, rank = position
        if max(position) < 0:
            return self.registry.all()
        return self.registry.one((max(0, dp), max(0, pp), max(0, rank)))

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length") or ""
        if not length.isdecimal():
            raise _Refusal(411, "Content-Length is missing")
        if int(length) > MAX_BODY:
            raise _Refusal(413, f"at most {MAX_BODY} bytes are taken")
        try:
            return self.rfile.read(int(length))
        except OSError as error:
            raise _Refusal(408, "the body did not come") from error


def register(bootstrap: str, info: RankInfo, key: bytes | None, timeout: float) -> None:
    """Raises TransferError, TransferPeerLost."""
    _ask(bootstrap, "PUT", "/route", msgspec.json.encode(info), key, timeout)


def resolve(bootstrap: str, key: bytes | None, timeout: float) -> EngineInfo:
    """All ranks of the engine. Raises TransferPeerLost if another attempt may succeed, else TransferError."""
    body = _ask(bootstrap, "GET", "/route?engine_rank=-1&target_dp_group=-1", None, key, timeout)
    try:
        return msgspec.json.decode(body, type=EngineInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransferError(f"that is no bootstrap server: {error}", where=bootstrap) from error


def _ask(
    bootstrap: str, method: str, path: str, body: bytes | None, key: bytes | None, timeout: float
) -> bytes:
    url = urlsplit(f"//{bootstrap}")
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise TransferError("a bootstrap address is host:port", where=bootstrap[:200])
    token = _token(key)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        data = answer.read(MAX_ANSWER)
    except (OSError, http.client.HTTPException) as error:
        cause = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise TransferPeerLost(f"the bootstrap server was not reached: {cause}", where=bootstrap) from error
    finally:
        connection.close()
    if answer.status == 503:
        raise TransferPeerLost(f"the prefill engine is not ready: {_message(data)}", where=bootstrap)
    if answer.status == 401:
        raise TransferError("the bootstrap server has another key", where=bootstrap)
    if answer.status != 200:
        raise TransferError(f"the bootstrap server said {answer.status}: {_message(data)}", where=bootstrap)
    return data


def _message(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data)["error"]["message"])[:300]
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
        return repr(data[:100])


def _token(key: bytes | None) -> str | None:
    return None if key is None else hmac.digest(key, b"sglang-dsl bootstrap", "sha256").hex()
