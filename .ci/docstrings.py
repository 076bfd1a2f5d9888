"""An extension of griffe: columns in docstrings, "name   what it is", become lists in the documentation."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\S(?:.{0,60}?\S)?) {2,}(\S.*)$")
"""A name, two spaces or more, what it is."""
CODE = re.compile(r"^[\w.*,= \[\]|\"()-]+$")


def listed(paragraph: str) -> str:
    """A paragraph of columns as a Markdown list; any other as it is."""
    if paragraph.startswith("    "):
        return paragraph  # code
    items: list[list[str]] = []
    before: list[str] = []
    for line in paragraph.splitlines():
        if found := ENTRY.match(line):
            items.append([found[1], found[2]])
        elif items:
            items[-1][1] += " " + line.strip()
        elif found := re.match(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (\S.*)$", line):
            items.append([found[1], found[2]])
        else:
            before.append(line)
    if not items:
        return paragraph
    rows = (f"- {f'`{name}`' if CODE.match(name) else name}: {text}" for name, text in items)
    return "\n".join([*before, *([""] if before else []), *rows])


def markdown(docstring: str) -> str:
    return "\n\n".join(listed(one) for one in re.split(r"\n\s*\n", docstring))


class Columns(griffe.Extension):
    """Rewrites each docstring when it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
