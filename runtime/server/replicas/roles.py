"""What the servers of a replica are told by their role. Knows no Ray."""

from __future__ import annotations

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
