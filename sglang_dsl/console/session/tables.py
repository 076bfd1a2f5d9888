"""What commands show, as rich has it. Knows sessions, and no terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

from sglang_dsl.console.session.session import Session
from sglang_dsl.conversation.requests import COUNTED, CallRecord, totals

SHORT = 60
CELL = "cell"


def shown(text: str) -> str:
    """`text` of a model or anybody, without what a terminal takes as its own: controls stand as pictures."""
    return "".join(_picture(char) if _control(char) else char for char in text)


def _control(char: str) -> bool:
    return (char < " " and char not in "\n\t") or "\x7f" <= char < "\xa0"


def _picture(char: str) -> str:
    return chr(0x2400 + ord(char)) if char < " " else ("␡" if char == "\x7f" else "�")


def line(text: str, most: int = SHORT) -> str:
    """One line of it."""
    said = shown(text).replace("\n", "⏎").replace("\t", " ")
    return said if len(said) <= most else f"{said[: most - 1]}…"


def plain_table(*heads: str, right: Iterable[str] = ()) -> Table:
    """An empty table in the session's style."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        if head == CELL:
            made.add_column(head, no_wrap=True, overflow="ellipsis", max_width=SHORT)
        else:
            made.add_column(head, justify="right" if head in right else "left", overflow="fold")
    return made


def variables(session: Session) -> Table:
    """name, type, value, tokens."""
    made = plain_table("name", "type", "value", "tokens", right=("tokens",))
    for name, one in session.state.snapshot().variables.items():
        if one.status == "failed":
            kind, value = "failed", str(one.error)
        else:
            kind, value = (
                type(one.value).__name__,
                one.value if isinstance(one.value, str) else repr(one.value),
            )
        count = one.meta.get("completion_tokens")
        made.add_row(
            Text(shown(name), style="cyan"),
            Text(kind, style="dim"),
            Text(line(value)),
            "" if count is None else str(count),
        )
    return made


def usage(session: Session) -> Table:
    """Tokens of each cell, and in all."""
    made = plain_table(CELL, "calls", *map(_head, COUNTED), right=("calls", *map(_head, COUNTED)))
    for one in session.cells:
        if calls := session.calls_of(one):
            made.add_row(Text(line(one.code)), *_counts(calls))
    made.add_section()
    every = totals(session.records)
    taken = every["calls"] - sum(totals(session.calls_of(one))["calls"] for one in session.cells)
    if taken:
        made.add_row(Text("taken back, or failed", style="dim"), str(taken), *("" for _ in COUNTED))
    made.add_row(Text("in all", style="bold"), *_counts(session.records))
    return made


def times(session: Session) -> Table:
    """Seconds of each cell, to the first token, and tokens per second."""
    right = ("seconds", "first token", "tokens/s")
    made = plain_table(CELL, *right, right=right)
    for one in session.cells:
        calls = [call for call in session.calls_of(one) if call.kind != "tool"]
        first = next((call.first_token_s for call in calls if call.first_token_s is not None), None)
        told = "" if first is None else f"{first:.3f} s"
        made.add_row(Text(line(one.code)), f"{one.seconds:.3f} s", told, speed(calls))
    return made


def speed(calls: Iterable[CallRecord]) -> str:
    """Completion tokens per second of the calls, side by side ones as if one after the other."""
    counted = [(call.count("completion_tokens"), call.seconds) for call in calls]
    tokens, seconds = sum(one for one, _ in counted), sum(one for _, one in counted)
    return f"{tokens / seconds:.0f}" if tokens and seconds else ""


def messages(session: Session) -> str:
    """The turns as JSON."""
    return shown(json.dumps(session.state.messages(), ensure_ascii=False, indent=2, default=str))


def footnote(session: Session) -> str:
    """What the last cell cost, in a few words; empty where it asked for nothing."""
    last = session.cells[-1]
    calls = session.calls_of(last)
    if not calls:
        return ""
    sums: dict[str, Any] = totals(calls)
    parts = [f"{last.seconds:.2f} s"]
    if sums["calls"] > 1:
        parts.append(f"{sums['calls']} calls")
    if sums["completion_tokens"]:
        parts.append(f"{sums['completion_tokens']} tokens")
    if sums["calls"] == 1 and (fast := speed(calls)):
        parts.append(f"{fast}/s")
    for name, word in (("cached_tokens", "reused"), ("jumped_tokens", "jumped")):
        if sums[name]:
            parts.append(f"{sums[name]} {word}")
    return " · ".join(parts)


def _head(counted: str) -> str:
    return counted.removesuffix("_tokens")


def _counts(calls: Iterable[CallRecord]) -> list[str]:
    sums = totals(tuple(calls))
    return [str(sums["calls"]), *(str(sums[key]) for key in COUNTED)]
