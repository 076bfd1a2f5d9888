"""Constraint: what a generation must match, in one value. Does not compile anything."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from runtime.protocol.errors import BadConstraint

ConstraintKind = Literal["regex", "json_schema", "ebnf", "structural_tag", "choices"]
Whitespace = Literal["compact", "single", "flexible"]
"""What may stand between the tokens of JSON: nothing, at most one space, or bounded indentation."""
JSON_KINDS = ("json_schema", "structural_tag")
"""Kinds that may hold JSON, and therefore take `whitespace`."""
MAX_SPEC_BYTES = 1 << 20


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """`kind` names the language of `spec`; `choices` holds its options as a JSON list of strings.
    `whitespace`: a policy for the JSON in it; None: the engine's (its option grammar_whitespace)."""

    kind: ConstraintKind
    spec: str
    whitespace: Whitespace | None = None

    def verify(self) -> Constraint:
        if self.whitespace is not None:
            known = get_args(Whitespace)
            if self.whitespace not in known:
                raise BadConstraint(
                    f"must be one of {', '.join(known)}, got {self.whitespace!r}", where="whitespace"
                )
            if self.kind not in JSON_KINDS:
                raise BadConstraint(
                    f"goes with {' or '.join(JSON_KINDS)}, not with {self.kind}", where="whitespace"
                )
        size = len(self.spec.encode("utf-8", "surrogatepass"))
        if not self.spec:
            raise BadConstraint("is empty", where=self.kind)
        if size > MAX_SPEC_BYTES:
            raise BadConstraint(f"has {size} bytes; at most {MAX_SPEC_BYTES} are taken", where=self.kind)
        return self
