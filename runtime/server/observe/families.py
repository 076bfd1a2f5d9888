"""Other servers' names for what /metrics tells, so that dashboards made for them work here.

Our own names are sglang's under another prefix; vLLM's are told one by one (docs.vllm.ai, "Production
Metrics").
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from runtime.processes.supervise.logs import REQUEST_ID, TRACE_ID

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


MAX_CHARACTERS = 128
"""Of an exemplar's labels, names and values together (OpenMetrics 1.0)."""

Labels = Mapping[str, str]


def labels_here() -> dict[str, str]:
    """Of the request that is being answered: its id and its trace, as far as they fit."""
    made: dict[str, str] = {}
    for name, variable in (("trace_id", TRACE_ID), ("request_id", REQUEST_ID)):
        value = variable.get()
        size = sum(len(key) + len(one) for key, one in made.items())
        if value is not None and size + len(name) + len(value) <= MAX_CHARACTERS:
            made[name] = value
    return made


class Exemplars:
    """Of some histograms. Safe from any thread."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, frozenset[tuple[str, str]]], Exemplar] = {}

    def put(self, name: str, buckets: Sequence[float], labels: Labels, value: float, of: Labels) -> None:
        """`value` was observed by the histogram `name` with these labels, for the request `of`."""
        if of:
            at = bisect_left(buckets, value)
            bound = str(buckets[at]) if at < len(buckets) and buckets[at] != math.inf else "+Inf"
            key = name, frozenset({**labels, "le": bound}.items())
            self._kept[key] = Exemplar(dict(of), value, time.time())

    def on(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """The families, with the exemplars on their samples."""
        for family in families:
            if family.type == "histogram" and self._kept:
                family.samples = [self._with(family.name, sample) for sample in family.samples]
            yield family

    def _with(self, name: str, sample: Sample) -> Sample:
        if "le" not in sample.labels:
            return sample
        found = self._kept.get((name, frozenset(sample.labels.items())))
        return sample if found is None else sample._replace(exemplar=found)


Processes = Callable[[], Mapping[str, int]]
"""-> name and number of each process, as they are now"""
RUNNERS = b"runtime.engine.follower", b"sglang-dsl runner"
"""What is in a runner's command line, before and after it has a title."""


def of_group(folder: Path, supervisor: int) -> dict[str, int]:
    """The processes of a server: its supervisor, those whose numbers stand in its folder, and the scheduler's
    own, which compute the model."""
    found = {"supervisor": supervisor}
    for file in sorted(folder.glob("*.pid")):
        try:
            found[file.stem] = int(file.read_text())
        except (OSError, ValueError):  # it is being replaced
            continue
    for at, runner in enumerate(_runners(found.get("scheduler", 0))):
        found[f"runner-{at}"] = runner
    return found


def _runners(scheduler: int) -> list[int]:
    found: set[int] = set()
    for file in Path(f"/proc/{scheduler}/task").glob("*/children"):  # of each thread
        with contextlib.suppress(OSError):
            found |= set(map(int, file.read_text().split()))
    return sorted(child for child in found if any(word in _command(child) for word in RUNNERS))


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


class ProcessMetrics(Collector):
    """prometheus_client's own, of several processes."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, number in self._processes().items():
            label = {"process": name}
            for family in ProcessCollector(pid=partial(int, number), registry=None).collect():
                made = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                made.samples += [one._replace(labels=one.labels | label) for one in family.samples]
        yield from families.values()
