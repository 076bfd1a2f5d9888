"""The automaton accepts exactly what re.fullmatch accepts, or refuses the pattern; within its limits."""

from __future__ import annotations

import random
import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.automata.automaton import Limits
from runtime.grammar.automata.dfa import DEAD, compile_choices, compile_regex
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from tests.exploring import tries

ALPHABET = "abAB019_ -é日😊\n\tſKß.\u0660"

atoms = st.one_of(
    st.sampled_from(ALPHABET).map(re.escape),
    st.sampled_from(
        [
            r"\d",
            r"\D",
            r"\w",
            r"\W",
            r"\s",
            r"\S",
            ".",
            "[a-c]",
            "[^a]",
            "[^\\n]",
            r"[\w-]",
            r"[^\d_]",
            "[é-日]",
            "[A-B0]",
            "[]a]",
            "[^]a]",
            r"\x41",
            "\\u65e5",
            r"\n",
            "[ß-é]",
            "[k-s]",
            r"[^\W\d]",
        ]
    ),
)
places = st.sampled_from(["^", "$", r"\A", r"\Z", r"\b", r"\B"])
counts = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "??", "{0}", "{0,1}?"])


def groups(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        several.map("".join),
        several.map(lambda parts: "(" + "|".join(parts) + ")"),
        inner.map(lambda part: f"(?:{part})"),
        st.tuples(st.sampled_from(["i", "s", "m", "a", "-i", "is", "s-i"]), inner).map(
            lambda p: f"(?{p[0]}:{p[1]})"
        ),
        st.tuples(inner, counts).map(lambda p: f"(?:{p[0]}){p[1]}"),
        several.map(lambda parts: "(?:" + "|".join([*parts, ""]) + ")"),
    )


bodies = st.recursive(st.one_of(atoms, atoms, atoms, places), groups, max_leaves=7)
patterns = st.tuples(
    st.sampled_from(["", "", "", "(?i)", "(?s)", "(?m)", "(?a)", "(?ia)", "(?is)"]), bodies
).map("".join)
texts = st.text(st.sampled_from(ALPHABET), max_size=6)


def walk_somewhere(dfa, pick, limit=40):
    """A random accepted text, shorter paths preferred after a while; None if none was met in time."""
    state, data = 0, bytearray()
    while True:
        if dfa.accepts(state) and (dfa.is_final(state) or pick.random() < 0.3):
            return bytes(data).decode("utf-8")
        if len(data) > limit and not state % dfa.nodes:
            return None
        options = dfa.next_bytes(state)
        byte = pick.choice(options)
        state = dfa.step(state, byte)
        data.append(byte)


def expect_empty(error):
    """The only way in which these patterns may be refused: they match nothing at all."""
    if isinstance(error, UnsupportedConstraint) or "no text can match" not in str(error):
        raise error


def mutated(text, pick):
    cut = pick.randrange(len(text) + 1)
    kind = pick.randrange(4)
    if kind == 0:
        return text[:cut] + text[cut + 1 :]
    if kind == 1:
        return text[:cut] + pick.choice(ALPHABET) + text[cut:]
    if kind == 2:
        return text[:cut] + pick.choice(ALPHABET) + text[cut + 1 :]
    return text[:cut] + text[cut:].swapcase()


@settings(max_examples=tries(250), deadline=None)
@given(patterns, st.lists(texts, min_size=4, max_size=8), st.integers(0, 1 << 30))
def test_same_language_as_fullmatch(accepts, pattern, samples, seed):
    try:
        wanted = re.compile(pattern)
    except re.error:
        with pytest.raises(BadConstraint):
            compile_regex(pattern)
        return
    try:
        dfa = compile_regex(pattern)
    except BadConstraint as error:
        expect_empty(error)
        assert not any(wanted.fullmatch(text) for text in [*samples, ""])
        return
    pick = random.Random(seed)
    walked = [text for text in (walk_somewhere(dfa, pick) for _ in range(6)) if text is not None]
    for text in walked:
        assert wanted.fullmatch(text), f"{pattern!r} must not take {text!r}"
    for text in [*samples, *(mutated(text, pick) for text in walked for _ in range(4)), ""]:
        assert accepts(dfa, text) == bool(wanted.fullmatch(text)), f"{pattern!r} on {text!r}"


@settings(max_examples=tries(60), deadline=None)
@given(st.data(), bodies)
def test_takes_what_the_pattern_generates(accepts, data, pattern):
    try:
        dfa = compile_regex(pattern)
    except BadConstraint:
        return
    text = data.draw(st.from_regex(re.compile(pattern), fullmatch=True))
    if max(text, default="") >= "\ud800" and any("\ud800" <= char <= "\udfff" for char in text):
        return
    assert accepts(dfa, text)


