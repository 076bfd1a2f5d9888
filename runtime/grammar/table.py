"""The grammar backends by name. A new one is a file and a line here."""

from __future__ import annotations

from typing import Any

from runtime.grammar.base import GrammarBackend, Matcher
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest, UnsupportedConstraint
from runtime.protocol.registry import Registry
from runtime.protocol.vocabulary import Vocabulary


class NoGrammarBackend(GrammarBackend):
    """For an engine that is to take no constraints at all: each is refused."""

    name = "none"

    def compile(self, constraint: Constraint) -> Matcher:
        raise UnsupportedConstraint(
            "constraints are not supported with grammar-backend none",
            where=constraint.kind,
            hint='start the engine with grammar_backend="auto"',
        )


GRAMMAR_BACKENDS: Registry[type[GrammarBackend]] = Registry(
    "grammar backend",
    {
        "auto": "runtime.grammar.backends.auto:AutoGrammarBackend",
        "llguidance": "runtime.grammar.backends.llguidance_backend:LLGuidanceBackend",
        "outlines": "runtime.grammar.backends.outlines_backend:OutlinesGrammarBackend",
        "xgrammar": "runtime.grammar.backends.xgrammar_backend:XGrammarBackend",
        "none": "runtime.grammar.table:NoGrammarBackend",
    },
    extras={"llguidance": "llguidance", "xgrammar": "xgrammar"},
)


def make_backend(name: str, vocabulary: Vocabulary, **options: Any) -> GrammarBackend:
    """The backend called `name` ("auto" asks several in turn) for a vocabulary.

    `options` are its settings, for instance whitespace="compact" for JSON. Raises UnknownName, MissingExtra,
    or BadRequest for a setting that the backend does not have.
    """
    kind = GRAMMAR_BACKENDS.load(name)
    for option in options:
        if option not in kind.OPTIONS:
            known = ", ".join(sorted(kind.OPTIONS)) or "none"
            raise BadRequest(f"is not an option of {name!r}; known: {known}", where=option)
    return kind(vocabulary, **options)
