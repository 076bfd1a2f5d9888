"""What travels between frontend, scheduler and detokeniser: tagged msgspec structs.

Knows neither sockets nor tensors. The same structs pass through memory (Engine) and over ZMQ as msgpack.
"""

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
    """Where the prompt of a request is computed (host, its bootstrap port), and its number there."""

    host: str
    port: int
    room: int


class TokenizedGenerateReqInput(SingleReq):
    """The same as ids. `at_start`: no text stands before the output (the prompt is control ids only), so a
    decoder's rule about leading spaces applies to it. heal: so many of the last ids may be tokenized anew
    with what follows them (see runtime.grammar.healing). require_reasoning: the output begins within the
    model's reasoning, which ends before the constraint begins; after max_thinking_tokens it must. bootstrap:
    prompt and output are computed by two engines, of which this is one. lora_path: its adapter's name;
    adapter: the number that the scheduler gives for it, 0 for none. group: common to those that one
    request of a client asks for at once; None: it is alone. flow: the client whose turn it takes among
    others, as an opaque label; None: it has none. images: the prompt's, in order; input_ids has
    one id for each of their tokens."""

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
    """A text whose vector is wanted, as ids. Answered with EmbeddingOutput, as a whole.

    token_type_ids: segment of each id, for encoders that read pairs; None: all 0. dimensions: keep so many
    leading numbers of the vector and scale it to length 1 again. cross_encoder: the ids are a pair and the
    answer is its score, a vector of one or more numbers. lora_path: its adapter's name, with a decoder.
    flow: see TokenizedGenerateReqInput."""

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
    """stop, length, abort (error: a RuntimeFault as a dict). length: also where the engine completed the
    output because max_new_tokens ran out (see GrammarInfo.closed_by_budget). matched: the string or id at
    which it ended. unfinished: what the output breaks off in, where it does: "reasoning" that was to end
    before an answer, or a "constraint" that no whole match was found for."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    error: dict[str, Any] | None = None
    unfinished: Literal["reasoning", "constraint"] | None = None


class GrammarInfo(msgspec.Struct, frozen=True):
    """How a request's constraint was kept: meta_info["grammar"].

    backend, exact, checked, ignored, why: see runtime.grammar.base.Origin. compile_s: seconds the compilation
    took, whoever asked for it; cached: it was ready when asked for. rollbacks: how often output was taken
    back; closed_by_budget: the engine, not the model, wrote the end of the output, since max_new_tokens (or
    how often output may be taken back) ran out; its finish reason is length."""

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
    """How well the tokens drafted for one request did: see SpeculativeDecodingMetricsMixin."""

    verify_ct: int = 0
    accepted_tokens: int = 0
    drafted_tokens: int = 0
    acceptance_histogram: list[int] = []


TokenOrigin: TypeAlias = Literal["sampled", "forced", "speculated"]
"""How an output token came: a step sampled it; a constraint left no other, and no step did (jump-forward); it
was guessed ahead, and the step that verified the guess confirmed it."""


class TokenOutput(msgspec.Struct, array_like=True, gc=False):
    """A delta of one request's output: the ids since the last one (`replaced`: how many earlier ids they take
    the place of, when jump-forward healed the seam; the bytes they stand for do not change).

    The ids include the one that ended the generation: a matched end-of-text or stop id, and the token in
    which a stop string became complete; what is cut from the text, finish.matched says. A request that does
    not stream gives one, at its end. completion_tokens counts the ids told so far; at the end it is
    decode_steps + jumped_tokens. Where log-probabilities were asked for, output_logprobs has one entry per
    id of new_ids, forced ids included; so have output_origins, and output_top_logprobs and
    output_token_ids_logprobs, where top or token_ids_logprob were asked for. input_logprobs and the like come
    once, with the first ids that are told or without any, for the prompt from logprob_start_len on; the first
    token of a prompt has none
    (None, []). hidden_states come with the last delta: those of all computed tokens, prompt first, or only
    the last one's. A request that ends with an error has no hidden states. healed: so many bytes of the
    first id's text are the end of the prompt and not shown; told with it. spec comes with the end, where
    tokens were drafted."""

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


class TextRequest(msgspec.Struct, omit_defaults=True):
    """How the text of one request is to be made; the detokeniser has it before the request's first delta.

    stream: deltas are wanted before the end."""

    rid: str
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    at_start: bool = False
    stream: bool = False
    http_worker_ipc: str | None = None


class BatchOfDeltas(SpeculativeDecodingMetricsMixin):
    """Items of several requests; what they say also reads as parallel lists, in the order of `rids`."""

    def deltas(self) -> list[TokenOutput]:
        raise NotImplementedError

    def with_spec(self) -> Self:
        """Itself, with the lists of SpeculativeDecodingMetricsMixin where tokens were drafted."""
        deltas = self.deltas()
        if any(one.spec is not None for one in deltas):
            figures = [one.spec or SpecFigures() for one in deltas]
            self.spec_verify_ct = [one.verify_ct for one in figures]
            self.spec_accepted_tokens = [one.accepted_tokens for one in figures]
            self.spec_drafted_tokens = [one.drafted_tokens for one in figures]
            self.spec_acceptance_histogram = [one.acceptance_histogram for one in figures]
        return self

    @property
    def output_ids(self) -> list[list[int]]:
        return [one.new_ids for one in self.deltas()]

    @property
    def finished_reasons(self) -> list[FinishReason | None]:
        return [one.finish for one in self.deltas()]

    @property
    def prompt_tokens(self) -> list[int]:
        return [one.prompt_tokens for one in self.deltas()]

    @property
    def completion_tokens(self) -> list[int]:
        return [one.completion_tokens for one in self.deltas()]

    @property
    def cached_tokens(self) -> list[int]:
        return [one.cached_tokens for one in self.deltas()]

    @property
    def retraction_counts(self) -> list[int]:
        return [one.retractions for one in self.deltas()]


class BatchTokenIDOutput(BatchOfDeltas):
    """Scheduler -> detokeniser, once per step. `begun`: requests that were received since the last one.

    Others of the field send parallel lists; here one struct per request travels, so that none can be of
    another length than its neighbours, and the lists are read from it."""

    outputs: list[TokenOutput]
    begun: list[TextRequest] = msgspec.field(default_factory=list)

    def deltas(self) -> list[TokenOutput]:
        return self.outputs


class StrOutput(msgspec.Struct, array_like=True):
    """The same with text: `text` is what the delta adds to it; what was told never changes."""

    rid: str
    text: str
    delta: TokenOutput

    @property
    def finish(self) -> FinishReason | None:
        return self.delta.finish

    @property
    def http_worker_ipc(self) -> str | None:
        return self.delta.http_worker_ipc


class BatchStrOutput(BatchOfDeltas):
    """Detokeniser -> frontend, once per step. See BatchTokenIDOutput."""

    outputs: list[StrOutput]

    def deltas(self) -> list[TokenOutput]:
        return [one.delta for one in self.outputs]

    @property
    def output_strs(self) -> list[str]:
        return [one.text for one in self.outputs]


class EmbeddingOutput(msgspec.Struct, omit_defaults=True):
    """The vector of one text; empty where `finish` is an error."""

    rid: str
    embedding: list[float]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    meta: dict[str, Any] = {}
    http_worker_ipc: str | None = None


class BatchEmbeddingOutput(BaseBatchReq):
    """Scheduler -> detokeniser, which only passes it on -> frontend, once per step."""

    outputs: list[EmbeddingOutput]

    @property
    def embeddings(self) -> list[list[float]]:
        return [one.embedding for one in self.outputs]

    @property
    def prompt_tokens(self) -> list[int]:
        return [one.prompt_tokens for one in self.outputs]

    @property
    def finished_reasons(self) -> list[FinishReason | None]:
        return [one.finish for one in self.outputs]


class ChoiceScores(msgspec.Struct):
    """One option's score: log-probabilities (natural log) of its tokens after the boundary that all options
    share, and, where asked for, the same tokens' without the prompt. `token_texts`: of each token, None where
    there is no tokenizer at hand."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    unconditional: list[float | None] | None = None
    token_texts: list[str] | None = None


