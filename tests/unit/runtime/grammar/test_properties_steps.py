"""Steps, steps back and copies in any order leave a matcher exactly where a fresh one comes by the steps that
are left: in every backend and kind, across the end of the reasoning, in tags, where checked values reject."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from runtime.grammar.base import Matcher
from runtime.grammar.reasoner import Reasoning, ReasoningEnd
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from tests.unit.runtime.grammar import drawn
from tests.unit.runtime.grammar.drawn import allowed
from tests.unit.runtime.grammar.drawn_cases import PAIRS, pair_id

pytestmark = pytest.mark.drawn

WORDS = drawn.vocabulary("awkward")
TEXTS = drawn.texts_of(WORDS)
EOS = min(WORDS.eos)
Start = Callable[[], Matcher]
THINK = TEXTS.index(b"</think>")

CHECKED = json.dumps(
    {
        "type": "array",
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 3,
        "items": {
            "oneOf": [
                {"type": "integer", "minimum": 1, "maximum": 3},
                {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 4},
            ]
        },
    }
)
DEAD_ENDS = json.dumps(
    {
        "type": "object",
        "required": ["a", "b"],
        "additionalProperties": False,
        "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [1, 2]}},
        "not": {"properties": {"a": {"enum": [1, 2]}}},
    }
)
TAGGED = json.dumps(
    {"structures": [{"begin": "<f=", "schema": json.loads(CHECKED), "end": "</f>"}], "triggers": ["<f="]}
)


def _start(kind: str, spec: str, name: str) -> Start:
    first = drawn.backend(name, "awkward").compile(Constraint(kind, spec))
    return first.copy


def _thinking(end: ReasoningEnd, budget: int | None, kind: str, spec: str, name: str) -> Start:
    start, reasoning = _start(kind, spec, name), Reasoning(WORDS, end)
    return lambda: reasoning.wrap(start(), thinking=True, max_thinking_tokens=budget)


BY_TEXT = ReasoningEnd(texts=("</think>",))
STARTS: dict[str, Callable[[], Start]] = {
    **{
        f"{pair_id(case)}-{name}": lambda case=case, name=name: _start(case.kind, case.spec, name)
        for case, name in PAIRS
        if name != "auto" or case.kind == "json_schema"
    },
    "checked": lambda: _start("json_schema", CHECKED, "auto"),
    "dead_ends": lambda: _start("json_schema", DEAD_ENDS, "auto"),
    "checked_in_tags": lambda: _start("structural_tag", TAGGED, "llguidance"),
    "thinking_text": lambda: _thinking(BY_TEXT, None, "regex", "(yes|no){1,4}", "outlines"),
    "thinking_short": lambda: _thinking(BY_TEXT, 3, "json_schema", CHECKED, "llguidance"),
    "thinking_ids": lambda: _thinking(
        ReasoningEnd(ids=((THINK,), (TEXTS.index(b"ab"), TEXTS.index(b"</")))),
        5,
        "structural_tag",
        TAGGED,
        "llguidance",
    ),
}


@dataclass
class Live:
    """A matcher, the steps that stand (an id, or text), and what was forbidden after so many of them."""

    matcher: Matcher
    steps: list[int | bytes] = field(default_factory=list)
    forbidden: dict[int, set[int]] = field(default_factory=dict)

    def cut(self, left: int) -> None:
        del self.steps[left:]
        self.forbidden = {at: ids for at, ids in self.forbidden.items() if at <= left}

    @property
    def gone(self) -> set[int]:
        return self.forbidden.get(len(self.steps), set())


def take(matcher: Matcher, step: int | bytes) -> bool:
    return matcher.advance(step) if isinstance(step, int) else matcher.advance_bytes(step)


class Steps(RuleBasedStateMachine):
    start: Start

    lives = Bundle("lives")

    @initialize(target=lives)
    def begin(self) -> Live:
        self.all: list[Live] = [Live(self.start())]
        return self.all[0]

    def replayed(self, live: Live) -> Matcher:
        fresh = self.start()
        assert all(take(fresh, step) for step in live.steps), live.steps
        return fresh

    @rule(live=lives, choice=st.integers(0, 1 << 20), closing=st.booleans())
    def token(self, live: Live, choice: int, closing: bool) -> None:
        ids = allowed(live.matcher)
        if closing:
            ids = [token for token in ids if set(TEXTS[token]) <= set(b'"]}>,</f=1230:')] or ids
        if ids:
            token = ids[choice % len(ids)]
            assert live.matcher.advance(token)
            live.steps.append(token)

    @rule(live=lives, token=st.integers(-1, len(WORDS) + 1))
    def any_token(self, live: Live, token: int) -> None:
        fresh = self.replayed(live)
        expected = token not in live.gone and fresh.advance(token)
        assert live.matcher.advance(token) == expected
        if expected:
            live.steps.append(token)

    @rule(
        live=lives,
        data=st.sampled_from([data for data in TEXTS if data]) | st.binary(max_size=3),
        size=st.integers(1, 9),
    )
    def text(self, live: Live, data: bytes, size: int) -> None:
        self._text(live, data[:size])

    @rule(live=lives, size=st.integers(0, 12))
    def forced(self, live: Live, size: int) -> None:
        forced = live.matcher.forced_bytes()
        if forced[:size]:
            assert live.matcher.copy().advance_bytes(forced)
            self._text(live, forced[:size])

    def _text(self, live: Live, data: bytes) -> None:
        expected = self.replayed(live).advance_bytes(data)
        assert live.matcher.advance_bytes(data) == expected
        if expected:
            live.steps.append(data)

    @rule(live=lives, share=st.floats(0, 1))
    def back(self, live: Live, share: float) -> None:
        steps = round(len(live.steps) * share)
        live.matcher.rollback(steps)
        live.cut(len(live.steps) - steps)

    @rule(live=lives, more=st.integers(1, 3))
    def back_too_far(self, live: Live, more: int) -> None:
        with pytest.raises(ValueError, match="undo"):
            live.matcher.rollback(len(live.steps) + more)

    @rule(target=lives, live=lives)
    def copied(self, live: Live) -> object:
        if len(self.all) >= 5:
            return multiple()
        twin = Live(
            live.matcher.copy(), list(live.steps), {at: set(ids) for at, ids in live.forbidden.items()}
        )
        self.all.append(twin)
        return twin

    @rule(live=lives)
    def rejected(self, live: Live) -> None:
        rejection = live.matcher.verdict()
        assert (rejection is None) == bool(allowed(live.matcher))
        if rejection is None or not rejection.back:
            return
        assert rejection.reason
        assert rejection.back <= len(live.steps)
        live.matcher.retract(rejection)
        left = len(live.steps) - rejection.back
        token = live.steps[left]
        assert isinstance(token, int)
        live.cut(left)
        live.forbidden.setdefault(left, set()).add(token)
        assert token not in allowed(live.matcher)

    @rule(live=lives)
    def stops(self, live: Live) -> None:
        assert live.matcher.may_stop() == bool(WORDS.eos & set(allowed(live.matcher)))

    @rule(live=lives, limit=st.integers(0, 40))
    def closed(self, live: Live, limit: int) -> None:
        ids = live.matcher.closing(limit)
        if ids is not None:
            assert len(ids) <= limit
            ahead = live.matcher.copy()
            assert all(ahead.advance(token) for token in ids)
            assert ahead.may_stop()

    @rule(live=lives)
    def same(self, live: Live) -> None:
        fresh, matcher = self.replayed(live), live.matcher
        assert matcher.may_stop() == fresh.may_stop(), live.steps
        assert matcher.is_terminated() == fresh.is_terminated(), live.steps
        assert allowed(matcher) == [token for token in allowed(fresh) if token not in live.gone], live.steps
        if not live.gone:
            assert matcher.forced_bytes() == fresh.forced_bytes(), live.steps
        if not live.forbidden:
            assert matcher.undoable() == fresh.undoable()
            assert (matcher.verdict() is None) == (fresh.verdict() is None)

    def teardown(self) -> None:
        for live in getattr(self, "all", ()):
            self.same(live)


def explore(name: str, examples: int) -> None:
    start = STARTS[name]()
    machine = type("StepsOf", (Steps,), {"start": staticmethod(start)})
    kept = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=settings().derandomize,
        database=None,
    )
    run_state_machine_as_test(machine, settings=kept)


@pytest.mark.parametrize("name", STARTS)
def test_steps_and_copies_are_exact(name):
    explore(name, 3 * drawn.LOOPS)


@pytest.mark.parametrize("name", STARTS)
def test_long_ways_back(name):
    """A long generation is undone in pieces of any size, and comes again the same."""
    start, dice = STARTS[name](), random.Random(drawn.SEED)
    matcher = start()
    trail: list[tuple[list[int], bool, bytes]] = []
    steps: list[int] = []
    for _ in range(40):
        ids = [token for token in allowed(matcher) if token not in WORDS.eos]
        trail.append((allowed(matcher), matcher.may_stop(), matcher.forced_bytes()))
        if not ids:
            break
        steps.append(dice.choice(ids))
        assert matcher.advance(steps[-1])
    at = len(steps)
    for _ in range(12):
        to = dice.randint(0, len(steps))
        if to < at:
            matcher.rollback(at - to)
        else:
            try:
                assert all(matcher.advance(token) for token in steps[at:to])
            except BadConstraint:
                pytest.fail("it did not come again")
        at = to
        if at < len(trail):
            assert (allowed(matcher), matcher.may_stop(), matcher.forced_bytes()) == trail[at]
