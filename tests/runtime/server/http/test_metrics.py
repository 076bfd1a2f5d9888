"""What a scrape tells, from counts put in by hand."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.processes.frontend.observe import Begun
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
        if not {"le", "stage"} & set(sample.labels)
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
