"""What may stand at the cursor: commands and their arguments, names, attributes, variables of `s`. Knows no
terminal."""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_dsl.backends import BACKENDS
from sglang_dsl.console.session.session import STATE, Session

_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.(\w*)$")
_NAME = re.compile(r"[A-Za-z_]\w*$")
_VARIABLE = re.compile(rf"\b{STATE}\[\s*[\"']([^\"'\]]*)$")
_WORD = re.compile(r"\b([A-Za-z_][\w.]*)\(([^()]*)$")
MOST = 200


def completions(session: Session, before: str, commands: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Pairs of a text and how many characters before the cursor it replaces. `commands`: names, and of what
    kind their arguments are."""
    found = list(_found(session, before, commands))
    yield from found[:MOST]


def _found(session: Session, before: str, commands: dict[str, str]) -> Iterator[tuple[str, int]]:
    if before[:1] in (":", "/"):
        name, space, rest = before[1:].partition(" ")
        if not space:
            yield from ((before[0] + one, len(before)) for one in sorted(commands) if one.startswith(name))
        else:
            yield from _arguments(session, commands.get(name, ""), rest)
        return
    if at := _VARIABLE.search(before):
        given = at[1]
        yield from ((one, len(given)) for one in session.standing.core.names() if one.startswith(given))
        return
    if at := _DOTTED.search(before):
        yield from _attributes(session.names, at[1], at[2])
        return
    at = _NAME.search(before)
    given = at[0] if at else ""
    if given:
        names = {*session.names, *vars(builtins), *keyword.kwlist}
        yield from _parameters(session.names, before[: -len(given)], given)
        yield from (
            (one, len(given)) for one in sorted(names) if one.startswith(given) and _public(one, given)
        )


def _arguments(session: Session, kind: str, given: str) -> Iterator[tuple[str, int]]:
    match kind:
        case "file":
            folder, _, start = given.rpartition("/")
            try:
                inside = sorted(
                    (session.folder / Path(folder or ("/" if "/" in given else ".")).expanduser()).iterdir()
                )
            except OSError:
                return
            for one in inside:
                if one.name.startswith(start) and (start or not one.name.startswith(".")):
                    yield one.name + ("/" if one.is_dir() else ""), len(start)
        case "backend":
            names = (name for name in BACKENDS.names() if name != "endpoint")
            yield from ((one, len(given)) for one in names if one.startswith(given))
        case "name":
            yield from (
                (one, len(given))
                for one in sorted(session.names)
                if one.startswith(given) and _public(one, given)
            )
        case _:
            return


def _attributes(names: dict[str, Any], path: str, given: str) -> Iterator[tuple[str, int]]:
    """Of a dotted name. Properties on the way are not run: what they give is not known."""
    first, *rest = path.split(".")
    if first not in names and not hasattr(builtins, first):
        return
    found = names.get(first, getattr(builtins, first, None))
    for one in rest:
        try:
            found = inspect.getattr_static(found, one)
        except AttributeError:
            return
        if isinstance(found, property):
            return
    yield from ((one, len(given)) for one in dir(found) if one.startswith(given) and _public(one, given))


def _parameters(names: dict[str, Any], before: str, given: str) -> Iterator[tuple[str, int]]:
    """Keyword arguments of the function in whose call the cursor stands."""
    at = _WORD.search(before)
    called = names.get(at[1]) if at else None
    if called is None or not callable(called):
        return
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return
    for one in parameters:
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name.startswith(given):
            yield f"{one.name}=", len(given)


def _public(name: str, given: str) -> bool:
    return given.startswith("_") or not name.startswith("_")
