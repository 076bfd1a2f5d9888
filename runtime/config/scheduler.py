"""SchedulerConfig: the scheduler's settings. Knows no model; names of policies are checked when they are
loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.config.options import check, option
from runtime.config.speculation import NO_SPECULATION, SpeculationConfig
from runtime.protocol.errors import BadRequest

TUNABLE = ("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "max_waiting_requests")
"""Settings that may change while requests run."""


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """How requests are scheduled: options of EngineConfig that the scheduler uses unchanged. All lengths are
    in tokens."""

    page_size: int = option(1, at_least=1)
    """KV slots per page; prefixes are shared in whole pages"""
    max_running_requests: int = option(256, at_least=1)
    """maximum number of sequences in one step"""
    max_waiting_requests: int = option(4096, at_least=1)
    """maximum number of waiting requests; more get a 503"""
    chunked_prefill_size: int = option(2048, at_least=1)
    """maximum number of prompt tokens computed in one step"""
    max_prefill_tokens: int = option(16384, at_least=1)
    """maximum number of prompt tokens that are admitted but not yet computed"""
    mixed_prefill: bool = option(True)
    """compute prompts and output tokens in the same step; otherwise a step with prompts computes only
    prompts"""
    preemption_threshold: int | None = option(10, at_least=1)
    """with --schedule-policy priority: how much higher the priority of a waiting request must be to preempt a
    running one; none: never preempt"""
    max_preemptions: int = option(3, at_least=1)
    """maximum number of times one request can be preempted"""
    queue_timeout_s: float | None = option(None, positive=True)
    """seconds a request may wait before it first starts. By default no limit"""
    running_timeout_s: float | None = option(None, positive=True)
    """seconds a request may run after it first started. By default no limit"""
    max_sessions: int = option(1024, at_least=1)
    """maximum number of open sessions"""
    max_session_tokens: int = option(16 << 20, at_least=1)
    """maximum number of tokens in all sessions together"""
    eviction_policy: str = option("lru")
    """which cached prefix is evicted first when memory is needed: lru (least recently used), lfu (least
    frequently used), slru (lru, but prefixes that were reused stay longer), fifo (oldest), filo, mru or
    priority (the priority of the request)"""
    conservativeness: float = option(1.0, positive=True)
    """multiplier for the estimate of how many of their max_new_tokens running requests will use; above 1
    admits fewer requests at a time"""
    radix_cache: bool = option(True)
    """cache the KV of prefixes for later requests"""
    jump_forward: bool = option(True)
    """append text that a constraint forces without decoding it"""
    liveness: bool = option(True)
    """lead constrained outputs to a valid end before max_new_tokens is reached, so that they always parse"""
    max_rejections: int = option(32, at_least=0)
    """maximum number of rollbacks of one output whose constraint rejects it"""
    max_taken_back: int = option(256, at_least=1)
    """maximum number of tokens rolled back this way, or 4 * max_new_tokens if that is more"""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerOptions):
    """The options, and the values that EngineConfig derives from others.

    policy          name of a schedule policy (runtime.scheduler.policies)
    overlap         the scheduler works while the model computes (runtime.scheduler.loop)
    context_length  maximum of prompt and new tokens of one request; None: only the pool limits it
    speculation     speculative decoding
    """

    policy: str = "lpm"
    overlap: bool = True
    context_length: int | None = None
    speculation: SpeculationConfig = NO_SPECULATION

    def __post_init__(self) -> None:
        check(self)

    def tuned(self, values: Mapping[str, Any], tunable: Sequence[str] = TUNABLE) -> SchedulerConfig:
        """A copy with other values of `tunable` settings. Raises BadRequest for an unknown name or an invalid
        value."""
        for name, value in values.items():
            if name not in tunable:
                raise BadRequest(
                    f"cannot be changed at run time; these can: {', '.join(tunable)}", where=name
                )
            if type(value) is not int:
                raise BadRequest(f"must be an integer, got {value!r}", where=name)
        return replace(self, **values)
