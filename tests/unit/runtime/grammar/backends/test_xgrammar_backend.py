"""The xgrammar backend beyond what all backends share: what it refuses, its costs, the library's traps."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from runtime.grammar.base import Matcher
from runtime.grammar.byte_matcher import BYTES, byte_matcher
from runtime.grammar.manager import GrammarManager
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest, UnsupportedConstraint
from runtime.protocol.registry import MissingExtra
from runtime.protocol.vocabulary import Vocabulary

pytest.importorskip("xgrammar")
from runtime.grammar.backends.xgrammar_backend import XGrammarBackend, XGrammarLimits

OBJECT = {"type": "object"}


def refused(schema: object) -> str:
    with pytest.raises(UnsupportedConstraint) as caught:
        byte_matcher("json_schema", json.dumps(schema), "xgrammar")
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "word", "place"),
    [
        ({"properties": {"a": {"not": {}}}, **OBJECT}, "not", "#/properties/a"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "uniqueItems", "#/items"),
        ({"anyOf": [{"type": "number", "multipleOf": 2}]}, "multipleOf", "#/anyOf/0"),
        ({"allOf": [{}, {}]}, "allOf", "#"),
        ({"oneOf": [{}, {}]}, "oneOf", "#"),
        ({"if": {}, "then": {}}, "if", "#"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired", "#"),
        ({**OBJECT, "patternProperties": {"a": {}}}, "patternProperties", "#"),
        ({**OBJECT, "propertyNames": {}}, "propertyNames", "#"),
        ({**OBJECT, "required": ["a"]}, "required 'a'", "#"),
        ({"type": "array", "contains": {}}, "contains", "#"),
        ({"type": "string", "format": "date"}, "format", "#"),
        ({"type": "string", "pattern": "^a", "maxLength": 2}, "maxLength beside pattern", "#"),
        ({"type": "string", "pattern": "^(?=a)"}, "pattern", "#"),
        ({"type": "string", "pattern": '^a"$'}, "pattern", "#"),
        ({"type": "string", "pattern": "^a\\n$"}, "pattern", "#"),
        ({"minimum": 3}, "minimum without a type", "#"),
        ({"enum": ["a", "ab"], "type": "string", "maxLength": 1}, "maxLength beside enum", "#"),
        ({"enum": ["a", 1], "type": "string"}, "the value 1, which is not of its type", "#"),
        ({"anyOf": [{"type": "integer"}], "type": "integer"}, "type beside anyOf", "#"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}, "type": "string", "minLength": 2},
            "beside $ref",
            "#",
        ),
        (
            {**OBJECT, "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
            "additionalProperties",
            "#",
        ),
        ({"type": "array", "prefixItems": [{}], "maxItems": 0}, "maxItems", ""),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"minItems": 3}}}, "minItems", "#/$defs/b"),
        ({"$ref": "http://x.y/z"}, "$ref", "#"),
        ({"type": "integer", "maximum": 10**18}, "maximum", "#"),
    ],
)
def test_what_it_does_not_keep_is_refused_by_name_and_place(schema, word, place):
    told = refused(schema)
    assert word in told
    assert f"json_schema {place}".strip() + ":" in told


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "enum": ["a", "é"]}, ['"a"', '"é"'], ['"b"', "1"]),
        ({"type": "integer", "const": 3}, ["3"], ["4"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ['"a"', "null"], ['"b"']),
        ({"enum": [1.5, {"a": [1]}]}, ["1.5", '{"a":[1]}'], ['{"a":[2]}']),
        ({"type": "string", "pattern": "^[A-Z]{2}$"}, ['"AB"'], ['"ab"', '"ABC"']),
        ({"type": "string", "pattern": "^[^a]$"}, ['"b"', '"é"'], ['"a"', '"""', '"\n"', '"\\"']),
        ({"type": "string", "format": "uuid"}, ['"2eb8aa08-aa98-11ea-b4aa-73b441d16380"'], ['"2eb8"']),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ['"ab"'], ['""', '"abc"', '"a\n"', '"\x01"']),
        ({"type": "number", "minimum": 1.5, "exclusiveMaximum": 2}, ["1.5", "1.75"], ["1.4", "2"]),
        ({"type": ["integer", "null"], "minimum": 3}, ["3", "null"], ["2"]),
        ({"type": "array", "prefixItems": [{"type": "null"}]}, ["[]", "[null]"], ["[1]"]),
        ({"type": "array"}, ["[]", '[1, "a"]'], ["{}"]),
        ({"type": "array", "minItems": 2}, ["[1, 2]"], ["[1]"]),
        ({**OBJECT, "additionalProperties": {"type": "null"}}, ['{"a": null}'], ['{"a": 1}']),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, ['{"a": 1}'], ["{}"]),
        ({"x-mine": 1, "type": "null", "nulable": True}, ["null"], ["1"]),
    ],
)
def test_the_library_keeps_these(schema, good, bad):
    first = byte_matcher("json_schema", json.dumps(schema), "xgrammar")
    for text in [*good, *bad]:
        face = first.copy()
        assert (face.matcher.advance_bytes(text.encode()) and face.may_stop()) == (text in good), text


