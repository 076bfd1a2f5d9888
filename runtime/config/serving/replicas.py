"""ReplicasConfig: whether a server runs here or as replicas on Ray, how many, and the resources of each.

It starts nothing and does not import Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from runtime.config.options import Config, option
from runtime.protocol.errors import BadRequest

ENGINES = ("local", "ray")


@dataclass(frozen=True, kw_only=True)
class ReplicasConfig(Config):
    """Options of replicas; the ones that begin with `ray:` have no effect on a local server."""

    label = "replicas"

    engine: str = option("local", choices=ENGINES)
    """local: one server on this machine; ray: replicas on Ray Serve, behind a router"""
    replicas: int = option(1, at_least=1)
    """ray: number of servers; with --max-replicas, the minimum"""
    max_replicas: int | None = option(None)
    """ray: maximum number of servers when scaling with the load. By default the number is fixed"""
    target_requests: float = option(16.0, positive=True)
    """ray: average number of running requests per replica that scaling aims at"""
    upscale_delay_s: float = option(5.0, at_least=0)
    """ray: seconds of higher load before replicas are added"""
    downscale_delay_s: float = option(120.0, at_least=0)
    """ray: seconds of lower load before replicas are removed"""
    pairs: bool = option(False)
    """ray: each replica is a prefill and a decode server on the same machine"""
    replica_cpus: float = option(1.0, at_least=0)
    """ray: CPUs reserved for each server, on one machine"""
    replica_gpus: float = option(0.0, at_least=0)
    """ray: GPUs reserved for each server, on one machine; --tp N needs N"""
    surge: bool = option(True)
    """ray: in a rolling restart (SIGHUP), start a new replica before an old one ends, which needs room for
    both"""
    ray_address: str | None = option(None)
    """ray: address of the cluster. By default RAY_ADDRESS, or a Ray on this machine that ends with this
    command"""
    ray_name: str = option("sglang-dsl")
    """ray: name of the application in the cluster"""
    policy: str = option("cache_aware")
    """ray: how a replica is chosen: cache_aware, power_of_two, round_robin, or a plug-in"""
    retries: int = option(2, at_least=0)
    """ray: maximum number of times a request is sent to another replica after one fails before its first
    token"""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the servers of each replica."""
        return ("prefill", "decode") if self.pairs else ("worker",)

    @property
    def most(self) -> int:
        """The maximum number of replicas."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    def verify(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise BadRequest(
                f"must be at least replicas ({self.replicas}), got {self.max_replicas}", where="max_replicas"
            )
        if not self.ray_name.strip():
            raise BadRequest("is empty", where="ray_name")
        if self.engine == "local" and self.most > 1:
            raise BadRequest("more than one needs --engine ray", where="replicas", hint="or start a router")
        return self
