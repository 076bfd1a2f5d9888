"""A checkpoint's own chat template: Jinja text, rendered in a sandbox with limits.

Follows what Hugging Face tokenizers offer to templates: `raise_exception`, `strftime_now`, `tojson`, loop
controls and `{% generation %}`. It knows template text and plain dicts; not tokenizers, not requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.protocol.errors import ModelLoadError, TemplateError

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 1 << 26
MAX_ITERATIONS = 1_000_000
"""Over all `range(...)` of one rendering."""
TIME_LIMIT_S = 10.0
_TOO_MUCH = "the template does too much work"


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
            **(template_kwargs or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        name = self._pick(bool(tools))
        template = self._template(name)
        environment = template.environment
        assert isinstance(environment, _Sandbox)
        pieces: list[str] = []
        size = 0
        budget = _Budget()
        try:
            for piece in template.generate(context, **{_BUDGET: budget, "range": budget.range}):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise _Limit(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
                budget.check()
                pieces.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
                RecursionError, MemoryError) as error:  # fmt: skip
            raise TemplateError(
                f"the chat template refused the messages: {_said(error)}", where=_place(name, error)
            ) from error
        return "".join(pieces)

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
                found = _Sandbox().from_string(source)
            except (jinja2.TemplateError, RecursionError) as error:
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


class _Limit(jinja2.TemplateError):
    """A limit of the sandbox was met."""


class _Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self._left = MAX_ITERATIONS
        self._deadline = time.monotonic() + TIME_LIMIT_S

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            raise _Limit(f"{_TOO_MUCH}: it took more than {TIME_LIMIT_S:g} s")

    def range(self, *bounds: int) -> range:
        made = range(*bounds)
        self._left -= len(made) + 1
        if self._left < 0:
            raise _Limit(f"{_TOO_MUCH}: more than {MAX_ITERATIONS} iterations over range()")
        self.check()
        return made


_BUDGET = "_sglang_dsl_budget"


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates see values, never attributes that begin with an underscore; big products and powers are
    refused.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        # These can make any amount of text out of nothing.
        for name in ("lipsum", "cycler"):
            self.globals.pop(name, None)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "*", (str() | bytes() | list() | tuple()) as many, int(times):
                size = len(many) * times
            case "*", int(times), (str() | bytes() | list() | tuple()) as many:
                size = len(many) * times
            case "**", int(base), int(power):
                size = base.bit_length() * max(0, power)
            case _:
                size = 0
        if size > MAX_OUTPUT_CHARS:
            raise _Limit(f"{_TOO_MUCH}: {operator} would make {size} characters")
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __context.get(_BUDGET)
        if isinstance(budget, _Budget):
            budget.check()
        # Widths (center, ljust, zfill, indent ...) are the only numbers that text methods turn into text.
        if any(isinstance(arg, int) and arg > MAX_OUTPUT_CHARS for arg in (*args, *kwargs.values())):
            raise _Limit(f"{_TOO_MUCH}: a number above {MAX_OUTPUT_CHARS} was passed to a function")
        return super().call(__context, __obj, *args, **kwargs)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: a prompt is no web page."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


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
