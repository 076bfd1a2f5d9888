"""Constraint: what an output must match. Does not compile anything."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from runtime.protocol.errors import BadConstraint

ConstraintKind = Literal["regex", "json_schema", "ebnf", "structural_tag", "choices"]
Whitespace = Literal["compact", "single", "flexible"]
"""Whitespace between the tokens of JSON: none, at most one space, or bounded indentation."""
SchemaFormat = Literal["assertion", "annotation"]
"""Whether the keyword `format` of a JSON schema refuses other strings, or is a comment only. JSON Schema
2020-12 (validation, section 7.2) has a vocabulary for each; earlier drafts leave it open."""
JSON_KINDS = ("json_schema", "structural_tag")
"""Kinds that may hold JSON, and therefore take `whitespace` and `schema_format`."""
JSON_OPTIONS: dict[str, tuple[str, ...]] = {
    "whitespace": get_args(Whitespace), "schema_format": get_args(SchemaFormat),
}  # fmt: skip
"""The options of constraints of these kinds, with their values."""
MAX_SPEC_BYTES = 1 << 20


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """`kind` names the language of `spec`; `choices` holds its options as a JSON list of strings.
    `whitespace`: a policy for the JSON in it; None: the engine's (its option grammar_whitespace).
    `schema_format`: what `format` does in its schemas; None: the engine's (grammar_schema_format)."""

    kind: ConstraintKind
    spec: str
    whitespace: Whitespace | None = None
    schema_format: SchemaFormat | None = None

    def verify(self) -> Constraint:
        for option, known in JSON_OPTIONS.items():
            value = getattr(self, option)
            if value is None:
                continue
            if value not in known:
                raise BadConstraint(f"must be one of {', '.join(known)}, got {value!r}", where=option)
            if self.kind not in JSON_KINDS:
                raise BadConstraint(f"needs {' or '.join(JSON_KINDS)}, not {self.kind}", where=option)
        size = len(self.spec.encode("utf-8", "surrogatepass"))
        if not self.spec:
            raise BadConstraint("is empty", where=self.kind)
        if size > MAX_SPEC_BYTES:
            raise BadConstraint(f"has {size} bytes; at most {MAX_SPEC_BYTES} are allowed", where=self.kind)
        return self
