"""Fill-in-the-middle templates: the marks around a hole in a text, for models trained to fill it.

Text in, text out; it knows no model. The tokens are those of the model cards of deepseek-coder, StarCoder and
Qwen2.5-Coder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from runtime.formats.chat.registry import TemplateTable
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import UnknownName


class HoleAt(Enum):
    """The position of the hole's token: between prefix and suffix, or after both."""

    MIDDLE = auto()
    END = auto()


@dataclass(frozen=True)
class CompletionTemplate:
    """begin + prefix, middle-token and suffix in the order of `hole`, + end."""

    name: str
    begin: str
    middle: str
    end: str
    hole: HoleAt

    def render(self, prompt: str, suffix: str) -> str:
        """The prompt for the text between `prompt` and `suffix`."""
        if self.hole is HoleAt.MIDDLE:
            return f"{self.begin}{prompt}{self.middle}{suffix}{self.end}"
        return f"{self.begin}{prompt}{self.end}{suffix}{self.middle}"

    @property
    def stop_str(self) -> tuple[str, ...]:
        return (self.begin, self.middle, self.end)


_TEMPLATES = (
    CompletionTemplate("deepseek-coder", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", HoleAt.MIDDLE),
    CompletionTemplate("star_coder", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", HoleAt.END),
    CompletionTemplate("qwen-coder", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", HoleAt.END),
)
completion_template_registry = TemplateTable("completion template", {one.name: one for one in _TEMPLATES})
"""Name -> template, every registered one."""


def register_completion_template(
    template: CompletionTemplate, *, replace: bool = False
) -> CompletionTemplate:
    """Register `template` under its name. Raises ValueError if the name is taken by another one, unless
    `replace`."""
    return completion_template_registry.register(template.name, template, replace=replace)


def get_completion_template(name: str) -> CompletionTemplate:
    """The template registered under `name`; UnknownName (a KeyError) lists the known ones."""
    return completion_template_registry.load(name)


def choose_completion_template(name: str | None) -> CompletionTemplate | None:
    """The template of an engine's option; None for None. Raises BadRequest listing the known names."""
    if name is None:
        return None
    try:
        return get_completion_template(name)
    except UnknownName as error:
        raise BadRequest(str(error.args[0]), where="completion_template") from error


def fitting_completion_templates(knows: Callable[[str], bool]) -> list[CompletionTemplate]:
    """The templates whose marks a tokenizer has, without duplicates of the same format. `knows`: whether a
    text is one of its tokens."""
    templates: dict[tuple[str, str, str, HoleAt], CompletionTemplate] = {}
    for template in completion_template_registry.values():
        if all(knows(mark) for mark in template.stop_str):
            templates.setdefault((template.begin, template.middle, template.end, template.hole), template)
    return list(templates.values())
