"""Constraints as structured output of other providers' APIs. Knows no API's wire format."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from runtime.formats.json_stream import JsonStream, JsonStreamError
from runtime.protocol.constraint import Constraint
from sglang_dsl.backends.base import Call, Completion, Delta
from sglang_dsl.ir.typed import json_in, unfenced
from sglang_dsl.patterns import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR

ANY_JSON = "$$ANY$$"
"""The json_schema for any JSON value."""

# The language's dtypes as JSON schemas, for APIs without regular expressions, and errors for other replies.
_BY_PATTERN: dict[str, dict[str, Any]] = {
    REGEX_INT: {"type": "integer"},
    REGEX_FLOAT: {"type": "number"},
    REGEX_BOOL: {"type": "string", "enum": ["True", "False"]},
    REGEX_STR: {"type": "string"},
}
_NOT_A: dict[str, str] = {
    REGEX_INT: "it is not a whole number",
    REGEX_FLOAT: "it is not a number",
    REGEX_BOOL: "it is neither True nor False",
    REGEX_STR: "it is not a string in quotes",
}
_FIELD = "value"


@dataclass(frozen=True, slots=True)
class JsonForm:
    """A constraint as the JSON schema of an object, the only root that most APIs take.

    schema   the schema that is requested
    wrapped  whether the value is in the object's field "value", because it is no object itself
    plain    whether that value is a string whose content, without quotes, is the text
    strict   whether every object of the schema requires all its properties and allows no others, as "strict"
             structured output needs
    name     the name of the schema in a request
    """

    schema: dict[str, Any]
    wrapped: bool
    plain: bool
    strict: bool
    name: str = "reply"

    def read(self, text: str, constraint: Constraint) -> str:
        """The text of the reply, without a fence or prose around the one JSON value. Raises Misfit if the
        reply does not fit the constraint."""
        misfit = None
        json_text = json_in(text)
        if self.wrapped and json_text is not None:
            value = json.loads(json_text)
            if isinstance(value, dict) and _FIELD in value:
                value = value[_FIELD]
                content = str(value) if self.plain else json.dumps(value, ensure_ascii=False)
                if (fault := fault_of(constraint, content)) is None:
                    return content
                misfit = Misfit(fault, content)
            elif self.plain and isinstance(value, str):
                json_text = value
        # Some APIs send the value without the object around it.
        try:
            return fitted(constraint, text if json_text is None else json_text).strip()
        except Misfit as error:
            raise misfit or Misfit(str(error), text) from None


def json_form(constraint: Constraint) -> JsonForm | None:
    """None if no JSON schema expresses it: other regexes, grammars, structural tags."""
    match constraint.kind:
        case "json_schema":
            schema: Any = {} if constraint.spec == ANY_JSON else json.loads(constraint.spec)
            if not isinstance(schema, dict):
                return None if schema is False else _form({}, wrapped=True, plain=False)
            return _form(schema, wrapped=schema.get("type") != "object", plain=False)
        case "choices":
            return _form({"type": "string", "enum": json.loads(constraint.spec)}, wrapped=True, plain=True)
        case "regex" if constraint.spec in _BY_PATTERN:
            plain = constraint.spec == REGEX_BOOL
            return _form(_BY_PATTERN[constraint.spec], wrapped=True, plain=plain)
        case _:
            return None


def _form(schema: dict[str, Any], *, wrapped: bool, plain: bool) -> JsonForm:
    if wrapped:
        # Definitions move to the new root, so that references ("#/$defs/...") stay valid.
        value_schema = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        held: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        schema = {
            "type": "object",
            "properties": {_FIELD: value_schema},
            "required": [_FIELD],
            "additionalProperties": False,
            **held,
        }
    return JsonForm(schema, wrapped, plain, is_strict(schema))


def is_strict(schema: Any) -> bool:
    """Whether every object in it requires all its properties and allows no others."""
    if isinstance(schema, list):
        return all(map(is_strict, schema))
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        if schema.get("additionalProperties") is not False or not isinstance(properties, dict):
            return False
        if set(schema.get("required", ())) != set(properties):
            return False
    return all(map(is_strict, schema.values()))


class Misfit(ValueError):
    """A reply does not fit its constraint; the message says why. `text`: the reply, without the object that
    only the API needs if possible."""

    def __init__(self, fault: str, text: str) -> None:
        super().__init__(fault)
        self.text = text


def fitted(constraint: Constraint, text: str) -> str:
    """The reply, or the one JSON value in it, whichever fits the constraint. Raises Misfit."""
    fault = fault_of(constraint, text)
    if fault is None:
        return text
    value = json_in(text) if constraint.kind == "json_schema" else unfenced(text)
    if value is not None and value != text and (fault := fault_of(constraint, value)) is None:
        return value
    raise Misfit(fault, text)


def fault_of(constraint: Constraint, text: str) -> str | None:
    """Why `text` does not fit the constraint; None if it fits, or nothing here can check it."""
    match constraint.kind:
        case "regex" if re.fullmatch(constraint.spec, text) is None:
            return _NOT_A.get(constraint.spec) or f"it does not match {constraint.spec:.80}"
        case "choices" if text not in (options := json.loads(constraint.spec)):
            return f"it is not one of {', '.join(map(repr, options)):.200}"
        case "json_schema":
            return _schema_fault(constraint.spec, text)
        case _:
            return None


def can_check_schemas() -> bool:
    return _installed("jsonschema_rs") or _installed("jsonschema")


def _installed(name: str) -> bool:
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


def _schema_fault(spec: str, text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    if spec == ANY_JSON:
        return None
    try:
        fault = _first_fault(json.loads(spec), value)
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair, which is no character"
    except RecursionError:  # a schema too deep for these packages
        return None
    if fault is None:
        return None
    return f"{'.'.join(map(str, fault[0])) or 'the whole'}: {fault[1]:.200}"


def _first_fault(schema: Any, value: Any) -> tuple[Sequence[str | int], str] | None:
    """The path and message of the first violation of a schema; None also if no package can check it."""
    if _installed("jsonschema_rs"):
        fast = importlib.import_module("jsonschema_rs")
        with suppress(fast.ValidationError):  # such as a pattern of Python's: jsonschema knows those
            from runtime.formats.tools.schema import rewritten

            read = rewritten(schema, _as_the_grammars_read_it)

            def fault(formats: bool) -> Any:
                validator = fast.validator_for(read, offline=True, validate_formats=formats)
                return next(validator.iter_errors(value), None)

            # Drafts differ in whether formats are asserted: a value that fits either way is valid.
            first = fault(formats=False)
            if first is None or fault(formats=True) is None:
                return None
            return first.instance_path, first.message
    if not _installed("jsonschema"):
        return None
    # Not the first choice: loading it takes seconds if all of its formats are installed.
    slow = importlib.import_module("jsonschema")
    kind = slow.validators.validator_for(schema, default=slow.Draft202012Validator)
    worst = None
    with suppress(re.error):  # a pattern that neither of them knows
        worst = slow.exceptions.best_match(kind(schema).iter_errors(value))
    return None if worst is None else (worst.absolute_path, worst.message)


def _as_the_grammars_read_it(schema: dict[str, Any]) -> dict[str, Any]:
    """For jsonschema_rs, which asserts contentEncoding in drafts 6 and 7, unlike the engine's grammars, and
    refuses a schema of draft 4 with 1.0 for 1."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in schema.items()
        if name not in ("contentEncoding", "contentMediaType")
    }


