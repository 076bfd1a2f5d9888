"""The native routes for text and vectors: /generate, /encode and /classify.

POST /generate {"text": "...", "sampling_params": {...}, "stream": true}
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from runtime.protocol.errors import Aborted, BadRequest, RuntimeFault
from runtime.protocol.io_struct import EmbeddingOutput, GenerateOutput, OutputDelta
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.protocol.sampling import SAMPLING_KEYS
from runtime.server.context import RouteGroup, serves
from runtime.server.http.body import json_type, known_fields, to_struct
from runtime.server.http.errors import error_body
from runtime.server.http.ignored import may_ignore
from runtime.server.http.openapi import Operation, body_schema
from runtime.server.http.sse import DONE, event, while_connected

INTERNAL = ("http_worker_ipc",)
"""Fields that only processes of the server set."""
PER_ITEM = (
    "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "output_token_origins",
)  # fmt: skip
"""Lists in a meta_info with one entry per output token."""
_INCREMENTAL = ("stream_output", "incremental_streaming_output")
_SAMPLING_FIELDS = frozenset(SAMPLING_KEYS)

_TYPES = {"sampling_params": {"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "null"}]}}
_FLAGS = {name: {"type": ["boolean", "null"]} for name in _INCREMENTAL}
_GENERATE_SCHEMA = body_schema(GenerateReqInput, without=INTERNAL, plus=_FLAGS, types=_TYPES)
_ENCODE_SCHEMA = body_schema(EmbeddingReqInput, without=INTERNAL, types=_TYPES)
_GENERATE_FIELDS, _ENCODE_FIELDS = _GENERATE_SCHEMA.names, _ENCODE_SCHEMA.names


class GenerateAnswer(msgspec.Struct):
    """One prompt's answer; a list of these for a batch or n > 1. If it failed it has an `error`, a
    finish_reason of type "abort", and the text before it was cancelled, none after other errors."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | msgspec.UnsetType = msgspec.UNSET
    choices: Any = msgspec.UNSET
    error: Any = msgspec.UNSET


class EncodeAnswer(msgspec.Struct):
    """One text's vector; a list of these for a batch."""

    embedding: list[float]
    meta_info: dict[str, Any]
    error: Any = msgspec.UNSET


_GENERATE = Operation(
    "Generate text for one prompt or several", _GENERATE_SCHEMA, GenerateAnswer | list[GenerateAnswer],
    stream=True, errors=(499, 504),
)  # fmt: skip


def _vectors(summary: str) -> Operation:
    return Operation(summary, _ENCODE_SCHEMA, EncodeAnswer | list[EncodeAnswer], errors=(499, 504))


class Generate(RouteGroup):
    @serves(_GENERATE, "POST /generate", "PUT /generate")
    async def generate(self, request: Request) -> Any:
        body = await self._ctx.read(request, GenerateReqInput)
        req, incremental = await self._ctx.build(body, self._generating)
        if req.stream:
            return self._ctx.event_stream(self._events(req, incremental))
        if req.is_single:
            return await while_connected(request, self._one(req))
        outcomes = await while_connected(request, self._ctx.manager.submit_batch(req))
        raise_if_all_failed([outcome for outcome in outcomes if not isinstance(outcome, Aborted)])
        return [
            _failed(outcome, req[index].rid) if isinstance(outcome, RuntimeFault) else answer_of(outcome)
            for index, outcome in enumerate(outcomes)
        ]

    def _generating(self, body: dict[str, Any]) -> tuple[GenerateReqInput, bool]:
        """The request of a body, and whether its stream sends only new text. Raises BadRequest."""
        data = dict(known_fields(body, _GENERATE_FIELDS))
        data["sampling_params"] = _without_unknown(data.get("sampling_params"))
        incremental = self._ctx.config.incremental_streaming
        for name in _INCREMENTAL:
            value = data.pop(name, None)
            if value is not None and not isinstance(value, bool):
                raise BadRequest(f"must be a boolean, got {json_type(value)}", where=name)
            incremental = incremental if value is None else value
        return self._ctx.normalized(to_struct(data, GenerateReqInput)), incremental

    async def _one(self, req: GenerateReqInput) -> GenerateAnswer:
        try:
            return answer_of(await self._ctx.manager.submit(req))
        except Aborted as fault:
            if fault.partial is None:
                raise
            return _failed(fault, req.rid)

    @serves(_vectors("A classifier's scores of one text or several"), "POST /classify", "PUT /classify")
    async def classify(self, request: Request) -> Any:
        if not self._ctx.model.architecture.endswith("ForSequenceClassification"):
            raise BadRequest(
                f"{self._ctx.served_name} is not a classifier", where="model", hint="/encode returns vectors"
            )
        return await self.encode(request)

    @serves(_vectors("Vectors of one text or several"), "POST /encode", "PUT /encode")
    async def encode(self, request: Request) -> Any:
        def embedding(data: dict[str, Any]) -> EmbeddingReqInput:
            return self._ctx.normalized(to_struct(known_fields(data, _ENCODE_FIELDS), EmbeddingReqInput))

        req = await self._ctx.build(await self._ctx.read(request, EmbeddingReqInput), embedding)
        outputs = await while_connected(request, self._ctx.manager.embed(req))
        raise_if_all_failed(outputs)
        answers = []
        for output in outputs:
            if isinstance(output, RuntimeFault):
                answers.append(EncodeAnswer([], {}, error=error_body(output)["error"]))
            else:
                counts = {"prompt_tokens": output.prompt_tokens, "cached_tokens": output.cached_tokens}
                answers.append(EncodeAnswer(output.embedding, {"id": output.rid, **counts, **output.meta}))
        return answers[0] if req.is_single else answers

    async def _events(self, req: GenerateReqInput, incremental: bool) -> AsyncGenerator[bytes, None]:
        so_far = [None if incremental else SoFar() for _ in range(len(req))]
        single = req.is_single
        async with contextlib.aclosing(self._ctx.manager.stream_batch(req)) as outputs:
            async for index, outcome in outputs:
                number = None if single else index
                match outcome:
                    case Aborted(partial=OutputDelta() as output):
                        yield _event(_failed(outcome, output.meta["id"], number), output, so_far[index])
                    case RuntimeFault() if single:
                        raise outcome
                    case RuntimeFault():
                        yield event(_failed(outcome, req[index].rid, number))
                    case output:
                        yield _event(answer_of(output, number), output, so_far[index])
        yield DONE


