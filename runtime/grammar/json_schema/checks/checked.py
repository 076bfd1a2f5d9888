"""CheckedMatcher: a grammar that is wider than the schema, and a validator that checks values as they close.

A token that would close an invalid value is not in the mask, so an invalid document cannot be finished. Where
nothing is left in the mask, verdict() says how far to go back.

Most tokens with a quote only close the current string, and most schemas distinguish few strings: names that
exist already, the values of an enum. Only those are checked one by one; tokens that do more than close a
string are followed byte by byte, with shared prefixes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

from runtime.grammar.backtracking import BacktrackingMatcher
from runtime.grammar.base import Matcher
from runtime.grammar.json_schema.checks.tracker import (
    AFTER,
    COLON,
    KEY,
    NAME,
    SCALAR,
    STRING,
    VALUE,
    Frame,
    JsonTracker,
    Position,
)
from runtime.grammar.masks.token_bits import Bits, TokenBits, sift_tokens
from runtime.plan import TokenMask

_TO_QUOTE = re.compile(rb'((?:[^"\\]|\\.)*+)"', re.DOTALL)
"""Inside of a string: what comes before the quote that ends it."""

_ENDS = rb"[ \t\r\n]*+((?:[\]}][ \t\r\n]*+)*+)"
_QUIET = rb'(?:[:,][\[{ \t\r\n]*+(?:"[^"]*+|[-+\w.]++)?+)?+'
"""Nothing that could end a value or a name."""

_TAIL = re.compile(_ENDS + _QUIET)
"""After a string: ends of the arrays and objects around it, and then nothing that could end anything."""

_OUTSIDE = re.compile(rb"[-+\w.]*+" + _ENDS + _QUIET)
"""The same inside of or after another value."""

_OPENING = re.compile(rb'[:,\[{ \t\r\n]*+(?:"[^"]*+|[-+\w.]++)?+')
"""After or before a value: what may begin others and ends none."""

_LEAD = re.compile(rb'[, \t\r\n]*+"')
_PIECES = re.compile(rb'[^"\\,:\[\]{} \t\r\n]+|.', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]")
_LEVELS = 4


class ClosingTokens:
    """The tokens of a vocabulary by what they may close, as packed bits.

    strings, others, names   tokens that end the current string, another current value or none, or a name that
                             they begin; by number n < _LEVELS, those that also end at most n of the arrays
                             and objects around it (names: none), and nothing else
    never, opening           tokens whose quotes are all escaped; those that end nothing but white space
    quoted, ...              tokens with a quote, two quotes or an end, ...: those that may close something
    """

    def __init__(self, bits: TokenBits) -> None:
        self.bits = bits
        self._groups = _Groups(bits.width), _Groups(bits.width)
        ends = np.full((2, bits.width), _LEVELS, dtype=np.int64)
        never, opening = np.zeros((2, bits.width), dtype=np.bool_)
        for token, data in enumerate(bits.texts):
            opening[token] = _OPENING.fullmatch(data) is not None
            outside = _OUTSIDE.fullmatch(data)
            if outside is not None:
                ends[1, token] = _brackets(outside[1])
            if b'"' not in data:
                continue
            closing = _TO_QUOTE.match(data)
            if closing is None:
                never[token] = True
                continue
            tail = _TAIL.fullmatch(data, closing.end())
            if tail is not None and self._groups[0].add(token, closing[1]):
                ends[0, token] = _brackets(tail[1])
            lead = _LEAD.match(data)
            name = _TO_QUOTE.match(data, lead.end()) if lead is not None else None
            if name is not None and (tail := _TAIL.fullmatch(data, name.end())) and not tail[1]:
                self._groups[1].add(token, name[1])
        for groups in self._groups:
            groups.settle()
        self.strings = [bits.pack(ends[0] <= number) for number in range(_LEVELS)]
        self.others = [bits.pack(ends[1] <= number) for number in range(_LEVELS)]
        self.names = bits.pack(self._groups[1].group >= 0)
        self.never, self.opening = bits.pack(never), bits.pack(opening)
        quotes = np.array([data.count(b'"') for data in bits.texts])
        end = np.array([b"]" in data or b"}" in data for data in bits.texts]) | (quotes > 1)
        comma = np.array([b"," in data for data in bits.texts]) | end
        space = np.array([_SPACE.search(data) is not None for data in bits.texts])
        self._quoted, self._quoted_end = bits.pack(quotes > 0), bits.pack((quotes > 0) & end)
        self._end, self._scalar_end = bits.pack(comma), bits.pack(comma | space)

    def _may_close(self, position: Position) -> Bits:
        """The tokens that may close something at `position`."""
        if position.mode == NAME:
            return self._quoted
        if position.mode == STRING:
            checked = position.obligation.depends_on_text or _differs(position)
            return self._quoted if checked else self._quoted_end
        owed = owes_scalar(position) and position.mode in (SCALAR, VALUE)
        return self._scalar_end if owed else self._end

    def refused(self, tracker: JsonTracker, allowed: Bits) -> Iterator[int]:
        """Those of `allowed` that may not follow."""
        position = tracker.position
        frame = position.frame
        candidates = allowed & self._may_close(position)
        if position.mode in (STRING, NAME):
            if not position.escaped:
                candidates = candidates & ~self.never
                begun = _text(tracker.since(position.start + 1))
                if begun is not None:
                    simple = candidates & self.strings[_free(position.frame)]
                    yield from self._closing(tracker, position, begun, simple, self._groups[0])
                    candidates = candidates & ~simple
            yield from self._followed(tracker, candidates)
            return
        if position.mode != SCALAR:
            candidates = candidates & ~self.opening
        if position.mode in (KEY, AFTER, COLON) or not owes_scalar(position):
            candidates = candidates & ~self.others[_free(position.frame)]
            if frame is not None and frame.is_object and position.mode in (KEY, AFTER):
                named = position._replace(mode=NAME)
                if distinguished(named) is not None:
                    names = candidates & self.names
                    yield from self._closing(tracker, named, "", names, self._groups[1])
                    candidates = candidates & ~names
        yield from self._followed(tracker, candidates)

    def _closing(
        self, tracker: JsonTracker, position: Position, begun: str, simple: Bits, groups: _Groups
    ) -> Iterator[int]:
        """Refused tokens of `simple`, which end the string or name that is `begun`."""
        ids = self.bits.ids(simple)
        if not len(ids):
            return

        def valid(text: str) -> bool:
            return tracker.closes(position, begun + text)

        apart = distinguished(position)
        if apart is None:
            numbers = groups.group[ids]
            wrong = [number for number in np.unique(numbers).tolist() if not valid(groups.texts[number])]
            yield from ids[np.isin(numbers, wrong)].tolist() if wrong else ()
            return
        special = [text[len(begun) :] for text in apart if text.startswith(begun)]
        usual = valid(next(text for text in map("\x11{}".format, count()) if text not in special))
        odd = [token for text in special if valid(text) is not usual for token in groups.tokens(text)]
        if odd or not usual:
            held = set(ids.tolist())
            yield from held.intersection(odd) if usual else held.difference(odd)

    def _followed(self, tracker: JsonTracker, candidates: Bits) -> Iterator[int]:
        """Refused tokens of any kind, each followed byte by byte; shared prefixes are followed once."""

        def step(_: Position, data: bytes, at: int) -> tuple[int, Position | None]:
            piece = _PIECES.match(data, at)
            assert piece is not None, "any byte is one"
            return piece.end(), tracker.position if tracker.feed(piece[0]) else None

        texts = self.bits.texts
        tokens = sorted((texts[token], token) for token in self.bits.ids(candidates).tolist())
        sifted = sift_tokens(tokens, tracker.position, step, tracker.restore)
        yield from (token for token, valid in sifted if not valid)


class _Groups:
    """Tokens by what they add to a string: `texts[group[token]]`, -1 for those that were not added."""

    def __init__(self, width: int) -> None:
        self.texts: list[str] = []
        self.group: npt.NDArray[np.int64] = np.full(width, -1, dtype=np.int64)
        self._tokens: dict[str, list[int]] = {}

    def add(self, token: int, data: bytes) -> bool:
        """False if `data` is no whole text."""
        text = _text(data)
        if text is None:
            return False
        self._tokens.setdefault(text, []).append(token)
        return True

    def settle(self) -> None:
        for text, tokens in self._tokens.items():
            self.group[tokens] = len(self.texts)
            self.texts.append(text)

    def tokens(self, text: str) -> list[int]:
        return self._tokens.get(text, [])


def owes_scalar(position: Position) -> bool:
    """Whether a number or word that ends at `position`, or begins and ends there, is checked."""
    return _differs(position) or bool(position.obligation.paths)


def _differs(position: Position) -> bool:
    """Whether a value at `position` must differ from others in its array."""
    frame = position.frame
    return frame is not None and not frame.is_object and frame.obligation.unique


def _free(frame: Frame | None) -> int:
    """How many of the open arrays and objects, from the innermost, may end unchecked; fewer than _LEVELS."""
    count = 0
    while frame is not None and count < _LEVELS - 1 and not frame.obligation.paths:
        frame = frame.outer
        if frame is not None and not frame.is_object and frame.obligation.unique:
            break
        count += 1
    return count


def _brackets(data: bytes) -> int:
    return data.count(b"]") + data.count(b"}")


def distinguished(position: Position) -> frozenset[str] | None:
    """The strings that may differ from others when they close at `position`; None: too many."""
    frame = position.frame
    if position.mode == NAME:
        return None if frame is None or frame.obligation.restricts_names else frame.names
    apart = position.obligation.distinguished
    if apart is None or frame is None or not _differs(position):
        return apart
    return apart | {json.loads(item) for item in frame.names if item.startswith('"')}


def _text(data: bytes) -> str | None:
    """What `data` spells within a string; None if it is not whole characters."""
    if b"\\" not in data:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return None
    try:
        text = json.loads(b'"' + data + b'"', strict=False)
        text.encode()
    except (ValueError, UnicodeError):
        return None
    return str(text)


class CheckedMatcher(BacktrackingMatcher[Position]):
    """`inner` follows the wider grammar, `tracker` the values."""

    def __init__(self, inner: Matcher, tracker: JsonTracker, closing_tokens: ClosingTokens) -> None:
        super().__init__(closing_tokens.bits)
        self._inner, self._tracker, self._closing_tokens = inner, tracker, closing_tokens
        self.origin = inner.origin

    def advance(self, token: int) -> bool:
        bits = self._bits
        if token in self._forbidden or not 0 <= token < bits.width:
            return False
        if token in bits.vocabulary.eos:
            return self.may_stop() and self._follow(token, b"", self._inner.advance(token))
        data = bits.texts[token]
        if not data or not self._inner.advance(token):
            return False
        return self._follow(token, data, True)

    def advance_bytes(self, data: bytes) -> bool:
        return self._inner.advance_bytes(data) and self._follow(None, data, True)

    def _follow(self, token: int | None, data: bytes, taken: bool) -> bool:
        """Take the inner matcher's step too, or undo it."""
        if not taken:
            return False
        position = self._tracker.position
        if data and not self._tracker.feed(data):
            self._inner.rollback(1)
            return False
        return self._done(position, token)

    def _allowed(self) -> TokenMask:
        wide, bits = self._inner.mask(), self._bits
        refused: list[int] = []
        if not self._tracker.complete():
            refused.extend(token for token in bits.vocabulary.eos if wide.allows(token))
            refused.extend(self._closing_tokens.refused(self._tracker, wide.bits))
        return bits.without(wide, refused) if refused else wide

    def forced_bytes(self) -> bytes:
        """Forced by the wider grammar, before any value that would be refused."""
        forced = b"" if self._forbidden else self._inner.forced_bytes()
        while forced and not self._tracker.allows(forced):
            forced = forced[:-1]
        return forced

    def may_stop(self) -> bool:
        return self._inner.may_stop() and self._tracker.complete()

    def is_terminated(self) -> bool:
        return self._inner.is_terminated() and self._tracker.complete()

    def _return(self, state: Position, steps: int) -> None:
        self._inner.rollback(steps)
        self._tracker.restore(state)

    def copy(self) -> CheckedMatcher:
        twin = CheckedMatcher(self._inner.copy(), self._tracker.copy(), self._closing_tokens)
        return twin._with_steps_of(self)

    def undoable(self) -> int:
        """The steps since the beginning of the outermost open value that has to be checked. No Rejection goes
        back further as long as some value is valid."""
        unsure, count, step = self._tracker.unsure(), 0, self._last
        if unsure >= self._tracker.position.length:
            return 0
        while step is not None:
            count += 1
            if step.state.state.length <= unsure:
                break
            step = step.before
        return count

    def _reason(self) -> str:
        return self._tracker.fault or "no valid document goes on from here"
