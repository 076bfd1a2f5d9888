"""Looks at each worker's /ready now and then: who gets requests, and who has died without a word."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from runtime.config.serving.router import RouterConfig
from runtime.protocol.errors import WorkerFailed
from runtime.server.router.pool import Pool, Worker
from runtime.server.router.upstream import SilentWorker, Upstream, read_some

log = logging.getLogger(__name__)

ANYWHERE = frozenset({"0.0.0.0", "::", "127.0.0.1", "::1", "localhost"})
"""Addresses to listen on that say nothing of where others find it."""
MOST_TOLD = 1 << 20
"""Bytes that are read of what a worker tells of itself."""
FIRST_LOOKS_S = 0.25
"""Between two looks at a worker that has never been ready, so that one that starts is found soon."""


class Watch:
    """Looks until it is cancelled."""

    def __init__(self, pool: Pool, upstream: Upstream, config: RouterConfig) -> None:
        self._pool, self._upstream, self._config = pool, upstream, config

    async def run(self) -> None:
        watched: dict[Worker, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._pool.changed.clear()
                for worker in set(self._pool.workers) - watched.keys():
                    name = f"sglang-dsl-watch {worker.name}"
                    watched[worker] = group.create_task(self._watch(worker), name=name)
                for worker in watched.keys() - set(self._pool.workers):
                    watched.pop(worker).cancel()
                await self._pool.changed.wait()

    async def _watch(self, worker: Worker) -> None:
        pause = min(FIRST_LOOKS_S, self._config.probe_interval_s)
        while True:
            await self._look(worker)
            if worker.ready:
                pause = self._config.probe_interval_s
            await asyncio.sleep(pause)
            pause = min(self._config.probe_interval_s, pause * 1.25)

    async def _look(self, worker: Worker) -> None:
        before = worker.ready
        try:
            status, body = await self._ask(worker, "/ready")
            if worker.role == "prefill" and status == 200 and not before:
                await self._find_bootstrap(worker)
        except WorkerFailed as fault:
            if worker.is_not_ready(fault.message, silent=isinstance(fault, SilentWorker)):
                log.warning("%s counts as dead: %s", worker.name, fault.message)
        else:
            if status == 200:
                worker.is_ready()
            else:
                worker.is_not_ready(_message(body) or f"answered {status}")
        if worker.ready != before:
            if worker.ready:
                log.info("%s is ready", worker.name)
            else:
                log.warning("%s is not ready: %s", worker.name, worker.reason)
                self._pool.forget(worker)

    async def _find_bootstrap(self, worker: Worker) -> None:
        """Where its bootstrap server is, as far as it tells in /server_info."""
        status, body = await self._ask(worker, "/server_info")
        if status != 200:
            return
        states = _field(body, "internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        host, _, port = str(state.get("bootstrap") or "").rpartition(":")
        host = host.strip("[]")
        if host and host not in ANYWHERE:
            worker.bootstrap_host = f"[{host}]" if ":" in host else host
        if port.isdecimal() and not worker.bootstrap_given:
            worker.bootstrap_port = int(port)

    async def _ask(self, worker: Worker, path: str) -> tuple[int, bytes]:
        async with self._upstream.asking(
            worker, "GET", path, headers={}, patience=self._config.probe_timeout_s, counted=False
        ) as response:
            return response.status, await read_some(response, MOST_TOLD)


def _message(body: bytes) -> str | None:
    error = _field(body, "error")
    found = error.get("message") if isinstance(error, dict) else None
    return found if isinstance(found, str) else None


def _field(body: bytes, name: str) -> Any:
    try:
        data = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    return data.get(name) if isinstance(data, dict) else None
