"""Chat templates by name: built in, from installed packages, and registered by a program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from runtime.formats.chat.families import FAMILIES
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.registry import Registry, UnknownName, near

BUILT_IN: Mapping[str, ChatTemplate] = {
    template.name: template for family in FAMILIES for template in family.templates
}


T = TypeVar("T")


class TemplateTable(Registry[T], Mapping[str, T]):
    """Templates as objects, and plug-ins of third parties, which are loaded when they are read."""

    def __init__(self, kind: str, templates: Mapping[str, T]) -> None:
        super().__init__(kind, {})
        self._templates = dict(templates)

    def names(self) -> list[str]:
        return sorted({*super().names(), *self._templates})

    def __len__(self) -> int:
        return len(self.names())

    def __getitem__(self, name: str) -> T:
        return self.load(name)

    def __contains__(self, name: object) -> bool:
        return name in self._templates or super().__contains__(name)

    def load(self, name: str) -> T:
        """The template called `name`; UnknownName (a KeyError) lists the known ones, a similar one first."""
        template = self._templates.get(name)
        if template is not None:
            return template
        try:
            return super().load(name)
        except UnknownName as error:
            near = self.near(name)
            raise UnknownName(f"{error}; did you mean {near!r}?") if near else error from None

    def near(self, name: str) -> str | None:
        """The known name that `name` resembles, if any: written differently, cut short, or misspelt. For a
        path or hub id, only the last component counts."""
        plain = {_letters(known): known for known in self.names()}
        letters_of_name = _letters(str(name).rstrip("/\\")[-200:])
        if len(letters_of_name) < 2:
            return None
        begun = [known for letters, known in plain.items() if letters.startswith(letters_of_name)]
        if begun:
            return plain.get(letters_of_name) or min(begun, key=len)
        return plain.get(near(letters_of_name, plain, 0.7) or "")

    def register(self, name: str, template: T, *, replace: bool = False) -> T:
        if not replace and name in self and self.load(name) != template:
            raise ValueError(
                f"another {self.kind} is registered as {name!r}; choose another name, or pass replace=True"
            )
        self._templates[name] = template
        return template


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.split(r"[/\\]", name)[-1].lower())


CHAT_TEMPLATES = TemplateTable("chat template", BUILT_IN)
chat_template_registry: Mapping[str, ChatTemplate] = CHAT_TEMPLATES
"""Name -> template, every registered one."""


def register_chat_template(template: ChatTemplate, *, replace: bool = False) -> ChatTemplate:
    """Register `template` under its name, for this process. Registering the same template twice is allowed;
    raises ValueError if the name is taken by another one, unless `replace`."""
    return CHAT_TEMPLATES.register(template.name, template, replace=replace)


def get_chat_template(name: str) -> ChatTemplate:
    """The template registered under `name`; UnknownName (a KeyError) lists the known ones."""
    return CHAT_TEMPLATES.load(name)
