"""How products of few rows read their weights: measured once per processor, and kept in the user's cache
folder.

Some processors read memory faster from several addresses at once, others much slower. A setting changes the
order in which weights are read and no sum: results are the same, bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from runtime.kernels.native.compiled import VERSION, cache_folder
from runtime.kernels.native.library import Library, library
from runtime.kernels.native.panels import empty

log = logging.getLogger(__name__)

TYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.int8}
"""By the bytes of one number."""
_MEMORY = 64 << 20  # bytes: larger than most caches, as a model's weights are
_READ = 4 << 20  # bytes per measurement
_INPUTS = 1024
_ROUNDS = 10
_GAIN = 1.05  # a smaller gain over the first setting might be noise


class Setting(NamedTuple):
    """streams: panels read at once. visit: bytes of each in turn. rows: rows computed at once."""

    streams: int
    visit: int
    rows: int


class Step(NamedTuple):
    """A range of row counts that share a setting, as the source counts them; the last range stands for all
    larger counts. timed: the count that is measured."""

    first: int
    last: int
    timed: int


STEPS = (
    Step(1, 1, 1), Step(2, 2, 2), Step(3, 4, 4), Step(5, 6, 6), Step(7, 8, 8), Step(9, 16, 16),
    Step(17, 17, 48),
)  # fmt: skip


def settings(lanes: int, step: Step) -> list[Setting]:
    """The settings to measure; the first is used if none is faster."""
    measured = [Setting(1, 1024, 8)]
    if step.last <= 8:  # with more rows, memory is not the bottleneck
        measured += [Setting(2, 1024, 8), Setting(4, 1024, 8)]
    if lanes == 16 and step.last > 6:  # others have no registers for more than 6
        measured.append(Setting(1, 1024, 6))
    return measured


def tune(native: Library, size: int) -> None:
    """Use the best settings for numbers of `size` bytes. The first call on a processor takes about 0.1 s of
    CPU."""
    if size in native.tuned:
        return
    native.tuned.add(size)
    file = _file(native, size)
    chosen = _kept(native, file)
    if chosen is None:
        chosen = _measured(native, size)
        _keep(native, file, chosen)
    for step, setting in zip(STEPS, chosen, strict=True):
        native.set_product(size, step.first, step.last, *setting)


def summary() -> str:
    """One line: the settings kept for this processor."""
    native = library()
    if native is None:
        return "computed by torch: there is no C compiler, or no kernel for this processor"
    parts = []
    for size, dtype in TYPES.items():
        chosen = _kept(native, _file(native, size))
        streams = "not measured yet" if chosen is None else "/".join(str(one.streams) for one in chosen)
        parts.append(f"{str(dtype).removeprefix('torch.')} {streams}")
    counts = "/".join(str(step.first) for step in STEPS)
    return f"panels read at once from {counts} rows on: {', '.join(parts)} (kept in {cache_folder()})"


def fastest(times: Mapping[Setting, int]) -> Setting:
    """The setting with the least time. The first one if no other is clearly faster, or the clock is too
    coarse."""
    first, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if 0 < times[best] * _GAIN < times[first] else first


def _measured(native: Library, size: int) -> list[Setting]:
    """One setting for each step. Uses the thread's own CPU time and the minimum over alternating rounds, so
    that other load on the machine matters little."""
    began, dtype, outputs = time.thread_time(), TYPES[size], _READ // _INPUTS // size
    memory = empty((_MEMORY,), torch.uint8).fill_(60)
    places = itertools.cycle(range(memory.data_ptr(), memory.data_ptr() + _MEMORY, _READ))
    scale = torch.ones(outputs)
    chosen = []
    for step in STEPS:
        times = dict.fromkeys(settings(native.lanes, step), 1 << 62)
        x = torch.ones(step.timed, _INPUTS, dtype=torch.float32 if size == 1 else dtype)
        out = x.new_empty(step.timed, outputs)
        for setting in [*times] * _ROUNDS if len(times) > 1 else ():
            native.set_product(size, step.first, step.last, *setting)
            start = time.thread_time_ns()
            native.product(
                x.data_ptr(), next(places), scale.data_ptr() if size == 1 else None, None, out.data_ptr(),
                step.timed, outputs, _INPUTS, size == 2, None, 1,
            )  # fmt: skip
            times[setting] = min(times[setting], time.thread_time_ns() - start)
        chosen.append(fastest(times))
    log.info("products in %s: %s, measured in %.2f s", dtype, chosen, time.thread_time() - began)
    return chosen


def _file(native: Library, size: int) -> Path | None:
    """The file for the settings of this processor. None if there is no cache folder."""
    known = repr((_processor(), native.lanes, VERSION, [settings(native.lanes, step) for step in STEPS]))
    folder = cache_folder()
    name = f"products-{hashlib.sha256(known.encode()).hexdigest()[:16]}-{size}.json"
    return None if folder is None else folder / name


def _processor() -> str:
    """The processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("vendor_id", "cpu family", "model", "stepping", "cache size", "CPU part")
    return "\n".join(line for line in lines.splitlines() if line.startswith(fields))


def _kept(native: Library, file: Path | None) -> list[Setting] | None:
    """The stored settings; None if there are none, or they cannot be used."""
    if file is None:
        return None
    try:
        numbers = json.loads(file.read_bytes())
        return [settings(native.lanes, step)[number] for step, number in zip(STEPS, numbers, strict=True)]
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _keep(native: Library, file: Path | None, chosen: list[Setting]) -> None:
    """Store the settings by their indices among the measured ones."""
    if file is None:
        return
    numbers = [settings(native.lanes, step).index(one) for step, one in zip(STEPS, chosen, strict=True)]
    draft = file.with_suffix(f".{os.getpid()}")  # moved: another process may be doing the same
    try:
        draft.write_text(json.dumps(numbers), encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        log.info("the settings of products are not kept: %s", error)
