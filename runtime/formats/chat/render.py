"""Messages -> the prompt's text: turns through a template, raw text verbatim between them, one open turn at
the end.

An open turn is rendered as a prefix which generation continues, for any role. It knows templates, not
tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from runtime.formats.chat.registry import CHAT_TEMPLATES
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.errors import TemplateError
from runtime.protocol.messages import RAW_ROLE, Message

_MARK = "\ue000open-turn\ue001"


class TextTemplate(Protocol):
    """A checkpoint's own template (runtime.formats.chat.jinja has the one for Jinja)."""

    @property
    def bos_token(self) -> str: ...

    @property
    def content_format(self) -> str: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str: ...


def render_prompt(
    messages: Sequence[Message],
    template: ChatTemplate | TextTemplate | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt's text. Only raw messages: their text, and no template is asked.

    An open assistant turn continues the template's own generation prompt, where it has one, so that the text
    of a turn that goes on extends the text it was begun with. Raises TemplateError: no template, an open turn
    that is not the last, content that is not text, a template that refuses, or one that rewrites earlier
    turns where raw text stands between turns.
    """
    for index, message in enumerate(messages[:-1]):
        if message.open and message.role != RAW_ROLE:
            raise TemplateError("only the last message can be open", where=f"messages[{index}]")
    if all(message.role == RAW_ROLE for message in messages):
        return "".join(_text(message, index) for index, message in enumerate(messages))
    if template is None:
        raise TemplateError(
            f"the messages have turns ({_roles(messages)}), and this model has no chat template",
            where="messages",
            hint=f"start the engine with chat_template= a built-in name ({', '.join(CHAT_TEMPLATES)}) or the "
            "path of a .jinja file, or prompt it with plain text",
        )
    if isinstance(template, ChatTemplate):
        _refuse_extras(messages, template, tools, template_kwargs)
        return _by_prefixes(messages, template)
    if not tools:
        return _Turns(template, None, template_kwargs).prompt(messages)
    wrapped, bare = _tool_shapes(tools)
    try:
        return _Turns(template, wrapped, template_kwargs).prompt(messages)
    except TemplateError as first:
        if _Turns.refusal_is_about_turns(first):
            raise
        try:
            return _Turns(template, bare, template_kwargs).prompt(messages)
        except TemplateError:
            raise first from None  # it was given what most templates take


def conversation(
    messages: Sequence[Message], *, add_generation_prompt: bool = True, continue_final_message: bool = False
) -> list[Message]:
    """The messages as a chat API's request means them, the turn to be written left open.

    continue_final_message: the last message is begun and to be continued; else, with add_generation_prompt, a
    reply is opened. Raises TemplateError where there is no message to continue.
    """
    made = list(messages)
    if continue_final_message:
        if not made or made[-1].role == RAW_ROLE:
            raise TemplateError("there is no last turn to continue", where="continue_final_message")
        made[-1] = msgspec.structs.replace(made[-1], open=True)
    elif add_generation_prompt and not (made and made[-1].open):
        made.append(Message("assistant", "", open=True))
    return made


def as_dict(message: Message, index: int = 0, content_format: str = "string") -> dict[str, Any]:
    """The message as chat templates expect it: tool-call arguments parsed, absent keys left out.

    content_format "openai": the template walks over the parts of the content itself.
    """
    content: Any = _text(message, index)
    if content_format == "openai" and not message.open and not isinstance(message.content, str):
        content = [{"type": "text", "text": part["text"]} for part in message.content]
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _by_prefixes(messages: Sequence[Message], template: ChatTemplate) -> str:
    pieces: list[str] = []
    history: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        text = _text(message, index)
        if message.role == RAW_ROLE:
            pieces.append(text)
            continue
        prefix, suffix = template.get_prefix_and_suffix(message.role, history)
        pieces.append(prefix + text if message.open else prefix + text + suffix)
        history.append({"role": message.role, "content": text})
    return "".join(pieces)


class _Turns:
    """One prompt through a template that only renders whole conversations."""

    def __init__(
        self,
        template: TextTemplate,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        self._template, self._tools, self._kwargs = template, tools, template_kwargs

    @staticmethod
    def refusal_is_about_turns(error: TemplateError) -> bool:
        """Whether another shape of the tools cannot help."""
        return (error.where or "").startswith("messages[")

    def prompt(self, messages: Sequence[Message]) -> str:
        pieces: list[str] = []
        turns: list[dict[str, Any]] = []
        rendered, counted = "", 0
        begins_raw = messages[0].role == RAW_ROLE
        for index, message in enumerate(messages):
            if message.role != RAW_ROLE:
                parts = not isinstance(message.content, str)
                turns.append(as_dict(message, index, self._template.content_format if parts else "string"))
                continue
            if len(turns) > counted:
                text = self._render(turns)
                pieces.append(_increment(rendered, text, index))
                rendered, counted = text, len(turns)
            pieces.append(_text(message, index))
        if len(turns) > counted:
            last = messages[-1]
            opened = last.open and last.role != RAW_ROLE
            text = self._open(turns[:-1], turns[-1], len(messages) - 1) if opened else self._render(turns)
            pieces.append(_increment(rendered, text, len(messages) - 1))
        return self._bos_first(pieces) if begins_raw else "".join(pieces)

    def _bos_first(self, pieces: list[str]) -> str:
        """The template's begin-of-text belongs before raw text that stands before the first turn."""
        bos = self._template.bos_token
        whole = "".join(pieces)
        if not bos or not any(piece.startswith(bos) for piece in pieces[1:]):
            return whole
        first = next(index for index, piece in enumerate(pieces) if index and piece.startswith(bos))
        return bos + "".join([*pieces[:first], pieces[first].removeprefix(bos), *pieces[first + 1 :]])

    def _open(self, before: list[dict[str, Any]], last: dict[str, Any], index: int) -> str:
        if "tool_calls" in last:
            raise TemplateError("an open turn cannot carry tool calls", where=f"messages[{index}]")
        closed = self._render(before) if before else ""
        if last["role"] == "assistant":
            offered = self._offered(before)
            if offered is not None and offered != closed:
                return offered + str(last["content"])
        text = str(last["content"])
        marked = self._render([*before, {**last, "content": text + _MARK}])
        if marked.count(_MARK) != 1:
            raise TemplateError(
                f"the chat template prints the content of a {last['role']!r} turn {marked.count(_MARK)} "
                "times; such a turn cannot be left open",
                where=f"messages[{index}]",
            )
        start = marked.partition(_MARK)[0]
        header = start.removeprefix(closed).removesuffix(text)
        # A template that only puts a space before the reply: models spell that space with their first word.
        if not header.strip() and start.startswith(closed) and (not text or text[0].isspace()):
            return closed + text
        return start

    def _offered(self, before: list[dict[str, Any]]) -> str | None:
        """The conversation with the template's generation prompt; None when it can't open with a reply."""
        if before:
            return self._render(before, add_generation_prompt=True)
        try:
            return self._render(before, add_generation_prompt=True)
        except TemplateError:
            return None

    def _render(self, turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
        return self._template.render(
            turns,
            add_generation_prompt=add_generation_prompt,
            tools=self._tools,
            template_kwargs=self._kwargs,
        )


def _increment(shorter: str, longer: str, index: int) -> str:
    if not longer.startswith(shorter):
        raise TemplateError(
            "the chat template is not append-only: the text of earlier turns changes when turns are added, "
            "so raw text cannot stand between them",
            where=f"messages[{index}]",
            hint='put the text into a turn, or choose an append-only template such as chat_template="chatml"',
        )
    return longer[len(shorter) :]


def _refuse_extras(
    messages: Sequence[Message],
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> None:
    """A prefix and suffix per role can say text; what it can't say is refused, not dropped."""
    hint = "use the checkpoint's own template"
    if tools:
        raise TemplateError(
            f"the chat template {template.name!r} has no place for tools", where="tools", hint=hint
        )
    if template_kwargs:
        raise TemplateError(
            f"the chat template {template.name!r} takes no variables", where="template_kwargs", hint=hint
        )
    for index, message in enumerate(messages):
        if message.tool_calls:
            raise TemplateError(
                f"the chat template {template.name!r} has no place for tool calls",
                where=f"messages[{index}]",
                hint=hint,
            )


def _tool_shapes(
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The tools as {"type": "function", "function": ...}, and as the functions alone."""
    wrapped = [tool if "function" in tool else _wrapped(tool) for tool in tools]
    return wrapped, [tool.get("function") or tool for tool in tools]


def _wrapped(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": tool} if "name" in tool else tool


def _text(message: Message, index: int) -> str:
    """Text of the content; several text parts are joined with one space."""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TemplateError(
                f"this model takes text only, got a part of type {part.get('type')!r}",
                where=f"messages[{index}].content",
            )
    return " ".join(part["text"] for part in message.content)


def _arguments(text: str) -> Any:
    """Many templates need an object; what is no JSON stays as it was."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(dict.fromkeys(message.role for message in messages if message.role != RAW_ROLE))
