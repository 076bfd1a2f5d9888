"""Watch: probes /ready of each worker: which gets requests, and which has died."""

from __future__ import annotations

import asyncio
import logging

from runtime.config.serving.router import RouterConfig
from runtime.protocol.errors import WorkerFailed
from runtime.server.router.pool import Pool, Worker
from runtime.server.router.upstream import SilentWorker, Upstream, field_of, json_of, read_some

log = logging.getLogger(__name__)

ANYWHERE = frozenset({"0.0.0.0", "::", "127.0.0.1", "::1", "localhost"})
"""Addresses to listen on by which other machines cannot reach it."""
MOST_ANSWER = 1 << 20
"""Bytes that are read of an answer."""
FIRST_PROBES_S = 0.25
"""Between two probes of a worker that has never been ready: one that starts is noticed soon."""


class Watch:
    """Probes until it is cancelled."""

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
        pause = min(FIRST_PROBES_S, self._config.probe_interval_s)
        while True:
            await self._probe(worker)
            if worker.ready:
                pause = self._config.probe_interval_s
            await asyncio.sleep(pause)
            pause = min(self._config.probe_interval_s, pause * 1.25)

    async def _probe(self, worker: Worker) -> None:
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
                message = field_of(field_of(json_of(body), "error"), "message")
                worker.is_not_ready(message if isinstance(message, str) else f"answered {status}")
        if worker.ready != before:
            if worker.ready:
                log.info("%s is ready", worker.name)
            else:
                log.warning("%s is not ready: %s", worker.name, worker.reason)
                self._pool.forget(worker)

    async def _find_bootstrap(self, worker: Worker) -> None:
        """Read the address of its bootstrap server from /server_info, if it is there."""
        status, body = await self._ask(worker, "/server_info")
        if status != 200:
            return
        states = field_of(json_of(body), "internal_states")
        first = states[0] if isinstance(states, list) and states else None
        host, _, port = str(field_of(first, "bootstrap") or "").rpartition(":")
        host = host.strip("[]")
        if host and host not in ANYWHERE:
            worker.bootstrap_host = f"[{host}]" if ":" in host else host
        if port.isdecimal() and not worker.bootstrap_fixed:
            worker.bootstrap_port = int(port)

    async def _ask(self, worker: Worker, path: str) -> tuple[int, bytes]:
        async with self._upstream.asking(
            worker, "GET", path, headers={}, patience=self._config.probe_timeout_s, counted=False
        ) as response:
            return response.status, await read_some(response, MOST_ANSWER)
