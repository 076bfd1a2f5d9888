"""Relaxation and Owner: how far a lowering may leave a schema to the validator, and what it offers to the
rules of one object. It lowers nothing itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from runtime.grammar.json_schema.refs import Place
from runtime.protocol.errors import UnsupportedConstraint

Lowered = bool | dict[str, Any]


@dataclass(frozen=True)
class Relaxation:
    """What is left to the validator besides what always is: steps of a ladder, taken when the engine
    refuses."""

    one_of: bool = False
    property_counts: bool = False
    property_patterns: bool = False
    patterns: bool = False
    numbers: bool = False
    siblings: bool = False
    everything: bool = False


class Unspelled(UnsupportedConstraint):
    """The schema asks for a text that the language of unescaped strings does not have."""


class Owner(ABC):
    """The lowering of the whole document, as the rules of one object see it."""

    @abstractmethod
    def check(self, place: Place, *words: str) -> None:
        """Leave `words` of the schema at `place` to the validator."""

    @abstractmethod
    def lower_node(self, place: Place, node: Any, base: str) -> Lowered:
        """A schema inside of another, lowered."""

    @abstractmethod
    def reference(self, place: Place, word: str, reference: Any, base: str) -> Lowered:
        """A reference to a definition of the result; True where only the validator knows it."""

    @abstractmethod
    def visit(self, place: Place, node: Any, base: str) -> None:
        """Look through a schema that is only validated, later."""

    @abstractmethod
    def text_rule(self, place: Place, word: str, value: str) -> str | None:
        """A `pattern` or `format` as an expression for the engine; None if it has none and is checked."""
