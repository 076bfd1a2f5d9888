"""Messages -> the prompt: its text, and the media it refers to. Turns are rendered with a template, raw text
is copied between them, and the last turn may be open.

An open turn is rendered as a prefix that generation continues, for any role. It knows templates, but no
tokenizers, nor which media a model supports.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from runtime.formats.chat.content import (
    MEDIA_SLOTS,
    check_media,
    check_parts,
    process_content_for_template_format,
)
from runtime.formats.chat.registry import CHAT_TEMPLATES
from runtime.formats.chat.template import ChatTemplate, common_prefix
from runtime.protocol.errors import BadRequest, TemplateError
from runtime.protocol.messages import RAW_ROLE, ImageData, Message

_PATIENCE_S = 1.0
_MARK = f"\ue000{secrets.token_hex(8)}\ue001"
"""A text that no message contains."""


class TemplateLimit(TemplateError):
    """The template does too much work."""


class TextTemplate(Protocol):
    """A checkpoint's own template (runtime.formats.chat.jinja has the Jinja implementation). Contents of
    parts are passed as {"type": "text", "text": ...}, {"type": "image"}, "video", "audio"; it converts them
    to the shape that it reads."""

    @property
    def bos_token(self) -> str: ...

    @property
    def opening(self) -> str: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt: its text, and the sources of its media parts, in the order of the messages. modalities: the
    parts' fields of that name, one entry per part that has one."""

    text: str
    images: tuple[ImageData, ...] = ()
    videos: tuple[str, ...] = ()
    audios: tuple[str, ...] = ()
    modalities: tuple[str | list[str], ...] = ()


def render(
    messages: Sequence[Message],
    template: ChatTemplate | TextTemplate | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    image_token: str | None = None,
) -> Rendered:
    """The prompt. If all messages are raw text, it is their text, and no template is used.

    A content of parts is passed to a Jinja template as parts if it prints them, else as its text parts joined
    with one space. A ChatTemplate writes its image_token for an image or a video and its audio_token for
    audio; it drops the reasoning of replies. image_token: the text for an image outside of turns, if the
    template does not define it.

    An open assistant turn continues the template's own generation prompt, if it has one. Raises BadRequest
    for a part of an unknown type or a malformed one; TemplateError, a BadRequest, if there is no template, an
    open turn is not the last, media are outside of turns without a ChatTemplate, the template refuses, or it
    rewrites earlier turns although raw text is between turns.
    """
    for index, message in enumerate(messages[:-1]):
        if message.open and message.role != RAW_ROLE:
            raise TemplateError("only the last message can be open", where=f"messages[{index}]")
    # Images, videos, audios, modalities.
    media: tuple[list[Any], list[Any], list[Any], list[Any]] = ([], [], [], [])
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            continue
        check_parts(message.content, index)
        # The encoding that collects media in any text format.
        process_content_for_template_format(
            {"content": message.content}, "string", *media, True, index=index
        )  # fmt: skip
    text = _prompt(messages, template, tools, template_kwargs, image_token)
    return Rendered(text, *map(tuple, media))


