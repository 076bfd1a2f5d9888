"""What the system knows of the server's processes (memory, CPU time, files), with a label `process`.

Linux alone tells it; elsewhere there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

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
