"""SchedulerConfig: the numbers the scheduler works by. Knows no model; names of policies are checked where
they load."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.protocol.errors import BadRequest


@dataclass(frozen=True)
class SchedulerConfig:
    """All lengths in tokens.

    page_size             slots of one page; prefixes are shared in whole pages
    max_running_requests  sequences computed in one step, at most
    max_waiting_requests  requests waiting (for a place or for their grammar), at most; more are answered
                          QueueFull
    chunked_prefill_size  prompt tokens computed in one step, all requests together
    max_prefill_tokens    prompt tokens admitted and not yet computed, all requests together (a longer prompt
                          goes alone)
    policy                name of a schedule policy (runtime.scheduler.policies)
    radix_cache           keep prefixes for later requests
    jump_forward          append text that a constraint forces without decoding it
    context_length        the model's: prompt + new tokens of one request, at most; None = only the pool
                          limits it
    conservativeness      scales the share of their max_new_tokens that running requests are expected to need
    """

    page_size: int = 1
    max_running_requests: int = 256
    max_waiting_requests: int = 4096
    chunked_prefill_size: int = 2048
    max_prefill_tokens: int = 16384
    policy: str = "lpm"
    radix_cache: bool = True
    jump_forward: bool = True
    context_length: int | None = None
    conservativeness: float = 1.0

    def __post_init__(self) -> None:
        numbers = {
            "page_size": self.page_size,
            "max_running_requests": self.max_running_requests,
            "max_waiting_requests": self.max_waiting_requests,
            "chunked_prefill_size": self.chunked_prefill_size,
            "max_prefill_tokens": self.max_prefill_tokens,
            "context_length": 1 if self.context_length is None else self.context_length,
        }
        for name, value in numbers.items():
            if value < 1:
                raise BadRequest(f"must be at least 1, got {value}", where=name)
        if not 0 < self.conservativeness < float("inf"):
            raise BadRequest(
                f"must be a positive number, got {self.conservativeness}", where="conservativeness"
            )
