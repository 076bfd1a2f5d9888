"""Requests between the HTTP workers of one server: responses that another one stores, orders to all. Each
worker listens on a Unix socket in the server's private folder, and answers in msgpack. One that does not
answer within PEER_S is skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

T = TypeVar("T")
Act = Callable[[str], Awaitable[Any] | Any]
"""(argument) -> the answer, a msgspec struct or builtins; None if there is none."""

log = logging.getLogger(__name__)

PEER_S = 2.0


class Peers:
    """The other workers of this server, if there are any. `answers[what]` answers their requests."""

    def __init__(self, folder: Path | None = None, name: str = "", names: Sequence[str] = ()) -> None:
        self.answers: dict[str, Act] = {}
        self._folder, self._name = folder, name
        self._others = [] if folder is None else [other for other in names if other != name]
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def all(self, what: str, about: str, kind: type[T]) -> list[T]:
        answers = await asyncio.gather(*(self._ask(other, what, about) for other in self._others))
        return [msgspec.msgpack.decode(one, type=kind) for one in answers if one is not None]

    async def first(self, what: str, about: str, kind: type[T]) -> T | None:
        """The first answer of the others, None if none has one."""
        answers = await self.all(what, about, kind)
        return answers[0] if answers else None

    def server(self) -> uvicorn.Server | None:
        """Answers the others, in the event loop that serves; None if there are none."""
        if self._folder is None or not self._others:
            return None
        app = Starlette(routes=[Route("/{what}", self._answer, methods=["POST"])])
        path = str(_socket_of(self._folder, self._name))
        return uvicorn.Server(
            uvicorn.Config(app, uds=path, lifespan="off", ws="none", log_config=None, access_log=False)
        )

    async def _ask(self, other: str, what: str, about: str) -> bytes | None:
        assert self._folder is not None
        client = self._clients.get(other)
        if client is None:
            transport = httpx.AsyncHTTPTransport(uds=str(_socket_of(self._folder, other)), verify=False)
            client = self._clients[other] = httpx.AsyncClient(
                transport=transport, base_url="http://peer", timeout=PEER_S, trust_env=False
            )
        try:
            async with asyncio.timeout(PEER_S):
                answer = await client.post(f"/{what}", content=about.encode())
        except (httpx.HTTPError, TimeoutError) as error:
            log.debug("%s does not answer: %s", other, error)
            return None
        return answer.content if answer.status_code == 200 else None

    async def _answer(self, request: Request) -> Response:
        act = self.answers.get(request.path_params["what"])
        answer = None if act is None else act((await request.body()).decode())
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer is None:
            return Response(status_code=404)
        return Response(msgspec.msgpack.encode(answer))


def _socket_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.http"
