"""GET /metrics of the router: its HTTP side, as of every server, and its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.server.http.metrics import Families, HttpMetrics
from runtime.server.observe.families import PREFIX
from runtime.server.router.pool import Worker

_LABELS = ("worker", "role")
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)


class RouterMetrics(Collector):
    """`workers`: returns all of them; their state is read at each scrape."""

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self._registry = CollectorRegistry()
        self.http = HttpMetrics(Families(self._registry, {"model_name": "", "worker": "router"}))
        families = Families(self._registry, {})
        self._sent = families.counter(
            "router_requests", "Requests sent to a worker, and why to this one", *_LABELS, "why"
        )
        self._again = families.counter(
            "router_retries", "Of these, those that another worker had failed", *_LABELS
        )
        self._failed = families.counter(
            "router_worker_failures", "Requests that a worker broke off or did not take, and how", *_LABELS,
            "kind",
        )  # fmt: skip
        self._first = families.histogram(
            "router_first_byte_seconds", "From sending a request to a worker to the beginning of its answer",
            _SECONDS, *_LABELS,
        )  # fmt: skip
        self._workers = workers
        self._registry.register(self)

    def sent(self, worker: Worker, why: str, *, again: bool) -> None:
        self._sent.labels(worker.name, worker.role, why).inc()
        if again:
            self._again.labels(worker.name, worker.role).inc()

    def failed(self, worker: Worker, kind: str) -> None:
        self._failed.labels(worker.name, worker.role, kind).inc()

    def first(self, worker: Worker, seconds: float) -> None:
        self._first.labels(worker.name, worker.role).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """The state of the workers."""
        active = GaugeMetricFamily(
            f"{PREFIX}router_worker_active", "Requests in a worker's hands", labels=_LABELS
        )
        able = GaugeMetricFamily(
            f"{PREFIX}router_worker_available", "1 when a worker gets requests", labels=_LABELS
        )
        for one in self._workers():
            active.add_metric((one.name, one.role), float(one.active))
            able.add_metric((one.name, one.role), float(one.available))
        yield active
        yield able
