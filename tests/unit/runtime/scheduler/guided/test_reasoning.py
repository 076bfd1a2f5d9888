"""Requests that reason first: the constraint asleep, budgets, what breaks off; and grammars that fail
midway."""

from __future__ import annotations

import re
import time
from typing import Any
from zlib import crc32

import pytest

from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.base import Matcher
from runtime.grammar.manager import GrammarManager
from runtime.grammar.reasoner import Reasoning, ReasoningEnd
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from runtime.protocol.io_struct import TokenizedGenerateReqInput, TokenOutput
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.loop import Loop
from runtime.scheduler.scheduler import Scheduler
from tests.unit.runtime.scheduler.fake import FakeRunner

EOS, THINK, END = 0, 1, 2
LETTERS = [bytes([code]) for code in range(256)]
TOKENS = (b"", b"", b"", *LETTERS, b"</", b"answer", b"ab", b"the", b"</answer>", b"</answer>y")
VOCABULARY = Vocabulary(TOKENS, frozenset({EOS, THINK, END}), frozenset({EOS}))
BY_ID = Reasoning(VOCABULARY, ReasoningEnd(ids=((END,),), inside=(THINK,)))
BY_TEXT = Reasoning(VOCABULARY, ReasoningEnd(texts=("</answer>",)))


def encode(text: str) -> list[int]:
    data, ids = text.encode(), []
    while data:
        size, token = max((len(b), i) for i, b in enumerate(TOKENS) if b and data.startswith(b))
        ids.append(token)
        data = data[size:]
    return ids


class Desk:
    """A scheduler with real grammars and real reasoning on a FakeRunner."""

    def __init__(
        self, reasoning: Reasoning | None, grammars: Any, *, overlap: bool = False, **options: Any
    ) -> None:
        self.grammars = grammars
        self.scheduler = Scheduler(
            SchedulerConfig(overlap=overlap, **options), slots=900, vocabulary=VOCABULARY, encode=encode,
            grammar=grammars, reasoning=reasoning,
        )  # fmt: skip
        self.loop = Loop(self.scheduler, FakeRunner(900, len(TOKENS)), overlap=overlap)
        self.news: dict[str, list[TokenOutput]] = {}

    def add(self, rid: str, spec: str | None = "yes|no", tokens: int = 40, **fields: Any) -> None:
        params = SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=1)
        self.scheduler.add(
            TokenizedGenerateReqInput(
                rid=rid, input_ids=[5 + crc32(rid.encode()) % 200, 6], sampling_params=params,
                constraint=None if spec is None else Constraint("regex", spec), **fields,
            )
        )  # fmt: skip

    def run(self) -> Desk:
        steps, ends = 0, time.monotonic() + 100
        while self.scheduler.busy or self.loop.in_flight:
            for output in self.loop.step():
                self.news.setdefault(output.rid, []).append(output)
            if self.scheduler.running:
                steps += 1
                assert steps < 20_000, "not done"
            else:  # a grammar is being compiled
                assert time.monotonic() < ends, "not done"
                time.sleep(0.001)
        return self

    def ids(self, rid: str) -> list[int]:
        return [token for news in self.news[rid] for token in news.new_ids]

    def text(self, rid: str) -> bytes:
        return b"".join(TOKENS[token] for token in self.ids(rid))

    def end(self, rid: str) -> Any:
        return self.news[rid][-1].finish


@pytest.fixture(scope="module")
def grammars():
    manager = GrammarManager(VOCABULARY)
    yield manager
    manager.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_constraint_holds_for_what_follows_the_reasoning(grammars, overlap, jump, stream):
    desk = Desk(BY_ID, grammars, overlap=overlap, jump_forward=jump)
    for number in range(12):
        desk.add(str(number), tokens=60, require_reasoning=True, max_thinking_tokens=number, stream=stream)
    desk.run()
    for number in range(12):
        ids = desk.ids(str(number))
        thoughts, answer = ids[: ids.index(END)], ids[ids.index(END) + 1 :]
        assert len(thoughts) <= number
        assert b"".join(TOKENS[token] for token in answer) in (b"yes", b"no")
        assert (desk.end(str(number)).type, desk.end(str(number)).unfinished) == ("stop", None)


