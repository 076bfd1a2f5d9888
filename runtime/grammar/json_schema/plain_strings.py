"""PlainMatcher: masks of JSON whose plain tokens, nine of ten, are told without asking the engine.

The engine follows the document over a vocabulary without the tokens that can only stand inside of a string.
Which of those may follow there, the schema of the string says: its length, its pattern, its listed values. It
is used for schemas of which that is known of every string (runtime.grammar.json_schema.string_rules); it
knows the lowered schema, and of the engine that it takes bytes.
"""

from __future__ import annotations

import json
import re
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from runtime.grammar.base import Matcher, earliest
from runtime.grammar.json_schema import tracker as at
from runtime.grammar.json_schema.in_string import Lengths
from runtime.grammar.json_schema.string_rules import OTHER, Rule, Texts
from runtime.grammar.json_schema.tracker import JsonTracker, Place
from runtime.grammar.plain_tokens import PlainTokens, unescaped
from runtime.grammar.token_bits import Bits
from runtime.plan import TokenMask

_OTHER = OTHER.encode()
_LETTERS = {ord("b"): "\b", ord("f"): "\f", ord("n"): "\n", ord("r"): "\r", ord("t"): "\t"}
_MAYBE_SURROGATE = re.compile(rb"\\u[dD]")
_UNFINISHED = re.compile(rb"\\u[0-9a-fA-F]{0,3}\Z")


class _Step(NamedTuple):
    place: Place
    before: _Step | None


class _Known(NamedTuple):
    """Masks made in the string that began at `start`, by state of its rule; for a rule without states the
    one after `length` characters."""

    start: int
    length: int
    masks: dict[int | str, TokenMask]


class Follower(Matcher):
    """What is asked of an engine besides."""

    @abstractmethod
    def words(self) -> Bits:
        """The ids that may follow, eos included, as words of the engine's ids; a new array. Not after an
        end."""

    @abstractmethod
    def copy(self) -> Follower:
        """An independent one in the same state."""

    @abstractmethod
    def follows(self, data: bytes) -> int:
        """How many bytes of `data` could be taken; changes nothing."""


class Whole:
    """A matcher at the start, made when first needed and shared by all copies. Any thread may ask."""

    def __init__(self, make: Callable[[], Matcher]) -> None:
        self._make = make
        self._made: Matcher | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Matcher:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made.copy()


