"""What GET /metrics returns: the HTTP processes' counters, and the scheduler's state at the moment of asking.

Names follow the field's usage, under the prefix `sglang_dsl:`. One registry per application; nothing global.
Several HTTP processes count in files of one folder, as prometheus_client's multiprocess mode has it: whoever
is asked adds up all of them, those that died included.
"""

from __future__ import annotations

import math
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from runtime.processes.frontend.observe import Begun
from runtime.protocol.errors import Aborted, RuntimeFault
from runtime.server.http.keys import KeyMetrics, KeyRing
from runtime.server.observe.families import (
    PREFIX,
    Exemplars,
    Processes,
    ProcessMetrics,
    labels_here,
    with_aliases,
)

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder in which several processes count."""
FLUSH_S = 1.0

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TOKENS = tuple(float(10**power * digit) for power in range(6) for digit in (1, 2, 5))
_LONG = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

# What the scheduler's state says, under the same name: name -> help. A name that it does not say is left out.
_GAUGES = {
    "num_running_reqs": "Requests being computed",
    "num_queue_reqs": "Requests waiting for a place",
    "num_grammar_queue_reqs": "Requests waiting for their constraint",
    "num_retracted_reqs": "Requests that were sent back to the queue and wait there",
    "num_paused_reqs": "Requests held by a pause",
    "num_grammar_kept": "Constraints that are kept ready",
    "grammar_kept_bytes": "What these take, by their own estimate",
    "num_grammar_compiling": "Constraints being compiled, or waiting for that",
    "num_grammar_stuck": "Compilations that have passed their deadline and still run",
    "num_sessions": "Open sessions",
    "num_session_tokens": "Tokens of all their turns",
    "num_used_tokens": "KV slots held by requests",
    "token_usage": "Share of the KV slots held by requests",
    "max_total_num_tokens": "KV slots in all",
    "cache_hit_rate": "Share of all prompt tokens so far that came from the cache",
    "gen_throughput": "Tokens generated per second, lately",
    "num_prefill_bootstrap_queue_reqs": "Requests whose decode engine has not made room yet",
    "num_prefill_inflight_queue_reqs": "Requests whose prompt is computed and still being sent",
    "num_decode_prealloc_queue_reqs": "Requests without slots for the KV that is to come",
    "num_decode_transfer_queue_reqs": "Requests whose KV is coming",
    "num_host_copies": "Retracted requests whose KV is kept in host memory",
    "num_free_metadata_rows": "Requests whose KV could move besides those whose does",
    "spec_accept_length": "Tokens gained by a step that verified guesses, its own included",
    "spec_accept_rate": "Share of the guessed tokens so far that were right",
    "new_token_ratio": "Share of their max_new_tokens requests are expected to need",
}
_KEPT = {
    "num_kept_responses": "Responses that are kept for /v1/responses",
    "kept_response_bytes": "What these take, as JSON",
}
_TOTALS = {
    "num_retractions_total": "Times a request was sent back to the queue",
    "num_preemptions_total": "Times a request gave way to one of higher priority",
    "num_repairs_total": "Mismatches of the KV accounts that were found and repaired",
    "num_timed_out_requests_total": "Requests that passed their deadline",
    "num_grammar_total": "Constraints that were asked for",
    "num_grammar_cache_hit_total": "Constraints that were ready when they were asked for",
    "num_grammar_cache_miss_total": "Constraints that had to be compiled, or were being compiled",
    "num_grammar_timeout_total": "Compilations that passed their deadline",
    "num_grammar_rollbacks_total": "Times ended requests took output back for their constraint",
    "computed_tokens_total": "Tokens computed by forward passes",
    "num_transferred_requests_total": "Requests whose KV moved between two engines",
    "num_transfer_failed_requests_total": "Requests that failed before it had",
    "transferred_tokens_total": "Prompt tokens of those whose KV moved",
    "transfer_seconds_total": "Seconds from their coming until it had",
    "num_offloaded_requests_total": "Times a retracted request's KV was kept in host memory",
    "num_restored_requests_total": "Times it was written back",
    "jumped_tokens_total": "Tokens appended without a forward pass",
    "spec_verify_steps_total": "Steps of requests in which guessed tokens were verified",
    "spec_drafted_tokens_total": "Tokens guessed",
    "spec_accepted_tokens_total": "Tokens guessed that were right",
}


_HISTOGRAMS = {
    "grammar_compile_seconds": "Compilations of constraints",
    "grammar_mask_seconds": "Filling the masks of one step",
}
_REFUSALS = "num_grammar_refused_total", "Constraints that could not be compiled, by kind and error code"


class HttpMetrics:
    """Requests and answers, by path template."""

    def __init__(
        self, registry: CollectorRegistry, labels: Mapping[str, str], exemplars: Exemplars | None = None
    ) -> None:
        names = (*labels, "method", "endpoint")
        self._labels = dict(labels)
        self._requests = Counter(f"{PREFIX}http_requests", "HTTP requests", names, registry=registry)
        self._responses = Counter(
            f"{PREFIX}http_responses",
            "HTTP answers by status",
            (*names, "status_code"),
            registry=registry,
        )
        self._active = Gauge(
            f"{PREFIX}http_requests_active",
            "HTTP requests being answered",
            tuple(labels),
            registry=registry,
            multiprocess_mode="livesum",
        ).labels(**labels)
        self._exemplars = exemplars
        self._children: dict[tuple[str, str, str], tuple[Counter, Counter, Histogram]] = {}
        self._seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "From a request's headers to the end of its answer",
            names,
            registry=registry,
            buckets=_LONG,
        )

    def began(self) -> None:
        self._active.inc()

    def ended(self, method: str, endpoint: str, status: int | None, seconds: float) -> None:
        """status: None where the client went before there was an answer."""
        labels = {**self._labels, "method": method, "endpoint": endpoint}
        key = method, endpoint, str(status or 499)
        found = self._children.get(key)
        if found is None:
            answers = self._responses.labels(**labels, status_code=key[2])
            found = self._requests.labels(**labels), answers, self._seconds.labels(**labels)
            self._children[key] = found
        self._active.dec()
        found[0].inc()
        found[1].inc()
        found[2].observe(seconds)
        if self._exemplars is not None:
            name = f"{PREFIX}http_request_duration_seconds"
            self._exemplars.put(name, _LONG, labels, seconds, labels_here())


class RequestMetrics:
    """An observer of the frontend: what becomes of the requests it carries. Safe from any thread."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str], exemplars: Exemplars) -> None:
        def counter(name: str, help: str) -> Counter:
            return Counter(PREFIX + name, help, tuple(labels), registry=registry).labels(**labels)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, help, tuple(labels), registry=registry, buckets=buckets)
            return made.labels(**labels)

        self.requests = counter("num_requests", "Requests that ended, however")
        self.aborted = counter("num_aborted_requests", "Requests that were cancelled")
        self.failed = counter("num_failed_requests", "Requests that ended with an error other than that")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = counter("cached_tokens", "Tokens of prompts that came from the cache")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _LONG
        )
        self.inter_token = Latencies(
            histogram("inter_token_latency_seconds", "Between two tokens of a request", _SHORT), _SHORT
        )
        self.whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end", _LONG)
        self.queue = histogram("queue_time_seconds", "In the scheduler's queue", _LONG)
        self._finished = Counter(
            f"{PREFIX}num_finished_requests",
            "Requests that ended, by reason: stop, length, abort or error",
            (*labels, "finished_reason"),
            registry=registry,
        )
        self._sizes = {
            "prompt_tokens": histogram("request_prompt_tokens", "Tokens of a request's prompt", _TOKENS),
            "completion_tokens": histogram(
                "request_generation_tokens", "Tokens generated for a request", _TOKENS
            ),
        }
        self._labels, self._exemplars = dict(labels), exemplars
        self._known: dict[str, dict[str, str]] = {}
        self._values = tuple(labels.values())
        self._stages = Histogram(
            f"{PREFIX}per_stage_req_latency_seconds",
            "Of a request: in the queue, until its first token, and from there to its end",
            (*labels, "stage"),
            registry=registry,
            buckets=_LONG,
        )

    def on_begin(self, request: Begun) -> None:
        """Counted at its end. Called where the HTTP request is known, unlike what follows."""
        if here := labels_here():
            self._known[request.rid] = here

    def on_first_token(self, request: Begun, seconds: float) -> None:
        self.first_token.observe(max(0.0, seconds))
        self._remember("time_to_first_token_seconds", request, max(0.0, seconds))

    def on_tokens(self, request: Begun, count: int, seconds: float) -> None:
        """`count` tokens in `seconds` are as many latencies of a share each."""
        self.inter_token.observe(max(0.0, seconds) / count, count)

    def on_finish(self, request: Begun, meta: Mapping[str, Any], seconds: float) -> None:
        self.inter_token.flush()
        self.requests.inc()
        self.prompt_tokens.inc(int(meta.get("prompt_tokens") or 0))
        self.cached_tokens.inc(int(meta.get("cached_tokens") or 0))
        self.generation_tokens.inc(int(meta.get("completion_tokens") or 0))
        self.whole.observe(max(0.0, seconds))
        self._remember("e2e_request_latency_seconds", request, max(0.0, seconds))
        self._known.pop(request.rid, None)
        self._finished.labels(*self._values, str((meta.get("finish_reason") or {}).get("type", "stop"))).inc()
        for name, sizes in self._sizes.items():
            sizes.observe(int(meta.get(name) or 0))
        queue, first = (
            max(0.0, float(meta.get(name) or 0.0)) for name in ("queue_time", "first_token_latency")
        )
        self.queue.observe(queue)
        if first:
            stages = {"queue": queue, "prefill": first - queue, "decode": seconds - first}
            for stage, share in stages.items():
                self._stages.labels(*self._values, stage).observe(max(0.0, share))

    def on_abort(self, request: Begun, fault: RuntimeFault | None, seconds: float) -> None:
        self.inter_token.flush()
        self.requests.inc()
        gone = fault is None or fault.code == Aborted.code
        (self.aborted if gone else self.failed).inc()
        self._finished.labels(*self._values, "abort" if gone else "error").inc()
        self._known.pop(request.rid, None)

    def _remember(self, name: str, request: Begun, seconds: float) -> None:
        of = self._known.get(request.rid, {})
        self._exemplars.put(PREFIX + name, _LONG, self._labels, seconds, of)


