"""Quota: what one API key may use: requests and tokens per minute, and requests at once; its counters.

Each HTTP worker counts for itself, so the limits that it is given are its share of the key's. Requests are
paid for when they come; tokens as they are taken in and generated, so that a key may owe some.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from runtime.processes.frontend.client import Client, flow_label
from runtime.protocol.errors import RateLimited

MINUTE_S = 60.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    running_requests: int | None = None

    def share(self, workers: int) -> Limits:
        """Of one worker among several, at least one of each."""
        return Limits(
            **{
                name: None if value is None else math.ceil(value / workers)
                for name, value in msgspec.structs.asdict(self).items()
                if name in Limits.__struct_fields__
            }
        )


class _Bucket:
    """It is full at `limit`, and fills up within a minute."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self._level, self._at = limit, float(limit), now

    def level(self, now: float) -> float:
        self._level = min(float(self.limit), self._level + (now - self._at) * self.limit / MINUTE_S)
        self._at = now
        return self._level

    def take(self, count: int, now: float) -> None:
        self._level = self.level(now) - count

    def wait_s(self, least: float, now: float) -> float:
        """Seconds until `least` are in it."""
        return max(0.0, (least - self.level(now)) * MINUTE_S / self.limit)


class Quota(Client):
    """tell: called with what more was used: requests, tokens, refused (requests), running (up and down)."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str, int], None] = lambda what, count: None,
    ) -> None:
        super().__init__(f"key:{name}", is_tenant=True, flow=flow_label(f"key:{name}"))
        self.key_name = name
        self._clock, self._tell, self._lock = clock, tell, threading.Lock()
        self.requests = self.tokens = self.refused = self.running = 0
        self._buckets: dict[str, _Bucket] = {}
        self.become(limits)

    def become(self, limits: Limits) -> None:
        """Have these limits from now on; what was used counts, where a limit stays the same."""
        now = self._clock()
        wanted = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        with self._lock:
            self._most = limits.running_requests
            kept = self._buckets
            self._buckets = {
                name: kept[name] if name in kept and kept[name].limit == limit else _Bucket(limit, now)
                for name, limit in wanted.items()
                if limit is not None
            }

    def begin(self) -> None:
        with self._lock:
            self._check(self._clock())
            if "requests" in self._buckets:
                self._buckets["requests"].take(1, self._clock())
            self.running += 1
            self.requests += 1
        self._tell("requests", 1)
        self._tell("running", 1)

    def _check(self, now: float) -> None:
        for name, bucket in self._buckets.items():
            if bucket.level(now) < 1:
                self._refuse(f"{bucket.limit} {name} per minute", bucket.wait_s(1, now))
        if self._most is not None and self.running >= self._most:
            self._refuse(f"{self._most} requests at once", 1.0)

    def _refuse(self, what: str, wait_s: float) -> None:
        self.refused += 1
        self._tell("refused", 1)
        fault = RateLimited(f"the key {self.key_name!r} is limited to {what}", hint="try again later")
        fault.retry_after_s = wait_s
        raise fault

    def end(self) -> None:
        with self._lock:
            self.running -= 1
        self._tell("running", -1)

    def spend(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens
            if "tokens" in self._buckets:
                self._buckets["tokens"].take(tokens, self._clock())
        self._tell("tokens", tokens)

    def headers(self) -> dict[str, str]:
        """In the words of OpenAI's: x-ratelimit-limit-requests, -remaining-, -reset-; likewise tokens."""
        headers: dict[str, Any] = {}
        with self._lock:
            now = self._clock()
            for name, bucket in self._buckets.items():
                headers[f"x-ratelimit-limit-{name}"] = bucket.limit
                headers[f"x-ratelimit-remaining-{name}"] = max(0, math.floor(bucket.level(now)))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.limit, now):.3f}s"
        return {name: str(value) for name, value in headers.items()}
