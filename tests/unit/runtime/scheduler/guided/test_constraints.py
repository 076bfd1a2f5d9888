"""Constrained requests: the grammar queue, masks, jump-forward, dead ends."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from runtime.grammar.base import Matcher
from runtime.grammar.manager import GrammarManager
from runtime.plan import TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.guided.masks import full, is_empty, without
from tests.unit.runtime.scheduler.fake import START, draw, follow, logprob


def regex(spec: str) -> Constraint:
    return Constraint("regex", spec)


def ids_of(mask: TokenMask) -> list[int]:
    return [
        word * 32 + bit for word, value in enumerate(mask.bits) for bit in range(32) if int(value) >> bit & 1
    ]


def test_everybody_else_goes_on_while_a_grammar_is_compiled(bench: Any, toy_grammars: Any) -> None:
    grammars = toy_grammars(ready=False)
    sim = bench(600, grammar=grammars)
    sim.add("waits", [1], constraint=regex("yes|no"), max_new_tokens=8)
    sim.add("goes on", [2], max_new_tokens=3, ignore_eos=True)
    for _ in range(5):
        sim.tick()
    assert list(sim.news) == ["goes on"]
    assert (sim.scheduler.busy, sim.scheduler.plan(), sim.scheduler.state()["compiling"]) == (True, None, 1)
    grammars.release()
    assert sim.run().text("waits") in (b"yes", b"no")
    assert sim.answer("waits").finish.type == "stop"


def test_a_bad_grammar_is_that_request_s_error(bench: Any, toy_grammars: Any) -> None:
    sim = bench(600, grammar=toy_grammars())
    sim.add("bad", [1], constraint=regex("!"), max_new_tokens=8)
    sim.add("good", [1], constraint=regex("yes"), max_new_tokens=8)
    sim.run()
    assert sim.answer("bad").finish.error["code"] == "bad_constraint"
    assert sim.text("good") == b"yes"


def test_a_queued_grammar_can_be_aborted_and_can_be_late(bench: Any, toy_grammars: Any) -> None:
    now = 0.0
    grammars = toy_grammars(ready=False)
    sim = bench(600, grammar=grammars, clock=lambda: now)
    sim.add("aborted", [1], constraint=regex("a"))
    sim.add("late", [1], constraint=regex("b"), time_left_s=5.0)
    sim.scheduler.abort("aborted")
    now = 6.0
    sim.tick()
    assert sim.answer("aborted").finish.error["code"] == "aborted"
    assert sim.answer("late").finish.error["code"] == "deadline_exceeded"
    assert not sim.scheduler.busy
    grammars.release()
    sim.tick()


def test_without_a_backend_constraints_are_refused(bench: Any) -> None:
    sim = bench(600, grammar=None)
    sim.add("a", [1], constraint=regex("a"))
    assert sim.run().answer("a").finish.error["code"] == "unsupported_constraint"


def test_forced_text_is_jumped(bench: Any, toy_grammars: Any) -> None:
    """One decision (x or y) in a text of three words."""
    spec = "the first\nx in the end|the first\ny in the end"
    texts = spec.encode().split(b"|")
    outcomes = {}
    for jump in (True, False):
        sim = bench(600, grammar=toy_grammars(), jump_forward=jump)
        for number in range(12):
            sim.add(str(number), [number], constraint=regex(spec), max_new_tokens=60)
        sim.run()
        for number in range(12):
            answer = sim.answer(str(number))
            assert sim.text(str(number)) in texts
            assert answer.finish.type == "stop"
            assert (
                answer.completion_tokens == len(answer.new_ids) == answer.jumped_tokens + answer.decode_steps
            )
        outcomes[jump] = sum(sim.answer(str(n)).decode_steps for n in range(12))
        assert (sim.scheduler.state()["jumped"] > 0) == jump
        sim.empty()
    assert outcomes[True] * 3 < outcomes[False]


def test_a_request_may_decline_to_jump(bench: Any, toy_grammars: Any) -> None:
    sim = bench(600, grammar=toy_grammars())
    sim.add("a", [1], constraint=regex("the first"), max_new_tokens=60, jump_forward=False)
    answer = sim.run().answer("a")
    assert answer.jumped_tokens == 0
    assert sim.text("a") == b"the first"


def test_wholly_forced_text_needs_no_step(bench: Any, toy_grammars: Any) -> None:
    sim = bench(600, grammar=toy_grammars())
    sim.add("a", [1], constraint=regex("the"), max_new_tokens=60)
    (output,) = sim.scheduler.drain()
    assert (sim.runner.steps, output.finish.type, output.decode_steps) == (0, "stop", 0)


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_jump_stays_within_max_new_tokens(
    bench: Any, toy_grammars: Any, limit: int, logprobs: bool
) -> None:
    sim = bench(600, grammar=toy_grammars())
    spec = "the x in ab|the y in ab"
    sim.add("a", [1], constraint=regex(spec), max_new_tokens=limit, return_logprob=logprobs)
    answer = sim.run().answer("a")
    assert len(answer.new_ids) <= limit
    text = sim.text("a")
    assert any(whole.startswith(text) for whole in spec.encode().split(b"|"))
    assert answer.finish.type == ("length" if len(answer.new_ids) == limit else "stop")
    assert len(answer.output_logprobs) == len(answer.new_ids) * logprobs


def test_a_stop_string_in_jumped_text_cuts_at_its_token(bench: Any, toy_grammars: Any) -> None:
    sim = bench(600, grammar=toy_grammars())
    sim.add("a", [1], constraint=regex("th ab\nzz|th ab\ner"), max_new_tokens=60, stop=("b",))
    answer = sim.run().answer("a")
    assert (answer.finish.matched, sim.text("a")) == ("b", b"th ab")


@pytest.mark.parametrize("page", [1, 4])
def test_a_healed_token_is_seen_once(bench: Any, toy_grammars: Any, page: int) -> None:
    """`t` was sampled, `the` stands there now: no stop string is found across the two, and it has its
    score."""
    sim = bench(800, grammar=toy_grammars(), page_size=page)
    prompts = [[4, 5, number, 6] for number in range(20)]
    for number, prompt in enumerate(prompts):
        fields = {"max_new_tokens": 30, "stop": ("tt", "tht", "xx", "xyx"), "return_logprob": True}
        sim.add(str(number), prompt, constraint=regex("the\nz|xyz\nz"), **fields)
    sim.run()
    first = toy_grammars().submit(regex("the\nz|xyz\nz")).result(timeout=0).mask()
    healed = 0
    for number, prompt in enumerate(prompts):
        answer = sim.answer(str(number))
        assert (answer.finish.type, answer.finish.matched) == ("stop", None)
        assert sim.text(str(number)) in (b"the\nz", b"xyz\nz")
        values, history = [], follow(START, prompt)
        for token in answer.new_ids:
            values.append(logprob(history, token))
            history = follow(history, (token,))
        assert answer.output_logprobs == values
        healed += draw(follow(START, prompt), len(sim.vocabulary), first) != answer.new_ids[0]
    assert healed > 3
    sim.empty()


@pytest.mark.parametrize("chunk", [1, 3, 2048])
@pytest.mark.parametrize("page", [1, 4])
def test_every_token_has_its_logprob_jumped_or_healed(
    bench: Any, toy_grammars: Any, chunk: int, page: int
) -> None:
    """Whatever was sampled, forced or healed: the value is that of the token after the tokens before it."""
    spec = "|".join(f"the {word} abc{word} in" for word in ("x", "xy", "ing", "there", "er ab"))
    sim = bench(800, grammar=toy_grammars(), chunked_prefill_size=chunk, page_size=page)
    for number in range(16):
        sim.add(
            str(number), [1, 2, 3, number], constraint=regex(spec), max_new_tokens=60, return_logprob=True,
            stream=number % 2 == 0, top_logprobs_num=2,
        )  # fmt: skip
    sim.run()
    jumped = 0
    for number in range(16):
        for part in sim.news[str(number)]:
            assert len(part.output_logprobs) == len(part.new_ids)
        answer = sim.answer(str(number))
        history = follow(START, [1, 2, 3, number])
        for token, value in zip(answer.new_ids, answer.output_logprobs, strict=True):
            assert value == logprob(history, token)
            history = follow(history, (token,))
        assert len(answer.output_top_logprobs) == len(answer.new_ids) == len(answer.output_origins)
        assert answer.output_origins.count("forced") == answer.jumped_tokens
        assert answer.output_origins.count("sampled") == answer.decode_steps
        jumped += answer.jumped_tokens
    assert jumped > 0
    sim.empty()


class Stuck(Matcher):
    """Allows one token, then nothing, or fails."""

    def __init__(self, how: str) -> None:
        self.how, self.taken = how, 0

    def advance(self, token: int) -> bool:
        self.taken += 1
        return self.how != "refuses"

    def mask(self) -> TokenMask:
        if self.how == "raises" and self.taken:
            raise RuntimeError("matcher defect")
        bits = np.zeros(2, dtype=np.uint32)
        if not (self.taken and self.how.startswith("empty")):
            bits[0] = 0b110
        return TokenMask(
            bits, np.flatnonzero([0, 1, 1][: 3 if bits[0] else 0]) if self.how == "empty list" else None
        )

    def advance_bytes(self, data: bytes) -> bool:
        return False

    def forced_bytes(self) -> bytes:
        return b""

    def may_stop(self) -> bool:
        return False

    def is_terminated(self) -> bool:
        return False

    def rollback(self, steps: int) -> None: ...

    def copy(self) -> Matcher:
        return Stuck(self.how)


@pytest.mark.parametrize(
    ("how", "code", "word"),
    [
        ("empty bits", "bad_constraint", "no token of the vocabulary can follow"),
        ("empty list", "bad_constraint", "no token of the vocabulary can follow"),
        ("raises", "internal_fault", "matcher defect"),
        ("refuses", "internal_fault", "against its grammar's mask"),
    ],
)
def test_a_dead_end_is_one_request_s_error(bench: Any, how: str, code: str, word: str) -> None:
    class Backend:
        def submit(self, constraint: Constraint) -> Any:
            future: Future[Matcher] = Future()
            future.set_result(Stuck(how))
            return future

    sim = bench(600, grammar=Backend())
    sim.add("stuck", [1, 2], constraint=regex("x"), max_new_tokens=5)
    sim.add("fine", [3, 4], max_new_tokens=5, ignore_eos=True)
    sim.run()
    error = sim.answer("stuck").finish.error
    assert error["code"] == code
    assert word in error["message"]
    assert len(sim.answer("fine").new_ids) == 5
    sim.empty()


def test_min_new_tokens_and_a_grammar_that_could_stop(bench: Any, toy_grammars: Any) -> None:
    spec = "in|inging|ingingingingin"
    for number in range(20):
        sim = bench(600, grammar=toy_grammars())
        sim.add("a", [number], constraint=regex(spec), max_new_tokens=60, min_new_tokens=4)
        answer = sim.run().answer("a")
        assert 0 not in answer.new_ids[:4]
        assert sim.text("a") in spec.encode().split(b"|")


def test_where_min_new_tokens_leaves_nothing_the_grammar_wins(bench: Any, toy_grammars: Any) -> None:
    sim = bench(600, grammar=toy_grammars())
    every = tuple(range(len(sim.vocabulary)))
    sim.add("a", [1], constraint=regex("ab|ba"), max_new_tokens=9, min_new_tokens=5, stop_token_ids=every)
    answer = sim.run().answer("a")
    assert (answer.finish.type, answer.finish.matched) == ("stop", answer.new_ids[-1])


def test_masks() -> None:
    assert ids_of(full(40)) == list(range(40))
    assert ids_of(full(64)) == list(range(64))
    every = full(70)
    some = without(every, [0, 33, 69, 1000])
    assert ids_of(some) == [n for n in range(70) if n not in (0, 33, 69)]
    assert ids_of(every) == list(range(70)), "the given mask is shared: it must not change"
    listed = without(TokenMask(full(8).bits, np.array([1, 3, 5])), [3])
    assert (list(listed.allowed), is_empty(listed)) == ([1, 5], False)
    assert is_empty(without(full(5), range(5)))


def test_with_the_real_grammars(bench: Any, vocabulary: Vocabulary) -> None:
    """Regular expressions through the real manager: every answer matches, jumped or not, shared or not."""
    pattern = "xzname  z(ab|abc|the)+z zokz (yes|no)y"
    manager = GrammarManager(vocabulary)
    sim = bench(2000, grammar=manager, chunked_prefill_size=16)
    try:
        for number in range(16):
            jump = number % 4 > 0
            fields = {"max_new_tokens": 200, "return_logprob": True, "jump_forward": jump}
            sim.add(str(number), [1, 2, number], constraint=regex(pattern), **fields)
        ends = time.monotonic() + 100
        while sim.scheduler.busy:
            sim.tick()
            assert time.monotonic() < ends
            if not sim.scheduler.running:
                time.sleep(0.001)  # a grammar is being compiled
        for number in range(16):
            answer = sim.answer(str(number))
            text = sim.text(str(number)).decode()
            assert answer.finish.type == "stop" or len(answer.new_ids) == 200
            assert answer.finish.type == "length" or re.fullmatch(pattern, text)
            assert None not in answer.output_logprobs
            assert (answer.jumped_tokens > 0) == (number % 4 > 0)
    finally:
        manager.close()
    sim.empty()
