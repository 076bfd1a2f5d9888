"""Ollama's interface: /api/chat and /api/generate (lines of JSON, or whole), /api/embed, and information
about the model: /api/tags, /api/ps, /api/show, /api/version. Models are neither fetched nor changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from runtime.formats.chat.render import conversation
from runtime.formats.reply import ContentDelta, ReasoningDelta
from runtime.protocol.console import version
from runtime.protocol.errors import BadRequest, RuntimeFault
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.errors import mapped_errors
from runtime.server.http.openapi import Operation
from runtime.server.http.sse import EventStream, while_connected
from runtime.server.ollama import params
from runtime.server.openai.messages import tool_use
from runtime.server.replies import Generation, continued, embed, shown_marks
from runtime.server.tool_use import ToolUse

PREFIXES = ("/api/",)
"""Paths whose errors have Ollama's shape."""
LINES = {"content-type": "application/x-ndjson"}


class OllamaError(msgspec.Struct):
    error: str


class OllamaAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """message (/api/chat) or response (/api/generate): what is new, in streams. Durations, in nanoseconds, at
    the end."""

    model: str
    created_at: str
    done: bool
    message: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    response: str | msgspec.UnsetType = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    done_reason: str | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


class OllamaVectors(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaModels(msgspec.Struct):
    models: list[dict[str, Any]]


class OllamaVersion(msgspec.Struct):
    version: str


def error_body(fault: RuntimeFault) -> dict[str, Any]:
    return {"error": str(fault)}


def line(data: Any) -> bytes:
    return msgspec.json.encode(data) + b"\n"


def _about(summary: str, response: Any, request: Any = None, **more: Any) -> Operation:
    summary = f"{summary} (Ollama API)"
    return Operation(summary, request=request, response=response, error=OllamaError, tag="ollama", **more)


_ERRORS = (404, 501, 504)
_CHAT = _about("Chat completion", OllamaAnswer, params.OllamaChat, errors=_ERRORS, lines=True)
_GENERATE = _about("Text completion", OllamaAnswer, params.OllamaGenerate, errors=_ERRORS, lines=True)


class Ollama(RouteGroup):
    def __init__(self, ctx: ServerContext) -> None:
        super().__init__(ctx)
        self._began = _moment(ctx)

    @serves(_CHAT, "POST /api/chat")
    async def chat(self, request: Request) -> Any:
        return await self._answer(request, await self._ctx.admit(request, params.OllamaChat, self._job_of))

    @serves(_GENERATE, "POST /api/generate")
    async def generate(self, request: Request) -> Any:
        return await self._answer(
            request, await self._ctx.admit(request, params.OllamaGenerate, self._job_of)
        )

    def _job_of(self, body: params.OllamaChat | params.OllamaGenerate) -> _Job | OllamaAnswer:
        """A job; or the answer to a body without a prompt, by which clients load a model."""
        params.adapter_of(self._ctx, body.model)
        if isinstance(body, params.OllamaChat):
            if body.messages:
                return _Job(self._ctx, body, *_chat_of(self._ctx, body))
            part: dict[str, Any] = {"message": {"role": "assistant", "content": ""}}
        else:
            for name in ("template", "context"):
                if getattr(body, name):
                    raise BadRequest(
                        "is not supported: the model's own template is used; send messages for a "
                        "conversation",
                        where=name,
                    )
            if body.prompt:
                return _Job(self._ctx, body, *_text_of(self._ctx, body))
            part = {"response": ""}
        moment = _moment(self._ctx)
        return OllamaAnswer(model=body.model, created_at=moment, done=True, done_reason="load", **part)

    async def _answer(self, request: Request, job: _Job | OllamaAnswer) -> Any:
        if isinstance(job, OllamaAnswer):
            return job
        if job.streams:
            return EventStream(
                job.stream(), keep_alive_s=0.0, on_fault=lambda fault: line(error_body(fault)), headers=LINES
            )
        return await while_connected(request, job.whole())

    @serves(_about("Embeddings", OllamaVectors, params.OllamaEmbed, errors=_ERRORS), "POST /api/embed")
    async def embed(self, request: Request) -> OllamaVectors:
        model, req = await self._ctx.admit(request, params.OllamaEmbed, self._vectors_of)
        outputs = await while_connected(request, embed(self._ctx, req, {"text": "input"}))
        seconds = max((float(one.meta.get("e2e_latency", 0.0)) for one in outputs), default=0.0)
        return OllamaVectors(
            model=model,
            embeddings=[one.embedding for one in outputs],
            total_duration=_nanoseconds(seconds),
            load_duration=0,
            prompt_eval_count=sum(one.prompt_tokens for one in outputs),
        )

    def _vectors_of(self, body: params.OllamaEmbed) -> tuple[str, EmbeddingReqInput]:
        """The model's name as the client wrote it, and the request. Raises BadRequest."""
        adapter = params.adapter_of(self._ctx, body.model)
        texts: list[str | list[str]] = [body.input] if isinstance(body.input, str) else [*body.input]
        with mapped_errors({"text": "input"}):
            request = EmbeddingReqInput(text=texts, dimensions=body.dimensions, lora_path=adapter)
            return body.model, self._ctx.normalized(request)

    @serves(
        _about("Information about the model", {"type": "object"}, params.OllamaShow, errors=(404,)),
        "POST /api/show",
    )
    async def show(self, request: Request) -> dict[str, Any]:
        name = await self._ctx.admit(request, params.OllamaShow, lambda body: body.model or body.name)
        if not name:
            raise BadRequest("is missing", where="model")
        params.adapter_of(self._ctx, name)
        model = self._ctx.model
        family = model.model_type or "unknown"
        capabilities = {
            "completion": model.is_generation,
            "insert": model.is_generation,
            "embedding": not model.is_generation,
            "tools": model.tool_parser is not None,
            "thinking": self._ctx.manager.reasoning is not None,
            "vision": model.is_multimodal,
        }
        parameters = (f"{key} {json.dumps(value)}" for key, value in model.default_sampling.items())
        return {
            "modelfile": "",
            "license": "",
            "parameters": "\n".join(parameters),
            "template": model.template_name or "",
            "modified_at": self._began,
            "details": self._details(),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": model.context_length,
                f"{family}.embedding_length": model.hidden_size,
                f"{family}.vocab_size": model.vocab_size,
            },
            "capabilities": [name for name, has in capabilities.items() if has],
        }

    @serves(_about("The served model", OllamaModels), "GET /api/tags")
    async def tags(self, request: Request) -> OllamaModels:
        model = self._ctx.model
        facts = f"{model.path}\n{model.architecture}\n{model.weight_version}"
        shared = {
            "modified_at": self._began,
            "expires_at": "0001-01-01T00:00:00Z",
            "size": _size(Path(model.path)),
            "size_vram": 0,
            "digest": hashlib.sha256(facts.encode()).hexdigest(),
            "details": self._details(),
        }
        return OllamaModels([{"name": name, "model": name, **shared} for name in self._ctx.served_names])

    @serves(_about("The loaded model", OllamaModels), "GET /api/ps")
    async def loaded(self, request: Request) -> OllamaModels:
        return await self.tags(request)

    @serves(_about("The version of this server", OllamaVersion), "GET /api/version")
    async def version(self, request: Request) -> OllamaVersion:
        return OllamaVersion(version())

    def _details(self) -> dict[str, Any]:
        model = self._ctx.model
        family = model.model_type or "unknown"
        return {
            "parent_model": "",
            "format": "gguf" if model.path.endswith(".gguf") else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        }


