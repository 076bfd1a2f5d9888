"""Structural tags: what they accept, masks that equal brute force over tokens that cross from part to part,
walks that finish, rollback, refusals with their place."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.backends.llguidance_backend import LLGuidanceBackend
from runtime.grammar.base import Matcher
from runtime.grammar.byte_matcher import byte_matcher
from runtime.grammar.tags.tag_space import Triggers, utf8_step
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from runtime.protocol.vocabulary import Vocabulary
from tests.exploring import tries

EOS = 256
WORDS = [
    b"<f", b"<f=", b"=a>", b"<f=a>", b"<f=a>1", b"x<f=b>", b"1<", b"2</f>", b"</f", b"</f>", b"</f> and",
    b"12", b"f>y<f=a", b'{"', b'": ', b'"}', b'"}</', b"}</f><f=b", b"aa", b"aaa", b" the", "é".encode(),
    b"\xc3",
    b"\xa9<f=", b"<<f=a>", b"</think>", b"</think>x", b"k>1</f>", b"\xf0\x9f", b"<f=c>", b"]<", b"END",
    b"xEND.",
]  # fmt: skip
VOCABULARY = Vocabulary(
    (*(bytes([value]) for value in range(256)), b"", b"", *WORDS), frozenset({EOS, 257}), frozenset({EOS})
)
BACKEND = LLGuidanceBackend(VOCABULARY)

Spec = dict[str, Any]


def tag(name: str, schema: Any = None, end: Any = "</f>") -> Spec:
    content = {"type": "json_schema", "json_schema": {"type": "integer"} if schema is None else schema}
    return {"type": "tag", "begin": f"<f={name}>", "content": content, "end": end}


def spec(form: Spec) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def triggered(**more: Any) -> str:
    return spec({"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("a"), tag("b")], **more})


def one_tag(triggers: str) -> str:
    return '{"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ' + triggers + "}"


ANY = {"type": "any_text"}
CONST = {"type": "const_string", "value": "END"}
PERSON = {
    "type": "object",
    "properties": {"n": {"type": "string"}},
    "required": ["n"],
    "additionalProperties": False,
}
OLDER = json.dumps({
    "type": "structural_tag", "triggers": ["<f"],
    "structures": [{"begin": "<f=a>", "schema": PERSON, "end": "</f>"},
                   {"begin": "<f=b>", "end": "</f>",
                    "schema": {"type": "array", "items": {"type": "integer"}}}],
})  # fmt: skip
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "free text with tags": (
        triggered(),
        ["", "hi é", "<f=a>1</f>", "x<f=a>1</f>y<f=b>-2</f>z", "<f=a>1</f><f=b>2</f>", "x<f", "<<f=a>1</f>"],
        ["x<f=", "x<f=c>1</f>", "<f=a>1</f", "<f=a>x</f>", "<f=a></f>", "<f=a>1</f>\n<f="],
    ),
    "at least one": (
        triggered(at_least_one=True),
        ["<f=a>1</f>", "<f=a>1</f> and <f=b>2</f>"],
        ["", "hi", "x<f=a>1</f>"],
    ),
    "stop after first": (
        triggered(stop_after_first=True),
        ["", "hi", "x<f=a>1</f>"],
        ["x<f=a>1</f>y", "<f=a>1</f><f=b>2</f>"],
    ),
    "exactly one": (
        triggered(at_least_one=True, stop_after_first=True),
        ["<f=a>1</f>"], ["", "x<f=a>1</f>", "<f=a>1</f> "],
    ),
    "excludes": (triggered(excludes=["END"]), ["EN", "<f=a>1</f>EN"], ["END", "xEND.", "<f=a>1</f>END"]),
    "older shape": (
        OLDER,
        ["", "a<f=a>{\"n\":\"</f>\"}</f>", "<f=b>[1,2]</f>.", '<f=a>{ "n" : "é" }</f><f=b>[]</f>'],
        ["<f", "<f=a>{}</f>", "<f=b>[1,]</f>", "<fn"],
    ),
    "separated": (
        spec({"type": "tags_with_separator", "tags": [tag("a"), tag("b")], "separator": ","}),
        ["", "<f=a>1</f>", "<f=a>1</f>,<f=b>1</f>"],
        ["<f=a>1</f>,", "<f=a>1</f><f=b>1</f>", ",", "x"],
    ),
    "separated, one": (
        spec({"type": "tags_with_separator", "tags": [tag("a")], "separator": ",", "at_least_one": True,
              "stop_after_first": True}),
        ["<f=a>1</f>"], ["", "<f=a>1</f>,<f=a>1</f>"],
    ),
    "thinking first": (
        spec({"type": "sequence", "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("a")]}]}),
        ["<think></think>", "<think>a<f=a>?</think>b", "<think>x</think>y<f=a>1</f></think>"],
        ["", "a", "<think>", "<think></think", "<think></think><f=b"],
    ),
    "several ends": (
        spec({"type": "tag", "begin": "[", "content": {"type": "any_text"}, "end": ["]", "}}"]}),
        ["[a]", "[a}}", "[a}]", "[]"], ["[a", "[a]]", "[a}}}"],
    ),
    "the first trigger decides": (
        spec({"type": "triggered_tags", "triggers": ["aa"],
              "tags": [{"type": "tag", "begin": "aa=", "content": CONST, "end": ""}]}),
        ["aa=END", "baa=ENDa", "a", "aba"], ["aaa=END", "aa", "aa=EN"],
    ),
    "tags in a tag": (
        spec({"type": "tag", "begin": "[", "end": "]", "content":
              {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("a")]}}),
        ["[]", "[ab]", "[x<f=a>1</f>y]"], ["[x]]", "[<f=a>1]", "["],
    ),
    "a tag in the tag, once": (
        spec({"type": "tag", "begin": "[", "end": "]", "content":
              {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("a")], "stop_after_first": True}}),
        ["[]", "[x<f=a>1</f>]"], ["[x<f=a>1</f>y]"],
    ),
    "text, then a word": (
        spec({"type": "sequence", "elements": [{"type": "any_text"}, CONST]}),
        ["END", "ENDEND", "xEND"], ["", "x", "ENDx", "EN"],
    ),
    "no end": (
        spec({"type": "sequence", "elements": [tag("a", PERSON, ""), {"type": "any_text"}]}),
        ['<f=a>{"n":""}', '<f=a>{"n":"}"} the }'], ["<f=a>", '<f=a>{"n":""'],
    ),
    "ambiguous end": (
        spec({"type": "tag", "begin": "", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "12"}),
        ["012", "1212", "99912"], ["12", "0", "0123"],
    ),
    "loops": (
        spec({"type": "sequence", "elements": [
            {"type": "star", "content": {"type": "optional", "content":
                                         {"type": "const_string", "value": "ab"}}},
            {"type": "repeat", "min": 1, "max": 2, "content": {"type": "regex", "pattern": "[0-9]?"}},
            {"type": "plus", "content": {"type": "const_string", "value": "."}}]}),
        [".", "ab.", "abab12..", "1."], ["", "a.", "123.", "ab1"],
    ),
    "or": (
        spec({"type": "tag", "begin": "<", "end": ">", "content": {"type": "or", "elements": [
            CONST, {"type": "any_text", "excludes": ["!"]},
            {"type": "grammar", "grammar": 'root ::= "!" root?'}]}}),
        ["<END>", "<EN>", "<>", "<!>", "<!!>"], ["<a!>", "<!a>", "<a>>", "<!"],
    ),
}  # fmt: skip


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.mask()
    ids = np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little")).tolist()
    assert mask.allowed is None or mask.allowed.tolist() == ids
    return ids


def compiled(text: str) -> Matcher:
    return BACKEND.compile(Constraint("structural_tag", text))


@pytest.mark.parametrize("name", CASES)
def test_language(name):
    text, good, bad = CASES[name]
    first = byte_matcher("structural_tag", text)
    for one in [*good, *bad]:
        face = first.copy()
        taken = all(face.advance(byte) for byte in one.encode()) and face.may_stop()
        assert taken == (one in good), one
        whole = compiled(text)
        assert (whole.advance_bytes(one.encode()) and whole.may_stop()) == (one in good), one


@pytest.mark.parametrize("name", CASES)
def test_next_bytes_are_what_advance_takes(name):
    text, good, _ = CASES[name]
    face = byte_matcher("structural_tag", text)
    for byte in max(good, key=len).encode():
        offered = face.next_bytes()
        assert offered == {value for value in range(256) if face.copy().advance(value)}
        assert byte in offered
        assert face.advance(byte)


@pytest.mark.parametrize("name", CASES)
def test_masks_equal_brute_force(name):
    text, good, _ = CASES[name]
    for one in good:
        for size in range(len(one.encode()) + 1):
            matcher = compiled(text)
            assert matcher.advance_bytes(one.encode()[:size])
            ids = allowed(matcher)
            for token, data in enumerate(VOCABULARY.tokens):
                fits = bool(data) and matcher.copy().advance_bytes(data)
                assert (token in ids) == (matcher.may_stop() if token == EOS else fits), (one[:size], data)
        size = len(one) // 2  # in the middle the matcher itself must not have moved
        matcher = compiled(text)
        assert matcher.advance_bytes(one.encode()[:size])
        allowed(matcher)
        assert matcher.advance_bytes(one.encode()[size:])
        assert matcher.may_stop()


def walk(matcher: Matcher, pick: random.Random, steps: int) -> bytes:
    """A text of random tokens under the mask, brought to an end by what is shortest."""
    text = b""
    for step in range(steps * 20):
        ids = allowed(matcher)
        assert ids, text
        if EOS in ids and (step > steps or ids == [EOS] or pick.random() < 0.1):
            assert matcher.advance(EOS)
            return text
        ids = [token for token in ids if token != EOS]
        marked = [token for token in ids if set(VOCABULARY.tokens[token]) & set(b'<>/f="]}.END12')]
        token = pick.choice(marked if marked and (step > steps or pick.random() < 0.7) else ids)
        assert matcher.advance(token)
        text += VOCABULARY.tokens[token]
    pytest.fail(f"no end in sight: {text!r}")


@pytest.mark.parametrize("name", ["free text with tags", "older shape", "exactly one", "thinking first"])
def test_walks_finish_and_parse(name):
    text = CASES[name][0]
    first, pick = compiled(text), random.Random(7)
    found = 0
    for _ in range(25):
        written = walk(first.copy(), pick, 30).decode()
        again = compiled(text)
        assert again.advance_bytes(written.encode())
        assert again.may_stop()
        left = written.partition("</think>")[2] if name == "thinking first" else written
        while begin := re.search("<f=[ab]>", left):
            _, size = json.JSONDecoder().raw_decode(left[begin.end() :].lstrip())
            left = left[begin.end() :].lstrip()[size:].lstrip()
            assert left.startswith("</f>")
            found += 1
    assert found or name == "thinking first"


@pytest.mark.parametrize("name", CASES)
def test_rollback_and_copies_are_exact(name):
    pick = random.Random(3)
    matcher = compiled(CASES[name][0])
    trail = [(allowed(matcher), matcher.may_stop(), matcher.forced_bytes())]
    for _ in range(25):
        ids = allowed(matcher)
        if matcher.is_terminated():
            break
        token = pick.choice(ids)
        if token != EOS and pick.random() < 0.4:
            assert matcher.advance_bytes(VOCABULARY.tokens[token])
        else:
            assert matcher.advance(token)
        trail.append((allowed(matcher), matcher.may_stop(), matcher.forced_bytes()))
    steps = len(trail) - 1
    for _ in range(15):
        back = pick.randint(0, steps)
        twin = matcher.copy()
        twin.rollback(back)
        assert (allowed(twin), twin.may_stop(), twin.forced_bytes()) == trail[steps - back]
        other = twin.copy()
        for token in allowed(other)[:3]:
            assert other.copy().advance(token)
        assert (allowed(matcher), matcher.may_stop(), matcher.forced_bytes()) == trail[-1]
    with pytest.raises(ValueError, match="undo"):
        matcher.rollback(steps + 1)
    matcher.rollback(steps)
    assert (allowed(matcher), matcher.may_stop(), matcher.forced_bytes()) == trail[0]


@pytest.mark.parametrize(
    ("name", "after", "forced"),
    [
        ("at least one", "", b"<f="),
        ("free text with tags", "", b""),
        ("free text with tags", "<f=", b""),
        ("free text with tags", "<f=a>1</f", b">"),
        ("free text with tags", "<f=a>1<", b"/f>"),
        ("exactly one", "<f=a>1</", b"f>"),
        ("older shape", "<f", b"="),
        ("older shape", '<f=a>{"n":""}', b"</f>"),
        ("the first trigger decides", "aa", b"=END"),
    ],
)
def test_forced_bytes(name, after, forced):
    matcher = compiled(CASES[name][0])
    assert matcher.advance_bytes(after.encode())
    assert matcher.forced_bytes() == forced
    assert matcher.advance_bytes(forced)


def test_a_value_that_its_schema_refuses_is_never_closed():
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    matcher = compiled(spec({"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("a", schema)]}))
    assert any("uniqueItems" in word for word in matcher.origin.checked)
    assert matcher.advance_bytes(b"<f=a>[1,2,1")
    ids = allowed(matcher)
    assert ord("]") not in ids
    assert ord("2") in ids
    assert not matcher.advance_bytes(b"]</f>")
    assert matcher.advance_bytes(b"1]</f>")


def test_the_end_is_taken_back():
    matcher = compiled(triggered())
    assert matcher.advance(ord("x"))
    assert matcher.advance(EOS)
    assert matcher.is_terminated()
    assert allowed(matcher) == [EOS]
    assert not matcher.advance(ord("x"))
    assert not matcher.advance_bytes(b"x")
    matcher.rollback(1)
    assert matcher.advance(ord("x"))


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("{}", BadConstraint, "structures"),
        ("[]", BadConstraint, "object"),
        ("{", BadConstraint, "JSON"),
        ('{"type": "x", "format": {}}', BadConstraint, "'x'"),
        ('{"structures": [], "triggers": ["<"]}', BadConstraint, "structures"),
        (one_tag("[]"), BadConstraint, "triggers"),
        (one_tag('[""]'), BadConstraint, "empty"),
        (one_tag('["<b"]'), BadConstraint, "<a>"),
        ('{"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<"]}', BadConstraint, "/structures/0"),
        (
            '{"structures": [{"begin": "<a>", "schema": {"type": "x"}, "end": ""}], "triggers": ["<"]}',
            BadConstraint, "/structures/0/schema",
        ),
        (spec({"type": "tag", "begin": "", "end": "", "content": ANY}), BadConstraint, "needs an end"),
        (spec({"type": "regex", "pattern": "(a"}), BadConstraint, "/format"),
        (spec({"type": "grammar", "grammar": "root ::= b"}), BadConstraint, "line 1, column 10"),
        (spec({"type": "sequence", "elements": [{"type": "token"}]}), UnsupportedConstraint, "elements/0"),
        (spec({"type": "any_text", "max_tokens": 3}), UnsupportedConstraint, "max_tokens"),
        (spec({"type": "json_schema", "json_schema": {}, "style": "x_xml"}), UnsupportedConstraint, "x_xml"),
        (spec({"type": "const_string", "value": "\ud800"}), BadConstraint, "surrogate"),
        (spec({"type": "repeat", "min": 2, "max": 1, "content": CONST}), BadConstraint, "min"),
    ],
)  # fmt: skip
def test_mistakes_say_where(text, kind, told):
    with pytest.raises(kind, match=re.escape(told)):
        compiled(text)


def test_nesting_is_bounded():
    form: Spec = CONST
    for _ in range(200):
        form = {"type": "optional", "content": form}
    with pytest.raises(BadConstraint, match="inside of each other"):
        compiled(spec(form))


@settings(deadline=None, max_examples=tries(60))
@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
    st.text("ab<x", max_size=20),
)
def test_triggers_find_every_word_where_it_ends(words, text):
    watch = Triggers([word.encode() for word in words])
    state = 0
    for at, byte in enumerate(text.encode(), 1):
        state = watch.step(state, byte)
        assert watch.ends[state] == tuple(n for n, word in enumerate(words) if text[:at].endswith(word))


@settings(deadline=None, max_examples=tries(200))
@given(st.binary(max_size=6) | st.text(max_size=3).map(str.encode))
def test_utf8_steps_agree_with_the_decoder(data):
    state = 0
    for byte in data:
        state = utf8_step(state, byte) if state >= 0 else -1
    try:
        data.decode()
    except UnicodeDecodeError:
        assert state != 0
    else:
        assert state == 0


@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("text", ["{}", "[1]", "-12", '"a"', "null", "true", "0.5"])
def test_nothing_comes_after_a_whole_value(engine, text):
    """What the closers of JSON parts rely on: a value ends in its own last byte."""
    matcher = byte_matcher("json_schema", "true", engine).matcher
    assert matcher.advance_bytes(text.encode())
    assert matcher.may_stop()
    assert not any(matcher.copy().advance_bytes(bytes([byte])) for byte in b" \t\r\n")


NATIVE_DIFFERS = {
    "older shape": "not read in this spelling",
    "several ends": "`[a}}}`: the end is there once its first copy is; xgrammar also takes a later one",
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in NATIVE_DIFFERS])
def test_the_meaning_is_that_of_xgrammars_own(name):
    """xgrammar reads structural tags itself; this project does not use that, but means the same."""
    xgrammar = pytest.importorskip("xgrammar")
    tokens = [bytes([value]) for value in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    text, good, bad = CASES[name]
    native = compiler.compile_structural_tag(text)
    for one in [*good, *bad]:
        matcher = xgrammar.GrammarMatcher(native)
        assert (not one or matcher.accept_string(one)) * matcher.is_completed() == (one in good), one
