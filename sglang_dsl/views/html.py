"""A snapshot as HTML for notebooks: turns, tokens, forks side by side, and the calls with a timeline."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sglang_dsl.conversation.requests import COUNTED, CallRecord, totals
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.ir import cut
from sglang_dsl.views import snapshot, style
from sglang_dsl.views.tokens import Span, Token, spans, tokens_of

# Pictures that are in the document itself; any other address would be loaded.
_PICTURE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*\Z")
_ORIGINS = {
    "forced": "the constraint left no other: appended without a step (jump-forward)",
    "speculated": "guessed ahead, and confirmed by the step that verified it",
}
_CONSTRAINT_WIDTH = 40
_MAX_TOKENS = 5000
"""Longer texts are shown without their tokens."""
_MAX_CALLS = 200
_COLUMNS = {
    "prompt_tokens": "prompt",
    "cached_tokens": "reused",
    "completion_tokens": "generated",
    "jumped_tokens": "forced",
    "spec_accept_token_num": "speculated",
}
_PHASES = {"queue": "waits", "prefill": "reads the prompt", "decode": "generates", "replayed": "replayed"}


def page(state: snapshot.Snapshot) -> str:
    """The state as one <div>; its error is below the text."""
    return style.whole(_state(state), calls_table(state.program, state.calls))


def group(states: Sequence[snapshot.Snapshot]) -> str:
    """Forks of one state, side by side, and their calls."""
    columns = style.columns(_branch(state.branch[-1], state, _state(state)) for state in states)
    return style.whole(columns, calls_table(states[0].program, snapshot.calls_within(states)))


def _state(state: snapshot.Snapshot) -> str:
    body = _parts(snapshot.outline(state), partial=bool(state.partial))
    if (error := state.error) is not None:
        body += style.box("bad", type(error).__name__, style.text(str(error)))
    return body


def _parts(parts: Sequence[snapshot.Block | snapshot.Branches], *, partial: bool) -> str:
    elements: list[str] = []
    for part in parts:
        if isinstance(part, snapshot.Branches):
            branches = (
                _branch(number, state, _parts(inner, partial=bool(state.partial)))
                for number, (inner, state) in enumerate(zip(part.branches, part.states, strict=True))
            )
            title = f"fork, {len(part.branches)} branches"
            elements.append(style.folded(title, style.columns(branches), opened=True))
            continue
        running = part.entries[-1] if partial and part is parts[-1] else None
        text = "".join(_entry(one, running=one is running) for one in part.entries)
        body = style.element("div", text, "said") + _token_key(part.entries)
        elements.append(body if part.role is None else style.box(part.role, part.role, body))
    return "".join(elements)


def _branch(number: int, state: snapshot.Snapshot, body: str) -> str:
    title = f"branch {number}"
    if state.error is not None:
        title += f" · {type(state.error).__name__}: {cut(str(state.error), 200)}"
    elif state.running:
        title += " · running"
    return style.box("other", title, body)


# -- text ----------------------------------------------------------------------------------------------------


def _entry(entry: Transcript, *, running: bool) -> str:
    if entry.part is not None:
        return _media(entry.part)
    if entry.chosen is None:
        return escape(entry.value)
    meta: Mapping[str, Any] = {} if entry.generation is None else entry.generation.meta
    tokens = tokens_of(meta)
    if not tokens or len(tokens) > _MAX_TOKENS:
        hover = _call_summary(meta)
        text = style.element("mark", escape(entry.value), "now" if running else "t" if hover else "", hover)
    else:
        pieces = spans(entry.hidden + entry.value, tokens, len(entry.hidden))
        text = style.element("mark", "".join(map(_span, pieces)), "toks")
    reasoning = style.folded("reasoning", style.text(entry.reasoning)) if entry.reasoning else ""
    name = style.element("sub", f" {escape(entry.chosen)}") if entry.chosen else ""
    node = entry.generation.node if entry.generation else None
    return f"{reasoning}{text}{name}{constraint(snapshot.constraint_of(node))}"


def constraint(held: snapshot.Constraint | None) -> str:
    """The constraint of a generation, after its text; the whole of a long one on hover."""
    if held is None:
        return ""
    text = f"{held.kind} {held.text}" if held.text else held.kind
    hover = _wrapped(held.text) if len(text) > _CONSTRAINT_WIDTH else ""
    return style.element("span", escape(cut(text, _CONSTRAINT_WIDTH)), "held t" if hover else "held", hover)


def _wrapped(text: str, width: int = 80, limit: int = 30) -> str:
    lines = [line[at : at + width] for line in text.split("\n") for at in range(0, len(line) or 1, width)]
    return "\n".join(lines[:limit] + ["..."] * (len(lines) > limit))


def _call_summary(meta: Mapping[str, Any]) -> str:
    """The options and probabilities of a choice; the token counts of any other call."""
    if isinstance(meta.get("choices"), list):
        pairs = zip(meta["choices"], meta.get("probabilities") or ())
        ranked = sorted(pairs, key=lambda pair: -pair[1])[:20]
        return "\n".join(f"{_percent(share)}  {_quoted(str(option))}" for option, share in ranked)
    counts = [
        f"{int(meta[key])} {key.replace('spec_accept_token_num', 'speculated_tokens').replace('_', ' ')}"
        for key in _COLUMNS
        if isinstance(meta.get(key), int | float) and meta[key]
    ]
    return ", ".join(counts)


def _span(span: Span) -> str:
    if not span.tokens:
        return escape(span.text)
    probability = span.probability
    names = ["t"] if probability is None else ["t", f"p{min(9, int(probability * 10))}"]
    origins = {token.origin for token in span.tokens}
    names += [one for one in _ORIGINS if origins == {one}]
    return style.element(
        "span", escape(span.text), " ".join(names), "\n".join(map(_token_hover, span.tokens))
    )


def _token_hover(token: Token) -> str:
    probability = token.probability
    share = "" if probability is None else f"{_percent(probability)}  "
    lines = [f"{share}{_quoted(token.text)}{f'  {token.origin}' if token.origin else ''}"]
    for text, logprob in token.others:
        if text != token.text:
            lines.append(f"{_percent(Token(text, logprob).probability or 0.0)}  {_quoted(text)}")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:5.1f}%"


def _quoted(text: str) -> str:
    return json.dumps(cut(text, 60), ensure_ascii=False)


def _token_key(entries: Sequence[Transcript]) -> str:
    """What the shades and lines of tokens mean, with counts; empty if there are no tokens."""
    counts: Counter[str] = Counter()
    for entry in entries:
        if entry.generation is not None and entry.chosen is not None:
            counts.update(token.origin for token in tokens_of(entry.generation.meta))
    if not counts:
        return ""
    lines = "".join(
        f" · {style.element('span', f'{counts[name]} {name}', name)} ({escape(meaning)})"
        for name, meaning in _ORIGINS.items()
        if counts[name]
    )
    shades = f"{sum(counts.values())} tokens, the stronger the shade, the less likely"
    return style.element("div", shades + lines, "small")


def _media(part: Any) -> str:
    kind = str(part["type"]).removesuffix("_url")
    source = part.get(part["type"])
    url = str(source.get("url", "")) if isinstance(source, dict) else ""
    if kind == "image" and _PICTURE.match(url):
        return f'<img alt="image" style="max-width:16em;max-height:16em;display:block" src="{escape(url)}">'
    short = url if len(url) <= 80 else f"{url[:40]}..."
    return style.element("code", escape(f"[{kind}{': ' if short else ''}{short}]"), "small")


# -- calls ---------------------------------------------------------------------------------------------------


def calls_table(program: str, records: Sequence[CallRecord]) -> str:
    """Folded: a row for each call, with a bar for when it ran, and the sums."""
    columns = [key for key in _COLUMNS if key in COUNTED[:2] or any(one.count(key) for one in records)]
    reports = [constraint_report(record.meta) for record in records]
    times = [(one.began, one.began + one.seconds) for one in records if one.began is not None]
    begin = min((start for start, _ in times), default=0.0)
    length = max((end for _, end in times), default=0.0) - begin
    head = ["call", "branch", *(_COLUMNS[key] for key in columns), "seconds"]
    head += ["constraint"] * any(reports) + ["timeline"] * (length > 0)
    rows = []
    for record, report in list(zip(records, reports, strict=True))[:_MAX_CALLS]:
        row = [record.name or record.kind, ".".join(map(str, record.branch)) or "-"]
        row += [*(str(record.count(key)) for key in columns), f"{record.seconds:.3f}"]
        row += [report] * any(reports)
        if length > 0:
            row.append(_bar(record, begin, length))
        rows.append(row)
    sums = [str(sum(record.count(key) for record in records)) for key in columns]
    last = ["total", "", *sums, f"{sum(record.seconds for record in records):.3f}"]
    more = len(records) - len(rows)
    below = style.element("div", f"and {more} more calls", "small") if more > 0 else ""
    calls = totals(records)["calls"]
    title = f"{program}: {calls} call{'' if calls == 1 else 's'}"
    if length > 0:
        title += f", {length:.3f} s"
        replayed = any(one.replayed for one in records)
        phases = (name for name in _PHASES if replayed or name != "replayed")
        key = "".join(style.element("i", "", name) + _PHASES[name] for name in phases)
        below += style.element("div", key, "small key")
    return style.folded(title, style.table(head, rows, 2, last) + below)


def _bar(record: CallRecord, begin: float, length: float) -> str:
    """When a call ran, and in which phases, of a run that began at `begin` and took `length` seconds."""
    if record.began is None:
        return ""
    if record.replayed:
        ends = [("replayed", record.seconds)]
    else:
        queue, first = (float(record.meta.get(name) or 0) for name in ("queue_time", "first_token_latency"))
        first = first if record.first_token_s is None else record.first_token_s
        ends = [("queue", queue), ("prefill", first), ("decode", record.seconds)]
    start = at = record.began - begin
    parts = []
    for name, end in ends:
        to = start + min(end, record.seconds)
        parts.append((name, at / length, to / length))
        at = max(at, to)
    return style.bar(parts)


def constraint_report(meta: Mapping[str, Any]) -> str:
    """How a constraint was enforced: backend, what was left out, repairs. "" without one."""
    grammar = meta.get("grammar")
    if not isinstance(grammar, Mapping):
        return ""
    facts = [str(grammar.get("backend", "?"))]
    for name, label in (("checked", "checked by a validator"), ("ignored", "ignored")):
        if grammar.get(name):
            facts.append(f"{label}: {', '.join(map(str, grammar[name]))}")
    if grammar.get("rollbacks"):
        facts.append(f"{grammar['rollbacks']} steps taken back")
    if grammar.get("closed_by_budget"):
        facts.append("closed before the token limit")
    return "; ".join(facts)
