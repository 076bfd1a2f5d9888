"""EBNF and Lark: grammars as users write them, against a recogniser of the definition, in every engine that
takes them; mistakes with line and column; bounds on recursion."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.byte_matcher import ByteMatcher, byte_matcher
from runtime.grammar.ebnf.reading import is_ebnf, parse_ebnf
from runtime.grammar.ebnf.tree import Alt, Chars, Grammar, Node, Ref, Repeat, Seq, endless_rule
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from tests.exploring import tries

ENGINES = ["llguidance", "xgrammar"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def accepts(face: ByteMatcher, text: str) -> bool:
    face = face.copy()
    return all(face.advance(byte) for byte in text.encode()) and face.may_stop()


def matches(grammar: Grammar, text: str) -> bool:
    """The definition: where each rule can end from each place, until nothing new is found."""
    table: dict[tuple[str, int], set[int]] = {
        (name, at): set() for name in grammar.rules for at in range(len(text) + 1)
    }

    def ends(node: Node, at: int) -> set[int]:
        match node:
            case Chars(ranges):
                fits = at < len(text) and any(first <= ord(text[at]) <= last for first, last in ranges)
                return {at + 1} if fits else set()
            case Ref(name):
                return table[name, at]
            case Seq(items):
                found = {at}
                for item in items:
                    found = {end for start in found for end in ends(item, start)}
                return found
            case Alt(options):
                return {end for option in options for end in ends(option, at)}
            case Repeat(item, low, high):
                rounds, found = {at}, {at} if low == 0 else set()
                for count in range(1, (len(text) + low + 1 if high is None else high) + 1):
                    rounds = {end for start in rounds for end in ends(item, start)}
                    if count >= low:
                        if rounds <= found:
                            break
                        found |= rounds
                return found

    changed = True
    while changed:
        changed = False
        for (name, at), known in table.items():
            new = ends(grammar.rules[name], at) - known
            known |= new
            changed = changed or bool(new)
    return len(text) in table[grammar.root, 0]


JSON = r"""
# JSON, compact
root   ::= value
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (pair ("," pair)*)? "}"
pair   ::= string ":" value
array  ::= "[" (value ("," value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
"""
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "literal": ('root ::= "Hello, World!"', ["Hello, World!"], ["Hello", "hello, World!", ""]),
    "alternation": (
        'root ::= city " is " status\ncity ::= "London" | "Paris"\nstatus ::= "big" | "the capital of " city',
        ["London is big", "Paris is the capital of Paris"],
        ["London", "Rome is big", "London is "],
    ),
    "digits": ("root ::= [0-9]{3} | [0-9]{5,}", ["123", "12345", "1234567"], ["12", "1234", "12a"]),
    "phone": (
        'root ::= "(" d{3} ") " d{3} "-" d{4}\nd ::= [0-9]',
        ["(555) 123-4567"], ["555 123-4567", "(55) 123-4567"],
    ),
    "date": (
        'root ::= y "-" m "-" d\ny ::= [0-9]{4}\nm ::= "0" [1-9] | "1" [0-2]\nd ::= [0-2] [0-9] | "3" [01]',
        ["2026-11-21", "1999-01-31"], ["2026-13-01", "26-11-21", "2026-11-41"],
    ),
    "hex": (
        'root ::= "#" ([0-9a-fA-F]{6} | [0-9a-fA-F]{3})', ["#ff00AA", "#abc"], ["#ff00", "ff00AA", "#xyz"],
    ),
    "parameters in a fixed order": (
        'root ::= "f(" ("a=" n)? (("," )? "b=" n)? ")"\nn ::= [0-9]+',
        ["f()", "f(a=1)", "f(a=1,b=22)", "f(b=2)"], ["f(b=2,a=1)", "f(a=)", "f(a=1"],
    ),
    "parameters in any order": (
        'root ::= "f(" (a ("," b)? | b ("," a)?)? ")"\na ::= "a=" [0-9]\nb ::= "b=" [a-z]',
        ["f()", "f(a=1,b=x)", "f(b=x,a=1)", "f(b=x)"], ["f(a=1,a=1)", "f(,a=1)"],
    ),
    "arithmetic": (
        'root ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" root ")"\n',
        ["1+2*3", "((1+2)*(3))", "7"], ["1+", "(1", "1+2)", "()"],
    ),
    "left recursion": (
        'root ::= root "," item | item\nitem ::= [a-z]+', ["a", "ab,c,d"], ["", ",", "a,", "A"],
    ),
    "json": (
        JSON,
        ['{"a":[1,-2.5e+3,"x\\n\\u00e9",null]}', "[]", "true", '""', "[[[]]]", '"é😀"'],
        ["{a:1}", "[1,]", "01", '"\n"', "nul", ""],
    ),
    "nested": ('root ::= "(" root ")" | "[" root "]" | ""', ["", "([])", "[[()]]"], ["(]", "(", ")("]),
    "continuation lines": (
        'root ::= "a" |\n   "b"\n   | ("c"\n     "d") # end\n\n', ["a", "b", "cd"], ["ab", "c"],
    ),
    "any character": ('root ::= . [^a-z\\]é] "\\u00e9"', ["xAé", "\nXé", "😀0é"], ["xaé", "x]é", "xéé"]),
    "nul and escapes": ('root ::= "\\x00b" "\\t\\"\\\\"', ['\x00b\t"\\'], ["\x0b\t", "b"]),
    "only the way that ends": ('root ::= "a" loop | "b"\nloop ::= "x" loop', ["b"], ["a", "ax"]),
    "greedy tokens would fail": (
        'root ::= name "end" | "<" root ">"\nname ::= [a-z]+',
        ["xend", "endend", "<fooend>"], ["end", "foo", "<foo>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_language(engine, name):
    spec, good, bad = CASES[name]
    face, grammar = byte_matcher("ebnf", spec, engine), parse_ebnf(spec)
    for text in [*good, *bad]:
        assert matches(grammar, text) == (text in good), text
        assert accepts(face, text) == (text in good), text


@pytest.mark.parametrize("name", CASES)
def test_auto_takes_all(name):
    spec, good, _ = CASES[name]
    assert all(accepts(byte_matcher("ebnf", spec), text) for text in good)


@pytest.mark.parametrize("name", CASES)
def test_walks_stay_inside(engine, name):
    spec = CASES[name][0]
    first, grammar, pick = byte_matcher("ebnf", spec, engine), parse_ebnf(spec), random.Random(5)
    for _ in range(6):
        face, text = first.copy(), b""
        while len(text) < 24:
            offered = face.next_bytes()
            if face.may_stop() and (not offered or pick.random() < 0.3):
                assert matches(grammar, text.decode())
                break
            byte = pick.choice(sorted(offered))
            refused = pick.choice(sorted(set(range(256)) - offered))
            assert not face.advance(refused)
            assert face.advance(byte)
            text += bytes([byte])


ATOMS = st.sampled_from(['"a"', '"ab"', '"b"', "[ab]", "[^a]", '""', "x", "y", "root"])
COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}"])
BODIES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(" ".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]} | {pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}"])).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=tries(60))
@given(BODIES, BODIES, BODIES, st.lists(st.text("ab", max_size=6), min_size=4, max_size=8))
def test_random_grammars_agree_with_the_definition(root, x, y, texts):
    spec = f"root ::= {root}\nx ::= {x}\ny ::= {y}\n"
    try:
        grammar = parse_ebnf(spec)
    except BadConstraint:
        with pytest.raises(BadConstraint, match="no finite text"):
            parse_ebnf(spec)
        return
    for engine in ENGINES if endless_rule(grammar) is None else ENGINES[:1]:
        face = byte_matcher("ebnf", spec, engine)
        for text in texts:
            assert accepts(face, text) == matches(grammar, text), (engine, text)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ('root ::= "a', "string is not closed, at line 1, column 10"),
        ('root ::= "a"\nx ::= [a', "not closed, at line 2, column 7"),
        ('root ::= "x"\n  | (b "c"', "not closed, at line 2, column 5"),
        ("root ::= b", "'b' is not defined, at line 1, column 10"),
        ('root ::= "a" )', "a ) without its (, at line 1, column 14"),
        ('root ::= "a"{3,1}', "counts down, at line 1, column 13"),
        ('root ::= "a"{x}', "at line 1, column 13"),
        ('root ::= "a"{9999999}', "at line 1, column 13"),
        ('root ::= (("a"{0,500}){0,500}){0,2}', "spells out to more than"),
        ('root ::= "\\q"', "unknown escape \\q, at line 1, column 11"),
        ('root ::= "\\x0"', "2 hexadecimal digits, at line 1, column 11"),
        ('root ::= "\\ud800"', "no character, at line 1"),
        ("root ::= [z-a]", "ends before it begins, at line 1, column 11"),
        ('a ::= "a"', "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "second time, at line 2, column 1"),
        ('root ::= "a"\n\n  %%', "unexpected '%', at line 3, column 3"),
        ("root ::= root", "no finite text matches"),
        ('root ::= "a" root', "no finite text matches"),
        ("root ::= []", "no finite text matches"),
        ("root ::= " + "(" * 500 + '"a"' + ")" * 500, "more than 100 deep"),
        (
            "root ::= r0\n" + "".join(f'r{n} ::= "(" r{n + 1} ")"\n' for n in range(3000)) + 'r3000 ::= "a"',
            "inside of each other",
        ),
    ],
)
def test_mistakes_say_where(engine, spec, told):
    with pytest.raises(BadConstraint) as caught:
        byte_matcher("ebnf", spec, engine)
    assert told in str(caught.value)


@pytest.mark.parametrize("spec", ['root ::= (= "a") "a"', "root ::= Token(3)"])
def test_extensions_of_one_engine_are_refused_by_name(engine, spec):
    with pytest.raises(UnsupportedConstraint, match=r"line 1, column 10"):
        byte_matcher("ebnf", spec, engine)


@pytest.mark.parametrize(
    "spec",
    ['root ::= root | "a"', "root ::= y\ny ::= (((y)+)?)*", 'root ::= x root y | "a"\nx ::= "x"?\ny ::= x'],
)
def test_a_rule_that_stands_for_itself(spec):
    """xgrammar follows it until its stack is full: refused there, kept by `auto`."""
    with pytest.raises(UnsupportedConstraint, match="itself"):
        byte_matcher("ebnf", spec, "xgrammar")
    face = byte_matcher("ebnf", spec)
    for text in ("", "a", "xa", "ax", "b"):
        assert accepts(face, text) == matches(parse_ebnf(spec), text)


LARK = 'start: "<" item ("," item)* ">"\nitem: NAME | start\nNAME: /[a-z]+/\n'


def test_lark():
    face = byte_matcher("ebnf", LARK)
    assert face.matcher.origin.backend == "llguidance"
    assert accepts(face, "<ab,<c>>")
    assert not accepts(face, "<ab,>")
    assert not accepts(face, "ab")
    assert accepts(byte_matcher("ebnf", 'start: A "::=" A\nA: "x"'), "x::=x")
    with pytest.raises(UnsupportedConstraint, match="Lark"):
        byte_matcher("ebnf", LARK, "xgrammar")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ('start: "a" b\n', "line 1, column 8"),
        ('start: "a"\nx: (\n', "line 2, column 5"),
        ("start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(9000)) + 'r9000: "a"', "inside of them"),
        ("start: start\n", "ebnf"),
    ],
)
def test_mistakes_in_lark_say_where(spec, told):
    with pytest.raises(BadConstraint) as caught:
        byte_matcher("ebnf", spec)
    assert told in str(caught.value)


def test_which_is_which():
    assert is_ebnf('# comment\n  root ::= "a"')
    assert is_ebnf('my-rule.x ::= "a"')
    assert not is_ebnf('start: "a ::= b"')
    assert not is_ebnf('start: "::="')


@pytest.mark.parametrize(
    "spec",
    [
        'root ::= ((("a"?)*)*)* "b"',
        "root ::= " + '"a"? ' * 400,
        "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(300)) + 'r300 ::= "a"',
        'root ::= ("a" root){0,5000} | "b"',
        'root ::= "a"* "a"* "a"* root?',
    ],
)
def test_hostile_grammars_are_followed_or_refused_in_time(engine, spec):
    begun = time.thread_time()
    try:
        face = byte_matcher("ebnf", spec, engine)
        for _ in range(50):
            face.advance(ord("a"))
            face.next_bytes()
    except BadConstraint:
        pass
    assert time.thread_time() - begun < 30
