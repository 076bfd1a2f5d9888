"""The HTML elements of all notebook views. No scripts, nothing is loaded, all texts are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

_CSS = files("sglang_dsl.views").joinpath("notebook.css").read_text(encoding="utf-8")
STYLE = f"<style>{' '.join(_CSS.partition('*/')[2].split())}</style>"


def element(tag: str, body: str, classes: str = "", hover: str = "") -> str:
    """`body` is HTML. `hover`: text that is shown while the pointer or the focus is on it."""
    attributes = f' class="{classes}"' if classes else ""
    if hover:
        attributes += f' tabindex="0" data-told="{escape(hover)}"'
    return f"<{tag}{attributes}>{body}</{tag}>"


def whole(*parts: str) -> str:
    """One element with its style, which needs nothing else."""
    return f'<div class="sgl">{STYLE}{"".join(parts)}</div>'


def box(role: str | None, title: str, body: str) -> str:
    """A turn, a branch or an error, with a line at its left in the colour of `role`."""
    known = role if role in ("system", "user", "assistant", "tool", "bad") else "other"
    return element("div", element("div", escape(title), "who") + body, f"box {known}")


def text(content: str) -> str:
    return element("div", escape(content), "said")


def folded(summary: str, body: str, *, opened: bool = False) -> str:
    """A body that unfolds. `body` is HTML, `summary` is text."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{body}</details>"


def columns(parts: Iterable[str]) -> str:
    return element("div", "".join(parts), "cols")


class Html(str):
    """A cell of a table that is HTML already."""

    __slots__ = ()


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, last: Sequence[str] | None = None
) -> str:
    """Cells are text, or Html; the first `left` columns are no numbers. `last`: a row of sums."""
    body = "".join(_row(row, "td", left) for row in rows)
    end = "" if last is None else _row(last, "td", left, "sum")
    return element("div", element("table", _row(head, "th", left) + body + end), "wide")


def _row(cells: Sequence[str], kind: str, left: int, name: str = "") -> str:
    elements = (
        element(kind, cell if isinstance(cell, Html) else escape(cell), "l" if at < left else "")
        for at, cell in enumerate(cells)
    )
    return element("tr", "".join(elements), name)


def bar(parts: Iterable[tuple[str, float, float]]) -> Html:
    """Coloured parts of a line, each (class, from, to), where the line is 0 .. 1."""
    inner = "".join(
        f'<i class="{name}" style="left:{100 * begin:.2f}%;width:{100 * max(0.0, end - begin):.2f}%"></i>'
        for name, begin, end in parts
    )
    return Html(element("div", inner, "bar"))
