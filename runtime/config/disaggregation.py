"""DisaggregationConfig: how prompts and outputs are computed by two engines, and how the KV goes from the one
to the other. Opens no sockets; names of transfers are checked where they load."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.protocol.errors import BadRequest

MODES = ("null", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class DisaggregationConfig:
    """mode                 "null": one engine computes both
    transfer_backend     name in the table of transfers
    host                 where other engines reach this one: bootstrap server and transfers listen there
    bootstrap_port       of the prompt engine's bootstrap server; 0 = any free one
    allowed_hosts        of a decoding engine: which hosts a request may name as its prompt's, besides this
                         machine; "*" = any
    key                  secret that both engines know; None = none but this machine's engines may take part
    reserved_tokens      slots that each running request keeps for its output before another prompt is let in
    timeout_s            how long each wait for the other engine may take
    heartbeat_s          how often it is looked whether the other engine lives; gone after two misses
    """

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
