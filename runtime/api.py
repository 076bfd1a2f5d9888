"""Engine: the whole pipeline in this process, without HTTP.

    with Engine("pocket") as engine:
        print(engine.generate("Hello").text)

Blocking calls from any thread, async calls from any event loop, all at once into one scheduler.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import msgspec

from runtime.config.checkpoints import AnySpec
from runtime.config.engine import EngineConfig
from runtime.config.options import near
from runtime.formats.chat.derive import Derivation
from runtime.formats.chat.template import ChatTemplate
from runtime.processes.checkpoint.templates import TemplateChoice
from runtime.processes.frontend import prefixes
from runtime.processes.pipeline.launch import launch
from runtime.protocol.constraint import Constraint
from runtime.protocol.control import VERBS, request_of
from runtime.protocol.errors import BadRequest, RuntimeFault, from_dict
from runtime.protocol.io_struct import (
    ControlOutput,
    EmbeddingOutput,
    EmbeddingReqInput,
    GenerateOutput,
    GenerateReqInput,
    GrammarInfo,
    MemoryPart,
    OutputDelta,
    PauseMode,
    SingleReq,
)
from runtime.protocol.requests.generate import copy_request
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.server_names import runtime_options
from runtime.protocol.vocabulary import Vocabulary

CONTROL_TIMEOUT_S = 120.0

Prompt: TypeAlias = str | Sequence[int] | GenerateReqInput
Texts: TypeAlias = str | Sequence[Any] | EmbeddingReqInput
OnError: TypeAlias = Literal["raise", "return"]
Params: TypeAlias = SamplingParams | Mapping[str, Any] | None


class Engine:
    """A model, ready to generate. Options are those of EngineConfig (`EngineConfig.help_texts()` lists them),
    also under sglang's names; `model_path` is another name of `model`. The engine ends with close(), or when
    it is garbage.

    Raises ModelLoadError when the checkpoint cannot be loaded, BadRequest for an unknown or wrong option.
    After `close()`, or when the engine has died, every call raises EngineDead; until then an error of one
    request concerns that request only.

    model_path  the checkpoint's directory
    spec        the model's shape
    vocabulary  the bytes of each token id
    force_reasoning  whether the chat template opens every reply inside the model's reasoning
    tool_parser  name of the model's tool-call format; None if unknown
    template_choice  the chat template that renders turns, and the reason for it
    """

    def __init__(self, model: str = "pocket", *, model_path: str | None = None, **options: Any) -> None:
        named = str(model_path or model)
        self.config = EngineConfig.of({"model": named, **runtime_options(options, named)})
        self._pipeline = launch(self.config)
        self.model_path: str = str(self._pipeline.model.path)
        self.spec: AnySpec = self._pipeline.model.spec
        self.vocabulary: Vocabulary = self._pipeline.model.tokenizer.vocabulary
        self.template_choice: TemplateChoice = self._pipeline.model.template_choice
        self.force_reasoning: bool = self.template_choice.force_reasoning
        self.tool_parser: str | None = self._pipeline.manager.model.tool_parser

    # -- async -----------------------------------------------------------------------------------------------

    async def submit(self, request: GenerateReqInput) -> GenerateOutput:
        """The answer to one request. Cancelling the task aborts it. Raises kinds of RuntimeFault."""
        return await self._pipeline.manager.submit(request)

    def stream(self, request: GenerateReqInput) -> AsyncIterator[GenerateOutput]:
        """The text so far, growing; the last output has `finish_reason` in its meta. Leaving the iteration
        early aborts the request."""
        return self._pipeline.manager.stream(request, cumulative=True)

    def stream_deltas(self, request: GenerateReqInput) -> AsyncIterator[OutputDelta]:
        """The same as deltas: their cost does not grow with the output."""
        return self._pipeline.manager.stream(request)

    async def async_generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Params = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """generate() of one prompt for async code; with `stream` an async iterator of all so far."""
        request = _one(prompt, sampling_params, fields)
        return self.stream(request) if stream else await self.submit(request)

    async def submit_batch(self, request: GenerateReqInput) -> list[GenerateOutput | RuntimeFault]:
        """The answers to a request for several prompts or samples: p1, p2, ..., p1, p2, ..., or an item's
        error in place of its answer. Cancelling the task aborts them all."""
        return [*await self._pipeline.manager.submit_batch(request)]

    def stream_batch(
        self, request: GenerateReqInput
    ) -> AsyncIterator[tuple[int, GenerateOutput | RuntimeFault]]:
        """The same as pairs (item, its text so far), as they come; see submit_batch and stream."""
        return self._pipeline.manager.stream_batch(request, cumulative=True)

    async def embed_async(
        self, texts: Any, dimensions: int | None = None, *, on_error: OnError = "raise", **fields: Any
    ) -> list[EmbeddingOutput | RuntimeFault]:
        """embed() for event loops. Cancelling the task aborts it."""
        request = _embedding(texts, dimensions, fields)
        return _raised(await self._pipeline.manager.submit_batch(request), on_error)

    # -- blocking --------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: str | Sequence[int], sampling_params: None = None, **fields: Any
    ) -> GenerateOutput: ...

    # One answer or a list, depending on `n` and on prompts among the fields.
    @overload
    def generate(
        self, prompt: Prompt | None = None, sampling_params: Params = None, **fields: Any
    ) -> Any: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]] | Sequence[GenerateReqInput],
        sampling_params: Params | Sequence[Params] = None,
        *,
        on_error: Literal["raise"] = "raise",
        **fields: Any,
    ) -> list[GenerateOutput]: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]] | Sequence[GenerateReqInput],
        sampling_params: Params | Sequence[Params] = None,
        *,
        on_error: Literal["return"],
        **fields: Any,
    ) -> list[GenerateOutput | RuntimeFault]: ...

    def generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        *,
        on_error: Literal["raise", "return"] = "raise",
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Generate and wait. One prompt (text, token ids, or a GenerateReqInput) gives a GenerateOutput; a
        list of them runs as one batch and gives a list in the same order; several samples (n > 1) give a
        list as well: p1, p2, ..., p1, p2, ...

        sampling_params: a SamplingParams or a dict, which may also hold the constraint (see
        SamplingParams.from_user); for a list of prompts also a list of them.
        fields: more fields of GenerateReqInput (constraint=, choices=, return_logprob=, ...); without a
        prompt also `text`, `input_ids` or `messages`.
        on_error: for lists, "raise" the first failing item's error when all are done, or "return" each item's
        error in its place.
        stream: for one prompt; an iterator of all so far, again and again.
        """
        if stream:
            return self._pipeline.manager.texts(_one(prompt, sampling_params, fields))
        if on_error not in ("raise", "return"):
            raise BadRequest(f'must be "raise" or "return", got {on_error!r}', where="on_error")
        requests = _requests(prompt, sampling_params, fields)
        if isinstance(requests, GenerateReqInput) and _is_one(requests):
            return self._pipeline.manager.generate(requests)
        return _raised(self._pipeline.manager.batch(requests), on_error)

    @overload
    def embed(
        self,
        texts: Texts,
        dimensions: int | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **fields: Any,
    ) -> list[EmbeddingOutput]: ...

    @overload
    def embed(
        self, texts: Texts, dimensions: int | None = None, *, on_error: Literal["return"], **fields: Any
    ) -> list[EmbeddingOutput | RuntimeFault]: ...

    def embed(
        self, texts: Texts, dimensions: int | None = None, *, on_error: OnError = "raise", **fields: Any
    ) -> Any:
        """The vectors of one text or several (texts, lists of token ids, or an EmbeddingReqInput): always a
        list, in the order of the texts.

        dimensions: keep so many leading numbers of each vector, scaled to length 1 again.
        fields: more fields of EmbeddingReqInput (is_cross_encoder_request=, priority=, timeout_s=, ...).
        on_error: "raise" the first failing item's error when all are done, or "return" each item's error in
        its place. Raises BadRequest and its kinds.
        """
        return _raised(self._pipeline.manager.batch(_embedding(texts, dimensions, fields)), on_error)

    def abort(self, rid: str | None = None, prefix: bool = False) -> None:
        """Cancel a request by its id, all with this beginning (`prefix`), or all (None): they get Aborted."""
        self._pipeline.manager.abort(rid, prefix)

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating until resume(). mode: of running requests, see PauseReq. Raises RuntimeFault."""
        self._ask("pause", mode=mode)

    def resume(self) -> None:
        """Go on after pause()."""
        self._ask("resume")

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> dict[str, str]:
        """Load the LoRA adapter in a directory, as peft writes it, under a name for requests' `lora_path`,
        and return the directories of all loaded ones by name. Generation waits meanwhile. pinned: once used,
        it stays on the device. Raises AdapterError."""
        answer = self._ask("load_lora_adapter", lora_name=lora_name, lora_path=str(lora_path), pinned=pinned)
        return dict(answer.data["loaded_adapters"])

    def unload_lora_adapter(self, lora_name: str) -> dict[str, str]:
        """Unload it; running requests keep it. Returns the other adapters. Raises ModelNotFound."""
        return dict(self._ask("unload_lora_adapter", lora_name=lora_name).data["loaded_adapters"])

    def update_weights_from_disk(self, model_path: str) -> None:
        """Compute with the weights of another checkpoint of the same shape from now on; the tokenizer stays.
        Running requests keep their output and are computed again. Raises ModelLoadError: the weights cannot
        be loaded, and the old ones stay."""
        self._ask("update_weights_from_disk", model_path=str(model_path))

    def release_memory_occupation(self, tags: Sequence[MemoryPart] = ("kv_cache", "weights")) -> None:
        """Free the memory of the KV pool or of the weights for other programs, once running requests have
        ended. Requests raise NotReady until resume_memory_occupation() has restored all. Raises
        DeadlineExceeded if requests do not end, NotSupported."""
        wait = CONTROL_TIMEOUT_S
        self._ask("release_memory_occupation", 2 * wait, parts=tuple(tags), timeout_s=wait)

    def resume_memory_occupation(self, tags: Sequence[MemoryPart] = ("kv_cache", "weights")) -> None:
        """Allocate the KV pool again, and load the weights of the last checkpoint. Raises ModelLoadError."""
        self._ask("resume_memory_occupation", parts=tuple(tags))

    def control(
        self, request: SingleReq | str, timeout: float = CONTROL_TIMEOUT_S, **parameters: Any
    ) -> ControlOutput:
        """Send a verb of runtime.protocol.control.VERBS and wait for its answer. Raises BadRequest,
        DeadlineExceeded, EngineDead; the verb's own error is in the answer.

        request: its struct, or its name with the struct's fields as parameters.
        """
        return self._pipeline.manager.control(_verb(request, parameters), timeout)

    async def control_async(
        self, request: SingleReq | str, timeout: float = CONTROL_TIMEOUT_S, **parameters: Any
    ) -> ControlOutput:
        """control() for event loops."""
        return await self._pipeline.manager.control_async(_verb(request, parameters), timeout)

    def _ask(self, verb: str, timeout: float = CONTROL_TIMEOUT_S, **parameters: Any) -> ControlOutput:
        """The answer to a verb. Raises the verb's error."""
        answer = self.control(VERBS[verb].request(**parameters), timeout)
        if not answer.ok:
            raise from_dict({"code": "internal_fault", "message": answer.message, **answer.data})
        return answer

    def precompile(
        self, constraints: Sequence[Constraint], timeout: float = CONTROL_TIMEOUT_S
    ) -> list[GrammarInfo | RuntimeFault]:
        """Compile constraints ahead of their use; returns how each is enforced, or its error. A compilation
        that takes longer than `timeout` seconds is DeadlineExceeded here, and goes on. Raises BadRequest for
        too many."""
        wait = timeout + CONTROL_TIMEOUT_S
        answer = self._ask("precompile", wait, constraints=list(constraints), timeout_s=timeout)
        return [
            GrammarInfo(**{name: value for name, value in one.items() if name != "ok"})
            if one["ok"]
            else from_dict(one["error"])
            for one in answer.data["constraints"]
        ]

    def flush_cache(self) -> bool:
        """Drop all cached prefixes that no request uses now. False if some were in use."""
        return self.control("flush_cache").ok

    def state(self) -> dict[str, Any]:
        """The scheduler's counters, `live` requests at the frontend, and the `chat_template`."""
        return {
            **self.control("state").data,
            "live": self._pipeline.manager.live,
            "chat_template": self.template_choice.describe(),
        }

    def prefix_cache(self, most: int = 500) -> dict[str, Any]:
        """The content of the prefix cache, as in the server's /radix_tree: `nodes`, the most used first, each
        with its parent, tokens, hits and the beginning of its text."""
        question = prefixes.question(most, texts=True)
        answer = self._ask("prefixes", most=question.most, ids=question.ids)
        return {**prefixes.with_texts(answer.data, self._pipeline.manager.tokenizer), "texts": True}

    @property
    def derivation(self) -> Derivation | None:
        """The chat template's Jinja text as prefixes and suffixes; None without Jinja text."""
        return self.template_choice.derivation

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template as a prefix and a suffix per role, for people; None if those cannot describe it.
        Turns are rendered by the Jinja text itself, if there is one."""
        return self.template_choice.chat_template

    # -- text and ids ----------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids the engine would see for this prompt."""
        return self._pipeline.model.tokenizer.encode(text, add_special_tokens)

    def prompt_ids(self, request: GenerateReqInput) -> list[int]:
        """The ids the engine would see for a request's prompt, text or conversation. Raises BadRequest."""
        return self._pipeline.manager.prompt_ids(request)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._pipeline.model.tokenizer.decode(ids, skip_special_tokens)

    # -- life ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort running requests and free the model. May be called more than once, from any thread."""
        self._pipeline.close()

    shutdown = close

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Engine({self.model_path!r})"


