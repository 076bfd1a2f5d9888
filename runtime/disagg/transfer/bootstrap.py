"""The bootstrap server of a prefill engine, which knows how the engine is reached, and its clients.

    PUT  /route     the engine registers: EngineInfo
    GET  /route     what was registered last; 503 before that
    GET  /health

With a key, clients must have the same.
"""

from __future__ import annotations

import hmac
import http.client
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from runtime.ipc.address import is_loopback
from runtime.protocol.errors import BadRequest, TransferError, TransferPeerLost

log = logging.getLogger(__name__)

MAX_BODY: Final = 1 << 20
MAX_ANSWER: Final = 16 << 20
REQUEST_S: Final = 10.0


class EngineInfo(msgspec.Struct, frozen=True):
    """A prefill engine. address: in the form of its transfer."""

    address: str
    transfer: str


class _Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


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
            token = _token(key)

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
    """engine: what was registered, kept by the class that a server makes of this one."""

    engine: EngineInfo | None = None
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
                if self.engine is None:
                    raise _Refusal(503, "no engine has registered yet")
                return self.engine
            case "PUT", "/route":
                type(self).engine = msgspec.json.decode(self._body(), type=EngineInfo)
                return {}
        raise _Refusal(404, f"there is no {self.command} {url.path[:80]}")

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


def register(bootstrap: str, info: EngineInfo, key: bytes | None, timeout: float) -> None:
    """Raises TransferError, TransferPeerLost."""
    _ask(bootstrap, "PUT", "/route", msgspec.json.encode(info), key, timeout)


def resolve(bootstrap: str, key: bytes | None, timeout: float) -> EngineInfo:
    """Raises TransferPeerLost if another attempt may succeed, else TransferError."""
    body = _ask(bootstrap, "GET", "/route", None, key, timeout)
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
