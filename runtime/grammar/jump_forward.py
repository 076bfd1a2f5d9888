"""Jump-forward: text that a constraint forces is appended as tokens without asking the model.

Two faces. `plan_jump` is what the scheduler uses: it works on any Matcher and yields the tokens that the
tokenizer itself would make, so that a jump changes the number of steps and not the text.
`OutlinesJumpForwardMap` answers the same question for a bare regular expression, by symbols and by bytes.
Neither knows the model or the KV cache.

Which tokens are certain. The forced text F follows the last token's text L; what comes after F is not known
yet, and a tokenizer may join its beginning to the end of F. The ids of L + F are kept up to the last place
p in it where

* the characters on both sides are of different kinds (letter, digit, white space, other), the left one is
  no apostrophe,
* and no token of the vocabulary contains the byte before p followed by the byte after p.

By the second, no token can lie across p, whatever follows: byte-pair merges and unigram paths split there,
and the part on the left is tokenized as if it ended there. By the first, a pre-tokenizer's expression cuts
the left part the same way whatever follows: its classes run to the end of a kind of characters, the
look-ahead after white space sees one character, which is in F, and contractions ('re, 'll) begin with an
apostrophe. Where the constraint allows nothing after F, all ids are certain.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar.base import Matcher
from runtime.grammar.dfa import ByteDfa, compile_regex
from runtime.protocol.vocabulary import Vocabulary

_ANCHORS = ("\n", "a")
_APOSTROPHES = frozenset("'\u2019")


class Jump(NamedTuple):
    """`replaced` of the last ids (0 or 1) give way to `ids`. Their texts together: the replaced text and
    what was forced."""

    replaced: int
    ids: tuple[int, ...]


def plan_jump(
    matcher: Matcher,
    tail_ids: Sequence[int],
    vocabulary: Vocabulary,
    encode: Callable[[str], list[int]],
    max_tokens: int,
) -> Jump | None:
    """The forced text after `matcher`'s state as canonical tokens, or None when there is nothing certain to
    append.

    tail_ids: the last generated ids that may still be replaced, at most one. encode: text to ids, without
    special tokens. max_tokens: how many ids the sequence may grow by. On return of a Jump, `matcher` has
    been advanced (one advance_bytes) over exactly the bytes it appends; on None it is unchanged.
    """
    forced = matcher.forced_bytes()
    if not forced or max_tokens <= 0:
        return None
    tail = tail_ids[-1] if tail_ids else None
    known = vocabulary.tokens[tail] if tail is not None and tail not in vocabulary.special else b""
    whole = _whole_text(known + forced)
    if whole is None or len(whole.encode()) <= len(known):
        return None
    ids = _encode_exactly(whole, vocabulary, encode)
    if ids is None:
        return None
    if not _ends_there(matcher, forced[: len(whole.encode()) - len(known)]):
        ids = _up_to(ids, _certain(whole, vocabulary), vocabulary)
    replaced = int(bool(known))
    if replaced and ids and ids[0] == tail:
        replaced, ids, known = 0, ids[1:], b""
    ids = ids[: max_tokens + replaced]
    spelled = b"".join(vocabulary.tokens[token] for token in ids)
    appended = spelled[len(known) :]
    if not appended or not matcher.advance_bytes(appended):
        return None
    return Jump(replaced, tuple(ids))


def _whole_text(data: bytes) -> str | None:
    """`data` as text, without a character that is cut at its end; None if it is no text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None
        return data[: error.start].decode("utf-8")


def _encode_exactly(
    text: str, vocabulary: Vocabulary, encode: Callable[[str], list[int]]
) -> list[int] | None:
    """The ids of `text` when they spell it byte for byte, else None (normalised text, special tokens).

    Some tokenizers put a space before the text they are given: then the ids are taken from behind an anchor.
    """
    data = text.encode()
    for anchor in ("", *_ANCHORS):
        before = encode(anchor) if anchor else []
        ids = encode(anchor + text)
        if ids[: len(before)] != before:
            continue
        ids = ids[len(before) :]
        if vocabulary.special.isdisjoint(ids) and b"".join(vocabulary.tokens[token] for token in ids) == data:
            return ids
    return None


