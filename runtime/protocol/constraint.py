"""Constraint: what a generation must match, in one value. Does not compile anything."""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.protocol.errors import BadConstraint

ConstraintKind = Literal["regex", "json_schema", "ebnf", "structural_tag", "choices"]
MAX_SPEC_BYTES = 1 << 20


class Constraint(msgspec.Struct, frozen=True):
    """`kind` names the language of `spec`; `choices` holds its options as a JSON list of strings."""

    kind: ConstraintKind
    spec: str

    def verify(self) -> Constraint:
        size = len(self.spec.encode("utf-8", "surrogatepass"))
        if not self.spec:
            raise BadConstraint("is empty", where=self.kind)
        if size > MAX_SPEC_BYTES:
            raise BadConstraint(f"has {size} bytes; at most {MAX_SPEC_BYTES} are taken", where=self.kind)
        return self
