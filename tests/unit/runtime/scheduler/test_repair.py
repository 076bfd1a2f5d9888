"""A wrong account of slots is found, repaired, logged and counted; nobody notices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from runtime.protocol.errors import InternalFault
from tests.unit.runtime.scheduler.fake import START, draw, follow


def expected(prompt: list[int], count: int, size: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        ids.append(draw(follow(START, [*prompt, *ids]), size))
    return ids


def leak(manager: Any) -> None:
    manager.allocator.alloc(7)


def miscount_free(manager: Any) -> None:
    manager.allocator.free -= 3


def miscount_cache(manager: Any) -> None:
    manager.cache.evictable += 5


def stay_locked(manager: Any) -> None:
    manager.cache.lock(manager.cache.match([1, 2, 3, 4]))


def free_twice(manager: Any) -> None:
    """Slots of the cache are given back as if nobody had them."""
    (node, *_) = manager.cache.nodes()
    manager.allocator.release(node.runs)


CORRUPTIONS = [leak, miscount_free, miscount_cache, stay_locked, free_twice]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=[one.__name__ for one in CORRUPTIONS])
def test_found_and_repaired_when_idle(
    bench: Any, caplog: pytest.LogCaptureFixture, corrupt: Callable[[Any], None], page: int
) -> None:
    sim = bench(200, page_size=page)
    sim.add("a", [1, 2, 3, 4, 5], max_new_tokens=9, ignore_eos=True)
    sim.run()
    assert sim.scheduler.plan() is None
    assert sim.scheduler.state()["repairs"] == 0
    corrupt(sim.scheduler.manager)
    with pytest.raises(InternalFault):
        sim.scheduler.check()
    with caplog.at_level(logging.ERROR):
        assert sim.scheduler.plan() is None
    assert "account of slots is wrong" in caplog.text
    state = sim.scheduler.state()
    assert (state["num_repairs_total"], state["free"], state["num_used_tokens"]) == (1, 200, 0)
    sim.add("b", [1, 2, 3, 4, 5], max_new_tokens=9, ignore_eos=True)
    assert sim.run().answer("b").new_ids == sim.answer("a").new_ids
    sim.scheduler.plan()
    assert sim.scheduler.state()["repairs"] == 1
    sim.empty()


@pytest.mark.parametrize("overlap", [False, True])
def test_found_while_busy_nobody_fails(
    bench: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """A lease that cannot be closed: its request is answered, the others compute again what they had."""
    sim = bench(300, overlap=overlap)
    for number in range(4):
        sim.add(str(number), [number, 2, 3], max_new_tokens=4 + 6 * number, ignore_eos=True, stream=True)
    close = sim.scheduler.manager.close
    calls = 0

    def broken(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise InternalFault("slots 3..4 are freed twice", where="cache.pages")
        close(*arguments)

    monkeypatch.setattr(sim.scheduler.manager, "close", broken)
    monkeypatch.setattr(sim.scheduler, "check", lambda: None)  # the bench looks at it after every tick
    with caplog.at_level(logging.ERROR):
        sim.run()
    monkeypatch.undo()
    for number in range(4):
        answer = sim.answer(str(number))
        assert answer.new_ids == expected([number, 2, 3], 4 + 6 * number, len(sim.vocabulary))
        assert answer.retractions == (number > 0)
    assert sim.scheduler.state()["repairs"] == 1
    assert "freed twice" in caplog.text
    sim.empty()


@pytest.mark.parametrize("verb", ["open", "grow", "publish"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_verb_of_the_cache_that_fails(
    bench: Any, monkeypatch: pytest.MonkeyPatch, verb: str, times: int
) -> None:
    sim = bench(300)
    for number in range(3):
        sim.add(str(number), [number, 2, 3], max_new_tokens=40, ignore_eos=True)
    whole = getattr(sim.scheduler.manager, verb)
    calls = 0

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if 2 <= calls < 2 + times:
            raise InternalFault("the cache is broken", where="cache.radix")
        return whole(*arguments)

    monkeypatch.setattr(sim.scheduler.manager, verb, broken)
    monkeypatch.setattr(sim.scheduler, "check", lambda: None)
    sim.run(500)
    monkeypatch.undo()
    for number in range(3):
        assert sim.answer(str(number)).new_ids == expected([number, 2, 3], 40, len(sim.vocabulary))
    assert 1 <= sim.scheduler.state()["repairs"] <= times
    sim.empty()


def test_a_cache_that_stays_broken_is_told(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the scheduler hears of it, rather than that requests wait for ever."""
    sim = bench(300)
    sim.add("a", [1], max_new_tokens=4)

    def broken(*arguments: Any) -> Any:
        raise InternalFault("the cache is broken", where="cache.radix")

    monkeypatch.setattr(sim.scheduler.manager, "open", broken)
    with pytest.raises(InternalFault, match="broken"):
        sim.run(10)


def test_what_a_session_kept_is_forgotten_too(bench: Any) -> None:
    sim = bench(200)
    sim.scheduler.open_session("s", streaming=True)
    for rid in "ab":
        sim.add(rid, [1, 2, 3], max_new_tokens=4, ignore_eos=True, session_params={"id": "s"})
        sim.run()
        leak(sim.scheduler.manager)
        sim.scheduler.plan()
    assert sim.scheduler.state()["repairs"] == 2
    assert sim.answer("b").prompt_tokens == 10
    sim.scheduler.close_session("s")
    sim.empty()


def test_out_of_memory_is_one_request_s_error(bench: Any) -> None:
    """The last one running cannot get a slot: only a leak can bring that about; it ends with an answer."""
    sim = bench(100)
    sim.add("a", [1, 2, 3], max_new_tokens=90, ignore_eos=True)
    sim.tick()
    manager = sim.scheduler.manager
    manager.trim(sim.scheduler._batch.running[0].lease, 0)
    manager.allocator.alloc(manager.allocator.free)
    while sim.scheduler.busy:
        for output in sim.scheduler.commit(sim.runner.finish({})) if step(sim) else sim.scheduler.drain():
            sim.news.setdefault(output.rid, []).append(output)
    error = sim.answer("a").finish.error
    assert error["code"] == "internal_fault"
    assert error["message"].startswith("Out of memory even after retracting all other requests")
    assert sim.scheduler.plan() is None
    assert sim.scheduler.state()["repairs"] == 1
    sim.add("b", [1, 2, 3], max_new_tokens=90, ignore_eos=True)
    assert len(sim.run().answer("b").new_ids) == 90
    sim.empty()


def step(sim: Any) -> bool:
    plan = sim.scheduler.plan()
    if plan is not None:
        sim.runner.launch(plan)
    return plan is not None
