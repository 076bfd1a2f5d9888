"""EngineBackend: the bundled engine in this process. Loads it by name when a model is requested; knows none
of its internals.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import msgspec

from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput, OutputDelta, new_rid
from runtime.protocol.registry import Registry
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.base import Prompt
from sglang_dsl.backends.common.native import prompt_fields
from sglang_dsl.backends.common.runtime import RuntimeBackend

ENGINES: Registry[Any] = Registry("engine", {"Engine": "runtime.api:Engine"}, extras={"Engine": "runtime"})
_OF_PROMPT = ("text", "messages", "tools", "template_kwargs", "allow_control_tokens", "suffix", "extra_key")
"""Fields of a request that say what its prompt is, and where it is cached."""


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
        self._engine = ENGINES.load("Engine")(engine, **kwargs) if self._owned else engine

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

    async def submit(self, request: GenerateReqInput) -> list[GenerateOutput]:
        params = request.sampling_params
        if params is None or params.n == 1:
            return [await self._submit(request)]
        # First the prompt alone, so that the samples share it instead of each computing it.
        await self._submit(_prompt_alone(request))
        return await _all([self._submit(_sample(request, index)) for index in range(params.n)])

    def deltas(self, request: GenerateReqInput) -> AsyncIterator[OutputDelta]:
        answers: AsyncIterator[OutputDelta] = self._engine.stream_deltas(request)
        return answers

    async def tool_parser(self) -> str | None:
        parser: str | None = self._engine.tool_parser
        return parser

    async def precompile(self, constraints: Sequence[Constraint]) -> list[dict[str, Any]]:
        with self.faults():
            outcomes = await asyncio.to_thread(self._engine.precompile, constraints)
        return [
            {"ok": False, "error": one.to_dict()}
            if isinstance(one, RuntimeFault)
            else {"ok": True, **msgspec.to_builtins(one)}
            for one in outcomes
        ]

    async def count_tokens(self, prompt: Prompt) -> int | None:
        with self.faults():
            request = GenerateReqInput(**prompt_fields(prompt))
            return len(await asyncio.to_thread(self._engine.prompt_ids, request))

    async def aflush_cache(self) -> bool:
        with self.faults():
            return bool(await asyncio.to_thread(self._engine.flush_cache))

    async def prefix_cache(self) -> dict[str, Any] | None:
        with self.faults():
            return dict(await asyncio.to_thread(self._engine.prefix_cache))

    async def info(self) -> dict[str, Any]:
        with self.faults():
            state = await asyncio.to_thread(self._engine.state)
        path = str(self._engine.model_path)
        return {"backend": self.name, "model_path": path, "tokenizer_path": path, **state}

    async def aclose(self) -> None:
        if self._owned:
            await asyncio.to_thread(self._engine.close)

    async def _submit(self, request: GenerateReqInput) -> GenerateOutput:
        with self.faults(str(request.rid)):
            output: GenerateOutput = await self._engine.submit(request)
            return output


def _prompt_alone(request: GenerateReqInput) -> GenerateReqInput:
    """A request that puts the prompt of `request` into the prefix cache."""
    fields = {name: getattr(request, name) for name in _OF_PROMPT}
    return GenerateReqInput(rid=new_rid(), sampling_params=SamplingParams(max_new_tokens=0), **fields)


def _sample(request: GenerateReqInput, index: int) -> GenerateReqInput:
    """The request for one sample of a request with n > 1. With one seed, each sample has its own seed."""
    params: SamplingParams = request.sampling_params
    seed = None if params.seed is None else (params.seed + index) % 2**63
    one = msgspec.structs.replace(params, n=1, seed=seed)
    return msgspec.structs.replace(request, rid=new_rid(), sampling_params=one)


async def _all(calls: Sequence[Coroutine[Any, Any, GenerateOutput]]) -> list[GenerateOutput]:
    """Results in order; the first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]
