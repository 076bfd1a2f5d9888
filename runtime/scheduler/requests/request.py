"""Request: one generation while it lives in the scheduler, as data. It decides nothing.

Its sequence is `tokens` (prompt, then output); `computed` of them have KV. A step computes some of the rest:
a prompt chunk, one sampled token and the forced text of a jump are treated alike.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from runtime.cache.manager import Lease
from runtime.grammar.healing import Healing
from runtime.plan import Sample
from runtime.protocol.errors import InternalFault, RuntimeFault
from runtime.protocol.io_struct import (
    FinishReason,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOrigin,
    TokenOutput,
)
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.requests.components import Guide, Logprobs
from runtime.scheduler.requests.drafting import Drafting
from runtime.scheduler.requests.images import Images
from runtime.scheduler.requests.stop import LENGTH, NOTHING_SEEN, StopRule

Hidden: TypeAlias = Literal["none", "last", "all"]


S = TypeVar("S", TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)
R = TypeVar("R", bound="LiveRequest[Any]")


class Timing:
    """Seconds of the scheduler's clock, -1: not yet; `queued_tick`: when it could run."""

    __slots__ = ("added_at", "admitted_at", "first_token_at", "queued_tick")

    def __init__(self, now: float, tick: int) -> None:
        self.added_at, self.queued_tick = now, tick
        self.admitted_at = self.first_token_at = -1.0

    def queued(self, tick: int) -> None:
        self.queued_tick = tick

    def admitted(self, now: float) -> None:
        """For the first time."""
        self.admitted_at = now

    def sampled(self, now: float) -> None:
        """A token; the first one counts."""
        if self.first_token_at < 0:
            self.first_token_at = now


class LiveRequest(Generic[S]):
    """What a generation and a text for an encoder have in common while they live in a scheduler. seq: its
    number. cached: -1 as long as it was never admitted. progress: for the message of its deadline."""

    __slots__ = ("rid", "seq", "source", "timing")
    source: S
    cached: int = -1

    def __init__(self, source: S, seq: int, timing: Timing) -> None:
        self.source, self.rid, self.seq, self.timing = source, source.rid, seq, timing

    @property
    def progress(self) -> str:
        return ""


