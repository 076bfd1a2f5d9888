"""What the servers of a replica are told by their role, and how many replicas there should be. Knows no Ray,
and is loaded in Ray Serve's controller."""

from __future__ import annotations

import math
from typing import Any

DEVICES = "CUDA_VISIBLE_DEVICES"
"""Ray sets it to the devices that a replica reserved."""


def of_role(role: str, host: str, key: str) -> dict[str, Any]:
    """The options of a server of this role, besides those of all. `key`: that all servers know."""
    if role == "worker":
        return {}
    return {
        "disaggregation_mode": role,
        "disaggregation_bootstrap_port": 0,
        "disaggregation_host": host,
        # The router names a prefill server of any replica; who has no key is turned away.
        "disaggregation_allowed_hosts": ["*"],
        "disaggregation_key": key,
    }


def shares(devices: str, servers: int) -> list[dict[str, str]]:
    """`devices`, as CUDA_VISIBLE_DEVICES lists them, in equal parts: an environment for each server."""
    listed = [one for one in devices.split(",") if one]
    each = len(listed) // servers
    if not each:
        return [{} for _ in range(servers)]
    return [{DEVICES: ",".join(listed[at * each : (at + 1) * each])} for at in range(servers)]


REQUESTS = "requests"
"""What a replica's figure is called."""


def by_requests(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's AutoscalingContext -> the number of replicas that have target_ongoing_requests each, and
    the policy's state, which is none. Without figures: as many as now. Ray Serve sees no requests, as they do
    not pass through it; each replica reports how many its server has. Delays and bounds are Ray Serve's."""
    told = (context.aggregated_metrics or {}).get(REQUESTS) or {}
    if not told:
        return context.target_num_replicas, {}
    return math.ceil(sum(told.values()) / context.config.target_ongoing_requests), {}