def render_prompt(
    messages: Sequence[Message],
    template: ChatTemplate | TextTemplate | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of `render`, for conversations of text. Raises like render(), and TemplateError for media,
    which a text cannot hold."""
    for index, message in enumerate(messages):
        try:
            check_media(message.content, index, ())
        except BadRequest as error:
            raise TemplateError(error.message, where=error.where, hint=error.hint) from None
    return render(messages, template, tools=tools, template_kwargs=template_kwargs).text


def _prompt(
    messages: Sequence[Message],
    template: ChatTemplate | TextTemplate | None,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    image_token: str | None,
) -> str:
    roles = dict.fromkeys(message.role for message in messages if message.role != RAW_ROLE)
    if isinstance(template, ChatTemplate):
        if roles:
            _refuse_extras(messages, template, tools, template_kwargs)
        return _by_prefixes(messages, template)
    if not roles:
        return "".join(_raw(message, index, image_token) for index, message in enumerate(messages))
    if template is None:
        raise TemplateError(
            f"the messages have turns ({', '.join(roles)}), and this model has no chat template",
            where="messages",
            hint=f"start the engine with chat_template= a built-in name ({', '.join(CHAT_TEMPLATES)}) or the "
            "path of a .jinja file, or prompt it with plain text",
        )
    turns = _Turns(template, template_kwargs, image_token)
    if not tools:
        return turns.prompt(messages, None)
    wrapped, bare = _tool_shapes(tools)
    try:
        return turns.prompt(messages, wrapped)
    except TemplateError as first:
        if _Turns.refusal_is_final(first):
            raise
        try:
            return turns.prompt(messages, bare)
        except TemplateError:
            raise first from None  # the error of the shape that most templates take


def conversation(
    messages: Sequence[Message], *, add_generation_prompt: bool = True, continue_final_message: bool = False
) -> list[Message]:
    """The messages as a chat API's request means them, with the turn to be generated left open.

    continue_final_message: the last message is incomplete and to be continued; else, with
    add_generation_prompt, a reply is opened. Raises TemplateError if there is no message to continue.
    """
    turns = list(messages)
    if continue_final_message:
        if not turns or turns[-1].role == RAW_ROLE:
            raise TemplateError("there is no last turn to continue", where="continue_final_message")
        turns[-1] = msgspec.structs.replace(turns[-1], open=True, continued=True)
    elif add_generation_prompt and not (turns and turns[-1].open):
        turns.append(Message("assistant", "", open=True))
    return turns


def _as_dict(message: Message, index: int) -> dict[str, Any]:
    """The message as chat templates expect it: tool-call arguments parsed, absent keys omitted."""
    converted: dict[str, Any] = {"role": message.role, "content": message.content}
    if not isinstance(message.content, str):
        converted = process_content_for_template_format(converted, "openai", [], [], [], [], index=index)
    for field in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, field)) is not None:
            converted[field] = value
    if message.tool_calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return converted


def _by_prefixes(messages: Sequence[Message], template: ChatTemplate) -> str:
    pieces: list[str] = []
    history: list[dict[str, Any]] = []
    for message in messages:
        text = _with_marks(message, template.image_token, template.audio_token)
        if message.role == RAW_ROLE:
            pieces.append(text)
            continue
        prefix, suffix = template.get_prefix_and_suffix(message.role, history)
        pieces.append(prefix + text if message.open else prefix + text + suffix)
        history.append({"role": message.role, "content": text})
    return "".join(pieces)


class _Turns:
    """One prompt with a template that can only render whole conversations."""

    def __init__(
        self, template: TextTemplate, template_kwargs: Mapping[str, Any] | None, image_token: str | None
    ) -> None:
        self._template, self._kwargs, self._image_token = template, template_kwargs, image_token
        self._tools: Sequence[Mapping[str, Any]] | None = None
        self._spent = 0.0

    @staticmethod
    def refusal_is_final(error: TemplateError) -> bool:
        """Whether another shape of the tools cannot help: the refusal is about turns, or a limit was
        exceeded."""
        return (error.where or "").startswith("messages[") or isinstance(error, TemplateLimit)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        self._tools = tools
        pieces: list[str] = []
        turns: list[dict[str, Any]] = []
        rendered, counted = "", 0
        begins_raw = messages[0].role == RAW_ROLE
        for index, message in enumerate(messages):
            if message.role != RAW_ROLE:
                turns.append(_as_dict(message, index))
                continue
            if len(turns) > counted:
                text = self._render(turns)
                pieces.append(_increment(rendered, text, index))
                rendered, counted = text, len(turns)
            pieces.append(_raw(message, index, self._image_token))
        if len(turns) > counted:
            last = messages[-1]
            opened = last.open and last.role != RAW_ROLE
            text = self._open(turns[:-1], turns[-1], len(messages) - 1) if opened else self._render(turns)
            pieces.append(_increment(rendered, text, len(messages) - 1))
        return self._bos_first(pieces) if begins_raw else "".join(pieces)

    def _bos_first(self, pieces: list[str]) -> str:
        """The template's begin-of-text token belongs before raw text that precedes the first turn."""
        bos = self._template.bos_token
        for index, piece in enumerate(pieces):
            if bos and index and piece.startswith(bos):
                return "".join([bos, *pieces[:index], piece.removeprefix(bos), *pieces[index + 1 :]])
        return "".join(pieces)

    def _open(self, before: list[dict[str, Any]], last: dict[str, Any], index: int) -> str:
        if "tool_calls" in last:
            raise TemplateError("an open turn cannot carry tool calls", where=f"messages[{index}]")
        content = last["content"]
        text, only_text = _text_of_content(content)
        reply = last["role"] == "assistant" and only_text and not last.get("reasoning_content")
        offered = self._or_none(before, add_generation_prompt=True) if reply else None
        if offered is not None and (opening := self._template.opening) and offered.endswith(opening):
            return offered + text  # as after other conversations: no need to render the closed one
        closed = self._or_none(before) if before else ""
        if offered is not None and offered != closed:
            return offered + text
        marked = self._render([*before, {**last, "content": _marked(content)}])
        if marked.count(_MARK) != 1:
            raise TemplateError(
                f"the chat template prints the content of a {last['role']!r} turn {marked.count(_MARK)} "
                "times; such a turn cannot be left open",
                where=f"messages[{index}]",
            )
        start = marked.partition(_MARK)[0]
        if closed is None:
            return start
        if start.startswith(closed) and not start[len(closed) :].removesuffix(text).strip():
            # It puts at most a space before the reply: models write that space with their first word.
            return closed + text if not text or text[0].isspace() else start
        return closed + text if reply and self._opens_replies(before, closed) else start

    def _opens_replies(self, before: list[dict[str, Any]], closed: str) -> bool:
        """Whether the template opens a reply without being asked to: another turn of the user replaces that
        opening, but keeps everything before it."""
        if not before:
            return False
        with_question = self._or_none([*before, {"role": "user", "content": _MARK}])
        text = _text_of_content(before[-1]["content"])[0].strip()
        if with_question is None or with_question.startswith(closed) or not text:
            return False
        parting = common_prefix(with_question, closed)
        return text in closed[:parting]

    def _or_none(self, turns: list[dict[str, Any]], add_generation_prompt: bool = False) -> str | None:
        """None if the template refuses these turns: it may refuse to end with them (a lone system message),
        and then the beginning of a turn after them is unknown."""
        try:
            return self._render(turns, add_generation_prompt)
        except TemplateError as error:
            if self.refusal_is_final(error):
                raise
            return None

    def _render(self, turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
        """One of the few renderings of a prompt; each has a limit, and all of them together."""
        if self._spent > _PATIENCE_S:
            raise TemplateLimit(
                f"the chat template does too much work: one prompt takes it more than {_PATIENCE_S:g} s",
                where="chat_template",
            )
        begun = time.thread_time()
        try:
            return self._template.render(
                turns,
                add_generation_prompt=add_generation_prompt,
                tools=self._tools,
                template_kwargs=self._kwargs,
            )
        finally:
            self._spent += time.thread_time() - begun


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
    """Prefixes and suffixes per role can only express text; anything else is refused, not dropped."""
    refused = [("tools", "has no place for tools")] if tools else []
    if template_kwargs:
        refused.append(("template_kwargs", "takes no variables"))
    with_calls = (index for index, message in enumerate(messages) if message.tool_calls)
    refused += [(f"messages[{index}]", "has no place for tool calls") for index in with_calls]
    for field, what in refused:
        raise TemplateError(
            f"the chat template {template.name!r} {what}",
            where=field,
            hint="use the checkpoint's own template",
        )


def _tool_shapes(
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The tools as {"type": "function", "function": ...}, and as the functions only."""
    functions = [tool.get("function") or tool for tool in tools]
    wrapped = [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool
        for tool in tools
    ]
    return wrapped, functions


def _raw(message: Message, index: int, image_token: str | None) -> str:
    """Text outside of turns. A Jinja template does not define how media are written there."""
    if isinstance(message.content, str):
        return message.content
    for at, part in enumerate(message.content):
        slot = MEDIA_SLOTS.get(part["type"])
        if slot is not None and (slot != "image" or image_token is None):
            raise TemplateError(
                f"a part of type {part['type']!r} must be in a turn: outside of turns this model's template "
                "does not say how it is written",
                where=f"messages[{index}].content[{at}]",
            )
    return _with_marks(message, image_token or "", "")


def _with_marks(message: Message, image_token: str, audio_token: str) -> str:
    """The content with these texts for media."""
    if isinstance(message.content, str):
        return message.content
    pieces: list[str] = []
    after_text = False
    for part in message.content:
        slot = MEDIA_SLOTS.get(part["type"])
        if slot is None:
            pieces.append(f" {part['text']}" if after_text else part["text"])
        else:
            pieces.append(audio_token if slot == "audio" else image_token)
        after_text = slot is None
    return "".join(pieces)


def _text_of_content(content: Any) -> tuple[str, bool]:
    """The text of a content, parts joined with one space, and whether it has nothing else."""
    if isinstance(content, str):
        return content, True
    texts = [part["text"] for part in content if part["type"] == "text"]
    return " ".join(texts), len(texts) == len(content)


def _marked(content: Any) -> Any:
    """The content with _MARK at its end."""
    if isinstance(content, str):
        return content + _MARK
    if content and content[-1]["type"] == "text":
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]
    return [*content, {"type": "text", "text": _MARK}]


def _arguments(text: str) -> Any:
    """Many templates need an object; text that is not JSON stays unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
