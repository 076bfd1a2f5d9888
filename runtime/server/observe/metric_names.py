"""Other servers' names for what /metrics tells, so that dashboards made for them work here.

Our own names are sglang's under another prefix; vLLM's are told one by one (docs.vllm.ai, "Production
Metrics").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.metrics_core import Metric

PREFIX = "sglang_dsl:"

_VLLM: dict[str, tuple[str, ...]] = {
    "num_running_reqs": ("num_requests_running",),
    "num_queue_reqs": ("num_requests_waiting",),
    "token_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "num_retractions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "cached_tokens": ("prefix_cache_hits",),
    "generation_tokens": ("generation_tokens",),
    "num_finished_requests": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "queue_time_seconds": ("request_queue_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    # A sample is a request of its own here, so the longest of a request is its only one.
    "request_generation_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
    "spec_verify_steps": ("spec_decode_num_drafts",),
    "spec_drafted_tokens": ("spec_decode_num_draft_tokens",),
    "spec_accepted_tokens": ("spec_decode_num_accepted_tokens",),
}
"""Our name of a family -> vLLM's, prefixes left out."""
_STAGES = "per_stage_req_latency_seconds"
_OF_STAGE = {"prefill": "request_prefill_time_seconds", "decode": "request_decode_time_seconds"}
"""vLLM has a family for each."""


def with_aliases(families: Iterable[Metric], servers: Sequence[str]) -> Iterator[Metric]:
    """All of them, and again under the names of these `servers`."""
    for family in families:
        yield family
        if not family.name.startswith(PREFIX):
            continue
        name = family.name.removeprefix(PREFIX)
        if "sglang" in servers:
            yield _renamed(family, f"sglang:{name}")
        if "vllm" not in servers:
            continue
        for other in _VLLM.get(name, ()):
            yield _renamed(family, f"vllm:{other}")
        if name == _STAGES:
            for stage, other in _OF_STAGE.items():
                yield _renamed(family, f"vllm:{other}", stage)


def _renamed(family: Metric, name: str, stage: str | None = None) -> Metric:
    """The same samples; stage: those of it alone."""
    made = Metric(name, family.documentation, family.type, family.unit)
    for sample in family.samples:
        labels = sample.labels
        if stage is not None:
            if labels.get("stage") != stage:
                continue
            labels = {key: value for key, value in labels.items() if key != "stage"}
        made.samples.append(sample._replace(name=name + sample.name.removeprefix(family.name), labels=labels))
    return made
