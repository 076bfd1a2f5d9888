"""A snapshot in the terminal: turns, generated text highlighted, forks as branches, usage. Needs rich, which
is why nothing imports this before it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text as RichText
from rich.tree import Tree

from sglang_dsl.conversation.requests import COUNTED
from sglang_dsl.errors import BadProgram
from sglang_dsl.views.diagrams import calls_graph, dot, mermaid
from sglang_dsl.views.outline import Block, Branches, outline
from sglang_dsl.views.snapshot import Snapshot
from sglang_dsl.views.timeline import kept_by

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green"}
_CHOSEN = "bold yellow"


FORMS = ("tree", "mermaid", "dot")


def check_form(form: str) -> None:
    """Raises BadProgram for what show() does not know."""
    if form not in FORMS:
        raise BadProgram(f"form must be one of {', '.join(map(repr, FORMS))}; got {form!r}")


def show(state: Snapshot, console: Console | None = None, form: str = "tree") -> None:
    """Print a state. "tree": what was said, a failure below what came before it, and usage; "mermaid" and
    "dot": its calls as a diagram. Raises BadProgram for another form."""
    check_form(form)
    if form == "tree":
        (console or Console()).print(render(state))
        return
    graph = calls_graph(state.program, state.calls)
    made = mermaid(graph) if form == "mermaid" else dot(graph)
    # As it is, for other programs to read: not wrapped, no styles.
    (console or Console()).print(made, end="", markup=False, highlight=False, soft_wrap=True, emoji=False)


def render(state: Snapshot) -> RenderableType:
    """The state as something rich can print."""
    parts = _parts(outline(state))
    if (error := state.error) is not None:
        parts.append(Panel(RichText(str(error)), title=RichText(type(error).__name__), border_style="red"))
    parts.append(usage_table(state))
    return Group(*parts)


def _parts(parts: Sequence[Block | Branches]) -> list[RenderableType]:
    """Turns and loose text in order, with the branches where they were joined."""
    made: list[RenderableType] = []
    for part in parts:
        if isinstance(part, Branches):
            made.append(_branches(part))
            continue
        text = RichText()
        for entry in part.entries:
            text.append(entry.value, style=_CHOSEN if entry.chosen is not None else "")
            if entry.chosen:
                text.append(f" ⟵ {entry.chosen}", style="dim")
        style = _ROLES.get(part.role or "", "white")
        framed = Panel(text, title=RichText(part.role or ""), title_align="left", border_style=style)
        made.append(text if part.role is None else framed)
    return made


def _branches(fork: Branches) -> Tree:
    tree = Tree(f"fork, {len(fork.branches)} branches", style="blue")
    for index, parts in enumerate(fork.branches):
        tree.add(Group(RichText(f"branch {index}", style="blue"), *_parts(parts)))
    return tree


def usage_table(state: Snapshot) -> Table:
    """One line per call of the backend, then the sums. Where calls had constraints, a column says who kept
    each; "jumped" are the tokens of text that a constraint forced."""
    table = Table(title=RichText(f"{state.program}: calls"), title_justify="left")
    for column in ("call", "branch", *(key.removesuffix("_tokens") for key in COUNTED), "seconds"):
        table.add_column(column, justify="left" if column in ("call", "branch") else "right")
    records = state.calls
    kept = [kept_by(record.meta) for record in records]
    if any(kept):
        table.add_column("constraint", justify="left")
    for record, keeper in zip(records, kept, strict=True):
        branch = ".".join(map(str, record.branch)) or "-"
        counts = (str(record.count(key)) for key in COUNTED)
        last = [keeper] if any(kept) else []
        name = RichText(record.name or record.kind)
        table.add_row(name, branch, *counts, f"{record.seconds:.3f}", *map(RichText, last))
    total = state.usage
    table.add_section()
    seconds = sum(record.seconds for record in records)
    table.add_row("total", "", *(str(total[key]) for key in COUNTED), f"{seconds:.3f}")
    return table
