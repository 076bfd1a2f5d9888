"""What a body asks its output to match, under any of the names clients use, as one sampling word.

    response_format                      OpenAI's: text, json_object, json_schema, structural_tag
    regex, ebnf, json_schema, structural_tag, choices       this server's own
    guided_json, guided_regex, guided_grammar, guided_choice, structured_outputs      the same, as clients of
                                         other servers spell it

At most one of them. It knows no route, and compiles nothing: what is wrong inside of a schema or grammar is
reported later, under the name the client used (`Asked.names`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from runtime.protocol.constraint import JSON_KINDS, JSON_WORDS
from runtime.protocol.errors import BadRequest
from runtime.server.http.ignored import remark

ANY_JSON = "$$ANY$$"
"""json_schema of any JSON value (see runtime.grammar)."""
ANY_OBJECT = '{"type":"object"}'


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema is kept whatever `strict` says; without one, any JSON is."""

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
    """Exactly one of the first block; json_object: true only. The rest as vLLM has it: whitespace_pattern is
    the pattern of one of the kinds of `whitespace`, disable_any_whitespace is its "compact"; there is nothing
    to fall back to, so disable_fallback changes nothing."""

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
    """The fields of a body that this module reads. guided_decoding_backend has no effect: who keeps a
    constraint changes nothing of what it allows."""

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


class Asked(NamedTuple):
    """sampling: keys of sampling_params. names: the runtime's name of the constraint -> the client's, for
    errors."""

    sampling: dict[str, Any]
    names: dict[str, str]


_SAME = ("regex", "ebnf", "json_schema", "structural_tag", "choices")
_OTHERS = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "ebnf",
    "guided_choice": "choices",
}  # fmt: skip
_KINDS = (*((name, name) for name in _SAME), *_OTHERS.items())
_STRUCTURED = {
    "json": "json_schema", "regex": "regex", "grammar": "ebnf", "choice": "choices",
    "structural_tag": "structural_tag",
}  # fmt: skip


def asked(body: OutputFields) -> Asked:
    """The one constraint of a body. Raises BadRequest where there are several, naming them."""
    if all(value is None for value in _values(body)):
        return Asked({}, {})
    found = [one for one in _found(body) if one[2] is not None]
    if len(found) > 1:
        names = " and ".join(place.partition(".")[0] for _, place, _ in found)
        raise BadRequest(
            f"only one constraint can be used at a time, got {names}", where=found[-1][1].partition(".")[0]
        )
    beside = {word: value for word in JSON_WORDS if (value := getattr(body, word)) is not None}
    beside |= _whitespace(body)
    if body.guided_decoding_backend:
        remark("guided_decoding_backend has no effect")
    if not found:
        for word in beside:
            raise BadRequest("needs a JSON schema or a structural tag", where=word)
        return Asked({}, {})
    [(kind, place, spec)] = found
    if kind not in JSON_KINDS:
        for word in beside:
            raise BadRequest(f"needs a JSON schema or a structural tag, not {place}", where=word)
    return Asked({kind: spec, **beside}, {kind: place} if place != kind else {})


def _found(body: OutputFields) -> Iterator[tuple[str, str, Any]]:
    """(kind, where the client wrote it, specification) of all that is set; the last may be None."""
    for name, kind in _KINDS:
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
"""Patterns for the blanks between the parts of JSON -> the kind of `whitespace` that is meant."""


def _whitespace(body: OutputFields) -> dict[str, str]:
    """The `whitespace` that is asked for in vLLM's words. Raises BadRequest."""
    given = body.structured_outputs
    patterns = {"guided_whitespace_pattern": body.guided_whitespace_pattern}
    if given is not None:
        patterns["structured_outputs.whitespace_pattern"] = given.whitespace_pattern
    kinds = {}
    for where, pattern in patterns.items():
        if pattern is None:
            continue
        if pattern not in _WHITESPACE:
            raise BadRequest(
                f"is not one of the supported patterns: {', '.join(map(repr, _WHITESPACE))}",
                where=where,
                hint='whitespace is "compact", "single" or "flexible"',
            )
        kinds[where] = _WHITESPACE[pattern]
    if given is not None and given.disable_any_whitespace:
        kinds["structured_outputs.disable_any_whitespace"] = "compact"
    if body.whitespace is not None:
        kinds["whitespace"] = body.whitespace
    if len(set(kinds.values())) > 1:
        raise BadRequest(f"{' and '.join(kinds)} contradict each other", where=next(iter(kinds)))
    return {"whitespace": next(iter(kinds.values()))} if kinds else {}


def _structured(given: StructuredOutputs | None) -> Iterator[tuple[str, str, Any]]:
    if given is None:
        return
    where = "structured_outputs"
    found = [name for name in (*_STRUCTURED, "json_object") if getattr(given, name) is not None]
    if not found and given == StructuredOutputs():
        return
    if len(found) != 1:
        got = f"got {' and '.join(found)}" if found else "got none"
        raise BadRequest(f"takes one of {', '.join(_STRUCTURED)}, json_object; {got}", where=where)
    if given.disable_additional_properties:
        raise BadRequest(
            "is not supported",
            where=f"{where}.disable_additional_properties",
            hint="set additionalProperties: false in the schema",
        )
    [name] = found
    if name == "json_object":
        if not given.json_object:
            raise BadRequest("must be true, or left out", where=f"{where}.json_object")
        yield "json_schema", f"{where}.json_object", ANY_OBJECT
    else:
        yield _STRUCTURED[name], f"{where}.{name}", getattr(given, name)


_PARTS = {"text": (), "json_object": ("value",), "json_schema": ("json_schema",), "json": ("value",),
          "regex": ("value",), "structural_tag": ("structures", "triggers", "format")}  # fmt: skip


def _formatted(form: ResponseFormat) -> Iterator[tuple[str, str, Any]]:
    where = "response_format"
    for name in ("json_schema", "structures", "triggers", "format", "value"):
        if getattr(form, name) is not None and name not in _PARTS[form.type]:
            raise BadRequest(f"cannot be combined with type {form.type!r}", where=f"{where}.{name}")
    match form.type:
        case "regex":
            if not isinstance(form.value, str):
                raise BadRequest("must be a regular expression", where=f"{where}.value")
            yield "regex", f"{where}.value", form.value
        case "json_object" | "json" if form.value is not None:
            yield "json_schema", f"{where}.value", form.value
        case "json_object" | "json":
            yield "json_schema", where, ANY_OBJECT
        case "json_schema":
            if form.json_schema is None:
                raise BadRequest("is missing", where=f"{where}.json_schema")
            schema = form.json_schema.schema
            yield "json_schema", f"{where}.json_schema.schema", ANY_JSON if schema is None else schema
        case "structural_tag":
            facts = {name: getattr(form, name) for name in _PARTS[form.type]}
            given = {name: value for name, value in facts.items() if value is not None}
            yield "structural_tag", where, {"type": "structural_tag", **given}
