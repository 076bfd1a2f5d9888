"""What an operator of a real server sees: lines of JSON, traces, processes and what they take."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.process.patience import PATIENCE_S, metrics, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def collector() -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """A collector's URL, and the spans that it has got by now."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    def spans() -> list[Any]:
        resources = [
            one for body in bodies for one in ExportTraceServiceRequest.FromString(body).resource_spans
        ]
        return [span for one in resources for scope in one.scope_spans for span in scope.spans]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()


def test_a_request_can_be_followed(
    start_server: Callable[..., Any], collector: tuple[str, Callable[[], list[Any]]]
) -> None:
    endpoint, spans = collector
    server = start_server(
        "--log-format", "json", "--access-log", "--otlp-traces-endpoint", endpoint, "--http-workers", "2",
        "--forwarded-allow-ips", "127.0.0.1",
    ).wait_ready()  # fmt: skip
    headers = {
        "X-Request-Id": "order-66",
        "X-Forwarded-For": "10.1.2.3",
        "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
    }
    body = {"model": "pocket", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "order-66")

    names = ["supervisor", "scheduler", "detokenizer", "worker-0", "worker-1", "runner-0"]
    memory = {
        sample.labels["process"]: sample.value
        for family in text_string_to_metric_families(metrics(server.url))
        for sample in family.samples
        if sample.name == "process_resident_memory_bytes"
    }
    assert sorted(memory) == sorted(names)
    assert memory["runner-0"] > memory["scheduler"] > 10 << 20
    for name, process in server.children().items():
        assert process.cmdline()[0].startswith(f"sglang-dsl {name}")
    exposed = httpx.get(
        f"{server.url}/metrics", headers={"accept": "application/openmetrics-text"}, timeout=PATIENCE_S
    )
    for line in exposed.text.splitlines():  # where the worker that answered it was asked
        assert (TRACE in line) is ("order-66" in line), line
    assert httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()["live_requests"] == 0
    assert endpoint not in httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).text
    assert server.end() == 0

    lines = [json.loads(line) for line in server.log.splitlines()]
    assert {"supervisor", "worker-0", "worker-1"} <= {line["process"] for line in lines}
    (own,) = [line for line in lines if line.get("request_id") == "order-66"]
    assert (own["client"], own["path"], own["status"]) == ("10.1.2.3", "/v1/chat/completions", 200)
    assert own["duration_ms"] > 0
    until(lambda: len(spans()) >= 5)
    mine = [span for span in spans() if span.trace_id.hex() == TRACE]
    assert sorted(span.name for span in mine) == [
        "POST /v1/chat/completions", "decode", "generate", "prefill", "queue",
    ]  # fmt: skip
    web = next(span for span in mine if span.name.startswith("POST"))
    generation = next(span for span in mine if span.name == "generate")
    assert generation.parent_span_id == web.span_id
    assert {span.parent_span_id for span in mine} == {
        web.parent_span_id, web.span_id, generation.span_id,
    }  # fmt: skip
