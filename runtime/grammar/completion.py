"""The search for a short completion: ids that lead from a place in a constraint to where it may stop.

Limited discrepancy search (Harvey & Ginsberg, "Limited discrepancy search", IJCAI 1995) over copies of a
matcher: at each place the ids that tend to end something come first (quotes, closing brackets, then digits
and words), the path that always takes the first is followed to its end, then those that differ in one choice,
and so on. Forced text is no choice. A place that was met before prefers what was tried less there, so no loop
is followed for ever. Where the work is used up by going round in one place, that place is given up and the
rest of the ways get a little more. Work is bounded: the answer need not be the shortest, and none may be
found where there is one. It can be done in pieces, between which something else may run. It knows no backend.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from runtime.plan import TokenMask
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.vocabulary import Vocabulary

WORK = 96
"""Places looked at in one search."""
_AGAIN = 32  # more of them, after a place was given up
_GIVEN_UP = 3  # places at most
_OFTEN = 24  # times that a place was looked at
SECONDS = 0.5
"""CPU time one search may take: a guard against constraints each of whose masks is slow. Work ends others far
before that, so that the same request has the same output on a busy machine. The longest look is not counted:
a garbage collection of the whole process may fall into it."""
_CHOICES = 24  # ids tried at one place of a dense mask
_FEW = 64  # masks that allow no more ids are tried in full
_COPIES = 32  # matchers kept at once: they may be large
_RESTS = 64  # ends of a completion that are tried elsewhere
_LONGEST = 32  # bytes of a token that is looked up by its text
_QUOTES = frozenset(b"\"'`")
_ENDS = frozenset(b"\"'`]})>")
_SIGNS = b"@:/.=;_~#!?$%&*|^"  # what may part one thing from the next
_EMPTY = (b'""', b"[]", b"{}", b"''", b"()")
_PLAIN = (b"q", b"Z", b"~")  # where all of these may follow, most anything may
_WORDS = (b"null", b"true", b"false")

PAUSE = object()
"""Between two pieces of what gives values."""

Self = TypeVar("Self", bound="Walker")
Made = TypeVar("Made")

Steps: TypeAlias = Generator[None, None, Made]
"""Work in pieces, each of about a millisecond at most; what it returns is the result."""


def at_once(steps: Steps[Made]) -> Made:
    """All of it, in one go."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: Made = end.value
            return made


class Walker(Protocol):
    """What the search needs of a Matcher."""

    def advance(self, token: int) -> bool: ...
    def mask(self) -> TokenMask: ...
    def forced_bytes(self) -> bytes: ...
    def likely_bytes(self) -> bytes: ...
    def may_stop(self) -> bool: ...
    def copy(self: Self) -> Self: ...


class Found(NamedTuple):
    """`ids`: the completion, None where none was found. `empty`: every way on was followed, and none ends: it
    is certain that there is no completion."""

    ids: tuple[int, ...] | None
    empty: bool = False