def test_an_unknown_keyword_is_told():
    face = byte_matcher("json_schema", '{"type": "string", "maxLenght": 3, "format": "mine"}', "xgrammar")
    assert face.matcher.origin.ignored == (
        "keyword 'maxLenght' at # (did you mean 'maxLength'?)",
        "format 'mine' at #",
    )


def test_what_is_only_validated_is_not_looked_at():
    face = byte_matcher(
        "json_schema", '{"$defs": {"unused": {"not": {}}}, "type": "integer", "title": "x"}', "xgrammar"
    )
    assert face.advance(ord("1"))


@pytest.mark.parametrize(
    ("kind", "spec", "told"),
    [
        ("json_schema", "INVALID", "line 1, column 1"),
        ("json_schema", '{"type": "strin"}', "type"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "minLength"),
        ("json_schema", '{"enum": []}', "enum"),
        ("regex", "(a", "position"),
        ("regex", r"[^\s\S]", "no finite text"),
        ("choices", '["\\ud800"]', "choices"),
    ],
)
def test_mistakes_are_told(kind, spec, told):
    with pytest.raises(BadConstraint, match=told):
        byte_matcher(kind, spec, "xgrammar")


@pytest.mark.parametrize(
    ("kind", "spec", "text"),
    [
        ("regex", "a\x00b", b"a\x00b"),
        ("regex", r"a\x00b", b"a\x00b"),
        ("ebnf", 'root ::= "a\\x00b"', b"a\x00b"),
        ("choices", '["a\\u0000b"]', b"a\x00b"),
        ("json_schema", '{"const": "a\\u0000b"}', b'"a\\u0000b"'),
    ],
)
def test_nul_is_a_character_like_others(kind, spec, text):
    face = byte_matcher(kind, spec, "xgrammar")
    assert face.forced_bytes() == text
    assert not face.copy().matcher.advance_bytes(b"a\x0b")
    assert face.matcher.advance_bytes(text)
    assert face.may_stop()


