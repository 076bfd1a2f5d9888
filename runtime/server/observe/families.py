"""What /metrics adds to the families of prometheus_client: names of other servers, so that dashboards made
for them work; exemplars; and metrics of the server's processes.

Our own names are sglang's under another prefix; for vLLM's see docs.vllm.ai, "Production Metrics".
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
    # A sample is a request of its own here, and the longest of its request.
    "request_generation_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
    "spec_verify_steps": ("spec_decode_num_drafts",),
    "spec_drafted_tokens": ("spec_decode_num_draft_tokens",),
    "spec_accepted_tokens": ("spec_decode_num_accepted_tokens",),
}
"""Our name of a family -> vLLM's, prefixes left out."""
_STAGES = "per_stage_req_latency_seconds"
_OF_STAGE = {"prefill": "request_prefill_time_seconds", "decode": "request_decode_time_seconds"}
"""vLLM has a family for each stage."""


def with_aliases(families: Iterable[Metric], servers: Sequence[str]) -> Iterator[Metric]:
    """All of them, also under the names of these `servers`."""
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
    """The same samples; stage: only those of it."""
    renamed = Metric(name, family.documentation, family.type, family.unit)
    for sample in family.samples:
        labels = sample.labels
        if stage is not None:
            if labels.get("stage") != stage:
                continue
            labels = {key: value for key, value in labels.items() if key != "stage"}
        suffix = sample.name.removeprefix(family.name)
        renamed.samples.append(sample._replace(name=name + suffix, labels=labels))
    return renamed


MAX_CHARACTERS = 128
"""Of an exemplar's labels, names and values together (OpenMetrics 1.0)."""

Labels = Mapping[str, str]


def labels_here() -> dict[str, str]:
    """Id and trace of the request that is being answered, as far as they fit into an exemplar."""
    labels: dict[str, str] = {}
    for name, variable in (("trace_id", TRACE_ID), ("request_id", REQUEST_ID)):
        value = variable.get()
        size = sum(len(key) + len(one) for key, one in labels.items())
        if value is not None and size + len(name) + len(value) <= MAX_CHARACTERS:
            labels[name] = value
    return labels


class Exemplars:
    """Which request was the last in each bucket of a histogram (OpenMetrics 1.0). prometheus_client keeps
    none in multiprocess mode; these are of this process. Safe from any thread."""

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
        exemplar = self._kept.get((name, frozenset(sample.labels.items())))
        return sample if exemplar is None else sample._replace(exemplar=exemplar)


Processes = Callable[[], Mapping[str, int]]
"""Returns name and number of each running process."""
RUNNERS = b"runtime.engine.follower", b"sglang-dsl runner"
"""Part of a runner's command line, before and after it sets a title."""


def of_group(folder: Path, supervisor: int) -> dict[str, int]:
    """The processes of a server: its supervisor, those with a file of their number in its folder, and the
    runners that the scheduler has started."""
    numbers = {"supervisor": supervisor}
    for file in sorted(folder.glob("*.pid")):
        with contextlib.suppress(OSError, ValueError):  # it is being replaced
            numbers[file.stem] = int(file.read_text())
    for at, runner in enumerate(_runners(numbers.get("scheduler", 0))):
        numbers[f"runner-{at}"] = runner
    return numbers


def _runners(scheduler: int) -> list[int]:
    children: set[int] = set()
    for file in Path(f"/proc/{scheduler}/task").glob("*/children"):  # of each thread
        with contextlib.suppress(OSError):
            children |= set(map(int, file.read_text().split()))
    return sorted(child for child in children if any(title in _command(child) for title in RUNNERS))


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


class ProcessMetrics(Collector):
    """prometheus_client's metrics of a process, of several, with a label `process`. On Linux only."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, number in self._processes().items():
            label = {"process": name}
            for one in ProcessCollector(pid=partial(int, number), registry=None).collect():
                family = families.setdefault(
                    one.name, Metric(one.name, one.documentation, one.type, one.unit)
                )
                family.samples += [sample._replace(labels=sample.labels | label) for sample in one.samples]
        yield from families.values()
