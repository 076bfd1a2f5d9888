"""Programs and the calls of runs as diagrams: Mermaid and DOT text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_dsl import ir
from sglang_dsl.conversation.requests import CallRecord
from sglang_dsl.views.snapshot import constraint_of

MAX_LABEL = 48
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Box(NamedTuple):
    """`kind`: text, role, gen, select, tool, fork or join, which gives its shape."""

    number: int
    label: str
    kind: str


@dataclass
class Graph:
    """Boxes, and arrows between their numbers."""

    title: str
    boxes: list[Box] = field(default_factory=list)
    arrows: list[tuple[int, int]] = field(default_factory=list)

    def box(self, label: str, kind: str, after: Sequence[int]) -> int:
        """Add a box with arrows from the boxes `after`; returns its number."""
        number = len(self.boxes)
        self.boxes.append(Box(number, label, kind))
        self.arrows += [(before, number) for before in after]
        return number


def program_graph(title: str, body: ir.Seq, called: Iterable[tuple[str, ir.Seq]] = ()) -> Graph:
    """The nodes of a program in order, branches side by side, and the programs that it calls."""
    graph = Graph(title)
    _sequence(graph, body.nodes, [])
    for name, other in called:
        _sequence(graph, other.nodes, [graph.box(f"calls {name}", "role", [])])
    return graph


def _sequence(graph: Graph, nodes: Sequence[ir.Node], ends: list[int]) -> list[int]:
    """Add `nodes` after the boxes `ends`; returns their last boxes. Branches without a join stay open."""
    open_branches: list[int] = []
    for node, label, kind in _labelled(nodes):
        if isinstance(node, ir.Join):
            ends, open_branches = open_branches or ends, []
        ends = [graph.box(label, kind, ends)]
        if isinstance(node, ir.Fork):
            open_branches = []
            for branch in node.branches:
                open_branches += _sequence(graph, branch.nodes, ends)
    return ends


def _labelled(nodes: Sequence[ir.Node]) -> Iterator[tuple[ir.Node, str, str]]:
    """The nodes to draw, each with its label and kind. Ends of turns and scopes are not drawn."""
    for node in nodes:
        match node:
            case ir.RoleEnd() | ir.ScopeEnd() | ir.LoopEnd():
                continue
            case ir.Text(text=text):
                yield node, short(text), "text"
            case ir.Media():
                yield node, node.label(), "text"
            case ir.RoleBegin(role=role):
                yield node, role, "role"
            case ir.ScopeBegin(name=name):
                yield node, f"scope {name}", "role"
            case ir.Tools(tools=tools):
                names = (json.loads(one)["function"]["name"] for one in tools)
                yield node, short(f"tools: {', '.join(names)}"), "role"
            case ir.LoopBegin(max_steps=steps):
                yield node, f"tool loop: {steps} steps", "role"
            case ir.Gen(name=name):
                yield node, f"gen {name or '...'}{_constraint(node)}", "gen"
            case ir.Select(name=name, choices=choices):
                yield node, f"select {name or '...'}: {short(' | '.join(choices))}", "select"
            case ir.Fork(branches=branches):
                yield node, f"fork {len(branches)}", "fork"
            case ir.Join(mode=mode):
                yield node, f"join {mode}", "join"
            case _:
                yield node, short(node.label()), "text"


def _constraint(node: ir.Gen[Any]) -> str:
    constraint = constraint_of(node)
    if constraint is None:
        return ""
    return f" ~ {short(constraint.text)}" if constraint.kind == "regex" else f": {constraint.kind}"


def calls_graph(title: str, records: Sequence[CallRecord]) -> Graph:
    """The calls of a run with their tokens and seconds, a row for each branch."""
    calls = []
    for one in records:
        cost = f"{one.count('completion_tokens')} tokens, {one.seconds:.3f} s"
        calls.append((one.branch, one.kind, f"{one.kind} {one.name or '...'}: {cost}"))
    return branch_graph(title, calls)


def branch_graph(title: str, calls: Iterable[tuple[tuple[int, ...], str, str]]) -> Graph:
    """Calls, each a branch, kind and label, after the previous call of the branch or its parent."""
    graph = Graph(title)
    last: dict[tuple[int, ...], int] = {}
    for branch, kind, label in calls:
        outer = (branch[:length] for length in range(len(branch), -1, -1))
        before = next(([last[one]] for one in outer if one in last), [])
        last[branch] = graph.box(label, kind, before)
    return graph


_SHAPES = {
    "text": ('["', '"]', "box"),
    "role": ('(["', '"])', "note"),
    "gen": ('("', '")', "ellipse"),
    "select": ('{"', '"}', "diamond"),
    "tool": ('[["', '"]]', "component"),
    "fork": ('[/"', '"/]', "trapezium"),
    "join": ('[\\"', '"\\]', "invtrapezium"),
}
"""The shape of each kind of box: Mermaid's brackets, and DOT's name."""


def mermaid(graph: Graph) -> str:
    """A flowchart (mermaid.js.org/syntax/flowchart.html)."""
    lines = ["---", f"title: {_quoted(graph.title)}", "---", "flowchart TD"]
    for box in graph.boxes:
        begin, end, _ = _SHAPES[box.kind]
        lines.append(f"    n{box.number}{begin}{_entities(box.label)}{end}")
    lines += [f"    n{before} --> n{after}" for before, after in graph.arrows]
    return "\n".join(lines) + "\n"


def dot(graph: Graph) -> str:
    """A digraph (graphviz.org/doc/info/lang.html)."""
    lines = [f"digraph {_quoted(graph.title)} {{", "    node [fontname=monospace];"]
    lines += [f"    n{b.number} [label={_quoted(b.label)}, shape={_SHAPES[b.kind][2]}];" for b in graph.boxes]
    lines += [f"    n{before} -> n{after};" for before, after in graph.arrows]
    return "\n".join([*lines, "}"]) + "\n"


def short(text: str) -> str:
    line = _CONTROLS.sub(" ", text.replace("\n", "⏎"))
    return line if len(line) <= MAX_LABEL else line[: MAX_LABEL - 1] + "…"


def _quoted(text: str) -> str:
    escaped = _CONTROLS.sub(" ", text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _entities(text: str) -> str:
    return "".join(char if char.isalnum() or char in " .,:;_-/+=()⏎…" else f"#{ord(char)};" for char in text)
