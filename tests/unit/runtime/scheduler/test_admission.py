"""PrefillAdder: exact sums."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache.manager import CacheManager
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.admission import NewTokenRatio, PrefillAdder, Verdict, reclaim
from runtime.scheduler.requests.request import Request
from tests.exploring import tries


@pytest.fixture
def make(vocabulary: Vocabulary) -> Any:
    count = 0

    def request(prompt: list[int], new: int, **fields: Any) -> Request:
        nonlocal count
        count += 1
        params = SamplingParams(max_new_tokens=new)
        source = TokenizedGenerateReqInput(rid=str(count), input_ids=prompt, sampling_params=params, **fields)
        return Request(source, count, vocabulary, 0.0, 0)

    return request


def admit(
    manager: CacheManager, running: list[Request], requests: list[Request], ratio: float, limit: int
) -> Any:
    adder = PrefillAdder(manager, running, ratio, limit)
    verdicts = []
    for request in requests:
        verdicts.append(adder.add(request))
        if verdicts[-1] is Verdict.ADMITTED:
            running.append(request)
    manager.check([request.lease for request in running if request.lease])
    return adder, verdicts


def test_the_budget_of_slots(make: Any) -> None:
    manager = CacheManager(200)
    running: list[Request] = []
    adder, verdicts = admit(manager, running, [make([1] * 50, 40)], 0.5, 1000)
    assert verdicts == [Verdict.ADMITTED]
    assert adder.slots == 200 - 50 - 40, "a new one is counted in full"
    assert manager.available == 200 - 50 - 32, "with a reserve for its tail"
    adder = PrefillAdder(manager, running, 0.5, 1000)
    assert adder.slots == 200 - 50 - 20, "later by the ratio"
    _, verdicts = admit(
        manager, running, [make([2] * 100, 30), make([3] * 100, 31), make([4] * 100, 30)], 0.5, 1000
    )
    assert verdicts == [Verdict.ADMITTED, Verdict.FULL, Verdict.FULL]
    assert reclaim(manager, running) > 0
    assert manager.available == 200 - 50 - 100


def test_whoever_is_alone_is_let_in(make: Any) -> None:
    manager = CacheManager(100)
    running: list[Request] = []
    _, verdicts = admit(manager, running, [make([1] * 60, 40), make([2], 1)], 1.0, 10)
    assert verdicts == [Verdict.ADMITTED, Verdict.FULL]


def test_the_budget_of_prompt_tokens(make: Any) -> None:
    manager = CacheManager(1000)
    running: list[Request] = []
    requests = [make([number] * 20, 1) for number in range(4)]
    adder, verdicts = admit(manager, running, requests, 1.0, 45)
    assert verdicts == [Verdict.ADMITTED, Verdict.ADMITTED, Verdict.FULL, Verdict.FULL]
    assert adder.prompts == 5


def test_a_refused_one_holds_nothing(make: Any) -> None:
    manager = CacheManager(100)
    stem = list(range(20))
    first = make(stem, 1)
    running: list[Request] = []
    admit(manager, running, [first], 1.0, 1000)
    first.lease.take(20)
    first.lease.settle()
    manager.close(first.lease, first.tokens, 20)
    other = make([7] * 60, 40)
    running = []
    admit(manager, running, [other], 1.0, 1000)
    refused = make([*stem, 1], 50)
    _, verdicts = admit(manager, running, [refused], 1.0, 1000)
    assert (verdicts, refused.lease) == ([Verdict.FULL], None)
    assert manager.cache.protected == 0


def test_siblings_wait_for_what_is_being_computed(make: Any) -> None:
    manager = CacheManager(1000)
    stem = [n % 9 for n in range(64)]
    requests = [
        make(stem, 1),
        make([*stem, 1], 1),
        make([*stem[:31], 8, *stem], 1),
        make(stem[:32], 1),
        make([*stem, 1], 1, extra_key="other"),
        make([*stem, 2], 1, logprob_start_len=10),
    ]
    _, verdicts = admit(manager, [], requests, 1.0, 10_000)
    assert verdicts == [
        Verdict.ADMITTED,
        Verdict.LATER,
        Verdict.ADMITTED,  # 31 shared tokens are not worth it
        Verdict.ADMITTED,  # it could use 31 at most
        Verdict.ADMITTED,  # another namespace
        Verdict.ADMITTED,  # it must compute from position 9 on anyhow
    ]


def test_who_ignores_the_end_is_counted_exactly(make: Any) -> None:
    """Two with 10 and 40 tokens to come, each with 20 slots: when the first ends, 30 come back in time."""

    def endless(prompt: int, new: int) -> Request:
        one = make([3] * prompt, new)
        one.params = msgspec.structs.replace(one.params, ignore_eos=True)
        return one

    for slots, room in ((100, 10), (99, 9), (111, 21)):
        manager = CacheManager(slots)
        running: list[Request] = []
        requests = [endless(20, 10), endless(20, 40)]
        admit(manager, running, requests, 0.01, 1000)
        adder = PrefillAdder(manager, running, 0.01, 1000)
        assert adder.slots == slots - 40 - 50 == room, "as a sum"
    # 100 slots, a third with a prompt of 10. As a sum it never fits. Step by step: 50 are free; after 10
    # steps the first ends and gives its 20 prompt slots back, the 30 that three have grown by are used; so
    # the other two can go on to 35 each. The longer one gets what the shorter leaves.
    for second, third, verdict in (
        (35, 35, Verdict.ADMITTED),
        (35, 80, Verdict.ADMITTED),
        (36, 36, Verdict.FULL),
        (36, 35, Verdict.ADMITTED),
        (36, 9, Verdict.ADMITTED),
    ):
        running = []
        requests = [endless(20, 10), endless(20, second), endless(10, third)]
        _, verdicts = admit(CacheManager(100), running, requests, 0.01, 1000)
        assert verdicts == [Verdict.ADMITTED, Verdict.ADMITTED, verdict], (second, third)


@given(
    slots=st.integers(40, 200),
    page=st.sampled_from([1, 4]),
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=2, max_size=14),
    gap=st.integers(0, 3),
)
@settings(max_examples=tries(60), deadline=None)
def test_who_ignores_the_end_is_never_retracted(
    make_bench: Any, slots: int, page: int, sizes: list[tuple[int, int]], gap: int
) -> None:
    sim = make_bench(slots, page_size=page, conservativeness=0.01)
    for number, (prompt, new) in enumerate(sizes):
        if prompt + new <= slots // page * page:
            sim.add(str(number), [number] * prompt, max_new_tokens=new, ignore_eos=True)
        for _ in range(gap):
            sim.tick()
    sim.run()
    assert sim.scheduler.state()["retractions"] == 0
    sim.empty()


def test_without_a_shared_cache_nobody_waits(make: Any) -> None:
    manager = CacheManager(1000, radix=False)
    _, verdicts = admit(manager, [], [make([1] * 64, 1), make([1] * 64, 1)], 1.0, 10_000)
    assert verdicts == [Verdict.ADMITTED, Verdict.ADMITTED]


def test_the_ratio(make: Any) -> None:
    ratio = NewTokenRatio()
    assert ratio.value == pytest.approx(0.7)
    for _ in range(1000):
        ratio.decay()
    assert ratio.value == pytest.approx(0.098)
    grown = [make([1], 100), make([1], 100)]
    grown[0].tokens.extend([1] * 60)
    ratio.retracted(grown)
    assert ratio.value == pytest.approx((60 + 20 + 20) / 200)
    ratio.retracted([make([1], 10)])
    assert ratio.value == 1.0
