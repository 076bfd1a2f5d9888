"""EngineBackend: the bundled engine in this process. Loads it by name when a model is requested; knows none
of its internals.

Calls become GenerateReqInput. The runtime's faults become the language's errors, with status, request and
hint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec

from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput, new_rid
from runtime.protocol.registry import Registry
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.base import (
    Backend,
    Call,
    ChoiceCall,
    ChoiceScore,
    ChoiceScores,
    Completion,
    Delta,
    Prompt,
)
from sglang_dsl.backends.common.faults import BAD_OPTIONS_HINT, SAMPLED_OPTIONS, as_program_error, summed
from sglang_dsl.backends.common.local_tools import calls_tools, held_to_tools, with_calls
from sglang_dsl.backends.common.per_token import PerToken
from sglang_dsl.conversation.usage import TokenUsage
from sglang_dsl.errors import BackendError, Unsupported

ENGINES: Registry[Any] = Registry("engine", {"Engine": "runtime.api:Engine"}, extras={"Engine": "runtime"})


class EngineBackend(Backend):
    """Runs programs on the bundled engine, in this process.

    engine  an Engine; or a model's name or path, for which an Engine is started, and closed together with
            this backend

    Other keyword arguments are passed to that Engine. An Engine can also be passed directly wherever a
    backend is expected.
    """

    name = "engine"
    calls_tools = True

    def __init__(self, engine: Any = "pocket", **kwargs: Any) -> None:
        self._owned = isinstance(engine, str)
        if kwargs and not self._owned:
            raise TypeError(
                "keyword arguments for an Engine need a model to start; this Engine is already running"
            )
        self._engine = ENGINES.load("Engine")(engine, **kwargs) if self._owned else engine
        self.token_usage = TokenUsage()

    @property
    def identity(self) -> str:
        return f"{self.name}:{self._engine.config.model}"

    @property
    def model_info(self) -> dict[str, Any]:
        return {"model_path": str(self._engine.model_path)}

    @property
    def engine(self) -> Any:
        """The engine."""
        return self._engine

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The engine's chat template as a prefix and a suffix for each role, for inspection. None if it has
        none, or if only its Jinja text can express it. The engine itself renders the prompts."""
        template: ChatTemplate | None = self._engine.chat_template
        return template

    async def generate(self, call: Call) -> Completion:
        if calls_tools(call):
            held, parser = held_to_tools(call, self._engine.tool_parser, self.name)
            output = await self._submit(self._request(held, 0))
            self.token_usage.count(output.meta)
            return with_calls(output.text, output.meta, held, parser)
        requests = [self._request(call, index) for index in range(call.n)]
        if call.n > 1:
            # So that the samples share the prompt instead of each computing it.
            await self.commit(call.prompt)
        outputs = await _all([self._submit(request) for request in requests])
        metas = [dict(output.meta) for output in outputs]
        meta = summed(metas) if call.n > 1 else metas[0]
        self.token_usage.count(meta)
        return Completion(tuple(out.text for out in outputs), meta)

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        if call.n != 1:
            raise Unsupported("a stream holds one text", hint="use n=1, or run without stream")
        if calls_tools(call):
            async for delta in self.whole(call):
                yield delta
            return
        request = self._request(call, 0)
        request.stream = True
        lists = PerToken()
        with faults(str(request.rid)):
            answers: Any = self._engine.stream_deltas(request)
            async with aclosing(answers):
                async for output in answers:
                    lists.add(output.meta, replaced=output.replaced)
                    if output.finished:
                        self.token_usage.count(output.meta)
                    if output.text or output.finished:
                        whole = lists.whole(output.meta) if output.finished else None
                        yield Delta(output.text, whole, lists.piece(output.meta))

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        request = GenerateReqInput(
            choices=list(call.choices),
            unconditional=call.unconditional,
            timeout_s=call.timeout,
            **_prompt(call.prompt),
        )
        output = await self._submit(request)
        if output.choices is None:
            raise BackendError("the engine returned a choice without scores", request_id=str(request.rid))
        scores = (
            ChoiceScore(
                tuple(scored.logprobs),
                tuple(scored.token_ids),
                None if scored.unconditional is None else tuple(scored.unconditional),
                token_texts=tuple(scored.token_texts or ()),
            )
            for scored in output.choices
        )
        self.token_usage.count(output.meta)
        return ChoiceScores(tuple(scores), dict(output.meta))

    async def commit(self, prompt: Prompt) -> None:
        await self._submit(
            GenerateReqInput(sampling_params=SamplingParams(max_new_tokens=0), **_prompt(prompt))
        )

    async def precompile(self, constraints: Sequence[Constraint]) -> list[dict[str, Any]]:
        with faults(None):
            told = await asyncio.to_thread(self._engine.precompile, constraints)
        return [
            {"ok": False, "error": one.to_dict()}
            if isinstance(one, RuntimeFault)
            else {"ok": True, **msgspec.to_builtins(one)}
            for one in told
        ]

    async def count_tokens(self, prompt: Prompt) -> int | None:
        with faults(None):
            return len(await asyncio.to_thread(self._engine.prompt_ids, GenerateReqInput(**_prompt(prompt))))

    async def aflush_cache(self) -> bool:
        with faults(None):
            return bool(await asyncio.to_thread(self._engine.flush_cache))

    async def prefix_cache(self) -> dict[str, Any] | None:
        with faults(None):
            return dict(await asyncio.to_thread(self._engine.prefix_cache))

    async def info(self) -> dict[str, Any]:
        with faults(None):
            state = await asyncio.to_thread(self._engine.state)
        path = str(self._engine.model_path)
        return {"backend": self.name, "model_path": path, "tokenizer_path": path, **state}

    async def aclose(self) -> None:
        if self._owned:
            await asyncio.to_thread(self._engine.close)

    def _request(self, call: Call, index: int) -> GenerateReqInput:
        """The request of the `index`-th sample. Raises Unsupported for options that no request has."""
        if unknown := sorted(set(call.options) - SAMPLED_OPTIONS):
            raise Unsupported(
                f"the engine does not take {', '.join(unknown)}", backend=self.name, hint=BAD_OPTIONS_HINT
            )
        sampling = call.sampling
        if sampling.seed is not None and index:
            # The samples of one call must differ although the call has one seed.
            sampling = SamplingParams(**{**_fields(sampling), "seed": (sampling.seed + index) % 2**63})
        return GenerateReqInput(
            sampling_params=sampling,
            constraint=call.constraint,
            return_logprob=call.return_logprob,
            logprob_start_len=call.logprob_start_len,
            top_logprobs_num=call.top_logprobs,
            timeout_s=call.timeout,
            **_prompt(call.prompt),
            **call.options,
        )

    async def _submit(self, request: GenerateReqInput) -> GenerateOutput:
        with faults(str(request.rid)):
            output: GenerateOutput = await self._engine.submit(request)
            return output


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """The request's fields for the prompt, and an id by which errors name the request."""
    text = prompt.plain_text
    said: dict[str, Any] = {"messages": list(prompt.messages)} if text is None else {"text": text}
    if text is None and prompt.tools:
        said["tools"] = list(prompt.tools)
    return {"rid": new_rid(), **said}


async def _all(work: list[Any]) -> list[GenerateOutput]:
    """Results in order; the first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


@contextmanager
def faults(request_id: str | None) -> Any:
    """The runtime's faults as the language's errors."""
    try:
        yield
    except RuntimeFault as fault:
        raise as_program_error(fault, EngineBackend.name, request_id) from fault
