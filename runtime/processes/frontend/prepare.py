"""SingleGenerateReq -> TokenizedGenerateReqInput: templates, tokens, and all checks that need the model.

Knows the tokenizer, the template and the limits, and neither threads nor mailboxes.
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
from runtime.processes.frontend.choices import Option, scoring_requests
from runtime.processes.frontend.client import CLIENT
from runtime.processes.frontend.prompt import Limits, Prompt, PromptReader, is_default_length
from runtime.protocol.control import no_adapters
from runtime.protocol.errors import BadRequest
from runtime.protocol.io_struct import (
    Bootstrap,
    EmbeddingReqInput,
    GenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from runtime.protocol.messages import ImageInput
from runtime.protocol.requests.generate import SingleGenerateReq, resolve
from runtime.protocol.sampling import MAX_STOPS, SamplingParams

COUNTED = 1 << 20
"""Characters of a text whose tokens are counted even if no prompt can be as long."""
_TAIL = 64
"""Ids at a prompt's end that may hold a mark of the reasoning and blanks after it."""
RID_END = "\x1f"
"""Between a request's own id and the part that makes it unique in the engine; no id of a user has it."""


@dataclass(frozen=True, slots=True)
class Job:
    """The scheduler's requests for one request of a user: one, or for choices one or two per option; or the
    text to embed. deadline: by the Preparer's clock. reasoning_begun: whether a conversation's prompt begins
    the model's reasoning (True) or ends it (False); None: neither. shares_prompt: it is another sample of a
    prompt."""

    requests: tuple[TokenizedGenerateReqInput, ...]
    options: tuple[Option, ...] = ()
    text: TokenizedEmbeddingReqInput | None = None
    deadline: float | None = None
    reasoning_begun: bool | None = None
    shares_prompt: bool = False

    @property
    def parts(self) -> Sequence[TokenizedGenerateReqInput | TokenizedEmbeddingReqInput]:
        return self.requests if self.text is None else (self.text,)

    @property
    def prompt_tokens(self) -> int:
        """The tokens to account for: those of a prompt's first sample."""
        return 0 if self.shares_prompt else sum(len(one.input_ids) for one in self.parts)