def _ends_there(matcher: Matcher, forced: bytes) -> bool:
    """Whether nothing can follow `forced`."""
    after = matcher.copy()
    return after.advance_bytes(forced) and after.is_terminated()


def _certain(text: str, vocabulary: Vocabulary) -> int:
    """How many bytes of `text` are tokenized the same whatever follows it (see the head of this file)."""
    joined = _joined_bytes(vocabulary)
    for at in range(len(text) - 1, 0, -1):
        left, right = text[at - 1], text[at]
        if left in _APOSTROPHES or _kind(left) == _kind(right):
            continue
        if not joined[left.encode()[-1], right.encode()[0]]:
            return len(text[:at].encode())
    return 0


def _kind(char: str) -> str:
    """l letters and marks, d digits and other numbers, s white space, o all else."""
    if char.isspace():
        return "s"
    category = unicodedata.category(char)[0]
    return {"L": "l", "M": "l", "N": "d"}.get(category, "o")


def _up_to(ids: list[int], size: int, vocabulary: Vocabulary) -> list[int]:
    """The first ids that together spell at most `size` bytes."""
    spelled = 0
    for number, token in enumerate(ids):
        spelled += len(vocabulary.tokens[token])
        if spelled > size:
            return ids[:number]
    return ids


@lru_cache(maxsize=4)
def _joined_bytes(vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
    """bool [256, 256]: whether some token contains the first byte followed by the second."""
    lengths = np.fromiter(map(len, vocabulary.tokens), dtype=np.int64, count=len(vocabulary))
    data = np.frombuffer(b"".join(vocabulary.tokens), dtype=np.uint8)
    inside = np.ones(len(data) + 1, dtype=np.bool_)
    inside[np.cumsum(lengths)] = False  # the first byte of the next token follows nothing
    pairs = np.flatnonzero(inside[1:-1]) + 1 if len(data) > 1 else np.empty(0, dtype=np.int64)
    joined = np.zeros((256, 256), dtype=np.bool_)
    joined[data[pairs - 1], data[pairs]] = True
    return joined


@dataclass(frozen=True, slots=True)
class JumpEdge:
    """The only way on from a state. `symbol` is None where several characters share the next byte, or in
    the middle of one."""

    symbol: str | None
    symbol_next_state: int | None
    byte: int
    byte_next_state: int


class OutlinesJumpForwardMap:
    """Forced text of a regular expression, state by state. A state where the text may end forces nothing.

    Raises BadConstraint or UnsupportedConstraint for the expression.
    """

    def __init__(self, regex: str) -> None:
        self._dfa: ByteDfa = compile_regex(regex)
        self.initial_state = 0

    def edge(self, state: int) -> JumpEdge | None:
        """The JumpEdge of `state`, or None when it forces nothing."""
        only = self._dfa.only_byte(state)
        if only is None:
            return None
        symbol, end = self._symbol(state)
        return JumpEdge(symbol, end, only[0], only[1])

    def _symbol(self, state: int) -> tuple[str | None, int | None]:
        """The only character that may follow a state between two characters, and the state after it."""
        if state % self._dfa.nodes and self._dfa.nodes > 1:
            return None, None
        data = bytearray()
        while len(data) < 4:
            only = self._dfa.only_byte(state)
            if only is None:
                return None, None
            data.append(only[0])
            state = only[1]
            if state % self._dfa.nodes == 0 and (text := _complete(bytes(data))) is not None:
                return text, state
        return None, None

    def jump_forward_symbol(self, state: int) -> tuple[str, int]:
        """The longest forced text from `state`, in whole characters, and the state behind it."""
        text = ""
        while (edge := self.edge(state)) is not None and edge.symbol is not None:
            assert edge.symbol_next_state is not None
            text += edge.symbol
            state = edge.symbol_next_state
        return text, state

    def jump_forward_byte(self, state: int) -> list[tuple[int, int]]:
        """The longest forced path of bytes from `state`: each byte with the state behind it."""
        path: list[tuple[int, int]] = []
        while (only := self._dfa.only_byte(state)) is not None:
            path.append(only)
            state = only[1]
        return path


def _complete(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
