"""The bundled runtime as a backend: RuntimeBackend makes one GenerateReqInput of a call, and EngineBackend
passes it to an engine in this process; endpoint.py sends it to a server.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, ClassVar

import msgspec

from runtime.formats.chat.template import ChatTemplate
from runtime.formats.reply import was_cut
from runtime.formats.tools.constraints import structure_constraint
from runtime.formats.tools.parser import FunctionCallParser, detector_of
from runtime.formats.tools.schema import rewritten
from runtime.formats.tools.types import Tool
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput, OutputDelta, new_rid
from runtime.protocol.registry import Registry
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, ChoiceScores, Completion, Delta, Prompt
from sglang_dsl.backends.common.native import as_program_error, choices_request, scores_of
from sglang_dsl.conversation.requests import TokenUsage
from sglang_dsl.errors import BackendError, Unsupported

OPTIONS = frozenset(
    {
        "tools", "template_kwargs", "allow_control_tokens", "priority", "extra_key", "jump_forward", "suffix",
        "token_healing", "return_text_in_logprobs", "require_reasoning", "max_thinking_tokens",
    }
)  # fmt: skip
"""Options of a call that are fields of a request."""
PER_TOKEN = (
    "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "output_token_origins",
)  # fmt: skip
"""Lists in a stream's metadata that have one entry per token."""
# Counters that are summed over several samples; the rest of their meta is the first one's.
_SUMMED = ("completion_tokens", "jumped_tokens", "decode_steps")


class RuntimeBackend(Backend):
    """Base class of EngineBackend and RuntimeEndpoint, which carry requests (`submit`, `deltas`).

    peer  what errors call the other side
    """

    calls_tools = True
    peer: ClassVar[str]

    def __init__(self) -> None:
        self.token_usage = TokenUsage()

    # -- what a carrier does ---------------------------------------------------------------------------------

    @abstractmethod
    async def submit(self, request: GenerateReqInput) -> list[GenerateOutput]:
        """The answers to a request, one for each sample. Raises ProgramError."""

    @abstractmethod
    def deltas(self, request: GenerateReqInput) -> AsyncIterator[OutputDelta]:
        """The streamed answer to a request for one sample. Raises ProgramError or RuntimeFault."""

    @abstractmethod
    async def tool_parser(self) -> str | None:
        """The name of the format in which the model calls tools; None if it is not known."""

    @contextmanager
    def faults(self, request_id: str | None = None) -> Iterator[None]:
        """Raise faults of the runtime as the language's errors."""
        try:
            yield
        except RuntimeFault as fault:
            raise as_program_error(fault, self.name, request_id) from fault

    def prompt_fields(self, prompt: Prompt) -> dict[str, Any]:
        """The fields of a request that hold the prompt. Raises Unsupported."""
        return prompt.fields

    # -- the verbs -------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> Completion:
        if call.may_call_tools:
            if call.n != 1:
                raise Unsupported("a reply that may call tools is one text", hint="use n=1")
            held, parser = _held_to_tools(call, await self.tool_parser())
            [output] = await self._answers(self.as_request(held))
            self.token_usage.count(output.meta)
            return _with_calls(output.text, output.meta, held, parser)
        outputs = await self._answers(self.as_request(call), call.n)
        meta = dict(outputs[0].meta)
        if call.n > 1:
            samples = [dict(output.meta) for output in outputs]
            meta |= {key: sum(int(one.get(key) or 0) for one in samples) for key in _SUMMED}
            meta["samples"] = samples
        self.token_usage.count(meta)
        return Completion(tuple(output.text for output in outputs), meta)

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        if call.n != 1:
            raise Unsupported("a stream holds one text", hint="use n=1, or run without stream")
        if call.may_call_tools:
            async for delta in self.whole(call):
                yield delta
            return
        request = self.as_request(call)
        request.stream = True
        lists = _PerToken()
        with self.faults(str(request.rid)):
            async with aclosing(self.deltas(request)) as deltas:  # type: ignore[type-var]
                async for output in deltas:
                    lists.add(output.meta, output.replaced)
                    if output.finished:
                        self.token_usage.count(output.meta)
                        yield Delta(output.text, lists.whole(output.meta), lists.new(output.meta))
                    elif output.text:
                        yield Delta(output.text, None, lists.new(output.meta))

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        request = choices_request(call, self._prompt(call.prompt))
        [output] = await self._answers(request)
        error = BackendError(f"the {self.peer} returned a choice without scores")
        scores = scores_of(output, call, error)
        self.token_usage.count(scores.meta)
        return scores

    async def commit(self, prompt: Prompt) -> None:
        nothing = SamplingParams(max_new_tokens=0)
        await self.submit(GenerateReqInput(sampling_params=nothing, **self._prompt(prompt)))

    # -- requests --------------------------------------------------------------------------------------------

    def as_request(self, call: Call) -> GenerateReqInput:
        """The request for a call. Raises Unsupported for options that no request has."""
        if unknown := sorted(call.options.keys() - OPTIONS):
            raise Unsupported(
                f"the {self.peer} does not take {', '.join(unknown)}",
                hint=f"it takes {', '.join(sorted(OPTIONS))}",
            )
        sampling = call.sampling if call.n == 1 else msgspec.structs.replace(call.sampling, n=call.n)
        fields = self._prompt(call.prompt) | call.options
        if call.wants_logprobs or call.logprob_start_len >= 0:
            fields["return_logprob"] = call.return_logprob
            fields["logprob_start_len"] = call.logprob_start_len
            fields["top_logprobs_num"] = call.top_logprobs
        return GenerateReqInput(
            sampling_params=sampling, constraint=call.constraint, timeout_s=call.timeout, **fields
        )

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        return {"rid": new_rid(), **self.prompt_fields(prompt)}

    async def _answers(self, request: GenerateReqInput, n: int = 1) -> list[GenerateOutput]:
        outputs = await self.submit(request)
        if len(outputs) != n:
            raise BackendError(f"the {self.peer} sent {len(outputs)} answers for {n}")
        return outputs


