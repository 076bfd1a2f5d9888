"""Snapshots in the terminal, as rich prints them. Imported only when something is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from sglang_dsl.conversation.requests import COUNTED
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram
from sglang_dsl.views.diagrams import calls_graph, dot, mermaid
from sglang_dsl.views.html import constraint_report
from sglang_dsl.views.snapshot import Block, Branches, ForkSnapshot, Snapshot, outline

ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "blue", "developer": "magenta"}
GENERATED = "yellow"
LABEL = 11
"""Columns of a turn's role."""
FORMS = ("tree", "mermaid", "dot")


_PICTURES = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "␡"}
    | dict.fromkeys(range(0x80, 0xA0), "�")
)


def printable(text: str) -> str:
    """`text` with control characters replaced by their pictures, as a terminal would obey them."""
    return text.translate(_PICTURES)


def one_line(text: str, limit: int) -> str:
    line = printable(text).replace("\n", "⏎").replace("\t", " ")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _entries(entries: Iterable[Transcript], generated: str = GENERATED) -> Text:
    """Texts, what was generated in a colour and with its variable's name."""
    text = Text()
    for entry in entries:
        text.append(printable(entry.value), style=generated if entry.chosen is not None else "")
        if entry.chosen:
            text.append(f" ⟵ {printable(entry.chosen)}", style="dim")
    return text


def check_form(form: str) -> None:
    """Raises BadProgram for a form that show() does not have."""
    if form not in FORMS:
        raise BadProgram(f"form must be one of {', '.join(map(repr, FORMS))}; got {form!r}")


def show(state: Snapshot, console: Console | None = None, form: str = "tree") -> None:
    """Print a state as a "tree", or its calls as a "mermaid" or "dot" diagram. Raises BadProgram."""
    check_form(form)
    console = console or Console()
    if form == "tree":
        console.print(render(state))
        return
    graph = calls_graph(state.program, state.calls)
    text = mermaid(graph) if form == "mermaid" else dot(graph)
    # For other programs to read: not wrapped, no styles.
    console.print(text, end="", markup=False, highlight=False, soft_wrap=True, emoji=False)


def render(state: Snapshot) -> RenderableType:
    parts = _panels(outline(state))
    if (error := state.error) is not None:
        message = Text(printable(str(error)))
        parts.append(Panel(message, title=Text(type(error).__name__), border_style="red"))
    parts.append(usage_table(state))
    return Group(*parts)


def _panels(parts: Sequence[Block | Branches]) -> list[RenderableType]:
    panels: list[RenderableType] = []
    for part in parts:
        if isinstance(part, Branches):
            tree = Tree(f"fork, {len(part.branches)} branches", style="blue")
            for index, inner in enumerate(part.branches):
                tree.add(Group(Text(f"branch {index}", style="blue"), *_panels(inner)))
            panels.append(tree)
        elif part.role is None:
            panels.append(_entries(part.entries, f"bold {GENERATED}"))
        else:
            text, title = _entries(part.entries, f"bold {GENERATED}"), Text(printable(part.role))
            style = ROLES.get(part.role, "white")
            panels.append(Panel(text, title=title, title_align="left", border_style=style))
    return panels


def usage_table(state: Snapshot) -> Table:
    """A row for each call, and the sums; a column for constraints if there are any."""
    table = Table(title=Text(f"{state.program}: calls"), title_justify="left")
    for column in ("call", "branch", *(key.removesuffix("_tokens") for key in COUNTED), "seconds"):
        table.add_column(column, justify="left" if column in ("call", "branch") else "right")
    reports = [constraint_report(record.meta) for record in state.calls]
    if any(reports):
        table.add_column("constraint", justify="left")
    for record, report in zip(state.calls, reports, strict=True):
        branch = ".".join(map(str, record.branch)) or "-"
        counts = (str(record.count(key)) for key in COUNTED)
        last = [Text(report)] if any(reports) else []
        table.add_row(Text(record.name or record.kind), branch, *counts, f"{record.seconds:.3f}", *last)
    table.add_section()
    total = state.usage
    seconds = sum(record.seconds for record in state.calls)
    table.add_row("total", "", *(str(total[key]) for key in COUNTED), f"{seconds:.3f}")
    return table


def running_forks(forks: Iterable[tuple[ForkSnapshot, Sequence[str]]], width: int) -> Group:
    """Forks with the texts of their branches: a line for each branch, the end of a long text."""
    trees = []
    width = max(20, width - 12)
    for fork, texts in forks:
        tree = _fork_tree(len(texts))
        for index, (branch, text) in enumerate(zip(fork.branches, texts, strict=True)):
            line = one_line(text.strip() or "...", 1 << 20)
            line = line if len(line) <= width else f"…{line[-width:]}"
            mark = "⠿" if branch.running else "✓"
            tree.add(Text.assemble((f"{index} {mark} ", "blue"), (line, GENERATED if branch.running else "")))
        trees.append(tree)
    return Group(*trees)


def fork_tree(fork: ForkSnapshot) -> Tree:
    return _branches([(outline(branch), branch.error) for branch in fork.branches])


def conversation(state: Snapshot) -> RenderableType:
    """The turns with their roles in a column, and the forks where they were."""
    rows: list[RenderableType] = []
    for part in outline(state):
        if isinstance(part, Branches):
            rows.append(_branches([(inner, None) for inner in part.branches]))
        else:
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_column(width=LABEL - 1)
            grid.add_column(overflow="fold")
            role = part.role or ""
            grid.add_row(Text(printable(role), style=f"bold {ROLES.get(role, '')}"), _entries(part.entries))
            rows.append(grid)
    return Group(*rows) if rows else Text("nothing yet", style="dim")


def _fork_tree(size: int) -> Tree:
    title = f"{size} branches" if size != 1 else "1 branch"
    return Tree(Text(title, style="blue"), guide_style="bright_black")


def _branches(branches: Sequence[tuple[Sequence[Block | Branches], BaseException | None]]) -> Tree:
    tree = _fork_tree(len(branches))
    for index, (parts, error) in enumerate(branches):
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="blue")
        grid.add_column()
        grid.add_column(overflow="fold")
        rows: list[tuple[Text | str, Text]] = []
        inner: list[RenderableType] = []
        for part in parts:
            if isinstance(part, Branches):
                inner.append(_branches([(one, None) for one in part.branches]))
            else:
                role = part.role or ""
                rows.append((Text(printable(role), style=ROLES.get(role, "")), _entries(part.entries)))
        if error is not None:
            rows.append((Text("failed", style="red"), Text(printable(str(error)), style="red")))
        for at, row in enumerate(rows or [("", Text("nothing yet", style="dim"))]):
            grid.add_row("" if at else str(index), *row)
        tree.add(Group(grid, *inner))
    return tree
