"""Grammars in EBNF (GBNF: `root ::= "a" [0-9]{2} | item`), read into a tree.

No part is matched greedily. The syntax:

    grammar      = rule+                           the rule `root` is the start
    rule         = name "::=" alternatives
    alternatives = sequence ("|" sequence)*        a sequence may be empty
    item         = (literal | class | "." | name | "(" alternatives ")") count*
    count        = "*" | "+" | "?" | "{m}" | "{m,}" | "{m,n}"
    literal      = "..." with \\n \\r \\t \\" \\\\ \\xHH \\uHHHH \\UHHHHHHHH;  class = [a-z0-9_] or [^...]
    comment      = # to the end of the line
"""

from __future__ import annotations

import re

from runtime.grammar.automata.charset import EVERYTHING, Ranges, complement, union
from runtime.grammar.automata.regex_syntax import EMPTY, Alt, Chars, Node, Ref, Repeat, Seq
from runtime.grammar.ebnf.tree import MAX_DEPTH, Grammar, productive, size_of
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

KIND = "ebnf"
MAX_NESTING = 100
MAX_RULES = 20_000

MAX_POSITIONS = 50_000
"""Characters of a rule with its counts written out."""


_RULE_HEAD = re.compile(r"[ \t]*([A-Za-z_][\w.-]*)[ \t]*::=", re.ASCII)
_IS_EBNF = re.compile(r"^[ \t]*[A-Za-z_][\w.-]*[ \t]*::=", re.MULTILINE | re.ASCII)
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_SKIP = re.compile(r"(?:\s|#[^\n]*)*")
_COUNT = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_ESCAPES = {"n": 10, "r": 13, "t": 9, "0": 0, "a": 7, "b": 8, "f": 12, "v": 11, "e": 27}
_HEX = {"x": 2, "u": 4, "U": 8}
_SAME = frozenset("\\\"'[]-^/.|*+?(){}$ ")


def is_ebnf(spec: str) -> bool:
    """Whether `spec` is EBNF (a line of it begins with `name ::=`), rather than Lark."""
    return _IS_EBNF.search(spec) is not None


_LARK_RULE = re.compile(r"[ \t]*[?!]?[A-Za-z_]\w*(?:[\[.{][^:\n]*)?[ \t]*:", re.ASCII)


def check_lark_depth(spec: str) -> None:
    """Refuse a Lark grammar whose rules and groups may stand more than MAX_DEPTH inside of each other; rules
    are taken to use each other."""
    total = deepest = open_ = 0
    for number, line in enumerate(spec.splitlines(), 1):
        if _LARK_RULE.match(line):
            total, deepest, open_ = total + 1 + deepest, 0, 0
        for char in line:
            open_ += (char in "([") - (char in ")]")
            deepest = max(deepest, open_)
        if total + deepest > MAX_DEPTH:
            text = f"has more than {MAX_DEPTH} rules and groups inside of them, at line {number}"
            raise BadConstraint(text, where=KIND, hint="flatten it")