class _PerToken:
    """The lists of a stream that have one entry per token. Each delta has only its own entries."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Any]] = {}
        self._yielded: dict[str, int] = {}

    def add(self, meta: Mapping[str, Any], replaced: int) -> None:
        """Add a delta's entries. The first ones replace the last `replaced` entries of earlier deltas."""
        for name in PER_TOKEN:
            if isinstance(fresh := meta.get(name), list):
                entries = self._entries.setdefault(name, [])
                if replaced:
                    del entries[-replaced:]
                entries += fresh

    def new(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """`meta` with the entries since the last call."""
        fresh = {name: entries[self._yielded.get(name, 0) :] for name, entries in self._entries.items()}
        self._yielded = {name: len(entries) for name, entries in self._entries.items()}
        return {**meta, **fresh}

    def whole(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        return {**meta, **{name: list(entries) for name, entries in self._entries.items()}}


# -- tools ---------------------------------------------------------------------------------------------------


def _held_to_tools(call: Call, key: str | None) -> tuple[Call, str]:
    """The call with its reply constrained to calls of its tools, and the parser of that reply. `key`: the
    model's format. Raises Unsupported if that is not known and the reply is free."""
    # Calls are constrained to their tool's schema.
    tools = [
        Tool(one.name, rewritten(one.parameters, _closed), one.description, strict=True)
        for one in map(Tool.of, call.prompt.tools)
    ]
    detector = None if key is None else detector_of(key)
    constraint = structure_constraint(detector, tools, call.tool_choice, call.parallel_tools)
    parser = key if constraint is None or constraint.key is None else constraint.key
    if parser is None:
        raise Unsupported(
            "this model's tool call format is not known",
            hint='start it with tool_call_parser, or use tool_choice="required"',
        )
    shape = None if constraint is None else Constraint(constraint.kind, json.dumps(constraint.spec))
    sampling = msgspec.structs.replace(call.sampling, skip_special_tokens=False)
    return msgspec.structs.replace(call, sampling=sampling, constraint=shape), parser


def _with_calls(text: str, meta: Mapping[str, Any], call: Call, parser: str) -> Completion:
    """The completion of a reply to _held_to_tools(), with its calls; a reply that was cut calls nothing."""
    if was_cut(meta) or (meta.get("finish_reason") or {}).get("type") == "length":
        return Completion((text,), dict(meta))
    reader = FunctionCallParser(call.prompt.tools, parser, incremental=call.constraint is not None)
    text, calls = reader.parse_non_stream(text)
    if not calls:
        return Completion((text,), dict(meta))
    earlier = sum(len(message.tool_calls) for message in call.prompt.messages)
    meta_calls = [
        {"id": _id(parser, str(one.name), number), "name": one.name, "arguments": one.parameters}
        for number, one in enumerate(calls, earlier)
    ]
    return Completion((text,), {**meta, "tool_calls": meta_calls})


def _id(parser: str, name: str, number: int) -> str:
    """By its number in the conversation, so that a repeated run has the same prompts. Some templates take 9
    letters and digits only; Kimi's has its own form."""
    return f"functions.{name}:{number}" if parser == "kimi_k2" else f"call{number:05d}"


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Objects have no other members unless the schema allows them."""
    if "properties" in schema and not schema.keys() & {"allOf", "patternProperties", "unevaluatedProperties"}:
        schema.setdefault("additionalProperties", False)
    return schema


# -- in this process -----------------------------------------------------------------------------------------


ENGINES: Registry[Any] = Registry("engine", {"Engine": "runtime.api:Engine"}, extras={"Engine": "runtime"})


class EngineBackend(RuntimeBackend):
    """Runs programs on the bundled engine, in this process.

    engine  an Engine; or a model's name or path, for which an Engine is started, and closed together with
            this backend

    Other keyword arguments are passed to that Engine. An Engine can also be passed directly wherever a
    backend is expected.
    """

    name = peer = "engine"

    def __init__(self, engine: Any = "pocket", **kwargs: Any) -> None:
        super().__init__()
        self._owned = isinstance(engine, str)
        if kwargs and not self._owned:
            raise TypeError(
                "keyword arguments for an Engine need a model to start; this Engine is already running"
            )
        self.engine = ENGINES.load("Engine")(engine, **kwargs) if self._owned else engine

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.engine.config.model}"

    @property
    def model_info(self) -> dict[str, Any]:
        return {"model_path": str(self.engine.model_path)}

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The engine's chat template as a prefix and a suffix for each role, for inspection. None if it has
        none, or if only its Jinja text can express it. The engine itself renders the prompts."""
        return self.engine.chat_template  # type: ignore[no-any-return]

    async def submit(self, request: GenerateReqInput) -> list[GenerateOutput]:
        params = request.sampling_params
        if params is None or params.n == 1:
            return [await self._submit(request)]
        with self.faults(str(request.rid)):
            outcomes = await self.engine.submit_batch(request)
            if faults := [one for one in outcomes if isinstance(one, RuntimeFault)]:
                raise faults[0]
        return list(outcomes)

    def deltas(self, request: GenerateReqInput) -> AsyncIterator[OutputDelta]:
        return self.engine.stream_deltas(request)  # type: ignore[no-any-return]

    async def tool_parser(self) -> str | None:
        return self.engine.tool_parser  # type: ignore[no-any-return]

    async def precompile(self, constraints: Sequence[Constraint]) -> list[dict[str, Any]]:
        with self.faults():
            outcomes = await asyncio.to_thread(self.engine.precompile, constraints)
        return [
            {"ok": False, "error": one.to_dict()}
            if isinstance(one, RuntimeFault)
            else {"ok": True, **msgspec.to_builtins(one)}
            for one in outcomes
        ]

    async def count_tokens(self, prompt: Prompt) -> int | None:
        with self.faults():
            request = GenerateReqInput(**prompt.fields)
            return len(await asyncio.to_thread(self.engine.prompt_ids, request))

    async def aflush_cache(self) -> bool:
        with self.faults():
            return bool(await asyncio.to_thread(self.engine.flush_cache))

    async def prefix_cache(self) -> dict[str, Any] | None:
        with self.faults():
            return dict(await asyncio.to_thread(self.engine.prefix_cache))

    async def info(self) -> dict[str, Any]:
        with self.faults():
            state = await asyncio.to_thread(self.engine.state)
        path = str(self.engine.model_path)
        return {"backend": self.name, "model_path": path, "tokenizer_path": path, **state}

    async def aclose(self) -> None:
        if self._owned:
            await asyncio.to_thread(self.engine.close)

    async def _submit(self, request: GenerateReqInput) -> GenerateOutput:
        with self.faults(str(request.rid)):
            return await self.engine.submit(request)  # type: ignore[no-any-return]
