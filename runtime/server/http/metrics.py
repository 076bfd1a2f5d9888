"""GET /metrics: the HTTP processes' counters, and the scheduler's state at the time of the scrape.

Names are sglang's, under the prefix `sglang_dsl:`. There is one registry per application. Several HTTP
processes count in files of one folder (prometheus_client's multiprocess mode); each answers with the sum of
all, including those that have died.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

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

from runtime.processes.frontend.client import Begun, Observer
from runtime.protocol.errors import Aborted, RuntimeFault
from runtime.server.http.keys import KeyRing
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

M = TypeVar("M", Counter, Gauge, Histogram)
_DURATION = "http_request_duration_seconds"
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TOKENS = tuple(float(10**power * digit) for power in range(6) for digit in (1, 2, 5))
_LONG = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

# Fields of the scheduler's state -> help. Those that it does not have are left out.
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
_COUNTS = {
    "num_requests": "Requests that ended, however",
    "num_aborted_requests": "Requests that were cancelled",
    "num_failed_requests": "Requests that ended with an error other than that",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that came from the cache",
    "generation_tokens": "Tokens generated",
}
_OF_META = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "completion_tokens": "generation_tokens",
}
"""Field of an output's meta_info -> counter."""
_SIZES = {
    "prompt_tokens": ("request_prompt_tokens", "Tokens of a request's prompt"),
    "completion_tokens": ("request_generation_tokens", "Tokens generated for a request"),
}
_SECONDS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "e2e_request_latency_seconds": "From a request's arrival to its end",
    "queue_time_seconds": "In the scheduler's queue",
}
_KEY_COUNTS = {
    "requests": "Requests of an API key",
    "tokens": "Tokens that it used",
    "refused": "Its requests beyond a limit",
}
_REFUSALS = "num_grammar_refused_total", "Constraints that could not be compiled, by kind and error code"