class Spelling:
    """A vocabulary's ids by their text, and those worth trying at any place, best first."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.silent = vocabulary.special | vocabulary.eos
        self.eos = vocabulary.eos
        self.texts = vocabulary.tokens
        self.ids: dict[bytes, int] = {}
        for token, data in enumerate(vocabulary.tokens):
            if data and len(data) <= _LONGEST and token not in self.silent:
                self.ids.setdefault(data, token)
        self.longest = max(map(len, self.ids), default=0)
        self._plain = np.array([self.ids[data] for data in _PLAIN if data in self.ids], dtype=np.int64)
        self._outside = self._ranked(_rank_outside)
        self._inside = self._ranked(_rank_inside)
        self._words = self._ranked(_rank_word)[:256]
        self._closers = {token for data, token in self.ids.items() if _ends_string(data)}
        self.blank = {token for data, token in self.ids.items() if data[:1].isspace()}

    def _ranked(self, rank: Callable[[bytes], int | None]) -> npt.NDArray[np.int64]:
        found = [data for data in self.ids if rank(data) is not None]
        found.sort(key=lambda data: (rank(data), -len(data), data))
        return np.array([self.ids[data] for data in found], dtype=np.int64)

    def pieces(self, data: bytes) -> list[int] | None:
        """The fewest ids that spell `data`; None where it cannot be spelled."""
        best: list[tuple[int, int] | None] = [(0, -1)] + [None] * len(data)  # (ids so far, the last of them)
        for at in range(len(data)):
            here = best[at]
            if here is None:
                continue
            for size in range(1, min(self.longest, len(data) - at) + 1):
                token = self.ids.get(data[at : at + size])
                after = best[at + size]
                if token is not None and (after is None or here[0] + 1 < after[0]):
                    best[at + size] = (here[0] + 1, token)
        ids: list[int] = []
        at = len(data)
        while at:
            step = best[at]
            if step is None:
                return None
            ids.append(step[1])
            at -= len(self.texts[step[1]])
        return ids[::-1]

    def literals(self, text: str) -> npt.NDArray[np.int64]:
        """The ids of the characters that a pattern's text spells, else of their bytes; at most 16."""
        for escape, meant in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
            text = text.replace(escape, meant)
        coded = [character.encode("utf-8", "replace") for character in dict.fromkeys(text)]
        pieces = [data[at : at + 1] for data in coded if data not in self.ids for at in range(len(data))]
        known = [self.ids[data] for data in [*coded, *pieces] if data in self.ids]
        return np.array(known[:16], dtype=np.int64)

    def choices(self, mask: TokenMask, most: int, literals: npt.NDArray[np.int64]) -> tuple[list[int], bool]:
        """Ids of `mask` to try, best first, no eos, of a dense one at most `most`; and whether these are
        all."""
        free = len(self._plain) > 0 and len(_within(mask, self._plain)) == len(self._plain)
        probe = _within(mask, self._inside if free else self._outside)
        at = sum(token in self._closers for token in probe) if free else _CHOICES - 2
        probe[at:at] = [*_within(mask, literals), *_within(mask, self._words)[:2]]
        if mask.allowed is not None and len(mask.allowed) <= _FEW:
            ids = [token for token in mask.allowed.tolist() if token not in self.eos]
            place = {token: at for at, token in enumerate(probe)}
            ids.sort(key=lambda token: (place.get(token, len(place)), -len(self.texts[token]), token))
            return ids, True
        if len(probe) < most:
            every = mask.allowed if mask.allowed is not None else _listed(mask, len(self.texts))
            other = [token for token in every[:4096].tolist() if token not in self.silent]
            other.sort(key=lambda token: (-len(self.texts[token]), token))
            probe += other[:most]
        return list(dict.fromkeys(probe))[:most], False


def _rank_inside(data: bytes) -> int | None:
    """How soon to try a token where most anything may follow, as in a string; None: not among the first.
    Ends of strings, with what they may be followed by; signs; the rest."""
    if _ends_string(data):
        return 0
    if len(data) == 1 and (data[0] in _ENDS or data in _SIGNS):
        return 1 if data[0] in _ENDS else 2
    return 3 if len(data) == 1 and 0x20 < data[0] < 0x7F and data != b"\\" else None


def _ends_string(data: bytes) -> bool:
    return data[0] in _QUOTES and len(data) <= 4 and all(byte in _ENDS or byte == 0x2C for byte in data[1:])


def _rank_word(data: bytes) -> int | None:
    """Words, to run down a count of characters."""
    return 0 if len(data) > 1 and data.isascii() and data.isalnum() else None


