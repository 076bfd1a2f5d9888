"""The search for a short completion: ids that lead from a state of a constraint to one in which it may stop.

Limited discrepancy search (Harvey & Ginsberg, IJCAI 1995) over copies of a matcher. In each state the ids
that tend to end something come first (quotes, closing brackets, then digits and words); the path of first
choices is followed to its end, then those that differ in one choice, and so on. A state that was seen before
prefers what was tried less there. If most work went into one state, it is abandoned and the rest gets a
little more. Work is bounded, so the answer need not be the shortest, and may be missed; it comes in pieces,
between which other work may run.
"""

from __future__ import annotations

import heapq
import json
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from runtime.grammar.masks.token_bits import TokenBits, token_bits
from runtime.plan import TokenMask
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.vocabulary import Vocabulary

WORK = 96
"""States looked at in one search."""
_AGAIN = 32  # more of them, after a state was abandoned
_ABANDONED = 3  # states at most
_OFTEN = 24  # times that a state was looked at
SECONDS = 0.5
"""CPU time of one search, for constraints whose masks are slow. Others run out of work far earlier, so that
the same request has the same output on a busy machine. The longest look is not counted: it may contain a
garbage collection of the process."""
_CHOICES = 24  # ids tried in one state with a dense mask
_FEW = 64  # masks that allow no more ids are tried in full
_COPIES = 32  # matchers kept at once: they may be large
_RESTS = 64  # ends of a completion that are tried elsewhere
_QUOTES = frozenset(b"\"'`")
_ENDS = frozenset(b"\"'`]})>")
_SIGNS = b"@:/.=;_~#!?$%&*|^"  # possible separators
_EMPTY = (b'""', b"[]", b"{}", b"''", b"()")
_PLAIN = (b"q", b"Z", b"~")  # if all of these may follow, nearly anything may
_LITERAL_NAMES = (b"null", b"true", b"false")

PAUSE = object()
"""Yielded between two pieces of work by iterators of values."""

Result = TypeVar("Result")

Steps: TypeAlias = Generator[None, None, Result]
"""Work in pieces of about a millisecond at most; it returns the result."""


def at_once(steps: Steps[Result]) -> Result:
    """Run all steps and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


class Cursor(ABC):
    """A position in a constraint: what a search for a completion needs of a matcher."""

    @abstractmethod
    def advance(self, token: int) -> bool:
        """Follow one token; an eos id if may_stop(). False, and no change, if it is not allowed."""

    @abstractmethod
    def mask(self) -> TokenMask:
        """The ids allowed now, eos included if may_stop(). The arrays are shared: read only."""

    @abstractmethod
    def forced_bytes(self) -> bytes:
        """The longest unique byte path from here, b"" if there is a choice (stopping counts as one)."""

    def likely_bytes(self) -> bytes:
        """If there is a choice, bytes that probably lead to an end; a search for a completion tries them."""
        return b""

    @abstractmethod
    def may_stop(self) -> bool:
        """Whether the text so far is a whole match."""

    @abstractmethod
    def copy(self) -> Self:
        """An independent cursor in the same state."""


class CompletionResult(NamedTuple):
    """`ids`: the completion, or None. `empty`: nothing was left out, so there certainly is none."""

    ids: tuple[int, ...] | None
    empty: bool = False


class Spelling:
    """The ids of a vocabulary worth trying in any state, best first."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.silent = vocabulary.special | vocabulary.eos
        self.eos = vocabulary.eos
        self.texts = vocabulary.tokens
        bits = token_bits(vocabulary)
        self.ids, self.pieces = bits.id_of, bits.pieces
        self._plain = np.array([self.ids[data] for data in _PLAIN if data in self.ids], dtype=np.int64)
        self._outside = self._ranked(_rank_outside)
        self._inside = self._ranked(_rank_inside)
        self._alphanumeric = self._ranked(_rank_alphanumeric)[:256]
        self._closers = {token for data, token in self.ids.items() if _ends_string(data)}
        self.blank = {token for data, token in self.ids.items() if data[:1].isspace()}

    def _ranked(self, rank: Callable[[bytes], int | None]) -> npt.NDArray[np.int64]:
        texts = [data for data in self.ids if rank(data) is not None]
        texts.sort(key=lambda data: (rank(data), -len(data), data))
        return np.array([self.ids[data] for data in texts], dtype=np.int64)

    def literals(self, text: str) -> npt.NDArray[np.int64]:
        """The ids of a pattern's characters, else of their bytes; at most 16."""
        for escape, meant in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
            text = text.replace(escape, meant)
        coded = [character.encode("utf-8", "replace") for character in dict.fromkeys(text)]
        pieces = [data[at : at + 1] for data in coded if data not in self.ids for at in range(len(data))]
        known = [self.ids[data] for data in [*coded, *pieces] if data in self.ids]
        return np.array(known[:16], dtype=np.int64)

    def choices(self, mask: TokenMask, most: int, literals: npt.NDArray[np.int64]) -> tuple[list[int], bool]:
        """Ids of `mask` to try, best first, no eos, at most `most` of a dense mask; whether these are all."""
        free = len(self._plain) > 0 and len(_within(mask, self._plain)) == len(self._plain)
        probe = _within(mask, self._inside if free else self._outside)
        at = sum(token in self._closers for token in probe) if free else _CHOICES - 2
        probe[at:at] = [*_within(mask, literals), *_within(mask, self._alphanumeric)[:2]]
        if mask.allowed is not None and len(mask.allowed) <= _FEW:
            ids = [token for token in mask.allowed.tolist() if token not in self.eos]
            rank = {token: at for at, token in enumerate(probe)}
            ids.sort(key=lambda token: (rank.get(token, len(rank)), -len(self.texts[token]), token))
            return ids, True
        if len(probe) < most:
            every = mask.allowed if mask.allowed is not None else TokenBits.ids(mask.bits)
            other = [token for token in every[:4096].tolist() if token not in self.silent]
            other.sort(key=lambda token: (-len(self.texts[token]), token))
            probe += other[:most]
        return list(dict.fromkeys(probe))[:most], False


