"""Spans of calls, through OpenTelemetry's own API, with a tracer that keeps what it is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace

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


def _failing(s: Any) -> None:
    s += "a" + sgl.gen("x")


def test_without_the_package_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from sglang_dsl import telemetry\n"
        "try:\n    telemetry.instrument()\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "pip install 'sglang-dsl[otel]'" in done.stdout, done.stderr


def test_spans_of_calls_that_began_before_are_passed_over() -> None:
    from sglang_dsl.hooks import CallEvent

    spans = telemetry.Spans(trace, trace.NoOpTracer())
    spans(CallEvent("end", 10**9, "p", "gen", None, (), 0))
    with pytest.raises(TypeError):
        CallEvent("end")  # type: ignore[call-arg]
