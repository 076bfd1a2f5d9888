"""sglang-dsl view: run files in the browser, on a page that only this machine can reach. All paths begin
with a secret, which other users of the machine and pages of other sites do not know.
"""

from __future__ import annotations

import hmac
import os
import secrets
import webbrowser
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from runtime import viewer
from sglang_dsl.errors import BadProgram
from sglang_dsl.views.run_file import read_run

HOST = "127.0.0.1"
MAX_FILES = 16
PIECE_BYTES = 4 << 20
"""The most bytes of a file in one answer; the page requests the rest."""
WAIT_S = 30.0


def main(files: Sequence[str], *, live: bool, browser: bool, port: int = 0) -> int:
    """Serve the page until Ctrl-C. Raises BadProgram for a bad file or a port in use."""
    if len(files) > MAX_FILES:
        raise BadProgram(f"{len(files)} files; at most {MAX_FILES} are shown together")
    if not 0 <= port < 1 << 16:
        raise BadProgram(f"--port {port}: must be from 0 to 65535")
    for file in files:
        check(file, live=live)
    try:
        server = ViewServer([Path(file) for file in files], live=live, port=port)
    except OSError as error:
        raise BadProgram(f"cannot listen on {HOST}:{port}: {error.strerror or error}") from error
    with server:
        print(f"{server.url}   (Ctrl-C ends it)", flush=True)
        if browser and not webbrowser.open(server.url):
            print("no browser was found; open the address yourself", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def check(file: str, *, live: bool) -> None:
    """Raises BadProgram unless it is a run file. With `live` it may be missing if its folder exists."""
    path = Path(file)
    if live and not path.exists():
        if not path.parent.is_dir():
            raise BadProgram(f"the folder of {file} does not exist")
        return
    if not path.is_file():
        raise BadProgram(f"the file {file} {'is not a file' if path.exists() else 'does not exist'}")
    read_run(path, growing=live)


class ViewServer(ThreadingHTTPServer):
    """Serves the page at `url`, which contains the secret. Raises OSError for a port in use."""

    daemon_threads = True

    def __init__(self, files: Sequence[Path], *, live: bool, port: int = 0) -> None:
        self.files = {f"run/{at}": file for at, file in enumerate(files)}
        self.secret = secrets.token_urlsafe(16)
        super().__init__((HOST, port), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self.url = f"http://{HOST}:{self.server_port}/{self.secret}/viewer"
        runs = [
            viewer.RunSource(name, f"viewer/run/{at}", live)
            for at, name in enumerate(_names([file.absolute() for file in files]))
        ]
        title = "sglang-dsl: " + ", ".join(one.name for one in runs)
        self.sources = msgspec.json.encode(viewer.Sources(title, runs))

    def answer(self, path: str, query: str) -> tuple[bytes, str, int | None] | None:
        """The bytes and media type for a path behind the secret; for a run file also its size, by which the
        page notices that it was overwritten. None: not found. Raises OSError."""
        if path == "viewer":
            return *viewer.asset(viewer.PAGE), None
        name = path.removeprefix("viewer/")
        if name in viewer.NAMES:
            return *viewer.asset(name), None
        if name == "sources.json":
            return self.sources, "application/json", None
        if (file := self.files.get(name)) is not None:
            body, size = _piece(file, query)
            return body, "application/octet-stream", size
        return None


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    timeout = WAIT_S
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sglang-dsl", ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        secret, _, path = parts.path.removeprefix("/").partition("/")
        # Another host name may resolve to this address (DNS rebinding).
        allowed = self.headers.get("host") in self.server.hosts
        allowed &= hmac.compare_digest(secret.encode(), self.server.secret.encode())
        try:
            answer = self.server.answer(path, parts.query) if allowed else None
        except OSError as error:
            self._send(HTTPStatus.CONFLICT, str(error.strerror or error).encode(), "text/plain")
            return
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, b"nothing is here\n", "text/plain")
        else:
            self._send(HTTPStatus.OK, *answer)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, size: int | None = None) -> None:
        self.send_response(status)
        headers = {**viewer.HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}
        if size is not None:
            headers["X-Size"] = str(size)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


def _piece(file: Path, query: str) -> tuple[bytes, int]:
    start = parse_qs(query).get("from", ["0"])[0]
    offset = int(start) if start.isdecimal() and len(start) < 16 else 0
    if not file.exists():
        return b"", 0
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(PIECE_BYTES), os.fstat(opened.fileno()).st_size


def _names(files: Sequence[Path]) -> list[str]:
    """The files' names; paths below their common folder if two have the same name."""
    names = [file.name for file in files]
    if len(set(names)) == len(names):
        return names
    shared = os.path.commonpath([file.parent for file in files])
    return [str(file.relative_to(shared)) for file in files]
