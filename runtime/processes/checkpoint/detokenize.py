"""Ids -> text, piece by piece, for one request at a time. Pure: no threads, no mailboxes, no tokenizer
library.

Text is the bytes of the ids, decoded as UTF-8 exactly as the tokenizer's own decoder would decode all of them
at once; what is shown never changes later. Held back: bytes of an unfinished character, and text that may
turn out to be the start of a stop string or of a match of a stop regex. The first two are bounded, whatever
the model writes; the last is as long as the regex's longest match. The work is linear in the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.grammar.search import Search
from runtime.protocol.errors import InternalFault
from runtime.protocol.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
EACH_BYTE = "sglang_dsl.each_byte"
"""Name of a decoding error handler: one U+FFFD for every broken byte."""


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)


@dataclass(frozen=True, slots=True)
class TextTable:
    """What each id adds to a text, and the decoder's habits.

    special       control ids and their text; left out of texts unless skip_special_tokens is off
    each_byte     a broken character becomes one U+FFFD per byte (sentencepiece) instead of one in all
    lead_spaces   how many spaces the decoder drops where a text begins
    lead_token    the decoder drops all spaces of the first token of a text
    """

    vocabulary: Vocabulary
    special: Mapping[int, bytes]
    each_byte: bool = False
    lead_spaces: int = 0
    lead_token: bool = False

    @classmethod
    def from_decoder(cls, decoder: Any, vocabulary: Vocabulary, special: Mapping[int, str]) -> TextTable:
        """`decoder`: the "decoder" of a tokenizer.json."""
        parts = list(_parts(decoder))
        kinds = {part.get("type") for part in parts}
        strips = [part for part in parts if part.get("type") == "Strip" and part.get("content") == " "]
        spaced = [part for part in parts if part.get("type") == "Metaspace"]
        return cls(
            vocabulary,
            {token: text.encode() for token, text in special.items()},
            each_byte="ByteFallback" in kinds,
            lead_spaces=max((int(part.get("start", 0)) for part in strips), default=0),
            lead_token=any(_prepends(part) for part in spaced),
        )

    def bytes_of(self, ids: Sequence[int], skip_special_tokens: bool) -> list[bytes]:
        """One entry per id."""
        tokens = self.vocabulary.tokens
        known = len(tokens)
        made: list[bytes] = []
        for token in ids:
            control = self.special.get(token)
            if control is not None:
                made.append(b"" if skip_special_tokens else control)
            else:
                made.append(tokens[token] if 0 <= token < known else b"")
        return made


class IncrementalText:
    """The text of one request while it grows.

    at_start: no text stands before this one, so the decoder's rule about leading spaces applies; after a
    prompt it does not (a word's own space belongs to the text).
    search: for the patterns of stop_regex, None where there are none.
    """

    def __init__(
        self,
        table: TextTable,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        no_stop_trim: bool = False,
        at_start: bool = False,
        search: Search | None = None,
    ) -> None:
        self.ids: list[int] = []
        self._table, self._skip, self._trim = table, skip_special_tokens, not no_stop_trim
        self._stop = tuple(stop) if self._trim else ()
        self._search = search if self._trim else None
        self._place = None if search is None else search.begin
        self._cut = -1  # where in the held text a match of the search begins
        self._spaces_to_drop = table.lead_spaces if at_start else 0
        self._first_token = at_start and table.lead_token
        self._unfinished = b""
        self._held = ""
        self._pieces: list[str] = []
        self._size = 0

    def __len__(self) -> int:
        """Characters shown so far; never falls."""
        return self._size

    @property
    def text(self) -> str:
        """All that may be shown so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def feed(
        self,
        new_ids: Sequence[int],
        replaced: int = 0,
        *,
        skip: int = 0,
        finished: bool = False,
        matched: str | int | None = None,
    ) -> str:
        """Take the next ids and return what they add to the text.

        replaced: so many of the last ids are taken back first; the new ones spell the same bytes, and then
        more. skip: so many bytes of the new ids are no part of the text. finished: no more will come;
        `matched` is the stop string or id that ended it, or the text that matched a stop regex, which is left
        out with all that follows. Raises InternalFault if the replaced ids' bytes are not where they were.
        """
        shown_ids = new_ids
        if isinstance(matched, int) and self._trim and new_ids and new_ids[-1] == matched:
            shown_ids = new_ids[:-1]
        fresh = self._take_back(shown_ids, replaced)[skip:]
        self.ids.extend(new_ids)
        decoded, self._unfinished = _decode(
            self._unfinished + fresh, final=finished, each_byte=self._table.each_byte
        )
        held = self._held + decoded
        hold = self._read_on(held, decoded)
        if finished:
            show, self._held = held[: self._end(held, matched, self._size_of_last(shown_ids))], ""
        else:
            at = len(held) - max(hold, _may_begin(held, self._stop))
            show, self._held = held[:at], held[at:]
        if show:
            self._pieces.append(show)
            self._size += len(show)
        return show

    def _read_on(self, held: str, decoded: str) -> int:
        """How many of the last characters may belong to a match of a stop regex."""
        if self._search is None or self._place is None or self._cut >= 0:
            return len(held) if self._cut >= 0 else 0
        self._place, found = self._search.feed(self._place, decoded)
        if found is None:
            return self._place.held
        self._cut = len(held) - found.start
        return len(held)

    def _size_of_last(self, ids: Sequence[int]) -> int:
        """Characters of which a byte is the last id's."""
        data = b"".join(self._table.bytes_of(ids[-1:], self._skip))
        return sum(byte & 0xC0 != 0x80 for byte in data) + (data[:1] >= b"\x80" and data[:1] < b"\xc0")

    def _end(self, held: str, matched: str | int | None, last: int) -> int:
        """How much of the last held text belongs to the text. The stop string became complete in the `last`
        characters; in the name of a control token before it is no stop string."""
        if not isinstance(matched, str) or not self._trim:
            return len(held)
        if matched not in self._stop and self._cut >= 0:
            return self._cut
        at = held.find(matched, max(0, len(held) - last - len(matched) + 1) if last else 0)
        return len(held) if at < 0 else at

    def _take_back(self, new_ids: Sequence[int], replaced: int) -> bytes:
        """The bytes that `new_ids` add, when the last `replaced` ids go."""
        pieces = self._table.bytes_of(new_ids, self._skip)
        if replaced:
            if replaced > len(self.ids):
                raise InternalFault(f"{replaced} ids are to be replaced, there are {len(self.ids)}")
            old = b"".join(self._table.bytes_of(self.ids[-replaced:], self._skip))
            del self.ids[-replaced:]
            new = b"".join(pieces)
            if not new.startswith(old):
                raise InternalFault(f"replaced ids spell {old!r}, the new ones {new!r}")
            return new[len(old) :]
        if self._first_token:
            for index, piece in enumerate(pieces):
                if piece:
                    pieces[index] = piece.replace(b" ", b"")
                    self._first_token = False
                    break
        data = b"".join(pieces)
        while self._spaces_to_drop and data:
            if data[:1] != b" ":
                self._spaces_to_drop = 0
                break
            data = data[1:]
            self._spaces_to_drop -= 1
        return data


def _decode(data: bytes, *, final: bool, each_byte: bool) -> tuple[str, bytes]:
    """Text of `data`, and the bytes of a character that may go on (at most 3, none when final)."""
    text, used = codecs.utf_8_decode(data, EACH_BYTE if each_byte else "replace", final)
    return text, data[used:]


def _may_begin(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning (not the whole) of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


def _parts(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(decoder, Mapping):
        if decoder.get("type") == "Sequence":
            for child in decoder.get("decoders", ()):
                yield from _parts(child)
        else:
            yield decoder


def _prepends(metaspace: Mapping[str, Any]) -> bool:
    if "prepend_scheme" in metaspace:
        return bool(metaspace["prepend_scheme"] != "never")
    return bool(metaspace.get("add_prefix_space", True))
