"""Reasoning before the answer: a constraint that sleeps until the reasoning has ended.

Models that think first write free text, then a mark such as `</think>`, then the answer. The constraint holds
for the answer only. While it sleeps, everything that is text may follow, but no end of the generation: an
answer always comes. It knows no model: what ends its reasoning is given, as ids, as text, or both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from runtime.grammar.base import Matcher, Origin, Rejection, last_steps
from runtime.grammar.completion import Steps
from runtime.grammar.tags.tag_space import Bits, TagSpace, Triggers
from runtime.plan import TokenMask
from runtime.protocol.errors import BadRequest
from runtime.protocol.vocabulary import Vocabulary


@dataclass(frozen=True)
class ReasoningEnd:
    """What ends the reasoning, whichever comes first: a sequence of ids (they may be control tokens), or a
    text (however it is cut into tokens; what a token holds after it belongs to the answer). inside: control
    tokens that may stand in it besides, such as the one that opens it."""

    ids: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    inside: tuple[int, ...] = ()


class Reasoning:
    """How one model ends its reasoning. Made once, used by every request. Thread-safe.

    Raises BadRequest for ends that are empty or that the vocabulary cannot spell.
    """

    def __init__(self, vocabulary: Vocabulary, end: ReasoningEnd) -> None:
        if not (end.ids or end.texts) or not all(end.ids) or not all(end.texts):
            raise BadRequest("names no end, or an empty one", where="reasoning_end")
        for token in (token for sequence in (*end.ids, end.inside) for token in sequence):
            if not 0 <= token < len(vocabulary):
                raise BadRequest(f"has no id {token} in {len(vocabulary)}", where="reasoning_end")
        self.space = TagSpace(vocabulary)
        self.sequences = end.ids
        self.triggers = Triggers([text.encode() for text in end.texts])
        marks = {token for sequence in (*end.ids, end.inside) for token in sequence}
        listed = self.space.bits.listed(sorted(marks)).bits
        eos = self.space.bits.listed(sorted(vocabulary.eos - marks)).bits
        self.free = (self.space.spoken | listed) & ~eos

    def anything(self) -> Matcher:
        """A matcher that leaves everything free: for bounded reasoning without a constraint after it."""
        return AnyMatcher(self.space)

    def wrap(self, matcher: Matcher, *, thinking: bool, max_thinking_tokens: int | None = None) -> Matcher:
        """`matcher` (at its start) for the answer alone; itself where the model does not think.

        max_thinking_tokens: after so many, the end must follow, token by token. Raises BadRequest below 0.
        """
        if not thinking:
            return matcher
        if max_thinking_tokens is not None and max_thinking_tokens < 0:
            raise BadRequest("must be 0 or more", where="max_thinking_tokens")
        return ReasonerMatcher(_Shared(self, matcher.copy(), max_thinking_tokens, {}), matcher.copy())


@dataclass(frozen=True, eq=False)
class _Shared:
    """`first`: the constraint at its start, which nobody moves. `masks`: of places in the reasoning."""

    reasoning: Reasoning
    first: Matcher
    budget: int | None
    masks: dict[tuple[tuple[int, ...], int, bool], TokenMask]


class _Place(NamedTuple):
    """Where a text is. `begun`: by sequence of ids, how many of them were just taken; `state` of the
    triggers; `thought`: tokens so far, the marks of the end included."""

    awake: bool
    begun: tuple[int, ...]
    state: int
    thought: int


class _Step(NamedTuple):
    place: _Place
    inner: int
    before: _Step | None


class ReasonerMatcher(Matcher):
    """Asleep during the reasoning, then the constraint's own matcher."""

    def __init__(self, shared: _Shared, inner: Matcher) -> None:
        self._shared, self._inner = shared, inner
        self.vocabulary = self._shared.reasoning.space.bits.vocabulary
        self._place = _Place(False, (0,) * len(shared.reasoning.sequences), 0, 0)
        self._last: _Step | None = None
        self._borrowed = False  # whether a copy has the same inner matcher
        self.origin = inner.origin

    @property
    def asleep(self) -> bool:
        """Whether the reasoning has not ended yet."""
        return not self._place.awake

    def advance(self, token: int) -> bool:
        if self._place.awake:
            return self._inner.advance(token) and self._done(self._place, 1)
        reasoning = self._shared.reasoning
        if not 0 <= token < reasoning.space.bits.width or not self.mask().allows(token):
            return False
        begun = tuple(
            _overlap(sequence, taken, token)
            for sequence, taken in zip(reasoning.sequences, self._place.begun, strict=True)
        )
        if any(taken == len(sequence) for sequence, taken in zip(reasoning.sequences, begun, strict=True)):
            self._wake()
            return self._done(_Place(True, begun, 0, self._place.thought + 1), 0)
        return self._listen(reasoning.space.texts[token], begun, 1)

    def advance_bytes(self, data: bytes) -> bool:
        if self._place.awake:
            return self._inner.advance_bytes(data) and self._done(self._place, 1)
        if self._due() and data and self._due_text(data) is None:
            return False
        begun = (0,) * len(self._place.begun) if data else self._place.begun
        return self._listen(data, begun, 0)

    def _listen(self, data: bytes, begun: tuple[int, ...], tokens: int) -> bool:
        """Take text of the reasoning, and what comes after its end for the answer."""
        state, rest = _heard(self._shared.reasoning.triggers, self._place.state, data)
        thought = self._place.thought + tokens
        if rest is None:
            return self._done(_Place(False, begun, state, thought), 0)
        self._wake()
        if rest and not self._inner.advance_bytes(rest):
            return False
        return self._done(_Place(True, begun, 0, thought), 1 if rest else 0)

    def _wake(self) -> None:
        """The constraint's matcher will move: from here on it is this one's own."""
        if self._borrowed:
            self._inner, self._borrowed = self._inner.copy(), False

    def _done(self, place: _Place, inner: int) -> bool:
        self._last = _Step(self._place, inner, self._last)
        self._place = place
        return True

    def _due(self) -> bool:
        """Whether nothing but the end of the reasoning may follow."""
        budget = self._shared.budget
        return budget is not None and self._place.thought >= budget

    def _due_text(self, data: bytes) -> bytes | None:
        """What `data` leaves for the answer where the end's text is due; None if it is not (part of) it."""
        ending = self._ending()
        if ending.startswith(data):
            return b""
        return data[len(ending) :] if ending and data.startswith(ending) else None

    def _ending(self) -> bytes:
        """The text that ends the reasoning soonest from here, b"" where it is ended by ids."""
        triggers = self._shared.reasoning.triggers
        if not triggers.words:
            return b""
        left = triggers.remainders(self._place.state) or {triggers.words[0]}
        return min(left, key=lambda word: (len(word), word))

    def mask(self) -> TokenMask:
        if self._place.awake:
            return self._inner.mask()
        key = (self._place.begun, self._place.state, self._due())
        found = self._shared.masks.get(key)
        if found is None:
            found = self._shared.masks[key] = self._due_mask() if key[2] else self._free_mask()
        return found

    def _free_mask(self) -> TokenMask:
        """Everything but tokens that end the reasoning and go on with what the answer cannot begin with."""
        reasoning = self._shared.reasoning
        bits = reasoning.free.copy()
        if reasoning.triggers.words:
            self._strike(bits, reasoning.space.holding(reasoning.triggers, self._place.state) & bits)
        return reasoning.space.bits.seal(bits)

    def _strike(self, bits: Bits, doubtful: Bits) -> None:
        reasoning, first = self._shared.reasoning, self._shared.first.copy()
        for data, token in reasoning.space.in_order(doubtful):
            _, rest = _heard(reasoning.triggers, self._place.state, data)
            if rest:
                if first.advance_bytes(rest):
                    first.rollback(1)
                else:
                    bits[token >> 5] &= ~np.uint32(1 << (token & 31))

    def _due_mask(self) -> TokenMask:
        """The next token of the ids that end the reasoning, or tokens along the text that does."""
        reasoning = self._shared.reasoning
        if reasoning.sequences:
            pairs = zip(reasoning.sequences, self._place.begun, strict=True)
            sequence, taken = min(pairs, key=lambda pair: len(pair[0]) - pair[1])
            return reasoning.space.bits.listed([sequence[taken]])
        bits = reasoning.space.along(self._ending()).copy()
        self._strike(bits, bits.copy())
        return reasoning.space.bits.seal(bits)

    def forced_bytes(self) -> bytes:
        if self._place.awake:
            return self._inner.forced_bytes()
        ids = self._shared.reasoning.sequences
        return self._ending() if self._due() and not ids else b""

    def may_stop(self) -> bool:
        return self._place.awake and self._inner.may_stop()

    def is_terminated(self) -> bool:
        return self._place.awake and self._inner.is_terminated()

    def rollback(self, steps: int) -> None:
        place, inner, last = self._back(steps)
        if inner:
            self._inner.rollback(inner)
        self._place, self._last = place, last

    def _back(self, steps: int) -> tuple[_Place, int, _Step | None]:
        place, inner, last = self._place, 0, self._last
        for step in last_steps(self._last, steps):
            place, inner, last = step.place, inner + step.inner, step.before
        return place, inner, last

    def copy(self) -> ReasonerMatcher:
        if self.asleep:  # its constraint has not moved, and is copied when it does
            twin = ReasonerMatcher(self._shared, self._inner)
            twin._borrowed = self._borrowed = True
        else:
            twin = ReasonerMatcher(self._shared, self._inner.copy())
        twin._place, twin._last = self._place, self._last
        return twin

    def undoable(self) -> int:
        """A constraint never takes reasoning back: its own steps are the last ones since it woke."""
        return self._inner.undoable() if self._place.awake else 0

    def closing_steps(self, limit: int) -> Steps[tuple[int, ...] | None]:
        if self._place.awake:
            return (yield from self._inner.closing_steps(limit))
        end = self._end_ids()
        if end is None or len(end) > limit:
            return None
        rest = self._inner.origin.shortest  # the answer has not begun
        if rest is None or len(rest) > limit - len(end):
            rest = yield from self._inner.closing_steps(limit - len(end))
        return None if rest is None else (*end, *rest)

    def _end_ids(self) -> tuple[int, ...] | None:
        """Ids that end the reasoning soonest from here; for a text the fewest that spell it."""
        reasoning = self._shared.reasoning
        if reasoning.sequences:
            pairs = zip(reasoning.sequences, self._place.begun, strict=True)
            return min((sequence[taken:] for sequence, taken in pairs), key=len)
        made: list[int] = []
        ending = self._ending()
        while ending:
            found = reasoning.space.longest(ending)
            if found is None:
                return None
            made.append(found)
            ending = ending[len(reasoning.space.texts[found]) :]
        return tuple(made)

    def verdict(self) -> Rejection | None:
        return self._inner.verdict() if self._place.awake else None

    def retract(self, rejection: Rejection) -> None:
        # Every step since the constraint woke is one of its own; it never goes back further.
        place, _, last = self._back(rejection.back)
        self._inner.retract(rejection)
        self._place, self._last = place, last


