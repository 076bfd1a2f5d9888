"""unit/sglang_dsl/execution/test_ray_batches.py, at length."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglang_dsl.interpreter.record import Record

DRIVER = Path(__file__).with_name("ray_batch_driver.py")


PATIENCE_S = 300.0


BATCH = int(os.environ.get("RAY_PROGRAMS", "400"))


IN_FLIGHT = 2 * 2 * 16
"""Items that the driver's workers have in hand at most: workers, blocks of each, items of a block."""


SCRIPT = """
import os, signal, threading
import sglang_dsl as sgl

@sgl.function
def checked(s, item):
    if item == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 6:
        raise OwnError("six", 6)
    s += sgl.user(f"{item}") + sgl.assistant(sgl.gen("a"))
    fork = s.fork(2)
    fork += sgl.gen("b", temperature=1)
    fork.join()
    return threading.Lock() if item == 7 else [item, s["a"]]

@sgl.function
async def running(s, item):
    s += f"{item} " + sgl.gen("a")
    return await s["a"]

class OwnError(Exception):
    def __init__(self, word, number):
        super().__init__(word)

def mock():
    return sgl.MockBackend(lambda call: f"r{len(call.prompt.messages)} {call.sampling.seed}")

def broken():
    raise OSError("no model there")

def told(state):
    if isinstance(state, Exception):
        return f"{type(state).__name__}: {state}"
    return [state.text(), state["a"], state.core.names(), state.ret_value, state.index, state.usage()]

items = [{"item": item} for item in range(40)]
two = sgl.RayData(workers=2, batch_size=4, attempts=2)
here = [told(one) for one in checked.run_batch(items[8:], backend=mock(), seed=3)]
there = [told(one) for one in checked.run_batch(items, backend=mock, seed=3, engine=two, on_error="return")]
# The place in the batch decides a seed: the same items at the same places.
same = [told(one) for one in checked.run_batch(items[8:], backend=mock, seed=3, engine=two)]
assert here == same, (here[0], same[0])
assert [one[3][0] for one in there if not isinstance(one, str)] == [0, 1, 2, 3, 4, *range(8, 40)], there
assert there[5] == ("ProgramError: the worker process ended each time that it ran item 5 [program 'checked']"
                    ". it was killed, or out of memory"), there[5]
assert there[6] == "ProgramError: OwnError: six [program 'checked']", there[6]
assert "cannot be sent from the worker: TypeError" in there[7], there[7]
mixed = running.run_batch(items, backend=mock, engine=two, ordered=False, generator_style=True, num_threads=3)
assert sorted(state.index for state in mixed) == list(range(40))
failed = checked.run_batch(items[:3], backend=broken, engine=two, on_error="return")
assert [told(one) for one in failed] == ["OSError: no model there"] * 3
try:
    checked.run_batch(items[6:], backend=mock, engine=two)
except sgl.ProgramError as error:
    print("raised", error, *error.__notes__)
limited = running.run_batch(items, backend=mock, engine=two, budget=sgl.Budget(calls=7), on_error="return")
assert sum(isinstance(one, sgl.BudgetExceeded) for one in limited) == 33, limited
each = running.options(budget=sgl.Budget(calls=1)).run_batch(items, backend=mock, engine=two)
assert len(each) == 40
try:
    checked.run_batch(items, backend=mock, engine=sgl.RayData(gpus=3))
except sgl.BadProgram as error:
    print("refused", error)
"""


def run_python(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(driver: subprocess.Popen[str]) -> str:
    said, _ = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, said
    return said


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_batch_on_ray_gives_what_a_batch_here_gives(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    said = finished(run_python(str(script)))
    assert "raised OwnError: six" in said
    assert "item 0 of the batch of 'checked': item=6" in said
    assert "1 CPU, 3 GPU are requested, but no machine of the Ray cluster has that much" in said


def asked(folder: Path) -> list[tuple[int, int]]:
    """(pid, item) of every call of the backend so far."""
    path = folder / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), int(item)) for pid, item in (line.split() for line in lines)]


def until_asked(folder: Path, more_than: int, driver: subprocess.Popen[str]) -> list[tuple[int, int]]:
    deadline = time.monotonic() + PATIENCE_S
    while len(found := asked(folder)) <= more_than:
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < deadline, f"{len(found)} calls in {PATIENCE_S} s"
        time.sleep(0.02)
    return found


def gone(processes: list[psutil.Process]) -> Iterator[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    yield from alive


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_killed_worker_and_a_killed_driver_lose_nothing(tmp_path: Path) -> None:
    driver = run_python(str(DRIVER), str(tmp_path), str(BATCH))
    pid, _ = until_asked(tmp_path, BATCH // 5, driver)[-1]
    os.kill(pid, signal.SIGKILL)
    before = len(asked(tmp_path))
    until_asked(tmp_path, max(before + 2 * IN_FLIGHT, BATCH // 2), driver)
    family = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
    driver.kill()
    driver.communicate(timeout=PATIENCE_S)
    assert list(gone(family)) == []  # no part of the cluster outlives its driver

    with_record = Record(tmp_path / "record", "ro")
    kept, first = len(with_record), asked(tmp_path)
    with_record.close()
    assert 0 < kept < BATCH
    finished(run_python(str(DRIVER), str(tmp_path), str(BATCH)))

    answers = json.loads((tmp_path / "answers.json").read_text())
    assert answers["items"] == list(range(BATCH))
    assert answers["texts"] == [f"answer {item}" for item in range(BATCH)]
    assert answers["replayed"] == kept
    every = asked(tmp_path)
    # What was written down is not asked again; what a killed process had in hand may be.
    assert len(every) - len(first) == BATCH - kept
    times = Counter(item for _, item in every)
    assert set(times) == set(range(BATCH))
    assert len(every) - BATCH <= 2 * IN_FLIGHT
    record = Record(tmp_path / "record", "ro")
    assert len(record) == BATCH
    record.close()
    print(
        f"{BATCH} programs: {len(every)} calls, {kept} replayed, the second run took {answers['seconds']} s"
    )
