"""Constraints of every kind, each with a judge of its own, for the property tests of grammars. It knows no
test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.protocol.constraint import Constraint


@dataclass(frozen=True)
class Case:
    """A constraint, the backends that take it, and whether a text satisfies it, judged without them."""

    name: str
    kind: Any
    spec: str
    backends: tuple[str, ...]
    accepts: Callable[[str], bool]

    @property
    def constraint(self) -> Constraint:
        return Constraint(self.kind, self.spec)


def _regex(name: str, pattern: str, *backends: str) -> Case:
    taken = backends or ("outlines", "llguidance", "xgrammar", "auto")
    return Case(name, "regex", pattern, taken, lambda text: re.fullmatch(pattern, text) is not None)


def _first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))


def valid(schema: Any) -> Callable[[str], bool]:
    """Whether a text is JSON that the schema accepts, by the reference validator."""
    import jsonschema

    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())

    def accepts(text: str) -> bool:
        # Names that no schema fixes may stand twice (RFC 8259: they should not): whichever a reader keeps.
        try:
            last, first = json.loads(text), json.loads(text, object_pairs_hook=_first)
        except ValueError:
            return False
        return judge.is_valid(last) and judge.is_valid(first)

    return accepts


def _schema(name: str, schema: Any, *backends: str) -> Case:
    return Case(name, "json_schema", json.dumps(schema), backends or ("llguidance", "auto"), valid(schema))


def _counted_parens(text: str) -> bool:
    half = len(text) // 2
    return len(text) % 2 == 0 and text == "(" * half + ")" * half


def _tagged(text: str) -> bool:
    """Free text with <f=a>integer</f> and <f=b>"yes"|"no"</f>; the first "<f=" decides."""
    while (at := text.find("<f=")) >= 0:
        text = text[at:]
        number = re.match(r"<f=a>\s{0,41}-?(0|[1-9]\d*)(\.0+)?([eE][-+]?\d+)?\s{0,41}</f>", text)
        word = re.match(r"<f=b>(yes|no)</f>", text)
        found = number or word
        if found is None:
            return False
        text = text[found.end() :]
    return True


_TAGS = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f="],
            "tags": [
                {
                    "type": "tag",
                    "begin": "<f=a>",
                    "end": "</f>",
                    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                },
                {
                    "type": "tag",
                    "begin": "<f=b>",
                    "end": "</f>",
                    "content": {"type": "regex", "pattern": "yes|no"},
                },
            ],
        },
    }
)
_SEQUENCE = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"},
                {"type": "repeat", "min": 1, "max": 2, "content": {"type": "regex", "pattern": "[0-9]+;"}},
            ],
        },
    }
)

_PERSON = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["é", "ab", 3]}, "maxItems": 3},
    },
}
CASES = [
    _regex("date", r"\d{4}-\d{2}-\d{2}", "outlines", "llguidance", "xgrammar", "auto"),
    _regex("object", r'\{"name": "[^"\\\x00-\x1f]{0,30}", "age": [0-9]{1,3}\}'),
    _regex("words", r"(?:[\w-]+[ ,]){0,4}[\w-]+\."),
    _regex("unicode", r"(日本|日本語|é+|😀{2}|[a-cé-ö]{1,4})*(yes|no)"),
    _regex("counter", r"[^\n]{0,200}"),
    _regex("ends", r"^(?:aa|ab|abab)+$"),
    _regex("case", r"(?i)(the|ß|k){1,3}"),
    _regex("edges", r"\b[ab ]*\b a?", "outlines", "auto"),
    Case(
        "choices",
        "choices",
        json.dumps(["yes", "yes no", "é", "日本語", "ab", "abab"]),
        ("outlines", "llguidance", "xgrammar", "auto"),
        lambda text: text in ["yes", "yes no", "é", "日本語", "ab", "abab"],
    ),
    _schema("person", _PERSON, "llguidance", "auto"),
    _schema(
        "simple",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "llguidance",
        "xgrammar",
        "auto",
    ),
    _schema("free object", {"type": "object"}, "llguidance", "auto"),
    _schema("array", {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3}),
    _schema(
        "unique", {"type": "array", "items": {"enum": [1, 2, 3, "a"]}, "uniqueItems": True, "minItems": 2}
    ),
    _schema(
        "multiple",
        {
            "type": "object",
            "properties": {"n": {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 40}},
            "required": ["n"],
            "additionalProperties": False,
        },
    ),
    _schema("not", {"type": "string", "not": {"enum": ["", "a", "ab"]}, "maxLength": 3}),
    _schema("if", {"if": {"type": "integer"}, "then": {"multipleOf": 7}, "else": {"type": "boolean"}}),
    _schema(
        "tree",
        {
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {
                        "v": {"type": "null"},
                        "k": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
                    },
                    "required": ["v"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/n",
        },
        "llguidance",
        "auto",
    ),
    Case("parens", "ebnf", 'root ::= "(" root ")" | ""', ("llguidance", "xgrammar", "auto"), _counted_parens),
    Case(
        "sum",
        "ebnf",
        'root ::= root "+" t | t\nt ::= [0-9]{1,3} | "é"',
        ("llguidance", "xgrammar", "auto"),
        lambda text: re.fullmatch(r"([0-9]{1,3}|é)(\+([0-9]{1,3}|é))*", text) is not None,
    ),
    Case(
        "lark",
        "ebnf",
        'start: A (" " A)*\nA: /[a-c]{1,3}/',
        ("llguidance", "auto"),
        lambda text: re.fullmatch(r"[a-c]{1,3}( [a-c]{1,3})*", text) is not None,
    ),
    Case("tags", "structural_tag", _TAGS, ("llguidance", "xgrammar", "auto"), _tagged),
    Case(
        "sequence",
        "structural_tag",
        _SEQUENCE,
        ("llguidance", "xgrammar", "auto"),
        lambda text: re.fullmatch(r"<[^>]*>([0-9]+;){1,2}", text) is not None,
    ),
]
PAIRS = [(case, name) for case in CASES for name in case.backends]


def pair_id(value: object) -> str:
    return value.name.replace(" ", "_") if isinstance(value, Case) else str(value)
