"""Types of outlines (outlines.types.email, Regex, JsonSchema, CFG, either(...), ...) as gen's arguments.

Loaded when a generation is given one, by which outlines is there.
"""

from __future__ import annotations

from outlines.types.dsl import CFG, JsonSchema, Term, to_regex

from sglang_dsl.errors import BadProgram


def form_of(term: object) -> dict[str, str]:
    """gen's keyword argument for it. Raises BadProgram."""
    match term:
        case JsonSchema(schema=str(schema), whitespace_pattern=None):
            return {"json_schema": schema}
        case CFG(definition=grammar):
            return {"ebnf": grammar}
        case Term():
            try:
                return {"regex": to_regex(term)}
            except (TypeError, NotImplementedError) as error:
                raise BadProgram(
                    f"{type(term).__name__} of outlines cannot be a regular expression: {error}"
                ) from error
        case _:
            raise BadProgram(f"gen takes types of outlines, and {type(term).__name__} is not one")
