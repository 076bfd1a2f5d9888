"""Patterns and formats: the two spellings of an expression, and what a format takes."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.json_schema.texts.ecma import spell
from runtime.grammar.json_schema.texts.formats import FORMATS, matches
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from tests.exploring import tries


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d+$", ["12"], ["٣", "1\n", ""]),
        (r"^\w\W\s\S$", ["a-\ufeffx"], ["é-\x85x"]),
        (r"a.c", ["abc", "xa\x85c"], ["a\nc", "a\u2028c"]),
        (r"^\u00e9\x41\cJ\/\-$", ["éA\n/-"], ["e"]),
        (r"^\u{1F600}|\uD83D\uDE01$", ["😀", "😁"], ["x"]),
        (r"^\p{Lu}\P{L}$", ["É1"], ["é1", "Éa"]),
        (r"^[\]\-a-c]$", ["]", "-", "b"], ["d"]),
        (r"^(?<n>a|b){2}$", ["ab"], ["a"]),
        (r"^a{,2}$", ["a{,2}"], ["a"]),
        (r"x|^$", ["", "axb"], ["a"]),
    ],
)
def test_patterns_mean_the_same_in_engine_and_validator(small, pattern, good, bad):
    spelled = spell(pattern)
    assert spelled.rust is not None
    for text in [*good, *bad]:
        found = re.search(spelled.python, text) is not None
        assert found == (text in good), text

        assert (
            small.accepts(
                small.matcher({"type": "string", "pattern": pattern}), json.dumps(text, ensure_ascii=False)
            )
            == found
        )


@pytest.mark.parametrize("pattern", [r"^(?!a)", r"(?<=a)b", r"(a)\1", r"\bx\b"])
def test_what_the_engine_lacks_is_checked(small, pattern):
    spelled = spell(pattern)
    assert spelled.rust is None
    assert spelled.why
    for text in ("a", "b", "ab", "aa", "x", "ax x"):
        found = re.search(spelled.python, text) is not None
        assert small.accepts(small.matcher({"type": "string", "pattern": pattern}), f'"{text}"') == found


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "[b-a]", r"\q", "[a", "(?<1>a)", "a**", "\\"])
def test_mistakes_say_what(pattern):
    with pytest.raises(BadConstraint):
        spell(pattern)


def test_unknown_properties_are_refused():
    with pytest.raises(UnsupportedConstraint, match="Klingon"):
        spell(r"\p{Klingon}")


@settings(deadline=None, max_examples=tries(150))
@given(st.text(alphabet="ab(){}[]|*+?^$\\.-,12d", max_size=10))
def test_any_text_is_spelled_or_refused(pattern):
    try:
        spelled = spell(pattern)
    except BadConstraint:
        return
    re.compile(spelled.python)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-1-01"]),
        (
            "time",
            ["12:00:00Z", "23:59:60Z", "08:30:06.28+01:00"],
            ["24:00:00Z", "22:59:60Z", "12:00:00", "12:00Z"],
        ),
        ("date-time", ["1985-04-12T23:20:50.52Z"], ["1985-04-12 23:20:50Z", "1990-02-31T15:59:59Z"]),
        ("duration", ["P4DT12H30M5S", "P1W", "PT36H"], ["P", "PT", "P1W2D", "4D", "P1D2H"]),
        (
            "email",
            ["a.b+c@x-y.org", '"a b"@x.org', "a@[127.0.0.1]"],
            ["a", "a@", ".a@x", "a..b@x", "a@-x.org"],
        ),
        (
            "hostname",
            ["a", "a-b.example.org"],
            ["-a", "a-", "a_b", "a..b", "x" * 64, ".".join(["x" * 60] * 5)],
        ),
        ("ipv4", ["127.0.0.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
        ("ipv6", ["::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1::"], ["1:2", ":::", "1::2::3", "12345::"]),
        ("uri", ["http://x/y?z#w", "urn:a:b", "http://[::1]:80/"], ["//x", "a b:c", "http://x y", "\\\\x"]),
        ("uri-reference", ["/a/b", "#x", "", "a?b"], ["\\\\x", "a b"]),
        (
            "uuid",
            ["2EB8AA08-AA98-11EA-B4AA-73B441D16380"],
            ["2eb8aa08", "2eb8aa08-aa98-11ea-b4aa73b441d16380"],
        ),
        ("json-pointer", ["", "/a/0/~0~1"], ["a", "/~2"]),
        ("relative-json-pointer", ["0", "1/a", "2#"], ["/a", "01", "-1"]),
        ("uri-template", ["http://x/{a}{?b,c*}", "{+d:3}"], ["{a", "a}", "{a b}"]),
        ("iri", ["http://ƒøø.ßår/?∂"], ["http://x y"]),
    ],
)
def test_formats(small, name, good, bad):
    assert name in FORMATS
    for text in [*good, *bad]:
        assert matches(name, text) == (text in good), text
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        assert small.accepts(small.matcher({"type": "string", "format": name}), f'"{escaped}"') == (
            text in good
        ), text
