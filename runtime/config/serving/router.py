"""RouterConfig: every option of the router: its workers, how it chooses among them, and when a worker counts
as failed.

Options that it shares with the server (address, key, limits) come from there. It opens no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from runtime.config.options import config_from, option
from runtime.config.serving.server import HttpOptions, ServerConfig
from runtime.protocol.errors import BadRequest


@dataclass(frozen=True, kw_only=True)
class RouterConfig(HttpOptions):
    """Options of the router."""

    label = "router"

    worker: tuple[str, ...] = option(())
    """URLs of servers that are replicas of one another"""
    prefill: tuple[str, ...] = option(())
    """URLs of servers with --disaggregation-mode prefill. If a server does not report the port of its
    bootstrap server, add the port after its URL: --prefill http://10.0.0.1:30000 8998"""
    decode: tuple[str, ...] = option(())
    """URLs of servers with --disaggregation-mode decode"""
    policy: str = option("cache_aware")
    """how a worker or a prefill server is chosen: cache_aware, power_of_two, round_robin, or a plug-in"""
    decode_policy: str = option("power_of_two")
    """how a decode server is chosen"""
    worker_api_key: str | None = option(None, secret=True)
    """API key of the workers. Prefer SGLANG_DSL_WORKER_API_KEY over the command line. By default the client's
    own key is passed on, unless the router itself requires one"""
    retries: int = option(2, at_least=0)
    """maximum number of times a request is sent to another worker, or pair, after one fails before its first
    token"""
    connect_timeout_s: float = option(5.0, positive=True)
    """seconds a worker may take to accept a connection"""
    silence_timeout_s: float = option(600.0, positive=True)
    """seconds a worker may send nothing at all while it answers a request"""
    failure_threshold: int = option(3, at_least=1)
    """number of failures in a row after which a worker gets no requests for --cooldown-s"""
    cooldown_s: float = option(10.0, positive=True)
    """seconds until a failed worker gets a single request again, as a test"""
    probe_interval_s: float = option(5.0, positive=True)
    """seconds between two checks of each worker's /ready"""
    probe_timeout_s: float = option(5.0, positive=True)
    """seconds a worker may take to answer such a check"""
    probe_failures: int = option(3, at_least=1)
    """number of unanswered checks in a row after which a worker counts as dead and its requests fail"""
    cache_threshold: float = option(0.5, at_least=0)
    """cache_aware: fraction of a prompt that a worker must have seen to be preferred for it"""
    balance_abs_threshold: int = option(32, at_least=0)
    """cache_aware: a worker is overloaded if it has this many more requests than the least busy one ..."""
    balance_rel_threshold: float = option(1.5, at_least=1)
    """cache_aware: ... and this many times as many. The least busy worker is then chosen, whatever it has
    seen"""
    prefix_bytes: int = option(8 << 20, at_least=1)
    """cache_aware: approximate size of the prompts remembered for each worker"""

    @property
    def server(self) -> ServerConfig:
        """The options for its HTTP server."""
        return config_from(ServerConfig, self)

    def verify(self) -> Self:
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
        return self
