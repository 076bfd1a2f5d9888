"""The viewer's page: plain HTML, CSS and JavaScript, served as they are by a server (/viewer) and by
`sglang-dsl view`. It loads nothing from elsewhere. Its server answers

    .../viewer                 the page
    .../viewer/sources.json    what to show: see `Sources`
    .../viewer/page.js, ...    the files of `NAMES`

The page reads run files itself; their content is shown as text and never as markup.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
PAGE = "page.html"
NAMES = (
    "page.css", "page.js", "dom.js", "runs.js", "tree.js", "timeline.js", "radix.js", "tokens.js",
    "compare.js", "icon.svg",
)  # fmt: skip
"""The files beside the page."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of every answer: nothing from elsewhere is loaded or run, and no other page embeds this one."""


class RunSource(msgspec.Struct):
    """A run file. `live`: it may still grow; `url`: its bytes after ?from=OFFSET."""

    name: str
    url: str
    live: bool = False


class Sources(msgspec.Struct):
    """`title`: of the page; `requests`, `radix`: addresses of a server's recent requests and prefix cache;
    `wants_key`: whether these take an API key."""

    title: str
    runs: list[RunSource] = []
    requests: str | None = None
    radix: str | None = None
    wants_key: bool = False


@cache
def asset(name: str) -> tuple[bytes, str]:
    """A file's bytes and media type. Raises KeyError if it is neither the page nor in NAMES."""
    if name != PAGE and name not in NAMES:
        raise KeyError(name)
    content = files(__name__).joinpath("page").joinpath(name).read_bytes()
    return content, _KINDS[name.rpartition(".")[2]]
