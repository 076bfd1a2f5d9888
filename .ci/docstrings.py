"""An extension of griffe: columns in docstrings, "name   what it is", become lists in the documentation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
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


# -- held against the code: `python .ci/docstrings.py`, part of `make lint` ---

NAMES = r"[a-z_]\w*(?:, [a-z_]\w*)*"
COLUMN = re.compile(rf"^({NAMES})(?: \([^)]*\))? {{2,}}\S")
LINE = re.compile(rf"^({NAMES}): \S")


def documented(docstring: str) -> set[str]:
    """Names that stand in columns, or as "name: what it is" at the beginning of a paragraph."""
    found: set[str] = set()
    for paragraph in re.split(r"\n\s*\n", docstring):
        lines = paragraph.splitlines()
        columns = [match for line in lines if (match := COLUMN.match(line))]
        first = LINE.match(lines[0])
        for match in columns or ([first] if first else []):
            found |= set(match[1].split(", "))
    return found


def known(obj: griffe.Function | griffe.Class) -> set[str] | None:
    """What a docstring may list: parameters; of a class also its members, and the keys that it reads. None:
    anything (**kwargs). Values of a parameter stand in quotes, and are no names."""
    function = obj if isinstance(obj, griffe.Function) else obj.all_members.get("__init__")
    names: set[str] = set()
    if isinstance(obj, griffe.Class):
        code = obj.source.replace(obj.docstring.value if obj.docstring else "", "")
        names = {*obj.all_members, *re.findall(r"(?:\bself\._?|\")(\w+)", code)}
    if isinstance(function, griffe.Function):
        if any(one.kind is griffe.ParameterKind.var_keyword for one in function.parameters):
            return None
        names |= {one.name.lstrip("*") for one in function.parameters}
    return names


def unknown(module: griffe.Object) -> Iterator[str]:
    for obj in module.members.values():
        if isinstance(obj, griffe.Alias):
            continue
        if isinstance(obj, griffe.Function | griffe.Class) and obj.docstring is not None:
            names = known(obj)
            wrong = set() if names is None else documented(obj.docstring.value) - names
            yield from (
                f"{obj.filepath}:{obj.docstring.lineno}: {obj.name} has no {one!r}" for one in sorted(wrong)
            )
        if not isinstance(obj, griffe.Function | griffe.Attribute):
            yield from unknown(obj)


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    packages = [griffe.load(name, search_paths=[root]) for name in ("sglang_dsl", "runtime")]
    found = [line for package in packages for line in unknown(package)]
    print("\n".join(found) if found else "docstrings name what there is")
    sys.exit(bool(found))
