"""Requests with adapters: each is computed with its own, nobody finds another one's KV, a step has no more
adapters than it may, and nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from runtime.plan import StepPlan
from runtime.protocol.errors import AdapterError, ModelNotFound, from_dict
from runtime.protocol.io_struct import TokenOutput
from runtime.scheduler.requests.adapters import OVERDUE_TICKS
from tests.unit.runtime.scheduler.fake import begin, draw, follow

SIZE = 41
PROMPT = list(range(1, 33))


def expected(number: int, prompt: list[int], count: int) -> list[int]:
    history, made = follow(begin(number), prompt), []
    for _ in range(count):
        made.append(draw(history, SIZE))
        history = follow(history, made[-1:])
    return made


def watch(bench: Any) -> list[set[int]]:
    """The adapters of each plan."""
    seen: list[set[int]] = []
    launch: Callable[[StepPlan], None] = bench.runner.launch

    def spy(plan: StepPlan) -> None:
        seen.append({row.adapter for row in plan.rows} - {0})
        launch(plan)

    bench.runner.launch = spy
    return seen


def refused(answer: TokenOutput) -> Exception:
    assert answer.finish is not None
    assert answer.finish.error is not None
    return from_dict(answer.finish.error)


def test_each_is_computed_with_its_own_and_finds_its_own_prefix(bench: Any) -> None:
    made = bench(adapters={"per_batch": 4})
    for name in ("one", "two"):
        made.adapters.load(name, f"/{name}")
    asked = [None, "one", "two", "one", None, "two"]
    cached = []
    for turn, name in enumerate(asked):
        made.add(f"r{turn}", PROMPT, max_new_tokens=5, ignore_eos=True, lora_path=name)
        made.run()
        answer = made.answer(f"r{turn}")
        number = {None: 0, "one": 1, "two": 2}[name]
        assert answer.new_ids == expected(number, PROMPT, 5)
        cached.append(answer.cached_tokens)
    assert cached == [0, 0, 0, 31, 31, 31]
    made.add("keyed", PROMPT, max_new_tokens=1, lora_path="one", extra_key="k")
    assert made.run().answer("keyed").cached_tokens == 0
    made.empty()


def test_who_is_not_there_is_refused_alone(bench: Any) -> None:
    made = bench(adapters={"per_batch": 2})
    made.adapters.load("one", "/one")
    made.add("a", PROMPT, max_new_tokens=3, lora_path="One")
    made.add("b", PROMPT, max_new_tokens=3, lora_path="one", ignore_eos=True)
    made.run()
    fault = refused(made.answer("a"))
    assert isinstance(fault, ModelNotFound)
    assert "'One'" in str(fault)
    assert "there are: one" in str(fault)
    assert len(made.answer("b").new_ids) == 3
    without = bench()
    without.add("a", PROMPT, lora_path="one")
    assert "without adapters" in str(refused(without.run().answer("a")))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_many_at_once_while_adapters_come_and_go(bench: Any, seed: int, overlap: bool) -> None:
    dice = random.Random(seed)
    made = bench(
        200, adapters={"per_batch": 3}, chunked_prefill_size=24, max_running_requests=8, overlap=overlap
    )
    plans, loaded, asked, left = watch(made), {}, {}, 0
    for number in range(300):
        if dice.random() < 0.1 and len(loaded) < 7:
            name = f"n{dice.randrange(9)}"
            if name not in loaded:
                made.adapters.load(name, f"/{name}", pinned=dice.random() < 0.1 and not left)
                loaded[name] = max(made.runner.adapters)
                left += made.runner.adapters[loaded[name]].pinned
        if dice.random() < 0.05 and loaded:
            name = dice.choice(list(loaded))
            left -= made.runner.adapters[loaded[name]].pinned
            made.adapters.unload(name)
            del loaded[name]
        name = dice.choice([None, *loaded])
        prompt = PROMPT[: dice.randrange(1, 32)] + [dice.randrange(SIZE) for _ in range(dice.randrange(6))]
        count = dice.randrange(1, 20)
        made.add(str(number), prompt, max_new_tokens=count, ignore_eos=True, lora_path=name)
        asked[str(number)] = (0 if name is None else loaded[name], prompt, count)
        if dice.random() < 0.03:
            victim = dice.choice(list(asked))
            if made.scheduler.abort(victim):
                del asked[victim]
        for _ in range(dice.randrange(4)):
            made.tick()
    made.run()
    for rid, (number, prompt, count) in asked.items():
        assert made.answer(rid).new_ids == expected(number, prompt, count)
    assert max(map(len, plans)) == 3
    made.tick()
    assert set(made.runner.adapters) == set(loaded.values())
    assert made.scheduler.state()["num_loaded_loras"] == len(loaded)
    made.empty()


def test_nobody_waits_for_ever_for_a_place(bench: Any) -> None:
    made = bench(512, adapters={"per_batch": 2}, max_running_requests=6)
    for name in "abc":
        made.adapters.load(name, f"/{name}")
    made.add("late", PROMPT[:4], max_new_tokens=4, lora_path="c")
    made.scheduler.abort("late")  # a name that waited is no reason to wait for
    count = 0
    for name in "ab":
        made.add(f"{name}0", PROMPT[:3], max_new_tokens=20, ignore_eos=True, lora_path=name)
    made.tick()
    made.add("waits", PROMPT[:4], max_new_tokens=4, ignore_eos=True, lora_path="c")
    for tick in range(OVERDUE_TICKS + 60):
        if tick % 5 == 0:
            count += 1
            name = "ab"[count % 2]
            made.add(f"{name}{count}", [count % SIZE], max_new_tokens=20, ignore_eos=True, lora_path=name)
        made.add(f"base{tick}", [1], max_new_tokens=1)
        made.tick()
        if any(one.finish for one in made.news.get("waits", ())):
            break
    else:
        raise AssertionError("it still waits")
    assert tick >= OVERDUE_TICKS - 1
    assert made.answer("waits").new_ids == expected(3, PROMPT[:4], 4)
    made.run()
    made.empty()


def test_what_is_unloaded_stays_for_those_who_have_it(bench: Any) -> None:
    made = bench(adapters={"per_batch": 2})
    made.adapters.load("one", "/one")
    made.add("a", PROMPT, max_new_tokens=9, ignore_eos=True, lora_path="one")
    made.tick()
    made.adapters.unload("one")
    assert made.adapters.loaded == {}
    made.add("b", PROMPT, max_new_tokens=2, lora_path="one")
    made.tick()
    assert isinstance(refused(made.answer("b")), ModelNotFound)
    assert set(made.runner.adapters) == {1}
    made.adapters.load("one", "/other")
    made.add("c", PROMPT, max_new_tokens=9, ignore_eos=True, lora_path="one")
    made.run()
    assert made.answer("a").new_ids == expected(1, PROMPT, 9)
    c = made.answer("c")
    assert (c.new_ids, c.cached_tokens) == (expected(2, PROMPT, 9), 0)
    made.tick()
    assert set(made.runner.adapters) == {2}
    with pytest.raises(ModelNotFound, match="'two'"):
        made.adapters.unload("two")


def test_the_one_used_longest_ago_makes_room(bench: Any) -> None:
    made = bench(adapters={"per_batch": 3, "at_most": 3})
    made.adapters.load("pinned", "/p", pinned=True)
    made.adapters.load("a", "/a")
    made.adapters.load("b", "/b")
    made.add("1", PROMPT, max_new_tokens=1, lora_path="a")
    made.run()
    made.adapters.load("c", "/c")
    assert set(made.adapters.loaded) == {"pinned", "a", "c"}
    for name in ("a", "c"):
        made.add(name, PROMPT, max_new_tokens=50, ignore_eos=True, lora_path=name)
    made.tick()
    with pytest.raises(AdapterError, match=r"max_loaded_loras=3.*in use or pinned"):
        made.adapters.load("d", "/d")
    made.run()
    made.adapters.load("d", "/d")
    assert set(made.adapters.loaded) == {"pinned", "c", "d"}


def test_names_that_cannot_be_loaded(bench: Any) -> None:
    made = bench(adapters={"per_batch": 2})
    made.adapters.load("a", "/a", pinned=True)
    for name, path, pinned, where in (
        ("", "/a", False, "lora_name"),
        ("a\0", "/a", False, "lora_name"),
        ("x" * 201, "/a", False, "lora_name"),
        ("a", "/a", False, "lora_name"),
        ("b", "", False, "lora_path"),
        ("b", "/b", True, "pinned"),
    ):
        with pytest.raises(AdapterError) as found:
            made.adapters.load(name, path, pinned=pinned)
        assert found.value.where == where
    assert made.adapters.loaded == {"a": "/a"}


def test_one_that_the_store_refuses_is_not_loaded(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(adapters={"per_batch": 2, "at_most": 1})
    made.adapters.load("a", "/a")

    def refuse(adapter: Any) -> None:
        raise AdapterError("broken", where=adapter.path)

    monkeypatch.setattr(made.runner, "load_adapter", refuse)
    with pytest.raises(AdapterError, match="broken"):
        made.adapters.load("b", "/b")
    assert made.adapters.loaded == {"a": "/a"}


def test_sessions_and_preemption_keep_to_the_adapter(bench: Any) -> None:
    made = bench(48, adapters={"per_batch": 1}, max_running_requests=4)
    made.adapters.load("a", "/a")
    made.adapters.load("b", "/b")
    session = made.scheduler.open_session(streaming=True)
    outputs: list[int] = []
    for turn, name in enumerate(["a", "a", "b"]):
        params = {"session_params": {"id": session}, "lora_path": name}
        made.add(f"t{turn}", [3, 4, 5], max_new_tokens=4, ignore_eos=True, **params)
        made.run()
        prompt = [*outputs, 3, 4, 5]
        answer = made.answer(f"t{turn}")
        assert answer.new_ids == expected({"a": 1, "b": 2}[name], prompt, 4)
        assert (answer.cached_tokens > 0) == (turn == 1)
        outputs = [*prompt, *answer.new_ids]
    made.scheduler.close_session(session)
    for number in range(4):  # more than fits: some are retracted
        made.add(str(number), PROMPT[:6], max_new_tokens=20, ignore_eos=True, lora_path="ab"[number % 2])
    made.run()
    for number in range(4):
        assert made.answer(str(number)).new_ids == expected(number % 2 + 1, PROMPT[:6], 20)
