"""Upstream: the HTTP client to the workers. Every wait of it has a deadline, and every failure is a
WorkerFailed with the worker's address. The workers' API key is written into requests and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from runtime.config.serving.router import RouterConfig
from runtime.processes.frontend.client import CLIENT
from runtime.protocol.errors import WorkerFailed
from runtime.server.http.limits import FLOW_HEADER
from runtime.server.router.client import (
    BrokenOff,
    CannotConnect,
    Client,
    ConnectTimeout,
    Response,
    Silence,
)
from runtime.server.router.pool import Worker

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
"""Headers of an answer that the router says for itself."""


class SilentWorker(WorkerFailed):
    """Nothing came in time: it may have died without a word, or be very busy."""


class Upstream:
    """`async with` it: the connections are closed at the end."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._key = None if config.worker_api_key is None else config.worker_api_key.strip()
        self._clients: dict[str, Client] = {}

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        for one in self._clients.values():
            one.close()
        self._clients = {}

    @property
    def keyed(self) -> bool:
        """Whether it has a key of its own for the workers."""
        return self._key is not None

    def headers(self, given: Mapping[str, str]) -> dict[str, str]:
        """A client's headers as a worker gets them: with the worker's key, where the router has one; else
        with the client's own, unless that is the router's; and with the label of whose turn it takes."""
        own = self._key is not None or self._config.api_key is not None
        kept = {
            name: value for name, value in given.items() if name not in DROPPED and not (own and name in KEYS)
        }
        if self._key is not None:
            kept["authorization"] = f"Bearer {self._key}"
        kept.pop(FLOW_HEADER, None)
        if (flow := CLIENT.get().flow) is not None:
            kept[FLOW_HEADER] = flow
        return kept

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
    ) -> AsyncIterator[Response]:
        """The answer, once its headers are there; the body is read within. target: path and query; patience:
        seconds for all of it, None: as long as the worker says something now and then; counted: it is work
        for the worker. When the block is left before its end the connection is closed, which cancels the
        request at the worker.

        Raises WorkerFailed, also out of reading the body; SilentWorker where nothing came in time."""
        limit = asyncio.timeout(patience)
        try:
            async with limit:
                with worker.handling(limit) if counted else contextlib.nullcontext():
                    async with self._client(worker).asking(
                        method, target, self.headers(headers), body
                    ) as response:
                        yield response
        except TimeoutError:
            why = worker.given_up if patience is None else f"did not answer within {patience:g} s"
            raise SilentWorker(why, where=worker.name) from None
        except ConnectTimeout:
            why = f"took no connection within {self._config.connect_timeout_s:g} s"
            raise SilentWorker(why, where=worker.name) from None
        except Silence:
            why = f"said nothing for {self._config.silence_timeout_s:g} s"
            raise SilentWorker(why, where=worker.name) from None
        except CannotConnect as error:
            raise WorkerFailed(f"cannot be reached: {error}", where=worker.name) from None
        except BrokenOff as error:
            raise WorkerFailed(f"broke off: {error}", where=worker.name) from None

    def forget(self, worker: Worker) -> None:
        """It gets no more requests; its connections are closed once none is in its hands any more."""
        if worker.name in self._clients:
            self._clients.pop(worker.name).close()

    def _client(self, worker: Worker) -> Client:
        if worker.name not in self._clients:
            config = self._config
            self._clients[worker.name] = Client(
                worker.name, config.connect_timeout_s, config.silence_timeout_s
            )
        return self._clients[worker.name]


async def read_some(response: Response, most: int = MOST_ERROR) -> bytes:
    """The body, or what there is of it within `most` bytes."""
    parts, size = [], 0
    async for part in response.pieces():
        parts.append(part)
        size += len(part)
        if size > most:
            break
    return b"".join(parts)[:most]


def headers_back(response: Response) -> list[tuple[bytes, bytes]]:
    """The answer's headers as the client gets them."""
    return [(name, value) for name, value in response.raw if name.decode("latin-1") not in NOT_BACK]
