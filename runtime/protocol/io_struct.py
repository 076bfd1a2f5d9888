"""What travels between frontend, scheduler and detokeniser, in memory or as msgpack."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeAlias

import msgspec

from runtime.protocol.constraint import Constraint
from runtime.protocol.control import AbortReq as AbortReq
from runtime.protocol.control import CloseSessionReq as CloseSessionReq
from runtime.protocol.control import ContinueReq as ContinueReq
from runtime.protocol.control import ControlOutput as ControlOutput
from runtime.protocol.control import FlushCacheReq as FlushCacheReq
from runtime.protocol.control import GetPrefixesReq as GetPrefixesReq
from runtime.protocol.control import GetStateReq as GetStateReq
from runtime.protocol.control import GroupFailed as GroupFailed
from runtime.protocol.control import HealthReq as HealthReq
from runtime.protocol.control import LoadLoRAAdapterReq as LoadLoRAAdapterReq
from runtime.protocol.control import MemoryPart as MemoryPart
from runtime.protocol.control import OpenSessionReq as OpenSessionReq
from runtime.protocol.control import PauseMode as PauseMode
from runtime.protocol.control import PauseReq as PauseReq
from runtime.protocol.control import PrecompileReq as PrecompileReq
from runtime.protocol.control import ProfileReq as ProfileReq
from runtime.protocol.control import ReleaseMemoryReq as ReleaseMemoryReq
from runtime.protocol.control import ResumeMemoryReq as ResumeMemoryReq
from runtime.protocol.control import SetStateReq as SetStateReq
from runtime.protocol.control import UnloadLoRAAdapterReq as UnloadLoRAAdapterReq
from runtime.protocol.control import UpdateWeightsReq as UpdateWeightsReq
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.messages import ImageInput
from runtime.protocol.request_base import BaseBatchReq as BaseBatchReq
from runtime.protocol.request_base import BaseReq as BaseReq
from runtime.protocol.request_base import SingleReq as SingleReq
from runtime.protocol.request_base import SpeculativeDecodingMetricsMixin as SpeculativeDecodingMetricsMixin
from runtime.protocol.request_base import new_rid as new_rid
from runtime.protocol.requests.embedding import EmbeddingReqInput as EmbeddingReqInput
from runtime.protocol.requests.generate import GenerateReqInput as GenerateReqInput
from runtime.protocol.sampling import SamplingParams


class Bootstrap(msgspec.Struct, frozen=True):
    """The prefill server of a request (host, bootstrap port), and the request's number there."""

    host: str
    port: int
    room: int


class TokenizedGenerateReqInput(SingleReq):
    """One generation as token ids.

    heal               so many of the last ids may be tokenized anew with the output (runtime.grammar.healing)
    group              common to the items of one request of a client; None: it is alone
    flow               an opaque label of the client, for fair shares; None: none
    require_reasoning  the output begins within the model's reasoning, which ends before the constraint
                       begins, after max_thinking_tokens at the latest
    at_start           no text stands before the output: the decoder's rule about leading spaces applies
    bootstrap          prompt and output are computed by two engines, of which this is one
    lora_path, adapter  the adapter's name, and its number in the scheduler (0: none)
    images             the prompt's, in order; input_ids has one id for each of their tokens
    """

    input_ids: list[int]
    sampling_params: SamplingParams
    constraint: Constraint | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_hidden_states: bool | Literal["last"] = False
    stream: bool = False
    jump_forward: bool = True
    heal: int = 0
    priority: int = 0
    extra_key: str | None = None
    group: str | None = None
    flow: str | None = None
    session_params: dict[str, Any] | None = None
    require_reasoning: bool = False
    max_thinking_tokens: int | None = None
    embedding: bool = False
    time_left_s: float | None = None  # as of sending: clocks of two machines differ
    at_start: bool = False
    bootstrap: Bootstrap | None = None
    lora_path: str | None = None
    adapter: int = 0
    images: tuple[ImageInput, ...] = ()


class BatchTokenizedGenerateReqInput(BaseBatchReq):
    """Requests that should meet in one step, such as the options of one choice."""

    requests: list[TokenizedGenerateReqInput]


