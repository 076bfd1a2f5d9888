"""The constraint of a body's output, under any of the names that clients use, as one sampling parameter.

    response_format                      OpenAI's: text, json_object, json_schema, structural_tag
    regex, ebnf, json_schema, structural_tag, choices       this server's own
    guided_json, guided_regex, guided_grammar, guided_choice, structured_outputs      vLLM's

At most one of them. It knows no route, and compiles nothing: an error in a schema or grammar is reported
later, under the name that the client used (`OutputConstraint.names`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from runtime.grammar.json_schema.document import ANY_JSON as ANY_JSON
from runtime.protocol.constraint import JSON_KINDS, JSON_OPTIONS
from runtime.protocol.errors import BadRequest
from runtime.protocol.sampling import CONSTRAINT_KEYS
from runtime.server.http.ignored import remark

ANY_OBJECT = '{"type":"object"}'


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema is enforced whatever `strict` is; without one, any JSON is allowed."""

    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """type "structural_tag" has `format`, or the older `structures` and `triggers`, beside the type. Hugging
    Face's clients send a schema as the `value` of "json_object" or "json", a pattern as that of "regex"."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None
    value: str | dict[str, Any] | bool | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of the first block; json_object: true only. The rest as in vLLM: whitespace_pattern is the
    pattern of a kind of `whitespace`, disable_any_whitespace its "compact"; disable_fallback has no
    effect."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    json_object: bool | None = None

    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None


class OutputFields(msgspec.Struct, kw_only=True):
    """The fields of a body that this module reads. guided_decoding_backend has no effect: all backends allow
    the same outputs."""

    response_format: ResponseFormat | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    choices: list[str] | None = None
    whitespace: Literal["compact", "single", "flexible"] | None = None
    schema_format: Literal["assertion", "annotation"] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    structured_outputs: StructuredOutputs | None = None


_values = operator.attrgetter(*OutputFields.__struct_fields__)


class OutputConstraint(NamedTuple):
    """sampling: keys of sampling_params. names: the runtime's name of the constraint -> the client's, for
    errors."""

    sampling: dict[str, Any]
    names: dict[str, str]


_KINDS = {
    **{name: name for name in CONSTRAINT_KEYS}, "guided_json": "json_schema", "guided_regex": "regex",
    "guided_grammar": "ebnf", "guided_choice": "choices",
}  # fmt: skip
_STRUCTURED = {
    "json": "json_schema", "regex": "regex", "grammar": "ebnf", "choice": "choices",
    "structural_tag": "structural_tag",
}  # fmt: skip


def constraint_of(body: OutputFields) -> OutputConstraint:
    """The only constraint of a body. Raises BadRequest if there are several, naming them."""
    if all(value is None for value in _values(body)):
        return OutputConstraint({}, {})
    specs = list(_specifications(body))
    if len(specs) > 1:
        names = [path.partition(".")[0] for _, path, _ in specs]
        raise BadRequest(
            f"only one constraint can be used at a time, got {' and '.join(names)}", where=names[-1]
        )
    options = {name: value for name in JSON_OPTIONS if (value := getattr(body, name)) is not None}
    options |= _whitespace(body)
    if body.guided_decoding_backend:
        remark("guided_decoding_backend has no effect")
    kind, path, spec = specs[0] if specs else ("", "", None)
    if options and kind not in JSON_KINDS:
        other = f", not {path}" if path else ""
        raise BadRequest(f"needs a JSON schema or a structural tag{other}", where=next(iter(options)))
    if not specs:
        return OutputConstraint({}, {})
    return OutputConstraint({kind: spec, **options}, {kind: path} if path != kind else {})


def _specifications(body: OutputFields) -> Iterator[tuple[str, str, Any]]:
    """(kind, path in the body, specification) of all that are set."""
    for name, kind in _KINDS.items():
        if (spec := getattr(body, name)) is not None:
            yield kind, name, spec
    if body.structured_outputs is not None:
        yield from _structured(body.structured_outputs)
    if body.response_format is not None:
        yield from _formatted(body.response_format)


_WHITESPACE = {
    "": "compact",
    **dict.fromkeys((" ?", "[ ]?", "[ ]{0,1}", r"[\s]?"), "single"),
    **dict.fromkeys((r"[\n ]*", r"[\n\t ]*", r"[ \n\t]*", r"[ \t\n]*", r"\s*", r"[\s]*", r"[ \t\r\n]*",
                     r"[\n\r\t ]*", r"[ \n\r\t]*"), "flexible"),
}  # fmt: skip
"""Patterns for the whitespace between the parts of JSON -> the same as a kind of `whitespace`."""


def _whitespace(body: OutputFields) -> dict[str, str]:
    """The `whitespace` option, under any of its names. Raises BadRequest."""
    outputs = body.structured_outputs or StructuredOutputs()
    patterns = {
        "guided_whitespace_pattern": body.guided_whitespace_pattern,
        "structured_outputs.whitespace_pattern": outputs.whitespace_pattern,
    }
    kinds = {}
    for path, pattern in patterns.items():
        if pattern is None:
            continue
        if pattern not in _WHITESPACE:
            raise BadRequest(
                f"is not one of the supported patterns: {', '.join(map(repr, _WHITESPACE))}",
                where=path,
                hint='whitespace is "compact", "single" or "flexible"',
            )
        kinds[path] = _WHITESPACE[pattern]
    if outputs.disable_any_whitespace:
        kinds["structured_outputs.disable_any_whitespace"] = "compact"
    if body.whitespace is not None:
        kinds["whitespace"] = body.whitespace
    if len(set(kinds.values())) > 1:
        raise BadRequest(f"{' and '.join(kinds)} contradict each other", where=next(iter(kinds)))
    return {"whitespace": next(iter(kinds.values()))} if kinds else {}


def _structured(outputs: StructuredOutputs) -> Iterator[tuple[str, str, Any]]:
    path = "structured_outputs"
    names = [name for name in (*_STRUCTURED, "json_object") if getattr(outputs, name) is not None]
    if not names and outputs == StructuredOutputs():
        return
    if len(names) != 1:
        present = " and ".join(names) or "none"
        raise BadRequest(f"takes one of {', '.join(_STRUCTURED)}, json_object; got {present}", where=path)
    if outputs.disable_additional_properties:
        raise BadRequest(
            "is not supported",
            where=f"{path}.disable_additional_properties",
            hint="set additionalProperties: false in the schema",
        )
    [name] = names
    if name == "json_object":
        if not outputs.json_object:
            raise BadRequest("must be true, or left out", where=f"{path}.json_object")
        yield "json_schema", f"{path}.json_object", ANY_OBJECT
    else:
        yield _STRUCTURED[name], f"{path}.{name}", getattr(outputs, name)


_PARTS = {"text": (), "json_object": ("value",), "json_schema": ("json_schema",), "json": ("value",),
          "regex": ("value",), "structural_tag": ("structures", "triggers", "format")}  # fmt: skip


def _formatted(form: ResponseFormat) -> Iterator[tuple[str, str, Any]]:
    path = "response_format"
    for name in ("json_schema", "structures", "triggers", "format", "value"):
        if getattr(form, name) is not None and name not in _PARTS[form.type]:
            raise BadRequest(f"cannot be combined with type {form.type!r}", where=f"{path}.{name}")
    match form.type:
        case "regex":
            if not isinstance(form.value, str):
                raise BadRequest("must be a regular expression", where=f"{path}.value")
            yield "regex", f"{path}.value", form.value
        case "json_object" | "json" if form.value is not None:
            yield "json_schema", f"{path}.value", form.value
        case "json_object" | "json":
            yield "json_schema", path, ANY_OBJECT
        case "json_schema":
            if form.json_schema is None:
                raise BadRequest("is missing", where=f"{path}.json_schema")
            schema = form.json_schema.schema
            yield "json_schema", f"{path}.json_schema.schema", ANY_JSON if schema is None else schema
        case "structural_tag":
            yield "structural_tag", path, structural_tag(form, _PARTS[form.type])


def structural_tag(form: Any, parts: Sequence[str]) -> dict[str, Any]:
    """The structural tag of a format that has these `parts` of it as fields."""
    fields = {name: value for name in parts if (value := getattr(form, name)) is not None}
    return {"type": "structural_tag", **fields}
