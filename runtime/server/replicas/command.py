"""`serve --engine ray`: deploys the replicas on Ray Serve, and is the router before them until a signal ends
it.

SIGTERM and SIGINT end it in order, with the replicas; SIGHUP restarts the replicas one after another.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError

from runtime.config.engine import EngineConfig
from runtime.config.flags import Options
from runtime.config.options import config_from, options_of
from runtime.config.serving.replicas import ReplicasConfig
from runtime.config.serving.router import RouterConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.supervise.supervisor import listening, tell_ready
from runtime.protocol.errors import EngineDead
from runtime.protocol.ray_cluster import LOOPBACK, refuse_what_never_fits
from runtime.server.http.serve import new_event_loop
from runtime.server.replicas.directory import Directory, Member
from runtime.server.replicas.process import STOP_S
from runtime.server.replicas.replica import HEALTH_S, NOTICE_S, Replica
from runtime.server.router.app import Router
from runtime.server.router.command import ENDS, counting_signals, ended
from runtime.server.router.command import serve as serve_router

log = logging.getLogger(__name__)

NAMESPACE = "sglang-dsl"
TICK_S = 0.5
"""Between two reads of the directory."""
CALL_S = 30.0
"""How long the directory may take to answer."""
HEALTH_PERIOD_S = 2.0
RAISED = f"{EngineDead.__module__}.{EngineDead.__qualname__}: "
STARTS = 3
"""How often the start of a replica is tried before the deployment fails."""
METRICS_S = 1.0
LOOK_BACK_S = 5.0
"""The time over which running requests are averaged."""
DRIVER_OPTIONS = (
    "host", "port", "api_key", "api_key_file", "ready_file", "end_with_stdin", "log_file", "restart",
)  # fmt: skip
"""Options of the driver that its servers do not get."""


class Deployment:
    """The replicas, and their directory. Ray must be connected; `local`: to a cluster on this machine alone,
    whose servers listen on loopback."""

    def __init__(
        self, config: ReplicasConfig, engine: EngineConfig, server: ServerConfig, *, local: bool
    ) -> None:
        self._config, self._host = config, LOOPBACK if local else None
        self._drain_s, self._load_s = server.drain_timeout_s, engine.load_timeout_s
        refuse_what_never_fits(ray, self._bundle, "replica_cpus, replica_gpus")
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Directory)
        self.directory = remote.options(
            name=f"{config.ray_name} directory", namespace=NAMESPACE, lifetime="detached", get_if_exists=True
        ).remote(secrets.token_urlsafe(32))
        # Its process has to start first.
        self.key: str = ray.get(self.directory.key.remote(), timeout=self._load_s)
        ray_serve.start(proxy_location="Disabled")  # clients use the router
        self._options = {**changed(engine), **changed(server, DRIVER_OPTIONS), "api_key": self.key}

    @property
    def _bundle(self) -> dict[str, float]:
        servers = len(self._config.roles)
        amounts = {"CPU": self._config.replica_cpus * servers, "GPU": self._config.replica_gpus * servers}
        return {name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.01}

    def deploy(self) -> None:
        """Start the replicas; existing ones are replaced, and end in order. Does not wait for them."""
        config, bundle = self._config, self._bundle
        count: dict[str, Any] = {"num_replicas": config.replicas}
        if config.max_replicas is not None:
            count = {
                "autoscaling_config": {
                    "min_replicas": config.replicas,
                    "max_replicas": config.max_replicas,
                    "target_ongoing_requests": config.target_requests,
                    "upscale_delay_s": config.upscale_delay_s,
                    "downscale_delay_s": config.downscale_delay_s,
                    "metrics_interval_s": METRICS_S,
                    "look_back_period_s": LOOK_BACK_S,
                    "policy": {"policy_function": "runtime.server.replicas.directory:by_requests"},
                }
            }
        deployment = ray_serve.deployment(
            name="server",
            ray_actor_options={"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)},
            placement_group_bundles=[bundle],
            placement_group_strategy="STRICT_PACK",
            max_constructor_retry_count=STARTS,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=2 * HEALTH_S,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=self._drain_s + STOP_S + NOTICE_S + CALL_S,
            max_surge_percent=100 if config.surge else 0,
            rolling_update_percentage=1.0 if config.surge else 0.2,
            **count,
        )(Replica)
        application = deployment.bind(
            self._options, config.roles, self.directory, self._host, self._load_s, self._drain_s
        )
        ray_serve.run_many(
            [ray_serve.RunTarget(target=application, name=config.ray_name, route_prefix=None)],
            wait_for_applications_running=False,
        )

    def members(self) -> list[Member]:
        """The servers that are running. Raises ray.exceptions.RayError."""
        members: list[Any] = ray.get(self.directory.members.remote(), timeout=CALL_S)
        return [Member(*one) for one in members]

    def check(self) -> None:
        """Raises EngineDead if Ray Serve has given up starting replicas."""
        status = ray_serve.status().applications.get(self._config.ray_name)
        if status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [status.message, *(one.message for one in status.deployments.values())]
            # What the replica raised is the last line of a traceback.
            last = next((one.strip().splitlines()[-1] for one in reversed(messages) if one.strip()), "")
            raise EngineDead(f"no replica can be started: {last.removeprefix(RAISED)}")

    def end(self) -> None:
        """End the replicas, in order, and the directory."""
        ray_serve.delete(self._config.ray_name)
        ray.kill(self.directory)


def changed(config: Any, without: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """The options of a config that differ from their defaults."""
    return {
        one.name: value
        for one in options_of(type(config))
        if one.name not in without and (value := getattr(config, one.name)) != one.default
    }


def serve(options: Options, environment: Mapping[str, str], *, local: bool) -> int:
    """The exit code. Ray is connected. Raises BadRequest, and EngineDead if no replica can be started."""
    config = options.replicas
    with listening(options.server) as listener, counting_signals(*ENDS, signal.SIGHUP) as arrived:
        try:
            deployment = Deployment(config, options.engine, options.server, local=local)
        except RayError as error:
            raise EngineDead(f"the Ray cluster does not start actors: {error}") from error
        try:
            deployment.deploy()
            first = _first(deployment, options.engine.load_timeout_s, arrived)
            if not first:
                return 0
            router = Router(router_config(config, options.server, deployment.key, first))
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_run(router, deployment, listener, arrived, options.server.ready_file))
            return 0
        finally:
            log.info("ending the replicas")
            deployment.end()


def router_config(
    config: ReplicasConfig, server: ServerConfig, key: str, members: Sequence[Member]
) -> RouterConfig:
    """The router's: the server's own address, key and limits, and the replicas."""
    return config_from(
        RouterConfig,
        server,
        **{role: urls_of(members, role) for role in config.roles},
        worker_api_key=key,
        policy=config.policy,
        retries=config.retries,
        ready_file=None,  # written by _report_ready, when a replica is available
    ).verify()


def urls_of(members: Sequence[Member], role: str) -> tuple[str, ...]:
    return tuple(one.url for one in members if one.role == role)


def _first(deployment: Deployment, seconds: float, arrived: Counter[int]) -> list[Member]:
    """The servers, once a replica is ready; none if a signal ends the process. Raises EngineDead."""
    deadline = time.monotonic() + seconds
    while not ended(arrived):
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
    arrived: Counter[int],
    ready_file: str | None,
) -> None:
    tasks = (
        asyncio.create_task(_follow(router, deployment, arrived), name="sglang-dsl-follow"),
        asyncio.create_task(_report_ready(router, listener, ready_file), name="sglang-dsl-ready"),
    )
    try:
        await serve_router(router, listener, arrived)
    finally:
        for task in tasks:
            task.cancel()


async def _report_ready(router: Router, listener: socket.socket, ready_file: str | None) -> None:
    while not all(pool.available for pool in router.pools):
        await asyncio.sleep(TICK_S / 10)
    log.info("ready, with %d replicas so far", len(router.workers))
    tell_ready(ready_file, listener)


async def _follow(router: Router, deployment: Deployment, arrived: Counter[int]) -> None:
    """Keep the router's workers equal to the directory, and restart the replicas on SIGHUP."""
    restarts = 0
    while True:
        await asyncio.sleep(TICK_S)
        try:
            if arrived[signal.SIGHUP] > restarts:
                restarts = arrived[signal.SIGHUP]
                log.info("restarting the replicas one after another")
                await asyncio.to_thread(deployment.deploy)
            members = await asyncio.to_thread(deployment.members)
        except RayError as error:  # requests continue with the replicas that are known
            log.warning("the cluster does not tell its replicas: %s", error)
            continue
        for pool in router.pools:
            urls = urls_of(members, pool.role)
            if urls != tuple(one.name for one in pool.workers):
                log.info("%s servers: %s", pool.role, ", ".join(urls) or "none")
                await router.become(pool, urls)
