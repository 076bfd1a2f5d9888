"""Two engines with a link between them give what one gives alone; what goes wrong ends those that it
concerns, and leaves nothing behind. On fake runners, whose next token depends on the whole history of a
sequence, and which refuse slots that hold another one's."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.disagg.transfer.kv_manager import FAKE_BOOTSTRAP_HOST
from runtime.protocol.constraint import Constraint
from runtime.protocol.io_struct import Bootstrap
from runtime.scheduler.stage import Stage
from tests.unit.runtime.disagg.simulated import Pair
from tests.unit.runtime.scheduler.conftest import VOCABULARY, Bench, ToyGrammars


def grammars() -> ToyGrammars:
    return ToyGrammars(VOCABULARY)


def drawn(dice: random.Random, heads: list[list[int]]) -> tuple[list[int], dict[str, Any]]:
    """A prompt and what is asked of it."""
    prompt = dice.choice(heads)[: dice.randrange(40)] + [
        dice.randrange(1, 40) for _ in range(dice.randrange(1, 30))
    ]
    fields: dict[str, Any] = {
        "max_new_tokens": dice.choice([0, 1, 2, 5, 20]),
        "ignore_eos": dice.random() < 0.5,
    }
    if dice.random() < 0.3:
        fields["constraint"] = Constraint(
            "regex", dice.choice(["the st|ab and in", "the end|zz", "a|b", "the|the st"])
        )
        fields["max_new_tokens"] = max(12, fields["max_new_tokens"])
        fields["jump_forward"] = dice.random() < 0.7
    if dice.random() < 0.3:
        fields |= {"return_logprob": True, "top_logprobs_num": dice.randrange(3)}
        if dice.random() < 0.5:
            fields["token_ids_logprob"] = [3, 5]
    if dice.random() < 0.2:
        fields["stop"] = ("th", "b")
    if dice.random() < 0.5:
        fields["stream"] = True
    return prompt, fields


def same(alone: Bench, pair: Pair, rid: str) -> None:
    ids = [
        [value for part in bench.news[rid] for value in part.output_token_ids_logprobs]
        for bench in (alone, pair.decode.bench)
    ]
    one, two = alone.answer(rid), pair.decode.bench.answer(rid)
    assert two.finish is not None
    assert two.finish.error is None
    for name in ("new_ids", "finish", "output_logprobs", "output_top_logprobs"):
        assert getattr(one, name) == getattr(two, name), (rid, name)
    assert ids[0] == ids[1]
    assert two.input_logprobs is None


@pytest.mark.parametrize(("page", "overlap"), [(1, False), (1, True), (4, True), (16, False)])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_as_alone(seed: int, page: int, overlap: bool) -> None:
    dice = random.Random(seed)
    heads = [[dice.randrange(1, 40) for _ in range(40)] for _ in range(3)]
    config = {"page_size": page, "overlap": overlap, "chunked_prefill_size": dice.choice([7, 32, 512])}
    pair = Pair(dice, grammars, **config)
    alone = Bench(dict(config), 512, grammars(), lambda: 0.0, Stage)
    names = [f"{number}" for number in range(30)]
    for number, rid in enumerate(names):
        prompt, fields = drawn(dice, heads)
        alone.add(rid, prompt, **fields)
        pair.add(rid, prompt, number + 1, **fields)
        for _ in range(dice.randrange(6)):
            pair.step()
    alone.run()
    pair.run()
    for rid in names:
        same(alone, pair, rid)
        assert pair.prefill.bench.answer(rid).finish.type != "abort"
    pair.prefill.full()
    pair.decode.full()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_small_pools_and_few_rows_only_make_them_wait(seed: int, overlap: bool) -> None:
    """Retraction on the decode side, and prompts that find no room for a while."""
    dice = random.Random(seed)
    heads = [[dice.randrange(1, 40) for _ in range(40)]]
    config = {"page_size": dice.choice([1, 4]), "overlap": overlap, "chunked_prefill_size": 16}
    pair = Pair(dice, grammars, slots=(160, 160), rows=(2, 3), reserved=0, **config)
    alone = Bench(dict(config), 512, grammars(), lambda: 0.0, Stage)
    names = [f"{number}" for number in range(25)]
    for number, rid in enumerate(names):
        prompt, fields = drawn(dice, heads)
        fields |= {"max_new_tokens": dice.choice([20, 40, 60]), "ignore_eos": True}
        alone.add(rid, prompt, **fields)
        pair.add(rid, prompt, number + 1, **fields)
    alone.run()
    pair.run()
    for rid in names:
        same(alone, pair, rid)
    state = pair.decode.bench.scheduler.state()
    assert state["retractions"] == state["num_offloaded_requests_total"] > 0
    assert state["num_restored_requests_total"] == state["num_offloaded_requests_total"]
    pair.prefill.full()
    pair.decode.full()


def test_a_prompt_that_finds_no_room_is_let_in_later() -> None:
    pair = Pair(random.Random(0), grammars, slots=(512, 64), reserved=4)
    decode, link = pair.decode.bench.scheduler, pair.link
    for number, length in enumerate([40, 30, 4]):
        prompt = [number + 1] * length
        pair.add(f"{number}", prompt, number + 1, max_new_tokens=20, ignore_eos=True)
    while not decode.running:
        pair.step()
        if 3 in link.receivers and link.receivers[1].runs is not None:
            assert link.receivers[2].runs is None
            assert link.receivers[3].runs is None, "nobody overtakes: the one before would never find room"
    assert decode.state()["num_decode_prealloc_queue_reqs"] == 2
    pair.run()
    assert [len(pair.decode.bench.answer(f"{number}").new_ids) for number in range(3)] == [20, 20, 20]
    pair.decode.full()


@pytest.mark.parametrize("page", [1, 16])
def test_a_prefix_of_several_requests_moves_once(page: int) -> None:
    pair = Pair(random.Random(0), grammars, page_size=page)
    alone = Bench({}, 512, grammars(), lambda: 0.0, Stage)
    for number in range(4):
        prompt = [*range(1, 41), *range(1, 41), number + 1]
        alone.add(f"{number}", prompt, max_new_tokens=9, ignore_eos=True)
        pair.add(f"{number}", prompt, number + 1, max_new_tokens=9, ignore_eos=True)
    pair.run()
    alone.run()
    for number in range(4):
        same(alone, pair, f"{number}")
    moved = sorted(81 - receiver.start for receiver in pair.link.receivers.values())
    assert moved == [1, 1, 1, 81]
    pair.decode.full()


def test_a_refused_request_ends_on_the_other_side_too() -> None:
    pair = Pair(random.Random(0), grammars, slots=(40, 512))
    pair.add("long", [1] * 60, 1, max_new_tokens=4)
    pair.run()
    assert pair.prefill.bench.answer("long").finish.error["code"] == "prompt_too_long"
    error = pair.decode.bench.answer("long").finish.error
    assert "refused by the prefill engine" in error["message"]
    pair.decode.full()


FAULTS = ("cut", "corrupt", "kill prefill", "kill decode", "late metadata", "abort", "damage", "pause")


@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random(seed: int) -> None:
    """Each request gets the right answer, or an error that says why; then all is free, and the pair works."""
    dice = random.Random(seed)
    heads = [[dice.randrange(1, 40) for _ in range(40)] for _ in range(3)]
    config = {
        "page_size": dice.choice([1, 4, 16]), "overlap": dice.random() < 0.5,
        "chunked_prefill_size": dice.choice([7, 32]),
    }  # fmt: skip
    pair = Pair(dice, grammars, slots=(200, 200), rows=(3, 3), reserved=4, **config)
    alone = Bench(dict(config), 512, grammars(), lambda: 0.0, Stage)
    right = wrong = room = 0
    pair.link.late_metadata = dice
    for _ in range(12):
        names = []
        for _ in range(dice.randrange(3, 10)):
            room += 1
            rid = f"{room}"
            prompt, fields = drawn(dice, heads)
            fields["max_new_tokens"] = max(12, fields["max_new_tokens"])
            names.append(rid)
            alone.add(rid, prompt, **fields)
            pair.add(rid, prompt, room, **fields)
        for _ in range(dice.randrange(60)):
            pair.step()
        fail(pair, dice, names)
        pair.run()
        alone.run()
        for rid in names:
            parts = pair.decode.bench.news.get(rid, [])
            if rid in pair.lost and (not parts or parts[-1].finish is None):
                wrong += 1
                continue
            finish = parts[-1].finish
            assert finish is not None
            if finish.type == "abort":
                assert finish.error is not None
                assert finish.error["message"]
                wrong += 1
            else:
                right += 1
                same(alone, pair, rid)
        pair.link.corrupt = 0
        pair.prefill.full()
        pair.decode.full()
    assert right
    assert wrong
    pair.add("again", [1, 2, 3], 10_000, max_new_tokens=9, ignore_eos=True)
    alone.add("again", [1, 2, 3], max_new_tokens=9, ignore_eos=True)
    pair.run()
    alone.run()
    same(alone, pair, "again")


def fail(pair: Pair, dice: random.Random, names: list[str]) -> None:
    match dice.choice(FAULTS):
        case "cut":
            pair.link.cut()
        case "corrupt":
            pair.link.corrupt = dice.randrange(1, 4)
        case "kill prefill":
            pair.kill("prefill")
        case "kill decode":
            pair.kill("decode")
        case "abort":
            side = dice.choice([pair.prefill, pair.decode])
            for rid in dice.sample(names, dice.randrange(1, len(names) + 1)):
                side.bench.scheduler.abort(rid)
        case "pause":
            for side in (pair.prefill, pair.decode):
                side.bench.scheduler.pause(dice.choice(["in_place", "retract"]))
            for _ in range(dice.randrange(30)):
                pair.step()
            for side in (pair.prefill, pair.decode):
                side.bench.scheduler.resume()
        case "damage":
            side = dice.choice([pair.prefill, pair.decode])
            side.bench.scheduler._batch.damaged = True


def test_who_has_no_other_side_gets_the_fake_transfer() -> None:
    """A health check of one side alone; what it leaves in the pool is of no use to anybody."""
    pair = Pair(random.Random(0), grammars)
    for side in (pair.prefill, pair.decode):
        bootstrap = Bootstrap(FAKE_BOOTSTRAP_HOST, 1, 7)
        side.bench.add("w", [1, 2, 3], bootstrap=bootstrap, max_new_tokens=1, ignore_eos=True)
        side.bench.run()
        assert side.bench.answer("w").finish.type == "length"
        assert side.bench.answer("w").new_ids
    assert pair.decode.bench.scheduler.manager.cache.probe([1, 2, 3]) == 0
    pair.prefill.full()
    pair.decode.full()


def test_a_request_without_a_room_is_answered_by_one_alone() -> None:
    pair = Pair(random.Random(0), grammars)
    alone = Bench({}, 512, grammars(), lambda: 0.0, Stage)
    for bench in (alone, pair.prefill.bench, pair.decode.bench):
        bench.add("r", [1, 2, 3], max_new_tokens=9, ignore_eos=True)
        bench.run()
    assert alone.answer("r").new_ids == pair.prefill.bench.answer("r").new_ids
    assert alone.answer("r").new_ids == pair.decode.bench.answer("r").new_ids


def test_decode_connects_to_no_host_that_only_a_request_names() -> None:
    pair = Pair(random.Random(0), grammars)
    bench = pair.decode.bench
    for room, host in enumerate(["10.255.1.9", "0.0.0.0", "example.com", "224.0.0.1", "[2001:db8::1]"]):
        bench.add(host, [1, 2], bootstrap=Bootstrap(host, 1, room + 1), max_new_tokens=1)
        bench.tick()
        error = bench.answer(host).finish.error
        assert error["code"] == "bad_request"
        assert "allowed" in error["message"]
    assert not pair.link.receivers
    for room, host in enumerate(["127.0.0.1", "localhost", "[::1]", "127.1.2.3"]):
        bench.add(host, [1, 2], bootstrap=Bootstrap(host, 1, room + 1), max_new_tokens=1)
    assert len(pair.link.receivers) == 4
    bench.scheduler.abort(None)
    pair.decode.full()
