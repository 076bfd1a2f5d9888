"""The calls of a run as a table: what each cost, who kept its constraint, and when it ran, as a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dsl.conversation.requests import COUNTED, CallRecord, totals
from sglang_dsl.views import style

_COLUMNS = {
    "prompt_tokens": "prompt",
    "cached_tokens": "reused",
    "completion_tokens": "generated",
    "jumped_tokens": "forced",
    "spec_accept_token_num": "speculated",
}
_PARTS = {"queue": "waits", "prefill": "reads the prompt", "decode": "generates", "replayed": "replayed"}
_MOST_ROWS = 200


def calls_table(program: str, records: Sequence[CallRecord]) -> str:
    """Folded: one row per call, the sums, and what the bars mean."""
    seconds = sum(record.seconds for record in records)
    # What no call has takes no room.
    counted = [key for key in _COLUMNS if key in COUNTED[:2] or any(one.count(key) for one in records)]
    kept = [kept_by(record.meta) for record in records]
    began, whole = _whole(records)
    head = ["call", "branch", *(_COLUMNS[key] for key in counted), "seconds"]
    head += ["constraint"] * any(kept) + ["timeline"] * (whole > 0)
    rows = []
    for record, keeper in list(zip(records, kept, strict=True))[:_MOST_ROWS]:
        row = [record.name or record.kind, ".".join(map(str, record.branch)) or "-"]
        row += [*(str(record.count(key)) for key in counted), f"{record.seconds:.3f}"]
        row += [keeper] * any(kept)
        if whole > 0:
            row.append(_bar(record, began, whole))
        rows.append(row)
    sums = [str(sum(record.count(key) for record in records)) for key in counted]
    last = ["total", "", *sums, f"{seconds:.3f}"]
    more = len(records) - len(rows)
    left = style.element("div", f"and {more} more calls", "small") if more > 0 else ""
    calls = totals(records)["calls"]
    title = f"{program}: {calls} call{'' if calls == 1 else 's'}"
    if whole > 0:
        title += f", {whole:.3f} s"
        left += _key(replayed=any(one.replayed for one in records))
    return style.folded(title, style.table(head, rows, 2, last) + left)


def _whole(records: Sequence[CallRecord]) -> tuple[float, float]:
    """When the first call began, and how long it was from there to the end of the last."""
    timed = [(one.began, one.began + one.seconds) for one in records if one.began is not None]
    if not timed:
        return 0.0, 0.0
    first = min(begin for begin, _ in timed)
    return first, max(end for _, end in timed) - first


def _bar(record: CallRecord, first: float, whole: float) -> str:
    if record.began is None:
        return ""
    begin = record.began - first
    meta, first_token = record.meta, record.first_token_s
    queue = _seconds(meta.get("queue_time"))
    token = _seconds(meta.get("first_token_latency")) if first_token is None else first_token
    ends = [("queue", queue), ("prefill", token), ("decode", record.seconds)]
    if record.replayed:
        ends = [("replayed", record.seconds)]
    parts, at = [], begin
    for name, end in ends:
        to = begin + min(end, record.seconds)
        parts.append((name, at / whole, to / whole))
        at = max(at, to)
    return style.bar(parts)


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _key(*, replayed: bool) -> str:
    shown = ((name, means) for name, means in _PARTS.items() if replayed or name != "replayed")
    made = "".join(style.element("i", "", name) + means for name, means in shown)
    return style.element("div", made, "small key")


def summary(meta: Mapping[str, Any]) -> str:
    """What a call's meta counts, in a line."""
    counts = [
        f"{int(meta[key])} {key.replace('spec_accept_token_num', 'speculated_tokens').replace('_', ' ')}"
        for key in _COLUMNS
        if isinstance(meta.get(key), int | float) and meta[key]
    ]
    return ", ".join(counts)


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
