"""Directory: the servers that are running. Replicas announce themselves periodically, and are forgotten when
they stop; routers ask. It runs as one actor beside the driver. Also the options of a server by its role, and
the number of replicas. Imported in Ray Serve's controller; knows no Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

FORGOTTEN_S = 30.0
"""After the last announcement. Replicas announce themselves every few seconds."""


class Member(NamedTuple):
    """role: worker, prefill or decode."""

    role: str
    url: str


class Directory:
    """`key`: the API key of all its servers, for routers and replicas."""

    def __init__(self, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._key, self._clock = key, clock
        self._seen: dict[str, tuple[float, tuple[Member, ...]]] = {}

    def key(self) -> str:
        return self._key

    def announce(self, replica: str, members: tuple[Member, ...]) -> None:
        """The replica of this id is running, with these servers."""
        self._seen[replica] = self._clock(), members

    def leave(self, replica: str) -> None:
        """It ends, and gets no more requests."""
        self._seen.pop(replica, None)

    def members(self) -> list[Member]:
        """The servers that are running, in the order of their first announcements."""
        oldest = self._clock() - FORGOTTEN_S
        self._seen = {name: one for name, one in self._seen.items() if one[0] > oldest}
        return [member for _, members in self._seen.values() for member in members]


DEVICES = "CUDA_VISIBLE_DEVICES"
"""Ray sets it to the devices that a replica reserved."""


def of_role(role: str, host: str, key: str) -> dict[str, Any]:
    """The options of a server of this role, besides the common ones. `key`: of all servers."""
    if role == "worker":
        return {}
    return {
        "disaggregation_mode": role,
        "disaggregation_bootstrap_port": 0,
        "disaggregation_host": host,
        # The router names a prefill server of any replica; without the key it is refused.
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
"""The name of a replica's metric."""


def by_requests(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's AutoscalingContext -> the number of replicas that have target_ongoing_requests each, as
    many as now without metrics; and the policy's state, which is empty. Requests do not pass through Ray
    Serve, so each replica reports those of its server. Ray Serve applies delays and bounds."""
    counts = (context.aggregated_metrics or {}).get(REQUESTS) or {}
    if not counts:
        return context.target_num_replicas, {}
    return math.ceil(sum(counts.values()) / context.config.target_ongoing_requests), {}
