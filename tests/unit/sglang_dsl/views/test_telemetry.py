"""Spans of calls, through OpenTelemetry's own API, with a tracer that keeps what it is told."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import sglang_dsl as sgl
from sglang_dsl import telemetry


class Span(trace.NonRecordingSpan):
    def __init__(self, name: str, attributes: dict[str, Any], start_time: int) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.name, self.attributes, self.began = name, dict(attributes), start_time
        self.ended: int | None = None
        self.status: Any = None

    def set_attribute(self, key: str, value: Any) -> None:
        assert isinstance(value, (str, bool, int, float, tuple))  # what the API takes
        self.attributes[key] = value

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status, description

    def end(self, end_time: int | None = None) -> None:
        assert self.ended is None
        self.ended = end_time


class Provider(trace.TracerProvider):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def get_tracer(self, name: str, *_: Any, **__: Any) -> trace.Tracer:
        assert name == "sglang_dsl"
        provider = self

        class Tracer(trace.NoOpTracer):
            def start_span(self, name: str, *_: Any, **words: Any) -> Any:
                assert words["kind"] is trace.SpanKind.CLIENT
                span = Span(name, words["attributes"], words["start_time"])
                provider.spans.append(span)
                return span

        return Tracer()


@sgl.function
def program(s: Any) -> None:
    s += "a" + sgl.gen("x", max_tokens=4)
    forks = s.fork(2)
    forks += "b" + sgl.gen("y", max_tokens=4)
    forks.join()
    s += "c" + sgl.select("z", ["d", "e"])


def test_every_call_is_a_span_that_ends(idle: Callable[[], int]) -> None:
    provider = Provider()
    assert idle() == 0  # calls that others have left would be spans, too
    stop = telemetry.instrument(provider)
    try:
        program.run(backend=sgl.MockBackend()).sync()
    finally:
        stop()
    program.run(backend=sgl.MockBackend()).sync()
    assert sorted(span.name for span in provider.spans) == ["gen x", "gen y", "gen y", "select z"]
    assert all(span.ended is not None and span.ended >= span.began for span in provider.spans)
    first = provider.spans[0].attributes
    assert first["gen_ai.system"] == "mock"
    assert first["gen_ai.usage.output_tokens"] > 0
    assert first["gen_ai.response.finish_reasons"] in (("stop",), ("length",))
    assert first["code.file.path"].endswith("test_telemetry.py")
    assert {span.attributes["sglang_dsl.branch"] for span in provider.spans} == {"", "0", "1"}
    # No text of prompts or replies.
    assert not any("text" in key or "prompt" in key for span in provider.spans for key in span.attributes)


def test_failures_are_told(idle: Callable[[], int]) -> None:
    provider = Provider()
    assert idle() == 0
    stop = telemetry.instrument(provider)
    try:
        failing = sgl.MockBackend(errors={0: OSError("down")})
        assert sgl.function(_failing).run(backend=failing).error() is not None
    finally:
        stop()
    [span] = provider.spans
    assert span.status == (trace.StatusCode.ERROR, "down")
    assert span.attributes["error.type"] == "OSError"


def test_the_engines_calls_have_parts_within_the_programs_own_span(idle: Callable[[], int]) -> None:
    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    assert idle() == 0
    stop = telemetry.instrument(provider)
    try:
        with (
            sgl.Engine("pocket", threads=1) as engine,
            provider.get_tracer("mine").start_as_current_span("mine"),
        ):
            program.run(backend=engine).sync()
    finally:
        stop()
    spans: Any = exporter.get_finished_spans()
    [own] = [span for span in spans if span.name == "mine"]
    calls = {span.context.span_id: span for span in spans if span.name.startswith(("gen", "select"))}
    assert len(calls) == 4
    assert all(span.parent.span_id == own.context.span_id for span in calls.values())
    for number, call in calls.items():
        parts = [span for span in spans if span.parent is not None and span.parent.span_id == number]
        assert [span.name for span in parts] == ["queue", "prefill", "decode"]
        times = [call.start_time, *(time for one in parts for time in (one.start_time, one.end_time))]
        assert sorted(times) == times
        assert times[-1] <= call.end_time + 1000  # ns are rounded


def test_a_server_is_told_the_span_of_the_call(idle: Callable[[], int]) -> None:
    told: list[str | None] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            told.append(self.headers.get("traceparent"))
            body = b'{"text": "a", "meta_info": {"finish_reason": {"type": "stop"}}}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    assert idle() == 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        backend = sgl.RuntimeEndpoint(f"http://127.0.0.1:{server.server_port}")
        asked = sgl.function(_asking)
        stop = telemetry.instrument(provider)
        try:
            asked.run(backend=backend).sync()
        finally:
            stop()
        asked.run(backend=backend).sync()
        backend.close()
        server.shutdown()
        thread.join(300)
    spans: Any = exporter.get_finished_spans()
    [span] = spans
    assert told == [
        f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{int(span.context.trace_flags):02x}",
        None,
    ]


def _asking(s: Any) -> None:
    s += "a" + sgl.gen("x", max_tokens=2)


def _failing(s: Any) -> None:
    s += "a" + sgl.gen("x")


def test_without_the_package_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from sglang_dsl import telemetry\n"
        "try:\n    telemetry.instrument()\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "pip install 'sglang-dsl[otel]'" in done.stdout, done.stderr


def test_spans_of_calls_that_began_before_are_passed_over() -> None:
    from sglang_dsl.hooks import CallEvent

    spans = telemetry.Spans(trace, trace.NoOpTracer())
    spans(CallEvent("end", 10**9, "p", "gen", None, (), 0))
    with pytest.raises(TypeError):
        CallEvent("end")  # type: ignore[call-arg]
