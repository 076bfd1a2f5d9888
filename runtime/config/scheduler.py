"""SchedulerConfig: the numbers the scheduler works by. Knows no model; names of policies are checked where
they load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runtime.config.speculation import NO_SPECULATION, SpeculationConfig
from runtime.protocol.errors import BadRequest

TUNABLE = ("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "max_waiting_requests")
"""What may change while requests run."""


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
    mixed_prefill         compute prompts and next tokens in the same step; else a step that computes prompts
                          computes nothing else
    policy                name of a schedule policy (runtime.scheduler.policies)
    preemption_threshold  with the policy `priority`: a waiting request whose priority is at least this much
                          higher takes the place of running ones; None: never
    max_preemptions       how often one request can lose its place like that
    queue_timeout_s       seconds a request may wait before it is first let in; None: no limit
    running_timeout_s     seconds a request may take from then on; None: no limit. (A request's own deadline
                          holds besides.)
    overlap               work for the scheduler while the model computes (runtime.scheduler.loop)
    max_sessions          sessions open at once, at most
    max_session_tokens    tokens of all their turns together, at most
    eviction_policy       which cached prefix goes first: name of a policy of runtime.cache.eviction
    radix_cache           keep prefixes for later requests
    jump_forward          append text that a constraint forces without decoding it
    liveness              lead constrained outputs to an end before max_new_tokens runs out
    max_rejections        how often one request's output may be taken back because what was generated cannot
                          be kept, and
    max_taken_back        how many tokens that may be in all, or 4 * max_new_tokens where that is more
    context_length        the model's: prompt + new tokens of one request, at most; None = only the pool
                          limits it
    conservativeness      scales the share of their max_new_tokens that running requests are expected to need
    speculation           whether tokens are guessed ahead
    """

    page_size: int = 1
    max_running_requests: int = 256
    max_waiting_requests: int = 4096
    chunked_prefill_size: int = 2048
    max_prefill_tokens: int = 16384
    mixed_prefill: bool = True
    policy: str = "lpm"
    preemption_threshold: int | None = 10
    max_preemptions: int = 3
    queue_timeout_s: float | None = None
    running_timeout_s: float | None = None
    overlap: bool = True
    max_sessions: int = 1024
    max_session_tokens: int = 16 << 20
    radix_cache: bool = True
    eviction_policy: str = "lru"
    jump_forward: bool = True
    liveness: bool = True
    max_rejections: int = 32
    max_taken_back: int = 256
    context_length: int | None = None
    conservativeness: float = 1.0
    speculation: SpeculationConfig = NO_SPECULATION

    def __post_init__(self) -> None:
        numbers = {
            "page_size": self.page_size,
            "max_running_requests": self.max_running_requests,
            "max_waiting_requests": self.max_waiting_requests,
            "chunked_prefill_size": self.chunked_prefill_size,
            "max_prefill_tokens": self.max_prefill_tokens,
            "context_length": 1 if self.context_length is None else self.context_length,
            "preemption_threshold": 1 if self.preemption_threshold is None else self.preemption_threshold,
            "max_preemptions": self.max_preemptions,
            "max_sessions": self.max_sessions,
            "max_session_tokens": self.max_session_tokens,
            "max_taken_back": self.max_taken_back,
        }
        for name, value in numbers.items():
            if value < 1:
                raise BadRequest(f"must be at least 1, got {value}", where=name)
        if self.max_rejections < 0:
            raise BadRequest(f"must be at least 0, got {self.max_rejections}", where="max_rejections")
        positive = {
            "conservativeness": self.conservativeness,
            "queue_timeout_s": 1.0 if self.queue_timeout_s is None else self.queue_timeout_s,
            "running_timeout_s": 1.0 if self.running_timeout_s is None else self.running_timeout_s,
        }
        for name, amount in positive.items():
            if not 0 < amount < float("inf"):
                raise BadRequest(f"must be a positive number, got {amount}", where=name)

    def tuned(self, values: Mapping[str, Any]) -> SchedulerConfig:
        """The same with other values of TUNABLE settings. Raises BadRequest for an unknown name or a bad
        value."""
        for name, value in values.items():
            if name not in TUNABLE:
                raise BadRequest(
                    f"cannot be changed at run time; these can: {', '.join(TUNABLE)}", where=name
                )
            if type(value) is not int:
                raise BadRequest(f"must be an integer, got {value!r}", where=name)
        return replace(self, **values)
