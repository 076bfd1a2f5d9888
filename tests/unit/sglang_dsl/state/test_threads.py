"""The pool of threads: all work is done, and as many pieces at once as it may have threads."""

from __future__ import annotations

import subprocess
import sys
import threading

from sglang_dsl.concurrency.threads import Threads

LONG_S = 300.0


def test_all_work_is_done_once() -> None:
    pool, done, all_done = Threads(8, "test"), [], threading.Event()

    def work(number: int) -> None:
        done.append(number)
        if len(done) == 2000:
            all_done.set()
        if number % 3 == 0:
            raise ValueError(number)

    for number in range(2000):
        pool.submit(lambda number=number: work(number))
    assert all_done.wait(LONG_S)
    assert sorted(done) == list(range(2000))
    pool.close(wait=True)


def test_work_that_blocks_has_all_the_threads() -> None:
    pool, here = Threads(6, "test"), threading.Barrier(7)
    for _ in range(6):
        pool.submit(lambda: here.wait(LONG_S))
    here.wait(LONG_S)
    pool.close(wait=True)


def test_there_are_no_more_threads_than_it_may_have() -> None:
    pool, lock, ended = Threads(3, "three"), threading.Lock(), threading.Semaphore(0)
    at_once = most = 0
    pause, all_here = threading.Event(), threading.Event()

    def work() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            if at_once == 3:
                all_here.set()
        all_here.wait(LONG_S)  # the first of them wait for the third
        pause.wait(0.002)
        with lock:
            at_once -= 1
        ended.release()

    for _ in range(60):
        pool.submit(work)
    assert all(ended.acquire(timeout=LONG_S) for _ in range(60))
    assert most == 3
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("three-")]) == 3
    pool.close(wait=True)


def test_threads_that_waited_serve_again_and_end_when_it_is_closed() -> None:
    pool, names = Threads(4, "again"), []
    for _ in range(50):
        ended = threading.Event()
        pool.submit(lambda ended=ended: (names.append(threading.current_thread().name), ended.set()))
        assert ended.wait(LONG_S)
    assert set(names) <= {f"again-{index}" for index in range(4)}
    pool.close(wait=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("again-")]
    pool.submit(lambda: names.append("late"))
    assert "late" not in names


def test_what_was_not_begun_is_dropped() -> None:
    pool, begun, go, done = Threads(1, "test"), threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        go.wait(LONG_S)

    pool.submit(work)
    assert begun.wait(LONG_S)
    pool.submit(lambda: done.append(1))
    pool.close(wait=False)
    go.set()
    pool.close(wait=True)
    assert done == []


def test_a_thread_may_be_the_first_thing_that_is_asked_for() -> None:
    """In a process whose loop was not started yet."""
    program = (
        "import threading\n"
        "from sglang_dsl.concurrency.loop import in_thread\n"
        "done = threading.Event()\n"
        "in_thread(done.set)\n"
        "assert done.wait(300)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
