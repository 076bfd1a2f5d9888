"""EngineBackend: the bundled engine in this process. Finds it by name when asked for a model; knows none of
its insides.

Calls become GenerateReqInput; the runtime's faults become the language's errors, with status, request and
hint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, contextmanager
from typing import Any

from runtime.protocol.errors import Aborted, DeadlineExceeded, RuntimeFault, UnsupportedConstraint
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput
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
from sglang_dsl.errors import BackendError, ProgramCancelled, ProgramError, Timeout, Unsupported

ENGINES: Registry[Any] = Registry("engine", {"Engine": "runtime.api:Engine"}, extras={"Engine": "runtime"})

# Options of a call that are fields of a request.
_OPTIONS = frozenset(
    {"tools", "template_kwargs", "allow_control_tokens", "priority", "extra_key", "jump_forward"}
)
_KINDS: tuple[tuple[type[RuntimeFault], type[ProgramError]], ...] = (
    (UnsupportedConstraint, Unsupported),
    (DeadlineExceeded, Timeout),
    (Aborted, ProgramCancelled),
    (RuntimeFault, BackendError),
)
_SUMMED = ("completion_tokens", "jumped_tokens", "decode_steps")


class EngineBackend(Backend):
    """`engine`: an Engine, or a model's name or path, for which one is started (and closed with this
    backend); further words go to that Engine."""

    name = "engine"

    def __init__(self, engine: Any = "pocket", **words: Any) -> None:
        self._owned = isinstance(engine, str)
        if words and not self._owned:
            raise TypeError("words for an engine need a model to start; this one runs already")
        self._engine = ENGINES.load("Engine")(engine, **words) if self._owned else engine

    @property
    def engine(self) -> Any:
        """The engine itself."""
        return self._engine

    async def generate(self, call: Call) -> Completion:
        requests = [self._request(call, index) for index in range(call.n)]
        if call.n > 1:
            # So that the samples share the prompt instead of each computing it.
            await self.commit(call.prompt)
        outputs = await _all([self._submit(request) for request in requests])
        meta = dict(outputs[0].meta)
        if call.n > 1:
            meta |= {key: sum(int(out.meta.get(key) or 0) for out in outputs) for key in _SUMMED}
            meta["samples"] = [dict(out.meta) for out in outputs]
        return Completion(tuple(out.text for out in outputs), meta)

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        if call.n != 1:
            raise Unsupported("a stream holds one text", hint="use n=1, or run without stream")
        request = self._request(call, 0)
        request.stream = True
        sent = 0
        with faults(request.rid):
            answers: Any = self._engine.stream(request)
            async with aclosing(answers):
                async for output in answers:
                    # The engine's text is cumulative and never shrinks.
                    text, sent = output.text[sent:], len(output.text)
                    finished = output.meta.get("finish_reason") is not None
                    if text or finished:
                        yield Delta(text, dict(output.meta) if finished else None)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        request = GenerateReqInput(
            choices=list(call.choices),
            unconditional=call.unconditional,
            timeout_s=call.timeout,
            **_prompt(call.prompt),
        )
        output = await self._submit(request)
        if output.choices is None:
            raise BackendError("the engine answered a choice without scores", request_id=request.rid)
        scores = (
            ChoiceScore(
                tuple(scored.logprobs),
                tuple(scored.token_ids),
                None if scored.unconditional is None else tuple(scored.unconditional),
            )
            for scored in output.choices
        )
        return ChoiceScores(tuple(scores), dict(output.meta))

    async def commit(self, prompt: Prompt) -> None:
        await self._submit(
            GenerateReqInput(sampling_params=SamplingParams(max_new_tokens=0), **_prompt(prompt))
        )

    async def flush_cache(self) -> bool:
        with faults(None):
            return bool(await asyncio.to_thread(self._engine.flush_cache))

    async def info(self) -> dict[str, Any]:
        with faults(None):
            state = await asyncio.to_thread(self._engine.state)
        return {"backend": self.name, "model_path": str(self._engine.model_path), **state}

    async def aclose(self) -> None:
        if self._owned:
            await asyncio.to_thread(self._engine.close)

    def _request(self, call: Call, index: int) -> GenerateReqInput:
        """The request of the `index`-th sample. Raises Unsupported for options that no request has."""
        if unknown := sorted(set(call.options) - _OPTIONS):
            raise Unsupported(f"the engine does not take {', '.join(unknown)}", backend=self.name)
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
        with faults(request.rid):
            output: GenerateOutput = await self._engine.submit(request)
            return output


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def _prompt(prompt: Prompt) -> dict[str, Any]:
    text = prompt.plain_text
    return {"messages": list(prompt.messages)} if text is None else {"text": text}


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
        kind = next(kind for fault_kind, kind in _KINDS if isinstance(fault, fault_kind))
        message = f"{fault.where}: {fault.message}" if fault.where else fault.message
        raise kind(
            message,
            backend=EngineBackend.name,
            request_id=request_id,
            status=fault.status,
            retryable=fault.retryable,
            hint=fault.hint,
        ) from fault
