"""DetokenizerManager: deltas in ids -> deltas in text, for many requests at once. IncrementalText: the text
of one of them.

Text is the bytes of the ids, decoded as UTF-8 as the tokenizer's own decoder would decode all of them at
once. Text that was sent never changes: bytes of an unfinished character are held back, and text that may turn
out to be the beginning of a stop string or of a match of a stop regex. The work is linear in the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache

from runtime.grammar.search import Search
from runtime.processes.checkpoint.tokenizer import TextTable
from runtime.protocol.errors import BadConstraint, InternalFault
from runtime.protocol.io_struct import BatchStrOutput, BatchTokenIDOutput, TextRequest, TokenOutput

MAX_STATES = 65_536
PATTERNS = 256
"""Compiled sets of stop patterns that are cached."""
REPLACEMENT = "\ufffd"
EACH_BYTE = "sglang_dsl.each_byte"
"""Name of a decoding error handler: one U+FFFD for every broken byte."""


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)


class IncrementalText:
    """The growing text of one request.

    at_start: no text stands before it, so the decoder's rule about leading spaces applies. search: for the
    patterns of stop_regex, None if there are none.
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
        self._position = None if search is None else search.begin
        self._cut = -1  # where in the held text a match of the search begins
        self._spaces_to_drop = table.lead_spaces if at_start else 0
        self._first_token = at_start and table.lead_token
        self._unfinished = b""
        self._held = ""

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

        replaced: so many of the last ids are taken back first; the new ones spell the same bytes, and more.
        skip: so many bytes of the new ids are no part of the text. finished: no more will come; `matched` is
        the stop string or id that ended it, or the text that matched a stop regex, and is left out. Raises
        InternalFault if the new ids do not begin with the bytes of the replaced ones.
        """
        shown_ids = new_ids
        if isinstance(matched, int) and self._trim and new_ids and new_ids[-1] == matched:
            shown_ids = new_ids[:-1]
        fresh = self._take_back(shown_ids, replaced)[skip:]
        self.ids.extend(new_ids)
        data, errors = self._unfinished + fresh, EACH_BYTE if self._table.each_byte else "replace"
        # Bytes of a character that may go on are kept: at most 3, none at the end.
        decoded, used = codecs.utf_8_decode(data, errors, finished)
        self._unfinished = data[used:]
        held = self._held + decoded
        hold = self._read_on(held, decoded)
        if finished:
            self._held = ""
            return held[: self._end(held, matched, self._size_of_last(shown_ids))]
        at = len(held) - max(hold, _may_begin(held, self._stop))
        self._held = held[at:]
        return held[:at]

    def _read_on(self, held: str, decoded: str) -> int:
        """How many of the last characters may belong to a match of a stop regex."""
        if self._search is None or self._position is None or self._cut >= 0:
            return len(held) if self._cut >= 0 else 0
        self._position, match = self._search.feed(self._position, decoded)
        if match is None:
            return self._position.held
        self._cut = len(held) - match.start
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


def _may_begin(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning (not the whole) of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


class DetokenizerManager:
    """Keeps at most `max_states` requests; if one more begins, the oldest ends with an error."""

    def __init__(self, table: TextTable, max_states: int = MAX_STATES) -> None:
        self._table, self._max_states = table, max_states
        self._texts: dict[str, tuple[TextRequest, IncrementalText]] = {}
        self._searches = lru_cache(maxsize=PATTERNS)(_search)

    def __len__(self) -> int:
        return len(self._texts)

    def handle(self, batches: Sequence[BatchTokenIDOutput]) -> BatchStrOutput | None:
        """The deltas with their text; None if there are none. Those of unknown requests are dropped."""
        outputs: list[TokenOutput] = []
        for batch in batches:
            for request in batch.begun:
                self._begin(request, outputs)
            for delta in batch.outputs:
                self._feed(delta, outputs)
        return BatchStrOutput.of(outputs) if outputs else None

    def _begin(self, request: TextRequest, outputs: list[TokenOutput]) -> None:
        if len(self._texts) >= self._max_states:
            oldest, _ = self._texts.pop(next(iter(self._texts)))
            fault = InternalFault(
                f"the detokeniser keeps at most {self._max_states} requests and dropped this one, the oldest",
                hint="lower max_waiting_requests",
            )
            outputs.append(TokenOutput.failed(oldest.rid, fault, oldest.http_worker_ipc))
        text = IncrementalText(
            self._table,
            stop=request.stop,
            skip_special_tokens=request.skip_special_tokens,
            no_stop_trim=request.no_stop_trim,
            at_start=request.at_start,
            search=self._searches(request.stop_regex) if request.stop_regex else None,
        )
        self._texts[request.rid] = request, text

    def _feed(self, delta: TokenOutput, outputs: list[TokenOutput]) -> None:
        if delta.rid not in self._texts:
            return
        request, text = self._texts[delta.rid]
        delta.http_worker_ipc = request.http_worker_ipc
        try:
            delta.text = text.feed(
                delta.new_ids,
                delta.replaced,
                skip=delta.healed,
                finished=delta.finish is not None,
                matched=None if delta.finish is None else delta.finish.matched,
            )
        except InternalFault as fault:
            delta = TokenOutput.failed(delta.rid, fault, request.http_worker_ipc)
        outputs.append(delta)
        if delta.finish is not None:
            del self._texts[delta.rid]


def _search(patterns: tuple[str, ...]) -> Search | None:
    try:
        return Search(patterns)
    except BadConstraint:
        return None  # the scheduler refuses the request with this reason