def _rank_outside(data: bytes) -> int | None:
    """The same elsewhere: ends of objects and arrays, empty values, digits, words of JSON, other signs;
    what opens something comes late."""
    if len(data) <= 4 and all(byte in _ENDS and byte not in _QUOTES for byte in data):
        return 0
    if data in _EMPTY or data == b",":
        return 1
    if _ends_string(data):
        return 2
    if len(data) == 1 and data in _SIGNS:
        return 3
    if len(data) == 1 and data.isdigit():
        return 4
    if any(word.startswith(data) for word in _WORDS):
        return 5
    return 6 if (len(data) == 1 and 0x20 <= data[0] < 0x7F) or data == b"\n" else None


def _within(mask: TokenMask, ids: npt.NDArray[np.int64]) -> list[int]:
    """Those of `ids` that the mask allows, in their order."""
    bits = np.asarray(mask.bits)
    allowed = (bits[ids >> 5] >> (ids & 31).astype(np.uint32)) & np.uint32(1)
    found: list[int] = ids[allowed.astype(np.bool_)].tolist()
    return found


def _listed(mask: TokenMask, width: int) -> npt.NDArray[np.int64]:
    flags = np.unpackbits(np.ascontiguousarray(mask.bits).view(np.uint8), bitorder="little")[:width]
    return np.flatnonzero(flags)


@lru_cache(maxsize=4)
def spelling(vocabulary: Vocabulary) -> Spelling:
    return Spelling(vocabulary)


@dataclass(order=True)
class _Way:
    """`ids` in all, the last of them behind place number `after`. `cost`: choices on the
    way that were not the first; the longest way of the least cost goes on. `place`: what was
    allowed there, hashed."""

    cost: int
    behind: int
    number: int
    after: int = field(compare=False)
    ids: tuple[int, ...] = field(compare=False)
    place: int = field(compare=False, default=0)


