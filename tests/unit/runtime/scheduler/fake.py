"""FakeRunner: a Runner of ints, for tests and for measuring the scheduler alone. Knows no model.

Its "KV" of a token is a hash of the whole history up to it. So it notices at once when a plan shows a
sequence anything but its own history, and its next token depends on all of that history, as a model's does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from runtime.plan import Adapter, Row, RowResult, Run, Sample, Segment, StepPlan, StepResult, TokenMask
from runtime.protocol.control import MemoryPart
from runtime.protocol.errors import BadRequest, InternalFault
from runtime.protocol.sampling import SamplingParams

START = 0x9E3779B97F4A7C15  # the hash of no tokens
HIDDEN = 3  # width of its hidden states
_MASK = (1 << 64) - 1


def begin(adapter: int) -> int:
    """The hash of no tokens with this adapter: what follows is another history than without it."""
    return START if not adapter else follow(START, (-adapter,))


def follow(history: int, tokens: Iterable[int]) -> int:
    """The hash of a history after `tokens` were added to it."""
    for token in tokens:
        history = ((history ^ (history >> 29)) * 0xBF58476D1CE4E5B9 + token + 1) & _MASK
    return history


def logprob(history: int, token: int) -> float:
    """What the fake model thinks of `token` after `history`: a number in [-8, 0)."""
    return -8.0 + (follow(history, (token,)) >> 40) / (1 << 21)


def hidden(history: int) -> tuple[float, ...]:
    """The fake model's hidden state after `history`: HIDDEN numbers in [0, 1)."""
    return tuple((follow(history, (-part,)) >> 32) / (1 << 32) for part in range(1, HIDDEN + 1))


def draw(history: int, vocab_size: int, mask: TokenMask | None = None) -> int:
    """The fake model's next token: the same for the same history, whatever the sampling parameters."""
    choice = follow(history, (0,)) >> 33
    if mask is None:
        return choice % vocab_size
    allowed = mask.allowed
    if allowed is None:
        bits = np.unpackbits(mask.bits.astype("<u4").view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:vocab_size])
    return int(allowed[choice % len(allowed)])


