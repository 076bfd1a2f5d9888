"""Keywords of a schema that its standard does not know, or its draft does not: they have no effect, and
whoever wrote them is told. Matches nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.grammar.json_schema.refs import Place, show
from runtime.grammar.json_schema.shapes import KEYWORDS, known

MAX_TOLD = 20
"""Of one schema, at most."""

_ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$recursiveRef", "$ref",
        "$dynamicRef", "$vocabulary", "$comment", "$defs", "definitions", "title", "description", "default",
        "deprecated", "readOnly", "writeOnly", "examples", "example", "const", "discriminator",
        "externalDocs", "xml",
    }
)  # fmt: skip
"""Of all drafts, and of OpenAPI, that say nothing of what is valid, or that are read elsewhere."""

_CONTENT = ("contentEncoding", "contentMediaType", "contentSchema")
"""What a string holds: annotations since draft 2019-09, and optional before."""


def unknown_keywords(place: Place, node: Mapping[str, Any], draft: int) -> Iterator[str]:
    """A line for each keyword at `place` that is not heard. Names that begin with "x-" are meant to be."""
    for word in node:
        if word in _ANNOTATIONS or word.startswith("x-"):
            continue
        if word in _CONTENT:
            yield f"{word} {str(node[word])[:80]!r} at {show(place)} (an annotation)"
        elif word not in KEYWORDS:
            near = difflib.get_close_matches(word[:80], KEYWORDS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            yield f"keyword {word[:80]!r} at {show(place)}{hint}"
        elif not known(word, draft):
            yield f"keyword {word!r} at {show(place)} (not of its draft)"