class Latencies:
    """Takes many equal values at once, and hands them to a histogram now and then: every streamed token is
    one."""

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        self._histogram: Any = histogram
        self._bounds = (*bounds, math.inf)
        self._lock = threading.Lock()
        self._flushed = time.monotonic()
        self._empty()

    def observe(self, seconds: float, count: int) -> None:
        at = bisect_left(self._bounds, seconds)
        with self._lock:
            self._counts[at] += count
            self._sum += seconds * count
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            counts, total = self._counts, self._sum
            self._empty()
        self._flushed = time.monotonic()
        # Its own observe() takes one value at a time.
        self._histogram._sum.inc(total)
        for bucket, count in zip(self._histogram._buckets, counts, strict=True):
            if count:
                bucket.inc(count)

    def _empty(self) -> None:
        self._counts, self._sum = [0] * len(self._bounds), 0.0


class SchedulerState(Collector):
    """The scheduler's state as it was reported last."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._values = tuple(labels), tuple(labels.values())
        self._state: Mapping[str, Any] | None = None

    def update(self, state: Mapping[str, Any] | None) -> None:
        """None: the scheduler did not answer."""
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield self._metric(
            GaugeMetricFamily, "scheduler_up", "1 when the scheduler answered", self._state is not None
        )
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _TOTALS)):
            for name, help in table.items():
                value = (self._state or {}).get(name)
                if value is not None:
                    yield self._metric(kind, name, help, value)
        for name, help in _HISTOGRAMS.items():
            if (state := (self._state or {}).get(name)) is not None:
                yield self._histogram(name, help, state)
        name, help = _REFUSALS
        refused = CounterMetricFamily(PREFIX + name, help, labels=(*self._names, "kind", "code"))
        for what, count in ((self._state or {}).get(name) or {}).items():
            refused.add_metric([*self._values, *what.split("/", 1)], float(count))
        yield refused

    def _histogram(self, name: str, help: str, state: Mapping[str, Any]) -> Metric:
        made = HistogramMetricFamily(PREFIX + name, help, labels=self._names)
        buckets = [("+Inf" if bound is None else str(bound), count) for bound, count in state["buckets"]]
        made.add_metric(self._values, buckets, state["sum"])
        return made

    def _metric(self, kind: Any, name: str, help: str, value: float) -> Metric:
        made: Any = kind(PREFIX + name, help, labels=self._names)
        made.add_metric(self._values, float(value))
        return cast(Metric, made)


class Metrics(Collector):
    """Everything that the HTTP processes count. `requests` is an observer for this one's frontend. aliases:
    the servers under whose names it is told, too (metric_names)."""

    def __init__(
        self, model: str, aliases: Sequence[str] = (), processes: Processes = lambda: {"server": os.getpid()}
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._labels = labels = {"model_name": model}
        self._aliases, self._exemplars = aliases, Exemplars()
        self.http = HttpMetrics(registry, labels, self._exemplars)
        self.requests = RequestMetrics(registry, labels, self._exemplars)
        self._scheduler, self._processes = SchedulerState(labels), ProcessMetrics(processes)
        self._counts: Collector = registry
        self.kept = {
            name: Gauge(
                PREFIX + name, help, tuple(labels), registry=registry, multiprocess_mode="livesum"
            ).labels(**labels)
            for name, help in _KEPT.items()
        }
        if FOLDER in os.environ:
            self._counts = MultiProcessCollector(None)  # type: ignore[no-untyped-call]

    def observe_keys(self, ring: KeyRing) -> None:
        """Tell what each of its keys has used."""
        ring.tell = KeyMetrics(self._registry, PREFIX, self._labels)

    def collect(self) -> Iterator[Metric]:
        counts = self._exemplars.on(self._counts.collect())
        yield from with_aliases([*counts, *self._scheduler.collect()], self._aliases)
        yield from self._processes.collect()

    def render(self, state: Mapping[str, Any] | None, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics, with exemplars, where the header Accept asks for
        it. state: the scheduler's, None where it did not answer."""
        self.requests.inter_token.flush()
        self._scheduler.update(state)
        if "application/openmetrics-text" in accept:
            # Names as they are: other escapings replace their colons.
            made = openmetrics.generate_latest(self, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return made, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self), CONTENT_TYPE_LATEST