def _verb(request: SingleReq | str, parameters: Mapping[str, Any]) -> SingleReq:
    """Raises BadRequest."""
    if isinstance(request, str):
        return request_of(request, parameters)
    return msgspec.structs.replace(request, **parameters)


def _raised(outcomes: list[Any], on_error: OnError) -> list[Any]:
    if on_error == "raise":
        for outcome in outcomes:
            if isinstance(outcome, RuntimeFault):
                raise outcome
    return outcomes


def _check_fields(fields: Mapping[str, Any], kind: type[msgspec.Struct], call: str) -> None:
    """Raises BadRequest for an unknown field."""
    for name in fields:
        if name not in kind.__struct_fields__:
            hint = near(name, kind.__struct_fields__, f"help(runtime.protocol.io_struct.{kind.__name__})")
            raise BadRequest(f"unknown field {name!r:.80}", where=call, hint=hint)


def _embedding(texts: Any, dimensions: int | None, fields: Mapping[str, Any]) -> EmbeddingReqInput:
    _check_fields(fields, EmbeddingReqInput, "embed")
    fields = dict(fields) if dimensions is None else {**fields, "dimensions": dimensions}
    match texts:
        case EmbeddingReqInput():
            return msgspec.structs.replace(texts, **fields)
        case str():
            return EmbeddingReqInput(text=texts, **fields)
        case [first, *_] if isinstance(first, int):
            return EmbeddingReqInput(input_ids=list(texts), **fields)
        case [[int(), *_], *_]:
            return EmbeddingReqInput(input_ids=[list(ids) for ids in texts], **fields)
        case list() | tuple():
            pairs = [list(one) if isinstance(one, tuple) else one for one in texts]
            return EmbeddingReqInput(text=pairs, **fields)
        case _:
            raise BadRequest(
                f"is a text, token ids, a list of these or an EmbeddingReqInput, got {type(texts).__name__}",
                where="texts",
            )