@pytest.mark.parametrize(
    "pattern",
    [
        r"a$\n",
        r"(?m)a$\n^b",
        r"a$",
        r"^",
        r"$",
        r"\Z",
        r"(^a|b$)",
        r"x*^a",
        r"a\b",
        r"\Ba",
        r"a\b.\b",
        r"(?m:^a$\n?)*",
        r"\B",
        r"\b",
        "(a|b)$\n?",
        r"(?a)\w+",
        r"(?a)é\b\W",
        r"(?i)k",
        r"(?i)[k-s]",
        r"(?i)ß",
        r"(?i)[^k]",
        r"(?i)\u0130",
        r"(?i)µ",
        r"(?ia)k",
        r".",
        r"(?s).",
        r"[^\s\S]|a",
        r"(?x) a b # c",
        r"(?i:a)b",
        r"(?P<n>a)b",
        "a{,2}",
        "a{2",
        "{a}",
        "a|",
        "|",
        r"\d",
        r"[\d\-x]",
        r"\N{SNOWMAN}",
        r"\t\x0b\f\v",
        r"\07",
        "[\\b]",
        "()",
        "(a|)*b",
        "(a*)*b",
    ],
)
def test_corners_of_the_syntax(accepts, pattern):
    wanted = re.compile(pattern)
    dfa = None
    try:
        dfa = compile_regex(pattern)
    except BadConstraint as error:
        expect_empty(error)
    pool = [
        *ALPHABET,
        *"ksKSxyßẞİıiİµμΜ☃\x0b\x0c\x07\x08\x00{},2#c",
        "ʼ",
        "\u2028",
        "é1",
        "aa",
        "ab",
        "ba",
        "a\n",
        "\na",
        "a\nb",
        "a\n\n",
        "\n\n",
        "a.b",
        "a b",
        "éa",
        "é ",
        "a{2",
        "{a}",
        "SS",
        "ss",
        "aab",
        "a\na\n",
        "a ",
        " a",
        "i̇",
    ]
    for text in ["", *pool]:
        taken = dfa is not None and accepts(dfa, text)
        assert taken == bool(wanted.fullmatch(text)), f"{pattern!r} on {text!r}"


@pytest.mark.parametrize(
    "escape",
    [r"\d", r"\w", r"\s", r"[^\W_]", r"(?i)[à-ÿ]", r"(?a)\w", r"(?i)\u212a", r"[\ud000-\ue000]", "."],
)
def test_every_character_is_judged_as_python_does(escape):
    dfa, wanted = compile_regex(escape), re.compile(escape)
    states = {}
    for value in [
        *range(0x3000),
        *range(0xAC00, 0xAC40),
        *range(0xD7F0, 0xD800),
        *range(0xE000, 0xE010),
        *range(0xFFF0, 0x10450),
        *range(0x1D7C0, 0x1D810),
        *range(0x1F600, 0x1F650),
        0xFFFFF,
        0x100000,
        0x10FFFF,
    ]:
        data = chr(value).encode()
        head = states.setdefault(data[:-1], dfa.walk(0, data[:-1]))
        taken = head != DEAD and dfa.step(head, data[-1]) != DEAD
        assert taken == bool(wanted.fullmatch(chr(value))), f"{escape} U+{value:04X}"


def test_only_whole_utf8():
    dfa = compile_regex(".*")
    for data in (
        b"\x80",
        b"\xc0\xaf",
        b"\xc3",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",
        b"\xf0\x80\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\xff",
    ):
        state = dfa.walk(0, data)
        assert state == DEAD or not dfa.accepts(state), data
    assert dfa.next_bytes(dfa.walk(0, b"\xed")) == list(range(0x80, 0xA0))
    assert dfa.next_bytes(dfa.walk(0, b"\xf4")) == list(range(0x80, 0x90))
    assert dfa.next_bytes(dfa.walk(0, b"\xe0")) == list(range(0xA0, 0xC0))


