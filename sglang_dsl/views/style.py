"""The HTML elements and the style of all views in notebooks. Light or dark like the notebook (JupyterLab, VS
Code), else like the reader's system. No scripts, and nothing is loaded; all texts are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_LIGHT = (
    "--system:#8250df;--user:#0969da;--assistant:#1a7f37;--tool:#9a6700;--other:#57606a;--bad:#cf222e;"
    "--gen:234,179,8;--forced:#0969da;--guess:#1a7f37"
)
_DARK = (
    "--system:#c297ff;--user:#6cb6ff;--assistant:#57c96b;--tool:#d4a72c;--other:#9198a1;--bad:#ff7b72;"
    "--gen:250,204,21;--forced:#6cb6ff;--guess:#57c96b"
)

_SHADES = "".join(
    f".sgl .p{step}{{background:rgba(var(--gen),{0.1 + 0.55 * (9 - step) / 9:.2f})}}" for step in range(10)
)

_RULES = f"""
.sgl{{{_LIGHT};--fg:var(--jp-content-font-color1,var(--vscode-editor-foreground,#1f2328));
--bg:var(--jp-layout-color0,var(--vscode-editor-background,#fff));
--line:var(--jp-border-color2,rgba(128,128,128,.35));
color:var(--fg);background:var(--bg);max-width:70em;padding:4px 8px;font-size:.95em;line-height:1.45}}
@media (prefers-color-scheme:dark){{.sgl{{{_DARK};
--fg:var(--jp-content-font-color1,var(--vscode-editor-foreground,#e6edf3));
--bg:var(--jp-layout-color0,var(--vscode-editor-background,#0d1117))}}}}
[data-jp-theme-light="true"] .sgl,.vscode-light .sgl{{{_LIGHT}}}
[data-jp-theme-light="false"] .sgl,.vscode-dark .sgl{{{_DARK}}}
.sgl .box{{border-left:3px solid var(--role,var(--other));padding:1px 8px;margin:5px 0}}
.sgl .system{{--role:var(--system)}}.sgl .user{{--role:var(--user)}}
.sgl .assistant{{--role:var(--assistant)}}.sgl .tool{{--role:var(--tool)}}.sgl .bad{{--role:var(--bad)}}
.sgl .who{{font-size:.8em;color:var(--role,var(--other))}}
.sgl .said{{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate}}
.sgl mark{{background:rgba(var(--gen),.3);color:inherit;border-radius:3px;padding:0 1px;
unicode-bidi:isolate}}
.sgl mark.toks{{background:none;padding:0}}
.sgl mark.now{{border-right:2px solid var(--fg)}}
.sgl .t{{border-radius:2px;position:relative;cursor:default}}
{_SHADES}
.sgl .forced{{text-decoration:underline dotted 2px var(--forced);text-underline-offset:3px}}
.sgl .speculated{{text-decoration:underline solid 2px var(--guess);text-underline-offset:3px}}
.sgl .t:hover::after,.sgl .t:focus::after{{content:attr(data-told);position:absolute;left:0;top:1.5em;
z-index:9;white-space:pre;font:12px/1.4 monospace;color:var(--fg);background:var(--bg);
border:1px solid var(--line);border-radius:4px;padding:4px 8px;box-shadow:0 2px 8px rgba(0,0,0,.3);
width:max-content;max-width:40em;overflow:hidden;text-decoration:none;pointer-events:none}}
.sgl sub,.sgl .small{{font-size:.78em;opacity:.75}}
.sgl .held{{font:.78em monospace;border:1px solid var(--line);border-radius:3px;padding:0 4px;
margin-left:4px;white-space:nowrap;color:inherit;background:none}}
.sgl details{{margin:4px 0}}.sgl summary{{cursor:pointer;font-size:.88em}}
.sgl .cols{{display:grid;grid-template-columns:repeat(auto-fit,minmax(15em,1fr));gap:4px 12px}}
.sgl .wide{{overflow-x:auto}}
.sgl table{{border-collapse:collapse;font-size:.85em;color:inherit;margin:2px 0}}
.sgl th,.sgl td{{padding:1px 8px;text-align:right;vertical-align:top;background:none;white-space:nowrap}}
.sgl th{{border-bottom:1px solid var(--line)}}
.sgl .l{{text-align:left;white-space:normal;overflow-wrap:break-word;max-width:24em}}
.sgl tr.sum td{{border-top:1px solid var(--line)}}
.sgl .bar{{position:relative;width:16em;height:1em;background:rgba(128,128,128,.12)}}
.sgl .bar i{{position:absolute;top:15%;height:70%;min-width:1px}}
.sgl .queue{{background:var(--other)}}.sgl .prefill{{background:var(--user)}}
.sgl .decode{{background:var(--assistant)}}.sgl .replayed{{background:none;border:1px dashed var(--fg)}}
.sgl .key i{{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 .8em}}
.sgl pre{{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85em;color:inherit;background:none}}
"""
STYLE = f"<style>{''.join(_RULES.splitlines())}</style>"


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
    """Text, with its white space."""
    return element("div", escape(content), "said")


def folded(summary: str, body: str, *, opened: bool = False) -> str:
    """A body that unfolds. `body` is HTML, `summary` is text."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{body}</details>"


def columns(parts: Iterable[str]) -> str:
    """Parts side by side, as far as they fit."""
    return element("div", "".join(parts), "cols")


class Html(str):
    """A cell of a table that is HTML already."""

    __slots__ = ()


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, last: Sequence[str] | None = None
) -> str:
    """Cells are text, or Html. The first `left` columns are text, the others numbers. `last`: a row of
    sums."""
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