class Shaped:
    """How a call's constraint is requested, and how its replies are read. A reply that does not fit its
    constraint stays as it is, and the reason is in its meta as "invalid", the error of its variable. If the
    text was taken out of a fence or prose, meta["reply"] has the whole reply.

    form     the JSON schema to request; None: the API enforces the constraint itself, or there is none
    opening  text that the request adds to the prompt for the model
    """

    opening = ""

    def __init__(self, call: Call, form: JsonForm | None) -> None:
        self.form = form
        self._constraint = call.constraint
        self._free = form is None
        # A stream: its pieces, the text shown so far, and the object that it begins with until that is
        # complete.
        self._came: list[str] = []
        self._shown, self._complete = "", form is not None and form.wrapped
        self._object: JsonStream | None = None
        self._read = 0
        # Stop strings apply to the value, not the JSON around it: a wrapped value is cut here.
        self._stops = call.sampling.stop if form is not None and form.wrapped else ()

    def stops(self, stops: Sequence[str]) -> list[str]:
        """Those of the call's stop strings that are sent to the API."""
        return [] if self._stops else list(stops)

    def completion(self, texts: Sequence[str], metas: Sequence[dict[str, Any]]) -> Completion:
        read = [self._whole(text, dict(meta)) for text, meta in zip(texts, metas, strict=True)]
        samples = [meta for _, meta in read]
        meta = samples[0] if len(samples) == 1 else {**samples[0], "samples": samples}
        return Completion(tuple(text for text, _ in read), meta)

    def piece(self, text: str) -> str:
        """The part of a streamed piece that can be shown now: an object at the begin of the reply. A value in
        a wrapper, a fence or prose is known when the reply is complete."""
        if self._free:
            return text
        self._came.append(text)
        if not self._shown:
            text = text.lstrip()
            self._complete |= bool(text) and text[0] != "{"
        if self._complete or not text:
            return ""
        if self._object is None:
            self._object = JsonStream(strings=False)
        try:
            self._object.feed(text)
        except JsonStreamError as error:
            self._complete = True
            text = text[: error.offset - self._read] if self._object.complete else ""
        self._read += len(text)
        if self._object.complete:
            self._complete, text = True, text.rstrip()
        self._shown += text
        return text

    def last(self, meta: dict[str, Any]) -> Delta:
        """The rest of the text at the end of the stream."""
        if self._free:
            return Delta("", meta)
        reply = "".join(self._came)
        text, meta = self._whole(reply, dict(meta))
        if not text.startswith(self._shown):
            text = reply.lstrip()
        return Delta(text[len(self._shown) :], meta)

    def _whole(self, text: str, meta: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if self._free:
            return text, meta
        try:
            value = self.read(text)
        except Misfit as error:
            return error.text, {**meta, "invalid": str(error)}
        return value, meta if json_in(text) in (None, text.strip()) else {**meta, "reply": text}

    def read(self, text: str) -> str:
        """The text of a whole reply. Raises Misfit."""
        if self.form is None or self._constraint is None:
            return text
        value = self.form.read(text, self._constraint)
        ends = [at for stop in self._stops if (at := value.find(stop)) >= 0]
        return value[: min(ends)] if ends else value


class Leading(Shaped):
    """A number, bool or string read from the start of a completion model's unconstrained text. A string's
    opening quote is part of the prompt. Stop strings of blanks, which would end the text before the value,
    are left out."""

    KINDS: ClassVar[frozenset[str]] = frozenset({REGEX_INT, REGEX_FLOAT, REGEX_BOOL, REGEX_STR})

    def __init__(self, call: Call, constraint: Constraint) -> None:
        super().__init__(call, None)
        self._pattern, self._free = constraint, False
        self._quote = constraint.spec == REGEX_STR
        self.opening = '"' if self._quote else ""

    def stops(self, stops: Sequence[str]) -> list[str]:
        quotes = ['"'] if self._quote else []
        return [*quotes, *(stop for stop in stops if stop.strip())]

    def piece(self, text: str) -> str:
        self._came.append(text)
        return ""

    def read(self, text: str) -> str:
        if self._quote:
            return _quoted(text)
        match = re.match(self._pattern.spec, text.lstrip())
        if match is None:
            raise Misfit(_NOT_A[self._pattern.spec], text)
        return match[0].rstrip()


_UP_TO_A_QUOTE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


def _quoted(text: str) -> str:
    """The JSON string at the start of `text`, whose opening quote was part of the prompt. Characters that a
    JSON string cannot contain are escaped; a second opening quote is left out."""
    lead = text.lstrip()
    match = _UP_TO_A_QUOTE.match(lead[1:] if lead.startswith('"') and len(lead) > 1 else text)
    content = "" if match is None else match[0]
    if re.fullmatch(REGEX_STR, f'"{content}"'):
        return f'"{content}"'
    try:
        value = json.loads(f'"{content}"', strict=False)
    except ValueError:
        value = content
    return json.dumps(value, ensure_ascii=False)
