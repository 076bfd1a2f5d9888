"""RouterConfig: every option of the router: its workers, how it chooses among them, and when a worker counts
as failed.

Options that it shares with the server (address, key, limits) come from there. It opens no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from runtime.config.options import hand, option, read
from runtime.config.serving.server import ServerConfig
from runtime.protocol.errors import BadRequest

_OF_SERVER = {one.name: one for one in fields(ServerConfig)}


def same(name: str) -> Any:
    """The server's option of the same name."""
    one = _OF_SERVER[name]
    return field(default=one.default, repr=one.repr, metadata=dict(one.metadata))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """`RouterConfig.of(...)` checks names, types and ranges."""

    worker: tuple[str, ...] = option((), "URLs of servers that are replicas of one another")
    prefill: tuple[str, ...] = option(
        (),
        "URLs of servers with --disaggregation-mode prefill. If a server does not report the port of its "
        "bootstrap server, add the port after its URL: --prefill http://10.0.0.1:30000 8998",
    )
    decode: tuple[str, ...] = option((), "URLs of servers with --disaggregation-mode decode")
    policy: str = option(
        "cache_aware",
        "how a worker or a prefill server is chosen: cache_aware, power_of_two, round_robin, or a plug-in",
    )
    decode_policy: str = option("power_of_two", "how a decode server is chosen")
    worker_api_key: str | None = option(
        None,
        "API key of the workers. Prefer SGLANG_DSL_WORKER_API_KEY over the command line. By default the "
        "client's own key is passed on, unless the router itself requires one",
        secret=True,
    )
    retries: int = option(
        2,
        "maximum number of times a request is sent to another worker, or pair, after one fails before its "
        "first token",
    )
    connect_timeout_s: float = option(5.0, "seconds a worker may take to accept a connection")
    silence_timeout_s: float = option(
        600.0, "seconds a worker may send nothing at all while it answers a request"
    )
    failure_threshold: int = option(
        3, "number of failures in a row after which a worker gets no requests for --cooldown-s"
    )
    cooldown_s: float = option(10.0, "seconds until a failed worker gets a single request again, as a test")
    probe_interval_s: float = option(5.0, "seconds between two checks of each worker's /ready")
    probe_timeout_s: float = option(5.0, "seconds a worker may take to answer such a check")
    probe_failures: int = option(
        3, "number of unanswered checks in a row after which a worker counts as dead and its requests fail"
    )
    cache_threshold: float = option(
        0.5, "cache_aware: fraction of a prompt that a worker must have seen to be preferred for it"
    )
    balance_abs_threshold: int = option(
        32,
        "cache_aware: a worker is overloaded if it has this many more requests than the least busy one ...",
    )
    balance_rel_threshold: float = option(
        1.5,
        "cache_aware: ... and this many times as many. The least busy worker is then chosen, whatever it "
        "has seen",
    )
    prefix_bytes: int = option(
        8 << 20, "cache_aware: approximate size of the prompts remembered for each worker"
    )

    host: str = same("host")
    port: int = same("port")
    api_key: str | None = same("api_key")
    api_key_file: str | None = same("api_key_file")
    cors_origins: tuple[str, ...] = same("cors_origins")
    allowed_hosts: tuple[str, ...] = same("allowed_hosts")
    max_body_bytes: int = same("max_body_bytes")
    max_body_depth: int = same("max_body_depth")
    max_connections: int = same("max_connections")
    max_body_values: int = same("max_body_values")
    max_body_strings: int = same("max_body_strings")
    max_bodies_bytes: int = same("max_bodies_bytes")
    max_concurrent_requests: int = same("max_concurrent_requests")
    header_timeout_s: float = same("header_timeout_s")
    body_timeout_s: float = same("body_timeout_s")
    stall_timeout_s: float = same("stall_timeout_s")
    control_timeout_s: float = same("control_timeout_s")
    enable_metrics: bool = same("enable_metrics")
    metrics_need_key: bool = same("metrics_need_key")
    access_log: bool = same("access_log")
    log_format: str = same("log_format")
    forwarded_allow_ips: tuple[str, ...] = same("forwarded_allow_ips")
    log_level: str = same("log_level")
    log_file: str | None = same("log_file")
    drain_timeout_s: float = same("drain_timeout_s")
    ready_file: str | None = same("ready_file")
    keep_alive_s: float = same("keep_alive_s")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RouterConfig:
        """The config with these options. Raises BadRequest for an unknown name (listing the known ones), or a
        value of the wrong type or out of range."""
        return read(cls, options, "router").verify()

    @property
    def server(self) -> ServerConfig:
        """The options for its HTTP server."""
        return hand(ServerConfig, self)

    def verify(self) -> RouterConfig:
        """Return self, or raise BadRequest naming the option and its rule."""
        self.server.verify()
        if self.worker and (self.prefill or self.decode):
            raise BadRequest("cannot be combined with --prefill and --decode", where="worker")
        if bool(self.prefill) != bool(self.decode):
            missing = "decode" if self.prefill else "prefill"
            raise BadRequest("is required: a pair needs one of each", where=missing)
        if not self.worker and not self.prefill:
            raise BadRequest(
                "is required, or --prefill and --decode", where="worker", hint="--worker URL ..."
            )
        for name, least in (
            ("retries", 0),
            ("failure_threshold", 1),
            ("probe_failures", 1),
            ("balance_abs_threshold", 0),
            ("balance_rel_threshold", 1),
            ("cache_threshold", 0),
            ("prefix_bytes", 1),
        ):
            if not least <= getattr(self, name) < float("inf"):
                raise BadRequest(f"must be at least {least}, got {getattr(self, name)}", where=name)
        for name in (
            "connect_timeout_s", "silence_timeout_s", "cooldown_s", "probe_interval_s", "probe_timeout_s",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < float("inf"):
                raise BadRequest(f"must be a positive number, got {getattr(self, name)}", where=name)
        return self
