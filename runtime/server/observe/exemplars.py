"""Exemplars: of each bucket of a histogram, which request was the last to fall into it (OpenMetrics 1.0).

prometheus_client keeps none where several processes count together, so they are kept here: those of the
process that is asked.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar, Sample

from runtime.processes.supervise.logs import REQUEST_ID, TRACE_ID

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
