"""Names and docstrings use the words of the glossary (tutorials/concepts/glossary.md), not those banned here.

`python tests/unit/architecture/test_words.py` prints what is left, and the table for `REMAINING`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BANNED = frozenset({
    "asked", "found", "given", "gone", "got", "heal", "heard", "knock", "leftout", "made", "nobody", "over",
    "own", "place", "room", "said", "says", "spoken", "tells", "told", "took", "wanted", "went", "where",
    "whoever", "words",
})  # fmt: skip
"""Words of which no name of a function, class, parameter, variable or attribute consists."""
PHRASES = re.compile(r"\b(whoever|nobody|somebody|(?:is|was) to be had|(?:is|was) told)\b", re.IGNORECASE)
"""What no docstring contains."""
NO_CODE = re.compile(r'''""".*?"""|#[^\n]*''', re.DOTALL)
ANY_NAME = re.compile(rf"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:{'|'.join(BANNED)})(?![a-z])")
"""Quick tests of a file, most of which need not be parsed."""
ALLOWED = {
    "bootstrap_room": "a field of requests, as sglang calls it",
    "bad_words": "a field of requests, as vLLM calls it",
    "MAX_BAD_WORDS": "its limit",
    "connection_made": "a method of asyncio.Protocol",
    "IN_PLACE": "the usual term",
    "DECODE_IN_PLACE": "the usual term",
    "_in_place": "the usual term",
    "key_words": "words of a random key",
}
REMAINING: dict[str, int] = {
    "sglang_dsl/console": 1,
    "runtime/engine": 1,
    "runtime/kernels": 6,
    "runtime/processes": 1,
    "runtime/protocol": 11,
}
"""The findings that each room may still have; a room that is not here has none."""


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Lines with the banned names and phrases in them."""
    if not PHRASES.search(source) and not ANY_NAME.search(NO_CODE.sub("", source)):
        return
    for node in ast.walk(ast.parse(source)):
        name = ""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name = node.name
                for phrase in PHRASES.findall(ast.get_docstring(node) or ""):
                    yield node.lineno, f'"{phrase}"'
            case ast.Module():
                for phrase in PHRASES.findall(ast.get_docstring(node) or ""):
                    yield 1, f'"{phrase}"'
            case ast.arg():
                name = node.arg
            case ast.Name(ctx=ast.Store()):
                name = node.id
            case ast.Attribute(ctx=ast.Store()):
                name = node.attr
        parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name) + f"_{name}"
        if name not in ALLOWED and BANNED & {*parts.lower().split("_")}:
            yield getattr(node, "lineno", 1), name


def rooms() -> dict[str, list[Path]]:
    """The files of each room: a folder or module of one of the packages."""
    files: dict[str, list[Path]] = {}
    for package in ("sglang_dsl", "runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files.setdefault("/".join(parts[:2]), []).append(path)
    return files


ROOMS = rooms()


def findings_of(room: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in ROOMS[room]
        for line, what in findings(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_uses_the_words_of_the_glossary(room: str) -> None:
    lines = findings_of(room)
    assert len(lines) <= REMAINING.get(room, 0), "\n".join(lines)


def test_the_table_has_no_other_rooms() -> None:
    assert REMAINING.keys() <= ROOMS.keys()


def test_each_kind_of_name_is_found() -> None:
    source = (
        "class ToldYou:\n"
        "    def said(self, words):\n"
        "        '''Whoever asks.'''\n"
        "        self.place = found = words\n"
        "class LeftOut:\n"
        "    own_way = overlap = found.place\n"
        "    def bootstrap_room(whereabouts): ...\n"
    )
    names = ["ToldYou", "said", "words", '"Whoever"', "place", "found", "LeftOut", "own_way"]
    assert Counter(what for _, what in findings(source)) == Counter(names)


if __name__ == "__main__":
    every = {room: findings_of(room) for room in ROOMS}
    for lines in filter(None, every.values()):
        print(*lines, sep="\n")
    print(*(f'    "{room}": {len(lines)},' for room, lines in every.items() if lines), sep="\n")
