"""GenerateReqInput -> TokenizedGenerateReqInput: all that can be wrong with a request is found and said here.

Pure: it knows the tokenizer, the template and the limits, and neither threads nor mailboxes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.formats.chat.control import ControlTokens
from runtime.formats.chat.render import TextTemplate, render_prompt
from runtime.formats.chat.template import ChatTemplate
from runtime.processes.tokenizer import Tokenizer
from runtime.protocol.errors import BadConstraint, BadRequest, PromptTooLong
from runtime.protocol.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from runtime.protocol.messages import RAW_ROLE
from runtime.protocol.sampling import MAX_STOPS, SamplingParams

SCORING = SamplingParams(max_new_tokens=0)


@dataclass(frozen=True, slots=True)
class Limits:
    """context: tokens of one request, prompt and output together. slots: size of the KV pool."""

    vocab_size: int
    context: int
    slots: int

    @property
    def prompt(self) -> int:
        return min(self.context, self.slots)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a choice as tokens: `ids` after the boundary; `scored`: index of its request in the job,
    `alone`: of the one without the prompt."""

    text: str
    ids: tuple[int, ...]
    scored: int
    alone: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What one GenerateReqInput becomes: one request, or for choices one or two per option, and what for."""

    requests: tuple[TokenizedGenerateReqInput, ...]
    options: tuple[Option, ...] = ()


class Preparer:
    """Thread safe; holds no state of requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TextTemplate | None,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer, self._template, self._limits, self._clock = tokenizer, template, limits, clock
        self._control = ControlTokens(tokenizer.control_texts)
        self._count = itertools.count()

    def prepare(self, request: GenerateReqInput) -> Job:
        """Raises BadRequest or a kind of it, with the field in `where`."""
        ids_given = request.input_ids
        request = _typed(msgspec.structs.replace(request, input_ids=None))
        text, ids = self._prompt(request, ids_given)
        params = self._sampling(request.sampling_params, turns=_has_turns(request))
        constraint = request.constraint
        if constraint is not None:
            constraint.verify()
        if not request.rid:
            raise BadRequest("is empty", where="rid")
        if request.timeout_s is not None and not 0 < request.timeout_s < float("inf"):
            raise BadRequest(
                f"must be a positive number of seconds, got {request.timeout_s}", where="timeout_s"
            )
        deadline = None if request.timeout_s is None else self._clock() + request.timeout_s
        if request.choices is not None:
            return self._choices(request, request.choices, text, ids, deadline)
        params = self._fitting(params, len(ids))
        self._check_logprobs(request, len(ids))
        return Job(
            (
                TokenizedGenerateReqInput(
                    rid=self._wire_rid(request),
                    http_worker_ipc=request.http_worker_ipc,
                    input_ids=ids,
                    sampling_params=params,
                    constraint=constraint,
                    return_logprob=request.return_logprob,
                    logprob_start_len=request.logprob_start_len,
                    top_logprobs_num=request.top_logprobs_num,
                    stream=request.stream,
                    jump_forward=request.jump_forward,
                    priority=request.priority,
                    extra_key=request.extra_key,
                    deadline=deadline,
                    at_start=constraint is None and self._textless(ids),
                ),
            )
        )

    # -- the prompt ------------------------------------------------------------------------------------------

    def _prompt(self, request: GenerateReqInput, ids_given: Any) -> tuple[str | None, list[int]]:
        """The prompt's text, where it was given as text or messages, and its ids."""
        values = {"text": request.text, "input_ids": ids_given, "messages": request.messages}
        given = [name for name, value in values.items() if value is not None]
        if len(given) != 1:
            raise BadRequest(
                "exactly one of text, input_ids and messages is the prompt, got "
                + (" and ".join(given) or "none"),
                where="prompt",
            )
        if request.messages is None and (request.tools or request.template_kwargs):
            raise BadRequest(f"goes with messages, not with {given[0]}", where="tools / template_kwargs")
        if ids_given is not None:
            return None, self._check_ids(ids_given)
        text = request.text or ""
        if request.messages is not None:
            if not request.messages:
                raise BadRequest("is empty", where="messages")
            messages = request.messages
            if not request.allow_control_tokens:
                messages = [self._control.hide(message) for message in messages]
            text = render_prompt(
                messages, self._template, tools=request.tools, template_kwargs=request.template_kwargs
            )
        ids = self._encode(request, text)
        if not ids and request.choices is None:
            raise BadRequest(
                "the prompt is empty, and this tokenizer has no begin-of-text token to start from",
                where=given[0],
            )
        return text, ids

    def _encode(self, request: GenerateReqInput, text: str) -> list[int]:
        """Ids of a prompt's text; what the user's messages say is never read as control tokens."""
        if request.messages is None or request.allow_control_tokens:
            return self._tokenizer.encode(text)
        return self._tokenizer.encode_spans((span.text, span.plain) for span in self._control.spans(text))

    def _check_ids(self, ids: Any) -> list[int]:
        vocab = self._limits.vocab_size
        if not isinstance(ids, (list, tuple)):
            raise BadRequest(f"must be a list of token ids, got {type(ids).__name__}", where="input_ids")
        if not ids:
            raise BadRequest("the prompt is empty", where="input_ids")
        for index, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab:
                raise BadRequest(
                    f"must be a token id from 0 to {vocab - 1}, got {token!r}", where=f"input_ids[{index}]"
                )
        return list(ids)

    def _fitting(self, params: SamplingParams, length: int) -> SamplingParams:
        """The output ends where the room ends (finish reason "length"), if not before."""
        wanted = params.max_new_tokens
        self._check_length(length, min(wanted, 1), "prompt")
        room = min(wanted, self._limits.prompt - length)
        if room == wanted:
            return params
        return msgspec.structs.replace(
            params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room)
        )

    def _check_length(self, length: int, new_tokens: int, what: str) -> None:
        limits = self._limits
        if length + new_tokens <= limits.prompt:
            return
        by_context = limits.context <= limits.slots
        name = "context length" if by_context else "KV pool"
        more = " and a new token" if new_tokens else ""
        raise PromptTooLong(
            f"the {what} has {length} tokens; the {name} is {limits.prompt} and must hold them{more}",
            where=what,
            hint="shorten it" if by_context else "shorten it, or start the engine with more max_total_tokens",
        )

    def _textless(self, ids: Sequence[int]) -> bool:
        return not any(self._tokenizer.text_table.bytes_of(ids, skip_special_tokens=True))

    def _wire_rid(self, request: GenerateReqInput) -> str:
        """The id behind the front door: never used twice, so that the last news of a cancelled request cannot
        be taken for those of a later one with the same id."""
        return f"{request.rid}/{next(self._count)}"

    # -- how to generate -------------------------------------------------------------------------------------

    def _sampling(self, params: SamplingParams, turns: bool) -> SamplingParams:
        params.verify()
        vocab = self._limits.vocab_size
        for token in params.stop_token_ids:
            if token >= vocab:
                raise BadRequest(
                    f"{token} is beyond the vocabulary of {vocab}", where="sampling_params.stop_token_ids"
                )
        return self._with_template_stops(params) if turns else params

    def _with_template_stops(self, params: SamplingParams) -> SamplingParams:
        """A turn ends where its template says; as an id where the tokenizer knows the mark as one token."""
        if not isinstance(self._template, ChatTemplate):
            return params
        stop, stop_ids = list(params.stop), list(params.stop_token_ids)
        for text in self._template.stop_str:
            token = self._tokenizer.added_id(text)
            if token is not None:
                stop_ids.append(token)
            elif text not in stop and len(stop) < MAX_STOPS:
                stop.append(text)
        return msgspec.structs.replace(
            params, stop=tuple(stop), stop_token_ids=tuple(dict.fromkeys(stop_ids))
        )

    def _check_logprobs(self, request: GenerateReqInput, length: int) -> None:
        if not -1 <= request.logprob_start_len <= length:
            raise BadRequest(
                f"must be -1 (none) or from 0 to the prompt's {length}, got {request.logprob_start_len}",
                where="logprob_start_len",
            )
        if not 0 <= request.top_logprobs_num <= self._limits.vocab_size:
            raise BadRequest(
                f"must be from 0 to {self._limits.vocab_size}, got {request.top_logprobs_num}",
                where="top_logprobs_num",
            )

    # -- choices ---------------------------------------------------------------------------------------------

    def _choices(
        self,
        request: GenerateReqInput,
        options: Sequence[str],
        text: str | None,
        ids: list[int],
        deadline: float | None,
    ) -> Job:
        if not options:
            raise BadRequest("is empty; there must be at least one option", where="choices")
        if request.constraint is not None:
            raise BadRequest("a choice cannot have a constraint as well", where="constraint")
        for index, option in enumerate(options):
            if not option:
                raise BadRequest("is empty", where=f"choices[{index}]")
        wholes, boundary = self._boundary(request, text, ids, options)
        start = self._start()
        requests: list[TokenizedGenerateReqInput] = []

        def scoring(input_ids: list[int], first: int) -> int:
            index = len(requests)
            requests.append(
                TokenizedGenerateReqInput(
                    rid=self._wire_rid(request),
                    http_worker_ipc=request.http_worker_ipc,
                    input_ids=input_ids,
                    sampling_params=SCORING,
                    return_logprob=True,
                    logprob_start_len=first,
                    priority=request.priority,
                    extra_key=request.extra_key,
                    deadline=deadline,
                )
            )
            return index

        made: list[Option] = []
        for index, (option, whole) in enumerate(zip(options, wholes, strict=True)):
            self._check_length(len(whole), 0, f"choices[{index}]")
            own = tuple(whole[boundary:])
            if not own:
                raise BadRequest("adds no token to the prompt", where=f"choices[{index}]")
            scored = scoring(whole, boundary)
            alone = scoring([*start, *own], len(start)) if request.unconditional else None
            made.append(Option(option, own, scored, alone))
        return Job(tuple(requests), tuple(made))

    def _boundary(
        self, request: GenerateReqInput, text: str | None, ids: list[int], options: Sequence[str]
    ) -> tuple[list[list[int]], int]:
        """Each option's ids with the prompt, and how many of them are the prompt's own whatever follows.

        Tokens of the prompt's end that merge with some option's beginning are scored with every option, so
        that all options are compared over the same text. At least one token stands before the boundary.
        """
        if text is None:
            wholes = [[*ids, *self._tokenizer.encode_plain(option)] for option in options]
        else:
            wholes = [self._encode(request, text + option) for option in options]
        boundary = min([len(ids), *(_common(ids, whole) for whole in wholes)])
        if boundary == 0:
            start = self._start()
            if not start:
                raise BadRequest(
                    "the first token of the options has no token before it, and this tokenizer has neither a "
                    "begin-of-text nor an end-of-text token to start from",
                    where="choices",
                    hint="put some text before the choice",
                )
            return [[*start, *whole] for whole in wholes], len(start)
        return wholes, boundary

    def _start(self) -> list[int]:
        """What a text without a prompt begins with."""
        if self._tokenizer.bos is not None:
            return [self._tokenizer.bos]
        return sorted(self._tokenizer.eos)[:1]


def _has_turns(request: GenerateReqInput) -> bool:
    return any(message.role != RAW_ROLE for message in request.messages or ())


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def _typed(request: GenerateReqInput) -> GenerateReqInput:
    """The request with every field's type checked. Raises BadRequest with the place of a wrong one."""
    try:
        return msgspec.convert(msgspec.to_builtins(request), GenerateReqInput)
    except (msgspec.ValidationError, TypeError) as error:
        message, _, path = str(error).partition(" - at `$")
        place = path.rstrip("`").lstrip(".")
        kind = BadConstraint if place.startswith("constraint") else BadRequest
        raise kind(message, where=place or "request") from error
