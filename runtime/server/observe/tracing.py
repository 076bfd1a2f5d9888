"""Traces: a span for each HTTP request, within the client's trace if it sends a `traceparent` (W3C Trace
Context), and below it one for each generation, with its time in the queue, in prefill and in decode.

Attributes follow OpenTelemetry's conventions for HTTP and generative models. Spans go to a collector over
OTLP, with the packages of the extra `ops`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import quote

from starlette.types import Scope

from runtime.processes.frontend.client import Begun, Observer
from runtime.processes.supervise.logs import REQUEST_ID, TRACE_ID
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.registry import MissingExtra

EXPORT_TIMEOUT_S = 5.0
FLUSH_MS = 2000
NS = 1_000_000_000


class Tracing(Observer):
    """An observer of the frontend. `provider`: an SDK's TracerProvider. Raises MissingExtra."""

    def __init__(self, provider: Any, model: str) -> None:
        self._api = _module("opentelemetry.trace")
        self._context = _module(
            "opentelemetry.trace.propagation.tracecontext"
        ).TraceContextTextMapPropagator()
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("sglang_dsl.runtime")
        self._lock = threading.Lock()
        self._live: dict[str, tuple[Any, int]] = {}
        """rid -> (context of its HTTP request, when it began in ns since 1970)"""

    @classmethod
    def to(cls, endpoint: str, model: str, process: str) -> Tracing:
        """Spans go to a collector that speaks OTLP over HTTP. Raises MissingExtra."""
        sdk, export = _module("opentelemetry.sdk.trace"), _module("opentelemetry.sdk.trace.export")
        otlp = _module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resource = _module("opentelemetry.sdk.resources").Resource.create(
            {"service.name": "sglang-dsl", "service.instance.id": process}
        )
        provider = sdk.TracerProvider(resource=resource)
        exporter = otlp.OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(export.BatchSpanProcessor(exporter))
        return cls(provider, model)

    @contextlib.contextmanager
    def request(self, scope: Scope) -> Iterator[Any]:
        """Yields the span of an HTTP request, which is current within the block."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": quote(scope["path"])}
        if (identity := REQUEST_ID.get()) is not None:
            attributes["sglang_dsl.request_id"] = identity
        with self._tracer.start_as_current_span(
            f"{scope['method']} request",
            context=self._context.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            token = TRACE_ID.set(f"{span.get_span_context().trace_id:032x}")
            try:
                yield span
            finally:
                TRACE_ID.reset(token)

    def answered(self, span: Any, method: str, route: str, status: int | None) -> None:
        """Set the attributes of an ended request. route: the path with its parameters' names."""
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status or 499)
        if status is None or status >= 500:
            span.set_status(self._api.StatusCode.ERROR)

    def close(self) -> None:
        """Send the remaining spans, for some seconds at most."""
        self._provider.force_flush(FLUSH_MS)

    # -- the observer ----------------------------------------------------------------------------------------

    def on_begin(self, request: Begun) -> None:
        span = self._api.get_current_span()
        if span.is_recording():
            with self._lock:
                self._live[request.rid] = self._api.set_span_in_context(span), time.time_ns()

    def on_finish(self, request: Begun, meta: Mapping[str, Any], seconds: float) -> None:
        queue, first = (
            max(0.0, float(meta.get(name) or 0)) for name in ("queue_time", "first_token_latency")
        )
        reason = str((meta.get("finish_reason") or {}).get("type", "stop"))
        attributes = {
            "gen_ai.usage.output_tokens": int(meta.get("completion_tokens") or 0),
            "gen_ai.response.finish_reasons": [reason],
            "gen_ai.latency.time_in_queue": queue,
            "gen_ai.latency.time_to_first_token": first,
            "gen_ai.latency.e2e": seconds,
            "sglang_dsl.cached_tokens": int(meta.get("cached_tokens") or 0),
            "sglang_dsl.decode_steps": int(meta.get("decode_steps") or 0),
        }
        stages = {"queue": (0.0, queue), "prefill": (queue, first), "decode": (first, seconds)}
        self._end(request, seconds, attributes, stages if first else {})

    def on_abort(self, request: Begun, fault: RuntimeFault | None, seconds: float) -> None:
        self._end(request, seconds, {"error.type": "aborted" if fault is None else fault.code}, {})

    def _end(
        self,
        request: Begun,
        seconds: float,
        attributes: Mapping[str, Any],
        stages: Mapping[str, tuple[float, float]],
    ) -> None:
        with self._lock:
            live = self._live.pop(request.rid, None)
        if live is None:
            return
        context, began = live

        def at(passed: float) -> int:
            return began + int(passed * NS)

        known = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": request.rid,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
        }
        span = self._tracer.start_span(
            "generate", context=context, start_time=began, attributes={**known, **attributes}
        )
        within = self._api.set_span_in_context(span)
        for stage, (start, end) in stages.items():
            part = self._tracer.start_span(stage, context=within, start_time=at(start))
            part.end(at(max(start, end)))
        if "error.type" in attributes:
            span.set_status(self._api.StatusCode.ERROR)
        span.end(at(seconds))


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra("traces need OpenTelemetry's SDK: pip install 'sglang-dsl[ops]'") from error
