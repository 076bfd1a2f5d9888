"""Engine: the whole pipeline in this process, without HTTP.

    with Engine("pocket") as engine:
        print(engine.generate("Hello").text)

Blocking calls from any thread, async calls from any event loop, all at once into one scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

import msgspec

from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec
from runtime.processes.frontdoor import Ticket
from runtime.processes.launch import launch
from runtime.protocol.errors import BadRequest, RuntimeFault
from runtime.protocol.io_struct import FlushCacheReq, GenerateOutput, GenerateReqInput, GetStateReq
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary

CONTROL_TIMEOUT_S = 120.0

Prompt: TypeAlias = str | Sequence[int] | GenerateReqInput
Params: TypeAlias = SamplingParams | Mapping[str, Any] | None


class Engine:
    """A model, ready to generate. Options are those of EngineConfig (`EngineConfig.help_texts()` lists them).

    Raises ModelLoadError when the checkpoint cannot be loaded, BadRequest for an unknown or wrong option.
    After `close()`, or when the engine has died, every call raises EngineDead; until then an error of one
    request concerns that request only.

    model_path  the checkpoint's directory
    spec        the model's shape
    vocabulary  the bytes of each token id
    force_reasoning  whether the chat template opens every reply inside the model's reasoning
    """

    def __init__(self, model: str = "pocket", **options: Any) -> None:
        self.config = EngineConfig.of({"model": str(model), **options})
        self._pipeline = launch(self.config)
        self.model_path: str = str(self._pipeline.model.path)
        self.spec: ModelSpec = self._pipeline.model.spec
        self.vocabulary: Vocabulary = self._pipeline.model.tokenizer.vocabulary
        self.force_reasoning: bool = self._pipeline.model.force_reasoning

    # -- async -----------------------------------------------------------------------------------------------

    async def submit(self, request: GenerateReqInput) -> GenerateOutput:
        """The answer to one request. Cancelling the task aborts it. Raises RuntimeFault's kinds."""
        return await self._pipeline.door.submit(request)

    def stream(self, request: GenerateReqInput) -> AsyncIterator[GenerateOutput]:
        """The text so far, growing; the last output has `finish_reason` in its meta. Leaving the iteration
        early aborts the request."""
        return self._pipeline.door.stream(request)

    # -- blocking --------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: str | GenerateReqInput, sampling_params: Params = None, **fields: Any
    ) -> GenerateOutput: ...

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

    @overload
    def generate(
        self, prompt: Sequence[int], sampling_params: Params = None, **fields: Any
    ) -> GenerateOutput: ...

    def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        *,
        on_error: Literal["raise", "return"] = "raise",
        **fields: Any,
    ) -> Any:
        """Generate and wait. One prompt (text, token ids, or a GenerateReqInput) gives a GenerateOutput; a
        list of them runs as one batch and gives a list in the same order.

        sampling_params: a SamplingParams or a dict of its fields; for a list of prompts also a list of them.
        fields: more fields of GenerateReqInput (constraint=, choices=, return_logprob=, ...).
        on_error: for lists, "raise" the first failing item's error when all are done, or "return" each item's
        error in its place.
        """
        if on_error not in ("raise", "return"):
            raise BadRequest(f'must be "raise" or "return", got {on_error!r}', where="on_error")
        if not _is_batch(prompt):
            request = _request(prompt, sampling_params, fields)
            event = threading.Event()
            door = self._pipeline.door
            return door.wait(door.begin(request, event.set), event)
        params = _spread(sampling_params, len(prompt))
        outcomes = self._batch([_request(one, own, fields) for one, own in zip(prompt, params, strict=True)])
        if on_error == "raise":
            for outcome in outcomes:
                if isinstance(outcome, RuntimeFault):
                    raise outcome
        return outcomes

    def abort(self, rid: str | None = None) -> None:
        """Cancel the request with this id, or all (None); whoever waits for it gets Aborted."""
        self._pipeline.door.abort(rid)

    def flush_cache(self) -> bool:
        """Drop all cached prefixes that no request uses now. False if some were in use."""
        return self._pipeline.door.control(FlushCacheReq(), CONTROL_TIMEOUT_S).ok

    def state(self) -> dict[str, Any]:
        """The scheduler's counters and slots, and `live`: requests at the front door."""
        answer = self._pipeline.door.control(GetStateReq(), CONTROL_TIMEOUT_S)
        return {**answer.data, "live": self._pipeline.door.live}

    # -- text and ids ----------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids the engine would see for this prompt."""
        return self._pipeline.model.tokenizer.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._pipeline.model.tokenizer.decode(ids, skip_special_tokens)

    # -- life ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs, stop the threads and free the model. May be called more than once, from any
        thread.
        """
        self._pipeline.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Engine({self.model_path!r})"

    def _batch(self, requests: Sequence[GenerateReqInput]) -> list[GenerateOutput | RuntimeFault]:
        """All at once; each item's answer or error."""
        door = self._pipeline.door
        begun: list[tuple[Ticket, threading.Event] | RuntimeFault] = []
        outcomes: list[GenerateOutput | RuntimeFault] = []
        try:
            for request in requests:
                event = threading.Event()
                try:
                    begun.append((door.begin(request, event.set), event))
                except RuntimeFault as fault:
                    begun.append(fault)
            for item in begun:
                if isinstance(item, RuntimeFault):
                    outcomes.append(item)
                    continue
                try:
                    outcomes.append(door.wait(*item))
                except RuntimeFault as fault:
                    outcomes.append(fault)
        finally:
            # Interrupted: nobody waits for the rest any more.
            for item in begun[len(outcomes) :]:
                if not isinstance(item, RuntimeFault):
                    door.leave(item[0])
        return outcomes


