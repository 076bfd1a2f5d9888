"""What travels between front door, scheduler and detokeniser: tagged msgspec structs.

Knows neither sockets nor tensors. The same structs pass through memory (Engine) and, later, over ZMQ as
msgpack.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

import msgspec

from runtime.protocol.constraint import Constraint
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams


def new_rid() -> str:
    return uuid.uuid4().hex


class BaseReq(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """Anything about one request. `http_worker_ipc` routes the answer when there are several front doors."""

    rid: str = msgspec.field(default_factory=new_rid)
    http_worker_ipc: str | None = None


class BaseBatchReq(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """Anything about several requests at once; parallel lists, one entry per rid."""

    rids: list[str]


class GenerateReqInput(BaseReq):
    """A request as a user makes it: exactly one of text, input_ids, messages is the prompt.

    choices: score these continuations instead of generating (see ChoiceScores).
    logprob_start_len: prompt position from which prompt log-probabilities are returned; -1 = none.
    extra_key: requests with different keys never share cache.
    template_kwargs: passed on to the checkpoint's chat template.
    jump_forward: append forced text without decoding it step by step (same text either way).
    allow_control_tokens: read control tokens in the messages' own text as such; else they are only letters.
    """

    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    allow_control_tokens: bool = False
    sampling_params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    choices: list[str] | None = None
    unconditional: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    stream: bool = False
    jump_forward: bool = True
    priority: int = 0
    extra_key: str | None = None
    timeout_s: float | None = None


class TokenizedGenerateReqInput(BaseReq):
    """The same as ids. `at_start`: no text stands before the output (the prompt is control ids only), so a
    decoder's rule about leading spaces applies to it."""

    input_ids: list[int]
    sampling_params: SamplingParams
    constraint: Constraint | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    stream: bool = False
    jump_forward: bool = True
    priority: int = 0
    extra_key: str | None = None
    deadline: float | None = None  # time.monotonic() seconds of the sending machine
    at_start: bool = False


class BatchTokenizedGenerateReqInput(BaseBatchReq):
    """Requests that should meet in one step, such as the options of one choice."""

    requests: list[TokenizedGenerateReqInput]


class AbortReq(BaseReq):
    """Cancel the request `rid`, or all of them."""

    abort_all: bool = False


class FlushCacheReq(BaseReq):
    """Drop all unlocked prefixes; answered with ControlOutput."""


class GetStateReq(BaseReq):
    """Ask for the scheduler's counters; answered with ControlOutput."""


class ControlOutput(BaseReq):
    ok: bool
    message: str = ""
    data: dict[str, Any] = {}


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """stop (matched: the string or id), length, abort (error: a RuntimeFault as a dict)."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    error: dict[str, Any] | None = None


class TokenOutput(msgspec.Struct, omit_defaults=True):
    """News of one request: the ids since the last news (`replaced`: how many earlier ids they take the place
    of, when jump-forward healed the seam; the bytes they stand for do not change).

    The ids include the one that ended the generation: a matched end-of-text or stop id, and the token in
    which a stop string became complete; what is cut from the text, finish.matched says. A request that does
    not stream gives one news, at its end. completion_tokens counts the ids told so far; at the end it is
    decode_steps + jumped_tokens. Where log-probabilities were asked for, output_logprobs has one entry per
    id of new_ids, forced ids included, and output_top_logprobs an empty list for each of these.
    input_logprobs come with the last news, for the prompt from logprob_start_len on; the first token of a
    prompt has none (None). A request that ends with an error has no input_logprobs."""

    rid: str
    new_ids: list[int]
    replaced: int = 0
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    jumped_tokens: int = 0
    decode_steps: int = 0
    output_logprobs: list[float | None] = []
    output_top_logprobs: list[list[tuple[int, float]]] = []
    input_logprobs: list[float | None] | None = None
    queue_s: float = 0.0
    first_token_s: float = 0.0
    http_worker_ipc: str | None = None


class TextRequest(msgspec.Struct, omit_defaults=True):
    """How the text of one request is to be made; the detokeniser hears it before the request's first news.

    stream: news are wanted before the end."""

    rid: str
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    at_start: bool = False
    stream: bool = False
    http_worker_ipc: str | None = None


class BatchTokenIDOutput(BaseBatchReq):
    """Scheduler -> detokeniser, once per step. `begun`: requests that were received since the last one."""

    outputs: list[TokenOutput]
    begun: list[TextRequest] = []


class StrOutput(msgspec.Struct, omit_defaults=True):
    """The same with text: `text` is all of it so far (never shorter than before)."""

    rid: str
    text: str
    output_ids: list[int]
    finish: FinishReason | None = None
    meta: dict[str, Any] = {}
    http_worker_ipc: str | None = None


class BatchStrOutput(BaseBatchReq):
    """Detokeniser -> front door, once per step."""

    outputs: list[StrOutput]


class ChoiceScores(msgspec.Struct):
    """One option's score: log-probabilities (natural log) of its tokens after the boundary that all options
    share, and, where asked for, the same tokens' without the prompt."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    unconditional: list[float | None] | None = None


class GenerateOutput(msgspec.Struct, omit_defaults=True):
    """What the front door answers. meta: id, finish_reason, prompt_tokens, completion_tokens, cached_tokens,
    jumped_tokens, decode_steps, queue_s, first_token_s, e2e_s and, where asked for, input_logprobs,
    output_logprobs, output_top_logprobs."""

    text: str
    output_ids: list[int]
    meta: dict[str, Any]
    choices: list[ChoiceScores] | None = None
