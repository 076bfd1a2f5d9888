"""Connects to the Ray cluster of RAY_ADDRESS, or starts one on this machine for this process.

Ray's processes exchange pickles: who can connect to a cluster can run code in it. A local one therefore
listens on loopback only, and asks for Ray's token.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from runtime.protocol.errors import BadRequest, InternalFault
from runtime.protocol.registry import MissingExtra

log = logging.getLogger(__name__)

LOCAL = {
    # Without it Ray takes the machine's outer address and listens on all of them.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    # Ray calls an actor that can be restarted an error, in every batch.
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DATA_LOG_LEVEL": "WARNING",
}
"""Ray's environment for a local start; the user's own variables stay."""
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 256 << 20


def load_ray() -> Any:
    """The module. Raises MissingExtra."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise MissingExtra("Ray is not installed: pip install 'sglang-dsl[ray]'") from error


def connect(address: str | None = None, cpus: float | None = None) -> Any:
    """Ray's module, connected: as this process already is, else to `address` (None: RAY_ADDRESS), else to a
    Ray started here, with `cpus` of this machine (None: all), that ends with this process.

    Raises MissingExtra without Ray, BadRequest for a cluster that does not answer, InternalFault if none can
    be started."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is None:
        for name, value in LOCAL.items():  # read while Ray is imported
            os.environ.setdefault(name, value)
    ray = load_ray()
    if ray.is_initialized():
        return ray
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        if address not in (None, "local"):
            ray.init(address, **quiet)
        else:
            _start(ray, cpus, quiet)
    except (ConnectionError, ValueError) as error:
        raise BadRequest(
            f"no Ray cluster answers: {error}",
            where=str(address),
            hint="RAY_ADDRESS; and RAY_AUTH_MODE=token, where the cluster asks for its token",
        ) from error
    except Exception as error:  # Ray raises Exception itself where a process of its own is late
        raise InternalFault(f"Ray cannot be started: {error}") from error
    if address in (None, "local") and not ray.get_runtime_context().gcs_address.startswith(LOOPBACK):
        log.warning(
            "Ray was imported earlier, without RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment: it "
            "listens on all addresses of this machine"
        )
    return ray


def _start(ray: Any, cpus: float | None, quiet: dict[str, Any], attempts: int = 4) -> None:
    """Start Ray on this machine, repeatedly: its agents have 15 s to start, which a busy machine exceeds."""
    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                "local",
                num_cpus=None if cpus is None else max(1, round(cpus)),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address=LOOPBACK,
                **quiet,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == attempts or "timed out during startup" not in str(error):
                raise
            log.warning("Ray did not start in time; trying again")


def refuse_what_never_fits(ray: Any, resources: dict[str, float], option: str) -> None:
    """Raises BadRequest if no node of the cluster has the resources: Ray would wait for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in resources.items()) for node in nodes):
        needs = ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount)
        most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in resources}
        has = ", ".join(f"{amount:g} {name}" for name, amount in most.items())
        raise BadRequest(
            f"{needs} are requested, but no machine of the Ray cluster has that much (most: {has})",
            where=option,
        )
