"""Request: one generation while it lives in the scheduler, as data. What happens to it is decided elsewhere.

Its sequence is `tokens` (prompt, then output); `computed` of them have KV. A step computes some of the rest:
a prompt chunk, one sampled token, or the forced text of a jump are the same thing here.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from runtime.cache.manager import Lease
from runtime.grammar.base import Completion, Matcher, Origin
from runtime.grammar.healing import Healing
from runtime.protocol.errors import InternalFault, RuntimeFault
from runtime.protocol.io_struct import FinishReason, GrammarInfo, TokenizedGenerateReqInput, TokenOutput
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.stop import LENGTH, NOTHING_SEEN, Seen, StopRule

Hidden: TypeAlias = Literal["none", "last", "all"]


class Mark(NamedTuple):
    """Where a request was before one step of its matcher: how many tokens it had, what the stop rule had
    seen, and what was counted. `token`: the one sampled; -1: its text was forced."""

    length: int
    seen: Seen
    decode_steps: int
    jumped: int
    token: int


class Healed(NamedTuple):
    """The token, and what was known of it, that step number `step` replaced by others."""

    step: int
    token: int
    logprob: float | None
    top: list[list[tuple[int, float]]]
    ids: list[list[tuple[int, float]]]


class Request:
    """`seq` is its handle in plans. `arrival` counts requests; times are seconds of the scheduler's clock.

    ending    why it will finish, once `goal` tokens are computed; None while it generates
    targets   positions whose log-probabilities are wanted and will come from rows to be run, ascending; the
              first `scored` of them are known
    seen      what the stop rule remembers of the text
    states    final hidden states: of the tokens from the first on, or only of the last one computed
    origin    who keeps its constraint, once that is known
    marks     one for each step of the matcher; `healed`: tokens that a step replaced
    heal      the end of its prompt that is chosen anew, before anything else; None when that is done
    skip      so many bytes of the first output id's text are the prompt's
    stuck     its matcher has come to where nothing may follow; the step under way gives it no token
    barred    ids that led there, by how many steps were before them: of a matcher that cannot itself forbid
    completion looks for a completion from the start; None: that was done, or none is wanted
    late      its last token was not looked at yet: its matcher does not know it
    waits     it is in no plan before it was looked at
    looking   the look was broken off, and goes on later
    behind    how often its mask was not there in time, in a row
    sound     while it changes under a running pass: how many tokens it kept; -1 otherwise
    held      ids that end the output as its constraint wants after `held_at` steps; None: none are known.
              Checked again when `check_at` ids are produced. `sure_held`, `sure_at`, `tell_at`: the same for
              what a stream tells
    missed    after how many steps, and for how many ids, a completion was looked for last and not found
    """

    __slots__ = (
        "added_at", "added_tick", "admitted_at", "arrival", "barred", "behind", "cached", "check_at",
        "closed_by_budget", "completion", "computed", "decode_steps", "ending", "first_at", "future", "goal",
        "grammar_s", "heal", "healed", "held", "held_at", "hidden", "ids", "input_ids_logprobs",
        "input_logprobs", "input_top", "jumped", "late", "lease", "limit", "looking", "marks", "matcher",
        "missed", "misses", "origin", "output_ids_logprobs", "output_logprobs", "output_top", "owed",
        "params", "plain", "preemptions", "prompt_len", "publish_to", "reads_output", "reads_prompt",
        "retractions", "return_logprob", "rid", "rollbacks", "rule", "said", "scored", "searches", "seen",
        "seq", "silent", "skip", "sound", "source", "states", "stream", "stuck", "sure_at", "sure_held",
        "taken_back", "targets", "tell_at", "tokens", "top", "waits",
    )  # fmt: skip

    def __init__(
        self, source: TokenizedGenerateReqInput, seq: int, vocabulary: Vocabulary, now: float, tick: int
    ) -> None:
        self.source = source
        self.rid = source.rid
        self.seq = self.arrival = seq
        # A request without a seed gets one here, once: retraction and recomputation then change no draw.
        self.params: SamplingParams = source.sampling_params
        if self.params.seed is None:
            self.params = msgspec.structs.replace(self.params, seed=secrets.randbits(63))
        self.rule = StopRule.of(self.params, vocabulary)
        self.stream = source.stream
        self.return_logprob = source.return_logprob
        self.top = source.top_logprobs_num if source.return_logprob else 0
        self.ids = tuple(source.token_ids_logprob or ()) if source.return_logprob else ()
        self.hidden: Hidden = _hidden(source)
        processed = self.params.custom_logit_processor is not None
        self.reads_prompt = processed or self.params.repetition_penalty != 1.0
        self.reads_output = (
            self.reads_prompt or self.params.frequency_penalty != 0.0 or self.params.presence_penalty != 0.0
        )
        self.tokens: array[int] = array("q", source.input_ids)
        self.heal: Healing | None = None
        self.skip = 0
        if source.heal:
            self.heal = Healing(source.input_ids[-source.heal :], vocabulary)
            del self.tokens[-source.heal :]
        self.prompt_len = len(self.tokens)
        self.limit = self.prompt_len + self.params.max_new_tokens  # how long it can become
        self.computed = 0
        self.plain = False  # whether nothing looks at its tokens but stop ids and max_new_tokens
        self.publish_to = 0  # chunks ending up to here go to the prefix cache at once
        self.lease: Lease | None = None
        self.matcher: Matcher | None = None
        self.origin: Origin | None = None
        self.grammar_s = 0.0  # CPU seconds that following its constraint took the scheduler's thread
        self.rollbacks = 0  # how often output was taken back
        self.closed_by_budget = False  # whether it was led to its end before max_new_tokens ran out
        self.future: Future[Matcher] | None = None
        self.seen = NOTHING_SEEN
        self.owed: list[int] = []
        self.marks: list[Mark] = []
        self.healed: list[Healed] = []
        self.stuck = False
        self.late = False
        self.sound = -1
        self.waits, self.looking, self.behind = False, False, 0
        self.taken_back = 0  # tokens, in all
        self.searches = 0  # for completions
        self.barred: dict[int, frozenset[int]] = {}
        self.held: tuple[int, ...] | None = None
        self.completion: Completion | None = None
        self.held_at = self.check_at = self.misses = 0
        self.sure_held: tuple[int, ...] = ()
        self.sure_at = self.tell_at = self.silent = 0
        self.missed = (-1, 0)
        self.ending: FinishReason | None = None
        self.goal = 0
        self.said = 0  # output ids told already
        self.cached = -1  # prompt tokens found in the cache at the first admission; -1 before that
        self.jumped = self.decode_steps = self.retractions = self.preemptions = 0
        self.added_at, self.added_tick = now, tick
        self.admitted_at = self.first_at = -1.0
        self.targets: list[int] = []
        self.scored = 0
        self.input_logprobs: list[float | None] = []
        self.output_logprobs: list[float | None] = []
        self.output_top: list[list[tuple[int, float]]] = []
        self.output_ids_logprobs: list[list[tuple[int, float]]] = []
        self.input_top: list[list[tuple[int, float]]] = []
        self.input_ids_logprobs: list[list[tuple[int, float]]] = []
        self.states: list[list[float]] = []
        start = source.logprob_start_len
        if start >= 0:
            self.input_logprobs = [None] * (self.prompt_len - start)
            self.input_top = [[]] * (self.prompt_len - start) if self.top else []
            self.input_ids_logprobs = [[]] * (self.prompt_len - start) if self.ids else []
            self.targets = list(range(max(start, 1), self.prompt_len))
        if not self.params.max_new_tokens:
            self.end(LENGTH, self.prompt_len)

    # -- lengths ---------------------------------------------------------------------------------------------

    @property
    def produced(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return 0 if self.ending else self.params.max_new_tokens - self.produced

    @property
    def until(self) -> int:
        """Tokens to compute before the next decision about this request."""
        return self.goal if self.ending else len(self.tokens)

    @property
    def most(self) -> int:
        """Slots its sequence can come to need. The last token generated is never computed."""
        return self.prompt_len + max(self.params.max_new_tokens - 1, 0)

    @property
    def matchable(self) -> int:
        """How long a cached prefix it can use: something must be left to compute, the token before the first
        wanted log-probability and the first whose hidden state is wanted included."""
        wanted = self.targets[self.scored] - 1 if self.scored < len(self.targets) else len(self.tokens)
        if self.hidden == "all":
            wanted = min(wanted, len(self.states))
        return max(0, min(len(self.tokens) - 1, wanted))

    @property
    def ready(self) -> bool:
        """Whether it is over and all that was wanted is known."""
        return self.ending is not None and self.computed >= self.goal

    def end(self, reason: FinishReason, goal: int = 0) -> None:
        """No more tokens come; it finishes when `goal` tokens are computed and all wanted scores are
        there."""
        self.ending = reason
        self.goal = max(goal, self.targets[-1] if self.scored < len(self.targets) else 0)

    def hopeless(self, place: int, room: int) -> bool:
        """Whether a completion of `room` ids was looked for after `place` steps, and not found."""
        return self.missed[0] == place and room <= self.missed[1]

    # -- output ----------------------------------------------------------------------------------------------

    def append(
        self,
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]] = (),
        ids: Sequence[float] = (),
        *,
        later: bool = False,
    ) -> None:
        """One more output token. `later`: its log-probabilities come from the row that computes it."""
        if self.return_logprob:
            if later:
                self.targets.append(len(self.tokens))
            self.output_logprobs.append(logprob)
            if self.top:
                self.output_top.append(list(top))
            if self.ids:
                self.output_ids_logprobs.append(list(zip(self.ids, ids)))
        self.tokens.append(token)

    def settle_prompt(self, token: int) -> None:
        """One more token of the prompt, where its end is chosen anew."""
        self.tokens.append(token)
        self.prompt_len += 1
        self.limit += 1

    @property
    def is_plain(self) -> bool:
        return not (
            self.ending
            or self.matcher
            or self.heal
            or self.rule.reads_text
            or self.return_logprob
            or self.hidden != "none"
        )

    def drop_last(self) -> None:
        """Take the last output token back; it has not been computed or told. Other tokens for its text, and
        for what is forced behind it, come next; cut() brings it back."""
        if self.marks:
            last = self.output_logprobs[-1] if self.return_logprob else None
            top, ids = self.output_top[-1:], self.output_ids_logprobs[-1:]
            self.healed.append(Healed(len(self.marks), self.tokens[-1], last, top, ids))
        self._shorten(len(self.tokens) - 1)

    def _shorten(self, length: int) -> None:
        """Only the first `length` tokens, and what is known of these."""
        del self.tokens[length:]
        self.sound = min(self.sound, length)
        produced = self.produced
        for known in (self.output_logprobs, self.output_top, self.output_ids_logprobs):
            del known[produced:]
        while self.targets and self.targets[-1] >= length:
            self.targets.pop()
        self.scored = min(self.scored, len(self.targets))

    def mark(self, token: int = -1) -> None:
        """Its matcher took one step just now, by the sampled `token` or by forced text; the tokens for it
        come next."""
        self.marks.append(Mark(len(self.tokens), self.seen, self.decode_steps, self.jumped, token))

    def length_before(self, back: int) -> int:
        """How many tokens it had before the last `back` steps, and keeps for sure if these are taken back."""
        number = len(self.marks) - back
        healed = any(one.step == number + 1 for one in self.healed[-back:])
        return self.marks[number].length - healed

    @property
    def sure(self) -> int:
        """Output ids that will not be taken back."""
        if self.matcher is None or not self.marks:
            return self.produced
        if self.held is not None or self.completion is not None:
            back = len(self.marks) - max(self.held_at, self.sure_at)
        else:
            back = min(self.matcher.undoable() + self.late, len(self.marks))
        return self.length_before(back) - self.prompt_len if back else self.produced

    def cut(self, back: int) -> int:
        """Take the output of the last `back` steps of its matcher back; how many tokens that were. What is
        computed of them, and the matcher, are the caller's."""
        before = len(self.tokens)
        for _ in range(back):
            number = len(self.marks)
            mark = self.marks.pop()
            self._shorten(mark.length)
            if self.healed and self.healed[-1].step == number:
                healed = self.healed.pop()
                self._shorten(mark.length - 1)
                self.tokens.append(healed.token)
                if self.return_logprob:
                    self.output_logprobs.append(healed.logprob)
                    self.output_top += healed.top
                    self.output_ids_logprobs += healed.ids
            self.seen, self.decode_steps, self.jumped = mark.seen, mark.decode_steps, mark.jumped
        if self.missed[0] > len(self.marks):
            self.missed = (-1, 0)  # it is another place now
        self.owed = []
        for number in [one for one in self.barred if one > len(self.marks)]:
            del self.barred[number]
        return before - len(self.tokens)

    @property
    def settled(self) -> int:
        """How many computed tokens will not be computed again."""
        return self.computed - (self.return_logprob and self.matcher is not None)

    def rewind(self) -> None:
        """The last token computed will be computed again, for its logits; see `settled`."""
        assert self.lease is not None
        self.lease.rewind()
        self.computed -= 1

    def wanted(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The scores to ask of a row that computes positions start .. end-1: a token's comes from the
        position before."""
        if self.scored == len(self.targets):
            return ()
        found: list[tuple[int, int]] = []
        for index in range(self.scored, len(self.targets)):
            position = self.targets[index]
            if position > end:
                break
            found.append((position - 1 - start, self.tokens[position]))
        return tuple(found)

    def score(
        self,
        values: Sequence[float],
        tops: Sequence[Sequence[tuple[int, float]]] = (),
        ids: Sequence[Sequence[float]] = (),
    ) -> None:
        """The answers to wanted(), same order. `tops`, `ids`: one entry for each, where they were asked
        for."""
        for index, value in enumerate(values):
            position = self.targets[self.scored]
            self.scored += 1
            if position < self.prompt_len:
                at = position - self.source.logprob_start_len
                logprobs, top, own = self.input_logprobs, self.input_top, self.input_ids_logprobs
            else:
                at = position - self.prompt_len
                logprobs, top, own = self.output_logprobs, self.output_top, self.output_ids_logprobs
            logprobs[at] = value
            if self.top:
                top[at] = list(tops[index])
            if self.ids:
                own[at] = list(zip(self.ids, ids[index]))

    def hidden_of(self, end: int) -> Hidden:
        """Whose hidden states to ask of a row that computes up to `end`."""
        return "none" if self.hidden == "last" and end < self.until else self.hidden

    def show(self, start: int, states: Sequence[Sequence[float]]) -> None:
        """The hidden states of a row that computed the tokens from `start` on, as hidden_of() asked."""
        if not states:
            return
        if self.hidden == "last":
            self.states = [list(states[-1])]
        else:  # what is computed a second time is known
            self.states += map(list, states[len(self.states) - start :])

    def piece(self) -> TokenOutput | None:
        """news() of a `plain` request that streams, generates and goes on: the usual case, written out."""
        tokens, said = self.tokens, self.said
        end = len(tokens) - self.prompt_len
        new = end - said
        if new < self.params.stream_interval and (said or not new):
            return None
        self.said = end
        return TokenOutput(
            rid=self.rid,
            new_ids=[tokens[-1]] if new == 1 else tokens[-new:].tolist(),
            prompt_tokens=len(self.source.input_ids),
            completion_tokens=end,
            cached_tokens=self.cached,
            jumped_tokens=self.jumped,
            decode_steps=self.decode_steps,
            retractions=self.retractions,
            queue_s=self.admitted_at - self.added_at,
            first_token_s=self.first_at - self.added_at,
            http_worker_ipc=self.source.http_worker_ipc,
        )

    def news(self, now: float, finish: FinishReason | None = None) -> TokenOutput | None:
        """What is new since the last call; None when that is nothing. Output ids whose log-probability is
        wanted and still to come are held back, and those that may be taken back. What is left of a request
        that ends comes with its end: only FinishReason.matched says what is no part of the text."""
        end = self.produced
        if finish is None:
            if not self.stream or self.looking or self.ending is not None:
                return None
            if self.return_logprob and self.scored < len(self.targets):
                end = min(end, max(0, self.targets[self.scored] - self.prompt_len))
            if self.matcher is not None:
                end = min(end, self.sure)
            if end <= self.said or (self.said and end - self.said < self.params.stream_interval):
                return None  # the first piece comes at once, the others every stream_interval tokens
        start, self.said = self.said, end
        admitted = self.admitted_at if self.admitted_at >= 0 else now
        first = self.first_at if self.first_at >= 0 else now
        new_ids = self.tokens[self.prompt_len + start : self.prompt_len + end].tolist()
        whole = finish is not None and finish.type != "abort"
        # Once: with the first piece of a stream, which waits for them, or with the whole answer.
        scored = start == 0 and (whole or finish is None) and self.source.logprob_start_len >= 0
        return TokenOutput(
            rid=self.rid,
            new_ids=new_ids,
            finish=finish,
            prompt_tokens=len(self.source.input_ids),
            completion_tokens=end,
            cached_tokens=max(self.cached, 0),
            jumped_tokens=self.jumped,
            decode_steps=self.decode_steps,
            output_logprobs=self.output_logprobs[start:end],
            output_top_logprobs=self.output_top[start:end],
            output_token_ids_logprobs=self.output_ids_logprobs[start:end],
            input_logprobs=self.input_logprobs if scored else None,
            input_top_logprobs=self.input_top if scored and self.top else None,
            input_token_ids_logprobs=self.input_ids_logprobs if scored and self.ids else None,
            hidden_states=self.states if whole and self.hidden != "none" else None,
            retractions=self.retractions,
            queue_s=admitted - self.added_at,
            first_token_s=first - self.added_at,
            http_worker_ipc=self.source.http_worker_ipc,
            grammar=self.kept() if finish is not None or start == 0 else None,
            healed=self.skip if start == 0 else 0,
        )

    def kept(self) -> GrammarInfo | None:
        """How its constraint is kept; None without one, or while it is compiled."""
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
            rollbacks=self.rollbacks,
            closed_by_budget=self.closed_by_budget,
        )


def _hidden(source: TokenizedGenerateReqInput) -> Hidden:
    if source.return_hidden_states is True:
        return "all"
    return "last" if source.embedding or source.return_hidden_states == "last" else "none"


def named(live: Mapping[str, Request], rid: str | None, prefix: bool) -> list[Request]:
    """Those with the id `rid`, or whose ids begin with it (none for an empty one); all for None."""
    if rid is None:
        return list(live.values())
    if prefix:
        return [request for request in live.values() if rid and request.rid.startswith(rid)]
    return [live[rid]] if rid in live else []


def failure(fault: RuntimeFault) -> FinishReason:
    """The finish reason that carries an error to the user."""
    return FinishReason(type="abort", error=fault.to_dict())


def defect(what: str, error: BaseException) -> InternalFault:
    """The fault that tells a request of a defect of ours."""
    return InternalFault(f"{what}: {type(error).__name__}: {error}", hint="the engine goes on; see its log")