def _rank_inside(data: bytes) -> int | None:
    """Rank of a token if nearly anything may follow, as in a string; None: not among the first. Ends of
    strings with what may follow them, then signs, then the rest."""
    if _ends_string(data):
        return 0
    if len(data) == 1 and (data[0] in _ENDS or data in _SIGNS):
        return 1 if data[0] in _ENDS else 2
    return 3 if len(data) == 1 and 0x20 < data[0] < 0x7F and data != b"\\" else None


def _ends_string(data: bytes) -> bool:
    return data[0] in _QUOTES and len(data) <= 4 and all(byte in _ENDS or byte == 0x2C for byte in data[1:])


def _rank_alphanumeric(data: bytes) -> int | None:
    """Letters and digits, to fill a required number of characters."""
    return 0 if len(data) > 1 and data.isascii() and data.isalnum() else None


def _rank_outside(data: bytes) -> int | None:
    """Rank of a token outside of strings: ends of objects and arrays, empty values, digits, literal names,
    other signs; opening signs come late."""
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
    if any(name.startswith(data) for name in _LITERAL_NAMES):
        return 5
    return 6 if (len(data) == 1 and 0x20 <= data[0] < 0x7F) or data == b"\n" else None


def _within(mask: TokenMask, ids: npt.NDArray[np.int64]) -> list[int]:
    """Those of `ids` that the mask allows, in their order."""
    bits = np.asarray(mask.bits)
    allowed = (bits[ids >> 5] >> (ids & 31).astype(np.uint32)) & np.uint32(1)
    within: list[int] = ids[allowed.astype(np.bool_)].tolist()
    return within


@lru_cache(maxsize=4)
def spelling(vocabulary: Vocabulary) -> Spelling:
    return Spelling(vocabulary)


@dataclass(order=True)
class _Way:
    """A path of `ids`, the last of them after state number `after`. `cost`: choices on the way that were not
    the first; the longest path of the least cost goes on. `state`: the hash of the mask before the last
    id."""

    cost: int
    behind: int
    number: int
    after: int = field(compare=False)
    ids: tuple[int, ...] = field(compare=False)
    state: int = field(compare=False, default=0)


