"""Whether a text is an ECMA-262 regular expression: the format `regex`.

A mask asks it of hundreds of texts with one beginning, so what was found of a beginning is kept. It compiles
and matches nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import regex  # type: ignore[import-untyped]

MAX_LENGTH = 20_000
_HEX = "[0-9a-fA-F]"
_ESCAPE = (
    rf"\\(?:[dDwWsStnvfr0]|x{_HEX}{{2}}|u(?:{_HEX}{{4}}|\{{{_HEX}+\}})|c[a-zA-Z]"
    r"|[pP]\{(?P<property>[A-Za-z_=]+)\}|[^a-zA-Z0-9])"
)
_CLASS = re.compile(rf"\[\^?((?:[^\]\\]|\\b|{_ESCAPE.replace('(?P<property>', '(?:')})*+)\]", re.DOTALL)
_MEMBER = re.compile(rf"[^\\]|\\b|{_ESCAPE}", re.DOTALL)
_ATOM = re.compile(
    rf"""(?P<plain>[^\\\[\](){{}}*+?^$|]+|[\]}}.]|{_ESCAPE})
    |(?P<edge>[\^$]|\\[bB])|(?P<either>\|)
    |\\(?P<number>[1-9][0-9]{{0,5}})|\\k<(?P<named>[A-Za-z_$][\w$]*)>
    |(?P<open>\((?:\?(?:[:=!]|<[=!]|<(?P<name>[A-Za-z_$][\w$]*)>))?(?!\?))|(?P<close>\))
    |(?P<times>[*+?]\??|\{{(?P<low>[0-9]{{1,9}})(?:,(?P<high>[0-9]{{0,9}}))?\}}\??)|(?P<brace>\{{)""",
    re.DOTALL | re.VERBOSE,
)
_AHEAD = 24
"""Characters that an atom may look at to know its end; where it needs more, it is not there yet."""

_STEP = 16
_VALUES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0, "b": 8}


class _Place(NamedTuple):
    """A place between two atoms. `open`: of the groups that are open whether each is one that repeats may
    follow; repeats: whether one may follow here."""

    at: int = 0
    open: tuple[bool, ...] = ()
    repeats: bool = False
    groups: int = 0
    names: frozenset[str] = frozenset()
    number: int = 0
    named: frozenset[str] = frozenset()


def is_regex(text: str) -> bool:
    if len(text) > MAX_LENGTH:
        return False
    known = (len(text) - _STEP) // _STEP * _STEP
    place = _walk(text, _begun(text[:known]) if known > 0 else _Place(), len(text))
    if place is None or place.at < len(text) or place.open:
        return False
    return place.number <= place.groups and place.named <= place.names


@lru_cache(maxsize=64)
def _begun(text: str) -> _Place | None:
    """The place up to which a text that begins with `text` is certain; None: no regular expression does."""
    return _walk(text, _Place(), len(text) - _AHEAD)


def _walk(text: str, place: _Place | None, end: int) -> _Place | None:
    """Over the atoms that begin before `end`, as far as there are whole ones; None for a mistake that no
    more text mends."""
    while place is not None and place.at < end:
        after = _class_end(text, place.at) if text[place.at] == "[" else 0
        if after:
            place = place._replace(at=after, repeats=True)
            continue
        found = _ATOM.match(text, place.at)
        if found is None:
            return place
        place = _past(place, found)
    return place


def _past(place: _Place, found: re.Match[str]) -> _Place | None:
    at = found.end()
    match found.lastgroup:
        case "plain" | "brace" | "property":
            known = found["property"] is None or _is_property(found["property"])
            return place._replace(at=at, repeats=True) if known else None
        case "edge" | "either":
            return place._replace(at=at, repeats=False)
        case "number":
            return place._replace(at=at, repeats=True, number=max(place.number, int(found["number"])))
        case "named":
            return place._replace(at=at, repeats=True, named=place.named | {found["named"]})
        case "close":
            if not place.open:
                return None
            return place._replace(at=at, open=place.open[:-1], repeats=place.open[-1])
        case "open":
            name, kind = found["name"], found["open"]
            if name is not None and name in place.names:
                return None
            return place._replace(
                at=at,
                open=(*place.open, not kind.startswith("(?<") or name is not None),
                repeats=False,
                groups=place.groups + (kind == "(" or name is not None),
                names=place.names | ({name} if name is not None else set()),
            )
        case _:
            high = found["high"]
            if not place.repeats or (high and int(high) < int(found["low"])):
                return None
            return place._replace(at=at, repeats=False)


def _class_end(text: str, start: int) -> int:
    """Where the class that begins at `start` ends; 0: not here, or it is none."""
    found = _CLASS.match(text, start)
    return found.end() if found is not None and _is_class(found[1]) else 0


@lru_cache(maxsize=256)
def _is_class(text: str) -> bool:
    """Whether no range in it runs backwards."""
    members = list(_MEMBER.finditer(text))
    if not all(found["property"] is None or _is_property(found["property"]) for found in members):
        return False
    points = [_point(found[0]) for found in members]
    place = 0
    while place < len(points):
        if place + 2 < len(points) and members[place + 1][0] == "-":
            low, high = points[place], points[place + 2]
            if low is not None and high is not None and high < low:
                return False
            place += 2
        place += 1
    return True


def _point(member: str) -> int | None:
    """The character of a class's member; None for a set of several."""
    if member[0] != "\\":
        return ord(member)
    kind = member[1]
    if kind in "dDwWsSpP":
        return None
    if kind in "xu" and len(member) > 2:
        return int(member[2:].strip("{}"), 16)
    return ord(member[2]) % 32 if kind == "c" else _VALUES.get(kind, ord(kind))


@lru_cache(maxsize=256)
def _is_property(name: str) -> bool:
    kind, _, value = name.rpartition("=")
    if kind not in ("", "gc", "sc", "scx", "General_Category", "Script", "Script_Extensions"):
        return False
    try:
        regex.compile(rf"\p{{{value}}}")
    except regex.error:
        return value in ("Any", "ASCII")
    return True
