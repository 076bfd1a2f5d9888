"""What a generation was held to, in a word and in full. Knows no way of showing it."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_dsl.ir import Gen, Select


class Constraint(NamedTuple):
    """kind: int, regex, json_schema, a type's name, ...; text: the pattern, schema or options, "" where the
    kind says it all."""

    kind: str
    text: str = ""


def constraint_of(node: Gen[Any] | Select | None) -> Constraint | None:
    """None where the text is free."""
    if node is None:
        return None
    if isinstance(node, Select):
        return Constraint("select", " | ".join(node.choices))
    held = next(
        (
            Constraint(word, value)
            for word in ("regex", "json_schema", "ebnf", "structural_tag")
            if (value := getattr(node, word)) is not None
        ),
        None,
    )
    if held is None and node.choices is not None:
        held = Constraint("choices", " | ".join(node.choices))
    if node.typed is not None:
        return Constraint(node.typed.name, "" if held is None else held.text)
    return Constraint(node.dtype) if node.dtype is not None and held is None else held