class FakeRunner:
    """Implements runtime.plan.Runner. launch() raises InternalFault, naming the row, when

    * the segments of a row do not cover its positions 0 .. position-1 exactly, or not with one and the same
    history; * that history is not the one which the sequence had before;
    * a slot is written that lies outside the pool, twice, or that a row of the same step reads.
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._before = [-1] * slots  # hash of the history before the token in this slot, and
        self._after = [-1] * slots  # after it
        self._touched = [0] * slots  # number of the last step that read or wrote it
        self.weights: str | None = None  # the last that it was given
        self.released: set[MemoryPart] = set()
        self._known: dict[int, tuple[int, int]] = {}  # seq -> (tokens computed, hash after them)
        self._step: tuple[StepPlan, list[list[int]]] | None = None
        self.adapters: dict[int, Adapter] = {}
        self.steps = 0
        self.tokens = 0
        self.over: Callable[[], bool] = lambda: False
        """What done() says: there is no time in here."""
        self.takes: Callable[[StepPlan], tuple[float, float]] = lambda plan: (0.0, 0.0)
        """What passes are said to take: seconds until the hidden states, and in all."""

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def verify(self, params: SamplingParams) -> None:
        if params.custom_logit_processor is not None:
            raise BadRequest(
                f"unknown logit processor {params.custom_logit_processor!r}; known: none",
                where="sampling_params.custom_logit_processor",
            )

    def launch(self, plan: StepPlan) -> None:
        if self._step is not None:
            raise InternalFault("launch() before finish()", where="fake runner")
        self.steps += 1
        self.tokens += plan.token_count
        for seq in plan.released:
            self._known.pop(seq, None)
        histories = self._read(plan)
        self._step = plan, [self._write(row, history) for row, history in zip(plan.rows, histories)]

    def done(self) -> bool:
        return self.over()

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        if self._step is None:
            raise InternalFault("finish() without launch()", where="fake runner")
        (plan, histories), self._step = self._step, None
        results = zip(plan.rows, histories)
        hidden_s, seconds = self.takes(plan)
        return StepResult(
            tuple(self._answer(row, seen, masks.get(i)) for i, (row, seen) in enumerate(results)),
            seconds,
            hidden_s,
        )

    def load_adapter(self, adapter: Adapter) -> None:
        self.adapters[adapter.number] = adapter

    def unload_adapter(self, number: int) -> None:
        self.adapters.pop(number, None)

    def update_weights(self, path: str) -> None:
        self._known.clear()  # KV of the weights before is of no use
        self.weights = path

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        self._known.clear()
        self.released |= {*parts}

    def restore_memory(self, parts: Sequence[MemoryPart], path: str) -> None:
        self.released -= {*parts}
        if "weights" in parts:
            self.weights = path

    def close(self) -> None:
        self._known.clear()

    def _read(self, plan: StepPlan) -> list[int]:
        """The history of each row as its segments give it."""
        parts: list[list[tuple[int, int, int, int]]] = [[] for _ in plan.rows]
        for segment in plan.segments:
            part = (segment.position, *self._segment(segment))
            for index in segment.rows:
                parts[index].append(part)
        histories: list[int] = []
        for row, found in zip(plan.rows, parts):
            found.sort()
            position, history = 0, begin(row.adapter)
            for at, length, first, last in found:
                if at != position or first != history:
                    raise _wrong(row, f"the segment at {at} does not continue the {position} tokens before")
                position, history = at + length, last
            if position != row.position:
                raise _wrong(row, f"its segments cover {position} tokens")
            known = self._known.get(row.seq)
            if known is not None and known[0] == position and known[1] != history:
                raise _wrong(row, "its segments hold another history than it had")
            histories.append(history)
        return histories

    def _segment(self, segment: Segment) -> tuple[int, int, int]:
        """Check that the segment's slots hold one history; its length, the hashes before and after it."""
        before: list[int] = []
        after: list[int] = []
        for run in segment.runs:
            start, end = _ends(run)
            before += self._before[start:end]
            after += self._after[start:end]
            self._touched[start:end] = [self.steps] * run.length
        if not before or before[0] == -1 or before[1:] != after[:-1]:
            raise InternalFault(
                f"the segment {segment} is empty, was never written or mixes histories", where="fake runner"
            )
        return len(before), before[0], after[-1]

    def _write(self, row: Row, history: int) -> list[int]:
        """Store the row's tokens; the hash after each of them."""
        slots = [slot for run in row.slots for slot in range(*_ends(run))]
        if len(slots) != len(row.tokens) or not slots:
            raise _wrong(row, f"{len(slots)} slots for {len(row.tokens)} tokens")
        if not 0 <= row.drafts < len(row.tokens) or row.media:
            raise _wrong(row, f"{row.drafts} drafts, {len(row.media)} media")
        if row.adapter and row.adapter not in self.adapters:
            raise _wrong(row, f"the adapter {row.adapter} is not loaded")
        seen: list[int] = []
        for slot, token in zip(slots, row.tokens):
            if not 0 <= slot < self._slots or self._touched[slot] == self.steps:
                raise _wrong(row, f"slot {slot} is out of the pool, or read or written by another row")
            self._touched[slot] = self.steps
            self._before[slot] = history
            history = follow(history, (token,))
            self._after[slot] = history
            seen.append(history)
        self._known[row.seq] = (row.position + len(slots), history)
        return seen

    def _answer(self, row: Row, seen: list[int], mask: TokenMask | None) -> RowResult:
        at = [seen[index] for index, _ in row.scores]
        samples = self._samples(row, seen, mask) if row.sample else ()
        wanted = {"none": [], "last": seen[-1:], "all": seen}[row.hidden]
        return RowResult(
            samples=samples,
            guesses=self._guesses(row, seen, samples),
            scores=tuple(logprob(here, target) for here, (_, target) in zip(at, row.scores)),
            score_tops=tuple(self._top(here, row.score_top) for here in at),
            score_token_ids=tuple(_known(here, row.token_ids) for here in at),
            hidden=tuple(hidden(here) for here in wanted),
        )

    def _samples(self, row: Row, seen: list[int], mask: TokenMask | None) -> tuple[Sample, ...]:
        """After the last token that is no draft, and after each draft that was right."""
        made: list[Sample] = []
        drafts = row.tokens[len(row.tokens) - row.drafts :]
        masks = [mask] * (row.drafts + 1) if mask is None else [mask, *mask.behind]
        for history, draft, mine in zip(seen[-1 - row.drafts :], (*drafts, None), masks):
            token = draw(history, self._vocab_size, mine)
            known = logprob(history, token) if row.logprob else None
            top = self._top(history, row.top_logprobs)
            made.append(Sample(token, known, top, _known(history, row.token_ids)))
            if token != draft:
                break
        return tuple(made)

    def _guesses(self, row: Row, seen: list[int], samples: tuple[Sample, ...]) -> tuple[int, ...]:
        """Of a draft model that says what this one does, but for one time in eight."""
        made: list[int] = []
        if row.guesses and samples:
            history = follow(seen[len(samples) - 2 - row.drafts], (samples[-1].token,))
            for _ in range(row.guesses):
                made.append((draw(history, self._vocab_size) + (history >> 40 & 7 == 0)) % self._vocab_size)
                history = follow(history, made[-1:])
        return tuple(made)

    def _top(self, history: int, count: int) -> tuple[tuple[int, float], ...]:
        if not count:
            return ()
        every = ((token, logprob(history, token)) for token in range(self._vocab_size))
        return tuple(heapq.nlargest(count, every, key=lambda pair: pair[1]))


def _known(history: int, ids: Iterable[int]) -> tuple[float, ...]:
    return tuple(logprob(history, token) for token in ids)


def _ends(run: Run) -> tuple[int, int]:
    return run.start, run.start + run.length


def _wrong(row: Row, what: str) -> InternalFault:
    return InternalFault(f"sequence {row.seq} at position {row.position}: {what}", where="fake runner")
