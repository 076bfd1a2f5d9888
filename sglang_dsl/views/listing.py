"""What is no state, for notebooks: programs, plans, choices and batches, as HTML and as graphs. Knows nodes
and plain data, not the classes it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sglang_dsl.ir import (
    Fork,
    Gen,
    Join,
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
    cut,
)
from sglang_dsl.views import style
from sglang_dsl.views.diagrams import Graph, short
from sglang_dsl.views.html import held
from sglang_dsl.views.outline import constraint_of

MOST_ROWS = 50
_MOST_BOXES = 32


# -- programs ------------------------------------------------------------------------------------------------


def function(signature: str, doc: str, source: str, body: str | None) -> str:
    """A program that was not run. `body`: what it says, where it was traced."""
    parts = [style.element("code", escape(signature))]
    if doc:
        parts.append(style.element("div", escape(doc), "small"))
    if body is not None:
        parts.append(body)
    if source:
        parts.append(style.folded("source", style.element("pre", escape(source)), opened=body is None))
    return style.whole(*parts)


def program(title: str, body: Seq, called: Iterable[tuple[str, Seq]] = ()) -> str:
    """A traced program: its turns, its generations with what they are held to, its forks side by side."""
    return style.whole(style.element("code", escape(title)), traced(body, called))


def traced(body: Seq, called: Iterable[tuple[str, Seq]] = ()) -> str:
    """The inside of program()."""
    others = (style.folded(f"calls {name}", _nodes(other.nodes)) for name, other in called)
    return _nodes(body.nodes) + "".join(others)


def _nodes(nodes: Sequence[Node]) -> str:
    made: list[str] = []
    inside: list[str] = []  # of the turn, or of loose text
    role: str | None = None

    def end() -> None:
        if inside:
            body = style.element("div", "".join(inside), "said")
            made.append(body if role is None else style.box(role, role, body))
            inside.clear()

    for node in nodes:
        match node:
            case RoleBegin(role=name):
                end()
                role = name
            case RoleEnd():
                end()
                role = None
            case Text(text=text):
                inside.append(escape(text))
            case Gen(name=name) | Select(name=name):
                mark = style.element("mark", escape(f"{{{name or '...'}}}"))
                inside.append(mark + held(constraint_of(node)))
            case Media():
                inside.append(style.element("code", escape(node.label()), "small"))
            case Fork(branches=branches):
                end()
                columns = (
                    style.box("other", f"branch {number}", _nodes(branch.nodes))
                    for number, branch in enumerate(branches)
                )
                made.append(
                    style.folded(f"fork, {len(branches)} branches", style.columns(columns), opened=True)
                )
            case Join(mode=mode):
                end()
                made.append(style.element("div", escape(f"join: {mode}"), "small"))
            case Seq(nodes=inner):
                end()
                made.append(_nodes(inner))
            case ScopeEnd() | LoopEnd():
                continue
            case ScopeBegin(name=name):
                inside.append(style.element("sub", escape(f"[{name}] ")))
            case _:
                inside.append(style.element("code", escape(cut(node.label(), 200)), "small"))
    end()
    return "".join(made)


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
        for step in steps[:MOST_ROWS]
    ]
    columns = ("call", "branch", "prompt", "of it shared", "generated at most", "wave")
    return style.whole(
        style.element("div", escape(head), "small"), style.table(columns, rows, 2), _more(len(steps), "calls")
    )


def plan_graph(title: str, steps: Sequence[Any]) -> Graph:
    """The calls, each branch in a row of its own behind what it was forked from."""
    graph = Graph(title)
    last: dict[tuple[int, ...], int] = {}
    for step in steps:
        label = f"{step.kind} {step.name or ''}: {step.prompt_tokens} read, {step.cached_tokens} shared"
        before = next(
            (last[at] for at in (step.branch[:n] for n in range(len(step.branch), -1, -1)) if at in last),
            None,
        )
        kind = step.kind if step.kind in ("gen", "select") else "text"
        last[step.branch] = graph.box(label, kind, [] if before is None else [before])
    return graph


# -- choices -------------------------------------------------------------------------------------------------


def choice(
    options: Sequence[str],
    index: int,
    probabilities: Sequence[float],
    scores: Sequence[float],
    method: str,
    measured: bool,
) -> str:
    """All options, the one taken marked, with their probabilities as bars."""
    rows = []
    for at, (option, share, score) in enumerate(zip(options, probabilities, scores, strict=True)):
        name = style.Html(style.element("mark", escape(option)) if at == index else escape(option))
        bar = style.bar([("decode" if at == index else "queue", 0.0, share)])
        rows.append((name, bar, f"{100 * share:.1f}%", f"{score:.3f}"))
    told = method if measured else "the backend says only which option it took"
    table = style.table(("option", "", "probability", "score"), rows, 1)
    return style.whole(table, style.element("div", escape(told), "small"))


def choice_graph(options: Sequence[str], index: int, probabilities: Sequence[float]) -> Graph:
    """The options behind the choice; the one taken is drawn as a generation."""
    graph = Graph("choice")
    start = graph.box("select", "select", [])
    for at, (option, share) in enumerate(zip(options, probabilities, strict=True)):
        graph.box(f"{short(option)}: {100 * share:.1f}%", "gen" if at == index else "text", [start])
    return graph


# -- batches -------------------------------------------------------------------------------------------------


def batch(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the first rows, with a column for each name that one of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [[cut(_cell(row.get(name)), 300) for name in names] for row in rows[:MOST_ROWS]]
    return style.whole(
        style.element("div", escape(title)),
        style.table(names, shown, len(names)),
        _more(len(rows), "items"),
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else value if isinstance(value, str) else f"{value!r:.1000}"


def batch_graph(title: str, items: Sequence[str]) -> Graph:
    """A box for each of the first items."""
    graph = Graph(title)
    start = graph.box(title, "fork", [])
    for label in items[:_MOST_BOXES]:
        graph.box(label, "gen", [start])
    if len(items) > _MOST_BOXES:
        graph.box(f"and {len(items) - _MOST_BOXES} more", "text", [start])
    return graph


def _more(count: int, what: str) -> str:
    return style.element("div", f"and {count - MOST_ROWS} more {what}", "small") if count > MOST_ROWS else ""
