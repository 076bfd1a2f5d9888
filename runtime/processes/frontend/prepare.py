"""SingleGenerateReq -> TokenizedGenerateReqInput: templates, tokens, and all checks that need the model.

Pure: it knows the tokenizer, the template and the limits, and neither threads nor mailboxes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.formats.chat.render import TextTemplate
from runtime.formats.chat.template import ChatTemplate
from runtime.formats.reasoning.marks import SWITCHES, ReasoningMarks
from runtime.grammar.jump_plan import JumpPlanner
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.client import CLIENT
from runtime.processes.frontend.images.pictures import PictureReader
from runtime.processes.frontend.limits import Limits
from runtime.processes.frontend.prompt import Prompt, PromptReader
from runtime.protocol.adapters import no_adapters
from runtime.protocol.errors import BadRequest
from runtime.protocol.io_struct import Bootstrap, GenerateReqInput, TokenizedGenerateReqInput
from runtime.protocol.messages import ImageInput
from runtime.protocol.requests.single import SingleGenerateReq, resolve
from runtime.protocol.sampling import MAX_STOPS, ROOM, SamplingParams

SCORING = SamplingParams(max_new_tokens=0)
COUNTED = 1 << 20
"""Characters of a text whose tokens are counted even where no prompt can be as long."""
_TAIL = 64
"""Ids at a prompt's end that may hold a mark of the reasoning and blanks after it."""
RID_END = "\x1f"
"""Between a request's own id and what makes it unique behind the frontend; no id of a user has it."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a choice. ids: its tokens after the boundary. scored: index of its request in the job.
    alone: index of its request without the prompt."""

    text: str
    ids: tuple[int, ...]
    scored: int
    alone: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """The scheduler's requests for one request of a user: one, or for choices one or two per option.
    deadline: when it must be over, by the clock of the Preparer. reasoning_begun: whether a conversation's
    prompt begins the model's reasoning (True) or ends it (False); None: neither. shares_prompt: it is another
    sample of a prompt."""

    requests: tuple[TokenizedGenerateReqInput, ...]
    options: tuple[Option, ...] = ()
    deadline: float | None = None
    reasoning_begun: bool | None = None
    shares_prompt: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Those that are counted for it: of several samples the first one's."""
        return 0 if self.shares_prompt else sum(len(one.input_ids) for one in self.requests)


