"""What the sandbox checks beforehand: a template's source before it is parsed, and the size of an operation's
result, if that may be much larger than its input. The syntax tree gets the sandbox's filters here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

MAX_SOURCE_BYTES = 1 << 18
MAX_TOKENS = 16_000
"""Tokens of syntax without blanks. Parser and compiler need about 30 microseconds for each."""
MAX_NESTING = 64
"""Nested blocks and brackets."""
SLOW_INPUT = 100_000
OBJECT = 32
"""Units of a new object, and of one iteration of a loop. A character of a new text is one unit."""
ITEM = 8
ESCAPED = 6
"""The most characters that escaping makes of one."""
_NESTING = ("for", "if", "macro", "call", "filter", "with", "block", "autoescape", "generation")


class Limit(jinja2.TemplateError):
    """The template exceeded a limit of the sandbox."""


def check_source(environment: jinja2.Environment, source: str) -> None:
    """Raises Limit if a source is too long or nested too deeply to be parsed quickly; and the lexer's errors
    for invalid Jinja."""
    # Each character is at least one byte; encoding a huge text would itself take time.
    if len(source) > MAX_SOURCE_BYTES or len(source.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
        raise Limit(f"the template has more than {MAX_SOURCE_BYTES} bytes")
    depth = tokens = 0
    before = ""
    for line, kind, value in environment.lexer.tokeniter(source, None):
        if kind in ("whitespace", "data"):
            continue
        tokens += 1
        if tokens > MAX_TOKENS:
            raise Limit(f"the template has more than {MAX_TOKENS} words and signs of syntax")
        if kind == "operator":
            depth += (value in "([{") - (value in ")]}")
        elif kind == "name" and before == "block_begin":
            depth += (value in _NESTING) - (value[:3] == "end" and value[3:] in _NESTING)
        if depth > MAX_NESTING:
            raise Limit(f"line {line}: the template is nested more than {MAX_NESTING} deep")
        before = kind


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Bounded(NodeTransformer):
    """Puts the sandbox's filters around operations that jinja2 compiles to plain Python and a loop could
    repeat."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        # An iteration appends the loop's own texts to a buffer, one by one.
        texts = sum(1 for part in node.body for _ in part.find_all(nodes.TemplateData))
        self.generic_visit(node)
        units = nodes.Const(OBJECT + ITEM * texts, lineno=node.lineno)
        node.iter = _filter(cast(nodes.Expr, node.iter), "sandbox_rounds", units)
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """`a + b + c` as one call: a call for each sum would dominate the cost of rendering."""
        terms = [node.right]
        first = node.left
        while isinstance(first, nodes.Add):
            terms.append(first.right)
            first = first.left
        terms = [self.visit(term) for term in (first, *reversed(terms))]
        return _filter(nodes.Tuple(terms, "load", lineno=node.lineno), "sandbox_sum")

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "sandbox_text")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if any(not _small(side.expr) and (side.op != "eq" or not _small(node.expr)) for side in node.ops):
            node.expr = _filter(node.expr, "sandbox_new")
        return node

    def _new(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return node if _small(node) else _filter(node, "sandbox_new")

    visit_List = visit_Dict = _new

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._new(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._new(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)


def _small(node: nodes.Expr) -> bool:
    """Whether it is a literal in the source, and so no larger than that."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


# -- the size of an operation's result -----------------------------------------------------------------------

Size = Callable[[Any], int]

_WIDTH = re.compile(r"\d{5}")  # digits of any script: str.format reads them all
_NUMBER = re.compile(r"\d+")


def _formatted(
    mark: str, variable: re.Pattern[str], size: Size, form: Any, /, *args: Any, **kwargs: Any
) -> int:
    """Units of a format whose placeholders begin with `mark`: each may print all values. `variable` matches
    a width that is a value. Nothing else is padded to more than the largest number in the format."""
    text = str(form)
    if _WIDTH.search(text) or variable.search(text):
        raise Limit("the template formats to a width that is too big")
    widest = max(map(int, _NUMBER.findall(text)), default=0)
    return text.count(mark) * (size(args) + size(kwargs) + widest) * _escaped(form)


percents = partial(_formatted, "%", re.compile(r"%[-#0 +]*(?:\*|\d*\.\*)"))
"""Units of `form % args` or `form % kwargs`."""
braces = partial(_formatted, "{", re.compile(r"\{[^{}]*:[^{}]*\{"))
"""Units of `form.format(*args, **kwargs)`."""


def _escaped(text: Any) -> int:
    """Markup escapes inserted text."""
    return ESCAPED if isinstance(text, Markup) else 1


def _replaced(size: Size, s: Any, /, old: Any, new: Any, count: Any = None) -> int:
    return str(s).count(str(old)) * len(str(new)) * _escaped(s)


def _joined(size: Size, value: Any, /, d: Any = "", attribute: Any = None) -> int:
    return (size(value) + len(str(d)) * len(value)) * _escaped(d)


def _split(size: Size, text: str, /, sep: Any = None, maxsplit: int = -1) -> int:
    return OBJECT * (text.count(sep) if isinstance(sep, str) and sep else len(text))


def _padded(size: Size, value: Any, /, *args: Any, **kwargs: Any) -> int:
    """The size of a result that is padded to a width given as an argument, on each line."""
    widths = (len(one) if isinstance(one, str) else one for one in (*args, *kwargs.values()))
    longest = max((width for width in widths if isinstance(width, int)), default=0)
    parts = len(value.splitlines()) + 1 if isinstance(value, str) else 2 * OBJECT
    return parts * max(0, longest)


def _slow(size: Size, value: Any, /, *args: Any, **kwargs: Any) -> int:
    """For filters that process a text with Python loops or regular expressions, and may insert other
    texts."""
    units = size(value)
    if units > SLOW_INPUT:
        raise Limit(f"the template hands more than {SLOW_INPUT} characters to a filter that is slow")
    return units * sum(len(option) for option in (*args, *kwargs.values()) if isinstance(option, str))


def _flattened(size: Size, value: Any, /, attribute: Any = None, start: Any = 0) -> int:
    """Each sum of lists copies the ones before."""
    return 0 if isinstance(start, (int, float)) else len(value) * (size(value) + size(start))


_SLOW_FILTERS = ("urlize", "striptags", "pprint", "wordwrap", "wordcount", "title", "xmlattr", "urlencode",
                 "truncate", "int")  # fmt: skip
FILTER_GROWTH: Mapping[str, Callable[..., int]] = {
    "replace": _replaced,
    "join": _joined,
    "format": percents,
    "sum": _flattened,
    **dict.fromkeys(("center", "indent", "batch", "slice", "round"), _padded),
    **dict.fromkeys(("escape", "e", "forceescape"), lambda size, value, /: ESCAPED * size(value)),
    **dict.fromkeys(_SLOW_FILTERS, _slow),
}
METHOD_GROWTH: Mapping[str, Callable[..., int]] = {
    "replace": _replaced,
    "join": lambda size, text, values, /: (
        _joined(size, values, text) if isinstance(values, (str, list, tuple, dict)) else 0
    ),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _split),
}
"""The growth of methods of texts."""
LISTING = frozenset({"list", "batch", "slice", "sort", "reverse", "unique", "groupby", "join", "sum"})
"""Filters that turn their input into a list."""