class GenerateOutput(msgspec.Struct, omit_defaults=True):
    """What the frontend answers: all of it, or (Engine.stream) all so far.

    meta: id; finish_reason ({"type": "stop", "matched": ...}, {"type": "length", "length": ...}; None while
    it goes on); prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, jumped_tokens,
    decode_steps, num_retractions; at the end, where tokens were drafted, spec_verify_ct,
    spec_accept_token_num, spec_draft_token_num, spec_accept_rate, spec_accept_length and
    spec_accept_histogram (see SpeculativeDecodingMetricsMixin); queue_time, first_token_latency, e2e_latency
    (seconds); weight_version; dp_rank (0: there is one engine). unfinished in finish_reason: see
    FinishReason.
    With a constraint, grammar (see GrammarInfo); where the output begins with reasoning, answer_start: how
    many characters of the text are reasoning and its marks, None while it goes on; else, where a
    conversation's prompt begins (true) or ends (false) the reasoning, reasoning_begun.
    Where asked for: input_token_logprobs and output_token_logprobs ([log-probability, id, text or None] per
    token; the first token of a prompt has None), the same with _top_ and _token_ids_ (a list of these per
    token), output_token_logprobs_length, output_token_origins (a TokenOrigin per token), hidden_states,
    prompt_token_ids.
    """

    text: str
    output_ids: list[int]
    meta: dict[str, Any]
    choices: list[ChoiceScores] | None = None

    def __getitem__(self, name: str) -> Any:
        """output["text"], output["output_ids"], output["meta_info"]: the same under the wire's names."""
        match name:
            case "text" | "output_ids" | "choices":
                return getattr(self, name)
            case "meta_info":
                return self.meta
            case _:
                raise KeyError(name)


class OutputDelta(GenerateOutput):
    """What an output gained since its last delta: text, output_ids and the lists of meta that have an entry
    per token hold only what is new; all else in meta is as of now. replaced: the first of output_ids take the
    place of so many earlier ids (their bytes do not change). A whole output is one delta."""

    replaced: int = 0

    @property
    def finished(self) -> bool:
        return self.meta["finish_reason"] is not None
