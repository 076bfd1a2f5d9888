"""OpenTelemetry: a span for every call of a backend, by the semantic conventions for generative AI
(opentelemetry.io/docs/specs/semconv/gen-ai). Needs opentelemetry-api; the SDK exports the spans.

    stop = telemetry.instrument()
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

from runtime.protocol.registry import MissingExtra
from sglang_dsl.hooks import TRACEPARENT, CallEvent, subscribe

ENGINE = "engine"
NS = 1e9


def instrument(tracer_provider: Any = None) -> Callable[[], None]:
    """Start to create spans. Returns a function that stops it. `tracer_provider`: None for the process's.
    Raises MissingExtra if opentelemetry is not installed.

    Calls made inside a span of the program are children of that span. A call of the engine in this process
    has the children queue, prefill and decode. A call of a server carries its `traceparent`, so that the
    server's spans belong to it. Spans contain no prompt and no generated text.
    """
    try:
        trace: Any = importlib.import_module("opentelemetry.trace")
    except ImportError as error:
        raise MissingExtra("spans need opentelemetry: pip install 'sglang-dsl[otel]'") from error
    return subscribe(Spans(trace, trace.get_tracer("sglang_dsl", tracer_provider=tracer_provider)))


class Spans:
    """A hook that turns events into spans."""

    def __init__(self, trace: Any, tracer: Any) -> None:
        self._trace, self._tracer = trace, tracer
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Any, int]] = {}

    def __call__(self, event: CallEvent) -> None:
        if event.phase == "begin":
            began = time.time_ns()
            span = self._tracer.start_span(
                f"{event.kind} {event.name or ''}".strip(),
                kind=self._trace.SpanKind.CLIENT,
                attributes=_attributes(event),
                start_time=began,
            )
            with self._lock:
                self._open[event.number] = span, began
            context = span.get_span_context()
            # W3C Trace Context, version 00.
            ids = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
            TRACEPARENT.set(ids if context.is_valid else None)
            return
        TRACEPARENT.set(None)
        with self._lock:
            begun = self._open.pop(event.number, None)
        if begun is None:  # before instrument()
            return
        span, began = begun
        for key, value in _results(event).items():
            span.set_attribute(key, value)
        if event.error is not None:
            span.set_attribute("error.type", type(event.error).__name__)
            span.set_status(self._trace.StatusCode.ERROR, str(event.error)[:200])
        if event.backend == ENGINE and event.phase == "end" and not event.replayed:
            self._stages(span, event, began)
        span.end(end_time=began + int(event.seconds * NS))

    def _stages(self, span: Any, event: CallEvent, began: int) -> None:
        """Spans for the phases of a call of the engine in this process. A server creates these itself."""
        queue, first, whole = (
            float(event.meta.get(name) or 0.0)
            for name in ("queue_time", "first_token_latency", "e2e_latency")
        )
        if not first:
            return
        whole = min(whole, event.seconds)
        first = min(first, whole)
        queue = min(queue, first)
        # The rest of the time was before the engine received the request.
        lead = max(0.0, event.seconds - whole)
        within = self._trace.set_span_in_context(span)
        for name, start, end in (("queue", 0.0, queue), ("prefill", queue, first), ("decode", first, whole)):
            at = began + int((lead + start) * NS)
            part = self._tracer.start_span(name, context=within, start_time=at)
            part.end(end_time=max(at, began + int((lead + end) * NS)))


def _attributes(event: CallEvent) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.system": event.backend or "none",
        "sglang_dsl.program": event.program,
        "sglang_dsl.node": event.kind,
        "sglang_dsl.variable": event.name or "",
        "sglang_dsl.branch": ".".join(map(str, event.branch)),
        "sglang_dsl.step": event.step,
    }
    if event.index is not None:
        attributes["sglang_dsl.item"] = event.index
    if event.source is not None:
        attributes["code.file.path"] = event.source.file
        attributes["code.line.number"] = event.source.line
    return attributes


def _results(event: CallEvent) -> dict[str, Any]:
    meta = event.meta
    results = {
        "gen_ai.usage.input_tokens": meta.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": meta.get("completion_tokens"),
        "gen_ai.response.id": meta.get("id"),
        "gen_ai.response.model": meta.get("model"),
        "sglang_dsl.cached_tokens": meta.get("cached_tokens"),
        "sglang_dsl.jumped_tokens": meta.get("jumped_tokens"),
        "sglang_dsl.first_token_s": event.first_token_s,
    }
    finish = meta.get("finish_reason")
    if isinstance(finish, dict) and finish.get("type"):
        results["gen_ai.response.finish_reasons"] = (str(finish["type"]),)
    if event.replayed:
        results["sglang_dsl.replayed"] = True
    return {key: value for key, value in results.items() if value is not None}
