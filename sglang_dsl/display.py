"""A finished state for people, in the terminal: turns, generated text highlighted, forks as branches, usage.

Reads transcripts and records; changes nothing. Needs rich, which is why nothing imports this before it is
asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text as RichText
from rich.tree import Tree

from sglang_dsl.executor import Executor
from sglang_dsl.feed import Mark
from sglang_dsl.state import ProgramState
from sglang_dsl.transcript import Transcript
from sglang_dsl.usage import COUNTED

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green"}
_CHOSEN = "bold yellow"


def show(state: ProgramState, console: Console | None = None) -> None:
    """Print a state; waits for what it has queued. A failure is printed too, below what came before it."""
    (console or Console()).print(render(state))


def render(state: ProgramState) -> RenderableType:
    """The state as something rich can print."""
    error = state.error()
    core = state.core
    joined = core.joined if isinstance(core, Executor) else []
    parts = _parts(core.so_far(), Transcript.EMPTY, joined)
    if error is not None:
        parts.append(Panel(str(error), title=type(error).__name__, border_style="red"))
    if isinstance(core, Executor):
        parts.append(usage_table(core))
    return Group(*parts)


def _parts(
    transcript: Transcript,
    since: Transcript,
    joined: list[tuple[Mark, list[tuple[Transcript, Transcript]]]],
) -> list[RenderableType]:
    """Turns and loose text in order, with the branches where they were joined."""
    parts: list[RenderableType] = []
    text = RichText()
    role: str | None = None
    waiting = list(joined)

    def release() -> None:
        nonlocal text
        if text.plain:
            style = _ROLES.get(role or "", "white")
            parts.append(Panel(text, title=role, title_align="left", border_style=style) if role else text)
        text = RichText()

    def branches_here(at: Transcript) -> None:
        while waiting and waiting[0][0].transcript is at:
            release()
            parts.append(_branches(waiting.pop(0)[1]))

    branches_here(since)
    for entry in transcript.entries(since):
        match entry.kind:
            case "open":
                release()
                role = entry.value
            case "close":
                release()
                role = None
            case _:
                piece = RichText(entry.value, style=_CHOSEN if entry.chosen is not None else "")
                text.append_text(piece)
                if entry.chosen:
                    text.append(f" ⟵ {entry.chosen}", style="dim")
        branches_here(entry)
    release()
    for _, rest in waiting:
        parts.append(_branches(rest))
    return parts


def _branches(branches: list[tuple[Transcript, Transcript]]) -> Tree:
    tree = Tree(f"fork, {len(branches)} branches", style="blue")
    for index, (begin, end) in enumerate(branches):
        tree.add(Group(RichText(f"branch {index}", style="blue"), *_parts(end, begin, [])))
    return tree


def usage_table(core: Executor) -> Table:
    """One line per call of the backend, then the sums. Where calls had constraints, a column says who kept
    each; "jumped" are the tokens of text that a constraint forced."""
    table = Table(title=f"{core.run.program}: calls", title_justify="left")
    for column in ("call", "branch", *(key.removesuffix("_tokens") for key in COUNTED), "seconds"):
        table.add_column(column, justify="left" if column in ("call", "branch") else "right")
    records = core.run.ledger.records()
    kept = [kept_by(record.meta) for record in records]
    if any(kept):
        table.add_column("constraint", justify="left")
    for record, keeper in zip(records, kept, strict=True):
        branch = ".".join(map(str, record.branch)) or "-"
        counts = (str(record.count(key)) for key in COUNTED)
        last = [keeper] if any(kept) else []
        table.add_row(record.name or record.kind, branch, *counts, f"{record.seconds:.3f}", *last)
    total = core.run.ledger.total()
    table.add_section()
    seconds = sum(record.seconds for record in records)
    table.add_row("total", "", *(str(total[key]) for key in COUNTED), f"{seconds:.3f}")
    return table


def kept_by(meta: Mapping[str, Any]) -> str:
    """Who kept a call's constraint, and what there is to know of it; empty where it had none."""
    grammar = meta.get("grammar")
    if not isinstance(grammar, Mapping):
        return ""
    facts = [str(grammar.get("backend", "?"))]
    for name, said in (("checked", "checked by a validator"), ("ignored", "ignored")):
        if grammar.get(name):
            facts.append(f"{said}: {', '.join(map(str, grammar[name]))}")
    if grammar.get("rollbacks"):
        facts.append(f"{grammar['rollbacks']} steps taken back")
    if grammar.get("closed_by_budget"):
        facts.append("closed before the token limit")
    return "; ".join(facts)
