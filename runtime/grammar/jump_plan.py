"""Jump planning: which tokens of a forced text are certain, whatever text follows it.

It works on any Matcher and yields the tokens that the tokenizer itself would make of the whole text, so that
a jump changes the number of steps and not the tokens. It knows neither the model nor the KV cache.

The text before the last token (context), that token's own text and the forced text F are tokenized together;
what comes after F is known only by its first byte, which is one of those that the matcher allows. The ids are
kept up to the last place p between two of them such that

* no token of the vocabulary lies across p in any text that may come: none whose bytes fit the known ones
  around p and, where it reaches beyond F, go on with one of the bytes that may follow;
* the characters at p cannot make the pre-tokenizer cut the text before p otherwise: see `_stable`.

By the first, no merge of byte-pair encoding ever joins bytes across p, since each merge makes a token of the
vocabulary, and no unigram path crosses p: with the pieces before p cut alike, their ids do not depend on what
is behind. By the second they are cut alike: the expressions of the known pre-tokenizers (GPT-2's and its
successors', runs of digits from the left, single digits, metaspace) go from left to right, take runs of one
kind of characters whole, and look ahead only behind white space, by one character, and behind an apostrophe.
Splits at capital letters look further, so a run of letters with two cases is never cut, nor are digits, which
some group from the right. Not known are expressions that look ahead from a sign behind a digit, or over
several kinds. For them the text is tokenized again with examples of what may follow (`_probes`), and only
what all of these have in common is kept: a check, not a proof.

Where nothing can follow F, all its ids are certain.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from runtime.grammar.base import Matcher
from runtime.grammar.masks.token_bits import first_bytes
from runtime.protocol.vocabulary import Vocabulary

CONTEXT = 8
"""How many tokens before the last one are read with it. They matter where a pre-tokenizer cuts by what stands
before, and most of it resets at each word."""

_ANCHORS = ("\n", "a")
_APOSTROPHES = frozenset("'\u2019")
_EVERY_KIND = frozenset("ludso")
_REMEMBERED = 4096
_TAIL = 48  # characters of a text that decide how a following text is tokenized with it
_FEW = 24

Encode = Callable[[str], list[int]]


class Jump(NamedTuple):
    """`replaced` of the last ids (0 or 1) give way to `ids`. Their texts together: the replaced text and
    what was forced."""

    replaced: int
    ids: tuple[int, ...]


class Following(NamedTuple):
    """What may come after a text: its first byte, and whether nothing may."""

    bytes: frozenset[int]
    stop: bool


def plan_jump(
    matcher: Matcher,
    tail_ids: Sequence[int],
    vocabulary: Vocabulary,
    encode: Encode,
    max_tokens: int,
    context: Sequence[int] = (),
) -> Jump | None:
    """JumpPlanner.plan of a planner that is kept for `vocabulary` and `encode`."""
    return _planner(vocabulary, encode).plan(matcher, tail_ids, max_tokens, context)


class JumpPlanner:
    """`encode`: text to ids, without special tokens. Plans for any number of matchers; one thread."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.vocabulary, self._encode = vocabulary, encode
        self._probed: OrderedDict[tuple[str, Following], int] = OrderedDict()

    def plan(
        self,
        matcher: Matcher,
        tail_ids: Sequence[int],
        max_tokens: int,
        context: Sequence[int] = (),
        owing: bytes = b"",
    ) -> Jump | None:
        """The forced text after `matcher`'s state as canonical tokens, or None when there is nothing certain
        to append.

        tail_ids: the last generated ids that may still be replaced, at most one. max_tokens: how many ids the
        sequence may grow by. context: the ids before tail_ids, the prompt's too; only the last few are read.
        owing: text that comes before the matcher's (of a prompt whose end is healed; no tail_ids then).
        On return of a Jump, `matcher` has been advanced (one advance_bytes) over exactly the bytes it
        appends; on None it is unchanged.
        """
        forced = owing + matcher.forced_bytes()
        if not forced or max_tokens <= 0:
            return None
        vocabulary = self.vocabulary
        tail = tail_ids[-1] if tail_ids else None
        known = vocabulary.tokens[tail] if tail is not None and tail not in vocabulary.special else b""
        if tail is not None and not known:
            context = ()  # a control token: the text begins anew behind it
        found = self._tokenized(self._before(context), known, forced)
        if found is None:
            return None
        text, size, ids = found  # the first `size` bytes are the context's, which ends between two ids
        whole = forced[: len(text.encode()) - size - len(known)]
        following = self._following(matcher, whole, forced, len(owing))
        if following is None:
            return None
        ids = self._certain(text, size, ids, following)
        replaced = int(bool(known))
        if replaced and ids and ids[0] == tail:
            replaced, ids, known = 0, ids[1:], b""
        ids = ids[: max_tokens + replaced]
        appended = b"".join(vocabulary.tokens[token] for token in ids)[len(known) :]
        more = appended[len(owing) :]
        if not appended or ((more or not owing) and not matcher.advance_bytes(more)):
            return None
        return Jump(replaced, tuple(ids))

    # -- the text and its ids --------------------------------------------------------------------------------

    def _before(self, ids: Sequence[int]) -> bytes:
        """The text of the last few of `ids`, as far back as it is text; from the beginning of a character."""
        vocabulary, data = self.vocabulary, b""
        for token in reversed(ids[-CONTEXT:]):
            if token in vocabulary.special or not vocabulary.tokens[token]:
                break
            data = vocabulary.tokens[token] + data
        cut = 0
        while cut < min(4, len(data)) and data[cut] & 0xC0 == 0x80:
            cut += 1
        return data[cut:]

    def _tokenized(self, before: bytes, known: bytes, forced: bytes) -> tuple[str, int, list[int]] | None:
        """(text, length of what of `before` is in it, ids behind that). Without `before` where a token of the
        whole text lies across its end: the model has chosen otherwise. None where there is nothing to add, or
        the ids do not spell the text."""
        for data in (before, b"") if before else (b"",):
            text = _whole_text(data + known + forced)
            if text is None or len(text.encode()) <= len(data) + len(known):
                continue
            ids = self.encode_exactly(text)
            if ids is None:
                continue
            ends = list(accumulate(len(self.vocabulary.tokens[token]) for token in ids))
            if not data:
                return text, 0, ids
            if len(data) in ends:
                return text, len(data), ids[ends.index(len(data)) + 1 :]
        return None

    def encode_exactly(self, text: str) -> list[int] | None:
        """The ids of `text` when they spell it byte for byte, else None (normalised text, special tokens).

        Some tokenizers put a space before the text they are given: then the ids are taken from behind an
        anchor.
        """
        data, tokens = text.encode(), self.vocabulary.tokens
        for anchor in ("", *_ANCHORS):
            before = self._encode(anchor) if anchor else []
            ids = self._encode(anchor + text)
            if ids[: len(before)] != before:
                continue
            ids = ids[len(before) :]
            if self.vocabulary.special.isdisjoint(ids) and b"".join([tokens[token] for token in ids]) == data:
                return ids
        return None

    def open_end(self, ids: Sequence[int]) -> int:
        """How many of the last of `ids` could be other tokens, if only the right text followed them. 0 where
        they end with a control token, or where it is not known."""
        data = self._before(ids)
        text = _whole_text(data)
        if not text or text.encode() != data:
            return 0
        made = self.encode_exactly(text)
        if made is None or made != list(ids[len(ids) - len(made) :]):
            return 0
        certain = len(self._certain(text, 0, made, Following(frozenset(range(256)), False)))
        return min(len(made) - certain, CONTEXT // 2) if certain else 0

    # -- what may follow -------------------------------------------------------------------------------------

    def _following(self, matcher: Matcher, whole: bytes, forced: bytes, owing: int) -> Following | None:
        """What may come after `whole`, the part of `forced` that is whole characters; None where nothing
        leads on from there. The first `owing` bytes are none of the matcher's."""
        if len(whole) < len(forced):
            return Following(frozenset(forced[len(whole) : len(whole) + 1]), False)
        after = matcher.copy()
        if len(forced) > owing and not after.advance_bytes(forced[owing:]):
            return None
        if after.is_terminated():
            return Following(frozenset(), True)
        following = Following(first_bytes(after.mask(), self.vocabulary), after.may_stop())
        return following if following.bytes or following.stop else None

    # -- what is certain -------------------------------------------------------------------------------------

    @cached_property
    def _table(self) -> _Table:
        return _Table(self.vocabulary)

    def _certain(self, text: str, start: int, ids: list[int], following: Following) -> list[int]:
        """The first of `ids`, which spell `text` from byte `start` on, that are the same whatever follows."""
        if not following.bytes:
            return ids
        data, at = text.encode(), len(text.encode())
        place = len(text)  # the character that begins at byte `at`
        for count in range(len(ids), 0, -1):
            while place > 0 and len(text[:place].encode()) > at:
                place -= 1
            if (
                len(text[:place].encode()) == at
                and self._stable(text, place, following)
                and not self._table.lies_across(data, at, following.bytes)
            ):
                return self._confirmed(text, start, ids[:count], following)
            at -= len(self.vocabulary.tokens[ids[count - 1]])
        return []

    @staticmethod
    def _stable(text: str, place: int, following: Following) -> bool:
        """Whether what stands behind text[:place] cannot change how a pre-tokenizer cuts what is before it.

        Kinds that differ: a run has ended. White space: the one character behind is known to be none. Signs
        and letters without case: a run may go on, but where it began is settled.
        """
        left = text[place - 1]
        if left in _APOSTROPHES:
            return False
        mine = _kind(left)
        if place < len(text):
            kinds = frozenset((_kind(text[place]),))
        else:
            kinds = frozenset().union(*map(_kinds_behind, following.bytes))
            if following.stop and mine == "s":
                return False  # the end of a text ends a run of white space otherwise than a word does
        if mine in "ou":
            return True if mine == "o" else "l" not in kinds
        return mine not in kinds and not (mine == "l" and "u" in kinds)

    def _confirmed(self, text: str, start: int, ids: list[int], following: Following) -> list[int]:
        """The first of `ids` that `text` has from byte `start` on with each example of what may follow it."""
        key = (text[-_TAIL:], following)
        lost = self._probed.get(key)
        if lost is None:
            lost = self._probed[key] = self._lost(text, start, ids, following)
            if len(self._probed) > _REMEMBERED:
                self._probed.popitem(last=False)
        else:
            self._probed.move_to_end(key)
        return ids[: max(0, len(ids) - lost)]

    def _lost(self, text: str, start: int, ids: list[int], following: Following) -> int:
        """How many of the last of `ids` some example of what follows does not have."""
        kept = len(ids)
        for probe in _probes(following):
            if not self._table.bytes.issuperset(probe.encode()):
                continue  # the vocabulary has no such text
            made = self.encode_exactly(text + probe)
            if made is None:
                continue
            ends = [0, *accumulate(len(self.vocabulary.tokens[token]) for token in made)]
            if start not in ends:
                return len(ids)
            made = made[ends.index(start) :]
            kept = min(kept, next((n for n, (a, b) in enumerate(zip(ids, made)) if a != b), len(ids)))
        return len(ids) - kept


class _Table:
    """A vocabulary's tokens in order of their bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        silent = vocabulary.special | vocabulary.eos
        texts = [b"" if number in silent else data for number, data in enumerate(vocabulary.tokens)]
        self._sorted = sorted({data for data in texts if data})
        self._longest = max(map(len, self._sorted), default=0)
        self.bytes = frozenset(data[0] for data in self._sorted if len(data) == 1)

    def lies_across(self, data: bytes, at: int, following: frozenset[int]) -> bool:
        """Whether some token fits `data` with bytes on both sides of `at`; behind `data` comes one of the
        bytes `following`, and then anything."""
        ordered = self._sorted
        for start in range(at - 1, max(-1, at - self._longest), -1):
            rest, size = data[start:], at - start + 1
            while size <= len(rest):
                place = bisect_left(ordered, rest[:size])
                if place == len(ordered) or not ordered[place].startswith(rest[:size]):
                    break
                if len(ordered[place]) == size:
                    return True
                size += 1
            else:
                if self._begins(rest + b"\0", rest) and any(
                    self._begins(rest + bytes((byte,)), rest + bytes((byte,))) for byte in following
                ):
                    return True
        return False

    def _begins(self, least: bytes, data: bytes) -> bool:
        """Whether the first text that is not below `least` begins with `data`."""
        place = bisect_left(self._sorted, least)
        return place < len(self._sorted) and self._sorted[place].startswith(data)


@lru_cache(maxsize=4)
def _planner(vocabulary: Vocabulary, encode: Encode) -> JumpPlanner:
    return JumpPlanner(vocabulary, encode)


def _whole_text(data: bytes) -> str | None:
    """`data` as text, without a character that is cut at its end; None if it is no text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None
        return data[: error.start].decode("utf-8")


def _kind(char: str) -> str:
    """l letters with case, and marks; u letters without; d digits and other numbers; s white space; o all
    else."""
    if char.isspace():
        return "s"
    category = unicodedata.category(char)
    return "u" if category == "Lo" else {"L": "l", "M": "l", "N": "d"}.get(category[0], "o")


@lru_cache(maxsize=256)
def _kinds_behind(byte: int) -> frozenset[str]:
    """The kinds of the characters whose UTF-8 begins with `byte`."""
    if byte < 0x80:
        return frozenset(_kind(chr(byte)))
    if 0xC2 <= byte < 0xE0:
        first, count = (byte & 0x1F) << 6, 64
    elif 0xE0 <= byte < 0xF0:
        first, count = (byte & 0x0F) << 12, 4096
    else:  # inside a character, or one of very many
        return _EVERY_KIND
    return frozenset(_kind(chr(code)) for code in range(max(first, 0x80), first + count))


@lru_cache(maxsize=1024)
def _probes(following: Following) -> tuple[str, ...]:
    """Examples of what may come after a text: of each kind of character that may be first some, alone and
    with others behind."""
    kinds: dict[str, list[str]] = {}
    for byte in sorted(following.bytes):
        if byte < 0x80:
            mine = kinds.setdefault(_kind(chr(byte)), [])
            mine.append(chr(byte))
    chosen = [char for mine in kinds.values() for char in (mine if len(mine) < 4 else (mine[0], mine[-1]))]
    if any(byte >= 0x80 for byte in following.bytes):
        chosen += [char for char in "é東가😊。" if char.encode()[0] in following.bytes]
    made = [more for char in chosen for more in (char, char + "s", char + "1")][:_FEW]
    return tuple(made) + (("",) if following.stop else ())
