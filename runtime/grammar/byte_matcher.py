"""ByteMatcher: a grammar backend driven byte by byte, without a tokenizer."""

from __future__ import annotations

from typing import Any, cast, get_args

import numpy as np

from runtime.grammar.base import Matcher
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint, ConstraintKind
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary

BYTES = Vocabulary(tuple(bytes([value]) for value in range(256)))
"""One token for each byte."""


class ByteMatcher:
    """Follows one text. next_bytes() is empty where nothing may follow."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher

    def next_bytes(self) -> set[int]:
        """The bytes that some matching text goes on with."""
        bits = self.matcher.mask().bits
        return {int(value) for value in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))}

    def advance(self, byte: int) -> bool:
        """Follow one byte; False, and no change, if it is not allowed. Like all text that is given, JSON may
        have the properties of an object in any order, while next_bytes() offers them in that of the
        schema."""
        return self.matcher.advance(byte) or self.matcher.advance_bytes(bytes([byte]))

    def may_stop(self) -> bool:
        return self.matcher.may_stop()

    def forced_bytes(self) -> bytes:
        return self.matcher.forced_bytes()

    def copy(self) -> ByteMatcher:
        return ByteMatcher(self.matcher.copy())


def byte_matcher(kind: str, spec: str, backend: str = "auto", **options: Any) -> ByteMatcher:
    """A ByteMatcher for a constraint. `options` are settings of the backend, such as whitespace="compact".
    Raises BadConstraint, UnsupportedConstraint (which keyword, where), UnknownName, BadRequest."""
    if kind not in get_args(ConstraintKind):
        raise BadConstraint(f"unknown kind {kind!r}; known: {', '.join(get_args(ConstraintKind))}")
    constraint = Constraint(cast(ConstraintKind, kind), spec).verify()
    return ByteMatcher(make_backend(backend, BYTES, **options).compile(constraint))