class _Search:
    def __init__(
        self, vocabulary: Vocabulary, limit: int, work: int, seconds: float, literals: str = ""
    ) -> None:
        self._spelling = spelling(vocabulary)
        self._literals = self._spelling.literals(literals)
        self._limit = limit
        self.work, self.seconds = work, seconds
        self._longest = 0.0  # seconds of one look at a place
        self._ways: list[_Way] = []
        self._tried: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._loops: dict[int, set[int]] = {}
        self._numbers = self._tickets = 0
        self._kept: dict[int, Walker] = {}  # places looked at, the last few
        self._whole = True  # whether nothing was left out
        self._met: Counter[int] = Counter()  # places, and how often
        self._given_up: set[int] = set()

    def run(self, start: Walker) -> Steps[Found]:
        self._start = start
        self._ways = [_Way(0, 0, 0, 0, ())]
        while self._ways:
            if self.seconds + self._longest < 0 or (self.work <= 0 and not self._give_up()):
                return Found(None)
            way, began = heapq.heappop(self._ways), time.thread_time()
            if way.ids and way.place in self._given_up:
                self._whole = False
                continue
            try:
                found = self._expand(way)
            except RuntimeFault:  # a limit of the backend was met on this way
                self._whole = False
                continue
            finally:
                took = time.thread_time() - began
                self.seconds -= took
                self._longest = max(self._longest, took)
            if found is not None:
                return Found(self._fewest(start, found))
            yield
        return Found(None, self._whole)

    def _give_up(self) -> bool:
        """Whether to go on elsewhere: most work went into a place that leads back to itself, as a string does
        whose end no value allows."""
        (place, times), *_ = self._met.most_common(1) or [(0, 0)]
        if times < _OFTEN or len(self._given_up) == _GIVEN_UP:
            return False
        self._given_up.add(place)
        self._met.clear()
        self.work = _AGAIN
        return True

    def _reach(self, way: _Way) -> Walker | None:
        """At the end of `way`. The last few places are kept; from others all ids are followed again."""
        kept = self._kept.get(way.after)
        walker = (self._start if kept is None else kept).copy()
        ids = way.ids if kept is None else way.ids[-1:]
        return walker if all(walker.advance(token) for token in ids) else None

    def _expand(self, way: _Way) -> tuple[int, ...] | None:
        """The completion if this way is one; else its continuations wait."""
        walker, ids = self._reach(way), way.ids
        if walker is None:
            return None
        self.work -= 1
        if walker.may_stop():
            return ids
        ahead = self._forced(walker, ids)
        if ahead is not None:
            walker, ids = ahead
            if walker.may_stop():
                return ids
        if len(ids) >= self._limit:
            self._whole = False
            return None
        mask = walker.mask()
        place = hash(np.asarray(mask.bits).tobytes())
        self._met[place] += 1
        if way.ids and place == way.place:
            self._loops.setdefault(place, set()).add(way.ids[-1])
        few = len(self._loops.get(place, ())) < _CHOICES  # else none of these leads anywhere
        choices, every = self._spelling.choices(mask, _CHOICES if few else 8 * _CHOICES, self._literals)
        self._whole &= every
        self._numbers += 1
        here = self._numbers
        self._kept[here] = walker
        if len(self._kept) > _COPIES:
            del self._kept[next(iter(self._kept))]
        likely = self._spelling.pieces(walker.likely_bytes())
        if likely:
            # Several ids: they are followed from the start.
            self._tickets += 1
            way_on = _Way(way.cost, -len(ids) - 1, self._tickets, -1, (*ids, *likely), place)
            heapq.heappush(self._ways, way_on)
        for cost, token in enumerate(self._ordered(place, choices), 1 if likely else 0):
            if cost == 0:
                self._tried[place, token] += 1
            self._tickets += 1
            way_on = _Way(way.cost + cost, -len(ids) - 1, self._tickets, here, (*ids, token), place)
            heapq.heappush(self._ways, way_on)
        return None

    def _ordered(self, place: int, choices: list[int]) -> list[int]:
        """What was tried least here first; then, the longest first, what leads back to this very place: it
        can only be a count that runs down."""
        texts, blank, tried = self._spelling.texts, self._spelling.blank, self._tried
        loops = self._loops.get(place, set())

        def key(ranked: tuple[int, int]) -> tuple[bool, int, int]:
            rank, token = ranked
            times = tried[place, token]
            if token in loops:  # a few times in a row: two of them may be what it takes
                return True, times // 4, -len(texts[token])
            return False, times + 4 * (token in blank), rank

        return [token for _, token in sorted(enumerate(choices), key=key)]

    def _forced(self, walker: Walker, ids: tuple[int, ...]) -> tuple[Walker, tuple[int, ...]] | None:
        """Behind what is forced, if that can be spelled and fits."""
        forced = walker.forced_bytes()
        pieces = self._spelling.pieces(forced) if forced else None
        if not pieces or len(ids) + len(pieces) > self._limit:
            return None
        ahead = walker.copy()
        for number, token in enumerate(pieces):
            if not ahead.advance(token):
                return None
            if ahead.may_stop():
                return ahead, (*ids, *pieces[: number + 1])
        return ahead, (*ids, *pieces)

    def _fewest(self, start: Walker, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The same text in fewer ids, if its tokens allow that."""
        texts, silent = self._spelling.texts, self._spelling.silent
        if any(token in silent for token in ids):
            return ids
        pieces = self._spelling.pieces(b"".join(texts[token] for token in ids))
        if pieces is None or len(pieces) >= len(ids):
            return ids
        return tuple(pieces) if follows(start, pieces) else ids


def follows(walker: Walker, ids: tuple[int, ...] | list[int]) -> bool:
    """Whether `ids` may come next, one by one, and it may stop behind them. Changes nothing."""
    ahead = walker.copy()
    try:
        return all(ahead.advance(token) for token in ids) and ahead.may_stop()
    except RuntimeFault:
        return False


Placed: TypeAlias = "tuple[Walker, tuple[int, ...]] | None"


def written(
    start: Walker, vocabulary: Vocabulary, value: Any, comma: bytes, colon: bytes
) -> tuple[int, ...] | None:
    """The ids of a JSON value, the members of its objects in an order that `start` takes; None where none
    does, one choice after another."""
    spelled = spelling(vocabulary)

    def say(walker: Walker, ids: tuple[int, ...], data: bytes) -> Placed:
        pieces, ahead = spelled.pieces(data), walker.copy()
        if pieces is None or not all(ahead.advance(token) for token in pieces):
            return None
        return ahead, (*ids, *pieces)

    def tell(walker: Walker, ids: tuple[int, ...], value: Any) -> Placed:
        if not value or not isinstance(value, dict | list):
            return say(walker, ids, json.dumps(value, ensure_ascii=False).encode())
        inside = list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]
        first, last = (b"{", b"}") if isinstance(value, dict) else (b"[", b"]")
        while inside:
            for at, (name, inner) in enumerate(inside if isinstance(value, dict) else inside[:1]):
                key = b"" if name is None else json.dumps(name, ensure_ascii=False).encode() + colon
                begun = say(walker, ids, first + key)
                done = None if begun is None else tell(*begun, inner)
                if done is not None:
                    walker, ids = done
                    del inside[at]
                    break
            else:
                return None
            first = comma
        return say(walker, ids, last)

    try:
        done = tell(start, (), value)
    except (RuntimeFault, RecursionError, UnicodeEncodeError):
        return None
    return done[1] if done is not None and done[0].may_stop() else None


def search(
    start: Walker, vocabulary: Vocabulary, limit: int, *, work: int = WORK, seconds: float = SECONDS,
    shorten: bool = False,
) -> Found:  # fmt: skip
    """A completion of at most `limit` ids. `start` is not changed; `work`: places looked at, fewer where few
    ids are allowed; `seconds`: CPU time it may take. `shorten`: look for a shorter one again and again, as
    far as both last."""
    return at_once(searching(start, vocabulary, limit, work=work, seconds=seconds, shorten=shorten))


def searching(
    start: Walker, vocabulary: Vocabulary, limit: int, *, work: int = WORK, seconds: float = SECONDS,
    shorten: bool = False, literals: str = "",
) -> Steps[Found]:  # fmt: skip
    """search() in pieces. `literals`: the characters in it are tried early."""
    work = min(work, 32 + 8 * limit)
    task = _Search(vocabulary, limit, work, seconds, literals)
    found = yield from task.run(start)
    effort, left = 32 + 2 * (work - task.work), task.seconds
    while shorten and found.ids is not None and len(found.ids) > 3:
        task = _Search(vocabulary, 3 * len(found.ids) // 4, effort, left)
        shorter = yield from task.run(start)
        if shorter.ids is None:
            break
        found, left = shorter, task.seconds
    if shorten and found.ids:
        return Found((yield from _spliced(start, found.ids, seconds / 4)))
    return found


def rest_of(walker: Walker, ids: tuple[int, ...]) -> Steps[tuple[int, ...] | None]:
    """The shortest end of the completion `ids` that is a completion here, too."""
    mask, tries = walker.mask(), _RESTS
    for at in range(len(ids) - 1, -1, -1):
        if mask.allows(ids[at]):
            if follows(walker, ids[at:]):
                return ids[at:]
            tries -= 1
            if not tries:
                break
            yield
    return None


def _spliced(start: Walker, ids: tuple[int, ...], seconds: float) -> Steps[tuple[int, ...]]:
    """The completion `ids` without what can be left out of it: from each place on, the shortest rest of it
    that is good there. `seconds`: CPU time after which it is left at that."""
    here, at = start.copy(), 0
    while at < len(ids) and seconds > 0:
        began = time.thread_time()
        mask = here.mask()
        for later in range(len(ids) - 1, at, -1):
            token = ids[later]
            if mask.allows(token) and follows(here, ids[later:]):
                ids = ids[:at] + ids[later:]
                break
            if time.thread_time() - began > seconds:
                break
        if not here.advance(ids[at]):
            break
        at += 1
        seconds -= time.thread_time() - began
        yield
    return ids
