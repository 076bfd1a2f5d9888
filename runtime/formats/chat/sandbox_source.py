"""Checks a template's source before parsing, and adds the sandbox's filters to its syntax tree. It knows
Jinja's syntax, not the filters' behaviour."""

from __future__ import annotations

from typing import cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from runtime.formats.chat.budget import ITEM, OBJECT, Limit

MAX_SOURCE_BYTES = 1 << 18
MAX_TOKENS = 16_000
"""Tokens of syntax without blanks. Parser and compiler need about 30 microseconds for each."""
MAX_NESTING = 64
"""Nested blocks and brackets."""
_OPENING = frozenset({"(", "[", "{"})
_CLOSING = frozenset({")", "]", "}"})
_BLOCKS = frozenset({"for", "if", "macro", "call", "filter", "with", "block", "autoescape", "generation"})


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
            depth += (value in _OPENING) - (value in _CLOSING)
        elif kind == "name" and before == "block_begin":
            depth += (value in _BLOCKS) - (value.removeprefix("end") in _BLOCKS and value.startswith("end"))
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
        terms: list[nodes.Expr] = [node.right]
        first = node.left
        while isinstance(first, nodes.Add):
            terms.append(first.right)
            first = first.left
        terms.append(first)
        terms = [self.visit(term) for term in reversed(terms)]
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
