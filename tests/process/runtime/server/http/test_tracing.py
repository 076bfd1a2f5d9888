"""Traces: an HTTP request's span in the client's trace, and what became of its generations below it."""

from __future__ import annotations

import gzip
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline
from runtime.protocol.errors import BadRequest
from runtime.server.app import build_app
from runtime.server.observe.tracing import Tracing

Serving = Callable[..., AbstractContextManager[Any]]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


def spans_of(pipeline: Pipeline, serving: Serving, ask: Callable[[httpx.Client], None]) -> list[ReadableSpan]:
    """The spans of what `ask` does, in the order in which they began."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    config = ServerConfig()
    app = build_app(pipeline.manager, config, tracing=Tracing(provider, "pocket"))
    with serving(app, config) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        ask(client)
    return sorted(kept.get_finished_spans(), key=lambda span: (span.start_time, -span.end_time))


def test_a_request_is_traced_from_its_client_to_its_tokens(pipeline: Pipeline, serving: Serving) -> None:
    def ask(client: httpx.Client) -> None:
        body = {"text": "One, two", "sampling_params": {**GREEDY, "n": 2}}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "order-66"}
        client.post("/generate", json=body, headers=headers).raise_for_status()
        for path in ("/health", "/metrics"):
            client.get(path)

    web, *others = spans_of(pipeline, serving, ask)
    assert {f"{span.context.trace_id:032x}" for span in (web, *others)} == {TRACE}
    assert f"{web.parent.span_id:016x}" == PARENT
    assert (web.name, web.kind.name) == ("POST /generate", "SERVER")
    assert web.attributes["http.response.status_code"] == 200
    assert web.attributes["sglang_dsl.request_id"] == "order-66"
    generations = [span for span in others if span.name == "generate"]
    assert len(generations) == 2
    assert len(others) == 2 * 4
    for one in generations:
        assert one.parent.span_id == web.context.span_id
        assert web.start_time <= one.start_time
        assert one.attributes["gen_ai.request.model"] == "pocket"
        assert one.attributes["gen_ai.usage.output_tokens"] == 6
        assert one.attributes["gen_ai.response.finish_reasons"] == ("length",)
        parts = [span for span in others if span.parent.span_id == one.context.span_id]
        assert [part.name for part in parts] == ["queue", "prefill", "decode"]
        edges = [edge for part in parts for edge in (part.start_time, part.end_time)]
        assert edges == sorted(edges)
        assert (edges[0], edges[-1]) == (one.start_time, one.end_time)


def test_without_a_clients_trace_one_begins(pipeline: Pipeline, serving: Serving) -> None:
    def ask(client: httpx.Client) -> None:
        body = {"text": "One", "sampling_params": GREEDY, "stream": True}
        with client.stream("POST", "/generate", json=body, headers={"traceparent": "nonsense"}) as events:
            *_, last = (line for line in events.iter_lines() if line)
        assert last == "data: [DONE]"
        assert client.post("/generate", json={"text": 1}).status_code == 400

    spans = spans_of(pipeline, serving, ask)
    webs = [span for span in spans if span.kind.name == "SERVER"]
    assert [(web.parent, web.attributes["http.response.status_code"]) for web in webs] == [
        (None, 200),
        (None, 400),
    ]
    assert webs[0].context.trace_id != webs[1].context.trace_id
    (made,) = [span for span in spans if span.name == "generate"]
    assert made.parent.span_id == webs[0].context.span_id


def test_what_was_cut_short_is_an_error(pipeline: Pipeline, serving: Serving, paced: Any) -> None:
    def ask(client: httpx.Client) -> None:
        body = {"text": "One", "sampling_params": {**GREEDY, "max_new_tokens": 500}, "stream": True}
        with client.stream("POST", "/generate", json=body) as events:
            next(events.iter_lines())

    spans = spans_of(pipeline, serving, ask)
    (made,) = [span for span in spans if span.name == "generate"]
    assert made.attributes["error.type"] == "aborted"
    assert not made.status.is_ok


def test_spans_reach_a_collector() -> None:
    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        made = Tracing.to(f"http://127.0.0.1:{collector.server_port}/v1/traces", "pocket", "worker-1")
        scope: Any = {"method": "GET", "path": "/a b", "headers": []}
        with made.request(scope) as span:
            made.answered(span, "GET", "other", 404)
        made.close()
        collector.shutdown()
    (resource,) = ExportTraceServiceRequest.FromString(_plain(bodies[0])).resource_spans
    facts = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (facts["service.name"], facts["service.instance.id"]) == ("sglang-dsl", "worker-1")
    (sent,) = resource.scope_spans[0].spans
    assert sent.name == "GET other"
    assert "/a%20b" in str(sent.attributes)


def _plain(body: bytes) -> bytes:
    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(BadRequest, match=r"otlp_traces_endpoint: must be a URL, got 'localhost:4318'"):
        ServerConfig(otlp_traces_endpoint="localhost:4318").verify()


WITHOUT = """
import json, sys
class Hidden:
    def find_spec(self, name, *_):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
from runtime.protocol.registry import MissingExtra
from runtime.server.observe.tracing import Tracing
import runtime.server.worker
try:
    Tracing.to("http://127.0.0.1:1/v1/traces", "pocket", "worker-0")
except MissingExtra as missing:
    print(json.dumps(str(missing)))
"""


def test_without_the_sdk_it_says_what_to_install() -> None:
    told = json.loads(subprocess.check_output([sys.executable, "-c", WITHOUT], text=True))
    assert "pip install 'sglang-dsl[ops]'" in told
