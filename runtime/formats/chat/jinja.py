"""A checkpoint's own chat template: Jinja text, rendered in a sandbox with limits.

It offers what Hugging Face tokenizers offer to templates: `raise_exception`, `strftime_now`, `tojson`, loop
controls and `{% generation %}`. It knows template text and plain dicts; not tokenizers, not requests.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import meta

from runtime.formats.chat.content import process_content_for_template_format
from runtime.formats.chat.content_format import ContentFormat, ContentFormats, Messages
from runtime.formats.chat.render import TemplateLimit
from runtime.formats.chat.sandbox import TIME_LIMIT_S, Budget, Sandbox, run, strftime_at
from runtime.formats.chat.sandbox_bounds import Limit
from runtime.protocol.errors import TemplateError

_THINKING = ("enable_thinking", "thinking")
_RESERVED = ("messages", "tools", "add_generation_prompt")
"""Variables for which a request has its own fields."""
_PROBE_TIME_S = 0.2
_A_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}


class JinjaChatTemplate:
    """`sources`: name -> template text. "default" (or the only one) is used; "tool_use" if there are tools.
    `variables`: the tokenizer's special tokens by their names in templates: bos_token, eos_token and so on.
    `now`: the clock of templates that write the date."""

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if not sources:
            raise ValueError("a Jinja chat template needs at least one source")
        self._sources = dict(sources)
        self._variables = dict(variables or {})
        self._now, self._strftime_now = now, strftime_at(now)
        self._compiled: dict[str, jinja2.Template | TemplateError] = {}
        self._formats: dict[str, ContentFormats] = {}

    def stopped(self) -> JinjaChatTemplate:
        """The same template with its clock stopped."""
        _ = self.opening  # computed once, not for each copy
        moment, same = self._now(), copy.copy(self)
        same._strftime_now = strftime_at(lambda: moment)
        return same

    @property
    def bos_token(self) -> str:
        return self._variables.get("bos_token", "")

    @property
    def eos_token(self) -> str:
        return self._variables.get("eos_token", "")

    @property
    def sources(self) -> Mapping[str, str]:
        """Name -> template text."""
        return MappingProxyType(self._sources)

    @property
    def content_format(self) -> ContentFormat:
        """The format of the user's messages, in the template for requests without tools."""
        return self.content_format_for(tools=False)

    def content_format_for(self, *, tools: bool) -> ContentFormat:
        """ "openai" if the template prints the parts of a user's content, else "string". `tools`: whether
        there are tools, which may select another of the named templates."""
        return self._formats_of(self._pick(with_tools=tools)).of("user").format

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of the variables that any of the sources reads."""
        names: set[str] = set()
        for source in self._sources.values():
            try:
                names |= meta.find_undeclared_variables(Sandbox().parse(source))
            except Exception:  # noqa: BLE001 - render raises it
                continue
        return frozenset(names)

    @cached_property
    def force_reasoning(self) -> bool:
        """Whether the generation prompt opens the model's reasoning (`<think>`), so that a reply begins
        inside it."""
        closed, opened = self._closed_and_opened
        offered = opened.removeprefix(closed) if opened.startswith(closed) else opened.rpartition("?")[2]
        return offered.rfind("<think>") > offered.rfind("</think>")

    @cached_property
    def opening(self) -> str:
        """The text that the generation prompt adds after a turn of the user; "" if that is unknown."""
        closed, opened = self._closed_and_opened
        text = opened.removeprefix(closed) if opened.startswith(closed) else ""
        return "" if text and closed.endswith(text) else text

    @cached_property
    def _closed_and_opened(self) -> tuple[str, str]:
        messages = [{"role": "user", "content": "?"}]
        try:
            return self.render(messages), self.render(messages, add_generation_prompt=True)
        except TemplateError:
            return "", ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages` (role, content, ...). A content of parts is converted to the template's
        format. Raises TemplateError with the template's message and the line."""
        for name in _RESERVED:
            if name in (template_kwargs or {}):
                raise TemplateError(
                    f"cannot set {name!r}", where="template_kwargs", hint="it has its own field"
                )
        name = self._pick(bool(tools))
        context = {
            **self._thinking(template_kwargs or {}),
            "messages": [self._shaped(message, name) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._run(name, context)

    def _run(self, name: str, context: Mapping[str, Any], time_limit_s: float = TIME_LIMIT_S) -> str:
        template = self._template(name)
        context = {"strftime_now": self._strftime_now, **self._variables, "documents": None, "tools": None,
                   "add_generation_prompt": False, **context}  # fmt: skip
        try:
            return run(template, context, Budget(context, time_limit_s))
        except Exception as error:  # untrusted code may raise anything
            kind = TemplateLimit if isinstance(error, Limit) else TemplateError
            raise kind(
                f"the chat template refused the messages: {_text_of(error)}", where=_location(name, error)
            ) from error

    def check(self) -> None:
        """Raises TemplateError if a source cannot be parsed."""
        for name in self._sources:
            self._template(name)

    def _shaped(self, message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """The message with its content in the format that template `name` reads for its role: parts, or their
        texts joined."""
        content, role = message.get("content"), str(message.get("role"))
        if isinstance(content, str):
            if not content or "text" not in self._sources[name] or self._formats_of(name).of(role).text:
                return message
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list):
            media = frozenset(str(part.get("type")) for part in content) - {"text"}
            if self._formats_of(name).of(role, media).format == "string":
                return {**message, **process_content_for_template_format(message, "string", [], [], [], [])}
        return message

    def _formats_of(self, name: str) -> ContentFormats:
        formats = self._formats.get(name)
        if formats is None:
            tools = [_A_TOOL] if name == "tool_use" else None

            def render(messages: Messages) -> str:
                context = {"messages": messages, "tools": tools, "documents": []}
                return self._run(name, context, _PROBE_TIME_S)

            formats = self._formats[name] = ContentFormats(self._sources[name], render)
        return formats

    def _thinking(self, template_kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Families name this switch differently; set it under the name that the template reads, too."""
        values = [template_kwargs[name] for name in _THINKING if name in template_kwargs]
        if not values:
            return template_kwargs
        return {**{name: values[0] for name in _THINKING if name in self.reads}, **template_kwargs}

    def _pick(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._sources:
            return "tool_use"
        return "default" if "default" in self._sources else next(iter(self._sources))

    def _template(self, name: str) -> jinja2.Template:
        template = self._compiled.get(name)
        if template is None:
            template = self._compiled[name] = self._compile(name)
        if isinstance(template, TemplateError):
            # A new error: a raised one collects tracebacks.
            raise TemplateError(template.message, where=template.where, hint=template.hint)
        return template

    def _compile(self, name: str) -> jinja2.Template | TemplateError:
        try:
            return Sandbox().from_string(self._sources[name])
        except Exception as error:  # noqa: BLE001 - an untrusted text may break parser or compiler in any way
            return TemplateError(
                f"the chat template cannot be parsed: {_text_of(error)}", where=_location(name, error),
                hint='pass chat_template="chatml", another built-in name, or the path of a .jinja file',
            )  # fmt: skip


def detect_jinja_template_content_format(template: str | None) -> ContentFormat:
    """The format of a user's content for this template: "openai" (a list of parts) or "string". "string" for
    None and for invalid Jinja. Raises only TypeError, for anything but a str or None."""
    if template is None:
        return "string"
    if not isinstance(template, str):
        raise TypeError(f"a chat template is a str, got {type(template).__name__}")
    return JinjaChatTemplate({"default": template}).content_format


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _location(name: str, error: BaseException) -> str:
    """`chat_template`, with the name if there are several, and the line in the template if it is known."""
    location = "chat_template" if name == "default" else f"chat_template[{name}]"
    # jinja2 rewrites its tracebacks to the template's lines.
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return f"{location}:{line}" if line else location
