"""Components of a request: what only some requests have, or only one part of the scheduler cares for. Each
has one owner that writes it, and everybody may read: `guided/` writes a Guide, their own methods the others.
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
    """What is known of one output token: its log-probability, the best ids and the ids asked for there, and
    how it came."""

    logprob: float | None
    top: list[Top]
    ids: list[Top]
    origin: TokenOrigin


class Logprobs:
    """The log-probabilities that a request wants, and those there are.

    returned  whether those of the output are wanted
    top, ids  how many best ids, and which ids, at each place
    targets   positions whose log-probabilities will come from rows to be run, ascending; the first `scored`
              of them are known
    start     the position of the first of the prompt's; -1: none of these
    origins   how each output token came
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

    @property
    def last_target(self) -> int:
        """The last one; 0: all are known."""
        return self.targets[-1] if self.scored < len(self.targets) else 0

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
        """The output token at `position`. `later`: its values come from the row that computes it."""
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
        """Only what is known of the first `length` tokens, `produced` of them output."""
        for known in (self.output_scores, self.output_top, self.output_ids, self.origins):
            del known[produced:]
        while self.targets and self.targets[-1] >= length:
            self.targets.pop()
        self.scored = min(self.scored, len(self.targets))

    def wanted(self, tokens: Sequence[int], start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The scores to ask of a row that computes positions start .. end-1: a token's comes from the
        position before."""
        found: list[tuple[int, int]] = []
        for index in range(self.scored, len(self.targets)):
            position = self.targets[index]
            if position > end:
                break
            found.append((position - 1 - start, tokens[position]))
        return tuple(found)

    def score(
        self,
        prompt_len: int,
        values: Sequence[float],
        tops: Sequence[Sequence[tuple[int, float]]] = (),
        ids: Sequence[Sequence[float]] = (),
    ) -> None:
        """The answers to wanted(), same order. `tops`, `ids`: one entry for each, where they were asked
        for."""
        for index, value in enumerate(values):
            position = self.targets[self.scored]
            self.scored += 1
            if position < prompt_len:
                at, known, top, own = position - self.start, self.input_scores, self.input_top, self.input_ids
            else:
                at, known, top, own = (
                    position - prompt_len,
                    self.output_scores,
                    self.output_top,
                    self.output_ids,
                )
            known[at] = value
            if self.top:
                top[at] = list(tops[index])
            if self.ids:
                own[at] = list(zip(self.ids, ids[index]))


class Mark(NamedTuple):
    """Where a request was before one step of its matcher: how many tokens it had, what the stop rule had
    seen, and what was counted. `token`: the one sampled; -1: its text was forced."""

    length: int
    seen: Seen
    decode_steps: int
    jumped: int
    token: int


class Replaced(NamedTuple):
    """The token, and what was known of it, that step number `step` replaced by others."""

    step: int
    token: int
    score: TokenScore | None


class Guide:
    """What constrained decoding knows of one request, from when it has its matcher.

    origin       who keeps its constraint; None: it has none but a limit on its reasoning
    seconds      CPU time that following the constraint took the scheduler's thread
    marks        one for each step of the matcher; `replaced`: tokens that a step replaced
    pending      forced tokens still to be appended
    dead_end     nothing may follow what there is; the step under way gives it no token
    banned       ids that led to a dead end, by how many steps were before them: of a matcher that cannot
                 itself forbid them
    backtracks   how often output was taken back, and `taken_back` tokens in all

    Deferred advance:
    unread       its last token was not followed yet: the matcher does not know it
    waits        it is in no plan before it was followed
    interrupted  following it was broken off, and goes on later
    late_masks   how often its mask was not there in time, in a row
    valid_length while it changes under a running pass: how many tokens it kept; -1 otherwise

    Completion search:
    completion   looks for a completion from the start; None: that was done, or none is wanted
    held         ids that end the output as its constraint wants after `held_at` steps; None: none are known.
                 Checked again when `check_at` ids are produced. `sure_held`, `sure_at`, `tell_at`: the same
                 for what a stream sends. `misses`, `silent`: how often none was found, in a row
    missed       after how many steps, and for how many ids, one was looked for last and not found
    searches     how many there were
    closed_by_budget  whether it was led to its end before max_new_tokens ran out
    """

    __slots__ = (
        "backtracks", "banned", "check_at", "closed_by_budget", "completion", "dead_end", "held", "held_at",
        "interrupted", "late_masks", "marks", "matcher", "missed", "misses", "origin", "pending", "replaced",
        "searches", "seconds", "silent", "sure_at", "sure_held", "taken_back", "tell_at", "unread",
        "valid_length", "waits",
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
        self.sure_at = self.tell_at = self.silent = 0
        self.missed = (-1, 0)
        self.searches = 0
        self.closed_by_budget = False

    def hopeless(self, place: int, room: int) -> bool:
        """Whether a completion of `room` ids was looked for after `place` steps, and not found."""
        return self.missed[0] == place and room <= self.missed[1]

    def length_before(self, back: int) -> int:
        """How many tokens there were before the last `back` steps, and are kept for sure if these are taken
        back."""
        number = len(self.marks) - back
        replaced = any(one.step == number + 1 for one in self.replaced[-back:])
        return self.marks[number].length - replaced

    def sure(self, length: int) -> int:
        """How many of the `length` tokens there are will not be taken back."""
        if not self.marks:
            return length
        if self.held is not None or self.completion is not None:
            back = len(self.marks) - max(self.held_at, self.sure_at)
        else:
            back = min(self.matcher.undoable() + self.unread, len(self.marks))
        return self.length_before(back) if back else length

    def info(self) -> GrammarInfo | None:
        """How the constraint is kept; None without one."""
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
