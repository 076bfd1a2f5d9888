"""The viewer's page: plain HTML, CSS and JavaScript, served as they are by a server (/viewer) and by
`sglang-dsl view`. It loads nothing from elsewhere. Whoever serves it answers

    .../viewer                 the page
    .../viewer/sources.json    what there is to show: see `Sources`
    .../viewer/page.js, ...    the files of `NAMES`

Files with runs are read by the page itself; what they hold is shown as text and never as markup.
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
"""What every answer says: nothing from elsewhere is loaded or run, and no other page shows this one."""


class RunSource(msgspec.Struct):
    """A file with runs. live: it may still grow; url: gives its bytes from ?from=OFFSET on."""

    name: str
    url: str
    live: bool = False


class Sources(msgspec.Struct):
    """title: of the page. requests, radix: where a server tells its recent requests and its prefix cache.
    wants_key: these take an API key."""

    title: str
    runs: list[RunSource] = []
    requests: str | None = None
    radix: str | None = None
    wants_key: bool = False


@cache
def asset(name: str) -> tuple[bytes, str]:
    """A file's bytes and media type. Raises KeyError for one that is not among NAMES, nor the page."""
    if name != PAGE and name not in NAMES:
        raise KeyError(name)
    found = files(__name__).joinpath("page").joinpath(name)
    return found.read_bytes(), _KINDS[name.rpartition(".")[2]]
