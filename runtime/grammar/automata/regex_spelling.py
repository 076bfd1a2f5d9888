"""Writes a Python regular expression in the syntax of Rust's regex crates, meaning for meaning.

Classes are spelled out as code points, so that `\\w`, `\\s` or "ignore case" mean what Python means. It does
not compile anything.
"""

from __future__ import annotations

from runtime.grammar.automata.charset import SURROGATES, difference
from runtime.grammar.automata.regex_syntax import Alt, At, Chars, Node, Repeat, Seq, parse
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

_NOTHING = r"[^\s\S]"


def rust_spelling(pattern: str) -> str:
    """The language of re.fullmatch(pattern, .) as a Rust pattern that is matched as a whole.

    Raises BadConstraint (a mistake, with its position) or UnsupportedConstraint.
    """
    return spelled(parse(pattern))


def rust_literal(text: str) -> str:
    """`text` itself as a Rust pattern."""
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise BadConstraint("holds a lone surrogate, which no text has", where="constraint")
    return "".join(map(_point, map(ord, text))) or "(?:)"


def spelled(node: Node) -> str:
    """The same as rust_spelling, of a tree."""
    match node:
        case Chars(ranges):
            ranges = difference(ranges, SURROGATES)
            classes = "".join(_point(a) if a == b else f"{_point(a)}-{_point(b)}" for a, b in ranges)
            return f"[{classes}]" if classes else _NOTHING
        case Seq(items):
            return "".join(spelled(item) for item in items) or "(?:)"
        case Alt(options):
            return "(?:" + "|".join(spelled(option) for option in options) + ")" if options else _NOTHING
        case Repeat(item, low, high):
            return f"(?:{spelled(item)}){{{low},{'' if high is None else high}}}"
        case At(kind):
            raise UnsupportedConstraint(
                f"a condition on neighbouring characters ({kind}) inside of the pattern is not kept",
                where="regex",
                hint='grammar backend "outlines" keeps it',
            )


def _point(value: int) -> str:
    if chr(value).isascii() and chr(value).isalnum():
        return chr(value)
    return f"\\x{{{value:X}}}"
