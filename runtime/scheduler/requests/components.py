"""Components of a request that only some requests have. Each has one owner that writes it, and all may read
it: `guided/` writes a Guide, its methods write a Logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.grammar.base import Completion, Matcher, Origin
from runtime.protocol.io_struct import GrammarInfo, TokenizedGenerateReqInput, TokenOrigin
from runtime.scheduler.requests.stop import Seen

Top = list[tuple[int, float]]
"""(id, log-probability) pairs."""


class TokenScore(NamedTuple):
    """Of one output token; `top`, `ids`: one entry each, if requested."""

    logprob: float | None
    top: list[Top]
    ids: list[Top]
    origin: TokenOrigin


class Logprobs:
    """The log-probabilities that a request asks for, and the known ones.

    returned  whether those of the output are requested
    top, ids  how many best ids, and which ids, at each position
    targets   positions whose log-probabilities come from rows to be computed, ascending; the first
              `scored` of them are known
    start     the position of the first of the prompt's; -1: none of these
    origins   the origin of each output token
    """

    __slots__ = (
        "ids", "input_ids", "input_scores", "input_top", "origins", "output_ids", "output_scores",
        "output_top", "returned", "scored", "start", "targets", "top",
    )  # fmt: skip

    def __init__(self, source: TokenizedGenerateReqInput, prompt_len: int) -> None:
        self.returned = source.return_logprob
        self.top = source.top_logprobs_num if self.returned else 0
        self.ids = tuple(source.token_ids_logprob or ()) if self.returned else ()
        self.start = source.logprob_start_len
        count = prompt_len - self.start if self.start >= 0 else 0
        self.input_scores: list[float | None] = [None] * count
        self.input_top: list[Top] = [[]] * count if self.top else []
        self.input_ids: list[Top] = [[]] * count if self.ids else []
        self.output_scores: list[float | None] = []
        self.output_top: list[Top] = []
        self.output_ids: list[Top] = []
        self.origins: list[TokenOrigin] = []
        self.targets = list(range(max(self.start, 1), prompt_len)) if self.start >= 0 else []
        self.scored = 0

    @property
    def next_target(self) -> int:
        """The first position whose log-probability is still to come; -1: all are known."""
        return self.targets[self.scored] if self.scored < len(self.targets) else -1

    def append(
        self,
        position: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
        ids: Sequence[float],
        *,
        later: bool,
        origin: TokenOrigin,
    ) -> None:
        """Add the output token at `position`. `later`: its values come from the row that computes it."""
        if not self.returned:
            return
        self.origins.append(origin)
        if later:
            self.targets.append(position)
        self.output_scores.append(logprob)
        if self.top:
            self.output_top.append(list(top))
        if self.ids:
            self.output_ids.append(list(zip(self.ids, ids)))

    def last(self) -> TokenScore | None:
        """Of the last output token."""
        if not self.returned:
            return None
        scores, tops, ids = self.output_scores, self.output_top, self.output_ids
        return TokenScore(scores[-1], tops[-1:], ids[-1:], self.origins[-1])

    def speculated(self) -> None:
        """The last output token was guessed ahead, and the guess was right."""
        if self.returned:
            self.origins[-1] = "speculated"

    def restore(self, score: TokenScore) -> None:
        """What last() gave, for the same token again."""
        self.output_scores.append(score.logprob)
        self.output_top += score.top
        self.output_ids += score.ids
        self.origins.append(score.origin)

    def shorten(self, length: int, produced: int) -> None:
        """Keep only the first `length` tokens, `produced` of them output."""
        for known in (self.output_scores, self.output_top, self.output_ids, self.origins):
            del known[produced:]
        while self.targets and self.targets[-1] >= length:
            self.targets.pop()
        self.scored = min(self.scored, len(self.targets))

    def requests_of(self, tokens: Sequence[int], start: int, end: int) -> tuple[tuple[int, int], ...]:
        """(row, token) of the scores to request from a row of positions start .. end-1."""
        requests: list[tuple[int, int]] = []
        for index in range(self.scored, len(self.targets)):
            position = self.targets[index]
            if position > end:
                break
            requests.append((position - 1 - start, tokens[position]))
        return tuple(requests)

    def score(
        self,
        prompt_len: int,
        values: Sequence[float],
        tops: Sequence[Sequence[tuple[int, float]]] = (),
        ids: Sequence[Sequence[float]] = (),
    ) -> None:
        """The answers to requests_of(), same order. `tops`, `ids`: one entry for each, if requested."""
        for index, value in enumerate(values):
            position = self.targets[self.scored]
            self.scored += 1
            known, best, by_id, at = self.input_scores, self.input_top, self.input_ids, position - self.start
            if position >= prompt_len:
                known, best, by_id = self.output_scores, self.output_top, self.output_ids
                at = position - prompt_len
            known[at] = value
            if self.top:
                best[at] = list(tops[index])
            if self.ids:
                by_id[at] = list(zip(self.ids, ids[index]))


class Mark(NamedTuple):
    """A request before one step of its matcher: how many tokens it had, what the stop rule had seen, and its
    counters. `token`: the sampled one; -1: the text was forced."""

    length: int
    seen: Seen
    decode_steps: int
    jumped: int
    token: int


class Replaced(NamedTuple):
    """The token, and its log-probabilities, that step number `step` replaced by others."""

    step: int
    token: int
    score: TokenScore | None


class Guide:
    """The state of constrained decoding of one request that has its matcher.

    origin       the backend that keeps its constraint; None: it has only a limit on its reasoning
    seconds      CPU time of the scheduler's thread spent on the constraint
    marks        one for each step of the matcher; `replaced`: tokens that a step replaced
    pending      forced tokens still to be appended
    dead_end     no token may follow; the step under way gives it none
    banned       ids that led to a dead end, by the number of steps before them, for a matcher that cannot
                 forbid them itself
    backtracks   how often output was taken back, and `taken_back` tokens in all

    Deferred advance:
    unread       the matcher has not followed its last token yet
    waits        it is in no plan until the matcher has followed
    interrupted  the advance was interrupted, and continues later
    late_masks   how often in a row its mask was late
    valid_length while it changes under a running pass: how many tokens it kept; -1 otherwise

    Completion search (see liveness.py):
    completion   searches a completion from the start; None: that is done, or not needed
    held         ids that complete the output after `held_at` steps; None: none are known. Checked again when
                 `check_at` ids are produced. `sure_held`, `sure_at`, `stream_check_at`: the same for what a
                 stream may send. `misses`, `stream_misses`: searches in a row that failed
    missed       (steps, ids) of the last search that failed
    searches     the number of searches
    closed_by_budget  whether its completion was appended before max_new_tokens ran out
    """

    __slots__ = (
        "backtracks", "banned", "check_at", "closed_by_budget", "completion", "dead_end", "held", "held_at",
        "interrupted", "late_masks", "marks", "matcher", "missed", "misses", "origin", "pending",
        "replaced", "searches", "seconds", "stream_check_at", "stream_misses", "sure_at", "sure_held",
        "taken_back", "unread", "valid_length", "waits",
    )  # fmt: skip

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.origin: Origin | None = None
        self.seconds = 0.0
        self.marks: list[Mark] = []
        self.replaced: list[Replaced] = []
        self.pending: list[int] = []
        self.dead_end = False
        self.banned: dict[int, frozenset[int]] = {}
        self.backtracks = self.taken_back = 0
        self.unread = self.waits = self.interrupted = False
        self.late_masks = 0
        self.valid_length = -1
        self.completion: Completion | None = None
        self.held: tuple[int, ...] | None = None
        self.held_at = self.check_at = self.misses = 0
        self.sure_held: tuple[int, ...] = ()
        self.sure_at = self.stream_check_at = self.stream_misses = 0
        self.missed = (-1, 0)
        self.searches = 0
        self.closed_by_budget = False

    def hopeless(self, step: int, budget: int) -> bool:
        """Whether a search after `step` steps, for at most `budget` ids, has failed before."""
        return self.missed[0] == step and budget <= self.missed[1]

    def length_before(self, back: int) -> int:
        """How many tokens are kept if the last `back` steps are taken back."""
        number = len(self.marks) - back
        replaced = any(one.step == number + 1 for one in self.replaced[-back:])
        return self.marks[number].length - replaced

    def sure(self, length: int) -> int:
        """How many of the `length` tokens cannot be taken back any more."""
        if not self.marks:
            return length
        if self.held is not None or self.completion is not None:
            back = len(self.marks) - max(self.held_at, self.sure_at)
        else:
            back = min(self.matcher.undoable() + self.unread, len(self.marks))
        return self.length_before(back) if back else length

    def info(self) -> GrammarInfo | None:
        """How the constraint is enforced; None without one."""
        origin = self.origin
        if origin is None:
            return None
        return GrammarInfo(
            backend=origin.backend,
            exact=origin.exact,
            checked=list(origin.checked),
            ignored=list(origin.ignored),
            why=origin.why,
            compile_s=origin.compile_s,
            cached=origin.cached,
            rollbacks=self.backtracks,
            closed_by_budget=self.closed_by_budget,
        )
