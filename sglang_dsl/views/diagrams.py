"""Compiled programs, and finished runs, as diagrams: Mermaid and DOT text. Knows no drawing program."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_dsl.conversation.requests import CallRecord
from sglang_dsl.ir import (
    Fork,
    Gen,
    Join,
    LoopBegin,
    LoopEnd,
    Media,
    Node,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Seq,
    Text,
    Tools,
)
from sglang_dsl.views.outline import constraint_of

LONGEST = 48
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class Box:
    """One box: its number, what stands in it, and what it is (text, gen, select, tool, fork, join, ...)."""

    number: int
    label: str
    kind: str


@dataclass
class Graph:
    """Boxes and arrows between their numbers."""

    title: str
    boxes: list[Box] = field(default_factory=list)
    arrows: list[tuple[int, int]] = field(default_factory=list)

    def box(self, label: str, kind: str, after: Sequence[int]) -> int:
        """A new box behind those numbered; its number."""
        number = len(self.boxes)
        self.boxes.append(Box(number, label, kind))
        self.arrows += [(before, number) for before in after]
        return number


def program_graph(title: str, body: Seq, called: Iterable[tuple[str, Seq]] = ()) -> Graph:
    """The nodes of a program in order, branches side by side between a fork and its join; programs that it
    `called` stand beside it."""
    graph = Graph(title)
    _sequence(graph, body.nodes, [])
    for name, other in called:
        _sequence(graph, other.nodes, [graph.box(f"calls {name}", "role", [])])
    return graph


def _sequence(graph: Graph, nodes: Sequence[Node], ends: list[int]) -> list[int]:
    """Draw `nodes` behind the boxes `ends`; the boxes they end with. Branches that no join ends stay open."""
    open_branches: list[int] = []
    for node, label, kind in _drawn(nodes):
        if isinstance(node, Fork):
            fork = graph.box(label, kind, ends)
            open_branches = []
            for branch in node.branches:
                open_branches += _sequence(graph, branch.nodes, [fork])
            ends = [fork]
        elif isinstance(node, Join):
            ends = [graph.box(label, kind, open_branches or ends)]
            open_branches = []
        else:
            ends = [graph.box(label, kind, ends)]
    return ends


def _drawn(nodes: Sequence[Node]) -> Iterator[tuple[Node, str, str]]:
    """What is drawn of each node. The ends of turns and scopes are left out: the next one's begin tells."""
    for node in nodes:
        match node:
            case RoleEnd() | ScopeEnd() | LoopEnd():
                continue
            case Text(text=text):
                yield node, short(text), "text"
            case Media():
                yield node, node.label(), "text"
            case RoleBegin(role=role):
                yield node, role, "role"
            case ScopeBegin(name=name):
                yield node, f"scope {name}", "role"
            case Tools(tools=tools):
                names = (json.loads(one)["function"]["name"] for one in tools)
                yield node, short(f"tools: {', '.join(names)}"), "role"
            case LoopBegin(max_steps=steps):
                yield node, f"tool loop: {steps} steps", "role"
            case Gen(name=name):
                yield node, f"gen {name or '...'}{_form(node)}", "gen"
            case Select(name=name, choices=choices):
                yield node, f"select {name or '...'}: {short(' | '.join(choices))}", "select"
            case Fork(branches=branches):
                yield node, f"fork {len(branches)}", "fork"
            case Join(mode=mode):
                yield node, f"join {mode}", "join"
            case _:
                yield node, short(node.label()), "text"


def _form(node: Gen[Any]) -> str:
    held = constraint_of(node)
    if held is None:
        return ""
    return f" ~ {short(held.text)}" if held.kind == "regex" else f": {held.kind}"


def calls_graph(title: str, records: Sequence[CallRecord]) -> Graph:
    """The calls of a finished run, each branch in a row of its own, with tokens and seconds."""
    graph = Graph(title)
    last: dict[tuple[int, ...], int] = {}
    for record in records:
        made = record.count("completion_tokens")
        label = f"{record.kind} {record.name or '...'}: {made} tokens, {record.seconds:.3f} s"
        before = last.get(record.branch)
        branch = record.branch
        while before is None and branch:
            branch = branch[:-1]
            before = last.get(branch)
        last[record.branch] = graph.box(label, record.kind, [] if before is None else [before])
    return graph


# -- notations -----------------------------------------------------------------------------------------------

_SHAPES = {
    "text": ('["', '"]'),
    "role": ('(["', '"])'),
    "gen": ('("', '")'),
    "select": ('{"', '"}'),
    "tool": ('[["', '"]]'),
    "fork": ('[/"', '"/]'),
    "join": ('[\\"', '"\\]'),
}


def mermaid(graph: Graph) -> str:
    """A flowchart (mermaid.js.org/syntax/flowchart.html)."""
    lines = ["---", f"title: {_quoted(graph.title)}", "---", "flowchart TD"]
    for box in graph.boxes:
        begin, end = _SHAPES[box.kind]
        lines.append(f"    n{box.number}{begin}{_entities(box.label)}{end}")
    lines += [f"    n{before} --> n{after}" for before, after in graph.arrows]
    return "\n".join(lines) + "\n"


_DOT = {
    "text": "box",
    "role": "note",
    "gen": "ellipse",
    "select": "diamond",
    "tool": "component",
    "fork": "trapezium",
    "join": "invtrapezium",
}


def dot(graph: Graph) -> str:
    """A digraph (graphviz.org/doc/info/lang.html)."""
    lines = [f"digraph {_quoted(graph.title)} {{", "    node [fontname=monospace];"]
    lines += [f"    n{b.number} [label={_quoted(b.label)}, shape={_DOT[b.kind]}];" for b in graph.boxes]
    lines += [f"    n{before} -> n{after};" for before, after in graph.arrows]
    return "\n".join([*lines, "}"]) + "\n"


def short(text: str) -> str:
    """One line of at most LONGEST characters."""
    shown = _CONTROLS.sub(" ", text.replace("\n", "⏎"))
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _quoted(text: str) -> str:
    escaped = _CONTROLS.sub(" ", text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _entities(text: str) -> str:
    """Characters that mean something to Mermaid, as entities."""
    return "".join(char if char.isalnum() or char in " .,:;_-/+=()⏎…" else f"#{ord(char)};" for char in text)
