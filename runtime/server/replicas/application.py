"""The application as Ray Serve is told of it: how many replicas, where they are, when they are well."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from runtime.config.engine import EngineConfig
from runtime.config.options import default_of, options_of
from runtime.config.serving.replicas import ReplicasConfig
from runtime.config.serving.server import ServerConfig
from runtime.protocol.errors import EngineDead
from runtime.protocol.ray_cluster import LOOPBACK, refuse_what_never_fits
from runtime.server.replicas.directory import Directory, Member
from runtime.server.replicas.process import STOP_S
from runtime.server.replicas.replica import HEALTH_S, NOTICE_S, Replica

NAMESPACE = "sglang-dsl"
CALL_S = 30.0
"""How long the directory may take to answer."""
HEALTH_PERIOD_S = 2.0
RAISED = f"{EngineDead.__module__}.{EngineDead.__qualname__}: "
STARTS = 3
"""How often a replica that cannot be started is tried again before all is given up."""
METRICS_S = 1.0
LOOK_BACK_S = 5.0
"""Over so many seconds the requests in hand are averaged."""
OWN = ("host", "port", "api_key", "api_key_file", "ready_file", "end_with_stdin", "log_file", "restart")
"""Options of the driver that are not its servers'."""


class Deployment:
    """The replicas, and the directory that knows them. Ray must be connected; `local`: to a cluster on this
    machine alone, so that the servers listen on loopback."""

    def __init__(
        self, config: ReplicasConfig, engine: EngineConfig, server: ServerConfig, *, local: bool
    ) -> None:
        self._config, self._place = config, LOOPBACK if local else None
        self._drain_s, self._load_s = server.drain_timeout_s, engine.load_timeout_s
        refuse_what_never_fits(ray, self._bundle, "replica_cpus, replica_gpus")
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Directory)
        self.directory = remote.options(
            name=f"{config.ray_name} directory", namespace=NAMESPACE, lifetime="detached", get_if_exists=True
        ).remote(secrets.token_urlsafe(32))
        # Its process has to start first.
        self.key: str = ray.get(self.directory.key.remote(), timeout=self._load_s)
        serve.start(proxy_location="Disabled")  # the router is the way in
        self._options = {**changed(engine), **changed(server, OWN), "api_key": self.key}

    @property
    def _bundle(self) -> dict[str, float]:
        servers = len(self._config.roles)
        found = {"CPU": self._config.replica_cpus * servers, "GPU": self._config.replica_gpus * servers}
        return {name: amount for name, amount in found.items() if amount} or {"CPU": 0.01}

    def deploy(self) -> None:
        """Have the replicas; where there are some already, new ones come and the old ones end in order. Does
        not wait for them."""
        config, bundle = self._config, self._bundle
        many: dict[str, Any] = {"num_replicas": config.replicas}
        if config.max_replicas is not None:
            many = {
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
        made = serve.deployment(
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
            **many,
        )(Replica)
        application = made.bind(
            self._options, config.roles, self.directory, self._place, self._load_s, self._drain_s
        )
        serve.run_many(
            [serve.RunTarget(target=application, name=config.ray_name, route_prefix=None)],
            wait_for_applications_running=False,
        )

    def members(self) -> list[Member]:
        """The servers that are there. Raises ray.exceptions.RayError."""
        found: list[Any] = ray.get(self.directory.members.remote(), timeout=CALL_S)
        return [Member(*one) for one in found]

    def check(self) -> None:
        """Raises EngineDead where Ray Serve has given up starting replicas."""
        found = serve.status().applications.get(self._config.ray_name)
        if found is not None and found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            told = [found.message, *(one.message for one in found.deployments.values())]
            # What the replica raised is the last line of a traceback.
            last = next((one.strip().splitlines()[-1] for one in reversed(told) if one.strip()), "")
            raise EngineDead(f"no replica can be started: {last.removeprefix(RAISED)}")

    def end(self) -> None:
        """End the replicas, in order, and the directory."""
        serve.delete(self._config.ray_name)
        ray.kill(self.directory)


def changed(config: Any, without: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """The options of a config that are not as they are by default."""
    return {
        one.name: value
        for one in options_of(type(config))
        if one.name not in without and (value := getattr(config, one.name)) != default_of(one)
    }
