"""What the sandbox checks beforehand: a template's source before it is parsed, and the size of an operation's
result, if that may be much larger than its input. The syntax tree gets the sandbox's filters here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Sized
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


def _lines(value: Any, /, *args: Any, **kwargs: Any) -> int:
    return len(value.splitlines()) + 1 if isinstance(value, str) else 2 * OBJECT


def _parts(text: str, sep: Any = None, maxsplit: int = -1) -> int:
    return OBJECT * (text.count(sep) if isinstance(sep, str) and sep else len(text))


_SLOW = ("urlize", "striptags", "pprint", "wordwrap", "wordcount", "title", "xmlattr", "urlencode",
         "truncate", "int")  # fmt: skip
_PADDING = ("center", "indent", "batch", "slice", "round", "ljust", "rjust", "zfill")
_ESCAPING = ("escape", "e", "forceescape")
_POSITIONS: Mapping[str, Callable[..., int]] = {
    "replace": lambda value, old="", new="", count=0: str(value).count(str(old)),
    "join": lambda values, d="", attribute=None: len(values) if isinstance(values, Sized) else 0,
    "sum": lambda values, attribute=None, start=0: 0 if isinstance(start, (int, float)) else len(values) ** 2,
    "format": lambda form, *args, **kwargs: str(form).count("%"),
    "str.format": lambda form, *args, **kwargs: form.count("{"),
    **dict.fromkeys(_PADDING, _lines),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _parts),
    **dict.fromkeys(_ESCAPING, lambda value: 0),
    **dict.fromkeys(_SLOW, lambda value, *args, **kwargs: len(str(value))),
}
"""Filters, and methods of texts, that may make much more than they are given -> in how many positions they
may insert their arguments, or a padding whose width is an argument."""
GROWING = frozenset(_POSITIONS)
GROWING_METHODS = GROWING - {"title"}  # only the filter is slow
_WIDTH = re.compile(r"\d{5}")  # digits of any script: str.format reads them all
_VARIABLE_WIDTH = {
    "format": re.compile(r"%[-#0 +]*(?:\*|\d*\.\*)"),
    "str.format": re.compile(r"\{[^{}]*:[^{}]*\{"),
}


def growth(
    size: Callable[[Any], int], name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int:
    """The most units of the result of filter or method `name`. Raises Limit."""
    inserted = 0
    for option in (*args, *kwargs.values()):
        if isinstance(option, int):
            inserted += max(0, option) if name in _PADDING else 0
        else:
            inserted += len(option) if isinstance(option, str) else size(option)
    if name in _VARIABLE_WIDTH:
        form = str(value)
        if _WIDTH.search(form) or _VARIABLE_WIDTH[name].search(form):
            raise Limit("the template formats to a width that is too big")
        inserted += max(map(int, re.findall(r"\d+", form)), default=0)
    if name in _SLOW and size(value) > SLOW_INPUT:
        raise Limit(f"the template hands more than {SLOW_INPUT} characters to a filter that is slow")
    units = size(value) + _POSITIONS[name](value, *args, **kwargs) * max(1, inserted)
    escapes = name in _ESCAPING or any(isinstance(one, Markup) for one in (value, *args))
    return ESCAPED * units if escapes else units


LISTING = frozenset({"list", "batch", "slice", "sort", "reverse", "unique", "groupby", "join", "sum"})
"""Filters that turn their input into a list."""
