"""Jump planning: which tokens of a forced text are certain, whatever text follows it.

The tokens are those that the tokenizer itself would make of the whole text, so a jump changes the number of
steps and not the tokens. The text before the forced text and that text are tokenized together; the ids are
kept up to the last position p between two of them such that

* no token lies across p in any text that may come, so that no merge of byte-pair encoding and no unigram path
  crosses p;
* the characters at p cannot make the pre-tokenizer cut the text before p otherwise, see `_stable`: the known
  ones (GPT-2's and successors', digits in runs or alone, metaspace) go from left to right, take runs of one
  kind of characters whole, and look ahead only after white space, by one character, and after an apostrophe.
  Some look further at capital letters, and some group digits from the right: a run of letters with two cases
  is never cut, nor are digits.

For other pre-tokenizers the text is tokenized again with examples of what may follow (`_probes`), and only
the common ids are kept: a check, not a proof.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from runtime.grammar.base import Matcher
from runtime.grammar.masks.token_bits import Cache, TokenBits, token_bits
from runtime.protocol.vocabulary import Vocabulary

CONTEXT = 8
"""Tokens before the last one that are read with it; most pre-tokenizers reset at each word."""

_ANCHORS = ("\n", "a")
_APOSTROPHES = frozenset("'\u2019")
_EVERY_KIND = frozenset("ludso")
_REMEMBERED = 4096
_TAIL = 48  # characters of a text that decide how a following text is tokenized with it
_FEW = 24

Encode = Callable[[str], list[int]]


class Jump(NamedTuple):
    """`replaced` of the last ids (0 or 1) give way to `ids`, which spell the replaced and the forced text."""

    replaced: int
    ids: tuple[int, ...]


class Following(NamedTuple):
    """What may come after a text: its first bytes, and whether the text may end."""

    bytes: frozenset[int]
    stop: bool


class JumpPlanner:
    """`encode`: text to ids, without special tokens. Plans for any number of matchers; one thread."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.vocabulary, self._encode = vocabulary, encode
        self._bits = token_bits(vocabulary)
        self._probed: Cache[int] = Cache(_REMEMBERED)

    def plan(
        self,
        matcher: Matcher,
        tail_ids: Sequence[int],
        max_tokens: int,
        context: Sequence[int] = (),
        owing: bytes = b"",
    ) -> Jump | None:
        """The forced text after `matcher`'s state as canonical tokens, or None if nothing is certain.

        tail_ids: the last generated ids that may still be replaced, at most one. max_tokens: how many ids the
        sequence may grow by. context: the ids before tail_ids, the prompt's too. owing: text that comes
        before the matcher's (of a prompt whose end is healed; no tail_ids then). With a Jump `matcher` has
        been advanced over the bytes it appends, by one advance_bytes.
        """
        forced = owing + matcher.forced_bytes()
        if not forced or max_tokens <= 0:
            return None
        vocabulary = self.vocabulary
        tail = tail_ids[-1] if tail_ids else None
        known = vocabulary.tokens[tail] if tail is not None and tail not in vocabulary.special else b""
        if tail is not None and not known:
            context = ()  # a control token: the text begins anew after it
        tokenized = self._tokenized(self._before(context), known, forced)
        if tokenized is None:
            return None
        text, size, ids = tokenized  # the first `size` bytes are the context's, which ends between two ids
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
        """The text of the last few of `ids`, after any control token; from the beginning of a character."""
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
        """(text, length of `before` in it, ids after that). Without `before` if a token of the whole text
        lies across its end: the model has chosen otherwise. None if there is nothing to add, or the ids do
        not spell the text."""
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
        """The ids of `text` if they spell it byte for byte, else None (normalised text, special tokens). Of a
        tokenizer that puts a space before a text, the ids after an anchor."""
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
        """How many of the last of `ids` could be other tokens if some text followed them. 0 if they end with
        a control token, or if it is unknown."""
        data = self._before(ids)
        text = _whole_text(data)
        if not text or text.encode() != data:
            return 0
        encoded = self.encode_exactly(text)
        if encoded is None or encoded != list(ids[len(ids) - len(encoded) :]):
            return 0
        certain = len(self._certain(text, 0, encoded, Following(frozenset(range(256)), False)))
        return min(len(encoded) - certain, CONTEXT // 2) if certain else 0

    # -- what may follow -------------------------------------------------------------------------------------

    def _following(self, matcher: Matcher, whole: bytes, forced: bytes, owing: int) -> Following | None:
        """What may come after `whole`, the part of `forced` that is whole characters; None if nothing leads
        on from there. The first `owing` bytes are not the matcher's."""
        if len(whole) < len(forced):
            return Following(frozenset(forced[len(whole) : len(whole) + 1]), False)
        after = matcher.copy()
        if len(forced) > owing and not after.advance_bytes(forced[owing:]):
            return None
        if after.is_terminated():
            return Following(frozenset(), True)
        following = Following(self._bits.first_bytes(after.mask()), after.may_stop())
        return following if following.bytes or following.stop else None

    # -- what is certain -------------------------------------------------------------------------------------

    def _certain(self, text: str, start: int, ids: list[int], following: Following) -> list[int]:
        """The first of `ids`, which spell `text` from byte `start` on, that are the same whatever follows."""
        if not following.bytes:
            return ids
        data, at = text.encode(), len(text.encode())
        index = len(text)  # of the character that begins at byte `at`
        for count in range(len(ids), 0, -1):
            while index > 0 and len(text[:index].encode()) > at:
                index -= 1
            if (
                len(text[:index].encode()) == at
                and self._stable(text, index, following)
                and not _lies_across(self._bits, data, at, following.bytes)
            ):
                return self._confirmed(text, start, ids[:count], following)
            at -= len(self.vocabulary.tokens[ids[count - 1]])
        return []

    @staticmethod
    def _stable(text: str, index: int, following: Following) -> bool:
        """Whether what follows text[:index] cannot change how a pre-tokenizer cuts what is before it: a run
        has ended, or its beginning is settled (signs, letters without case)."""
        left = text[index - 1]
        if left in _APOSTROPHES:
            return False
        mine = _kind(left)
        if index < len(text):
            kinds = frozenset((_kind(text[index]),))
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
        lost = self._probed.get(key, lambda: self._lost(text, start, ids, following))
        return ids[: max(0, len(ids) - lost)]

    def _lost(self, text: str, start: int, ids: list[int], following: Following) -> int:
        """How many of the last of `ids` some example of what follows does not have."""
        kept = len(ids)
        for probe in _probes(following):
            if not self._bits.single_bytes.issuperset(probe.encode()):
                continue  # the vocabulary has no such text
            encoded = self.encode_exactly(text + probe)
            if encoded is None:
                continue
            ends = [0, *accumulate(len(self.vocabulary.tokens[token]) for token in encoded)]
            if start not in ends:
                return len(ids)
            encoded = encoded[ends.index(start) :]
            kept = min(kept, next((n for n, (a, b) in enumerate(zip(ids, encoded)) if a != b), len(ids)))
        return len(ids) - kept


def _lies_across(bits: TokenBits, data: bytes, at: int, following: frozenset[int]) -> bool:
    """Whether some token lies across `at` in `data`, one of the bytes `following`, and then anything."""
    ordered = bits.ordered[0]

    def begins(least: bytes, prefix: bytes) -> bool:
        """Whether the first text that is not below `least` begins with `prefix`."""
        number = bisect_left(ordered, least)
        return number < len(ordered) and ordered[number].startswith(prefix)

    for start in range(at - 1, max(-1, at - bits.deepest), -1):
        rest, size = data[start:], at - start + 1
        while size <= len(rest):
            number = bisect_left(ordered, rest[:size])
            if number == len(ordered) or not ordered[number].startswith(rest[:size]):
                break
            if len(ordered[number]) == size:
                return True
            size += 1
        else:
            ends = (rest + bytes((byte,)) for byte in following)
            if begins(rest + b"\0", rest) and any(begins(end, end) for end in ends):
                return True
    return False


def _whole_text(data: bytes) -> str | None:
    """`data` as text, without a character that is cut at its end; None if it is no text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None
        return data[: error.start].decode("utf-8")


def _kind(char: str) -> str:
    """l = letters with case, and marks; u = other letters; d = numbers; s = white space; o = all else."""
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
    """Examples of what may come after a text: characters of each kind, alone and with others after them."""
    kinds: dict[str, list[str]] = {}
    for byte in sorted(following.bytes):
        if byte < 0x80:
            mine = kinds.setdefault(_kind(chr(byte)), [])
            mine.append(chr(byte))
    chosen = [char for mine in kinds.values() for char in (mine if len(mine) < 4 else (mine[0], mine[-1]))]
    if any(byte >= 0x80 for byte in following.bytes):
        chosen += [char for char in "é東가😊。" if char.encode()[0] in following.bytes]
    examples = [more for char in chosen for more in (char, char + "s", char + "1")][:_FEW]
    return tuple(examples) + (("",) if following.stop else ())
