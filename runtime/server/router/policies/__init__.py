"""Router policies: which of the workers that can take a request gets it.

A policy is made once per router and pool of workers, from the router's options, and keeps what it needs to
know. It is called by one thread only, for every attempt; it must be quick, and must not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from runtime.protocol.registry import Registry


class Candidate(Protocol):
    """What a policy may know of a worker."""

    @property
    def name(self) -> str:
        """Its address; no two have the same."""
        ...

    @property
    def active(self) -> int:
        """Requests that were sent to it and are not answered."""
        ...


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    def choose(self, prompt: bytes, candidates: Sequence[C], /) -> C:
        """One of `candidates`, of which there is at least one. prompt: what the request's cached prefix
        depends on; two prompts with a common beginning have one here. May be empty, and may be cut off."""
        ...

    def forget(self, name: str, /) -> None:
        """The worker of that name failed: what it had cached is gone."""
        ...


class PolicyOptions(Protocol):
    """The router's options that are meant for policies (see RouterConfig)."""

    @property
    def cache_threshold(self) -> float: ...

    @property
    def balance_abs_threshold(self) -> int: ...

    @property
    def balance_rel_threshold(self) -> float: ...

    @property
    def prefix_bytes(self) -> int: ...


POLICIES: Registry[Callable[[PolicyOptions], Policy]] = Registry(
    "router policy",
    {
        "cache_aware": "runtime.server.router.policies.cache_aware:CacheAware",
        "power_of_two": "runtime.server.router.policies.power_of_two:PowerOfTwo",
        "round_robin": "runtime.server.router.policies.round_robin:RoundRobin",
    },
)