class Preparer:
    """Thread safe; holds no state of requests. The arguments after `clock` are those of PromptReader, and
    marks: how the model marks its reasoning; thinks: whether a chat template with these variables leaves
    it on where its text does not show it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TextTemplate | None,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        *,
        allow_control_tokens: bool = False,
        pictures: PictureReader | None = None,
        completion_template: str | None = None,
        marks: ReasoningMarks | None = None,
        thinks: Callable[[Mapping[str, Any]], bool] = lambda variables: False,
    ) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self.marks, self._thinks = marks, thinks
        self._clock = clock
        self._prompts = PromptReader(
            tokenizer,
            template,
            limits.vocab_size,
            limit=limits.prompt,
            auto_truncate=limits.auto_truncate,
            allow_control_tokens=allow_control_tokens,
            pictures=pictures,
            completion_template=completion_template,
        )
        self._jumps = JumpPlanner(tokenizer.vocabulary, tokenizer.encode_plain)
        self._count = itertools.count()

    def prepare(self, source: GenerateReqInput) -> Job:
        """Raises BadRequest or a kind of it, with the field in `where`."""
        request = source if isinstance(source, SingleGenerateReq) else resolve(source)
        prompt = self._prompts.read(request)
        ids = prompt.ids
        params = self._sampling(request.sampling_params, prompt.stop_str)
        if request.truncate_prompt_tokens is not None:
            ids = self.limits.truncated(request, ids, params.max_new_tokens)
        constraint = request.constraint
        if constraint is not None:
            constraint.verify()
        if request.lora_path is not None and not self.limits.adapters:
            raise no_adapters("lora_path")
        if not request.rid:
            raise BadRequest("is empty", where="rid")
        if RID_END in request.rid:
            raise BadRequest(f"must not contain {RID_END!r}", where="rid")
        if request.timeout_s is not None and not 0 < request.timeout_s < float("inf"):
            raise BadRequest(
                f"must be a positive number of seconds, got {request.timeout_s}", where="timeout_s"
            )
        deadline = None if request.timeout_s is None else self._clock() + request.timeout_s
        if request.choices is not None:
            return self._choices(request, request.choices, prompt, deadline)
        reasons = self._reasons(request, ids)
        begun: bool | None = None
        if self.marks is not None and request.messages is not None:
            opened, closed = self._left_open(self.marks, ids)
            begun = opened if opened or closed else None
        ids, params = self.limits.fitting(ids, params)
        if request.return_logprob and not params.max_new_tokens and request.logprob_start_len < 0:
            # There is nothing else that could be meant: sglang's frontend asks so.
            request = msgspec.structs.replace(request, logprob_start_len=0)
        self._check_logprobs(request, len(ids))
        return Job(
            (
                TokenizedGenerateReqInput(
                    rid=self.wire_rid(request),
                    http_worker_ipc=request.http_worker_ipc,
                    input_ids=ids,
                    sampling_params=params,
                    constraint=constraint,
                    return_logprob=request.return_logprob,
                    logprob_start_len=request.logprob_start_len,
                    top_logprobs_num=request.top_logprobs_num,
                    token_ids_logprob=request.token_ids_logprob,
                    return_hidden_states=request.return_hidden_states,
                    session_params=self._turn(request),
                    require_reasoning=reasons,
                    max_thinking_tokens=request.max_thinking_tokens if reasons else None,
                    stream=request.stream,
                    jump_forward=request.jump_forward,
                    heal=self._heal(request, prompt, ids, params),
                    priority=request.priority,
                    extra_key=request.extra_key,
                    at_start=constraint is None and self._textless(ids),
                    bootstrap=self._bootstrap(request, prompt.images),
                    lora_path=request.lora_path,
                    images=prompt.images,
                ),
            ),
            deadline=deadline,
            reasoning_begun=begun,
        )

    def _heal(
        self, request: SingleGenerateReq, prompt: Prompt, ids: list[int], params: SamplingParams
    ) -> int:
        """How many of the prompt's last ids the model may choose anew."""
        if (
            not request.token_healing
            or prompt.text is None
            or request.suffix is not None
            or request.session_params is not None
            or request.logprob_start_len >= 0
            or request.return_hidden_states
            or request.require_reasoning
            or not params.max_new_tokens
            or ids != prompt.ids
        ):
            return 0
        behind = prompt.images[-1].first + prompt.images[-1].length if prompt.images else 1
        count = min(self._jumps.open_end(ids), len(ids) - behind)
        if request.messages and count:  # what the template wrote is whole as it is
            content = request.messages[-1].content
            size = sum(len(self.tokenizer.vocabulary.tokens[token]) for token in ids[len(ids) - count :])
            if not isinstance(content, str) or not prompt.text.endswith(content) or len(content) < size:
                return 0
        return count

    def prompt_ids(self, request: GenerateReqInput) -> list[int]:
        """The prompt alone, of up to COUNTED characters whatever the limit. Raises BadRequest or a kind of
        it."""
        return list(self._prompts.read(resolve(request), at_least=COUNTED).ids)

    def again(self, job: Job, request: SingleGenerateReq) -> Job:
        """The job of another sample of a prompt: `request` differs from the one of `job` only in its id, its
        seed and its room."""
        (first,) = job.requests
        params = msgspec.structs.replace(first.sampling_params, seed=request.sampling_params.seed)
        rid, turn = self.wire_rid(request), self._turn(request)
        sample = msgspec.structs.replace(
            first,
            rid=rid,
            sampling_params=params,
            session_params=turn,
            bootstrap=self._bootstrap(request, first.images),
        )
        return Job((sample,), deadline=job.deadline, reasoning_begun=job.reasoning_begun, shares_prompt=True)

    def _bootstrap(self, request: SingleGenerateReq, images: Sequence[ImageInput]) -> Bootstrap | None:
        """Where its prompt is computed; None: here. A choice is scored by each engine itself."""
        host, room = request.bootstrap_host, request.bootstrap_room
        if host is None or room is None:
            return None
        usual = self.limits.bootstrap_port
        if usual is None:
            raise BadRequest(
                "this engine computes both prompts and outputs",
                where="bootstrap_room",
                hint="start it with --disaggregation-mode prefill or decode",
            )
        if images:
            raise BadRequest(
                "a prompt with images must be computed by the engine that generates",
                where="bootstrap_room",
                hint="send it without bootstrap_host and bootstrap_room",
            )
        if request.session_params is not None:
            raise BadRequest("the turns of a session must be computed by one engine", where="session_params")
        if request.return_hidden_states:
            raise BadRequest(
                "prompt and output are computed by two engines, each of which has only part of the states",
                where="return_hidden_states",
            )
        return Bootstrap(host, request.bootstrap_port or usual, room)

    def _reasons(self, request: SingleGenerateReq, ids: Sequence[int]) -> bool:
        """Whether the output begins with reasoning. Raises BadRequest where the request contradicts itself,
        its prompt or the model."""
        asked, budget, marks = request.require_reasoning, request.max_thinking_tokens, self.marks
        if budget is not None:
            if budget < 0:
                raise BadRequest(f"must be 0 or more, got {budget}", where="max_thinking_tokens")
            if asked is False:
                raise BadRequest("needs require_reasoning", where="max_thinking_tokens")
        if marks is None:
            if asked or budget is not None:
                raise BadRequest(
                    "it is not known how this model ends its reasoning",
                    where="require_reasoning" if asked else "max_thinking_tokens",
                    hint="start the engine with reasoning_end=, the text that ends it",
                )
            return False
        if asked is False or (asked is None and request.constraint is None and budget is None):
            return False  # it was not asked for, and nothing depends on it
        for name in SWITCHES:
            if asked and (request.template_kwargs or {}).get(name) is False:
                raise BadRequest(f"is requested, but {name} disables it", where="require_reasoning")
        opened, closed = self._left_open(marks, ids)
        if closed and asked:
            raise BadRequest(
                "the prompt already ends the reasoning",
                where="require_reasoning",
                hint="the chat template's variables may have disabled it",
            )
        if opened or closed or asked:
            return not closed
        return request.messages is not None and self._thinks(request.template_kwargs or {})

    def _left_open(self, marks: ReasoningMarks, ids: Sequence[int]) -> tuple[bool, bool]:
        """Whether the prompt's end opens the reasoning, or closes it."""
        tail = list(ids[-_TAIL:])
        texts = self.tokenizer.text_table.bytes_of(tail, False)
        if not marks.close_ids:
            text = b"".join(texts).decode("utf-8", "replace")
            return marks.opened_by(text), marks.closed_by(text)
        while tail and not texts[len(tail) - 1].strip():
            del tail[-1]
        opens, closes = marks.open_ids, marks.close_ids
        return bool(opens) and _ends_with(tail, opens), _ends_with(tail, closes)

    def _turn(self, request: SingleGenerateReq) -> dict[str, Any] | None:
        """Its session_params, with what the scheduler must know besides: the caller's id of the turn, and
        whether its output may be as long as there is room, which is known there only."""
        params = request.session_params
        if params is None:
            return None
        for name in ("turn", "clip", "owner"):
            if name in params:
                raise BadRequest("unknown field", where=f"session_params.{name}")
        wanted = request.sampling_params.max_new_tokens
        room = self.limits.auto_truncate or wanted in (SamplingParams().max_new_tokens, ROOM)
        return {**params, "turn": request.rid, "clip": room, "owner": CLIENT.get().owner}

    def _textless(self, ids: Sequence[int]) -> bool:
        """Whether the prompt is control tokens only."""
        bytes_of = self.tokenizer.text_table.bytes_of
        return not any(any(bytes_of(ids[at : at + _TAIL], True)) for at in range(0, len(ids), _TAIL))

    def wire_rid(self, request: SingleGenerateReq) -> str:
        """The id in the engine: never used twice, so that the last delta of a cancelled request cannot
        be taken for those of a later one with the same id."""
        return f"{request.rid}{RID_END}{request.http_worker_ipc or ''}.{next(self._count)}"

    # -- how to generate -------------------------------------------------------------------------------------

    def _sampling(self, params: SamplingParams, stop_str: Sequence[str]) -> SamplingParams:
        vocab = self.limits.vocab_size
        for token in params.stop_token_ids:
            if token >= vocab:
                raise BadRequest(
                    f"{token} is beyond the vocabulary of {vocab}", where="sampling_params.stop_token_ids"
                )
        for token in params.logit_bias:
            if token >= vocab:
                raise BadRequest(
                    f"{token} is beyond the vocabulary of {vocab}", where="sampling_params.logit_bias"
                )
        return self._with_template_stops(params, stop_str) if stop_str else params

    def _with_template_stops(self, params: SamplingParams, stop_str: Sequence[str]) -> SamplingParams:
        """A turn ends where its template says; as an id where the tokenizer knows the mark as one token."""
        stop, stop_ids = list(params.stop), list(params.stop_token_ids)
        for text in stop_str:
            token = self.tokenizer.added_id(text)
            if token is not None:
                stop_ids.append(token)
            elif text not in stop and len(stop) < MAX_STOPS:
                stop.append(text)
        return msgspec.structs.replace(
            params, stop=tuple(stop), stop_token_ids=tuple(dict.fromkeys(stop_ids))
        )

    def _check_logprobs(self, request: SingleGenerateReq, length: int) -> None:
        begins_here = request.session_params is None  # else only the scheduler knows the whole prompt
        if request.logprob_start_len < -1 or (begins_here and request.logprob_start_len > length):
            raise BadRequest(
                f"must be -1 (none) or from 0 to the prompt's {length}, got {request.logprob_start_len}",
                where="logprob_start_len",
            )
        most = min(self.limits.vocab_size, self.limits.top_logprobs)
        if not 0 <= request.top_logprobs_num <= most:
            raise BadRequest(
                f"must be from 0 to {most}, got {request.top_logprobs_num}",
                where="top_logprobs_num",
                hint="start the engine with a larger max_top_logprobs"
                if request.top_logprobs_num > 0
                else None,
            )
        wanted = request.token_ids_logprob or ()
        if len(wanted) > self.limits.token_ids_logprob:
            raise BadRequest(
                f"names {len(wanted)} ids; at most {self.limits.token_ids_logprob}",
                where="token_ids_logprob",
                hint="start the engine with a larger max_token_ids_logprob",
            )
        for token in wanted:
            if not 0 <= token < self.limits.vocab_size:
                raise BadRequest(
                    f"{token} is not in the vocabulary of {self.limits.vocab_size}",
                    where="token_ids_logprob",
                )

    # -- choices ---------------------------------------------------------------------------------------------

    def _choices(
        self,
        request: SingleGenerateReq,
        options: Sequence[str],
        prompt: Prompt,
        deadline: float | None,
    ) -> Job:
        if not options:
            raise BadRequest("is empty; there must be at least one option", where="choices")
        if request.constraint is not None:
            raise BadRequest("choices cannot be combined with a constraint", where="constraint")
        if request.session_params is not None:
            raise BadRequest(
                "choices are scored, so they cannot be a turn of a session", where="session_params"
            )
        for name in ("require_reasoning", "max_thinking_tokens"):
            if getattr(request, name) not in (None, False):
                raise BadRequest("choices are scored: there is no reasoning before them", where=name)
        for index, option in enumerate(options):
            if not option:
                raise BadRequest("is empty", where=f"choices[{index}]")
            self._prompts.check_text(len(option), f"choices[{index}]")
        wholes, boundary = self._boundary(request, prompt, options)
        start = self.tokenizer.start
        requests: list[TokenizedGenerateReqInput] = []

        def scoring(input_ids: list[int], first: int, images: Sequence[ImageInput] = ()) -> int:
            index = len(requests)
            if index:  # pixels are sent with the first request alone
                images = [msgspec.structs.replace(one, pixels=b"") for one in images]
            requests.append(
                TokenizedGenerateReqInput(
                    rid=self.wire_rid(request),
                    http_worker_ipc=request.http_worker_ipc,
                    input_ids=input_ids,
                    sampling_params=SCORING,
                    return_logprob=True,
                    logprob_start_len=first,
                    priority=request.priority,
                    extra_key=request.extra_key,
                    lora_path=request.lora_path,
                    images=tuple(images),
                )
            )
            return index

        scored_options: list[Option] = []
        for index, (option, whole) in enumerate(zip(options, wholes, strict=True)):
            self.limits.check_length(len(whole), 0, f"choices[{index}]")
            own = tuple(whole[boundary:])
            if not own:
                raise BadRequest("adds no token to the prompt", where=f"choices[{index}]")
            scored = scoring(whole, boundary, prompt.images)
            alone = scoring([*start, *own], len(start)) if request.unconditional else None
            scored_options.append(Option(option, own, scored, alone))
        return Job(tuple(requests), tuple(scored_options), deadline)

    def _boundary(
        self, request: SingleGenerateReq, prompt: Prompt, options: Sequence[str]
    ) -> tuple[list[list[int]], int]:
        """Each option's ids with the prompt, and how many of them are the prompt's own whatever follows.

        Tokens of the prompt's end that merge with some option's beginning are scored with every option, so
        that all options are compared over the same text. At least one token stands before the boundary.
        """
        text, ids, images = prompt.text, prompt.ids, prompt.images
        if text is None:
            wholes = [[*ids, *self.tokenizer.encode_plain(option)] for option in options]
        else:
            wholes = [self._prompts.encode_with(request, text, option, images) for option in options]
        boundary = min([len(ids), *(_common(ids, whole) for whole in wholes)])
        if boundary == 0:
            start = self.tokenizer.start
            if not start:
                raise BadRequest(
                    "the first token of the options has no token before it, and this tokenizer has neither a "
                    "begin-of-text nor an end-of-text token to start from",
                    where="choices",
                    hint="put some text before the choice",
                )
            return [[*start, *whole] for whole in wholes], len(start)
        return wholes, boundary


def _ends_with(ids: Sequence[int], end: Sequence[int]) -> bool:
    return len(ids) >= len(end) and tuple(ids[-len(end) :]) == tuple(end)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
