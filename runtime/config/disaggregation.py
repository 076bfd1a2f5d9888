"""DisaggregationConfig: two engines compute prompts and outputs, and transfer the KV from one to the other.
Opens no sockets; names of transfers are checked when they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.protocol.errors import BadRequest

MODES = ("null", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class DisaggregationConfig:
    """mode                 "null": one engine computes both
    transfer_backend     name in the table of transfers
    host                 the address at which other engines reach this one; the bootstrap server and transfers
                         listen there
    bootstrap_port       of the prefill engine's bootstrap server; 0 = any free one
    allowed_hosts        for a decode engine: the hosts that a request may name as its prefill engine, besides
                         this machine; "*" = any
    key                  secret shared by both engines; None = only engines on this machine may take part
    reserved_tokens      slots reserved for the output of each running request before another prompt is
                         admitted
    timeout_s            limit of each wait for the other engine
    heartbeat_s          interval between checks of the other engine; two misses mean that it is gone"""

    mode: str = "null"
    transfer_backend: str = "tcp"
    host: str = "127.0.0.1"
    bootstrap_port: int = 8998
    allowed_hosts: tuple[str, ...] = ()
    key: str | None = None
    reserved_tokens: int = 512
    timeout_s: float = 300.0
    heartbeat_s: float = 5.0

    def verify(self) -> DisaggregationConfig:
        """Return self, or raise BadRequest naming the option and its rule."""
        positive = {"timeout_s": self.timeout_s, "heartbeat_s": self.heartbeat_s}
        for name, value in positive.items():
            if not 0 < value < float("inf"):
                raise BadRequest(f"must be a positive number, got {value}", where=f"disaggregation_{name}")
        if not 0 <= self.bootstrap_port < 1 << 16:
            raise BadRequest(
                f"must be in 0 to 65535, got {self.bootstrap_port}", where="disaggregation_bootstrap_port"
            )
        if self.reserved_tokens < 0:
            raise BadRequest(
                f"must be at least 0, got {self.reserved_tokens}", where="num_reserved_decode_tokens"
            )
        if not self.host:
            raise BadRequest("must not be empty", where="disaggregation_host")
        if self.key is not None and not self.key.strip():
            raise BadRequest("is empty", where="disaggregation_key")
        return self