def test_the_end_as_text_may_share_a_token_with_the_answer(grammars):
    desk = Desk(BY_TEXT, grammars)
    for number in range(30):
        desk.add(str(number), "y[a-z]*", tokens=60, require_reasoning=True, max_thinking_tokens=3)
    desk.run()
    for number in range(30):
        thought, _, answer = desk.text(str(number)).partition(b"</answer>")
        assert re.fullmatch(rb"y[a-z]*", answer), (thought, answer)
        assert not desk.end(str(number)).unfinished


def test_a_budget_without_a_constraint(grammars):
    desk = Desk(BY_ID, grammars)
    desk.add("bounded", None, tokens=30, require_reasoning=True, max_thinking_tokens=4)
    desk.add("free", None, tokens=30, require_reasoning=True)
    desk.run()
    assert END in desk.ids("bounded")[:5]
    assert desk.news["bounded"][-1].grammar is None


def test_thinking_off_is_the_constraint_from_the_first_token(grammars):
    desk = Desk(BY_ID, grammars)
    desk.add("off")
    desk.run()
    assert desk.text("off") in (b"yes", b"no")
    assert END not in desk.ids("off")


def test_reasoning_that_does_not_fit_is_a_named_end(grammars):
    """Too few tokens for the shortest end and answer: it ends with its length, and says in what."""
    desk = Desk(BY_ID, grammars)
    desk.add("short", "a{30}", tokens=5, require_reasoning=True)
    desk.add("cut", "a{30}", tokens=5)
    desk.run()
    assert (desk.end("short").type, desk.end("short").unfinished) == ("length", "reasoning")
    assert (desk.end("cut").type, desk.end("cut").unfinished) == ("length", "constraint")


def test_without_a_known_end_it_is_refused(grammars):
    desk = Desk(None, grammars)
    desk.add("a", require_reasoning=True)
    desk.add("b", None, require_reasoning=True, max_thinking_tokens=3)
    desk.run()
    assert [desk.end(rid).error["where"] for rid in "ab"] == ["require_reasoning"] * 2


def test_how_it_was_kept_is_told_with_the_end(grammars):
    desk = Desk(BY_ID, grammars)
    desk.add("a", "(yes|no){1,2}", require_reasoning=True, max_thinking_tokens=2)
    desk.run()
    desk.add("b", "(yes|no){1,2}")
    desk.run()
    first, again = desk.news["a"][-1].grammar, desk.news["b"][-1].grammar
    assert (first.backend, first.exact, first.cached) == ("outlines", True, False)
    assert first.compile_s > 0
    assert (again.cached, again.compile_s) == (True, first.compile_s)


# -- grammars that fail midway -------------------------------------------------------------------------------


class Failing(OutlinesGrammarBackend):
    """Its matchers raise in one verb, after `after` tokens."""

    def __init__(self, verb: str, after: int, error: BaseException) -> None:
        super().__init__(VOCABULARY)
        self.verb, self.after, self.error = verb, after, error

    def compile(self, constraint: Constraint) -> Matcher:
        inner = super().compile(constraint)
        return _Wrapped(inner, self, 0) if constraint.spec.startswith("(?:bad)?") else inner


class _Wrapped(Matcher):
    def __init__(self, inner: Matcher, how: Failing, taken: int) -> None:
        self.inner, self.how, self.taken, self.origin = inner, how, taken, inner.origin

    def _may_fail(self, verb: str) -> None:
        if verb == self.how.verb and self.taken >= self.how.after:
            raise self.how.error

    def advance(self, token: int) -> bool:
        self._may_fail("advance")
        self.taken += 1
        return self.inner.advance(token)

    def advance_bytes(self, data: bytes) -> bool:
        self._may_fail("advance")
        return self.inner.advance_bytes(data)

    def mask(self) -> Any:
        self._may_fail("mask")
        return self.inner.mask()

    def forced_bytes(self) -> bytes:
        self._may_fail("forced_bytes")
        return self.inner.forced_bytes()

    def may_stop(self) -> bool:
        return self.inner.may_stop()

    def is_terminated(self) -> bool:
        return self.inner.is_terminated()

    def rollback(self, steps: int) -> None:
        self.inner.rollback(steps)

    def copy(self) -> Matcher:
        return _Wrapped(self.inner.copy(), self.how, self.taken)


