"""Branches as a tree: one line each while they run, all that they said when they have ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from sglang_dsl.console.session.follow import said_by
from sglang_dsl.console.session.tables import line, shown
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.views.outline import Block, Branches, outline
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot

ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "blue", "developer": "magenta"}
GENERATED = "yellow"
GUIDE = "bright_black"
LABEL = 11
"""Columns of a turn's role."""


def running_tree(forks: Sequence[ForkSnapshot], width: int) -> Group:
    """A line for each branch, its end where it is long."""
    trees = []
    for fork in forks:
        tree = Tree(Text(_title(len(fork.branches)), style="blue"), guide_style=GUIDE)
        for index, branch in enumerate(fork.branches):
            said = line(said_by(branch).strip() or "...", 1 << 20)
            room = max(20, width - 12)
            said = said if len(said) <= room else f"…{said[-room:]}"
            mark = "⠿" if branch.running else "✓"
            tree.add(Text.assemble((f"{index} {mark} ", "blue"), (said, GENERATED if branch.running else "")))
        trees.append(tree)
    return Group(*trees)


def tree(fork: ForkSnapshot) -> Tree:
    """All that the branches said."""
    return _tree(outline_of(fork))


def outline_of(fork: ForkSnapshot) -> list[tuple[Sequence[Block | Branches], BaseException | None]]:
    """Of each branch what it said, and what went wrong."""
    return [(outline(branch), branch.error) for branch in fork.branches]


def _tree(branches: Iterable[tuple[Sequence[Block | Branches], BaseException | None]]) -> Tree:
    given = list(branches)
    made = Tree(Text(_title(len(given)), style="blue"), guide_style=GUIDE)
    for index, (parts, error) in enumerate(given):
        made.add(Group(*_parts(index, parts, error)))
    return made


def _parts(
    index: int, parts: Sequence[Block | Branches], error: BaseException | None
) -> Iterable[RenderableType]:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="blue")
    grid.add_column()
    grid.add_column(overflow="fold")
    first = str(index)
    after: list[RenderableType] = []
    for part in parts:
        if isinstance(part, Branches):
            after.append(_tree((inner, None) for inner in part.branches))
            continue
        role = part.role or ""
        grid.add_row(first, Text(shown(role), style=ROLES.get(role, "")), said_text(part.entries))
        first = ""
    if error is not None:
        grid.add_row(first, Text("failed", style="red"), Text(shown(str(error)), style="red"))
        first = ""
    if first:
        grid.add_row(first, "", Text("nothing yet", style="dim"))
    return [grid, *after]


def said_text(entries: Iterable[Transcript]) -> Text:
    """A turn's text, what was generated in its own colour and with its variable's name."""
    made = Text()
    for entry in entries:
        made.append(shown(entry.value), style=GENERATED if entry.chosen is not None else "")
        if entry.chosen:
            made.append(f" ⟵ {shown(entry.chosen)}", style="dim")
    return made


def _title(size: int) -> str:
    return f"{size} branches" if size != 1 else "1 branch"


def conversation(seen: Snapshot) -> RenderableType:
    """All that was said, with the branches where they were."""
    parts = outline(seen)
    if not parts:
        return Text("nothing yet", style="dim")
    made: list[RenderableType] = []
    for part in parts:
        if isinstance(part, Branches):
            made.append(_tree((inner, None) for inner in part.branches))
            continue
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=LABEL - 1)
        grid.add_column(overflow="fold")
        role = part.role or ""
        grid.add_row(Text(shown(role), style=f"bold {ROLES.get(role, '')}"), said_text(part.entries))
        made.append(grid)
    return Group(*made)