def _without_unknown(params: Any) -> Any:
    """sampling_params, or a list of them, without unknown keys that may be ignored."""
    if isinstance(params, list):
        return [_without_unknown(one) for one in params]
    if not isinstance(params, dict) or params.keys() <= _SAMPLING_FIELDS:
        return params
    return {
        name: value
        for name, value in params.items()
        if name in _SAMPLING_FIELDS or not may_ignore(str(name), value, "sampling_params")
    }


class SoFar:
    """All that one stream has sent, as JSON: what was sent is neither encoded again nor copied more than
    once."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ids = _JsonList()
        self._lists = {name: _JsonList() for name in PER_ITEM}

    def event(self, answer: GenerateAnswer, replaced: int) -> bytes:
        """The event of `answer`, a delta, with all so far; `replaced`: see OutputDelta."""
        self._text += msgspec.json.encode(answer.text)[1:-1]
        self._ids.add(answer.output_ids, replaced)
        meta = answer.meta_info
        for name, some in self._lists.items():
            if name in meta:
                some.add(meta[name], replaced)
                meta[name] = msgspec.Raw(b"".join((b"[", some.data, b"]")))
        answer.text, answer.output_ids = "", []
        rest = msgspec.json.encode(answer)[len(_EMPTY) :]
        parts = (b'data: {"text":"', self._text, b'","output_ids":[', self._ids.data, b"],", rest, b"\n\n")
        return b"".join(parts)


_EMPTY = b'{"text":"","output_ids":[],'
"""The beginning of a GenerateAnswer without text and ids."""


class _JsonList:
    """A list that grows at its end. data: its items as JSON, without the brackets."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self.data = bytearray()

    def add(self, items: Sequence[Any], replaced: int) -> None:
        """Replace the last `replaced` items by `items`."""
        if replaced:
            del self._items[max(0, len(self._items) - replaced) :]
            self.data[:] = msgspec.json.encode(self._items)[1:-1]
        if items:
            if self._items:
                self.data += b","
            self.data += msgspec.json.encode(items)[1:-1]
            self._items += items


def _event(answer: GenerateAnswer, output: OutputDelta, so_far: SoFar | None) -> bytes:
    """The event of an answer, with all so far, or without what replaces ids that were sent."""
    if so_far is not None:
        return so_far.event(answer, output.replaced)
    if output.replaced:
        answer.output_ids = answer.output_ids[output.replaced :]
        answer.meta_info |= {
            name: answer.meta_info[name][output.replaced :] for name in PER_ITEM if name in answer.meta_info
        }
    return event(answer)


def raise_if_all_failed(outcomes: Sequence[GenerateOutput | EmbeddingOutput | RuntimeFault]) -> None:
    """If all items of a batch failed, the first error is the answer; else each item has its own."""
    faults = [outcome for outcome in outcomes if isinstance(outcome, RuntimeFault)]
    if faults and len(faults) == len(outcomes):
        raise faults[0]


def answer_of(output: GenerateOutput, index: int | None = None) -> GenerateAnswer:
    return GenerateAnswer(
        text=output.text,
        output_ids=output.output_ids,
        meta_info=output.meta,
        index=msgspec.UNSET if index is None else index,
        choices=msgspec.UNSET if output.choices is None else output.choices,
    )


def _failed(fault: RuntimeFault, rid: Any, index: int | None = None) -> GenerateAnswer:
    """The answer of a failed item; of a cancelled one with its output until then."""
    reason = {"type": "abort", "message": str(fault), "status_code": fault.status, "err_type": fault.code}
    known = fault.partial if isinstance(fault, Aborted) else None
    partial = known if isinstance(known, GenerateOutput) else GenerateOutput("", [], {"id": rid})
    answer = answer_of(partial, index)
    answer.meta_info = {**partial.meta, "finish_reason": reason}
    answer.error = error_body(fault)["error"]
    return answer