class TokenizedEmbeddingReqInput(SingleReq):
    """A text to embed, as token ids. Answered with one EmbeddingOutput.

    token_type_ids: segment of each id, for encoders that read pairs; None: all 0. dimensions: keep so many
    leading numbers of the vector, scaled to length 1. cross_encoder: the ids are a pair and the answer is its
    score, a vector of one or more numbers. lora_path: the adapter's name, with a decoder."""

    input_ids: list[int]
    token_type_ids: list[int] | None = None
    dimensions: int | None = None
    cross_encoder: bool = False
    priority: int = 0
    extra_key: str | None = None
    flow: str | None = None
    lora_path: str | None = None
    time_left_s: float | None = None  # as of sending: clocks of two machines differ


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an output ended. error: of an abort, a RuntimeFault as a dict. matched: the stop string or id.
    length: also if the engine completed the output at the limit (see GrammarInfo.closed_by_budget).
    unfinished: the output breaks off within its reasoning, or does not match its constraint."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    error: dict[str, Any] | None = None
    unfinished: Literal["reasoning", "constraint"] | None = None


class GrammarInfo(msgspec.Struct, frozen=True):
    """How a request's constraint was enforced: meta_info["grammar"].

    backend, exact, checked, ignored, why: see runtime.grammar.base.Origin. compile_s: seconds that its
    compilation took; cached: it was compiled before. rollbacks: how often output was taken back;
    closed_by_budget: the engine wrote the end of the output, since max_new_tokens or the rollbacks ran
    out; the finish reason is length."""

    backend: str
    exact: bool
    checked: list[str] = []
    ignored: list[str] = []
    why: str = ""
    compile_s: float = 0.0
    cached: bool = False
    rollbacks: int = 0
    closed_by_budget: bool = False


class SpecFigures(msgspec.Struct, array_like=True, gc=False):
    """The figures of one request's drafted tokens: see SpeculativeDecodingMetricsMixin."""

    verify_ct: int = 0
    accepted_tokens: int = 0
    drafted_tokens: int = 0
    acceptance_histogram: list[int] = []


TokenOrigin: TypeAlias = Literal["sampled", "forced", "speculated"]
"""The origin of an output token: a step sampled it, jump-forward appended it, or a step confirmed a draft."""


class TokenOutput(msgspec.Struct, array_like=True, gc=False):
    """A delta of one request's output: the ids since the last one. A request that does not stream gives one
    delta, at its end.

    new_ids            include the id that ended the generation; finish.matched says what the text lacks
    replaced           so many earlier ids are replaced by the first new ones, which spell the same bytes
    completion_tokens  all ids so far; at the end decode_steps + jumped_tokens
    output_*           one entry per id of new_ids, for requests that ask for log-probabilities
    input_*            of the prompt from logprob_start_len on, once; None and [] for a prompt's first token
    hidden_states      with the last delta: of all computed tokens, or only the last one's
    healed             so many bytes of the first id's text are the end of the prompt, and not shown
    spec               with the last delta, if tokens were drafted
    text               what the ids add to the text, as the detokeniser fills it in; it is never taken back
    """

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
    output_token_ids_logprobs: list[list[tuple[int, float]]] = []
    input_logprobs: list[float | None] | None = None
    input_top_logprobs: list[list[tuple[int, float]]] | None = None
    input_token_ids_logprobs: list[list[tuple[int, float]]] | None = None
    hidden_states: list[list[float]] | None = None
    retractions: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    http_worker_ipc: str | None = None
    grammar: GrammarInfo | None = None
    healed: int = 0
    spec: SpecFigures | None = None
    output_origins: list[TokenOrigin] = []
    text: str = ""

    @classmethod
    def failed(cls, rid: str, fault: RuntimeFault, http_worker_ipc: str | None = None) -> TokenOutput:
        """The last delta of a request that failed."""
        reason = FinishReason(type="abort", error=fault.to_dict())
        return cls(rid, [], finish=reason, http_worker_ipc=http_worker_ipc)


class TextRequest(msgspec.Struct, omit_defaults=True):
    """How to detokenise one request's output; sent before its first delta."""

    rid: str
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    at_start: bool = False
    http_worker_ipc: str | None = None


def _each(field: str) -> Any:
    """A property of a batch: the field of each of its outputs."""
    return property(lambda batch: [getattr(one, field) for one in batch.outputs])


