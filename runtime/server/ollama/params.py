"""Ollama's bodies, and their fields as the runtime's. Source of the shapes: Ollama's API reference
(docs/api.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from runtime.protocol.errors import BadRequest, NotSupported
from runtime.protocol.messages import Message, ToolCall
from runtime.protocol.sampling import UNLIMITED
from runtime.server.context import ServerContext
from runtime.server.http.body import expect, json_type, known_fields
from runtime.server.http.ignored import is_empty, remark
from runtime.server.openai.messages import optional_text
from runtime.server.openai.params import check_model
from runtime.server.output_format import ANY_OBJECT
from runtime.server.replies import thinking_switch

_SAME = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
_OF_THE_MACHINE = (
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa",
    "low_vram", "f16_kv", "vocab_only", "logits_all", "penalize_newline", "repeat_last_n", "mirostat_eta",
    "mirostat_tau",
)  # fmt: skip
_FIXED = {"typical_p": 1.0, "tfs_z": 1.0, "mirostat": 0, "draft_num_predict": 0}
"""Options that must have their default."""
_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE = frozenset(
    {"role", "content", "images", "tool_calls", "tool_name", "tool_call_id", "thinking", "name"}
)
LATEST = ":latest"


class OllamaRequest(msgspec.Struct, kw_only=True):
    """keep_alive has no effect: the model stays loaded."""

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    think: bool | Literal["low", "medium", "high"] | None = None


class OllamaChat(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """Without messages: whether the model is loaded."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """prompt goes through the chat template, after `system`; raw: as it is. suffix: the text after the
    completion (fill-in-the-middle). Without a prompt: whether the model is loaded."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool = False
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class OllamaEmbed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """truncate: false = a text that is too long is refused, as by default."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None


class OllamaShow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    name: str | None = None
    verbose: bool = False


def adapter_of(ctx: ServerContext, name: str) -> str | None:
    """See check_model; Ollama's clients add ":latest" to names. Raises ModelNotFound."""
    return check_model(ctx, name.removesuffix(LATEST))


def sampling_of(ctx: ServerContext, body: OllamaRequest) -> dict[str, Any]:
    """The sampling_params of a body. Raises BadRequest, NotSupported."""
    sampling: dict[str, Any] = {**ctx.model.default_sampling, "max_new_tokens": UNLIMITED}
    options = known_fields(
        body.options or {},
        {*_SAME, "num_predict", "seed", "repeat_penalty", *_OF_THE_MACHINE, *_FIXED},
        "options",
    )
    for name, value in options.items():
        if is_empty(value):
            continue
        if name in _SAME:
            sampling[name] = value
        elif name in _FIXED:
            if value != _FIXED[name]:
                raise NotSupported(f"must be {_FIXED[name]}", where=f"options.{name}")
        elif name in _OF_THE_MACHINE:
            remark(f"options.{name} has no effect")
        elif not isinstance(value, (int, float)) or isinstance(value, bool):
            raise BadRequest(f"must be a number, got {json_type(value)}", where=f"options.{name}")
        elif name == "repeat_penalty":
            sampling["repetition_penalty"] = value
        elif name == "num_predict" and value >= 0:
            # Ollama ends at the end of the context, whatever the limit.
            sampling["max_new_tokens"] = value if value < ctx.model.context_length else UNLIMITED
        elif name == "seed" and value >= 0:
            sampling["seed"] = value
    if body.keep_alive is not None:
        remark("keep_alive has no effect: the model stays loaded")
    match body.format:
        case None | "":
            pass
        case "json":
            sampling["json_schema"] = ANY_OBJECT
        case {**schema}:
            sampling["json_schema"] = schema
        case _:
            raise BadRequest('must be "json" or a JSON schema', where="format")
    return sampling


NAMES = {
    "max_new_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty",
    "json_schema": "format", "text": "prompt", **{name: f"options.{name}" for name in (*_SAME, "seed")},
}  # fmt: skip
"""The runtime's names of fields -> those of these routes."""


def thinking_of(ctx: ServerContext, body: OllamaRequest) -> dict[str, Any]:
    """Fields of a GenerateReqInput for `think`. Raises BadRequest."""
    if body.think is None:
        return {"require_reasoning": None}
    if body.think and ctx.manager.reasoning is None:
        raise BadRequest(f"{body.model[:200]!r} does not support thinking", where="think")
    variables: dict[str, Any] = thinking_switch(ctx, bool(body.think))
    if variables and isinstance(body.think, str):
        variables["reasoning_effort"] = body.think
    return {"require_reasoning": bool(body.think), "template_kwargs": variables or None}


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Raises BadRequest with the path of what is wrong."""
    return [_message(one, f"messages[{index}]") for index, one in enumerate(messages)]


def _message(one: Mapping[str, Any], path: str) -> Message:
    one = known_fields(one, _MESSAGE, path)
    role = one.get("role")
    if role not in _ROLES:
        raise BadRequest(f"must be one of {', '.join(_ROLES)}; got {role!r:.80}", where=f"{path}.role")
    content = expect(one.get("content") or "", str, f"{path}.content", "must be a string")
    called = expect(one.get("tool_calls") or [], list, f"{path}.tool_calls", "must be a list")
    calls = tuple(_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(called))
    if calls and role != "assistant":
        raise BadRequest("only an assistant's message has tool calls", where=f"{path}.tool_calls")
    return Message(
        role=str(role),
        content=content_of(content, one.get("images"), f"{path}.images"),
        name=optional_text(one, "tool_name", path) or optional_text(one, "name", path),
        tool_calls=calls,
        tool_call_id=optional_text(one, "tool_call_id", path),
        reasoning_content=optional_text(one, "thinking", path) if role == "assistant" else None,
    )


def content_of(text: str, images: Any, path: str) -> str | list[dict[str, Any]]:
    """A text, and before it the images, which Ollama's clients send in base64."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise BadRequest("must be a list of images in base64", where=path)
    kinds = {"iVBOR": "png", "R0lG": "gif", "UklG": "webp"}
    parts: list[dict[str, Any]] = []
    for image in images:
        kind = next((kind for start, kind in kinds.items() if image.startswith(start)), "jpeg")
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{image}"}})
    return [*parts, {"type": "text", "text": text}]


def _call(call: Any, path: str) -> ToolCall:
    match call:
        case {"function": {"name": str(name), **rest}}:
            arguments = rest.get("arguments") or {}
            identity = call.get("id")
            text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            return ToolCall(name, text, identity if isinstance(identity, str) else None)
        case _:
            raise BadRequest('must be {"function": {"name", "arguments"}}', where=path)