class Families:
    """Creates the metrics of one registry, with common labels."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self.registry, self.labels = registry, dict(labels)
        self.values = tuple(labels.values())

    def counter(self, name: str, help: str, *more: str) -> Counter:
        """With `more` labels; without, the only child."""
        return self._create(Counter, name, help, more)

    def gauge(self, name: str, help: str, *more: str) -> Gauge:
        return self._create(Gauge, name, help, more, multiprocess_mode="livesum")

    def histogram(self, name: str, help: str, buckets: Sequence[float], *more: str) -> Histogram:
        return self._create(Histogram, name, help, more, buckets=buckets)

    def _create(self, kind: type[M], name: str, help: str, more: Sequence[str], **options: Any) -> M:
        metric = kind(PREFIX + name, help, (*self.labels, *more), registry=self.registry, **options)
        return metric if more else metric.labels(*self.values)


class HttpMetrics:
    """Requests and answers, by path template."""

    def __init__(self, families: Families, exemplars: Exemplars | None = None) -> None:
        self._labels, self._values, self._exemplars = families.labels, families.values, exemplars
        names = ("method", "endpoint")
        self._requests = families.counter("http_requests", "HTTP requests", *names)
        self._responses = families.counter("http_responses", "HTTP answers by status", *names, "status_code")
        self._active = families.gauge("http_requests_active", "HTTP requests being answered")
        self._seconds = families.histogram(
            _DURATION, "From a request's headers to the end of its answer", _LONG, *names
        )

    def began(self) -> None:
        self._active.inc()

    def ended(self, method: str, endpoint: str, status: int | None, seconds: float) -> None:
        """status: None if the client disconnected before an answer."""
        values = *self._values, method, endpoint
        self._active.dec()
        self._requests.labels(*values).inc()
        self._responses.labels(*values, str(status or 499)).inc()
        self._seconds.labels(*values).observe(seconds)
        if self._exemplars is not None:
            labels = {**self._labels, "method": method, "endpoint": endpoint}
            self._exemplars.put(PREFIX + _DURATION, _LONG, labels, seconds, labels_here())


class RequestMetrics(Observer):
    """An observer of the frontend: the requests of this process. Safe from any thread."""

    def __init__(self, families: Families, exemplars: Exemplars) -> None:
        histogram = families.histogram
        self._counts = {name: families.counter(name, help) for name, help in _COUNTS.items()}
        self._seconds = {name: histogram(name, help, _LONG) for name, help in _SECONDS.items()}
        self._sizes = {field: histogram(name, help, _TOKENS) for field, (name, help) in _SIZES.items()}
        self._between: Any = histogram(
            "inter_token_latency_seconds", "Between two tokens of a request", _SHORT
        )
        self._finished = families.counter(
            "num_finished_requests", "Requests that ended, by reason: stop, length, abort or error",
            "finished_reason",
        )  # fmt: skip
        self._stages = histogram(
            "per_stage_req_latency_seconds",
            "Of a request: in the queue, until its first token, and from there to its end",
            _LONG,
            "stage",
        )
        self._labels, self._values, self._exemplars = families.labels, families.values, exemplars
        self._known: dict[str, dict[str, str]] = {}

    def on_begin(self, request: Begun) -> None:
        """It is counted at its end. Only here the HTTP request is known."""
        if here := labels_here():
            self._known[request.rid] = here

    def on_first_token(self, request: Begun, seconds: float) -> None:
        self._observe("time_to_first_token_seconds", request, seconds)

    def on_tokens(self, request: Begun, count: int, seconds: float) -> None:
        """`count` tokens in `seconds` are as many latencies of a share each."""
        # Histogram.observe() adds one value at a time.
        self._between._sum.inc(max(0.0, seconds))
        self._between._buckets[bisect_left(_SHORT, seconds / count)].inc(count)

    def on_finish(self, request: Begun, meta: Mapping[str, Any], seconds: float) -> None:
        self._observe("e2e_request_latency_seconds", request, seconds)
        self._ended(request, str((meta.get("finish_reason") or {}).get("type", "stop")))
        for field, name in _OF_META.items():
            self._counts[name].inc(int(meta.get(field) or 0))
        for field, sizes in self._sizes.items():
            sizes.observe(int(meta.get(field) or 0))
        queue, first = (float(meta.get(name) or 0.0) for name in ("queue_time", "first_token_latency"))
        self._observe("queue_time_seconds", request, queue)
        if first > 0:
            stages = {"queue": queue, "prefill": first - queue, "decode": seconds - first}
            for stage, share in stages.items():
                self._stages.labels(*self._values, stage).observe(max(0.0, share))

    def on_abort(self, request: Begun, fault: RuntimeFault | None, seconds: float) -> None:
        cancelled = fault is None or fault.code == Aborted.code
        self._counts["num_aborted_requests" if cancelled else "num_failed_requests"].inc()
        self._ended(request, "abort" if cancelled else "error")

    def _ended(self, request: Begun, reason: str) -> None:
        self._counts["num_requests"].inc()
        self._finished.labels(*self._values, reason).inc()
        self._known.pop(request.rid, None)

    def _observe(self, name: str, request: Begun, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self._seconds[name].observe(seconds)
        of = self._known.get(request.rid, {})
        self._exemplars.put(PREFIX + name, _LONG, self._labels, seconds, of)


class Metrics(Collector):
    """All metrics of the HTTP processes. `requests` is an observer for the frontend. aliases: servers whose
    names the metrics have, too (see families.py)."""

    def __init__(
        self, model: str, aliases: Sequence[str] = (), processes: Processes = lambda: {"server": os.getpid()}
    ) -> None:
        registry = CollectorRegistry()
        self._families = families = Families(registry, {"model_name": model})
        self._aliases, self._exemplars = aliases, Exemplars()
        self.http = HttpMetrics(families, self._exemplars)
        self.requests = RequestMetrics(families, self._exemplars)
        self._processes = ProcessMetrics(processes)
        self._state: Mapping[str, Any] | None = None
        self._counts: Collector = registry
        self.kept = {name: families.gauge(name, help) for name, help in _KEPT.items()}
        if FOLDER in os.environ:
            self._counts = MultiProcessCollector(None)  # type: ignore[no-untyped-call]

    def observe_keys(self, ring: KeyRing) -> None:
        kinds: dict[str, Counter | Gauge] = {
            kind: self._families.counter(f"key_{kind}", help, "key") for kind, help in _KEY_COUNTS.items()
        }
        kinds["running"] = self._families.gauge("key_running", "Its requests in hand", "key")

        def report(name: str, kind: str, count: int) -> None:
            kinds[kind].labels(*self._families.values, name).inc(count)

        ring.report = report

    def collect(self) -> Iterator[Metric]:
        counts = self._exemplars.on(self._counts.collect())
        yield from with_aliases([*counts, *self._of_scheduler()], self._aliases)
        yield from self._processes.collect()

    def render(self, state: Mapping[str, Any] | None, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics, with exemplars, if the header Accept asks for it.
        state: the scheduler's, None if it did not answer."""
        self._state = state
        if "application/openmetrics-text" in accept:
            # Names as they are: other escapings replace their colons.
            text = openmetrics.generate_latest(self, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self), CONTENT_TYPE_LATEST

    def _of_scheduler(self) -> Iterator[Metric]:
        names, values, state = tuple(self._families.labels), self._families.values, self._state or {}

        def metric(kind: Any, name: str, help: str, value: float) -> Metric:
            family: Metric = kind(PREFIX + name, help, labels=names)
            family.add_metric(values, float(value))  # type: ignore[attr-defined]
            return family

        yield metric(
            GaugeMetricFamily, "scheduler_up", "1 when the scheduler answered", self._state is not None
        )
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _TOTALS)):
            for name, help in table.items():
                if (value := state.get(name)) is not None:
                    yield metric(kind, name, help, value)
        for name, help in _HISTOGRAMS.items():
            if (counts := state.get(name)) is not None:
                family = HistogramMetricFamily(PREFIX + name, help, labels=names)
                buckets = [("+Inf" if bound is None else str(bound), n) for bound, n in counts["buckets"]]
                family.add_metric(values, buckets, counts["sum"])
                yield family
        name, help = _REFUSALS
        refused = CounterMetricFamily(PREFIX + name, help, labels=(*names, "kind", "code"))
        for what, count in (state.get(name) or {}).items():
            refused.add_metric([*values, *what.split("/", 1)], float(count))
        yield refused
