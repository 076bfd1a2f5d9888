"""Text in which free text, literals and constrained parts alternate: the machine of structural tags.

A set of threads follows the parts byte by byte, so a token may cross from one part into the next and parts
may be ambiguous. Constrained parts are matchers of a backend; free text is UTF-8 up to its first trigger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from runtime.grammar.base import Matcher
from runtime.grammar.masks.token_bits import Bits, sift_tokens
from runtime.grammar.tags.tag_space import TagSpace, Triggers, utf8_step


@dataclass(frozen=True, eq=False)
class Literal:
    """Exactly these bytes."""

    data: bytes


@dataclass(frozen=True, eq=False)
class Exit:
    """After the first `data` in free text `then` follows; `again`: and free text after it."""

    data: bytes
    then: Part
    again: bool = False


@dataclass(frozen=True, eq=False)
class Text:
    """Free text without `excludes` that ends at `exits`, and at any character if `may_end`."""

    exits: tuple[Exit, ...] = ()
    excludes: tuple[bytes, ...] = ()
    may_end: bool = True
    triggers: Triggers = field(init=False)
    firsts: frozenset[int] = field(init=False)
    """Bytes that a trigger begins with."""

    def __post_init__(self) -> None:
        strings = (*self.excludes, *(one.data for one in self.exits))
        object.__setattr__(self, "triggers", Triggers(strings))
        object.__setattr__(self, "firsts", frozenset(string[0] for string in strings if string))


@dataclass(frozen=True, eq=False)
class Leaf:
    """A constrained part. `first`: its matcher at the start, which is only copied, so that threads may share
    it. `closers`: the bytes that its whole matches end in, None = any."""

    first: Matcher
    closers: frozenset[int] | None = None
    may_be_empty: bool = field(init=False)
    only_empty: bool = field(init=False)
    unclosed: re.Pattern[bytes] | None = field(init=False)
    """A run of bytes in which no whole match ends."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "may_be_empty", self.first.may_stop())
        object.__setattr__(self, "only_empty", self.first.is_terminated())
        closers = re.escape(bytes(sorted(self.closers or ())))
        run = re.compile(b"[^" + closers + b"]+", re.DOTALL) if closers else None
        object.__setattr__(self, "unclosed", run)


@dataclass(frozen=True, eq=False)
class Chain:
    items: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    options: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """`item` `low` to `high` times; high None = without end."""

    item: Part
    low: int
    high: int | None


Part = Literal | Text | Leaf | Chain | Choice | Loop


class Rest(NamedTuple):
    """What follows: `part` (for a Loop, after `rounds` of it), then `after`."""

    part: Part
    rounds: int
    after: Rest | None


class InLiteral(NamedTuple):
    data: bytes
    at: int
    rest: Rest | None


class InText(NamedTuple):
    text: Text
    state: int
    utf8: int
    rest: Rest | None


class InLeaf(NamedTuple):
    """`run` by number, after `depth` pieces of text were fed to it."""

    leaf: Leaf
    run: int
    depth: int
    rest: Rest | None


Thread = InLiteral | InText | InLeaf


class Threads(NamedTuple):
    """The live parser threads after the text so far. `whole`: one more thread is complete."""

    threads: tuple[Thread, ...]
    whole: bool


class Runs:
    """The matchers of the leaves that were entered, by number. Copies share them until one moves."""

    def __init__(self) -> None:
        self._matchers: dict[int, Matcher] = {}
        self._depths: dict[int, int] = {}
        self._owned: set[int] = set()
        self.next = 0

    def enter(self, leaf: Leaf) -> int:
        number, self.next = self.next, self.next + 1
        self._matchers[number], self._depths[number] = leaf.first, 0
        return number

    def matcher(self, number: int) -> Matcher:
        """The matcher, no longer shared."""
        if number not in self._owned:
            self._matchers[number] = self._matchers[number].copy()
            self._owned.add(number)
        return self._matchers[number]

    def feed(self, number: int, data: bytes) -> bool:
        if not self.matcher(number).advance_bytes(data):
            return False
        self._depths[number] += 1
        return True

    def restore(self, now: Threads) -> None:
        """Roll the leaves of `now` back to their state then."""
        for thread in now.threads:
            if isinstance(thread, InLeaf) and self._depths[thread.run] != thread.depth:
                self.matcher(thread.run).rollback(self._depths[thread.run] - thread.depth)
                self._depths[thread.run] = thread.depth

    def forget(self, first: int) -> None:
        """Drop the runs numbered `first` and up."""
        for number in range(first, self.next):
            del self._matchers[number], self._depths[number]
            self._owned.discard(number)
        self.next = first

    def copy(self) -> Runs:
        twin = Runs()
        twin._matchers, twin._depths, twin.next = dict(self._matchers), dict(self._depths), self.next
        self._owned.clear()
        return twin


