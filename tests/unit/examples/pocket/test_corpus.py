"""The generated corpus: disjoint splits, consistent gold answers, determinism. No model is loaded."""

from __future__ import annotations

import json
import random
import re
from itertools import islice

import pytest

from examples.pocket.corpus import conversation, documents
from examples.pocket.items import TARGETS, correct, items
from examples.pocket.tasks import HELD, TRAIN, Split, Turn, held, invented
from examples.pocket.tasks.numbers import arithmetic_group, pair_is_held, small_sum_group, worked
from examples.pocket.tasks.tools import TOOLS
from examples.pocket.tasks.unknown import UNKNOWN, unknown_group
from examples.pocket.world import ATTRIBUTES, PEOPLE, PLACES, world_names

SEEDS = range(12)


def _turns(split: Split, seed: int, count: int = 60) -> list[Turn]:
    rng = random.Random(seed)
    return [
        turn for index in range(count) for turn in conversation(rng, split, 3, tools=index % 3 == 0).turns
    ]


def test_the_world_is_unambiguous() -> None:
    values = [place.value(attribute) for place in PLACES for attribute in ATTRIBUTES]
    assert len(set(values)) == len(values)
    assert len({p.name for p in PLACES} | {p.name for p in PEOPLE}) == len(PLACES) + len(PEOPLE)
    assert {p.home for p in PEOPLE} <= {p.name for p in PLACES}


@pytest.mark.parametrize("seed", SEEDS)
def test_questions_of_the_splits_are_disjoint(seed: int) -> None:
    tasks = {"facts", "arithmetic", "sentiment", "topic", "extract", "think", "record", "summary"}
    tasks |= {"small_sums", "greeting", "identity"}
    train = {t.user for t in _turns(TRAIN, seed, 200) if t.task in tasks}
    fresh = {t.user for t in _turns(HELD, seed + 1, 200) if t.task in tasks}
    assert len(train) > 100
    assert len(fresh) > 100
    assert not train & fresh


@pytest.mark.parametrize("seed", SEEDS)
def test_names_of_the_splits_are_disjoint(seed: int) -> None:
    rng = random.Random(seed)
    train = {invented(rng, TRAIN, "person") for _ in range(500)}
    fresh = {invented(rng, HELD, "person") for _ in range(500)}
    assert not train & fresh
    assert not fresh & world_names()


@pytest.mark.parametrize("seed", SEEDS)
def test_no_held_out_pair_is_asked_in_training(seed: int) -> None:
    rng = random.Random(seed)
    for split in (TRAIN, HELD):
        for turn in arithmetic_group(rng, split, 200).turns:
            a, b = (int(n) for n in re.findall(r"\d+", turn.user)[:2])
            if re.search(r"\d from \d", turn.user):
                a, b = b, a
            op = "-" if re.search(r" - |\d-\d|minus|take|subtract", turn.user, re.IGNORECASE) else "+"
            if min(a, b) >= 10:
                assert pair_is_held(a, op, b) == (split == HELD)
            else:
                assert split == TRAIN


@pytest.mark.parametrize("split", [TRAIN, HELD])
@pytest.mark.parametrize("seed", SEEDS)
def test_gold_answers_are_consistent(split: Split, seed: int) -> None:
    for turn in _turns(split, seed):
        if turn.task in ("arithmetic", "small_sums", "think"):
            assert re.findall(r"\d+", turn.reply)[-1] == turn.final
            for line in re.split(r"\. ?|<think>|</think>", turn.reply):
                values = [eval_sum(part) for part in line.split(" = ")] if "=" in line else []
                assert len(set(values)) <= 1, line
        elif turn.task in ("extract", "record"):
            record = json.loads(turn.reply)
            assert json.dumps(record) == turn.reply
            if turn.task == "extract":
                assert all(str(value) in turn.user for value in record.values())
        elif turn.task == "tool_call":
            match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", turn.reply)
            assert match
            call = json.loads(match[1])
            required = TOOLS[call["name"]]["function"]["parameters"]["required"]
            assert list(call["arguments"]) == required
            assert all(str(value).lower() in turn.user.lower() for value in call["arguments"].values())
        elif turn.options:
            assert turn.reply in turn.options
        assert turn.reply.strip() == turn.reply != ""


