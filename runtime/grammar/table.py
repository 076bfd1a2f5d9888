"""The grammar backends by name. A new one is a file and a line here."""

from __future__ import annotations

from runtime.grammar.base import GrammarBackend, Matcher
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import UnsupportedConstraint
from runtime.protocol.registry import Registry
from runtime.protocol.vocabulary import Vocabulary

AUTO = "outlines"
"""What "auto" means: the backend that takes the most kinds exactly."""


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
        "outlines": "runtime.grammar.outlines_backend:OutlinesGrammarBackend",
        "none": "runtime.grammar.table:NoGrammarBackend",
    },
)


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """The backend called `name` ("auto" picks) for a vocabulary. Raises UnknownName or MissingExtra."""
    return GRAMMAR_BACKENDS.load(AUTO if name == "auto" else name)(vocabulary)
