"""Replica: an actor of Ray Serve that starts a server's processes, checks their health, announces them, and
ends them in order. It serves no requests itself."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from runtime.server.replicas.directory import DEVICES, REQUESTS, Member, of_role, shares
from runtime.server.replicas.process import ServerProcess

log = logging.getLogger("ray.serve")

HEALTH_S = 10.0
"""How long /health may take."""
ANNOUNCE_S = 10.0
NOTICE_S = 1.5
"""How long routers may take to see that it leaves, before it closes its listener."""


class Replica:
    """`options`: of the servers, one for each of `roles`; `host`: loopback, or None for this machine's
    address in the cluster."""

    def __init__(
        self,
        options: Mapping[str, Any],
        roles: Sequence[str],
        directory: Any,
        host: str | None,
        load_s: float,
        drain_s: float,
    ) -> None:
        self._directory, self._drain_s, self._roles = directory, drain_s, tuple(roles)
        self._id = serve.get_replica_context().replica_id.unique_id
        host = host or ray.util.get_node_ip_address()
        devices = shares(os.environ.get(DEVICES, ""), len(roles))
        self._servers: list[ServerProcess] = []
        try:
            for role, share in zip(roles, devices, strict=True):
                of_server = {**options, **of_role(role, host, str(options["api_key"]))}
                self._servers.append(ServerProcess(of_server, host, {**os.environ, **share}))
            for server in self._servers:
                server.wait(load_s)
        except BaseException:
            self._stop(0.0)
            raise

    async def check_health(self) -> None:
        """Ray Serve calls it periodically, and replaces a replica that raises. A healthy one is announced."""
        await asyncio.gather(*(one.check_health(HEALTH_S) for one in self._servers))
        members = tuple(Member(role, one.url) for role, one in zip(self._roles, self._servers, strict=True))
        try:
            await asyncio.wait_for(self._directory.announce.remote(self._id, members), ANNOUNCE_S)
        except (RayError, TimeoutError) as error:  # the next check announces it
            log.warning("the directory does not answer: %s", error)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Running and waiting requests, for directory.by_requests. A pair's decode server counts them all the
        time."""
        loads = (await self._servers[-1].ask("/get_load", HEALTH_S)).json()
        return {REQUESTS: float(sum(one["num_reqs"] for one in loads))}

    async def __del__(self) -> None:
        """Ray Serve's way to end it."""
        try:
            await asyncio.wait_for(self._directory.leave.remote(self._id), ANNOUNCE_S)
            await asyncio.sleep(NOTICE_S)
        except (RayError, TimeoutError) as error:
            log.warning("the directory does not answer: %s", error)
        await asyncio.to_thread(self._stop, self._drain_s)

    def _stop(self, drain_s: float) -> None:
        """All at once: the servers of a pair need each other for what they have in hand."""
        threads = [threading.Thread(target=one.stop, args=(drain_s,)) for one in self._servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
