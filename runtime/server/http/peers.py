"""Requests between the HTTP workers of one server: responses that another one stores, orders to all. Each
worker listens on a Unix socket in the server's private folder: a connection is one request and its answer,
in msgpack. A worker that does not answer within PEER_S is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Act = Callable[[str], Awaitable[Any] | Any]
"""(argument) -> the answer, a msgspec struct or builtins; None if there is none."""

log = logging.getLogger(__name__)

PEER_S = 2.0


class Peers:
    """The other workers of this server, if there are any. `answers[what]` answers their requests."""

    def __init__(self, folder: Path | None = None, name: str = "", names: Sequence[str] = ()) -> None:
        self.answers: dict[str, Act] = {}
        self._folder, self._name = folder or Path(), name
        self._others = [] if folder is None else [other for other in names if other != name]

    async def all(self, what: str, about: str, kind: type[T]) -> list[T]:
        answers = await asyncio.gather(*(self._ask(other, what, about) for other in self._others))
        return [msgspec.msgpack.decode(one, type=kind) for one in answers if one]

    async def first(self, what: str, about: str, kind: type[T]) -> T | None:
        """The first answer of the others, None if none has one."""
        answers = await self.all(what, about, kind)
        return answers[0] if answers else None

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Answer the others within the block."""
        if not self._others:
            yield
            return
        server = await asyncio.start_unix_server(self._answer, self._socket_of(self._name))
        try:
            yield
        finally:
            server.close()

    def _socket_of(self, name: str) -> Path:
        return self._folder / f"{name}.http"

    async def _ask(self, other: str, what: str, about: str) -> bytes:
        """The answer; empty if there is none."""
        try:
            async with asyncio.timeout(PEER_S):
                reader, writer = await asyncio.open_unix_connection(self._socket_of(other))
                with contextlib.closing(writer):
                    writer.write(msgspec.msgpack.encode((what, about)))
                    writer.write_eof()
                    return await reader.read()
        except (OSError, TimeoutError) as error:
            log.debug("%s does not answer: %s", other, error)
            return b""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            async with asyncio.timeout(PEER_S):
                what, about = msgspec.msgpack.decode(await reader.read(), type=tuple[str, str])
            act = self.answers.get(what)
            answer = None if act is None else act(about)
            if isinstance(answer, Awaitable):
                answer = await answer
            if answer is not None:
                writer.write(msgspec.msgpack.encode(answer))
