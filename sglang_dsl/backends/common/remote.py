"""What the backends for other providers' APIs share: names of sampling parameters, constraints as structured
output, and how a reply is read. Knows no API's wire format.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from runtime.formats.json_stream import JsonStream, JsonStreamError
from runtime.protocol.constraint import JSON_OPTIONS as JSON_WORDS
from runtime.protocol.constraint import Constraint
from sglang_dsl.backends.base import Call, Completion, Delta
from sglang_dsl.errors import Unsupported
from sglang_dsl.ir.typed import json_in, unfenced
from sglang_dsl.patterns import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR

ANY_JSON = "$$ANY$$"
"""The json_schema that stands for any JSON value."""


def renamed(sampling: Mapping[str, Any], takes: Mapping[str, str], backend: str) -> dict[str, Any]:
    """Sampling parameters under an API's names. `takes`: our name -> the API's. Raises Unsupported for
    parameters that are not in it."""
    if unknown := sorted(name for name in sampling if name not in takes):
        raise Unsupported(
            f"{backend} does not take {', '.join(unknown)}",
            backend=backend,
            hint=f"it supports {', '.join(sorted(takes))}; leave the others out for this backend",
        )
    return {takes[name]: value for name, value in sampling.items()}


# -- constraints as structured output ------------------------------------------------------------------------

# What the language's own dtypes mean, for APIs that know JSON schemas and no regular expressions, and for
# models that wrote something else.
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

    schema   what is asked for
    wrapped  whether the value stands in the object's field "value", because it is no object itself
    plain    whether that value is a string whose text, without quotes, is what was wanted
    strict   whether every object of the schema names all its properties as required and allows no others,
             which is what "strict" structured output takes
    name     what the schema is called in a request
    """

    schema: dict[str, Any]
    wrapped: bool
    plain: bool
    strict: bool
    name: str = "reply"

    def read(self, text: str, constraint: Constraint) -> str:
        """The text wanted, from the reply: a fence or prose around the one JSON value is left out. Raises
        Misfit where the reply is not what was asked for."""
        misfit = None
        found = json_in(text)
        if self.wrapped and found is not None:
            value = json.loads(found)
            if isinstance(value, dict) and _FIELD in value:
                value = value[_FIELD]
                wanted = str(value) if self.plain else json.dumps(value, ensure_ascii=False)
                if (fault := fault_of(constraint, wanted)) is None:
                    return wanted
                misfit = Misfit(fault, wanted)
            elif self.plain and isinstance(value, str):
                found = value
        # Some APIs send the value without the object that was asked for around it.
        try:
            return fitted(constraint, text if found is None else found).strip()
        except Misfit as error:
            raise misfit or Misfit(str(error), text) from None


def json_form(constraint: Constraint) -> JsonForm | None:
    """None for what no JSON schema says: other regexes, grammars, structural tags."""
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
        # References into the schema ("#/$defs/...") keep their meaning: definitions move to the new root.
        own = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        held: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        schema = {
            "type": "object",
            "properties": {_FIELD: own},
            "required": [_FIELD],
            "additionalProperties": False,
            **held,
        }
    return JsonForm(schema, wrapped, plain, is_strict(schema))


def is_strict(schema: Any) -> bool:
    """Whether every object in it requires all the properties it names and allows no others."""
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
    """A reply is not what its constraint requires, and why. `text`: the reply, as far as it can be shown
    without what only the API asks for around it."""

    def __init__(self, fault: str, text: str) -> None:
        super().__init__(fault)
        self.text = text


def fitted(constraint: Constraint, text: str) -> str:
    """A reply as the constraint wants it: as it is, or the one JSON value in it. Raises Misfit."""
    fault = fault_of(constraint, text)
    if fault is None:
        return text
    found = json_in(text) if constraint.kind == "json_schema" else unfenced(text)
    if found is not None and found != text and (fault := fault_of(constraint, found)) is None:
        return found
    raise Misfit(fault, text)


