"""GrammarManager: compiles constraints on its own threads and keeps the results.

Requests for one constraint share its compilation; failures are not kept. A compilation cannot be interrupted:
one that passes its deadline fails its requests and keeps its thread, which another replaces.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple

from runtime.grammar.base import Completion, GrammarBackend, Matcher, quick_completion
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import Aborted, BadConstraint, DeadlineExceeded, InternalFault, RuntimeFault
from runtime.protocol.vocabulary import Vocabulary

log = logging.getLogger(__name__)

COMPILE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MASK_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)


class Histogram:
    """How many durations were at most each of `bounds` (seconds, ascending), their number and their sum. One
    thread observes; others may read a slightly older state."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def state(self) -> dict[str, Any]:
        """{"buckets": [[bound, durations up to it], ...], "count", "sum"}; the last bound is None."""
        buckets: list[list[float | int | None]] = []
        total = 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            buckets.append([bound, total])
        return {"buckets": buckets, "count": total, "sum": self._sum}


_JOIN_S = 5.0
BYTES_PER_CHARACTER = 100
"""Approximate size of a compiled constraint for each character of its text: 300 kB for schemas of 2.5 kB."""
SPARE_WORKERS = 4
"""Threads that may replace those held by compilations that do not end."""
SHORT_S = 1e-3


class ShortTurns:
    """While any thread is inside, sys.setswitchinterval() is at most SHORT_S, so that a forward pass beside a
    thread that runs Python only waits no longer for the interpreter at each operator."""

    _lock = threading.Lock()
    _within = 0
    _before = 0.0
    _set = 0.0

    def __enter__(self) -> None:
        kind = ShortTurns
        with kind._lock:
            kind._within += 1
            if kind._within == 1 and sys.getswitchinterval() > SHORT_S:
                kind._before = sys.getswitchinterval()
                sys.setswitchinterval(SHORT_S)
                kind._set = sys.getswitchinterval()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        turns = ShortTurns
        with turns._lock:
            turns._within -= 1
            # An interval that was set by others meanwhile stays.
            if turns._within == 0 and turns._before and sys.getswitchinterval() == turns._set:
                sys.setswitchinterval(turns._before)
                turns._before = 0.0


class _Kept(NamedTuple):
    matcher: Matcher
    bytes: int
    seconds: float


@dataclass(eq=False)
class _Job:
    """`running`: a thread compiles it; `late`: it passed its deadline while running; `replaced`: another
    thread replaces that one."""

    constraint: Constraint
    deadline: float
    waiting: list[Future[Matcher]] = field(default_factory=list)
    running: bool = False
    late: bool = False
    replaced: bool = False