class PlainMatcher(Matcher):
    """`inner` follows the language over the other tokens and all bytes. `whole` makes a matcher of the same
    language over all tokens."""

    def __init__(
        self, inner: Follower, tracker: JsonTracker, lengths: Lengths, plain: PlainTokens,
        whole: Callable[[], Matcher],
    ) -> None:  # fmt: skip
        self._inner, self._tracker, self._lengths = inner, tracker, lengths
        self._plain, self._whole = plain, whole
        self._last: _Step | None = None
        self._known: _Known | None = None
        self._mask: TokenMask | None = None
        self._asked: Matcher | None = None  # of `whole`, and the lengths of text after its steps
        self._told = [0]
        self.origin, self.vocabulary = inner.origin, inner.vocabulary

    def advance(self, token: int) -> bool:
        plain = self._plain.is_plain
        if 0 <= token < len(plain) and plain[token]:
            return self.advance_bytes(self._lengths.bits.texts[token])
        return self._inner.advance(token) and self._follow(self._lengths.bits.texts[token])

    def advance_bytes(self, data: bytes) -> bool:
        return self._inner.advance_bytes(data) and self._follow(data)

    def _follow(self, data: bytes) -> bool:
        self._last = _Step(self._tracker.place, self._last)
        self._mask = None
        if data:
            taken = self._tracker.feed(data)
            assert taken, "nothing is refused here"
        return True

    def mask(self) -> TokenMask:
        if self._mask is None:
            self._mask = self._make()
        return self._mask

    def _make(self) -> TokenMask:
        place = self._tracker.place
        if place.mode == at.NAME:
            return self._seal(self._names(place))
        if place.mode != at.STRING:
            return self._inner.mask()
        begun = self._tracker.since(place.start + 1)
        duty = place.duty
        rule = duty.rule if isinstance(duty, Texts) else None
        if rule is None or _UNFINISHED.search(begun) or _MAYBE_SURROGATE.search(begun):
            return self._ask()
        if place.escaped:
            return self._escaping(rule, begun[:-1])
        text = _decoded(begun)
        if text is None:  # in the middle of a character
            return self._inner.mask()
        return self._inside(place, rule, text)

    def _inside(self, place: Place, rule: Rule, text: str) -> TokenMask:
        state: int | str = rule.state(text) if rule.states else 0
        known = self._known
        back = known is not None and not rule.states and len(text) < known.length
        if known is None or known.start != place.start or back:
            known = self._known = _Known(place.start, len(text), {})
        if not rule.states and len(text) < rule.low:
            state = -1 - len(text)
        found = known.masks.get(state)
        if found is None:
            if not rule.states:
                known = self._known = _Known(place.start, len(text), {})
            if rule.words is not None:
                found = self._seal(self._some_of(rule.words, text, free=rule.free))
            else:
                found = self._seal(rule.plain(self._plain, text))
            known.masks[state] = found
        elif rule.high is not None and len(text) != known.length:
            left = rule.high - len(text)
            bits = self._lengths.bits
            return bits.seal(found.bits & self._lengths.within(left)) if left < self._lengths.most else found
        return found

    def _seal(self, plain: Bits | list[int]) -> TokenMask:
        """The other tokens that may follow, and those of `plain`."""
        bits = self._lengths.bits
        found = self._inner.words()[: bits.words]
        if isinstance(plain, list):
            for token in plain:
                found[token >> 5] |= np.uint32(1 << (token & 31))
        else:
            found |= plain
        return bits.seal(found)

    def _escaping(self, rule: Rule, begun: bytes) -> TokenMask:
        """After a backslash: of the plain tokens those that begin with the letter of an escape."""
        text = _decoded(begun)
        if text is None or rule.words is not None or self._inner.follows(b"u"):
            return self._ask()
        plain = self._plain
        found = plain.none.copy()
        for letter, char in _LETTERS.items():
            if not self._inner.follows(bytes((letter,))):
                continue
            found |= rule.plain(plain, text + char, letter)
        return self._seal(found)

    def _names(self, place: Place) -> Bits | list[int]:
        """The plain tokens that may follow in a name."""
        begun = self._tracker.since(place.start + 1)
        if place.escaped or _UNFINISHED.search(begun) or _MAYBE_SURROGATE.search(begun):
            return self._asked_plain()
        text = _decoded(begun)
        frame = place.frame
        assert frame is not None, "a name is inside of an object"
        duty = frame.duty
        if text is None:
            return []
        if not isinstance(duty, Texts) or duty.names is None:
            return self._asked_plain()
        return self._some_of(duty.names, text)

    def _asked_plain(self) -> Bits:
        found: Bits = self._ask().bits & self._plain.all
        return found

    def _some_of(self, words: tuple[str, ...], begun: str, *, free: bool = True) -> Bits | list[int]:
        """The plain tokens after `begun` where one of `words` is spelled, the engine says which; free: or any
        other text."""
        if free and self._inner.follows(_OTHER) == len(_OTHER):
            return self._plain.all
        found: list[int] = []
        for word in words:
            if not word.startswith(begun) or word == begun:
                continue
            rest = unescaped(word[len(begun) :]).encode()
            found += self._plain.along(rest[: self._inner.follows(rest)])
        return found

    def _ask(self) -> TokenMask:
        """The mask of all tokens from the engine, where no rule is known."""
        if self._asked is None:
            self._asked = self._whole()
        text = self._tracker.since(self._told[-1])
        if text:
            taken = self._asked.advance_bytes(text)
            assert taken, "it is the same language"
            self._told.append(self._told[-1] + len(text))
        return self._asked.mask()

    def forced_bytes(self) -> bytes:
        return self._inner.forced_bytes()

    def may_stop(self) -> bool:
        return self._inner.may_stop()

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def rollback(self, steps: int) -> None:
        oldest = earliest(self._last, steps)
        self._inner.rollback(steps)
        if oldest is None:
            return
        self._last = oldest.before
        self._tracker.restore(oldest.place)
        self._known = self._mask = None
        if self._asked is not None:
            late = sum(length > oldest.place.length for length in self._told)
            self._asked.rollback(late)
            del self._told[len(self._told) - late :]

    def copy(self) -> PlainMatcher:
        twin = PlainMatcher(self._inner.copy(), self._tracker.copy(), self._lengths, self._plain, self._whole)
        twin._last, twin._known, twin._mask = self._last, self._known, self._mask
        if self._asked is not None:
            twin._asked, twin._told = self._asked.copy(), list(self._told)
        return twin


def _decoded(data: bytes) -> str | None:
    """The text that `data` spells within a string; None where it ends in the middle of a character."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return str(json.loads(f'"{text}"')) if "\\" in text else text
