"""The engines on one corpus, side by side. Where they do not say the same, `disagreements.json` tells why.

The file is a ratchet: a disagreement that is not in it fails, and so does an entry that no longer holds.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from runtime.grammar.base import GrammarBackend
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.table import GRAMMAR_BACKENDS, make_backend
from runtime.protocol.constraint import Constraint, ConstraintKind
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

ENGINES: dict[str, tuple[str, ...]] = {
    "regex": ("outlines", "llguidance", "xgrammar"),
    "json_schema": ("llguidance", "xgrammar"),
    "ebnf": ("llguidance", "xgrammar"),
}
KNOWN: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "disagreements.json").read_text("utf-8")
)

REGEXES: dict[str, list[str]] = {
    r"(\d{1,3}\.){3}\d{1,3}": ["192.168.0.1", "1.2.3", "1.2.3.4444", "١.2.3.4"],
    r"[\w.+-]+@[\w-]+(\.[\w-]+)+": ["a.b+c@d-e.fr", "é@日本.jp", "a@b", "@b.c"],
    r"( Yes| No)": [" Yes", " No", "Yes", " N"],
    r"(19|20)\d\d-(0[1-9]|1[0-2])-([0-2]\d|3[01])T\d\d:\d\d(:\d\d)?Z": [
        "2026-11-21T10:00Z",
        "2026-13-01T10:00Z",
    ],
    r"[^\n\"]*": ["", "日本", '"', "a\nb"],
    r".*": ["", "abc", "a\nb", "\r\u2028", "😀"],
    r"(?i)straße": ["STRASSE", "STRAßE", "straẞe"],
    r"\s\S\D\W": ["\u00a0aa.", " a1.", "\x1faa!", " aaa"],
    r"a\x00b": ["a\x00b", "a\x0b"],
    r"x{0,3}y{2,}": ["yy", "xxxyyy", "xxxxyy", "xy"],
    r"(a|ab)(c|bcd)(d*)": ["abcd", "acd", "abbcdd", "ab"],
    r"^abc$": ["abc", "abcd"],
    r"a$\n?": ["a", "a\n"],
    r"\bfoo\b": ["foo", "foo "],
    r"a(?=b)b": ["ab", "a"],
    r"(a)\1": ["aa", "a"],
    r"(?:)": ["", "a"],
    r"[가-힣]+": ["한국어", "abc"],
    r"[^\x00-\x7f]": ["é", "e", "\U0010ffff"],
    r"a*?b+?": ["aab", "b", "a"],
    r"(a*)*b": ["aaab", "b", "a"],
    r"(a": ["a"],
    r"a**": ["a"],
    r"[z-a]": ["z"],
}

O = {"type": "object"}  # noqa: E741
SCHEMAS: list[tuple[object, list[str]]] = [
    ({"type": "integer"}, ["0", "-12", "01", "1.5", "1.0", "1e2", '"1"']),
    ({"type": "integer", "minimum": 3, "maximum": 120}, ["3", "120", "2", "121", "-3"]),
    ({"type": "integer", "minimum": 0.5}, ["1", "0"]),
    ({"type": "number"}, ["1.5", "-0", "1e5", ".5", "1."]),
    ({"type": "number", "minimum": 1.5}, ["1.5", "2", "1.4"]),
    ({"type": "number", "multipleOf": 0.5}, ["1.5", "1.3"]),
    ({"type": "string"}, ['""', '"a\\n"', '"é😀"', '"\\u00e9"', '"\n"', "a"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"é日本"', '"a"', '"abcd"', '"a\\n"']),
    ({"type": "string", "pattern": "^[A-Z]{2}$"}, ['"AB"', '"ab"', '"ABC"']),
    ({"type": "string", "format": "date"}, ['"2026-11-21"', '"2026-13-01"', '"x"']),
    ({"enum": ["a", 1, None, True]}, ['"a"', "1", "null", "true", "2", "false"]),
    ({"enum": [1.5, {"a": 1}]}, ["1.5", '{"a":1}', '{"a":2}']),
    ({"const": "a\u0000b"}, ['"a\\u0000b"', '"a"']),
    ({"type": ["string", "null"]}, ['"x"', "null", "1"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        ["[1]", "[1,2]", "[]", "[1,2,3]"],
    ),
    ({"type": "array"}, ["[]", '[1,"a",{}]', "{}"]),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["[1,2]", "[1,1]"]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1]", "[]", "[1,2]"]),
    (O, ["{}", '{"a":[]}', "[]"]),
    (
        {**O, "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"],
         "additionalProperties": False},
        ['{"a":1}', '{"a":1,"b":""}', '{ "a" : 1 }', '{"b":""}', '{"a":1,"c":2}', '{"b":"","a":1}',
         '{"a":1,"a":1}'],
    ),
    ({**O, "properties": {"a": {"type": "integer"}}}, ["{}", '{"a":1}', '{"a":"x"}', '{"c":2}']),
    ({**O, "required": ["a"]}, ['{"a":1}', "{}"]),
    ({**O, "additionalProperties": {"type": "integer"}}, ['{"x":1}', '{"x":""}']),
    ({**O, "minProperties": 1}, ['{"x":1}', "{}"]),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"', "null"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, ["1", "4.5", "5"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ["3", "2"]),
    ({"not": {"type": "string"}}, ["1", '"a"']),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, ["3", "2", '"a"']),
    ({"$defs": {"n": {**O, "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                      "additionalProperties": False}}, "$ref": "#/$defs/n"},
     ["{}", '{"c":[{},{"c":[]}]}', '{"c":[1]}']),
    (True, ["1", '{"a":[]}', "nul"]),
    (False, ["1"]),
    ({"type": "strin"}, ["1"]),
]  # fmt: skip

GRAMMARS: dict[str, list[str]] = {
    'root ::= "a" [0-9]{2} | root "x"': ["a12", "a12xx", "a1"],
    'root ::= "(" root ")" | "é"': ["(é)", "((é))", "((é)"],
    'root ::= [a-z]+ "end" | "<" root ">"': ["xend", "end", "<xend>", "<end>"],
    'root ::= "\\x00b" .': ["\x00b😀", "\x0b"],
    'root ::= ("a"?)* "b"': ["b", "aab", "a"],
    'root ::= y | "b"\ny ::= (y+)?': ["", "b", "bb"],
    "root ::= root": [""],
    'start: "a" B\nB: /[0-9]+/': ["a12", "a"],
    "root ::= (= x)": [""],
}


def corpus() -> list[tuple[ConstraintKind, str, list[str]]]:
    return [
        *(("regex", pattern, texts) for pattern, texts in REGEXES.items()),
        *(("json_schema", json.dumps(schema), texts) for schema, texts in SCHEMAS),
        *(("ebnf", spec, texts) for spec, texts in GRAMMARS.items()),
    ]  # type: ignore[list-item]


@cache
def made(engine: str) -> GrammarBackend:
    return make_backend(engine, BYTES)


def verdicts(engine: str, kind: ConstraintKind, spec: str, texts: list[str]) -> str:
    return judged(engine, kind, spec, tuple(texts))


@cache
def judged(engine: str, kind: ConstraintKind, spec: str, texts: tuple[str, ...]) -> str:
    """One letter for each text: y taken, n not; or "unsupported", or "mistake"."""
    try:
        first = made(engine).compile(Constraint(kind, spec))
    except UnsupportedConstraint:
        return "unsupported"
    except BadConstraint:
        return "mistake"
    letters = ""
    for text in texts:
        matcher = first.copy()
        letters += "y" if matcher.advance_bytes(text.encode()) and matcher.may_stop() else "n"
    return letters


@pytest.mark.parametrize(("kind", "spec", "texts"), corpus())
def test_engines_agree_or_it_is_explained(kind, spec, texts):
    found = {engine: verdicts(engine, kind, spec, texts) for engine in ENGINES[kind]}
    known = KNOWN.get(f"{kind} {spec}")
    if len(set(found.values())) == 1:
        assert known is None, "it is explained, but there is no disagreement any more"
        return
    assert known is not None, found
    assert known["reason"]
    assert {engine: known[engine] for engine in found} == found


@pytest.mark.parametrize("engine", ENGINES["regex"])
@pytest.mark.parametrize("pattern", REGEXES)
def test_no_engine_takes_what_fullmatch_does_not(engine, pattern):
    try:
        expected = "".join("y" if re.fullmatch(pattern, text) else "n" for text in REGEXES[pattern])
    except re.error:
        expected = "mistake"
    assert verdicts(engine, "regex", pattern, REGEXES[pattern]) in (expected, "unsupported")


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_no_engine_takes_an_invalid_document(number):
    jsonschema = pytest.importorskip("jsonschema")
    schema, texts = SCHEMAS[number]
    if schema == {"type": "strin"}:
        return
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for engine in GRAMMAR_BACKENDS:
        letters = verdicts(engine, "json_schema", json.dumps(schema), texts)
        for text, letter in zip(texts, letters, strict=False):
            if letter == "y" and letters not in ("unsupported", "mistake"):
                assert checker.is_valid(json.loads(text)), (engine, text)


def test_no_entry_is_left_over():
    assert set(KNOWN) <= {f"{kind} {spec}" for kind, spec, _ in corpus()}
