"""What the benchmarks share: time that counts every process, ways measured in turn, reports that are kept.

An Engine computes in a process of its own, so the CPU time of the process that measures says little:
`Reading` counts its children, and theirs, those that have ended included. Not seen are processes that left
the tree (their parent ended before them).
"""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
TRIES = 100
"""A process that ends meanwhile would be in two sums, or in none: then all are looked at again."""
T = TypeVar("T")


class Reading(NamedTuple):
    """Seconds on the wall's clock, and of CPU in all processes of this one's tree."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Reading:
        return cls(time.perf_counter(), cpu_of_tree())

    @classmethod
    def of(cls, pid: int) -> Reading:
        """The same of a child and all below it. Raises psutil.NoSuchProcess."""
        return cls(time.perf_counter(), cpu_of_child(pid))

    def since(self) -> Reading:
        """What has passed from this reading until now."""
        now = Reading.now()
        return Reading(now.wall - self.wall, now.cpu - self.cpu)


def cpu_of_tree() -> float:
    """CPU seconds, user's and system's, of this process and of all below it, alive or ended."""
    for _ in range(TRIES):
        ended = _of_ended()
        try:
            alive = sum(map(_of_alive, psutil.Process().children(recursive=True)))
        except psutil.NoSuchProcess:
            continue
        if _of_ended() == ended:
            return time.process_time() + ended + alive
    raise RuntimeError(f"processes came and went during each of {TRIES} looks at their CPU time")


def cpu_of_child(pid: int) -> float:
    """CPU seconds of a process below this one and of all below that. Raises psutil.NoSuchProcess."""
    child = psutil.Process(pid)
    for _ in range(TRIES):
        try:
            return _of_alive(child) + sum(map(_of_alive, child.children(recursive=True)))
        except psutil.NoSuchProcess:
            if not child.is_running():
                raise
    raise RuntimeError(f"processes came and went during each of {TRIES} looks at their CPU time")


def timed(work: Callable[[], T]) -> tuple[Reading, T]:
    """What a call took, and what it gave."""
    began = Reading.now()
    given = work()
    return began.since(), given


def in_turn(
    ways: Mapping[str, Callable[[], T]], rounds: int
) -> tuple[dict[str, list[Reading]], dict[str, list[T]]]:
    """Each way once per round, first and last changing places; per way what its rounds took and gave."""
    took: dict[str, list[Reading]] = {name: [] for name in ways}
    gave: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in reversed(ways) if number % 2 else ways:
            reading, given = timed(ways[name])
            took[name].append(reading)
            gave[name].append(given)
    return took, gave


def median(readings: Sequence[Reading]) -> Reading:
    return Reading(*(statistics.median(column) for column in zip(*readings, strict=True)))


def ratio(over: Sequence[Reading], under: Sequence[Reading]) -> Reading:
    """The median of the ratios of runs next to each other."""
    return median([Reading(a.wall / b.wall, a.cpu / b.cpu) for a, b in zip(over, under, strict=True)])


def conditions(*more: str) -> str:
    """One line for a report: where and when it was measured, and how busy the machine was."""
    now = datetime.datetime.now(datetime.UTC)
    parts = [
        f"{now:%Y-%m-%d %H:%M} UTC, commit {_commit()}",
        f"{_processor()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}",
        *more,
    ]
    return "; ".join(parts)


def keep(name: str, text: str, *, append: bool = False, folder: Path = RESULTS) -> Path:
    """Write `text` into <folder>/<date>-<name>.md, which replaces what is there of earlier days. `append`:
    behind what there is of today."""
    target = folder / f"{datetime.date.today().isoformat()}-{name}.md"
    before = target.read_text(encoding="utf-8") + "\n" if append and target.exists() else ""
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(before + text.rstrip("\n") + "\n", encoding="utf-8")
    for old in folder.glob(f"????-??-??-{name}.md"):
        if old != target:
            old.unlink()
    return target


def _of_ended() -> float:
    """Of children that were waited for, and those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _of_alive(process: psutil.Process) -> float:
    """Of one that was not waited for yet, and of those that it waited for. Raises psutil.NoSuchProcess."""
    times = process.cpu_times()
    own = _own_clock(process.pid) if sys.platform == "linux" else None
    own = times.user + times.system if own is None else own
    return own + getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)


def _own_clock(pid: int) -> float | None:
    """The process's own CPU clock, finer than the hundredths of a second of its status. None where there is
    none."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        return None
    try:
        return time.clock_gettime(clock.value)
    except OSError:
        return None


def _commit() -> str:
    """The tree's, with a word where it is not as committed, reports aside."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!results")
    return (git("describe", "--always").strip() or "unknown") + (" and changes" if changed else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
