"""AutoGrammarBackend: each constraint goes to the backend that keeps its kind exactly, or best.

It knows the order in which backends are asked, not how they work.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from runtime.grammar.base import GrammarBackend, Matcher
from runtime.grammar.table import GRAMMAR_BACKENDS
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import UnsupportedConstraint
from runtime.protocol.registry import MissingExtra
from runtime.protocol.vocabulary import Vocabulary

ORDER: dict[str, tuple[str, ...]] = {
    "regex": ("outlines", "llguidance", "xgrammar"),
    "choices": ("outlines", "llguidance"),
    "json_schema": ("llguidance", "xgrammar"),
    "ebnf": ("llguidance", "xgrammar"),
    "structural_tag": ("llguidance", "xgrammar"),
}
"""Kind -> backends, best first. outlines keeps exactly what re.fullmatch accepts, with the fastest masks;
llguidance reads schemas by their standard and compiles at once; xgrammar is asked last: importing it imports
torch.

Schemas do not go to outlines: a regular expression keeps a part of them only. Patterns that are too large for
its automata do not stay there."""

_WHY = {
    "regex": "keeps exactly what re.fullmatch accepts",
    "choices": "keeps choices exactly",
    "json_schema": "keeps JSON Schema by its standard",
    "ebnf": "takes Lark and EBNF",
    "structural_tag": "takes structural tags",
}


class AutoGrammarBackend(GrammarBackend):
    """Asks the backends of ORDER in turn; the first that does not refuse keeps the constraint.

    `options` go to the backends that know them (their OPTIONS). Backends are made when first needed.
    """

    name = "auto"
    OPTIONS = frozenset({"whitespace", "schema_format", "parser_limits", "limits", "grammar_cache_dir"})

    def __init__(self, vocabulary: Vocabulary, **options: object) -> None:
        super().__init__(vocabulary)
        self._options = options
        self._made: dict[str, GrammarBackend] = {}
        self._lock = threading.Lock()

    def _backend(self, name: str) -> GrammarBackend:
        with self._lock:
            if name not in self._made:
                kind = GRAMMAR_BACKENDS.load(name)
                known = {key: value for key, value in self._options.items() if key in kind.OPTIONS}
                self._made[name] = kind(self.vocabulary, **known)
            return self._made[name]

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
