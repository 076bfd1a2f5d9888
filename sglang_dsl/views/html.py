"""A snapshot as HTML for notebooks: turns, generated text marked, with its tokens where their
log-probabilities were asked for, forks side by side, calls. Knows how texts are shown; how things look is
style's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.ir import cut
from sglang_dsl.views import style
from sglang_dsl.views.outline import Block, Branches, Constraint, constraint_of, outline
from sglang_dsl.views.snapshot import Snapshot, calls_within
from sglang_dsl.views.timeline import calls_table, summary
from sglang_dsl.views.tokens import Span, Token, spans, tokens_of

# Pictures that are in the document itself; any other address would be loaded.
_PICTURE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*\Z")
_ORIGINS = {
    "forced": "the constraint left no other: appended without a step (jump-forward)",
    "speculated": "guessed ahead, and confirmed by the step that verified it",
}
_SHORT = 40
"""Of a constraint what is shown beside its text."""
_MOST_TOKENS = 5000
"""Of one text that are shown one by one."""


def page(state: Snapshot) -> str:
    """The state as one <div>. A failure stands below what came before it."""
    return style.whole(_state(state), calls_table(state.program, state.calls))


def group(states: Sequence[Snapshot]) -> str:
    """Forks of one state, side by side, and their calls."""
    shown = style.columns(_branch(state.branch[-1], state, _state(state)) for state in states)
    return style.whole(shown, calls_table(states[0].program, calls_within(states)))


def _state(state: Snapshot) -> str:
    made = _parts(outline(state), partial=bool(state.partial))
    if (error := state.error) is not None:
        made += style.box("bad", type(error).__name__, style.said(str(error)))
    return made


def _parts(parts: Sequence[Block | Branches], *, partial: bool) -> str:
    made: list[str] = []
    for part in parts:
        if isinstance(part, Branches):
            made.append(_fork(part))
            continue
        now = partial and part is parts[-1]
        text = "".join(_entry(one, now=now and one is part.entries[-1]) for one in part.entries)
        body = style.element("div", text, "said") + _key(part.entries)
        made.append(body if part.role is None else style.box(part.role, part.role, body))
    return "".join(made)


def _fork(fork: Branches) -> str:
    branches = (
        _branch(number, state, _parts(parts, partial=bool(state.partial)))
        for number, (parts, state) in enumerate(zip(fork.branches, fork.states, strict=True))
    )
    title = f"fork, {len(fork.branches)} branches"
    return style.folded(title, style.columns(branches), opened=True)


def _branch(number: int, state: Snapshot, body: str) -> str:
    stands = "running" if state.running else ""
    if state.error is not None:
        stands = f"{type(state.error).__name__}: {cut(str(state.error), 200)}"
    return style.box("other", f"branch {number}{f' · {stands}' if stands else ''}", body)


# -- generated text ------------------------------------------------------------------------------------------


def _entry(entry: Transcript, *, now: bool) -> str:
    if entry.part is not None:
        return _media(entry.part)
    if entry.chosen is None:
        return escape(entry.value)
    made, reasoning = entry.made, ""
    if entry.reasoning:
        reasoning = style.folded("reasoning", style.said(entry.reasoning))
    meta: Mapping[str, Any] = {} if made is None else made.meta
    tokens = tokens_of(meta)
    if not tokens or len(tokens) > _MOST_TOKENS:
        told = _told_of_call(meta)
        names = "now" if now else "t" if told else ""
        text = style.element("mark", escape(entry.value), names, told)
    else:
        cuts = spans(entry.hidden + entry.value, tokens, len(entry.hidden))
        text = style.element("mark", "".join(map(_span, cuts)), "toks")
    name = style.element("sub", f" {escape(entry.chosen)}") if entry.chosen else ""
    return f"{reasoning}{text}{name}{held(constraint_of(None if made is None else made.node))}"


def held(constraint: Constraint | None) -> str:
    """What a generation is held to, after its text."""
    if constraint is None:
        return ""
    text = f"{constraint.kind} {constraint.text}" if constraint.text else constraint.kind
    told = _wrapped(constraint.text) if len(text) > _SHORT else ""
    return style.element("span", escape(cut(text, _SHORT)), "held t" if told else "held", told)


def _wrapped(text: str, width: int = 80, most: int = 30) -> str:
    lines = [line[at : at + width] for line in text.split("\n") for at in range(0, len(line) or 1, width)]
    return "\n".join(lines[:most] + ["..."] * (len(lines) > most))


def _told_of_call(meta: Mapping[str, Any]) -> str:
    """What there is to know of a generation without its tokens."""
    if isinstance(meta.get("choices"), list):
        pairs = zip(meta["choices"], meta.get("probabilities") or ())
        ranked = sorted(pairs, key=lambda pair: -pair[1])[:20]
        return "\n".join(f"{_percent(share)}  {_quoted(str(option))}" for option, share in ranked)
    return summary(meta)


def _span(span: Span) -> str:
    probability = span.probability
    if not span.tokens:
        return escape(span.text)
    names = ["t"] if probability is None else ["t", f"p{min(9, int(probability * 10))}"]
    origins = {token.origin for token in span.tokens}
    names += [one for one in _ORIGINS if origins == {one}]
    told = "\n".join(map(_told, span.tokens))
    return style.element("span", escape(span.text), " ".join(names), told)


def _told(token: Token) -> str:
    """A token and the likeliest at its place, a line each."""
    share = token.probability
    own = "" if share is None else f"{_percent(share)}  "
    lines = [f"{own}{_quoted(token.text)}{f'  {token.origin}' if token.origin else ''}"]
    seen = token.text
    for text, logprob in token.others:
        if text != seen:
            lines.append(f"{_percent(Token(text, logprob).probability or 0.0)}  {_quoted(text)}")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:5.1f}%"


def _quoted(text: str) -> str:
    return json.dumps(cut(text, 60), ensure_ascii=False)


def _key(entries: Sequence[Transcript]) -> str:
    """What the shades and lines mean, with counts, where there are any."""
    found: Counter[str] = Counter()
    for entry in entries:
        if entry.made is not None and entry.chosen is not None:
            tokens = tokens_of(entry.made.meta)
            found.update(token.origin for token in tokens)
    if not found:
        return ""
    lines = "".join(
        f" · {style.element('span', f'{found[name]} {name}', name)} ({escape(means)})"
        for name, means in _ORIGINS.items()
        if found[name]
    )
    shades = f"{sum(found.values())} tokens, the stronger the shade, the less likely"
    return style.element("div", shades + lines, "small")


def _media(part: Any) -> str:
    kind = str(part["type"]).removesuffix("_url")
    where = part.get(part["type"])
    url = str(where.get("url", "")) if isinstance(where, dict) else ""
    if kind == "image" and _PICTURE.match(url):
        return f'<img alt="image" style="max-width:16em;max-height:16em;display:block" src="{escape(url)}">'
    told = url if len(url) <= 80 else f"{url[:40]}..."
    return style.element("code", escape(f"[{kind}{': ' if told else ''}{told}]"), "small")
