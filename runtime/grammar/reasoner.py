"""Reasoning before the answer: a constraint that sleeps until the reasoning has ended.

Models that reason write free text, then a mark such as `</think>`, then the answer, for which alone the
constraint holds. While it sleeps any text may follow, but no end of the generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from runtime.grammar.base import Matcher, Origin, Rejection, Step, last_steps
from runtime.grammar.completion import Steps
from runtime.grammar.masks.token_bits import Bits
from runtime.grammar.tags.tag_space import TagSpace, Triggers, tag_space
from runtime.plan import TokenMask
from runtime.protocol.errors import BadRequest
from runtime.protocol.vocabulary import Vocabulary


@dataclass(frozen=True)
class ReasoningEnd:
    """What ends the reasoning, whichever comes first: a sequence of ids (they may be control tokens), or a
    text in any tokenization (the rest of its last token belongs to the answer). inside: other control tokens
    that the reasoning may contain, such as the one that opens it."""

    ids: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    inside: tuple[int, ...] = ()


class Reasoning:
    """How one model ends its reasoning, shared by all requests. Thread-safe. Raises BadRequest for ends that
    are empty or that the vocabulary cannot spell."""

    def __init__(self, vocabulary: Vocabulary, end: ReasoningEnd) -> None:
        if not (end.ids or end.texts) or not all(end.ids) or not all(end.texts):
            raise BadRequest("names no end, or an empty one", where="reasoning_end")
        for token in (token for sequence in (*end.ids, end.inside) for token in sequence):
            if not 0 <= token < len(vocabulary):
                raise BadRequest(f"has no id {token} in {len(vocabulary)}", where="reasoning_end")
        self.space = tag_space(vocabulary)
        self.sequences = end.ids
        self.triggers = Triggers([text.encode() for text in end.texts])
        marks = {token for sequence in (*end.ids, end.inside) for token in sequence}
        listed = self.space.bits.listed(sorted(marks)).bits
        eos = self.space.bits.listed(sorted(vocabulary.eos - marks)).bits
        self.free = (self.space.text_ids | listed) & ~eos

    def anything(self) -> Matcher:
        """A matcher that allows everything, for bounded reasoning without a constraint after it."""
        return AnyMatcher(self.space)

    def wrap(self, matcher: Matcher, *, thinking: bool, max_thinking_tokens: int | None = None) -> Matcher:
        """`matcher` (at its start) for the answer alone; itself if the model does not reason. After
        max_thinking_tokens the end must follow, token by token. Raises BadRequest below 0."""
        if not thinking:
            return matcher
        if max_thinking_tokens is not None and max_thinking_tokens < 0:
            raise BadRequest("must be 0 or more", where="max_thinking_tokens")
        return ReasonerMatcher(_Shared(self, matcher.copy(), max_thinking_tokens, {}), matcher.copy())


@dataclass(frozen=True, eq=False)
class _Shared:
    """`first`: the constraint at its start, which never moves. `masks`: by position in the reasoning."""

    reasoning: Reasoning
    first: Matcher
    budget: int | None
    masks: dict[tuple[tuple[int, ...], int, bool], TokenMask]


class _Position(NamedTuple):
    """A position in a text. `begun`: by sequence of ids, how many of them were just taken; `state` of the
    triggers; `thought`: tokens so far, the marks of the end included."""

    awake: bool
    begun: tuple[int, ...]
    state: int
    thought: int


class ReasonerMatcher(Matcher):
    """Asleep during the reasoning, then the constraint's own matcher."""

    def __init__(self, shared: _Shared, inner: Matcher) -> None:
        self._shared, self._inner = shared, inner
        self.vocabulary = self._shared.reasoning.space.bits.vocabulary
        self._position = _Position(False, (0,) * len(shared.reasoning.sequences), 0, 0)
        self._last: Step[tuple[_Position, int]] | None = None  # and steps of the inner matcher
        self._borrowed = False  # whether a copy has the same inner matcher
        self.origin = inner.origin

    @property
    def asleep(self) -> bool:
        """Whether the reasoning has not ended yet."""
        return not self._position.awake

    def advance(self, token: int) -> bool:
        if self._position.awake:
            return self._inner.advance(token) and self._done(self._position, 1)
        reasoning = self._shared.reasoning
        if not 0 <= token < reasoning.space.bits.width or not self.mask().allows(token):
            return False
        begun = tuple(
            _overlap(sequence, taken, token)
            for sequence, taken in zip(reasoning.sequences, self._position.begun, strict=True)
        )
        if any(taken == len(sequence) for sequence, taken in zip(reasoning.sequences, begun, strict=True)):
            self._wake()
            return self._done(_Position(True, begun, 0, self._position.thought + 1), 0)
        return self._reason(reasoning.space.texts[token], begun, 1)

    def advance_bytes(self, data: bytes) -> bool:
        if self._position.awake:
            return self._inner.advance_bytes(data) and self._done(self._position, 1)
        if self._due() and data and self._due_text(data) is None:
            return False
        begun = (0,) * len(self._position.begun) if data else self._position.begun
        return self._reason(data, begun, 0)

    def _reason(self, data: bytes, begun: tuple[int, ...], tokens: int) -> bool:
        """Take text of the reasoning, and what comes after its end for the answer."""
        state, rest = _after_end(self._shared.reasoning.triggers, self._position.state, data)
        thought = self._position.thought + tokens
        if rest is None:
            return self._done(_Position(False, begun, state, thought), 0)
        self._wake()
        if rest and not self._inner.advance_bytes(rest):
            return False
        return self._done(_Position(True, begun, 0, thought), 1 if rest else 0)

    def _wake(self) -> None:
        """The constraint's matcher will move: stop sharing it."""
        if self._borrowed:
            self._inner, self._borrowed = self._inner.copy(), False

    def _done(self, position: _Position, inner: int) -> bool:
        self._last = Step((self._position, inner), self._last)
        self._position = position
        return True

    def _due(self) -> bool:
        """Whether only the end of the reasoning may follow."""
        budget = self._shared.budget
        return budget is not None and self._position.thought >= budget

    def _due_text(self, data: bytes) -> bytes | None:
        """The part of `data` after the end's text, which is due; None if `data` does not fit it."""
        ending = self._ending()
        if ending.startswith(data):
            return b""
        return data[len(ending) :] if ending and data.startswith(ending) else None

    def _ending(self) -> bytes:
        """The text that ends the reasoning soonest from here, b"" if it is ended by ids."""
        triggers = self._shared.reasoning.triggers
        if not triggers.strings:
            return b""
        left = triggers.remainders(self._position.state) or {triggers.strings[0]}
        return min(left, key=lambda word: (len(word), word))

    def mask(self) -> TokenMask:
        if self._position.awake:
            return self._inner.mask()
        key = (self._position.begun, self._position.state, self._due())
        mask = self._shared.masks.get(key)
        if mask is None:
            mask = self._shared.masks[key] = self._due_mask() if key[2] else self._free_mask()
        return mask

    def _free_mask(self) -> TokenMask:
        """Everything but tokens that end the reasoning and go on with what no answer begins with."""
        reasoning = self._shared.reasoning
        bits = reasoning.free.copy()
        if reasoning.triggers.strings:
            self._strike(bits, reasoning.space.holding(reasoning.triggers, self._position.state) & bits)
        return reasoning.space.bits.seal(bits)

    def _strike(self, bits: Bits, doubtful: Bits) -> None:
        reasoning, first = self._shared.reasoning, self._shared.first.copy()
        for data, token in reasoning.space.in_order(doubtful):
            _, rest = _after_end(reasoning.triggers, self._position.state, data)
            if rest:
                if first.advance_bytes(rest):
                    first.rollback(1)
                else:
                    bits[token >> 5] &= ~np.uint32(1 << (token & 31))

    def _due_mask(self) -> TokenMask:
        """The next token of the ids that end the reasoning, or tokens along the text that does."""
        reasoning = self._shared.reasoning
        if reasoning.sequences:
            pairs = zip(reasoning.sequences, self._position.begun, strict=True)
            sequence, taken = min(pairs, key=lambda pair: len(pair[0]) - pair[1])
            return reasoning.space.bits.listed([sequence[taken]])
        bits = reasoning.space.along(self._ending()).copy()
        self._strike(bits, bits.copy())
        return reasoning.space.bits.seal(bits)

    def forced_bytes(self) -> bytes:
        if self._position.awake:
            return self._inner.forced_bytes()
        ids = self._shared.reasoning.sequences
        return self._ending() if self._due() and not ids else b""

    def may_stop(self) -> bool:
        return self._position.awake and self._inner.may_stop()

    def is_terminated(self) -> bool:
        return self._position.awake and self._inner.is_terminated()

    def rollback(self, steps: int) -> None:
        inner = self._back(steps)
        if inner:
            self._inner.rollback(inner)

    def _back(self, count: int) -> int:
        """Go back `count` steps; the inner matcher's steps among them, which are left to the caller."""
        steps = last_steps(self._last, count)
        if steps:
            (self._position, _), self._last = steps[-1]
        return sum(step.state[1] for step in steps)

    def copy(self) -> ReasonerMatcher:
        if self.asleep:  # its constraint has not moved, and is copied when it does
            twin = ReasonerMatcher(self._shared, self._inner)
            twin._borrowed = self._borrowed = True
        else:
            twin = ReasonerMatcher(self._shared, self._inner.copy())
        twin._position, twin._last = self._position, self._last
        return twin

    def undoable(self) -> int:
        """A constraint never takes reasoning back: its own steps are the last ones since it woke."""
        return self._inner.undoable() if self._position.awake else 0

    def closing_steps(self, limit: int) -> Steps[tuple[int, ...] | None]:
        if self._position.awake:
            return (yield from self._inner.closing_steps(limit))
        end = self._end_ids()
        if end is None or len(end) > limit:
            return None
        rest = self._inner.origin.shortest  # the answer has not begun
        if rest is None or len(rest) > limit - len(end):
            rest = yield from self._inner.closing_steps(limit - len(end))
        return None if rest is None else (*end, *rest)

    def _end_ids(self) -> tuple[int, ...] | None:
        """Ids that end the reasoning soonest from here."""
        reasoning = self._shared.reasoning
        if reasoning.sequences:
            pairs = zip(reasoning.sequences, self._position.begun, strict=True)
            return min((sequence[taken:] for sequence, taken in pairs), key=len)
        pieces = reasoning.space.bits.pieces(self._ending())
        return None if pieces is None else tuple(pieces)

    def verdict(self) -> Rejection | None:
        return self._inner.verdict() if self._position.awake else None

    def retract(self, rejection: Rejection) -> None:
        # The constraint never goes back further than to the step in which it woke.
        self._inner.retract(rejection)
        self._back(rejection.back)


class AnyMatcher(Matcher):
    """Allows everything, until an eos."""

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


def _after_end(triggers: Triggers, state: int, data: bytes) -> tuple[int, bytes | None]:
    """(state after `data`, None), or the rest of `data` after the first trigger that ends in it."""
    for at, byte in enumerate(data):
        state = triggers.step(state, byte)
        if triggers.ends[state]:
            return 0, data[at + 1 :]
    return state, None


def _overlap(sequence: tuple[int, ...], taken: int, token: int) -> int:
    """How many of the first ids of `sequence` the last ids are, after `taken` of them and then `token`."""
    last = (*sequence[:taken], token)
    for size in range(min(len(last), len(sequence)), 0, -1):
        if last[-size:] == sequence[:size]:
            return size
    return 0