def parse_ebnf(spec: str) -> Grammar:
    """The grammar in `spec`. Raises BadConstraint with line and column: a mistake, a rule that is not
    defined or defined twice, counts out of bounds, no way to finish; UnsupportedConstraint for extensions of
    single engines."""
    rules = _Reader(spec).read()
    return productive(rules, KIND)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._used: dict[str, int] = {}

    def read(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip()
        while self._at < len(self._text):
            head = _RULE_HEAD.match(self._text, self._at)
            if head is None:
                raise self._mistake("expected a rule (name ::= ...)")
            name = head[1]
            if name in rules:
                raise self._mistake(f"the rule {name!r} is defined a second time")
            if len(rules) >= MAX_RULES:
                raise self._mistake(f"more than {MAX_RULES} rules")
            start, self._at = self._at, head.end()
            rules[name] = self._alternatives()
            if size_of(rules[name]) > MAX_POSITIONS:
                self._at = start
                raise self._mistake(f"the rule {name!r} spells out to more than {MAX_POSITIONS} characters")
            if self._peek() == ")":
                raise self._mistake("a ) without its (")
        for name, position in self._used.items():
            if name not in rules:
                self._at = position
                raise self._mistake(f"the rule {name!r} is not defined")
        if "root" not in rules:
            self._at = 0
            raise self._mistake("there is no rule 'root'")
        return rules

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while True:
            self._skip()
            if self._peek() in ("", "|", ")") or _RULE_HEAD.match(self._text, self._at):
                return items[0] if len(items) == 1 else Seq(tuple(items))
            items.append(self._repeated(self._item()))

    def _item(self) -> Node:
        match self._peek():
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return Chars(EVERYTHING)
            case "(":
                return self._group()
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._mistake(f"unexpected {self._peek()!r}")
        if self._text[name.end() : name.end() + 1] == "(":
            raise self._unsupported(f"the extension {name[0]}(...)")
        self._used.setdefault(name[0], self._at)
        self._at = name.end()
        return Ref(name[0])

    def _group(self) -> Node:
        start = self._at
        if self._text.startswith("(=", start):
            raise self._unsupported("look-ahead (= ...)")
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._mistake(f"groups are nested more than {MAX_NESTING} deep")
        self._at += 1
        node = self._alternatives()
        if self._peek() != ")":
            self._at = start
            raise self._mistake("this ( is not closed")
        self._at += 1
        self._depth -= 1
        return node

    def _repeated(self, node: Node) -> Node:
        while True:
            self._skip()
            match self._peek():
                case "*":
                    node = Repeat(node, 0, None)
                case "+":
                    node = Repeat(node, 1, None)
                case "?":
                    node = Repeat(node, 0, 1)
                case "{":
                    node = self._counted(node)
                    continue
                case _:
                    return node
            self._at += 1

    def _counted(self, node: Node) -> Node:
        count = _COUNT.match(self._text, self._at)
        if count is None:
            raise self._mistake("expected {m}, {m,} or {m,n}")
        low = int(count[1])
        high = int(count[3]) if count[3] else (None if count[2] else low)
        if high is not None and high < low:
            raise self._mistake(f"{count[0]} counts down")
        if max(low, high or 0) > MAX_POSITIONS:
            raise self._mistake(f"{count[0]} repeats more than {MAX_POSITIONS} times")
        self._at = count.end()
        return Repeat(node, low, high) if high != 0 else EMPTY

    def _literal(self) -> Node:
        start = self._at
        self._at += 1
        points: list[int] = []
        while self._peek() != '"':
            if self._peek() in ("", "\n"):
                self._at = start
                raise self._mistake("this string is not closed")
            points.append(self._point())
        self._at += 1
        return Seq(tuple(Chars(((point, point),)) for point in points))

    def _class(self) -> Node:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        parts: list[Ranges] = []
        while self._peek() != "]":
            if self._peek() in ("", "\n"):
                self._at = start
                raise self._mistake("this [ is not closed")
            start_of_range = self._at
            first = last = self._point()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._point()
            if last < first:
                self._at = start_of_range
                raise self._mistake("the range ends before it begins")
            parts.append(((first, last),))
        self._at += 1
        members = union(*parts) if parts else ()
        return Chars(complement(members) if negated else members)

    def _point(self) -> int:
        """One character, or what an escape stands for."""
        char = self._text[self._at]
        if char != "\\":
            self._at += 1
            return self._scalar(ord(char), self._at - 1)
        start, letter = self._at, self._text[self._at + 1 : self._at + 2]
        digits = _HEX.get(letter)
        if digits is not None:
            spelled = self._text[start + 2 : start + 2 + digits]
            if len(spelled) < digits or re.fullmatch(r"[0-9A-Fa-f]+", spelled) is None:
                raise self._mistake(f"\\{letter} needs {digits} hexadecimal digits")
            self._at = start + 2 + digits
            return self._scalar(int(spelled, 16), start)
        if letter not in _ESCAPES and letter not in _SAME:
            raise self._mistake(f"unknown escape \\{letter}")
        self._at += 2
        return _ESCAPES.get(letter, ord(letter))

    def _scalar(self, point: int, position: int) -> int:
        if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
            self._at = position
            raise self._mistake(f"U+{point:04X} is no character")
        return point

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self) -> None:
        skipped = _SKIP.match(self._text, self._at)
        self._at = skipped.end() if skipped is not None else self._at

    def _position(self) -> str:
        line = self._text.count("\n", 0, self._at) + 1
        return f"line {line}, column {self._at - self._text.rfind(chr(10), 0, self._at)}"

    def _mistake(self, what: str) -> BadConstraint:
        return BadConstraint(f"{what}, at {self._position()}", where=KIND)

    def _unsupported(self, what: str) -> UnsupportedConstraint:
        return UnsupportedConstraint(f"{what} is not kept, at {self._position()}", where=KIND)


def literal(text: str) -> Node:
    """`text` itself. Raises BadConstraint for a lone surrogate, which no text has."""
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise BadConstraint("holds a lone surrogate, which no text has", where="constraint")
    return Seq(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def from_node(node: Node, kind: str) -> Grammar:
    """The grammar of one tree. Raises BadConstraint if it is over MAX_POSITIONS or matches nothing."""
    if size_of(node) > MAX_POSITIONS:
        raise BadConstraint(f"spells out to more than {MAX_POSITIONS} characters", where=kind)
    return productive({"root": node}, kind)