def _is_one(request: GenerateReqInput) -> bool:
    """One prompt and one sample, so that its answer is one as well. Raises BadRequest."""
    copied = copy_request(request)
    copied.normalize_batch_and_arguments()
    return copied.is_single


def _one(prompt: Any, params: Any, fields: Mapping[str, Any]) -> GenerateReqInput:
    """A request that can be streamed. Raises BadRequest."""
    request = _requests(prompt, params, fields)
    if isinstance(request, GenerateReqInput) and _is_one(request):
        return request
    raise BadRequest("this takes one prompt and one sample; call it once for each", where="generate")


def _requests(
    prompt: Any, params: Any, fields: Mapping[str, Any]
) -> GenerateReqInput | list[GenerateReqInput]:
    """One request, of one prompt or several; or one each, if the prompts are not of one kind."""
    if not isinstance(prompt, (list, tuple)) or isinstance(next(iter(prompt), None), int):
        return _request(prompt, params, fields)
    if isinstance(params, (list, tuple)) and len(params) != len(prompt):
        raise BadRequest(f"{len(params)} for {len(prompt)} prompts", where="sampling_params")
    params = list(params) if isinstance(params, (list, tuple)) else params
    if prompt and all(isinstance(one, str) for one in prompt):
        return _request(None, params, {**fields, "text": list(prompt)})
    if prompt and all(isinstance(one, (list, tuple)) for one in prompt):
        return _request(None, params, {**fields, "input_ids": [list(one) for one in prompt]})
    each = params if isinstance(params, list) else [params] * len(prompt)
    return [_request(one, some, fields) for one, some in zip(prompt, each, strict=True)]


def _request(prompt: Any, params: Any, fields: Mapping[str, Any]) -> GenerateReqInput:
    _check_fields(fields, GenerateReqInput, "generate")
    fields = dict(fields) if params is None else {**fields, "sampling_params": params}
    match prompt:
        case GenerateReqInput():
            return msgspec.structs.replace(prompt, **fields) if fields else prompt
        case str():
            return GenerateReqInput(text=prompt, **fields)
        case list() | tuple():
            return GenerateReqInput(input_ids=list(prompt), **fields)
        case None:
            return GenerateReqInput(**fields)
        case _:
            raise BadRequest(
                f"a prompt is a text, a list of token ids or a GenerateReqInput, got {type(prompt).__name__}",
                where="prompt",
            )


def make_params(params: SamplingParams | Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from a dict. Raises BadRequest, also for a constraint."""
    read, constraint = SamplingParams.from_user(params)
    if constraint is None:
        return read
    raise BadRequest(f"{constraint.kind} belongs to a request", where=f"sampling_params.{constraint.kind}")