class Preparer:
    """Thread safe; holds no state of requests. marks: of the model's reasoning; thinks: whether a chat
    template with these variables leaves reasoning on without a mark in its text; reading: options of
    PromptReader."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TextTemplate | None,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        *,
        marks: ReasoningMarks | None = None,
        thinks: Callable[[Mapping[str, Any]], bool] = lambda variables: False,
        **reading: Any,
    ) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self.marks, self._thinks = marks, thinks
        self._clock = clock
        self._prompts = PromptReader(tokenizer, template, limits, **reading)
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
        deadline = self.deadline(request.timeout_s)
        if request.choices is not None:
            requests, options = scoring_requests(
                request, prompt, self._prompts, self.tokenizer, self.limits, self.wire_rid
            )
            return Job(requests, options, deadline=deadline)
        reasons = self._reasons(request, ids)
        begun: bool | None = None
        if self.marks is not None and request.messages is not None:
            opened, closed = self._left_open(self.marks, ids)
            begun = opened if opened or closed else None
        ids, params = self.limits.fitting(ids, params)
        if request.return_logprob and not params.max_new_tokens and request.logprob_start_len < 0:
            # sglang's frontend asks for the prompt's log-probabilities so.
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
                    heal=self._token_healing(request, prompt, ids, params),
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

    def _token_healing(
        self, request: SingleGenerateReq, prompt: Prompt, ids: list[int], params: SamplingParams
    ) -> int:
        """Number of the prompt's last ids that the model may choose anew."""
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
        first = prompt.images[-1].first + prompt.images[-1].length if prompt.images else 1
        count = min(self._jumps.open_end(ids), len(ids) - first)
        if request.messages and count:  # text of the template is not chosen anew
            content = request.messages[-1].content
            size = sum(len(self.tokenizer.vocabulary.tokens[token]) for token in ids[len(ids) - count :])
            if not isinstance(content, str) or not prompt.text.endswith(content) or len(content) < size:
                return 0
        return count

    def prompt_ids(self, request: GenerateReqInput) -> list[int]:
        """The prompt alone, of up to COUNTED characters whatever the limit. Raises BadRequest or a kind of
        it."""
        return list(self._prompts.read(resolve(request), at_least=COUNTED).ids)

    def deadline(self, timeout_s: float | None) -> float | None:
        """Raises BadRequest for a timeout that is no positive number of seconds."""
        if timeout_s is None:
            return None
        if not 0 < timeout_s < float("inf"):
            raise BadRequest(f"must be a positive number of seconds, got {timeout_s}", where="timeout_s")
        return self._clock() + timeout_s

    def again(self, job: Job, request: SingleGenerateReq) -> Job:
        """The job of another sample of a prompt: `request` differs from that of `job` only in its id, its
        seed and its bootstrap_room."""
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
        """The server that computes the prompt; None: it is computed here. Choices always are."""
        host, number = request.bootstrap_host, request.bootstrap_room
        if host is None or number is None:
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
        return Bootstrap(host, request.bootstrap_port or usual, number)

    def _reasons(self, request: SingleGenerateReq, ids: Sequence[int]) -> bool:
        """Whether the output begins with reasoning. Raises BadRequest for a request that contradicts itself,
        its prompt or the model."""
        required, budget, marks = request.require_reasoning, request.max_thinking_tokens, self.marks
        if budget is not None:
            if budget < 0:
                raise BadRequest(f"must be 0 or more, got {budget}", where="max_thinking_tokens")
            if required is False:
                raise BadRequest("needs require_reasoning", where="max_thinking_tokens")
        if marks is None:
            if required or budget is not None:
                raise BadRequest(
                    "it is not known how this model ends its reasoning",
                    where="require_reasoning" if required else "max_thinking_tokens",
                    hint="start the engine with reasoning_end=, the text that ends it",
                )
            return False
        if required is False or (required is None and request.constraint is None and budget is None):
            return False  # nothing depends on it
        for name in SWITCHES:
            if required and (request.template_kwargs or {}).get(name) is False:
                raise BadRequest(f"is requested, but {name} disables it", where="require_reasoning")
        opened, closed = self._left_open(marks, ids)
        if closed and required:
            raise BadRequest(
                "the prompt already ends the reasoning",
                where="require_reasoning",
                hint="the chat template's variables may have disabled it",
            )
        if opened or closed or required:
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
        """Its session_params for the scheduler, with the caller's id of the turn and whether its output may
        be as long as the limits allow: how long that is, only the scheduler knows."""
        params = request.session_params
        if params is None:
            return None
        for name in ("turn", "clip", "owner"):
            if name in params:
                raise BadRequest("unknown field", where=f"session_params.{name}")
        unlimited = self.limits.auto_truncate or is_default_length(request.sampling_params.max_new_tokens)
        return {**params, "turn": request.rid, "clip": unlimited, "owner": CLIENT.get().owner}

    def _textless(self, ids: Sequence[int]) -> bool:
        """Whether the prompt is control tokens only."""
        bytes_of = self.tokenizer.text_table.bytes_of
        return not any(any(bytes_of(ids[at : at + _TAIL], True)) for at in range(0, len(ids), _TAIL))

    def wire_rid(self, request: SingleGenerateReq | EmbeddingReqInput) -> str:
        """The id in the engine. It is never used twice, so that the last delta of a cancelled request is not
        taken for one of a later request with the same id."""
        return f"{request.rid}{RID_END}{request.http_worker_ipc or ''}.{next(self._count)}"

    # -- how to generate -------------------------------------------------------------------------------------

    def _sampling(self, params: SamplingParams, stop_str: Sequence[str]) -> SamplingParams:
        vocab = self.limits.vocab_size
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token in ids:
                if token >= vocab:
                    field = f"sampling_params.{name}"
                    raise BadRequest(f"{token} is beyond the vocabulary of {vocab}", where=field)
        return self._with_template_stops(params, stop_str) if stop_str else params

    def _with_template_stops(self, params: SamplingParams, stop_str: Sequence[str]) -> SamplingParams:
        """Stop also at the template's end of a turn, as an id if it is one token."""
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
        tokens = request.token_ids_logprob or ()
        if len(tokens) > self.limits.token_ids_logprob:
            raise BadRequest(
                f"names {len(tokens)} ids; at most {self.limits.token_ids_logprob}",
                where="token_ids_logprob",
                hint="start the engine with a larger max_token_ids_logprob",
            )
        for token in tokens:
            if not 0 <= token < self.limits.vocab_size:
                raise BadRequest(
                    f"{token} is not in the vocabulary of {self.limits.vocab_size}", where="token_ids_logprob"
                )


def _ends_with(ids: Sequence[int], end: Sequence[int]) -> bool:
    return len(ids) >= len(end) and tuple(ids[-len(end) :]) == tuple(end)
