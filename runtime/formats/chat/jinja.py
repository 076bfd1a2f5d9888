"""A checkpoint's own chat template: Jinja text, rendered in a sandbox with limits.

Follows what Hugging Face tokenizers offer to templates: `raise_exception`, `strftime_now`, `tojson`, loop
controls and `{% generation %}`. It knows template text and plain dicts; not tokenizers, not requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import meta

from runtime.formats.chat.content_format import detect_jinja_template_content_format
from runtime.formats.chat.sandbox import Budget, Sandbox, run
from runtime.protocol.errors import ModelLoadError, TemplateError

MAX_SOURCE_CHARS = 1 << 18
_THINKING = ("enable_thinking", "thinking")


class JinjaChatTemplate:
    """`sources`: name -> template text. "default" is used (or the only one); "tool_use" when there are tools.

    `variables` are what the tokenizer's special tokens are called in templates: bos_token, eos_token and so
    on.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str] | None = None) -> None:
        if not sources:
            raise ValueError("a Jinja chat template needs at least one source")
        self._sources = dict(sources)
        self._variables = dict(variables or {})
        self._compiled: dict[str, jinja2.Template] = {}

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

    @cached_property
    def content_format(self) -> str:
        """ "openai" where the template walks over the parts of a content, else "string"."""
        return detect_jinja_template_content_format(self._sources[self._pick(with_tools=False)])

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of the variables that any of the sources looks at."""
        names: set[str] = set()
        for source in self._sources.values():
            try:
                names |= meta.find_undeclared_variables(Sandbox().parse(source))
            except (jinja2.TemplateError, RecursionError):
                continue  # rendering it says what is wrong
        return frozenset(names)

    @cached_property
    def force_reasoning(self) -> bool:
        """Whether the generation prompt itself opens the model's reasoning (`<think>`), so that a reply
        begins within it."""
        asked = [{"role": "user", "content": "?"}]
        try:
            closed, opened = self.render(asked), self.render(asked, add_generation_prompt=True)
        except TemplateError:
            return False
        offered = opened.removeprefix(closed) if opened.startswith(closed) else opened.rpartition("?")[2]
        return offered.rfind("<think>") > offered.rfind("</think>")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages` (role, content, ...). Raises TemplateError: what it said, and where."""
        context = {
            **self._variables,
            "documents": None,
            **self._thinking(template_kwargs or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        name = self._pick(bool(tools))
        template = self._template(name)
        try:
            return run(template, context, Budget(_given(context)))
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
                RecursionError, MemoryError) as error:  # fmt: skip
            raise TemplateError(
                f"the chat template refused the messages: {_said(error)}", where=_place(name, error)
            ) from error

    def check(self) -> None:
        """Raises TemplateError when a source cannot be parsed."""
        for name in self._sources:
            self._template(name)

    def _thinking(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Families name the switch differently; it is said by the name that the template reads, too."""
        said = [given[name] for name in _THINKING if name in given]
        if not said:
            return given
        return {**{name: said[0] for name in _THINKING if name in self.reads}, **given}

    def _pick(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._sources:
            return "tool_use"
        return "default" if "default" in self._sources else next(iter(self._sources))

    def _template(self, name: str) -> jinja2.Template:
        found = self._compiled.get(name)
        if found is None:
            source = self._sources[name]
            if len(source) > MAX_SOURCE_CHARS:
                raise TemplateError(
                    f"has {len(source)} characters; at most {MAX_SOURCE_CHARS} are taken",
                    where=_place(name, None),
                )
            try:
                found = Sandbox().from_string(source)
            except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
                raise TemplateError(
                    f"the chat template cannot be parsed: {_said(error)}", where=_place(name, error),
                    hint='pass chat_template="chatml", another built-in name, or the path of a .jinja file',
                ) from error  # fmt: skip
            self._compiled[name] = found
        return found


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source of the checkpoint's templates; {} when it has none.

    Looks at chat_template.jinja and additional_chat_templates/*.jinja, then at tokenizer_config.json's
    "chat_template" (text, a mapping, or a list of named texts). Raises ModelLoadError for anything else
    there.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return {"default": read_template(file), **{path.stem: read_template(path) for path in more}}
    match tokenizer_config.get("chat_template"):
        case None | "":
            return {}
        case str(text):
            return {"default": text}
        case {**named} if named:
            listed = [{"name": name, "template": text} for name, text in named.items()]
        case [*entries]:
            listed = entries
        case other:
            raise _odd(folder, f"it is a {type(other).__name__}")
    sources: dict[str, str] = {}
    for entry in listed:
        match entry:
            case {"name": str(name), "template": str(text)}:
                sources[name] = text
            case _:
                raise _odd(folder, "an entry has no name or no text")
    return sources


def read_template(path: Path) -> str:
    """The text of a .jinja file. Raises ModelLoadError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"the chat template cannot be read: {error}", where=str(path)) from error


def _odd(folder: Path, what: str) -> ModelLoadError:
    return ModelLoadError(
        f'"chat_template" is neither a text nor a list of named texts: {what}',
        where=str(folder / "tokenizer_config.json"),
    )


def _given(value: Any) -> int:
    """Characters of a request's texts."""
    match value:
        case str(text):
            return len(text)
        case {**pairs}:
            return sum(_given(item) for item in pairs.values())
        case [*items]:
            return sum(_given(item) for item in items)
        case _:
            return 8


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _place(name: str, error: BaseException | None) -> str:
    """`chat_template`, the name where there are several, and the line in the template's text where it is
    known.
    """
    place = "chat_template" if name == "default" else f"chat_template[{name}]"
    line = getattr(error, "lineno", None)
    if line is None and error is not None:
        for frame_line in _template_lines(error):
            line = frame_line
    return f"{place}:{line}" if line else place


def _template_lines(error: BaseException) -> Iterator[int]:
    """Lines of the template on the error's way up; jinja2 rewrites its tracebacks to them."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            yield trace.tb_lineno
        trace = trace.tb_next