def _is_batch(prompt: Any) -> bool:
    """A list of prompts, rather than one prompt (a list of ints is one)."""
    if not isinstance(prompt, (list, tuple)):
        return False
    return not prompt or not isinstance(prompt[0], int)


def _spread(params: Any, count: int) -> list[Any]:
    if not isinstance(params, (list, tuple)):
        return [params] * count
    if len(params) != count:
        raise BadRequest(f"{len(params)} for {count} prompts", where="sampling_params")
    return list(params)


def _request(prompt: Any, params: Any, fields: Mapping[str, Any]) -> GenerateReqInput:
    known = GenerateReqInput.__struct_fields__
    for name in fields:
        if name not in known:
            raise BadRequest(f"unknown field {name!r}; known: {', '.join(known)}", where="generate")
    given = dict(fields)
    if params is not None:
        given["sampling_params"] = make_params(params)
    match prompt:
        case GenerateReqInput():
            return msgspec.structs.replace(prompt, **given) if given else prompt
        case str():
            return GenerateReqInput(text=prompt, **given)
        case list() | tuple():
            return GenerateReqInput(input_ids=list(prompt), **given)
        case None:
            return GenerateReqInput(**given)
        case _:
            raise BadRequest(
                f"a prompt is a text, a list of token ids or a GenerateReqInput, got {type(prompt).__name__}",
                where="prompt",
            )


def make_params(params: SamplingParams | Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from a dict of its fields; `stop` may be one string. Raises BadRequest."""
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Mapping):
        raise BadRequest(
            f"must be a SamplingParams or a dict, got {type(params).__name__}", where="sampling_params"
        )
    known = SamplingParams.__struct_fields__
    for name in params:
        if name not in known:
            raise BadRequest(f"unknown field {name!r}; known: {', '.join(known)}", where="sampling_params")
    values = {name: value for name, value in params.items() if value is not None or name == "seed"}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if type(values.get("stop_token_ids")) is int:
        values["stop_token_ids"] = [values["stop_token_ids"]]
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise BadRequest(message, where="sampling_params" + path.rstrip("`")) from error