def _chat_of(ctx: ServerContext, body: params.OllamaChat) -> tuple[GenerateReqInput, ToolUse]:
    history = params.messages_of(body.messages)
    sampling = params.sampling_of(ctx, body)
    tools, use = tool_use(ctx.model, body.tools, None, None, history, sampling)
    sampling |= use.sampling
    return _request(ctx, body, sampling, messages=continued(history), **tools), use


def _text_of(ctx: ServerContext, body: params.OllamaGenerate) -> tuple[GenerateReqInput, ToolUse]:
    sampling = params.sampling_of(ctx, body)
    if body.suffix or body.raw or ctx.model.template_source == "none":
        for name in ("system", "images"):
            if getattr(body, name):
                raise BadRequest("needs a prompt that the chat template renders", where=name)
        return _request(ctx, body, sampling, text=body.prompt, suffix=body.suffix or None), ToolUse()
    system = [Message("system", body.system)] if body.system else []
    user = Message("user", params.content_of(body.prompt, body.images, "images"))
    return _request(ctx, body, sampling, messages=conversation([*system, user])), ToolUse()


def _request(
    ctx: ServerContext, body: params.OllamaRequest, sampling: dict[str, Any], **prompt: Any
) -> GenerateReqInput:
    thinking = params.thinking_of(ctx, body)
    if "messages" not in prompt:
        thinking.pop("template_kwargs", None)
    return GenerateReqInput(
        sampling_params={**sampling, **shown_marks(ctx, bool(body.think) or None)},
        lora_path=params.adapter_of(ctx, body.model),
        stream=body.stream,
        **thinking,
        **prompt,
    )