def test_costs_are_estimated_before_anything_is_compiled():
    backend = XGrammarBackend(BYTES, xgrammar_limits=XGrammarLimits(work=10_000))
    for kind, spec in (
        ("json_schema", '{"type": "string", "maxLength": 256}'),
        ("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 1000}'),
        ("regex", "[a-z]{0,500}"),
        ("ebnf", "root ::= ([a-z] [0-9]){500}"),
    ):
        with pytest.raises(UnsupportedConstraint, match="states"):
            backend.compile(Constraint(kind, spec))  # type: ignore[arg-type]
    assert backend.compile(Constraint("regex", "[a-z]{0,20}")).advance_bytes(b"abc")


def test_what_takes_too_much_memory_is_refused():
    backend = XGrammarBackend(BYTES, xgrammar_limits=XGrammarLimits(memory_bytes=10))
    with pytest.raises(BadConstraint, match="bytes compiled"):
        backend.compile(Constraint("regex", "[a-z]{0,20}"))


@pytest.mark.parametrize(
    ("whitespace", "good", "bad"),
    [
        ("compact", ['{"a":1}'], ['{ "a":1}', '{"a": 1}']),
        ("single", ['{"a":1}', '{ "a": 1 }', '{ "a" :1}'], ['{  "a":1}', '{\n"a":1}', '{"a":\t1}']),
        ("flexible", ['{"a":1}', '{\n    "a": 1\n}'], ["{" + " " * 41 + '"a":1}']),
    ],
)
def test_whitespace_is_bounded(whitespace, good, bad):
    schema = {**OBJECT, "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text in [*good, *bad]:
        face = byte_matcher("json_schema", json.dumps(schema), "xgrammar", whitespace=whitespace)
        assert (face.matcher.advance_bytes(text.encode()) and face.may_stop()) == (text in good), text
    with pytest.raises(BadRequest, match="whitespace"):
        XGrammarBackend(BYTES, whitespace="none")


def test_no_eos_and_missing_bytes():
    words = Vocabulary((b"a", b"bc", b"", b"ab"))
    matcher = XGrammarBackend(words).compile(Constraint("regex", "abc?|b"))
    assert ids(matcher) == [0, 3]
    assert matcher.advance_bytes(b"ab")
    assert matcher.may_stop()
    assert not matcher.is_terminated()
    assert ids(matcher) == []
    assert matcher.advance_bytes(b"c")
    assert matcher.is_terminated()


def ids(matcher: Matcher) -> list[int]:
    bits = matcher.mask().bits
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def test_several_ends_and_special_ids():
    words = Vocabulary(
        (*(bytes([value]) for value in range(256)), b"", b"a", b"", b""), frozenset({256, 257, 258}),
        frozenset({256, 258}),
    )  # fmt: skip
    matcher = XGrammarBackend(words).compile(Constraint("regex", "ab?"))
    assert ids(matcher) == [ord("a")]
    assert matcher.advance(ord("a"))
    assert ids(matcher) == [ord("b"), 256, 258]
    assert not matcher.advance(257)
    assert matcher.advance(258)
    assert ids(matcher) == [256, 258]


def test_forced_bytes_may_end_inside_of_a_character():
    assert byte_matcher("regex", "(😊|😋)x", "xgrammar").forced_bytes() == b"\xf0\x9f\x98"


def test_compiled_in_the_managers_workers():
    manager = GrammarManager(BYTES, "xgrammar", workers=2)
    try:
        schemas = [json.dumps({"type": "string", "maxLength": size}) for size in range(1, 9)]
        futures = [manager.submit(Constraint("json_schema", schema)) for schema in schemas * 3]
        for future, size in zip(futures, list(range(1, 9)) * 3, strict=True):
            matcher = future.result(timeout=300)
            assert matcher.advance_bytes(b'"' + b"x" * size)
            assert matcher.forced_bytes() == b'"'
    finally:
        manager.close()


def test_copies_are_used_in_several_threads():
    first = byte_matcher("json_schema", '{"type": "array", "items": {"type": "integer"}}', "xgrammar").matcher
    wrong: list[int] = []

    def follow(number: int) -> None:
        matcher = first.copy()
        for _ in range(20):
            assert matcher.advance_bytes(b"[" + b"1," * number + b"2")
            matcher.mask()
            if not matcher.copy().advance_bytes(b"]"):
                wrong.append(number)
            matcher.rollback(1)

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="pip install"):
        XGrammarBackend(BYTES)


def test_torch_comes_only_with_this_backend():
    code = (
        "import sys, runtime.grammar.manager, runtime.grammar.tags.structural_tag, runtime.grammar.reasoner;"
        "from runtime.grammar.byte_matcher import byte_matcher;"
        "byte_matcher('regex', 'a'); byte_matcher('ebnf', 'root ::= [a]'); byte_matcher('json_schema', '{}');"
        "sys.exit('torch' in sys.modules or 'xgrammar' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_rules_that_name_each_other_twice_are_not_written_out():
    """Forty of them come to 2**40 characters, which the library would hold; with few it is kept."""

    def doubling(rules: int, last: str = '"a"') -> str:
        between = [f"r{number} ::= r{number + 1} r{number + 1}" for number in range(rules)]
        return "\n".join(["root ::= r0", *between, f"r{rules} ::= {last}"])

    with pytest.raises(UnsupportedConstraint, match="written out"):
        byte_matcher("ebnf", doubling(40), "xgrammar")
    kept = byte_matcher("ebnf", doubling(5), "xgrammar")
    assert all(kept.advance(ord("a")) for _ in range(32))
    assert kept.next_bytes() == set()