class Request(LiveRequest[TokenizedGenerateReqInput]):
    """`seq` is its handle in plans. `arrival` counts requests.

    adapter     number of its adapter; 0: none
    guided      whether guided decoding has part in it: a constraint, a limit on reasoning, token healing or
                min_new_tokens
    ending      why it will finish, once `goal` tokens are computed; None while it generates
    limit       the most tokens it can have
    publish_to  chunks ending up to here go to the prefix cache at once
    cached      prompt tokens in the cache at the first admission; -1 before that
    healing     the end of its prompt that is sampled again, before anything else; None when that is done
    skip        so many bytes of the first output id's text are the prompt's
    seen        what the stop rule remembers of the text
    plain       whether its tokens only have to be compared with stop ids and max_new_tokens
    sent        how many output ids were sent
    states      final hidden states: of the tokens from the first on, or only of the last one computed
    prompt_only  whether it ends here with its prompt; another engine decodes
    guide       the state of constrained decoding; None without a constraint, or before that is compiled
    logprobs    None if it requests none
    drafting    the state of speculation; None without
    images      its prompt's images; None without. In `tokens` their numbers stand in place of ids
    shift       is added to its output's positions for the rotary embedding
    """

    __slots__ = (
        "adapter", "arrival", "cached", "computed", "decode_steps", "drafting", "ending", "goal", "guide",
        "guided", "healing", "hidden", "images", "jumped", "lease", "limit", "logprobs", "params", "plain",
        "preemptions", "prompt_len", "prompt_only", "publish_to", "reads_output", "reads_prompt",
        "retractions", "rule", "seen", "sent", "shift", "skip", "states", "stream", "tokens", "vocabulary",
    )  # fmt: skip

    def __init__(
        self, source: TokenizedGenerateReqInput, seq: int, vocabulary: Vocabulary, now: float, tick: int
    ) -> None:
        super().__init__(source, seq, Timing(now, tick))
        self.arrival = seq
        self.vocabulary = vocabulary
        # A request without a seed gets one here, once: retraction and recomputation then change no draw.
        self.params: SamplingParams = source.sampling_params
        if self.params.seed is None:
            self.params = msgspec.structs.replace(self.params, seed=secrets.randbits(63))
        self.rule = StopRule.of(self.params, vocabulary)
        self.stream = source.stream
        self.adapter = source.adapter
        self.hidden: Hidden = _hidden(source)
        processed = self.params.custom_logit_processor is not None
        self.reads_prompt = processed or self.params.repetition_penalty != 1.0
        self.reads_output = (
            self.reads_prompt or self.params.frequency_penalty != 0.0 or self.params.presence_penalty != 0.0
        )
        self.tokens: array[int] = array("q", source.input_ids)
        self.images: Images | None = None
        self.shift = 0
        if source.images:
            self.images = Images(source.images, source.input_ids)
            self.images.key(self.tokens)
            self.shift = self.images.shift
        self.healing: Healing | None = None
        self.skip = 0
        if source.heal:
            self.healing = Healing(source.input_ids[-source.heal :], vocabulary)
            del self.tokens[-source.heal :]
        self.prompt_len = len(self.tokens)
        self.limit = self.prompt_len + self.params.max_new_tokens
        self.computed = 0
        self.plain = self.prompt_only = False
        limited = source.require_reasoning and source.max_thinking_tokens is not None
        self.guided = bool(
            source.constraint is not None or limited or source.heal or self.params.min_new_tokens
        )
        self.publish_to = 0
        self.lease: Lease | None = None
        self.guide: Guide | None = None
        self.logprobs: Logprobs | None = None
        self.drafting: Drafting | None = None
        if source.return_logprob or source.logprob_start_len >= 0:
            self.logprobs = Logprobs(source, self.prompt_len)
        self.seen = NOTHING_SEEN
        self.ending: FinishReason | None = None
        self.goal = 0
        self.sent = 0
        self.cached = -1
        self.jumped = self.decode_steps = self.retractions = self.preemptions = 0
        self.states: list[list[float]] = []
        if not self.params.max_new_tokens:
            self.end(LENGTH, self.prompt_len)

    # -- lengths ---------------------------------------------------------------------------------------------

    @property
    def produced(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def progress(self) -> str:
        return f", {self.produced} tokens generated"

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return 0 if self.ending else self.params.max_new_tokens - self.produced

    @property
    def to_come(self) -> int:
        """Those that may still come here."""
        return min(self.remaining, 1) if self.prompt_only else self.remaining

    @property
    def until(self) -> int:
        """Tokens to compute before the next decision about this request."""
        return self.goal if self.ending else len(self.tokens)

    @property
    def most(self) -> int:
        """Slots its sequence can come to need. The last token generated is never computed."""
        return self.prompt_len + (0 if self.prompt_only else max(self.params.max_new_tokens - 1, 0))

    @property
    def matchable(self) -> int:
        """The longest cached prefix it can use: some token must be computed, and those from the token before
        the first requested log-probability and from the first requested hidden state on."""
        target = -1 if self.logprobs is None else self.logprobs.next_target
        first = target - 1 if target >= 0 else len(self.tokens)  # that must be computed
        if self.hidden == "all":
            first = min(first, len(self.states))
        return max(0, min(len(self.tokens) - 1, first))

    @property
    def ready(self) -> bool:
        """Whether it has ended and everything requested is known."""
        return self.ending is not None and self.computed >= self.goal

    def end(self, reason: FinishReason, goal: int = 0) -> None:
        """It finishes when `goal` tokens are computed and all requested scores are known."""
        self.ending = reason
        self.goal = goal
        if self.logprobs is not None and self.logprobs.next_target >= 0:
            self.goal = max(goal, self.logprobs.targets[-1])

    @property
    def intact(self) -> bool:
        """Whether its KV belongs to its tokens: no output is about to be taken back."""
        return self.guide is None or self.guide.valid_length < 0

    @property
    def waits(self) -> bool:
        """Whether it is in no plan now."""
        return self.guide is not None and self.guide.waits

    @property
    def returns_logprobs(self) -> bool:
        """Whether those of the output are wanted."""
        return self.logprobs is not None and self.logprobs.returned

    def ids(self, start: int, end: int) -> tuple[int, ...]:
        """Of its tokens from `start` to `end`, as the vocabulary has them."""
        stretch = self.tokens[start:end]
        return tuple(stretch) if self.images is None else self.images.plain(stretch)

    # -- output ----------------------------------------------------------------------------------------------

    def append(
        self,
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]] = (),
        ids: Sequence[float] = (),
        *,
        later: bool = False,
        forced: bool = False,
    ) -> None:
        """One more output token. `later`: its scores come from its own row; `forced`: not sampled."""
        if forced:
            self.jumped += 1
        if self.logprobs is not None:
            origin: TokenOrigin = "forced" if forced else "sampled"
            self.logprobs.append(len(self.tokens), logprob, top, ids, later=later, origin=origin)
        self.tokens.append(token)

    def accept(self, sample: Sample) -> FinishReason | None:
        """Append a sampled token without a constraint; why the generation ended, if it did."""
        self.decode_steps += 1
        self.append(sample.token, sample.logprob, sample.top, sample.token_ids)
        return self.stopped(sample.token)

    def stopped(self, token: int, *, grammar_done: bool = False) -> FinishReason | None:
        """Apply the stop rule to `token`, just appended."""
        rule, matched = self.rule, None
        if rule.reads_text:
            data = self.vocabulary.tokens[token]
            if self.skip and self.produced == 1:
                data = data[self.skip :]
            matched, self.seen = rule.read(self.seen, data)
        return rule.finish(token, matched, self.produced, grammar_done)

    def shorten(self, length: int) -> None:
        """Keep only the first `length` tokens, and their log-probabilities."""
        del self.tokens[length:]
        if self.logprobs is not None:
            self.logprobs.shorten(length, self.produced)

    def forgo_prompt_scores(self) -> None:
        """Another engine computes its prompt, and returns the prompt's log-probabilities."""
        if self.logprobs is not None:
            source = msgspec.structs.replace(self.source, logprob_start_len=-1)
            self.logprobs = Logprobs(source, self.prompt_len) if source.return_logprob else None

    def settle_prompt(self, token: int) -> None:
        """One more token of the prompt, whose end is sampled again."""
        self.tokens.append(token)
        self.prompt_len += 1
        self.limit += 1

    @property
    def is_plain(self) -> bool:
        return not (
            self.ending
            or self.guide
            or self.healing
            or self.rule.reads_text
            or self.logprobs
            or self.hidden != "none"
        )

    @property
    def settled(self) -> int:
        """How many computed tokens will not be computed again."""
        return self.computed - (self.returns_logprobs and self.guide is not None)

    def rewind(self) -> None:
        """The last token computed will be computed again, for its logits; see `settled`."""
        assert self.lease is not None
        self.lease.rewind()
        self.computed -= 1

    def take_up(self) -> None:
        """Count the next token as computed: the next slot holds its KV already."""
        assert self.lease is not None
        self.lease.take(1)
        self.lease.settle()
        self.computed += 1

    def hidden_of(self, end: int) -> Hidden:
        """The hidden states to request from a row that computes up to `end`."""
        return "none" if self.hidden == "last" and end < self.until else self.hidden

    def show(self, start: int, states: Sequence[Sequence[float]]) -> None:
        """Keep the hidden states of a row that computed the tokens from `start` on."""
        if not states:
            return
        if self.hidden == "last":
            self.states = [list(states[-1])]
        else:  # those computed a second time are known
            self.states += map(list, states[len(self.states) - start :])

    def piece(self) -> TokenOutput | None:
        """output() of a `plain` request that streams and continues: the usual case, written out."""
        tokens, sent = self.tokens, self.sent
        end = len(tokens) - self.prompt_len
        new = end - sent
        if new < self.params.stream_interval and (sent or not new):
            return None
        self.sent, timing = end, self.timing
        return TokenOutput(
            rid=self.rid,
            new_ids=[tokens[-1]] if new == 1 else tokens[-new:].tolist(),
            prompt_tokens=len(self.source.input_ids),
            completion_tokens=end,
            cached_tokens=self.cached,
            jumped_tokens=self.jumped,
            decode_steps=self.decode_steps,
            retractions=self.retractions,
            queue_s=timing.admitted_at - timing.added_at,
            first_token_s=timing.first_token_at - timing.added_at,
            http_worker_ipc=self.source.http_worker_ipc,
        )

    def output(self, now: float, finish: FinishReason | None = None) -> TokenOutput | None:
        """The output since the last call; None if there is nothing new. Output ids whose requested
        log-probability is still to come are held back, and those that may be taken back. All the rest comes
        with `finish`; FinishReason.matched tells which end of the text is cut off."""
        end, guide, logprobs, timing = self.produced, self.guide, self.logprobs, self.timing
        if finish is None:
            if not self.stream or self.ending is not None or (guide is not None and guide.interrupted):
                return None
            if logprobs is not None and logprobs.targets and logprobs.returned:
                target = logprobs.next_target
                end = end if target < 0 else min(end, max(0, target - self.prompt_len))
            if guide is not None:
                end = min(end, guide.sure(len(self.tokens)) - self.prompt_len)
            if end <= self.sent or (self.sent and end - self.sent < self.params.stream_interval):
                return None  # the first output comes at once, the others every stream_interval tokens
        start, self.sent = self.sent, end
        whole = finish is not None and finish.type != "abort"
        output = TokenOutput(
            rid=self.rid,
            new_ids=self.tokens[self.prompt_len + start : self.prompt_len + end].tolist(),
            finish=finish,
            prompt_tokens=len(self.source.input_ids),
            completion_tokens=end,
            cached_tokens=max(self.cached, 0),
            jumped_tokens=self.jumped,
            decode_steps=self.decode_steps,
            hidden_states=self.states if whole and self.hidden != "none" else None,
            retractions=self.retractions,
            queue_s=(timing.admitted_at if timing.admitted_at >= 0 else now) - timing.added_at,
            first_token_s=(timing.first_token_at if timing.first_token_at >= 0 else now) - timing.added_at,
            http_worker_ipc=self.source.http_worker_ipc,
            grammar=guide.info() if guide is not None and (finish is not None or start == 0) else None,
            healed=self.skip if start == 0 else 0,
            spec=None if finish is None or self.drafting is None else self.drafting.figures(),
        )
        if logprobs is not None:
            output.output_logprobs = logprobs.output_scores[start:end]
            output.output_top_logprobs = logprobs.output_top[start:end]
            output.output_token_ids_logprobs = logprobs.output_ids[start:end]
            output.output_origins = logprobs.origins[start:end]
            # Once: with the first output of a stream, which waits for them, or with the whole answer.
            if start == 0 and (whole or finish is None) and logprobs.start >= 0:
                output.input_logprobs = logprobs.input_scores
                output.input_top_logprobs = logprobs.input_top if logprobs.top else None
                output.input_token_ids_logprobs = logprobs.input_ids if logprobs.ids else None
        return output


def _hidden(source: TokenizedGenerateReqInput) -> Hidden:
    if source.return_hidden_states is True:
        return "all"
    return "last" if source.embedding or source.return_hidden_states == "last" else "none"


def failure(fault: RuntimeFault) -> FinishReason:
    """The finish reason that carries an error to the user."""
    return FinishReason(type="abort", error=fault.to_dict())


def defect(what: str, error: BaseException) -> InternalFault:
    """The fault of a request that met a defect of the engine."""
    return InternalFault(f"{what}: {type(error).__name__}: {error}", hint="the engine goes on; see its log")