class _Job:
    """One request, and how its reply becomes lines."""

    def __init__(
        self, ctx: ServerContext, body: params.OllamaRequest, request: GenerateReqInput, use: ToolUse
    ) -> None:
        self._ctx, self._body, self.streams = ctx, body, body.stream
        apart = bool(body.think) or None
        self._generation = Generation(
            ctx, request, params.NAMES, use, apart=apart, whole_calls=True, keep_aborted=True
        )

    async def whole(self) -> OllamaAnswer:
        await self._generation.run()
        [reply] = self._generation.replies
        return self._line(reply.content, reply.reasoning or "", calls=reply.calls, meta=reply.meta)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with self._generation.follow() as changes:
            async for _, reply in changes:
                for one in reply.events:
                    match one:
                        case ReasoningDelta(text=text):
                            yield line(self._line("", text))
                        case ContentDelta(text=text) if text:
                            yield line(self._line(text))
                if reply.meta.get("finish_reason") is not None:
                    if reply.calls and not reply.was_cut:  # they are sent whole
                        yield line(self._line("", calls=reply.calls))
                    yield line(self._line("", meta=reply.meta))

    def _line(
        self,
        text: str,
        thought: str = "",
        *,
        calls: Sequence[Sequence[str]] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> OllamaAnswer:
        """calls: (name, arguments). meta: of the whole reply, which ends with this line."""
        answer = OllamaAnswer(model=self._body.model, created_at=_moment(self._ctx), done=meta is not None)
        if isinstance(self._body, params.OllamaChat):
            answer.message = {"role": "assistant", "content": text}
            if thought:
                answer.message["thinking"] = thought
            if calls:
                answer.message["tool_calls"] = [
                    {"function": {"name": name, "arguments": _arguments(values)}} for name, values in calls
                ]
        else:
            answer.response = text
            if thought:
                answer.thinking = thought
        if meta is not None:
            _complete(answer, meta)
        return answer


def _arguments(text: str) -> Any:
    """As an object; what is not JSON stays text."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


def _complete(answer: OllamaAnswer, meta: Mapping[str, Any]) -> None:
    reason = (meta.get("finish_reason") or {}).get("type", "stop")
    total, first = float(meta.get("e2e_latency") or 0.0), float(meta.get("first_token_latency") or 0.0)
    answer.done_reason = reason
    answer.total_duration = _nanoseconds(total)
    answer.load_duration = 0
    answer.prompt_eval_count = int(meta.get("prompt_tokens") or 0)
    answer.prompt_eval_duration = _nanoseconds(max(0.0, first - float(meta.get("queue_time") or 0.0)))
    answer.eval_count = int(meta.get("completion_tokens") or 0)
    answer.eval_duration = _nanoseconds(max(0.0, total - first))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _moment(ctx: ServerContext) -> str:
    return datetime.fromtimestamp(ctx.clock(), UTC).isoformat().replace("+00:00", "Z")


def _size(path: Path) -> int:
    """Bytes of a checkpoint's files."""
    try:
        files = [path] if path.is_file() else list(path.iterdir())
        return sum(one.stat().st_size for one in files if one.is_file())
    except OSError:
        return 0
