"""Whether a text is an ECMA-262 regular expression: the format `regex`. A mask checks hundreds of texts with
one prefix, so the state after a prefix is kept.
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
"""Characters that decide where an atom ends; if it needs more, it is incomplete."""

_STEP = 16
_VALUES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0, "b": 8}


class _Position(NamedTuple):
    """`open`: for each open group, whether it may be repeated; repeats: whether a quantifier may follow."""

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
    position = _walk(text, _begun(text[:known]) if known > 0 else _Position(), len(text))
    if position is None or position.at < len(text) or position.open:
        return False
    return position.number <= position.groups and position.named <= position.names


@lru_cache(maxsize=64)
def _begun(text: str) -> _Position | None:
    """The position up to which texts that begin with `text` agree; None: no such text is an expression."""
    return _walk(text, _Position(), len(text) - _AHEAD)


def _walk(text: str, position: _Position | None, end: int) -> _Position | None:
    """Step over the whole atoms that begin before `end`; None for a mistake that no more text corrects."""
    while position is not None and position.at < end:
        after = _class_end(text, position.at) if text[position.at] == "[" else 0
        if after:
            position = position._replace(at=after, repeats=True)
            continue
        atom = _ATOM.match(text, position.at)
        if atom is None:
            return position
        position = _past(position, atom)
    return position


def _past(position: _Position, atom: re.Match[str]) -> _Position | None:
    at = atom.end()
    match atom.lastgroup:
        case "plain" | "brace" | "property":
            known = atom["property"] is None or _is_property(atom["property"])
            return position._replace(at=at, repeats=True) if known else None
        case "edge" | "either":
            return position._replace(at=at, repeats=False)
        case "number":
            return position._replace(at=at, repeats=True, number=max(position.number, int(atom["number"])))
        case "named":
            return position._replace(at=at, repeats=True, named=position.named | {atom["named"]})
        case "close":
            if not position.open:
                return None
            return position._replace(at=at, open=position.open[:-1], repeats=position.open[-1])
        case "open":
            name, kind = atom["name"], atom["open"]
            if name is not None and name in position.names:
                return None
            return position._replace(
                at=at,
                open=(*position.open, not kind.startswith("(?<") or name is not None),
                repeats=False,
                groups=position.groups + (kind == "(" or name is not None),
                names=position.names | ({name} if name is not None else set()),
            )
        case _:
            high = atom["high"]
            if not position.repeats or (high and int(high) < int(atom["low"])):
                return None
            return position._replace(at=at, repeats=False)


def _class_end(text: str, start: int) -> int:
    """Where the class that begins at `start` ends; 0: not here, or it is none."""
    atom = _CLASS.match(text, start)
    return atom.end() if atom is not None and _is_class(atom[1]) else 0


@lru_cache(maxsize=256)
def _is_class(text: str) -> bool:
    """Whether no range in it runs backwards."""
    members = list(_MEMBER.finditer(text))
    if not all(atom["property"] is None or _is_property(atom["property"]) for atom in members):
        return False
    points = [_point(atom[0]) for atom in members]
    position = 0
    while position < len(points):
        if position + 2 < len(points) and members[position + 1][0] == "-":
            low, high = points[position], points[position + 2]
            if low is not None and high is not None and high < low:
                return False
            position += 2
        position += 1
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
        return False
    return True