@pytest.mark.parametrize("verb", ["advance", "mask", "forced_bytes"])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("error", [BadConstraint("is too complex here"), ZeroDivisionError("oops")])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_matcher_that_fails_ends_its_request_alone(verb, after, error, overlap):
    manager = GrammarManager(VOCABULARY, Failing(verb, after, error))
    try:
        desk = Desk(BY_ID, manager, overlap=overlap)
        desk.add("fails", "(?:bad)?[a-z]{3}[a-z]*", tokens=30)
        desk.add("other", "[a-z]{9}", tokens=30)
        desk.add("free", None, tokens=8)
        desk.run()
        code = "bad_constraint" if isinstance(error, BadConstraint) else "internal_fault"
        assert (desk.end("fails").type, desk.end("fails").error["code"]) == ("abort", code)
        assert str(error) in desk.end("fails").error["message"]
        assert re.fullmatch(rb"[a-z]{9}", desk.text("other"))
        assert desk.end("free").type in ("stop", "length")
        desk.scheduler.check()
    finally:
        manager.close()


class Slow(Failing):
    """Its matchers take `seconds` of the CPU for every mask."""

    def __init__(self, seconds: float) -> None:
        super().__init__("none", 0, ZeroDivisionError())
        self.seconds = seconds

    def compile(self, constraint: Constraint) -> Matcher:
        inner = OutlinesGrammarBackend.compile(self, constraint)
        return _Burning(inner, self, 0) if constraint.spec.startswith("(?:bad)?") else inner


class _Burning(_Wrapped):
    def mask(self) -> Any:
        ends = time.thread_time() + self.how.seconds  # type: ignore[attr-defined]
        while time.thread_time() < ends:
            pass
        return self.inner.mask()

    def copy(self) -> Matcher:
        return _Burning(self.inner.copy(), self.how, self.taken)


def test_a_constraint_that_holds_up_all_others_is_given_up(monkeypatch):
    """By the time it takes the CPU, however small its grammar; others of the batch go on."""
    monkeypatch.setattr("runtime.scheduler.guided.masks.GRAMMAR_S", 0.4)  # the other's masks take 0.01 in all
    monkeypatch.setattr("runtime.scheduler.guided.masks.GRAMMAR_TOKEN_S", 0.001)
    manager = GrammarManager(VOCABULARY, Slow(0.1))
    try:
        desk = Desk(BY_ID, manager)
        desk.add("slow", "(?:bad)?[a-z]{200}", tokens=300)
        desk.add("other", "[a-z]{30}", tokens=60)
        desk.run()
        error = desk.end("slow").error
        assert (error["code"], error["where"]) == ("bad_constraint", "regex")
        assert "too complex to follow" in error["message"]
        assert re.fullmatch(rb"[a-z]{30}", desk.text("other"))
    finally:
        manager.close()


# -- the queue -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "gone"),
    [
        ({"rid": "job-1"}, {"job-1"}),
        ({"rid": "job-", "prefix": True}, {"job-1", "job-2"}),
        ({"rid": None}, {"job-1", "job-2", "other"}),
    ],
)
def test_who_waits_for_a_grammar_can_be_cancelled(toy_grammars, order, gone):
    held = toy_grammars(ready=False)
    desk = Desk(None, held)
    for rid in ("job-1", "job-2", "other"):
        desk.add(rid, "yes")
    rid = order.pop("rid")
    assert desk.scheduler.abort(rid, **order) == len(gone)
    told = {one.rid: one.finish.error["code"] for one in desk.scheduler.drain()}
    assert told == dict.fromkeys(gone, "aborted")
    assert desk.scheduler.state()["num_grammar_queue_reqs"] == 3 - len(gone)
    assert sum(future.cancelled() for future, _ in held.waiting) == len(gone)