def fault_of(constraint: Constraint, text: str) -> str | None:
    """Why `text` is not what the constraint wants, as far as can be said without the runtime; None where it
    is. Schemas are looked at with jsonschema_rs or jsonschema, where one is installed."""
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
    """Whether a package that looks at schemas is installed."""
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
    """Where a value breaks a schema, and how. None also where no package can tell."""
    if _installed("jsonschema_rs"):
        fast = importlib.import_module("jsonschema_rs")
        with suppress(fast.ValidationError):  # a pattern of Python's own, say: jsonschema knows those
            read = _as_the_grammars_read_it(schema)

            def fault(formats: bool) -> Any:
                validator = fast.validator_for(read, offline=True, validate_formats=formats)
                return next(validator.iter_errors(value), None)

            # Drafts differ in whether formats are asserted: what fits either way is no fault.
            first = fault(formats=False)
            if first is None or fault(formats=True) is None:
                return None
            return first.instance_path, first.message
    if not _installed("jsonschema"):
        return None
    # Not the first choice: loading it takes seconds where all of its formats are installed.
    slow = importlib.import_module("jsonschema")
    kind = slow.validators.validator_for(schema, default=slow.Draft202012Validator)
    found = None
    with suppress(re.error):  # a pattern that neither of them knows
        found = slow.exceptions.best_match(kind(schema).iter_errors(value))
    return None if found is None else (found.absolute_path, found.message)


_DATA = frozenset({"const", "default", "enum", "examples"})
_OF_NAMES = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)


def _as_the_grammars_read_it(schema: Any) -> Any:
    """For jsonschema_rs, which asserts the content of texts in drafts 6 and 7, an annotation to the engine's
    grammars, and refuses a schema of draft 4 with 1.0 for 1."""
    match schema:
        case list():
            return [_as_the_grammars_read_it(one) for one in schema]
        case dict():
            read = {}
            for name, value in schema.items():
                if name in _DATA:
                    read[name] = value
                elif name in _OF_NAMES and isinstance(value, dict):  # any name may stand in it
                    read[name] = {key: _as_the_grammars_read_it(one) for key, one in value.items()}
                elif name not in ("contentEncoding", "contentMediaType"):
                    read[name] = _as_the_grammars_read_it(value)
            return read
        case float() if schema.is_integer():
            return int(schema)
        case _:
            return schema


class Shaped:
    """How a call's constraint is asked for, and how its replies are read. A reply that does not fit its
    constraint stays as it is, and its meta says why under "invalid": that is the error of its variable. A
    reply that was taken out of a fence or of prose is whole under "reply".

    form     the JSON schema to ask for; None: the API enforces the constraint itself, or there is none
    opening  what the request writes for the model at the end of its prompt
    """

    opening = ""

    def __init__(self, call: Call, form: JsonForm | None) -> None:
        self.form = form
        self._constraint = call.constraint
        self._free = form is None
        # A stream: what came, what of it was shown, and the object that it begins with until that is over.
        self._came: list[str] = []
        self._shown, self._over = "", form is not None and form.wrapped
        self._object: JsonStream | None = None
        self._read = 0
        # Stop texts are about the value, not the JSON around it: a wrapped value is cut here.
        self._stops = call.sampling.stop if form is not None and form.wrapped else ()

    def stops(self, stops: Sequence[str]) -> list[str]:
        """Of the call's stop texts, those that the API is asked for."""
        return [] if self._stops else list(stops)

    def completion(self, texts: Sequence[str], metas: Sequence[dict[str, Any]]) -> Completion:
        """The completion for whole replies."""
        read = [self._whole(text, dict(meta)) for text, meta in zip(texts, metas, strict=True)]
        samples = [meta for _, meta in read]
        meta = samples[0] if len(samples) == 1 else {**samples[0], "samples": samples}
        return Completion(tuple(text for text, _ in read), meta)

    def piece(self, text: str) -> str:
        """What of a streamed piece can be shown now: an object that the reply begins with, as it comes. What
        stands in a wrapper, a fence or prose is known when the reply is whole."""
        if self._free:
            return text
        self._came.append(text)
        if not self._shown:
            text = text.lstrip()
            self._over |= bool(text) and text[0] != "{"
        if self._over or not text:
            return ""
        if self._object is None:
            self._object = JsonStream(strings=False)
        try:
            self._object.feed(text)
        except JsonStreamError as error:
            self._over = True
            text = text[: error.offset - self._read] if self._object.complete else ""
        self._read += len(text)
        if self._object.complete:
            self._over, text = True, text.rstrip()
        self._shown += text
        return text

    def last(self, meta: dict[str, Any]) -> Delta:
        """The end of the stream: what is left to show."""
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
        """The text wanted, of a whole reply. Raises Misfit."""
        if self.form is None or self._constraint is None:
            return text
        value = self.form.read(text, self._constraint)
        ends = [at for stop in self._stops if (at := value.find(stop)) >= 0]
        return value[: min(ends)] if ends else value


