"""Compiling in the background: shared, remembered, failing honestly, closing cleanly."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest

from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.base import GrammarBackend
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.manager import GrammarManager, ShortTurns
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import (
    Aborted,
    BadConstraint,
    DeadlineExceeded,
    InternalFault,
    UnsupportedConstraint,
)

WORD = Constraint("regex", "[a-z]+")
PATIENCE_S = 300.0
"""For what must happen: a machine may stand still for seconds."""


class Slow(GrammarBackend):
    """Compiles when `go` is set, and counts."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__(BYTES)
        self.go, self.inner, self.calls = threading.Event(), OutlinesGrammarBackend(BYTES), []
        self.failure: Exception | None = None

    def compile(self, constraint):
        self.calls.append(constraint)
        assert self.go.wait(2 * PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        return self.inner.compile(constraint)


@pytest.fixture
def slow():
    return Slow()


@pytest.fixture
def managed():
    made = []

    def make(*args, **options):
        made.append(GrammarManager(BYTES, *args, **options))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def in_the_end(manager, constraint):
    """Its matcher, where the deadline is shorter than a machine may stand still: asked for again and again,
    and kept when it came late."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            return manager.submit(constraint).result(PATIENCE_S)
        except DeadlineExceeded:
            assert time.monotonic() < ends


def hold(manager, slow, constraint):
    """Asked for until a thread is in its compilation, and given up: it may be late before one begins."""
    ends = time.monotonic() + PATIENCE_S
    while constraint not in slow.calls:
        with pytest.raises(DeadlineExceeded):
            manager.submit(constraint).result(PATIENCE_S)
        assert time.monotonic() < ends


def test_answers_are_fresh_and_remembered(managed):
    manager = managed()
    first = manager.submit(WORD).result(PATIENCE_S)
    assert first.advance_bytes(b"abc")
    again = manager.submit(WORD)
    assert again.done()
    assert again.result() is not first
    assert not again.result().may_stop()
    state = manager.state()
    assert [state[name] for name in ("cached", "compiling", "hits", "misses")] == [1, 0, 1, 1]
    manager.flush()
    assert manager.state()["cached"] == 0
    assert manager.submit(WORD).result(PATIENCE_S).advance_bytes(b"x")


def test_one_compilation_serves_all_who_ask(managed, slow):
    manager = managed(slow, workers=3)
    futures = [manager.submit(WORD) for _ in range(5)]
    while not slow.calls:
        time.sleep(0.001)
    futures.append(manager.submit(WORD))  # one is under way for certain
    slow.go.set()
    matchers = [future.result(PATIENCE_S) for future in futures]
    assert len(set(map(id, matchers))) == 6
    assert slow.calls == [WORD]


def test_mistakes_are_told_and_forgotten(managed, slow):
    manager = managed(slow)
    slow.go.set()
    slow.failure = BadConstraint("is odd", where="regex")
    both = [manager.submit(WORD), manager.submit(WORD)]
    caught = []
    for future in both:
        with pytest.raises(BadConstraint, match="is odd") as error:
            future.result(PATIENCE_S)
        caught.append(error.value)
    slow.failure = None
    assert manager.submit(WORD).result(PATIENCE_S).advance_bytes(b"a")
    with pytest.raises(BadConstraint, match="position 0"):
        managed().submit(Constraint("regex", "(")).result(PATIENCE_S)
    with pytest.raises(BadConstraint, match="is empty"):
        managed().submit(Constraint("regex", "")).result(PATIENCE_S)
    with pytest.raises(UnsupportedConstraint, match="grammar-backend none"):
        managed("none").submit(WORD).result(PATIENCE_S)


def test_a_defect_of_the_backend_is_an_internal_fault(managed, slow):
    manager = managed(slow)
    slow.go.set()
    slow.failure = ZeroDivisionError("oops")
    with pytest.raises(InternalFault, match="ZeroDivisionError: oops"):
        manager.submit(WORD).result(PATIENCE_S)
    slow.failure = None
    assert manager.submit(WORD).result(PATIENCE_S) is not None


def test_late_compilations_fail_without_poisoning(managed, slow):
    manager = managed(slow, compile_timeout_s=0.1, spare_workers=0)  # nobody takes the queued one up
    hold(manager, slow, WORD)
    again, queued = manager.submit(WORD), manager.submit(Constraint("regex", "b"))
    for future in (again, queued):
        with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
            future.result(PATIENCE_S)
    assert not slow.go.is_set()
    slow.go.set()
    assert in_the_end(manager, WORD).advance_bytes(b"a")
    assert manager.submit(WORD).done(), "what came late is kept"
    assert slow.calls == [WORD]


def test_compilations_that_do_not_end_do_not_hold_all_threads(managed, slow):
    """Each that passes its deadline gets a thread in its place, up to a bound; who is asked for again while
    it is still under way is not begun twice."""

    class Picky(OutlinesGrammarBackend):
        def compile(self, constraint):
            return (
                slow.compile(constraint) if constraint.spec.startswith("x") else super().compile(constraint)
            )

    manager = managed(Picky(BYTES), compile_timeout_s=0.1, spare_workers=2)
    for spec in ("x1", "x2"):
        hold(manager, slow, Constraint("regex", spec))
        assert in_the_end(manager, WORD).advance_bytes(b"a")
        manager.flush()
    assert sorted(call.spec for call in slow.calls) == ["x1", "x2"]
    assert manager.state()["stuck"] == 2
    assert manager.state()["timeouts"] >= 2
    with pytest.raises(DeadlineExceeded):
        manager.submit(Constraint("regex", "x1")).result(PATIENCE_S)
    assert len(slow.calls) == 2
    hold(manager, slow, Constraint("regex", "x3"))
    with pytest.raises(DeadlineExceeded):  # all spare threads are in use
        manager.submit(WORD).result(PATIENCE_S)
    slow.go.set()
    ends = time.monotonic() + PATIENCE_S
    while manager.state()["stuck"] and time.monotonic() < ends:
        time.sleep(0.01)
    assert in_the_end(manager, WORD).advance_bytes(b"a")
    assert manager.submit(Constraint("regex", "x1")).done(), "what came late is kept"


def test_the_kept_ones_are_bounded_by_bytes(managed):
    one = managed().submit(WORD).result(PATIENCE_S).footprint()
    assert one > 0
    manager = managed(cache_bytes=2 * one + one // 2)
    for text in ("[a-z]", "[b-z]", "[c-z]", "[d-z]"):
        manager.submit(Constraint("regex", text)).result(PATIENCE_S)
    state = manager.state()
    assert state["cached"] >= 1
    assert state["cached_bytes"] <= 2 * one + one // 2
    manager.flush()
    assert manager.state()["cached_bytes"] == 0


def test_it_tells_how_it_went(managed, slow):
    slow.go.set()
    manager = managed(slow)
    fresh = manager.submit(WORD).result(PATIENCE_S).origin
    again = manager.submit(WORD).result(PATIENCE_S).origin
    assert (fresh.cached, again.cached, again.compile_s) == (False, True, fresh.compile_s)
    assert fresh.compile_s > 0
    with pytest.raises(BadConstraint):
        manager.submit(Constraint("regex", "(")).result(PATIENCE_S)
    state = manager.state()
    assert state["refused"] == {"regex/bad_constraint": 1}
    assert (state["seconds"]["count"], state["seconds"]["buckets"][-1]) == (2, [None, 2])


def test_a_panic_of_a_library_is_that_constraints_error(managed, slow):
    class PanicException(BaseException):
        """What the bindings of Rust libraries raise; no Exception."""

    manager = managed(slow)
    slow.go.set()
    slow.failure = PanicException("index out of bounds")
    with pytest.raises(InternalFault, match="index out of bounds"):
        manager.submit(WORD).result(PATIENCE_S)
    slow.failure = None
    assert manager.submit(WORD).result(PATIENCE_S).advance_bytes(b"a")


def test_a_spec_that_is_too_large_is_refused_at_once(managed):
    with pytest.raises(BadConstraint, match="10000000 bytes"):
        managed().submit(Constraint("json_schema", " " * 10_000_000)).result(PATIENCE_S)


def test_cancelled_requests_are_not_compiled(managed, slow):
    manager = managed(slow)
    running, waiting = manager.submit(WORD), manager.submit(Constraint("regex", "b"))
    while not slow.calls:
        time.sleep(0.001)
    assert running.cancel()
    assert waiting.cancel()
    slow.go.set()
    assert manager.submit(Constraint("regex", "c")).result(PATIENCE_S).advance_bytes(b"c")
    with pytest.raises(CancelledError):
        running.result(0)
    assert Constraint("regex", "b") not in slow.calls
    assert manager.submit(WORD).done(), "what was compiled for a cancelled request is kept"


def test_the_longest_unused_leave_first(managed):
    manager = managed(cache_size=2)
    patterns = [Constraint("regex", text) for text in "abc"]
    for constraint in patterns[:2]:
        manager.submit(constraint).result(PATIENCE_S)
    manager.submit(patterns[0]).result(PATIENCE_S)
    manager.submit(patterns[2]).result(PATIENCE_S)
    assert [manager.submit(constraint).done() for constraint in (patterns[0], patterns[2])] == [True, True]
    assert not manager.submit(patterns[1]).done() or manager.state()["misses"] == 4


def test_close_fails_what_waits_and_joins(slow):
    before = set(threading.enumerate())
    manager = GrammarManager(BYTES, slow, workers=2)
    mine = set(threading.enumerate()) - before
    mine = {thread for thread in mine if thread.name.startswith("grammar-")}
    assert len(mine) == 3
    futures = [manager.submit(Constraint("regex", text)) for text in ("a", "b", "c")]
    while len(slow.calls) < 2:
        time.sleep(0.001)
    futures[-1].add_done_callback(lambda _: slow.go.set())  # it has no thread: only close() can end it
    manager.close()
    for future in futures:
        with pytest.raises(Aborted):
            future.result(0)
    with pytest.raises(Aborted):
        manager.submit(WORD).result(0)
    ends = time.monotonic() + PATIENCE_S
    while any(thread.is_alive() for thread in mine) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in mine)
    manager.close()


def test_turns_are_short_while_somebody_compiles(managed, slow):
    ends = time.monotonic() + PATIENCE_S
    while ShortTurns._within and time.monotonic() < ends:
        time.sleep(0.001)  # a thread that an earlier test left compiles
    before = sys.getswitchinterval()
    manager = managed(slow, workers=2)
    futures = [manager.submit(Constraint("regex", text)) for text in "ab"]
    while len(slow.calls) < 2:
        time.sleep(0.001)
    assert sys.getswitchinterval() < before
    slow.go.set()
    for future in futures:
        future.result(PATIENCE_S)
    ends = time.monotonic() + PATIENCE_S
    while sys.getswitchinterval() != before and time.monotonic() < ends:
        time.sleep(0.001)
    assert sys.getswitchinterval() == before
