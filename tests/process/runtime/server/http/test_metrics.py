"""What a scrape tells, from counts put in by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from runtime.processes.frontend.client import Begun
from runtime.processes.supervise.logs import REQUEST_ID
from runtime.protocol.errors import Aborted, InternalFault
from runtime.server.http.metrics import Metrics

STATE: dict[str, Any] = {
    "num_running_reqs": 2, "num_queue_reqs": 3, "num_grammar_queue_reqs": 1, "max_total_num_tokens": 1000,
    "num_used_tokens": 100, "token_usage": 0.1, "new_token_ratio": 0.5, "num_retracted_reqs": 1,
    "cache_hit_rate": 0.25, "gen_throughput": 12.5, "num_preemptions_total": 4, "policy": "lpm",
}  # fmt: skip


def scraped(metrics: Metrics, state: dict[str, Any] | None) -> dict[str, float]:
    text = metrics.render(state)[0].decode()
    return {
        sample.name.removeprefix("sglang_dsl:"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not {"le", "stage", "finished_reason", "process"} & set(sample.labels)
    }


def test_the_scheduler_is_told_as_it_is() -> None:
    found = scraped(Metrics("pocket"), STATE)
    expected = {name: value for name, value in STATE.items() if name != "policy"}
    assert {name: found[name] for name in expected} == expected
    assert found["scheduler_up"] == 1


def test_a_scheduler_that_is_silent_is_down_and_nothing_is_made_up() -> None:
    metrics = Metrics("pocket")
    scraped(metrics, STATE)
    found = scraped(metrics, None)
    assert found["scheduler_up"] == 0
    assert "num_running_reqs" not in found
    assert "num_requests_total" in found


def test_what_the_state_does_not_say_is_left_out() -> None:
    found = scraped(Metrics("pocket"), {"num_running_reqs": 1})
    assert found["num_running_reqs"] == 1
    assert "token_usage" not in found
    assert "num_queue_reqs" not in found


def test_finished_and_failed_requests_are_counted() -> None:
    metrics = Metrics("pocket")
    observer, begun = metrics.requests, Begun("r", 10, False, 0.0)
    meta = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 7, "queue_time": 0.1}
    observer.on_begin(begun)
    observer.on_first_token(begun, 0.25)
    observer.on_tokens(begun, 3, 0.6)
    observer.on_finish(begun, meta, 1.5)
    observer.on_finish(begun, {**meta, "cached_tokens": 8}, 0.5)
    observer.on_abort(begun, None, 1.0)
    observer.on_abort(begun, Aborted("stop"), 1.0)
    observer.on_abort(begun, InternalFault("no"), 1.0)
    found = scraped(metrics, None)
    expected = {
        "num_requests_total": 5, "num_aborted_requests_total": 2, "num_failed_requests_total": 1,
        "prompt_tokens_total": 20, "cached_tokens_total": 12, "generation_tokens_total": 14,
        "e2e_request_latency_seconds_count": 2, "e2e_request_latency_seconds_sum": 2.0,
        "queue_time_seconds_sum": 0.2, "time_to_first_token_seconds_sum": 0.25,
        "inter_token_latency_seconds_count": 3, "inter_token_latency_seconds_sum": 0.6,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_two_applications_count_apart() -> None:
    one, other = Metrics("pocket"), Metrics("pocket")
    one.requests.on_finish(Begun("r", 1, False, 0.0), {}, 1.0)
    assert scraped(other, None)["num_requests_total"] == 0


# -- what others look for ------------------------------------------------------------------------------------

DASHBOARD = Path(__file__).resolve().parents[5] / "examples" / "deploy" / "grafana" / "dashboard.json"
NAME = re.compile(r"\b(?:sglang_dsl:|process_)\w+")
OTHERS = """
sglang:num_running_reqs sglang:num_queue_reqs sglang:gen_throughput sglang:cache_hit_rate
sglang:token_usage sglang:e2e_request_latency_seconds_bucket sglang:e2e_request_latency_seconds_sum
sglang:num_requests_total sglang:e2e_request_latency_seconds_count
sglang:time_to_first_token_seconds_bucket sglang:num_used_tokens sglang:time_to_first_token_seconds_sum
sglang:time_to_first_token_seconds_count sglang:prompt_tokens_total
sglang:inter_token_latency_seconds_bucket sglang:generation_tokens_total sglang:cached_tokens_total
sglang:num_aborted_requests_total sglang:num_grammar_queue_reqs sglang:queue_time_seconds_bucket
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc
vllm:num_preemptions_total vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:request_success_total vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
vllm:time_to_first_token_seconds_count vllm:inter_token_latency_seconds_sum
vllm:inter_token_latency_seconds_bucket vllm:time_per_output_token_seconds_bucket
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
vllm:request_queue_time_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:request_prefill_time_seconds_sum vllm:request_prompt_tokens_bucket
vllm:request_decode_time_seconds_sum vllm:request_generation_tokens_bucket
vllm:request_max_num_generation_tokens_bucket vllm:request_max_num_generation_tokens_sum
"""
"""What the dashboards ask for that come with sglang (examples/monitoring) and vLLM
(examples/online_serving/prometheus_grafana), and the metrics that their documentation puts first."""


def used(metrics: Metrics) -> Metrics:
    """One request has gone through it."""
    begun = Begun("r", 10, False, 0.0)
    metrics.http.began()
    metrics.requests.on_begin(begun)
    metrics.requests.on_first_token(begun, 0.25)
    metrics.requests.on_tokens(begun, 3, 0.6)
    meta = {
        "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 7, "queue_time": 0.1,
        "first_token_latency": 0.25, "finish_reason": {"type": "length"},
    }  # fmt: skip
    metrics.requests.on_finish(begun, meta, 1.5)
    metrics.http.ended("POST", "/generate", 200, 1.5)
    return metrics


def whole_state(client: httpx.Client) -> dict[str, Any]:
    """What a real scheduler says of itself."""
    return dict(client.get("/server_info").json()["internal_states"][0])


def test_the_dashboard_asks_for_nothing_that_is_not_told(client: httpx.Client) -> None:
    text = used(Metrics("pocket")).render(whole_state(client))[0].decode()
    told = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in NAME.findall(expression)}
    assert len(names) > 20
    assert all(NAME.search(expression) for expression in asked)
    assert names <= told, names - told
    labels = {label for one in asked for label in re.findall(r"by \((\w+)\)", one)} - {"le"}
    assert labels == {"stage", "finished_reason", "status_code"}
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_other_servers_dashboards_find_what_they_look_for(client: httpx.Client) -> None:
    body = {"text": "Once", "sampling_params": {"max_new_tokens": 4}}
    client.post("/generate", json=body).raise_for_status()
    text = client.get("/metrics").text
    missing = {name for name in OTHERS.split() if f"\n{name}{{" not in text}
    assert not missing, missing


def test_a_metric_is_the_same_under_every_name() -> None:
    metrics = used(Metrics("pocket", ("sglang", "vllm")))
    text = metrics.render(STATE)[0].decode()
    values = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["sglang:num_running_reqs", None] == values["vllm:num_requests_running", None] == 2
    assert values["vllm:kv_cache_usage_perc", None] == 0.1
    assert values["vllm:request_success_total", "length"] == 1
    assert values["vllm:request_decode_time_seconds_sum", None] == pytest.approx(1.25)
    assert values["vllm:request_prefill_time_seconds_sum", None] == pytest.approx(0.15)
    assert values["vllm:prefix_cache_hits_total", None] == values["sglang:cached_tokens_total", None] == 4
    names = {name for name, _ in values}
    for aliases, absent in (((), ("sglang:", "vllm:")), (("vllm",), ("sglang:",)), (("none",), ("vllm:",))):
        told = used(Metrics("pocket", aliases)).render(STATE)[0].decode()
        assert not any(f"\n{prefix}" in told for prefix in absent)
    assert len([name for name in names if name.startswith("vllm:")]) > 30


def test_an_exemplar_names_the_request_that_was_so_slow() -> None:
    token = REQUEST_ID.set("order-66")
    metrics = used(Metrics("pocket", ("sglang",)))
    REQUEST_ID.reset(token)
    text, kind = metrics.render(None, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    found = {
        (sample.name, sample.labels["le"]): sample.exemplar
        for family in openmetrics.text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.exemplar
    }
    assert set(found) == {
        (f"{server}:{name}_bucket", bound)
        for server in ("sglang_dsl", "sglang")
        for name, bound in (("time_to_first_token_seconds", "0.5"), ("e2e_request_latency_seconds", "2.0"),
                            ("http_request_duration_seconds", "2.0"))
    }  # fmt: skip
    for exemplar in found.values():
        assert exemplar.labels == {"request_id": "order-66"}
    assert found["sglang_dsl:time_to_first_token_seconds_bucket", "0.5"].value == 0.25
    assert "order-66" not in metrics.render(None)[0].decode()


def test_the_processes_are_told() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        processes = {"here": os.getpid(), "child": child.pid, "gone": 2**22 - 1}
        text = Metrics("pocket", (), lambda: processes).render(None)[0].decode()
        assert child.stdin is not None
        child.stdin.close()
    memory = {
        sample.labels["process"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "process_resident_memory_bytes"
    }
    assert set(memory) == {"here", "child"}
    assert memory["here"] > memory["child"] > 1 << 20


COUNTS = """
import sys
from runtime.processes.frontend.client import Begun
from runtime.server.http.metrics import Metrics
metrics = Metrics("pocket", ("vllm",))
for n in range(int(sys.argv[1])):
    begun = Begun(f"r{n}", 1, False, 0.0)
    metrics.http.began()
    metrics.requests.on_tokens(begun, 2, 0.02)
    metrics.requests.on_finish(begun, {"prompt_tokens": 3}, 1.0)
sys.stdout.write(metrics.render({})[0].decode())
"""


def test_processes_that_count_together_are_added_up(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    texts = [
        subprocess.run(
            [sys.executable, "-c", COUNTS, str(count)],
            env=environment,
            text=True,
            capture_output=True,
            check=True,
        ).stdout
        for count in (2, 3)
    ]
    for text, requests in zip(texts, (2, 5), strict=True):
        labels = '{model_name="pocket"}'
        assert f"sglang_dsl:num_requests_total{labels} {requests}.0" in text
        assert f"vllm:prompt_tokens_total{labels} {3 * requests}.0" in text
        assert f"sglang_dsl:inter_token_latency_seconds_count{labels} {2 * requests}.0" in text
        assert f"sglang_dsl:http_requests_active{labels} {requests}.0" in text
        assert "worker=" not in text
        assert "pid=" not in text