class _Search:
    def __init__(
        self, vocabulary: Vocabulary, limit: int, work: int, seconds: float, literals: str = ""
    ) -> None:
        self._spelling = spelling(vocabulary)
        self._literals = self._spelling.literals(literals)
        self._limit = limit
        self.work, self.seconds = work, seconds
        self._longest = 0.0  # seconds of one look at a state
        self._ways: list[_Way] = []
        self._tried: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._loops: dict[int, set[int]] = {}
        self._numbers = self._tickets = 0
        self._kept: dict[int, Cursor] = {}  # the last few states
        self._whole = True  # whether nothing was left out
        self._visits: Counter[int] = Counter()
        self._abandoned: set[int] = set()

    def run(self, start: Cursor) -> Steps[CompletionResult]:
        self._start = start
        self._ways = [_Way(0, 0, 0, 0, ())]
        while self._ways:
            if self.seconds + self._longest < 0 or (self.work <= 0 and not self._abandon()):
                return CompletionResult(None)
            way, began = heapq.heappop(self._ways), time.thread_time()
            if way.ids and way.state in self._abandoned:
                self._whole = False
                continue
            try:
                ids = self._expand(way)
            except RuntimeFault:  # a limit of the backend was met on this way
                self._whole = False
                continue
            finally:
                elapsed = time.thread_time() - began
                self.seconds -= elapsed
                self._longest = max(self._longest, elapsed)
            if ids is not None:
                return CompletionResult(self._fewest(start, ids))
            yield
        return CompletionResult(None, self._whole)

    def _abandon(self) -> bool:
        """Whether to go on elsewhere: most work went into a state that leads back to itself, such as a string
        whose end no value allows."""
        (state, times), *_ = self._visits.most_common(1) or [(0, 0)]
        if times < _OFTEN or len(self._abandoned) == _ABANDONED:
            return False
        self._abandoned.add(state)
        self._visits.clear()
        self.work = _AGAIN
        return True

    def _reach(self, way: _Way) -> Cursor | None:
        """The end of `way`. The last few states are kept; for others all ids are followed again."""
        kept = self._kept.get(way.after)
        cursor = (self._start if kept is None else kept).copy()
        ids = way.ids if kept is None else way.ids[-1:]
        return cursor if all(cursor.advance(token) for token in ids) else None

    def _expand(self, way: _Way) -> tuple[int, ...] | None:
        """The completion if this path is one; else its continuations are queued."""
        cursor, ids = self._reach(way), way.ids
        if cursor is None:
            return None
        self.work -= 1
        if cursor.may_stop():
            return ids
        ahead = self._forced(cursor, ids)
        if ahead is not None:
            cursor, ids = ahead
            if cursor.may_stop():
                return ids
        if len(ids) >= self._limit:
            self._whole = False
            return None
        mask = cursor.mask()
        state = hash(np.asarray(mask.bits).tobytes())
        self._visits[state] += 1
        if way.ids and state == way.state:
            self._loops.setdefault(state, set()).add(way.ids[-1])
        few = len(self._loops.get(state, ())) < _CHOICES  # else none of these leads anywhere
        choices, every = self._spelling.choices(mask, _CHOICES if few else 8 * _CHOICES, self._literals)
        self._whole &= every
        self._numbers += 1
        here = self._numbers
        self._kept[here] = cursor
        if len(self._kept) > _COPIES:
            del self._kept[next(iter(self._kept))]
        likely = self._spelling.pieces(cursor.likely_bytes())
        if likely:
            # Several ids: they are followed from the start.
            self._push(way.cost, -1, (*ids, *likely), len(ids), state)
        for cost, token in enumerate(self._ordered(state, choices), 1 if likely else 0):
            if cost == 0:
                self._tried[state, token] += 1
            self._push(way.cost + cost, here, (*ids, token), len(ids), state)
        return None

    def _push(self, cost: int, after: int, ids: tuple[int, ...], length: int, state: int) -> None:
        self._tickets += 1
        heapq.heappush(self._ways, _Way(cost, -length - 1, self._tickets, after, ids, state))

    def _ordered(self, state: int, choices: list[int]) -> list[int]:
        """The least tried first; then, the longest first, what leads back to the same state: it can
        only be a required number of characters."""
        texts, blank, tried = self._spelling.texts, self._spelling.blank, self._tried
        loops = self._loops.get(state, set())

        def key(ranked: tuple[int, int]) -> tuple[bool, int, int]:
            rank, token = ranked
            times = tried[state, token]
            if token in loops:  # a few times in a row: two of them may be what it takes
                return True, times // 4, -len(texts[token])
            return False, times + 4 * (token in blank), rank

        return [token for _, token in sorted(enumerate(choices), key=key)]

    def _forced(self, cursor: Cursor, ids: tuple[int, ...]) -> tuple[Cursor, tuple[int, ...]] | None:
        """The state after forced text, if that can be spelled and fits."""
        forced = cursor.forced_bytes()
        pieces = self._spelling.pieces(forced) if forced else None
        if not pieces or len(ids) + len(pieces) > self._limit:
            return None
        ahead = cursor.copy()
        for number, token in enumerate(pieces):
            if not ahead.advance(token):
                return None
            if ahead.may_stop():
                return ahead, (*ids, *pieces[: number + 1])
        return ahead, (*ids, *pieces)

    def _fewest(self, start: Cursor, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The same text in fewer ids, if its tokens allow that."""
        texts, silent = self._spelling.texts, self._spelling.silent
        if any(token in silent for token in ids):
            return ids
        pieces = self._spelling.pieces(b"".join(texts[token] for token in ids))
        if pieces is None or len(pieces) >= len(ids):
            return ids
        return tuple(pieces) if follows(start, pieces) else ids


def follows(cursor: Cursor, ids: tuple[int, ...] | list[int]) -> bool:
    """Whether `ids` may come next, one by one, and it may stop after them. Changes nothing."""
    ahead = cursor.copy()
    try:
        return all(ahead.advance(token) for token in ids) and ahead.may_stop()
    except RuntimeFault:
        return False


Written: TypeAlias = "tuple[Cursor, tuple[int, ...]] | None"


def write_value(
    start: Cursor, vocabulary: Vocabulary, value: Any, comma: bytes, colon: bytes
) -> tuple[int, ...] | None:
    """The ids of a JSON value, its members in an order that `start` takes; None if there is none."""
    bits = token_bits(vocabulary)

    def write_bytes(cursor: Cursor, ids: tuple[int, ...], data: bytes) -> Written:
        pieces, ahead = bits.pieces(data), cursor.copy()
        if pieces is None or not all(ahead.advance(token) for token in pieces):
            return None
        return ahead, (*ids, *pieces)

    def write(cursor: Cursor, ids: tuple[int, ...], value: Any) -> Written:
        if not value or not isinstance(value, dict | list):
            return write_bytes(cursor, ids, json.dumps(value, ensure_ascii=False).encode())
        inside = list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]
        first, last = (b"{", b"}") if isinstance(value, dict) else (b"[", b"]")
        while inside:
            for at, (name, inner) in enumerate(inside if isinstance(value, dict) else inside[:1]):
                key = b"" if name is None else json.dumps(name, ensure_ascii=False).encode() + colon
                begun = write_bytes(cursor, ids, first + key)
                done = None if begun is None else write(*begun, inner)
                if done is not None:
                    cursor, ids = done
                    del inside[at]
                    break
            else:
                return None
            first = comma
        return write_bytes(cursor, ids, last)

    try:
        done = write(start, (), value)
    except (RuntimeFault, RecursionError, UnicodeEncodeError):
        return None
    return done[1] if done is not None and done[0].may_stop() else None


def search(
    start: Cursor, vocabulary: Vocabulary, limit: int, *, work: int = WORK, seconds: float = SECONDS,
    shorten: bool = False,
) -> CompletionResult:  # fmt: skip
    """A completion of at most `limit` ids. `start` is not changed; `work`: states looked at, fewer for small
    limits; `seconds`: CPU time. `shorten`: look for shorter ones while both last."""
    return at_once(searching(start, vocabulary, limit, work=work, seconds=seconds, shorten=shorten))


def searching(
    start: Cursor, vocabulary: Vocabulary, limit: int, *, work: int = WORK, seconds: float = SECONDS,
    shorten: bool = False, literals: str = "",
) -> Steps[CompletionResult]:  # fmt: skip
    """search() in pieces. `literals`: characters that are tried early."""
    work = min(work, 32 + 8 * limit)
    task = _Search(vocabulary, limit, work, seconds, literals)
    best = yield from task.run(start)
    effort, left = 32 + 2 * (work - task.work), task.seconds
    while shorten and best.ids is not None and len(best.ids) > 3:
        task = _Search(vocabulary, 3 * len(best.ids) // 4, effort, left)
        shorter = yield from task.run(start)
        if shorter.ids is None:
            break
        best, left = shorter, task.seconds
    if shorten and best.ids:
        return CompletionResult((yield from _spliced(start, best.ids, seconds / 4)))
    return best


def rest_of(cursor: Cursor, ids: tuple[int, ...]) -> Steps[tuple[int, ...] | None]:
    """The shortest end of the completion `ids` that is a completion here, too."""
    mask, tries = cursor.mask(), _RESTS
    for at in range(len(ids) - 1, -1, -1):
        if mask.allows(ids[at]):
            if follows(cursor, ids[at:]):
                return ids[at:]
            tries -= 1
            if not tries:
                break
            yield
    return None


def _spliced(start: Cursor, ids: tuple[int, ...], seconds: float) -> Steps[tuple[int, ...]]:
    """The completion `ids`, each rest replaced by its shortest valid end. `seconds`: CPU time."""
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
