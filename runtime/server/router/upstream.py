"""Upstream: HTTP/1.1 requests to the workers, over connections that are kept for the next ones.

Every wait has a deadline, and every failure is a WorkerFailed with the worker's address. Reading stops while
what has come is not read, so that a slow client slows its worker down. The workers' API key is written into
requests and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from runtime.config.serving.router import RouterConfig
from runtime.processes.frontend.client import CLIENT
from runtime.protocol.errors import WorkerFailed
from runtime.server.http.limits import FLOW_HEADER
from runtime.server.router.pool import Worker

IDLE_S = 30.0
"""How long an unused connection is kept: less than servers keep theirs, which could close one just when it is
used again."""
MAX_HEADER_BYTES = 64 << 10
MOST_ERROR = 64 << 10
"""Bytes of an error's body that are read."""
DROPPED = frozenset(
    {
        "host", "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "content-length", "accept-encoding", "expect", "origin", "cookie",
    }
)  # fmt: skip
"""Headers of a request that are for the router alone. Origin: it has checked that."""
KEYS = frozenset({"authorization", "x-api-key"})
NOT_BACK = DROPPED | {"server", "date", "access-control-allow-origin"}
"""Headers of an answer that the router sets itself."""
_NOT_ADDED = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that aiohttp would add."""


class SilentWorker(WorkerFailed):
    """Nothing came in time: the worker may have died, or be very busy."""


class Upstream:
    """`async with` it: the connections are closed at the end."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._key = None if config.worker_api_key is None else config.worker_api_key.strip()
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_NOT_ADDED,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(
                connect=self._config.connect_timeout_s, sock_read=self._config.silence_timeout_s
            ),
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def keyed(self) -> bool:
        """Whether the router has a key of its own for the workers."""
        return self._key is not None

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """A client's headers as a worker gets them: with the worker's key, if the router has one, else with
        the client's, unless that is the router's; and with the label of the client's flow."""
        no_keys = self._key is not None or self._config.api_key is not None
        dropped = DROPPED | KEYS if no_keys else DROPPED
        kept = {
            name: value.encode("latin-1").decode("utf-8", "replace")  # aiohttp writes them in UTF-8
            for name, value in headers.items()
            if name not in dropped
        }
        if self._key is not None:
            kept["authorization"] = f"Bearer {self._key}"
        kept.pop(FLOW_HEADER, None)
        if (flow := CLIENT.get().flow) is not None:
            kept[FLOW_HEADER] = flow
        return {**kept, "accept-encoding": "identity"}

    @contextlib.asynccontextmanager
    async def asking(
        self,
        worker: Worker,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        patience: float | None = None,
        counted: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, once its headers are there; the body is read within the block. Leaving it before the
        end closes the connection, which cancels the request at the worker.

        target: path and query; patience: seconds for all of it, None: as long as the worker sends something
        now and then; counted: it counts as a request in the worker's hands. Raises WorkerFailed, also out of
        reading the body; SilentWorker if nothing came in time."""
        config, limit = self._config, asyncio.timeout(patience)
        try:
            async with limit:
                with worker.handling(limit) if counted else contextlib.nullcontext():
                    async with asyncio.timeout(config.silence_timeout_s):
                        response = await self._session.request(
                            method,
                            URL(worker.name + target, encoded=True),
                            headers=self.headers(headers),
                            data=body,
                            allow_redirects=False,
                        )
                    try:
                        yield response
                    finally:
                        response.close()
        except aiohttp.ConnectionTimeoutError:
            why = f"took no connection within {config.connect_timeout_s:g} s"
            raise SilentWorker(why, where=worker.name) from None
        except TimeoutError:
            why = f"said nothing for {config.silence_timeout_s:g} s"
            if limit.expired():
                why = worker.abandoned if patience is None else f"did not answer within {patience:g} s"
            raise SilentWorker(why, where=worker.name) from None
        except aiohttp.ClientConnectorError as error:
            raise WorkerFailed(f"cannot be reached: {_reason(error.os_error)}", where=worker.name) from None
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError) as error:
            raise WorkerFailed(f"broke off: {_reason(error)}", where=worker.name) from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


async def read_some(response: aiohttp.ClientResponse, most: int = MOST_ERROR) -> bytes:
    """The body, or its first `most` bytes."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > most:
            break
    return b"".join(parts)[:most]


def headers_back(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """The answer's headers as the client gets them."""
    lower = ((name.lower(), value) for name, value in response.raw_headers)
    return [(name, value) for name, value in lower if name.decode("latin-1") not in NOT_BACK]


def json_of(body: bytes) -> Any:
    """The body decoded; None if it is not JSON."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


def field_of(data: Any, name: str) -> Any:
    """A field of an object; None if it is missing, or `data` is no object."""
    return data.get(name) if isinstance(data, dict) else None