class GrammarManager:
    """`workers` threads compile. At most `cache_size` compiled constraints of about `cache_bytes` in all are
    kept; the longest unused are dropped first.

    `backend`: a name of the table, created with `options`, or a backend. A future fails with DeadlineExceeded
    `compile_timeout_s` after the request.
    """

    def __init__(
        self, vocabulary: Vocabulary, backend: str | GrammarBackend = "auto", workers: int = 1,
        cache_size: int = 64, compile_timeout_s: float = 30.0, options: Mapping[str, Any] | None = None,
        *, cache_bytes: int = 512 << 20, spare_workers: int = SPARE_WORKERS,
    ) -> None:  # fmt: skip
        if isinstance(backend, str):
            backend = make_backend(backend, vocabulary, **(options or {}))
        self._backend = backend
        self._cache_size, self._cache_bytes, self._timeout = cache_size, cache_bytes, compile_timeout_s
        self._workers, self._spare = workers, spare_workers
        self._lock = threading.Condition()
        self._compiled: OrderedDict[Constraint, _Kept] = OrderedDict()
        self._bytes = 0
        self._jobs: dict[Constraint, _Job] = {}  # waiting for a worker, or being compiled, late ones too
        self._queue: deque[_Job] = deque()
        self._tasks: deque[Callable[[], object]] = deque()
        self._closed = False
        self._hits = self._misses = self._timeouts = self._late = 0
        self._refused: Counter[str] = Counter()
        self._seconds = Histogram(COMPILE_S)
        self._threads: list[threading.Thread] = []
        self._begun = 0
        with self._lock:
            for _ in range(workers):
                self._add_worker()
            self._start(self._watch, "grammar-watch")

    def submit(self, constraint: Constraint) -> Future[Matcher]:
        """A fresh matcher, at once if the constraint is known. The future may be cancelled.

        It raises BadConstraint or UnsupportedConstraint (the constraint), DeadlineExceeded, Aborted
        (closed), or InternalFault (a defect of the backend).
        """
        future: Future[Matcher] = Future()
        with self._lock:
            known = self._compiled.get(constraint)
            if known is not None:
                self._compiled.move_to_end(constraint)
                self._hits += 1
                future.set_result(_fresh(known, cached=True))
                return future
            if self._closed:
                future.set_exception(_closing())
                return future
            self._misses += 1
            deadline = time.monotonic() + self._timeout
            job = self._jobs.get(constraint)
            if job is None:
                job = self._jobs[constraint] = _Job(constraint, deadline)
                self._queue.append(job)
                self._lock.notify_all()
            elif not job.waiting:
                # Late and still running, without requests until now: it is not begun a second time.
                job.deadline = deadline
                self._lock.notify_all()
            job.waiting.append(future)
        return future

    def state(self) -> dict[str, Any]:
        """Since the start: hits, misses, timeouts, refused ("kind/code" -> how often), and seconds, the
        durations of compilations. Now: constraints kept (`cached`, `cached_bytes`), those waiting or being
        compiled, and `stuck`, compilations that passed their deadline and still hold a thread."""
        with self._lock:
            return {
                "cached": len(self._compiled), "cached_bytes": self._bytes, "compiling": len(self._jobs),
                "stuck": self._late, "hits": self._hits, "misses": self._misses, "timeouts": self._timeouts,
                "refused": dict(self._refused), "seconds": self._seconds.state(),
            }  # fmt: skip

    def flush(self) -> None:
        """Forget all compiled constraints; those in use go on."""
        with self._lock:
            self._compiled.clear()
            self._bytes = 0

    def close(self) -> None:
        """Fail what waits, stop the threads and join them; running compilations are waited for only
        briefly, those that are late not at all."""
        with self._lock:
            self._closed = True
            jobs = list(self._jobs.values())
            late = self._late
            self._jobs.clear()
            self._queue.clear()
            self._lock.notify_all()
        for job in jobs:
            _fail(job.waiting, _closing())
        ends = time.monotonic() + _JOIN_S
        for thread in self._threads:
            # A late compilation had its time; which of the threads it holds is unknown.
            thread.join(max(0.0, ends - time.monotonic()) if not late else 0.2)

    # -- threads ---------------------------------------------------------------------------------------------

    def _start(self, role: Any, name: str) -> None:
        thread = threading.Thread(target=role, name=name, daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _add_worker(self) -> None:
        self._start(self._work, f"grammar-{self._begun}")
        self._begun += 1

    def _work(self) -> None:
        while (job := self._take()) is not None:
            began = time.perf_counter()
            matcher, error = self._compile(job.constraint)
            seconds = time.perf_counter() - began
            with self._lock:
                # From here on no request joins those that wait for this job.
                waiting, job.waiting = job.waiting, []
                if self._jobs.get(job.constraint) is job:
                    del self._jobs[job.constraint]
                self._seconds.observe(seconds)
                kept = None
                if matcher is None:
                    self._refused[f"{job.constraint.kind}/{error.code}"] += 1
                else:
                    size = matcher.footprint() + BYTES_PER_CHARACTER * len(job.constraint.spec)
                    kept = _Kept(matcher, size, seconds)
                    self._keep(job.constraint, kept)
                self._late -= job.late
            if kept is None:
                _fail(waiting, error)
            else:
                for future in waiting:
                    _answer(future, _fresh(kept))
            if job.replaced:
                return  # another thread works in its place

    def _take(self) -> _Job | None:
        """The next job that a request still waits for; None when closed."""
        with self._lock:
            while not self._closed:
                while self._queue:
                    job = self._queue.popleft()
                    if not all(future.done() for future in job.waiting):
                        job.running = True
                        return job
                    self._jobs.pop(job.constraint, None)
                if not self._tasks:
                    self._lock.wait()
                    continue
                task = self._tasks.popleft()
                self._lock.release()
                try:
                    task()
                except Exception:
                    log.exception("work beside compiling failed")
                finally:
                    self._lock.acquire()
        return None

    def _compile(self, constraint: Constraint) -> tuple[Matcher | None, RuntimeFault]:
        try:
            with ShortTurns():
                return self._proven(self._backend.compile(constraint.verify()), constraint), _closing()
        except RuntimeFault as error:
            return None, error
        except MemoryError:
            return None, BadConstraint("needs more memory than there is", where=constraint.kind)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - reported to the user; panics of a Rust library, too
            text = f"the grammar backend {self._backend.name!r} failed: {type(error).__name__}: {error}"
            return None, InternalFault(text, where=constraint.kind)

    def _proven(self, matcher: Matcher, constraint: Constraint) -> Matcher:
        """`matcher` with a short whole output, or with a Completion that searches for one. Raises
        BadConstraint if there certainly is none."""
        quick = quick_completion(matcher)
        if quick.empty:
            raise BadConstraint(
                "nothing can match it", where=constraint.kind, hint="its parts contradict each other"
            )
        completion = None if quick.ids == () else Completion(matcher.copy(), self._soon)
        matcher.origin = replace(
            matcher.origin, shortest=quick.ids, searched=quick.ids is not None, completion=completion
        )
        return matcher

    def _soon(self, task: Callable[[], object]) -> None:
        """Run it on a worker when no compilation waits for one."""
        with self._lock:
            self._tasks.append(task)
            self._lock.notify_all()

    def _keep(self, constraint: Constraint, kept: _Kept) -> None:
        before = self._compiled.pop(constraint, None)
        self._bytes += kept.bytes - (before.bytes if before else 0)
        self._compiled[constraint] = kept
        while len(self._compiled) > self._cache_size or (
            self._bytes > self._cache_bytes and len(self._compiled) > 1
        ):
            self._bytes -= self._compiled.popitem(last=False)[1].bytes

    def _watch(self) -> None:
        """Fail the jobs that are late; running ones may still finish and be kept."""
        while True:
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                late = [job for job in self._jobs.values() if job.waiting and job.deadline <= now]
                waiting = [(job.constraint.kind, self._give_up(job)) for job in late]
                stuck = self._late
                if not late:
                    ends = [job.deadline for job in self._jobs.values() if job.waiting]
                    self._lock.wait(max(0.0, min(ends) - now) if ends else None)
            for kind, futures in waiting:
                text = f"the constraint was not compiled within {self._timeout:g} s"
                if stuck > self._spare:
                    text += f"; {stuck} compilations that do not end hold all threads"
                _fail(futures, DeadlineExceeded(text, where=kind, hint="simplify it, or try again"))

    def _give_up(self, job: _Job) -> list[Future[Matcher]]:
        """The futures that waited for it. A spare thread, if there is one, replaces the thread it holds."""
        self._timeouts += 1
        waiting, job.waiting = job.waiting, []
        if not job.running:
            del self._jobs[job.constraint]
            self._queue.remove(job)
        elif not job.late:
            job.late = True
            self._late += 1
            if self._late <= self._spare:
                job.replaced = True
                self._add_worker()
        return waiting


def _fresh(kept: _Kept, *, cached: bool = False) -> Matcher:
    matcher = kept.matcher.copy()
    matcher.origin = replace(kept.matcher.origin, compile_s=kept.seconds, cached=cached)
    return matcher


def _closing() -> Aborted:
    return Aborted("the engine is closing")


def _fail(waiting: list[Future[Matcher]], error: RuntimeFault) -> None:
    for future in waiting:
        # One object each: an exception raised in two threads would share its traceback.
        _answer(future, type(error)(error.message, where=error.where, hint=error.hint))


def _answer(future: Future[Matcher], answer: Matcher | RuntimeFault) -> None:
    try:
        if isinstance(answer, RuntimeFault):
            future.set_exception(answer)
        else:
            future.set_result(answer)
    except InvalidStateError:
        return  # cancelled, or answered by the watch already
