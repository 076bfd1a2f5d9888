"""The grammar backends by name, and "auto", which picks one for each constraint. A new backend is a file and
a line here.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from runtime.grammar.base import GrammarBackend, Matcher
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest, UnsupportedConstraint
from runtime.protocol.registry import MissingExtra, Registry
from runtime.protocol.vocabulary import Vocabulary

ORDER: dict[str, tuple[str, ...]] = {
    "regex": ("outlines", "llguidance", "xgrammar"),
    "choices": ("outlines", "llguidance"),
    "json_schema": ("llguidance", "xgrammar"),
    "ebnf": ("llguidance", "xgrammar"),
    "structural_tag": ("llguidance", "xgrammar"),
}
"""Kind -> backends, best first. outlines keeps exactly what re.fullmatch accepts, with the fastest masks;
llguidance reads schemas by their standard and compiles at once; xgrammar is last, because its import brings
torch. Schemas do not go to outlines: a regular expression keeps a part of them only."""

_WHY = {
    "regex": "keeps exactly what re.fullmatch accepts",
    "choices": "keeps choices exactly",
    "json_schema": "keeps JSON Schema by its standard",
    "ebnf": "takes Lark and EBNF",
    "structural_tag": "takes structural tags",
}


class NoGrammarBackend(GrammarBackend):
    """For an engine without constraints: each is refused."""

    name = "none"

    def compile(self, constraint: Constraint) -> Matcher:
        raise UnsupportedConstraint(
            "constraints are not supported with grammar-backend none",
            where=constraint.kind,
            hint='start the engine with grammar_backend="auto"',
        )


class AutoGrammarBackend(GrammarBackend):
    """The first backend of ORDER that does not refuse keeps the constraint. Backends are created when first
    needed, with those of `options` that they know (their OPTIONS)."""

    name = "auto"
    OPTIONS = frozenset({"whitespace", "schema_format", "parser_limits", "limits", "grammar_cache_dir"})

    def __init__(self, vocabulary: Vocabulary, **options: object) -> None:
        super().__init__(vocabulary)
        self._options = options
        self._backends: dict[str, GrammarBackend] = {}
        self._lock = threading.Lock()

    def _backend(self, name: str) -> GrammarBackend:
        with self._lock:
            if name not in self._backends:
                kind = GRAMMAR_BACKENDS.load(name)
                known = {key: value for key, value in self._options.items() if key in kind.OPTIONS}
                self._backends[name] = kind(self.vocabulary, **known)
            return self._backends[name]

    def compile(self, constraint: Constraint) -> Matcher:
        refusals: list[str] = []
        first: UnsupportedConstraint | None = None
        for name in ORDER[constraint.kind]:
            if name not in GRAMMAR_BACKENDS:
                continue
            try:
                matcher = self._backend(name).compile(constraint)
            except UnsupportedConstraint as error:
                first = first or error
                refusals.append(f"{name}: {error.message}")
                continue
            except MissingExtra as error:
                refusals.append(f"{name}: {error}")
                continue
            why = _WHY[constraint.kind] if not refusals else "; ".join(["others refused", *refusals])
            matcher.origin = replace(matcher.origin, backend=name, why=why)
            return matcher
        if first is not None:
            raise first
        raise UnsupportedConstraint(
            "no grammar backend takes this kind of constraint" + "".join(f"; {text}" for text in refusals),
            where=constraint.kind,
        )


GRAMMAR_BACKENDS: Registry[type[GrammarBackend]] = Registry(
    "grammar backend",
    {
        "auto": "runtime.grammar.table:AutoGrammarBackend",
        "llguidance": "runtime.grammar.backends.llguidance_backend:LLGuidanceBackend",
        "outlines": "runtime.grammar.backends.outlines_backend:OutlinesGrammarBackend",
        "xgrammar": "runtime.grammar.backends.xgrammar_backend:XGrammarBackend",
        "none": "runtime.grammar.table:NoGrammarBackend",
    },
    extras={"llguidance": "llguidance", "xgrammar": "xgrammar"},
)


def make_backend(name: str, vocabulary: Vocabulary, **options: Any) -> GrammarBackend:
    """The backend called `name` for a vocabulary, with its settings, for instance whitespace="compact" for
    JSON. Raises UnknownName, MissingExtra, or BadRequest for a setting that the backend does not have."""
    kind = GRAMMAR_BACKENDS.load(name)
    for option in options:
        if option not in kind.OPTIONS:
            known = ", ".join(sorted(kind.OPTIONS)) or "none"
            raise BadRequest(f"is not an option of {name!r}; known: {known}", where=option)
    return kind(vocabulary, **options)
