"""A snapshot as HTML for notebooks: turns, generated text highlighted, forks, usage. One element with
its own styles, no scripts, nothing loaded from anywhere; all that was said is escaped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.conversation.usage import COUNTED, CallRecord
from sglang_dsl.views.outline import Block, Branches, outline
from sglang_dsl.views.snapshot import Snapshot

# Colours with some transparency, to be read on light and on dark pages.
_ROLES = {"system": "168,85,247", "user": "6,182,212", "assistant": "34,197,94"}
_OTHER = "148,163,184"
_GENERATED = "background:rgba(234,179,8,.3);color:inherit;border-radius:3px;padding:0 1px"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere"
_SMALL = "font-size:.8em;opacity:.7"
_RED = "239,68,68"
# Pictures that are in the document itself; any other address would be loaded.
_PICTURE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*\Z")


def page(state: Snapshot) -> str:
    """The state as one <div>. A failure stands below what came before it."""
    names = Counter(record.name for record in state.calls)
    # Where a name is used again, its text does not tell which call it is from.
    calls = {record.name: record for record in state.calls if names[record.name] == 1}
    said = _parts(outline(state), calls)
    if (error := state.error) is not None:
        said += _box(_RED, type(error).__name__, f'<div style="{_TEXT}">{escape(str(error))}</div>')
    return f'<div style="max-width:60em">{said}{_usage(state)}</div>'


def _parts(parts: Sequence[Block | Branches], calls: dict[str | None, CallRecord]) -> str:
    made: list[str] = []
    for part in parts:
        if isinstance(part, Branches):
            made.append(_fork(part, calls))
            continue
        text = "".join(_entry(entry, calls) for entry in part.entries)
        body = f'<div style="{_TEXT}">{text}</div>'
        made.append(body if part.role is None else _box(_ROLES.get(part.role, _OTHER), part.role, body))
    return "".join(made)


def _box(colour: str, title: str, body: str) -> str:
    style = f"border-left:3px solid rgb({colour});padding:2px 8px;margin:4px 0"
    return f'<div style="{style}"><div style="{_SMALL};color:rgb({colour})">{escape(title)}</div>{body}</div>'


def _entry(entry: Transcript, calls: dict[str | None, CallRecord]) -> str:
    if entry.part is not None:
        return _media(entry.part)
    if entry.chosen is None:
        return escape(entry.value)
    reasoning = ""
    if entry.reasoning:
        reasoning = (
            f'<details style="{_SMALL}"><summary>reasoning</summary>{escape(entry.reasoning)}</details>'
        )
    record = calls.get(entry.chosen)
    title = "" if record is None else f' title="{escape(_tooltip(record))}"'
    name = f'<sub style="{_SMALL}"> {escape(entry.chosen)}</sub>' if entry.chosen else ""
    return f'{reasoning}<mark style="{_GENERATED}"{title}>{escape(entry.value)}</mark>{name}'


def _tooltip(record: CallRecord) -> str:
    counts = [f"{record.count(key)} {key.replace('_', ' ')}" for key in COUNTED if record.count(key)]
    return ", ".join([record.kind, *counts, f"{record.seconds:.3f} s"])


def _media(part: Any) -> str:
    kind = str(part["type"]).removesuffix("_url")
    where = part.get(part["type"])
    url = str(where.get("url", "")) if isinstance(where, dict) else ""
    if kind == "image" and _PICTURE.match(url):
        return f'<img alt="image" style="max-width:16em;max-height:16em;display:block" src="{escape(url)}">'
    told = url if len(url) <= 80 else f"{url[:40]}..."
    return f'<code style="{_SMALL}">[{escape(kind)}{": " if told else ""}{escape(told)}]</code>'


def _fork(fork: Branches, calls: dict[str | None, CallRecord]) -> str:
    branches = "".join(
        _box(_OTHER, f"branch {index}", _parts(parts, calls)) for index, parts in enumerate(fork.branches)
    )
    summary = f"fork, {len(fork.branches)} branches"
    return f'<details open style="margin:4px 0"><summary>{summary}</summary>{branches}</details>'


def _usage(state: Snapshot) -> str:
    """One line per call of the backend, then the sums."""
    head = ("call", "branch", *(key.removesuffix("_tokens") for key in COUNTED), "seconds")
    rows = [
        (
            record.name or record.kind,
            ".".join(map(str, record.branch)) or "-",
            *(str(record.count(key)) for key in COUNTED),
            f"{record.seconds:.3f}",
        )
        for record in state.calls
    ]
    sums = state.usage
    seconds = sum(record.seconds for record in state.calls)
    total = ("total", "", *(str(sums[key]) for key in COUNTED), f"{seconds:.3f}")
    body = "".join(_row(row, "td") for row in (*rows, total))
    summary = f"{escape(state.program)}: {len(state.calls)} calls"
    table = f'<table style="font-size:.85em">{_row(head, "th")}{body}</table>'
    return f'<details style="margin:4px 0"><summary>{summary}</summary>{table}</details>'


def _row(cells: Iterable[str], kind: str) -> str:
    made = (
        f'<{kind} style="text-align:{"left" if at < 2 else "right"};padding:0 8px">{escape(cell)}</{kind}>'
        for at, cell in enumerate(cells)
    )
    return f"<tr>{''.join(made)}</tr>"