@pytest.mark.parametrize(
    ("pattern", "named", "offset"),
    [
        (r"ab(?=c)", "look-ahead", 2),
        (r"a(?<!b)c", "look-behind", 1),
        (r"(?!x)y", "negative look", 0),
        (r"(a)b\1", "back reference", 4),
        (r"[(?=](?P<n>a)(?P=n)", "back reference", 13),
        (r"(a)?(?(1)b|c)", "conditional", 4),
        (r"a*+", "possessive", 1),
        (r"x(?>a|b)", "atomic", 1),
        (r"\(?=(?=a)", "look-ahead", 4),
    ],
)
def test_refusals_name_the_construct_and_its_place(pattern, named, offset):
    with pytest.raises(UnsupportedConstraint) as caught:
        compile_regex(pattern)
    assert named in str(caught.value)
    assert f"position {offset}" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "offset"),
    [("(a", 0), ("a)", 1), ("[z-a]", 1), ("a**", 2), ("ab\\", 2), ("x[a", 1), (r"\p{L}", 0), ("*", 0)],
)
def test_mistakes_carry_their_position(pattern, offset):
    with pytest.raises(BadConstraint, match=f"position {offset} of"):
        compile_regex(pattern)


@pytest.mark.parametrize("pattern", ["a^b", "a$b", r"[^\s\S]", "\ud800", r"a\bb", "[\ud800-\udfff]+"])
def test_an_empty_language_is_a_mistake(pattern):
    with pytest.raises(BadConstraint, match="no text can match"):
        compile_regex(pattern)


HOSTILE = [
    "[ab]*a[ab]{20}",
    "(a{1,500}){1,500}",
    "((a{1,500}b){1,500}){1,500}",
    "(a?b?){3000}",
    "(?:ab?c?|d?){2000}",
    ".*" * 2000,
    "(a|b|ab)*(c|d|cd){1,200}(a|b|ab){1,400}",
    "[^x]*x[^x]{30}.*y.{15}",
    "(" * 3000 + ")" * 3000,
    "a{99999999999}",
    "(a?){5000}",
    "((((a*)*)*)*)*b",
    "(x+x+)+y",
    "(.?){2000}",
    "(a|a)*" * 500,
    "|".join(f"ab{n}.*" for n in range(700)),
    "[" + "é" * 60000 + "]",
    r"(\w*\d\w*){40}",
    r"(?i)" + "straße" * 300,
    r"\b(\w+\b ?)*" * 20,
    "(^|a)*" * 200,
    "a" * 30_000,
    "(?:" * 300 + ")*" * 300,
    "z" * 500_000,
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_patterns_are_bounded(number):
    began, messages = time.thread_time(), []
    try:
        dfa = compile_regex(HOSTILE[number])
        dfa.next_bytes(0)
    except BadConstraint as error:
        messages.append(str(error))
    assert all(messages)
    assert time.thread_time() - began < 30


def test_limits_are_kept():
    with pytest.raises(BadConstraint, match="longer than 0 s"):
        compile_regex("(a?b?){900}", Limits(seconds=0.0))
    with pytest.raises(BadConstraint, match="more than 10 states"):
        compile_regex("a{20}", Limits(states=10))
    with pytest.raises(BadConstraint, match="spells out"):
        compile_regex("a{20}", Limits(positions=10))
    with pytest.raises(BadConstraint, match="MiB"):
        compile_choices([f"{n:09d}" for n in range(40_000)], Limits(table_bytes=1 << 20))


@settings(max_examples=tries(100), deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=8), st.lists(st.text(max_size=6), max_size=8))
def test_choices_are_exactly_the_options(accepts, options, others):
    dfa = compile_choices(options)
    for text in [
        *options,
        *others,
        *(option[:-1] for option in options),
        *(option + "x" for option in options),
    ]:
        assert accepts(dfa, text) == (text in options)


def test_bad_choices():
    with pytest.raises(BadConstraint, match="no options"):
        compile_choices([])
    with pytest.raises(BadConstraint, match="UTF-8"):
        compile_choices(["ok", "\ud800"])


@settings(max_examples=tries(70), deadline=None)
@given(patterns, st.integers(0, 1 << 30))
def test_forced_is_the_longest_unique_path(pattern, seed):
    try:
        dfa = compile_regex(pattern)
    except BadConstraint:
        return
    pick = random.Random(seed)
    state = 0
    for _ in range(12):
        path, at = bytearray(), state
        while not dfa.accepts(at):
            ways = [byte for byte in range(256) if dfa.step(at, byte) != DEAD]
            if len(ways) != 1:
                break
            path.append(ways[0])
            at = dfa.step(at, ways[0])
        assert dfa.forced(state) == (bytes(path), at)
        assert dfa.is_final(state) == (not dfa.next_bytes(state))
        if dfa.is_final(state):
            return
        state = dfa.step(state, pick.choice(dfa.next_bytes(state)))


def test_warnings_of_re_are_not_silenced_globally():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compile_regex("a|b")
    # What is thrown away just now may be another test's.
    assert not [one for one in seen if not issubclass(one.category, ResourceWarning)]