def eval_sum(text: str) -> int:
    """The value of `a`, `a + b` or `a - b`."""
    parts = text.split()
    if len(parts) == 1:
        return int(parts[0])
    return int(parts[0]) + (1 if parts[1] == "+" else -1) * int(parts[2])


def test_worked_sums() -> None:
    assert worked(47, "+", 38) == "47 + 38 = 77 + 8 = 85"
    assert worked(83, "-", 27) == "83 - 27 = 63 - 7 = 56"
    assert worked(83, "-", 20) == "83 - 20 = 63"
    assert worked(83, "+", 9) == "83 + 9 = 92"


@pytest.mark.parametrize("split", [TRAIN, HELD])
def test_small_sums_have_a_one_digit_number_and_no_result_below_zero(split: Split) -> None:
    rng = random.Random(7)
    turns = [turn for _ in range(400) for turn in small_sum_group(rng, split).turns if "=" in turn.reply]
    sums = [tuple(int(n) for n in re.findall(r"\d+", turn.reply)) for turn in turns]
    assert all(min(a, b) <= 9 and result >= 0 for a, b, *_, result in sums)
    assert len({row[:2] for row in sums if max(row[:2]) <= 9}) > 40
    assert {"+", "-"} == {op for turn in turns for op in "+-" if op in turn.reply}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("split", [TRAIN, HELD])
def test_what_is_unknown_is_never_in_the_world_and_all_else_is_never_unknown(split: Split, seed: int) -> None:
    rng = random.Random(seed)
    names = {place.name for place in PLACES} | {person.name for person in PEOPLE}
    for _ in range(300):
        for turn in unknown_group(rng, split).turns:
            named = any(re.search(rf"\b{re.escape(name)}\b", turn.user) for name in names)
            assert (turn.reply == UNKNOWN) == (turn.task == "unknown")
            assert named == (turn.task != "unknown"), turn.user


def test_the_real_names_of_the_splits_are_disjoint() -> None:
    rng = random.Random(2)
    train, fresh = (
        {turn.user for _ in range(3000) for turn in unknown_group(rng, split).turns if turn.task == "unknown"}
        for split in (TRAIN, HELD)
    )
    assert any("France" in text for text in train)
    assert any("Japan" in text for text in fresh)
    assert not any("France" in text or "Paris" in text for text in fresh)
    assert not any("Japan" in text or "Zurich" in text for text in train)


def test_tool_conversations_call_only_listed_tools() -> None:
    rng = random.Random(3)
    for _ in range(100):
        made = conversation(rng, HELD, 4, tools=True)
        listed = {tool["function"]["name"] for tool in made.tools}
        called = {json.loads(t.reply.split("\n")[1])["name"] for t in made.turns if t.task == "tool_call"}
        assert 1 <= len(listed) <= 3
        assert called <= listed


def test_everything_is_deterministic_by_seed() -> None:
    assert list(islice(documents(5), 50)) == list(islice(documents(5), 50))
    assert list(islice(documents(5), 50)) != list(islice(documents(6), 50))
    assert items(4, 3) == items(4, 3)
    assert held("name", "Tolmar", one_in=8) == held("name", "Tolmar", one_in=8)


def test_items_cover_every_task_and_accept_their_gold_answers() -> None:
    todo = items(11, 5)
    assert {item.task for item in todo} == set(TARGETS)
    assert all(correct(item, item.turn.reply) for item in todo)
    assert not any(correct(item, "nonsense") for item in todo)
    assert all(item.prompt.endswith("<|im_start|>assistant\n") for item in todo)