class Machine:
    """Steps the threads, over the matchers in `runs`."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def begin(self, part: Part) -> Threads:
        return self._gather([(part, 0, None)], [], False)

    def step(self, now: Threads, byte: int) -> Threads | None:
        """None if no thread can take `byte`."""
        ahead: list[Rest | tuple[Part, int, Rest | None]] = []
        threads: list[Thread] = []
        whole = False
        for thread in now.threads:
            match thread:
                case InLiteral(data, at, rest):
                    if data[at] != byte:
                        continue
                    if at + 1 < len(data):
                        threads.append(InLiteral(data, at + 1, rest))
                        continue
                case InText():
                    rest = thread.rest
                    if not self._text(thread, byte, threads, ahead):
                        continue
                case InLeaf(leaf, run, _, rest):
                    if not self.runs.feed(run, bytes((byte,))):
                        continue
                    matcher = self.runs.matcher(run)
                    if not matcher.is_terminated():
                        threads.append(InLeaf(leaf, run, thread.depth + 1, rest))
                    if not matcher.may_stop():
                        continue
            if rest is None:
                whole = True
            else:
                ahead.append(rest)
        after = self._gather(ahead, threads, whole)
        return after if after.threads or after.whole else None

    def _text(
        self, at: InText, byte: int, threads: list[Thread], ahead: list[Rest | tuple[Part, int, Rest | None]]
    ) -> bool:
        """Take `byte` as free text; whether the text may end after it."""
        utf8 = utf8_step(at.utf8, byte)
        if utf8 < 0:
            return False
        text = at.text
        state = text.triggers.step(at.state, byte)
        ended = text.triggers.ends[state]
        if ended:
            if ended[0] >= len(text.excludes):
                for number in ended:
                    one = text.exits[number - len(text.excludes)]
                    ahead.append((one.then, 0, Rest(text, 0, at.rest) if one.again else at.rest))
            return False
        threads.append(InText(text, state, utf8, at.rest))
        return text.may_end and utf8 == 0

    def _gather(
        self, ahead: Iterable[tuple[Part, int, Rest | None]], threads: list[Thread], whole: bool
    ) -> Threads:
        """The threads at the beginnings of what may come next, besides `threads`."""
        waiting: list[tuple[Part, int, Rest | None] | None] = list(ahead)
        met: set[tuple[Part, int, Rest | None]] = set()
        while waiting:
            one = waiting.pop()
            if one is None:
                whole = True
                continue
            part, count, rest = one
            if one in met:
                continue
            met.add(one)
            match part:
                case Literal(data):
                    if data:
                        threads.append(InLiteral(data, 0, rest))
                    else:
                        waiting.append(rest)
                case Text():
                    threads.append(InText(part, 0, 0, rest))
                    if part.may_end:
                        waiting.append(rest)
                case Leaf():
                    if not part.only_empty:
                        threads.append(InLeaf(part, self.runs.enter(part), 0, rest))
                    if part.may_be_empty:
                        waiting.append(rest)
                case Chain(items):
                    for item in reversed(items):
                        rest = Rest(item, 0, rest)
                    waiting.append(rest)
                case Choice(options):
                    waiting.extend((option, 0, rest) for option in options)
                case Loop(item, low, high):
                    if count >= low:
                        waiting.append(rest)
                    if high is None or count < high:
                        done = min(count + 1, low) if high is None else count + 1
                        waiting.append((item, 0, Rest(part, done, rest)))
        return Threads(tuple(dict.fromkeys(threads)), whole)

    def forced(self, now: Threads, limit: int) -> bytes:
        """The longest unique continuation of `now`, at most `limit` bytes; `now` stays as it is."""
        path = bytearray()
        at: Threads | None = now
        mark = self.runs.next
        while at is not None and not at.whole and at.threads and len(path) < limit:
            ways = [self._forced_here(thread) for thread in at.threads]
            common = min(ways, key=len)
            if not common or any(not way.startswith(common[:1]) for way in ways):
                break
            size = 1
            while size < len(common) and all(way[size] == common[size] for way in ways):
                size += 1
            for byte in common[:size]:
                at = self.step(at, byte)
                path.append(byte)
                if at is None or at.whole or len(path) >= limit:
                    break
        self.runs.restore(now)
        self.runs.forget(mark)
        return bytes(path)

    def _forced_here(self, thread: Thread) -> bytes:
        match thread:
            case InLiteral(data, at):
                return data[at:]
            case InText():
                return b""
            case InLeaf(_, run):
                return self.runs.matcher(run).forced_bytes()

    def follow(self, now: Threads, data: bytes) -> Threads | None:
        """The threads after `data`; None, and no change, if it is not allowed."""
        mark, at = self.runs.next, now
        for byte in data:
            after = self.step(at, byte)
            if after is None:
                self.runs.restore(now)
                self.runs.forget(mark)
                return None
            at = after
        return at

    def sift(self, now: Threads, tokens: Iterable[tuple[bytes, int]]) -> Iterator[int]:
        """The ids of `tokens`, (bytes, id) in ascending order, that may follow `now`."""
        mark = self.runs.next
        for token, valid in sift_tokens(tokens, now, self._stretch, self.runs.restore):
            if valid:
                yield token
        self.runs.forget(mark)

    def _stretch(self, now: Threads, data: bytes, at: int) -> tuple[int, Threads | None]:
        """For sift_tokens: one byte of `data`, or as many as cannot end a leaf or free text."""
        if _stays_text(now, data[at:]):
            return len(data) + 1, now
        if len(now.threads) == 1 and isinstance(leaf := now.threads[0], InLeaf) and leaf.leaf.unclosed:
            run = leaf.leaf.unclosed.match(data, at)
            if run is not None and run.end() > at + 1:
                if not self.runs.feed(leaf.run, run[0]):
                    return run.end(), None
                return run.end(), Threads((leaf._replace(depth=leaf.depth + 1),), False)
        return at + 1, self.step(now, data[at])


def _stays_text(now: Threads, data: bytes) -> bool:
    """Whether free text certainly goes on through `data`."""
    if not data.isascii():
        return False
    return any(
        isinstance(thread, InText)
        and not thread.state
        and not thread.utf8
        and thread.text.firsts.isdisjoint(data)
        for thread in now.threads
    )


class Candidates:
    """Tokens to try, and tokens certainly allowed, by thread. Shared by all matchers of one tag."""

    def __init__(self, space: TagSpace) -> None:
        self._space = space
        self._crossing: dict[tuple[Leaf, Rest | None], Bits] = {}

    def look(self, thread: Thread, runs: Runs, sure: Bits) -> Iterator[Bits]:
        """Adds to `sure` what `thread` certainly allows; yields sets of ids to try."""
        space = self._space
        match thread:
            case InLiteral(data, at):
                yield space.along(data[at:])
            case InText(text, state, utf8):
                doubtful = space.holding(text.triggers, state)
                sure |= space.utf8_prefixes[utf8] & ~doubtful
                yield doubtful & space.utf8_prefixes[utf8]
            case InLeaf(leaf, run, _, rest):
                inside = runs.matcher(run).mask().bits & space.text_ids
                sure |= inside
                if rest is not None:
                    yield self._crossings(leaf, rest) & ~inside

    def _crossings(self, leaf: Leaf, rest: Rest) -> Bits:
        """Tokens that may end a leaf and continue with what follows it."""
        key = (leaf, rest)
        if key not in self._crossing:
            closing = self._space.closing(leaf.closers)
            crossing = np.zeros_like(closing)
            for thread in Machine(Runs()).begin(_as_part(rest)).threads:
                ending = self._space.ending_in(thread.data) if isinstance(thread, InLiteral) else closing
                crossing |= ending & closing
            self._crossing[key] = crossing
        return self._crossing[key]


def _as_part(rest: Rest | None) -> Part:
    items: list[Part] = []
    while rest is not None:
        part = rest.part
        if isinstance(part, Loop):
            high = None if part.high is None else part.high - rest.rounds
            part = Loop(part.item, max(part.low - rest.rounds, 0), high)
        items.append(part)
        rest = rest.after
    return Chain(tuple(items))
