"""The tables that commands print, and the line below a cell. Knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from sglang_dsl.console.session.session import Session
from sglang_dsl.conversation.usage import COUNTED, CallRecord, totals
from sglang_dsl.views.terminal import one_line, printable

CELL = "cell"
CELL_WIDTH = 60


def plain_table(*heads: str, right: Iterable[str] = ()) -> Table:
    """An empty table without lines; the columns `right` are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        if head == CELL:
            table.add_column(head, no_wrap=True, overflow="ellipsis", max_width=CELL_WIDTH)
        else:
            table.add_column(head, justify="right" if head in right else "left", overflow="fold")
    return table


def variables(session: Session) -> Table:
    table = plain_table("name", "type", "value", "tokens", right=("tokens",))
    for name, one in session.state.snapshot().variables.items():
        kind = type(one.value).__name__
        value = one.value if isinstance(one.value, str) else repr(one.value)
        if one.status == "failed":
            kind, value = "failed", str(one.error)
        count = one.meta.get("completion_tokens")
        table.add_row(
            Text(printable(name), style="cyan"),
            Text(kind, style="dim"),
            Text(one_line(value, CELL_WIDTH)),
            "" if count is None else str(count),
        )
    return table


def usage(session: Session) -> Table:
    """The tokens of each cell, and the sums."""
    heads = ["calls", *(key.removesuffix("_tokens") for key in COUNTED)]
    table = plain_table(CELL, *heads, right=heads)
    undone = totals(session.records)["calls"]
    for one in session.cells:
        if calls := session.calls_of(one):
            table.add_row(Text(one_line(one.code, CELL_WIDTH)), *_counts(calls))
            undone -= totals(calls)["calls"]
    table.add_section()
    if undone:
        table.add_row(Text("taken back, or failed", style="dim"), str(undone), *("" for _ in COUNTED))
    table.add_row(Text("in all", style="bold"), *_counts(session.records))
    return table


def times(session: Session) -> Table:
    """The seconds of each cell, in all and to the first token, and tokens per second."""
    heads = ("seconds", "first token", "tokens/s")
    table = plain_table(CELL, *heads, right=heads)
    for one in session.cells:
        calls = [call for call in session.calls_of(one) if call.kind != "tool"]
        first = next((call.first_token_s for call in calls if call.first_token_s is not None), None)
        first_token = "" if first is None else f"{first:.3f} s"
        table.add_row(Text(one_line(one.code, CELL_WIDTH)), f"{one.seconds:.3f} s", first_token, speed(calls))
    return table


def speed(calls: Iterable[CallRecord]) -> str:
    """Completion tokens per second of call time, calls side by side counted one after the other."""
    counts = [(call.count("completion_tokens"), call.seconds) for call in calls]
    tokens, seconds = sum(one for one, _ in counts), sum(one for _, one in counts)
    return f"{tokens / seconds:.0f}" if tokens and seconds else ""


def messages(session: Session) -> str:
    """The turns as JSON."""
    return printable(json.dumps(session.state.messages(), ensure_ascii=False, indent=2, default=str))


def footnote(session: Session) -> str:
    """What the last cell cost, in one line; empty if it made no calls."""
    last = session.cells[-1]
    calls = session.calls_of(last)
    if not calls:
        return ""
    sums = totals(calls)
    parts = [f"{last.seconds:.2f} s"]
    if sums["calls"] > 1:
        parts.append(f"{sums['calls']} calls")
    if sums["completion_tokens"]:
        parts.append(f"{sums['completion_tokens']} tokens")
    if sums["calls"] == 1 and (rate := speed(calls)):
        parts.append(f"{rate}/s")
    for name, label in (("cached_tokens", "reused"), ("jumped_tokens", "jumped")):
        if sums[name]:
            parts.append(f"{sums[name]} {label}")
    return " · ".join(parts)


def _counts(calls: tuple[CallRecord, ...]) -> list[str]:
    sums = totals(calls)
    return [str(sums["calls"]), *(str(sums[key]) for key in COUNTED)]