class Leading(Shaped):
    """A number, bool or string read from the start of a completion model's text, which no constraint holds.
    A string's opening quote is written for the model. Stop texts of blanks, which would end the text before
    the value begins, are left out."""

    KINDS: ClassVar[frozenset[str]] = frozenset({REGEX_INT, REGEX_FLOAT, REGEX_BOOL, REGEX_STR})

    def __init__(self, call: Call, constraint: Constraint) -> None:
        super().__init__(call, None)
        self._asked, self._free = constraint, False
        self._quote = constraint.spec == REGEX_STR
        self.opening = '"' if self._quote else ""

    def stops(self, stops: Sequence[str]) -> list[str]:
        own = ['"'] if self._quote else []
        return [*own, *(stop for stop in stops if stop.strip())]

    def piece(self, text: str) -> str:
        self._came.append(text)
        return ""

    def read(self, text: str) -> str:
        if self._quote:
            return _quoted(text)
        found = re.match(self._asked.spec, text.lstrip())
        if found is None:
            raise Misfit(_NOT_A[self._asked.spec], text)
        return found[0].rstrip()


_UP_TO_A_QUOTE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


def _quoted(text: str) -> str:
    """The JSON string at the start of `text`, whose opening quote the request has written. What a JSON string
    cannot contain (line breaks, a backslash that escapes nothing) is escaped; a second opening quote is left
    out."""
    lead = text.lstrip()
    found = _UP_TO_A_QUOTE.match(lead[1:] if lead.startswith('"') and len(lead) > 1 else text)
    content = "" if found is None else found[0]
    if re.fullmatch(REGEX_STR, f'"{content}"'):
        return f'"{content}"'
    try:
        value = json.loads(f'"{content}"', strict=False)
    except ValueError:
        value = content
    return json.dumps(value, ensure_ascii=False)


def check_spec_only(constraint: Constraint, backend: str) -> None:
    """Raise Unsupported if the constraint has more than its kind and text, which no API takes."""
    fields = [name for name in JSON_WORDS if getattr(constraint, name) is not None]
    if fields:
        raise Unsupported(
            f"{backend} does not take {', '.join(fields)} together with a constraint",
            backend=backend,
            hint="leave it out for this backend",
        )


def form_for(call: Call, backend: str, hint: str = "use json_schema or choices") -> JsonForm | None:
    """The JSON schema that asks an API for the call's constraint; None without one. Raises Unsupported."""
    if call.constraint is None:
        return None
    check_spec_only(call.constraint, backend)
    form = json_form(call.constraint)
    if form is None:
        raise Unsupported(
            f"{backend} cannot enforce {call.constraint.kind} {call.constraint.spec:.60}",
            backend=backend,
            hint=hint,
        )
    if not form.strict and not can_check_schemas():
        raise Unsupported(
            f"{backend} does not guarantee this schema, and without jsonschema-rs it cannot be checked",
            backend=backend,
            hint="make every property required and additionalProperties false, or pip install jsonschema-rs",
        )
    return form