class AnyMatcher(Matcher):
    """Whatever the model says, until it ends."""

    def __init__(self, space: TagSpace) -> None:
        self._space, self._ended = space, 0  # steps since the end, itself included
        self._steps = 0
        self.origin = Origin("none", why="there is no constraint")

    def advance(self, token: int) -> bool:
        if not 0 <= token < self._space.bits.width:
            return False
        return self._step(self._ended > 0 or token in self._space.bits.vocabulary.eos)

    def advance_bytes(self, data: bytes) -> bool:
        return self._step(self._ended > 0)

    def _step(self, ended: bool) -> bool:
        self._steps += 1
        self._ended += ended
        return True

    def mask(self) -> TokenMask:
        return self._space.everything

    def forced_bytes(self) -> bytes:
        return b""

    def may_stop(self) -> bool:
        return True

    def is_terminated(self) -> bool:
        return self._ended > 0

    def rollback(self, steps: int) -> None:
        if steps > self._steps:
            raise ValueError(f"cannot undo {steps} steps: only {self._steps} were taken")
        self._steps -= steps
        self._ended = max(0, self._ended - steps)

    def copy(self) -> AnyMatcher:
        twin = AnyMatcher(self._space)
        twin._steps, twin._ended = self._steps, self._ended
        return twin


def _heard(triggers: Triggers, state: int, data: bytes) -> tuple[int, bytes | None]:
    """(state after `data`, None), or what is left of `data` after the first word that ends in it."""
    for at, byte in enumerate(data):
        state = triggers.step(state, byte)
        if triggers.ends[state]:
            return 0, data[at + 1 :]
    return state, None


def _overlap(sequence: tuple[int, ...], taken: int, token: int) -> int:
    """How many ids of `sequence` the last ones are, after `taken` of them and then `token`."""
    last = (*sequence[:taken], token)
    for size in range(min(len(last), len(sequence)), 0, -1):
        if last[-size:] == sequence[:size]:
            return size
    return 0