class BatchOfDeltas(SpeculativeDecodingMetricsMixin):
    """Deltas of several requests. Others of the field send parallel lists; here the lists are read from
    `outputs`, so that none can have another length than its neighbours."""

    outputs: list[TokenOutput]

    @classmethod
    def of(cls, outputs: list[TokenOutput]) -> Self:
        """Their message, with the lists of SpeculativeDecodingMetricsMixin if tokens were drafted."""
        message = cls(rids=[one.rid for one in outputs], outputs=outputs)
        if any(one.spec is not None for one in outputs):
            figures = [one.spec or SpecFigures() for one in outputs]
            message.spec_verify_ct = [one.verify_ct for one in figures]
            message.spec_accepted_tokens = [one.accepted_tokens for one in figures]
            message.spec_drafted_tokens = [one.drafted_tokens for one in figures]
            message.spec_acceptance_histogram = [one.acceptance_histogram for one in figures]
        return message

    output_ids = _each("new_ids")
    finished_reasons = _each("finish")
    prompt_tokens = _each("prompt_tokens")
    completion_tokens = _each("completion_tokens")
    cached_tokens = _each("cached_tokens")
    retraction_counts = _each("retractions")


class BatchTokenIDOutput(BatchOfDeltas):
    """Scheduler -> detokeniser, once per step. `begun`: requests received since the last one."""

    begun: list[TextRequest] = msgspec.field(default_factory=list)


class BatchStrOutput(BatchOfDeltas):
    """Detokeniser -> frontend, once per step: the same deltas with their text."""

    output_strs = _each("text")


class EmbeddingOutput(msgspec.Struct, omit_defaults=True):
    """The vector of one text; empty where `finish` is an error."""

    rid: str
    embedding: list[float]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    meta: dict[str, Any] = {}
    http_worker_ipc: str | None = None

    def failed(self, fault: RuntimeFault) -> EmbeddingOutput:
        """The same request's output with an error instead of the vector."""
        reason = FinishReason(type="abort", error=fault.to_dict())
        return msgspec.structs.replace(self, embedding=[], meta={}, finish=reason)


class BatchEmbeddingOutput(BaseBatchReq):
    """Scheduler -> detokeniser, which only passes it on -> frontend, once per step."""

    outputs: list[EmbeddingOutput]

    @classmethod
    def of(cls, outputs: list[EmbeddingOutput]) -> Self:
        return cls(rids=[one.rid for one in outputs], outputs=outputs)

    embeddings = _each("embedding")
    prompt_tokens = _each("prompt_tokens")
    finished_reasons = _each("finish")


class ChoiceScores(msgspec.Struct):
    """One option's score: natural log-probabilities of its tokens after the prompt that all options share,
    and, if asked for, of the same tokens without the prompt. `token_texts`: None without a tokenizer."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    unconditional: list[float | None] | None = None
    token_texts: list[str] | None = None


class GenerateOutput(msgspec.Struct, omit_defaults=True):
    """The frontend's answer: all of it, or (Engine.stream) all so far.

    meta always has id; finish_reason ({"type": "stop", "matched": ...}, {"type": "length", "length": ...},
    with unfinished as in FinishReason; None before the end); prompt_tokens, completion_tokens, cached_tokens,
    reasoning_tokens, jumped_tokens, decode_steps, num_retractions; queue_time, first_token_latency,
    e2e_latency (seconds); weight_version; dp_rank (0). If tokens were drafted, at the end: spec_verify_ct,
    spec_accept_token_num, spec_draft_token_num, spec_accept_rate, spec_accept_length, spec_accept_histogram.
    With a constraint: grammar (GrammarInfo). If the output begins with reasoning: answer_start, the
    characters of the text that are reasoning and its marks, None before its end; else reasoning_begun, if a
    conversation's prompt begins (true) or ends (false) the reasoning.
    If asked for: input_token_logprobs and output_token_logprobs ([log-probability, id, text or None] per
    token; None for the first token of a prompt), the same with _top_ and _token_ids_ (a list of these per
    token), output_token_logprobs_length, output_token_origins, hidden_states, prompt_token_ids.
    """

    text: str
    output_ids: list[int]
    meta: dict[str, Any]
    choices: list[ChoiceScores] | None = None

    def __getitem__(self, name: str) -> Any:
        """output["text"], output["output_ids"], output["meta_info"]: the names of the wire."""
        match name:
            case "text" | "output_ids" | "choices":
                return getattr(self, name)
            case "meta_info":
                return self.meta
            case _:
                raise KeyError(name)


class OutputDelta(GenerateOutput):
    """The new part of an output: text, output_ids and meta's lists per token hold what came since the last
    delta, all else in meta is current. replaced: the first of output_ids replace so many earlier ids, which
    spell the same bytes. A whole output is one delta."""

    replaced: int = 0

    @property
    def finished(self) -> bool:
        return self.meta["finish_reason"] is not None
