"""From `serve` to the replicas: Ray is connected before anything that needs it is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping

from runtime.config.flags import Options
from runtime.protocol.errors import BadRequest
from runtime.protocol.ray_cluster import connect


def start(options: Options, environment: Mapping[str, str]) -> int:
    """The exit code. Raises MissingExtra without Ray, BadRequest for a cluster that does not exist or is too
    small, or a file of keys, EngineDead if no replica can be started."""
    config = options.replicas
    if options.server.api_keys_file is not None:  # the router before the replicas does not know it
        raise BadRequest(
            "cannot be combined with replicas",
            where="api_keys_file",
            hint="use --api-key-file, or start servers with this file and a router, which passes keys on",
        )
    address = config.ray_address or environment.get("RAY_ADDRESS")
    cpus = config.most * len(config.roles) * config.replica_cpus * (2 if config.surge else 1)
    ray = connect(address, max(os.cpu_count() or 1, cpus))
    try:
        from runtime.server.replicas.command import serve  # it and what it imports need Ray

        return serve(options, environment, local=address in (None, "local"))
    finally:
        ray.shutdown()
