"""DetokenizerManager: deltas in ids -> deltas in text, for many requests at once. IncrementalText: the text
of one of them.

Text is the bytes of the ids, decoded as UTF-8 as the tokenizer's own decoder would decode all of them at
once. Text that was sent never changes: bytes of an unfinished character are held back, and text that may turn
out to be the beginning of a stop string or of a match of a stop regex. The work is linear in the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

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
        self._pieces: list[str] = []
        self._size = 0

    def __len__(self) -> int:
        """Characters shown so far."""
        return self._size

    @property
    def text(self) -> str:
        """All text shown so far."""
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


class _State:
    """One request: its text so far, and its output that was not sent yet."""

    __slots__ = ("request", "text", "unsent")

    def __init__(self, table: TextTable, request: TextRequest, search: Search | None) -> None:
        self.request = request
        self.unsent: TokenOutput | None = None
        self.text = IncrementalText(
            table,
            stop=request.stop,
            skip_special_tokens=request.skip_special_tokens,
            no_stop_trim=request.no_stop_trim,
            at_start=request.at_start,
            search=search,
        )

    def feed(self, delta: TokenOutput) -> TokenOutput | None:
        """The output to send now; None before the end of a request that does not stream. Raises
        InternalFault."""
        delta.text = self.text.feed(
            delta.new_ids,
            delta.replaced,
            skip=delta.healed,
            finished=delta.finish is not None,
            matched=None if delta.finish is None else delta.finish.matched,
        )
        delta.http_worker_ipc = self.request.http_worker_ipc
        if self.unsent is not None:
            delta = join(self.unsent, delta)
        self.unsent = delta if delta.finish is None and not self.request.stream else None
        return delta if self.unsent is None else None

    def failed(self, fault: InternalFault) -> TokenOutput:
        return TokenOutput.failed(self.request.rid, fault, self.request.http_worker_ipc)


class DetokenizerManager:
    """Keeps at most `max_states` requests; if one more begins, the oldest ends with an error."""

    def __init__(self, table: TextTable, max_states: int = MAX_STATES) -> None:
        self._table, self._max_states = table, max_states
        self._states: dict[str, _State] = {}
        self._searches = lru_cache(maxsize=PATTERNS)(_search)

    def __len__(self) -> int:
        return len(self._states)

    def handle(self, batches: Sequence[BatchTokenIDOutput]) -> BatchStrOutput | None:
        """The text of these deltas, one output per request; None if there is none to send. Deltas of unknown
        requests are dropped."""
        ready: dict[str, TokenOutput] = {}
        for batch in batches:
            for request in batch.begun:
                self._begin(request, ready)
            for delta in batch.outputs:
                output = self._feed(delta)
                if output is not None:
                    _put(ready, output)
        if not ready:
            return None
        return BatchStrOutput(rids=list(ready), outputs=list(ready.values())).with_spec()

    def _begin(self, request: TextRequest, ready: dict[str, TokenOutput]) -> None:
        if len(self._states) >= self._max_states:
            oldest = next(iter(self._states))
            fault = InternalFault(
                f"the detokeniser keeps at most {self._max_states} requests and dropped this one, the oldest",
                hint="lower max_waiting_requests",
            )
            _put(ready, self._states.pop(oldest).failed(fault))
        search = self._searches(request.stop_regex) if request.stop_regex else None
        self._states[request.rid] = _State(self._table, request, search)

    def _feed(self, delta: TokenOutput) -> TokenOutput | None:
        state = self._states.get(delta.rid)
        if state is None:
            return None
        try:
            output = state.feed(delta)
        except InternalFault as fault:
            output = state.failed(fault)
        if output is not None and output.finish is not None:
            del self._states[delta.rid]
        return output


def _put(ready: dict[str, TokenOutput], output: TokenOutput) -> None:
    earlier = ready.get(output.rid)
    ready[output.rid] = output if earlier is None else join(earlier, output)


def join(first: TokenOutput, then: TokenOutput) -> TokenOutput:
    """Two deltas of one request as one, by the rules of JOIN: an OutputAccumulator adds it up to the same."""
    if first.finish is not None:  # an end is never followed
        return first
    return TokenOutput(**{name: rule(first, then, name) for name, rule in JOIN.items()})


def _later(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    return getattr(then, name)


def _later_set(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    """The later one's, unless that is None."""
    value = getattr(then, name)
    return getattr(first, name) if value is None else value


def _kept_and_new(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    """Entries per id: the first's without those of replaced ids, and the later's."""
    kept = max(0, len(first.new_ids) - then.replaced)
    return getattr(first, name)[:kept] + getattr(then, name)


def _replaced(first: TokenOutput, then: TokenOutput, name: str) -> int:
    return first.replaced + max(0, then.replaced - len(first.new_ids))


def _all(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    return [*(getattr(first, name) or ()), *(getattr(then, name) or ())] or None


def _both(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    return getattr(first, name) + getattr(then, name)


def _of_first_id(first: TokenOutput, then: TokenOutput, name: str) -> Any:
    return getattr(first if first.new_ids else then, name)


JOIN: dict[str, Callable[[TokenOutput, TokenOutput, str], Any]] = {
    **dict.fromkeys(("rid", "finish"), _later),
    # Counts and times, which every output carries from the request's beginning on.
    **dict.fromkeys(
        (
            "prompt_tokens", "completion_tokens", "cached_tokens", "jumped_tokens", "decode_steps",
            "retractions", "queue_s", "first_token_s",
        ),
        _later,
    ),
    # Sent once, or again with more.
    **dict.fromkeys(
        (
            "input_logprobs", "input_top_logprobs", "input_token_ids_logprobs", "grammar", "http_worker_ipc",
            "spec",
        ),
        _later_set,
    ),
    **dict.fromkeys(
        (
            "new_ids", "output_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
            "output_origins",
        ),
        _kept_and_new,
    ),
    "replaced": _replaced,
    "hidden_states": _all,
    "text": _both,
    "healed": _of_first_id,
}  # fmt: skip
"""The rule for each field of two outputs: (first, then, its name) -> value."""


def _search(patterns: tuple[str, ...]) -> Search | None:
    try:
        return Search(patterns)
    except BadConstraint:
        return None  # the scheduler refuses the request with this reason
