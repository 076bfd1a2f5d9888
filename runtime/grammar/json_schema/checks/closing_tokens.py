"""Which tokens of a mask close a value, or a name, that is refused: asked of few tokens instead of each.

Most tokens that hold a quote do no more than close the string under way, and most schemas tell few strings
apart: a handful of names that are there already, the values of an enum. Those few are asked about; what
does more than close a string is followed byte by byte, with prefixes shared. It knows no grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from runtime.grammar.json_schema.checks import tracker as at
from runtime.grammar.json_schema.checks.tracker import JsonTracker, Place
from runtime.grammar.masks.token_bits import Bits, TokenBits

_TO_QUOTE = re.compile(rb'((?:[^"\\]|\\.)*+)"', re.DOTALL)
"""From within a string, not in an escape: what stands before the quote that ends it."""

_ENDS = rb"[ \t\r\n]*+((?:[\]}][ \t\r\n]*+)*+)"
_QUIET = rb'(?:[:,][\[{ \t\r\n]*+(?:"[^"]*+|[-+\w.]++)?+)?+'
"""Nothing that could end a value or a name."""

_TAIL = re.compile(_ENDS + _QUIET)
"""After a string: the ends of arrays and objects around it, and then nothing that could end anything."""

_OUTSIDE = re.compile(rb"[-+\w.]*+" + _ENDS + _QUIET)
"""The same from the middle or the end of another value."""

_OPENING = re.compile(rb'[:,\[{ \t\r\n]*+(?:"[^"]*+|[-+\w.]++)?+')
"""After or before a value: what may begin others and ends none."""

_LEAD = re.compile(rb'[, \t\r\n]*+"')
_PIECES = re.compile(rb'[^"\\,:\[\]{} \t\r\n]+|.', re.DOTALL)
_LEVELS = 4


class ClosingTokenFilter:
    """The tokens of a vocabulary by what they end. Made once for a vocabulary.

    strings, others, names   tokens that end a string under way, another value under way or none, or a name
                             that they begin; by number n < _LEVELS, those that besides end at most n of the
                             arrays and objects around it (names: none), and that end nothing else
    never, opening           those that hold quotes, all escaped; those that end nothing but other space
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

    def refused(self, tracker: JsonTracker, candidates: Bits) -> Iterator[int]:
        """Those of `candidates` that may not follow."""
        place = tracker.place
        frame = place.frame
        if place.mode in (at.STRING, at.NAME):
            if not place.escaped:
                candidates = candidates & ~self.never
                begun = _text(tracker.since(place.start + 1))
                if begun is not None:
                    simple = candidates & self.strings[_free(place.frame)]
                    yield from self._closing(tracker, place, begun, simple, self._groups[0])
                    candidates = candidates & ~simple
            yield from self._followed(tracker, candidates)
            return
        if place.mode != at.SCALAR:
            candidates = candidates & ~self.opening
        if place.mode in (at.KEY, at.AFTER, at.COLON) or not owes_scalar(place):
            candidates = candidates & ~self.others[_free(place.frame)]
            frame = place.frame
            if frame is not None and frame.is_object and place.mode in (at.KEY, at.AFTER):
                named = place._replace(mode=at.NAME)
                if told_apart(named) is not None:
                    names = candidates & self.names
                    yield from self._closing(tracker, named, "", names, self._groups[1])
                    candidates = candidates & ~names
        yield from self._followed(tracker, candidates)

    def _closing(
        self, tracker: JsonTracker, place: Place, begun: str, simple: Bits, groups: _Groups
    ) -> Iterator[int]:
        """Of tokens that end the string or name which `begun` is of."""
        ids = self.bits.ids(simple)
        if not len(ids):
            return

        def taken(text: str) -> bool:
            return tracker.closes(place, begun + text)

        apart = told_apart(place)
        if apart is None:
            numbers = groups.group[ids]
            gone = [number for number in np.unique(numbers).tolist() if not taken(groups.texts[number])]
            yield from ids[np.isin(numbers, gone)].tolist() if gone else ()
            return
        special = [text[len(begun) :] for text in apart if text.startswith(begun)]
        usual = taken(next(text for text in _fresh() if text not in special))
        odd = [token for text in special if taken(text) is not usual for token in groups.tokens(text)]
        if odd or not usual:
            held = set(ids.tolist())
            yield from held.intersection(odd) if usual else held.difference(odd)

    def _followed(self, tracker: JsonTracker, candidates: Bits) -> Iterator[int]:
        """Of any tokens, each followed through the text. What one begins with is not followed again for the
        next."""
        ids = self.bits.ids(candidates).tolist()
        texts = self.bits.texts
        start = tracker.place
        path, before, dead = [(0, start)], b"", b""
        for data, token in sorted((texts[token], token) for token in ids):
            if dead and data.startswith(dead):
                yield token
                continue
            shared = _shared(before, data)
            while path[-1][0] > shared:
                path.pop()
            tracker.restore(path[-1][1])
            before, dead = data, b""
            for piece in _PIECES.finditer(data, path[-1][0]):
                if not tracker.feed(piece[0]):
                    dead = data[: piece.end()]
                    yield token
                    break
                path.append((piece.end(), tracker.place))
        tracker.restore(start)


class _Groups:
    """Tokens by what they add to a string: `texts[group[token]]`, -1 for those that were not added."""

    def __init__(self, width: int) -> None:
        self.texts: list[str] = []
        self.group: npt.NDArray[np.int64] = np.full(width, -1, dtype=np.int64)
        self._tokens: dict[str, list[int]] = {}

    def add(self, token: int, data: bytes) -> bool:
        """False where `data` is no whole text."""
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


def owes_scalar(place: Place) -> bool:
    """Whether a number or word that ends at `place`, or begins and ends there, is checked."""
    frame = place.frame
    differs = frame is not None and not frame.is_object and frame.obligation.unique
    return differs or bool(place.obligation.places)


def _free(frame: at.Frame | None) -> int:
    """How many of the open arrays and objects, from the innermost, may end unchecked; fewer than _LEVELS."""
    count = 0
    while frame is not None and count < _LEVELS - 1 and not frame.obligation.places:
        frame = frame.outer
        if frame is not None and not frame.is_object and frame.obligation.unique:
            break
        count += 1
    return count


def _brackets(data: bytes) -> int:
    return data.count(b"]") + data.count(b"}")


def told_apart(place: Place) -> frozenset[str] | None:
    """The strings that may fare differently from others as they close at `place`; None: too many to list."""
    frame = place.frame
    if place.mode == at.NAME:
        return None if frame is None or frame.obligation.minds_names else frame.names
    apart = place.obligation.told_apart
    if apart is None or frame is None or frame.is_object or not frame.obligation.unique:
        return apart
    return apart | {json.loads(item) for item in frame.names if item.startswith('"')}


def _fresh() -> Iterator[str]:
    """Strings, without an end, that no schema has in mind."""
    number = 0
    while True:
        yield f"\x11{number}"
        number += 1


def _text(data: bytes) -> str | None:
    """What `data` spells within a string; None where that is not whole characters."""
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


def _shared(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    for place in range(size):
        if one[place] != other[place]:
            return place
    return size
