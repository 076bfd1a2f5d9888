"""`serve --engine ray`: has the replicas deployed, and is the router before them until it is told to end.

SIGTERM and SIGINT end it in order, the replicas with it; SIGHUP restarts the replicas one after another.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from ray.exceptions import RayError

from runtime.config.flags import Options
from runtime.config.options import hand
from runtime.config.serving.replicas import ReplicasConfig
from runtime.config.serving.router import RouterConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.supervise.supervisor import listening, tell_ready
from runtime.protocol.errors import EngineDead
from runtime.server.replicas.application import Deployment
from runtime.server.replicas.directory import Member
from runtime.server.router.app import Router
from runtime.server.router.command import Ended
from runtime.server.router.command import serve as serve_router

try:
    import uvloop as loops
except ImportError:  # it is not built for every system
    loops = asyncio  # type: ignore[misc]

log = logging.getLogger(__name__)

TICK_S = 0.5
"""Between two looks at who is there."""


class Signals(Ended):
    """What the process was told."""

    def __init__(self) -> None:
        super().__init__()
        self.restarts = 0

    def restart(self, number: int, frame: FrameType | None) -> None:
        self.restarts += 1


def serve(options: Options, environment: Mapping[str, str], *, local: bool) -> int:
    """The exit code. Ray is connected. Raises BadRequest and EngineDead where no replica can be started."""
    config = options.replicas
    with listening(options.server) as listener, _taking_signals() as signals:
        try:
            deployment = Deployment(config, options.engine, options.server, local=local)
        except RayError as error:
            raise EngineDead(f"the Ray cluster does not start actors: {error}") from error
        try:
            deployment.deploy()
            first = _first(deployment, options.engine.load_timeout_s, signals)
            if not first:
                return 0
            router = Router(router_config(config, options.server, deployment.key, first))
            with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
                runner.run(_run(router, deployment, listener, signals, options.server.ready_file))
            return 0
        finally:
            log.info("ending the replicas")
            deployment.end()


def router_config(
    config: ReplicasConfig, server: ServerConfig, key: str, members: Sequence[Member]
) -> RouterConfig:
    """Of the router: the server's own address, key and limits, and the replicas."""
    return hand(
        RouterConfig,
        server,
        **{role: of_role(members, role) for role in config.roles},
        worker_api_key=key,
        policy=config.policy,
        retries=config.retries,
        ready_file=None,  # told here, once a replica takes requests
    ).verify()


def of_role(members: Sequence[Member], role: str) -> tuple[str, ...]:
    """The addresses of the servers of this role."""
    return tuple(one.url for one in members if one.role == role)


@contextmanager
def _taking_signals() -> Iterator[Signals]:
    signals = Signals()
    taken = {signal.SIGTERM: signals.take, signal.SIGINT: signals.take, signal.SIGHUP: signals.restart}
    before = {number: signal.signal(number, take) for number, take in taken.items()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first(deployment: Deployment, seconds: float, signals: Signals) -> list[Member]:
    """The servers, once a replica is there; none where the process was told to end. Raises EngineDead."""
    deadline = time.monotonic() + seconds
    while not signals.received:
        if members := deployment.members():
            return members
        deployment.check()
        if time.monotonic() > deadline:
            raise EngineDead(
                f"no replica was ready within {seconds:g} s", hint="raise load_timeout_s, or add resources"
            )
        time.sleep(TICK_S)
    return []


async def _run(
    router: Router,
    deployment: Deployment,
    listener: socket.socket,
    signals: Signals,
    ready_file: str | None,
) -> None:
    beside = (
        asyncio.create_task(_follow(router, deployment, signals), name="sglang-dsl-follow"),
        asyncio.create_task(_tell(router, listener, ready_file), name="sglang-dsl-ready"),
    )
    try:
        await serve_router(router, listener, signals)
    finally:
        for task in beside:
            task.cancel()


async def _tell(router: Router, listener: socket.socket, ready_file: str | None) -> None:
    while not all(pool.available for pool in router.pools):
        await asyncio.sleep(TICK_S / 10)
    log.info("ready, with %d replicas so far", len(router.workers))
    tell_ready(ready_file, listener)


async def _follow(router: Router, deployment: Deployment, signals: Signals) -> None:
    """Have the router know the replicas that there are, and restart them when the process is told to."""
    restarts = 0
    while True:
        await asyncio.sleep(TICK_S)
        try:
            if signals.restarts > restarts:
                restarts = signals.restarts
                log.info("restarting the replicas one after another")
                await asyncio.to_thread(deployment.deploy)
            members = await asyncio.to_thread(deployment.members)
        except RayError as error:  # requests go on as before, with the replicas that are known
            log.warning("the cluster does not tell its replicas: %s", error)
            continue
        for pool in router.pools:
            urls = of_role(members, pool.role)
            if urls != tuple(one.name for one in pool.workers):
                log.info("%s servers: %s", pool.role, ", ".join(urls) or "none")
                await router.become(pool, urls)
