"""Programs, plans, choices and batches for notebooks, as HTML and as graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sglang_dsl import ir
from sglang_dsl.views import style
from sglang_dsl.views.diagrams import Graph, branch_graph, short
from sglang_dsl.views.html import constraint
from sglang_dsl.views.snapshot import constraint_of

MAX_ROWS = 50
_MAX_BOXES = 32


# -- programs ------------------------------------------------------------------------------------------------


def function(signature: str, doc: str, source: str, body: str | None) -> str:
    """A program that was not run. `body`: traced() of it, if it was traced."""
    parts = [style.element("code", escape(signature))]
    if doc:
        parts.append(style.element("div", escape(doc), "small"))
    if body is not None:
        parts.append(body)
    if source:
        parts.append(style.folded("source", style.element("pre", escape(source)), opened=body is None))
    return style.whole(*parts)


def program(title: str, body: ir.Seq, called: Iterable[tuple[str, ir.Seq]] = ()) -> str:
    """A traced program: its turns, its generations with their constraints, its forks side by side."""
    return style.whole(style.element("code", escape(title)), traced(body, called))


def traced(body: ir.Seq, called: Iterable[tuple[str, ir.Seq]] = ()) -> str:
    others = (style.folded(f"calls {name}", _nodes(other.nodes)) for name, other in called)
    return _nodes(body.nodes) + "".join(others)


def _nodes(nodes: Sequence[ir.Node]) -> str:
    elements: list[str] = []
    inside: list[str] = []  # of the turn, or outside of turns
    role: str | None = None

    def end() -> None:
        if inside:
            body = style.element("div", "".join(inside), "said")
            elements.append(body if role is None else style.box(role, role, body))
            inside.clear()

    for node in nodes:
        match node:
            case ir.RoleBegin(role=name):
                end()
                role = name
            case ir.RoleEnd():
                end()
                role = None
            case ir.Text(text=text):
                inside.append(escape(text))
            case ir.Gen(name=name) | ir.Select(name=name):
                mark = style.element("mark", escape(f"{{{name or '...'}}}"))
                inside.append(mark + constraint(constraint_of(node)))
            case ir.Media():
                inside.append(style.element("code", escape(node.label()), "small"))
            case ir.Fork(branches=branches):
                end()
                columns = (
                    style.box("other", f"branch {number}", _nodes(branch.nodes))
                    for number, branch in enumerate(branches)
                )
                title = f"fork, {len(branches)} branches"
                elements.append(style.folded(title, style.columns(columns), opened=True))
            case ir.Join(mode=mode):
                end()
                elements.append(style.element("div", escape(f"join: {mode}"), "small"))
            case ir.Seq(nodes=inner):
                end()
                elements.append(_nodes(inner))
            case ir.ScopeEnd() | ir.LoopEnd():
                continue
            case ir.ScopeBegin(name=name):
                inside.append(style.element("sub", escape(f"[{name}] ")))
            case _:
                inside.append(style.element("code", escape(ir.cut(node.label(), 200)), "small"))
    end()
    return "".join(elements)


# -- plans ---------------------------------------------------------------------------------------------------


def plan(head: str, steps: Sequence[Any]) -> str:
    """`steps`: PlannedCalls."""
    waves = 1 + max((step.wave for step in steps if step.wave is not None), default=0)
    rows = [
        (
            f"{step.kind} {step.name or ''}".rstrip(),
            ".".join(map(str, step.branch)) or "-",
            str(step.prompt_tokens),
            str(step.cached_tokens),
            str(step.completion_tokens),
            "" if step.wave is None else style.bar([("decode", step.wave / waves, (step.wave + 1) / waves)]),
        )
        for step in steps[:MAX_ROWS]
    ]
    columns = ("call", "branch", "prompt", "of it shared", "generated at most", "wave")
    return style.whole(
        style.element("div", escape(head), "small"), style.table(columns, rows, 2), _more(len(steps), "calls")
    )


def plan_graph(title: str, steps: Sequence[Any]) -> Graph:
    calls = []
    for one in steps:
        cost = f"{one.prompt_tokens} read, {one.cached_tokens} shared"
        kind = one.kind if one.kind in ("gen", "select") else "text"
        calls.append((one.branch, kind, f"{one.kind} {one.name or ''}: {cost}"))
    return branch_graph(title, calls)


# -- choices -------------------------------------------------------------------------------------------------


def choice(
    options: Sequence[str],
    index: int,
    probabilities: Sequence[float],
    scores: Sequence[float],
    method: str,
    measured: bool,
) -> str:
    """All options with their probabilities as bars; the chosen one is marked."""
    rows = []
    for at, (option, share, score) in enumerate(zip(options, probabilities, scores, strict=True)):
        name = style.Html(style.element("mark", escape(option)) if at == index else escape(option))
        bar = style.bar([("decode" if at == index else "queue", 0.0, share)])
        rows.append((name, bar, f"{100 * share:.1f}%", f"{score:.3f}"))
    note = method if measured else "the backend says only which option it took"
    table = style.table(("option", "", "probability", "score"), rows, 1)
    return style.whole(table, style.element("div", escape(note), "small"))


def choice_graph(options: Sequence[str], index: int, probabilities: Sequence[float]) -> Graph:
    graph = Graph("choice")
    start = graph.box("select", "select", [])
    for at, (option, share) in enumerate(zip(options, probabilities, strict=True)):
        graph.box(f"{short(option)}: {100 * share:.1f}%", "gen" if at == index else "text", [start])
    return graph


# -- batches -------------------------------------------------------------------------------------------------


def batch(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the first rows, with a column for each name in any of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[ir.cut(_cell(row.get(name)), 300) for name in names] for row in rows[:MAX_ROWS]]
    table = style.table(names, cells, len(names))
    return style.whole(style.element("div", escape(title)), table, _more(len(rows), "items"))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else value if isinstance(value, str) else f"{value!r:.1000}"


def batch_graph(title: str, items: Sequence[str]) -> Graph:
    graph = Graph(title)
    start = graph.box(title, "fork", [])
    for label in items[:_MAX_BOXES]:
        graph.box(label, "gen", [start])
    if len(items) > _MAX_BOXES:
        graph.box(f"and {len(items) - _MAX_BOXES} more", "text", [start])
    return graph


def _more(count: int, what: str) -> str:
    return style.element("div", f"and {count - MAX_ROWS} more {what}", "small") if count > MAX_ROWS else ""
